import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._constants import element_count, is_constant
from onnx2ncnn_opt.passes._fold import linear
from onnx2ncnn_opt.passes._linear import ARITHMETIC
from onnx2ncnn_opt.rewrite.pattern import const, op
from onnx2ncnn_opt.rewrite.rule import known_shape, require, rewrite

_ONE_SIDED = ARITHMETIC - {BinaryOp.MUL, BinaryOp.ADD}


def _has_channel_count(binary: Layer) -> bool:
    """Return True if the constant has one element for each channel of the other operand, or channels are unknown."""
    sizes = [element_count(blob.producer) for blob in binary.inputs if blob.producer and is_constant(blob)]
    channels = [blob.shape[0] for blob in binary.inputs if blob.shape and not is_constant(blob)]
    return bool(sizes) and sizes[0] > 1 and (not channels or sizes[0] == channels[0])


@rewrite(
    op("BinaryOp", "binary", _has_channel_count, op_type=ARITHMETIC, with_scalar=0)("x", const("constant")),
    op("BinaryOp", "binary", _has_channel_count, op_type=_ONE_SIDED, with_scalar=0)(const("constant"), "x"),
    exact=False,
)
def fuse_binaryop_scale(x: Blob, constant: Layer, binary: Layer) -> Layer:
    """x, MemoryData (one value per channel) ── BinaryOp ──   ⇒   x ── Scale ──"""
    channels = element_count(constant)
    require(known_shape(x)[0] == channels, f"'{x.name}' does not have {channels} channels")
    scale, shift = linear(binary, channels, constant)
    weights = {"scale_data": scale.astype(np.float32)}
    if shift.any():
        weights["bias_data"] = shift.astype(np.float32)
    return Layer("Scale", binary.name, [x], (), {"scale_data_size": channels, "bias_term": int(shift.any())}, weights)
