"""The main job: convert a model (file, bytes or module) to a verified ncnn net, for Python and the command line."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx2ncnn_opt.api.dynamic_cost import cost_of_dynamic
from onnx2ncnn_opt.api.lower import NOT_RUN, Conversion, Files, lower
from onnx2ncnn_opt.errors import RunError, UsageError, VerificationError
from onnx2ncnn_opt.ir.features import MasksFor
from onnx2ncnn_opt.ir.releases import NEWEST
from onnx2ncnn_opt.manifest import Image
from onnx2ncnn_opt.onnx.read.append import append_decoding
from onnx2ncnn_opt.onnx.read.exported import pytorch_kind, reference
from onnx2ncnn_opt.onnx.read.given import GivenShapes
from onnx2ncnn_opt.param.splits import count_layers
from onnx2ncnn_opt.progress import announce, up_to
from onnx2ncnn_opt.verification.options import NO_ESTIMATE, Verification

if TYPE_CHECKING:
    from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
    from onnx2ncnn_opt.verification.equal_sizes import EqualSizes

# The shares of the whole work that are done after these steps.
_LOWERED, _ESTIMATED = 0.2, 0.65


def convert(  # noqa: PLR0913
    model: Any,
    prefix: str | os.PathLike[str] | None = None,
    *,
    inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    shapes: GivenShapes | None = None,
    values: Mapping[str, Any] | None = None,
    outputs: Sequence[str] = (),
    batch_axes: Mapping[str, int | None] | None = None,
    optimize: bool = True,
    skip: Collection[str] = (),
    release: int = NEWEST,
    storage: str | None = None,
    custom: Collection[str] = (),
    masks: MasksFor = True,
    images: Mapping[str, Image | str] | None = None,
    tail: str = "auto",
    append: str | None = None,
    quantized: str = "float",
    verification: Verification | None = Verification(),
    benchmark: bool = False,
    keep_failed: bool = False,
    worker: NcnnWorker | None = None,
) -> Conversion:
    """Convert an ONNX model to an ncnn net, and verify that both compute the same.

    1. Give dynamic dimensions that have to be equal one name. 2. Lower the model (`lower` explains the options), and
    run the passes. 3. Write PREFIX.ncnn.param, .bin and .json, or temporary files without a `prefix`. 4. Estimate fp16,
    set the masks that the net needs, and verify the files. If this fails, the files are removed unless `keep_failed`;
    `report` of the result says why, and `save` raises. 5. Compute the cost of dynamic dimensions, and with `benchmark`
    measure the latency.

    Without a `verification`, nothing runs: steps 1 and 4 are skipped. `worker` is an ncnn process to reuse. Raises the
    errors of `lower`, RunError if ONNX Runtime refuses the model or the inputs, and VerificationError if there is
    nothing to compare the net with.
    """
    options: dict[str, Any] = {
        "values": values,
        "outputs": outputs,
        "batch_axes": batch_axes,
        "optimize": optimize,
        "skip": skip,
        "release": release,
        "storage": storage,
        "custom": custom,
        "masks": masks,
        "images": images,
        "tail": tail,
        "quantized": quantized,
    }
    if custom and verification is not None:
        raise UsageError(f"custom operators need a conversion without verification: {NOT_RUN}")
    with up_to(_LOWERED if verification is not None else 1.0):
        is_run = verification is not None and not pytorch_kind(model)  # torch.export says which sizes are equal
        tied = _tied(model, shapes, values, outputs, append) if is_run else None
        source: dict[str, Any] = {"inputs": inputs, "dynamic_shapes": dynamic_shapes, "append": append}
        loaded, shapes = (tied.model, tied.shapes) if tied else (None, shapes)
        lowered = lower(model, shapes=shapes, loaded=loaded, **source, **options)
    conversion, layers = replace(lowered, equal=tied.names if tied else ()), count_layers(lowered.graph)
    if verification is not None:
        conversion = _verified(conversion, prefix, verification, masks, benchmark, keep_failed, worker)
    elif prefix is not None:
        conversion.save(prefix)
    announce("looking for the cost of dynamic dimensions")
    ran_at = conversion.report.sizes[0] if conversion.report else None
    return replace(conversion, cost=tuple(cost_of_dynamic(conversion, layers=layers, ran_at=ran_at, **options)))


def _tied(
    model: Any,
    shapes: GivenShapes | None,
    values: Mapping[str, Any] | None,
    outputs: Sequence[str],
    append: str | None,
) -> EqualSizes:
    """Find dynamic dimensions that have to be equal; return the shapes with one name for them, and their old names."""
    from onnx2ncnn_opt.runtime.ahead import begin
    from onnx2ncnn_opt.runtime.ort import OrtRunner
    from onnx2ncnn_opt.verification.equal_sizes import equal_sizes

    announce("looking for equal sizes")
    source = reference(model) if append is None else append_decoding(model, append, shapes).model
    tied = equal_sizes(source, shapes=shapes, values=values, outputs=outputs)
    if isinstance(source, Path) and not outputs:  # the session that verification needs if the net gets no tail
        begin(partial(OrtRunner, threads=None), source)
    return tied


def _verified(
    conversion: Conversion,
    prefix: str | os.PathLike[str] | None,
    verification: Verification,
    masks: MasksFor,
    benchmark: bool,
    keep_failed: bool,
    worker: NcnnWorker | None,
) -> Conversion:
    """Write the files, estimate fp16, and verify the net; remove the files if it is wrong."""
    files = Files.of(conversion.model.name if prefix is None else prefix)
    staging = conversion.staged_in_temporary_folder() if prefix is None else conversion.staged(prefix)
    try:
        with staging as staged:
            runs = conversion.begin_runs(verification)
            announce("estimating what fp16 does to the net")
            with up_to(_ESTIMATED):
                try:
                    conversion = conversion.estimated(verification, masks=masks, bin=staged.bin, worker=worker)
                    conversion.describe(staged)
                except RunError as error:  # verification gives a better reason, unless it can run the net
                    if masks and conversion.verify(verification, files=staged, worker=worker).ok:
                        raise RunError(NO_ESTIMATE.format(error)) from error
            announce("verifying the net against ONNX Runtime")
            report = conversion.verify(verification, files=staged, worker=worker, runs=runs)
            report = report.renamed(astuple(staged), astuple(files))
            conversion = replace(conversion, report=report)
            if benchmark and report.ok:
                announce("timing the net and ONNX Runtime")
                conversion = replace(conversion, latency=conversion.benchmark(verification, files=staged))
            if not keep_failed:
                report.check()
    except VerificationError:
        if conversion.report is None:  # nothing was compared
            raise
    return conversion
