"""The main job: convert a model (file, bytes or module) to a verified ncnn net, for Python and the command line."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from onnx2ncnn_opt.api.dynamic_cost import cost_of_dynamic
from onnx2ncnn_opt.api.equal_sizes import EqualSizes, equal_sizes
from onnx2ncnn_opt.api.lower import NOT_RUN, Conversion, lower
from onnx2ncnn_opt.api.options import ConvertOptions, takes_options
from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.onnx.edit.append import append_decoding
from onnx2ncnn_opt.onnx.read.exported import pytorch_kind, reference
from onnx2ncnn_opt.param.splits import count_layers
from onnx2ncnn_opt.progress import announce
from onnx2ncnn_opt.runtime.ahead import begin
from onnx2ncnn_opt.runtime.ort import OrtRunner


@takes_options
def convert(model: Any, options: ConvertOptions) -> Conversion:
    """Convert an ONNX model to an ncnn net, and verify that both compute the same.

    The options are the fields of `ConvertOptions` as arguments, or one such object; `lower` explains the model.

    1. Give dynamic dimensions that have to be equal one name. 2. Lower the model, and run the passes. 3. Write
    PREFIX.ncnn.param, .bin and .json, or temporary files without a `prefix`. 4. Estimate fp16, set the masks that the
    net needs, and verify the files. If this fails, the files are removed unless `keep_failed`; `report` of the result
    says why, and `save` raises. 5. Compute the cost of dynamic dimensions, and with `benchmark` measure the latency.

    Without a `verification`, nothing runs: steps 1 and 4 are skipped. Raises the errors of `lower`, RunError if ONNX
    Runtime refuses the model or the inputs, and VerificationError if there is nothing to compare the net with.
    """
    is_verified = options.verification is not None
    if options.custom and is_verified:
        raise UsageError(f"custom operators need a conversion without verification: {NOT_RUN}")
    # torch.export says which sizes are equal
    tied = _tied(model, options) if is_verified and not pytorch_kind(model) else None
    lowered = lower(model, replace(options, shapes=tied.shapes, loaded=tied.model) if tied else options)
    conversion, layers = replace(lowered, equal=tied.names if tied else ()), count_layers(lowered.graph)
    if is_verified or options.prefix is not None:
        conversion = conversion.finished(options)
    announce("looking for the cost of dynamic dimensions")
    ran_at = conversion.report.sizes[0] if conversion.report else None
    return replace(conversion, cost=tuple(cost_of_dynamic(conversion, layers=layers, ran_at=ran_at)))


def _tied(model: Any, options: ConvertOptions) -> EqualSizes:
    """Find dynamic dimensions that have to be equal; return the shapes with one name for them, and their old names."""
    announce("looking for equal sizes")
    shapes, append, outputs = options.shapes, options.append, options.outputs
    source = reference(model) if append is None else append_decoding(model, append, shapes).model
    tied = equal_sizes(source, shapes=shapes, values=options.values, outputs=outputs)
    if isinstance(source, Path) and not outputs:  # the session that verification needs if the net gets no tail
        begin(partial(OrtRunner, threads=None), source)
    return tied
