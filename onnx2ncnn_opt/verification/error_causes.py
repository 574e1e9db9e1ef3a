"""The causes of an output's error: rounding, 16 or 8 bits, ncnn's faster kernels, or the conversion."""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from onnx2ncnn_opt import entry_points
from onnx2ncnn_opt.errors import BinError, GraphError, ParamError, RunError, UsageError
from onnx2ncnn_opt.ir.features import Feature
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.weight import Encoding
from onnx2ncnn_opt.param.files import read_net
from onnx2ncnn_opt.precision.fp16_run import Estimator
from onnx2ncnn_opt.runtime.base import Array, Feed
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.slots import Slot, feeds_of
from onnx2ncnn_opt.runtime.targets import LOCAL
from onnx2ncnn_opt.verdict.errors import DEFAULT, INFINITE
from onnx2ncnn_opt.verdict.rules import LEAST_ROUNDING, ROUNDING_MARGIN, UNKNOWN_ROUNDING, WEIGHTS_MARGIN

_LEAST = 2.0**-21  # smaller errors are always of rounding


def cause_of(
    error: float | None, mode: str, *, ok: bool, rounding: float | None, bits: float | None, kind: str = ""
) -> str:
    """Return the cause of an error: "rounding", `kind`, "kernels" (ncnn's faster kernels), or "conversion".

    `rounding` is the distance of ONNX Runtime's float32 from float64, `bits` the error from the `kind` of 16 or 8 bits;
    None if unknown. All are relative to the output's largest value.
    """
    if error is None:
        return "" if ok else kind if bits == math.inf else "conversion"
    if error == 0:
        return ""
    if rounding is not None and error <= max(ROUNDING_MARGIN * rounding, _LEAST):
        return "rounding"
    if bits is not None and error <= WEIGHTS_MARGIN * bits:
        return kind
    if ok:
        return "kernels" if mode == "fp32" else mode
    return "conversion"


def least_rounding(param: Path, bin: Path, *, vulkan: bool) -> float:
    """Return the float32 error allowed for any model, relative to an output's largest value.

    A GPU has no plain kernels, but its exp is nearly as exact as a CPU's.
    """
    if not vulkan:
        return LEAST_ROUNDING
    return DEFAULT.relative if has_inexact_gelu(param, bin) else UNKNOWN_ROUNDING


def has_inexact_gelu(param: Path, bin: Path) -> bool:
    """Return True if Vulkan approximates a GELU by tanh (`gelu.comp`), with an error up to 5e-4."""
    gelus = (layer for layer in _layers(param, bin) if layer.type == "GELU")
    return any(not layer["fast_gelu"] and not layer["featmask"] & Feature.NO_VULKAN for layer in gelus)


def holds_integers(param: Path, bin: Path) -> bool:
    """Return True if a net has int8 layers, or blocks of integers."""
    weights = (weight for layer in _layers(param, bin) for _, weight in layer.weights.stored_items())
    return any(weight.encoding in (Encoding.INT8, Encoding.BYTES) for weight in weights)


def weights_encoding(param: Path, bin: Path) -> Encoding | None:
    """Return the coarsest encoding of a net's weights; None if weights have 32 bits, or the net cannot be read."""
    used = {weight.encoding for layer in _layers(param, bin) for _, weight in layer.weights.stored_items()}
    return next((encoding for encoding in (Encoding.INT8, Encoding.BF16, Encoding.FP16) if encoding in used), None)


def _layers(param: Path, bin: Path) -> list[Layer]:
    """Return the layers of a net; none if it cannot be read, because ncnn's own error says more."""
    try:
        return list(read_net(param, bin, entry_points.layer_types()).graph)
    except (ParamError, BinError, GraphError, UsageError):
        return []


def estimated(
    runner: NcnnRunner, feeds: Mapping[str, Array], way: Sequence[Slot], blobs: Mapping[str, str | None], mode: str
) -> tuple[dict[str, float], str]:
    """Return the outputs' errors from 16-bit blobs, or in fp32 from int8 layers; and the error if that fails."""
    try:
        exact, rounded = _walks(runner, feeds_of(way, feeds), mode)
    except (ParamError, BinError, GraphError, UsageError, RunError) as error:
        return {}, str(error)
    distances = {}
    for name, blob in blobs.items():
        if blob in exact:
            a, b = (outputs[blob].astype(np.float64) for outputs in (rounded, exact))
            finite = np.abs(b) < INFINITE
            largest = float(np.abs(b[finite]).max(initial=0.0)) or 1.0
            distance = np.abs(a - b)[finite].max(initial=0.0)
            distances[name] = float(distance) / largest if np.isfinite(distance) else math.inf
    return distances, ""


def _walks(runner: NcnnRunner, feeds: Mapping[str, Feed], mode: str) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return a net's outputs without rounding, and with 16-bit blobs, or in fp32 with int8 layers."""
    graph = read_net(runner.param, runner.bin, entry_points.layer_types()).graph
    by_blob = {blob: feeds[blob.name] for blob in graph.inputs if blob.name in feeds}
    with nullcontext(runner.worker) if runner.worker.target == LOCAL else NcnnWorker() as worker:
        with Estimator(graph, by_blob, worker=worker) as estimator:
            walks = [estimator.run()] if mode == "fp32" else [estimator.run(mode), estimator.run()]
        if mode == "fp32":
            for layer in graph:
                _to_floats(layer)
            with Estimator(graph, by_blob, worker=worker) as estimator:
                walks.append(estimator.run())
    rounded, exact = ({blob.name: array for blob, array in walk.outputs.items()} for walk in walks)
    return exact, rounded


def _to_floats(layer: Layer) -> None:
    """Replace an int8 layer's integers by floats; raise GraphError if the scales are unknown."""
    weights = dict(layer.weights.stored_items())
    if all(weight.encoding is not Encoding.INT8 for weight in weights.values()):
        return
    if "weight_data_int8_scales" not in weights:
        raise GraphError(f"the int8 weights of {layer.type} '{layer.name}' are not known as floats")
    integers, scales = (weights[name].array for name in ("weight_data", "weight_data_int8_scales"))
    floats = integers.reshape(len(scales), -1) / scales.reshape(-1, 1)
    for name in weights:
        if name.endswith("_int8_scales"):
            del layer.weights[name]
    layer.params.pop("int8_scale_term")
    layer.weights["weight_data"] = floats.astype(np.float32).reshape(integers.shape)
