"""What a net's layers and weights say about its errors."""

from pathlib import Path

from onnx2ncnn_opt import entry_points
from onnx2ncnn_opt.errors import BinError, GraphError, ParamError, UsageError
from onnx2ncnn_opt.ir.features import Feature
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.weight import Encoding
from onnx2ncnn_opt.param.files import read_net
from onnx2ncnn_opt.verdict.errors import DEFAULT
from onnx2ncnn_opt.verdict.rules import LEAST_ROUNDING, UNKNOWN_ROUNDING


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
