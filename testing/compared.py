"""Small models, converted and held against ONNX Runtime in the real ncnn."""

import atexit
import shutil
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnx2ncnn_opt.api.lower import Conversion, Files, lower
from onnx2ncnn_opt.manifest import Manifest, read_manifest
from onnx2ncnn_opt.param.binary import write_weights
from onnx2ncnn_opt.param.text import format_param
from onnx2ncnn_opt.runtime.base import Feed, Fetch
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner
from onnx2ncnn_opt.runtime.ort import OrtRunner
from testing.arrays import difference
from testing.worker import WORKER

Arrays = Mapping[str, Any]


def conversions(model: onnx.ModelProto) -> list[Conversion]:
    """Return the model's conversions without and with passes; one if the passes change nothing."""
    options: dict[str, Any] = {"tail": "never", "quantized": "float"}
    plain, optimized = lower(model, optimize=False, **options), lower(model, **options)
    return [plain] if _content(plain) == _content(optimized) else [plain, optimized]


def _content(conversion: Conversion) -> tuple[str, list[bytes]]:
    blocks = (weight for layer in conversion.graph for _, weight in layer.weights.stored_items())
    return format_param(conversion.graph), [weight.array.tobytes() for weight in blocks]


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Arrays,
    constants: Arrays | None = None,
    *,
    opset: int = 17,
    outputs: Sequence[str] = ("y",),
    dtype: Any = np.float32,
) -> onnx.ModelProto:
    """Return a model of these nodes; inputs and constants (which become initializers) are named arrays."""
    elem = helper.np_dtype_to_tensor_dtype
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info(n, elem(np.asarray(a).dtype), np.shape(a)) for n, a in inputs.items()],
        [helper.make_tensor_value_info(n, elem(np.dtype(dtype)), None) for n in outputs],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in (constants or {}).items()],
    )
    domains = {node.domain for node in nodes} - {""}
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@cache
def _folder() -> Path:
    """Return a folder for the nets of this process: to make and to remove one takes as long as to run a small net."""
    folder = mkdtemp(prefix="nets-")
    atexit.register(shutil.rmtree, folder)
    return Path(folder)


def written(conversion: Conversion) -> tuple[Files, Manifest]:
    """Write a net over the last one, and its manifest; return their paths, and the manifest as it is read."""
    files = Files.of(_folder() / "net")
    with files.bin.open("wb") as stream:
        write_weights(conversion.graph, stream)
    conversion.describe(files)
    return files, read_manifest(files.manifest)


def way(manifest: Manifest, feeds: Arrays) -> tuple[dict[str, Feed], list[Fetch]]:
    """Return arrays by the blobs that take them, and the blobs of the outputs."""
    given = {entry.blob: Feed(np.asarray(feeds[entry.name]), entry.batch_axis) for entry in manifest.inputs}
    return given, [Fetch(entry.blob, entry.batch_axis) for entry in manifest.outputs]


def compare(
    model: onnx.ModelProto, feeds: Arrays, *, rel: float = 1e-5, reference: onnx.ModelProto | None = None
) -> Conversion:
    """Convert, run, and assert that every output is ONNX Runtime's, up to `rel` of its largest number.

    `reference` is the model for ONNX Runtime, where that does not take the one that is converted.
    """
    conversion = lower(model, tail="never", quantized="float")
    wanted = OrtRunner((reference or model).SerializeToString()).run(dict(feeds))
    files, manifest = written(conversion)
    results = NcnnRunner(files.param, files.bin, timeout=60, worker=WORKER).run(*way(manifest, feeds))
    for entry in manifest.outputs:
        expected = np.asarray(wanted[entry.name])
        actual = results[entry.blob]
        assert difference(actual, expected, rel, of_largest=rel, absolute=0.0) == "", entry.name
    return conversion


def compare_nodes(
    nodes: Sequence[onnx.NodeProto] | onnx.NodeProto,
    inputs: Arrays,
    constants: Arrays | None = None,
    *,
    rel: float = 1e-5,
    **options: Any,
) -> Conversion:
    """Call `compare` for nodes and arrays."""
    nodes = [nodes] if isinstance(nodes, onnx.NodeProto) else nodes
    return compare(model_of(nodes, inputs, constants, **options), inputs, rel=rel)


def types(conversion: Conversion) -> list[str]:
    """Return the layer types of a net, inputs and constants left out."""
    return [layer.type for layer in conversion.graph if layer.type not in ("Input", "MemoryData", "Split")]
