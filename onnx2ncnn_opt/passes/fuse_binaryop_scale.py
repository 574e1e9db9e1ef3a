from __future__ import annotations

import numpy as np

from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._constants import constant_array, per_channel
from onnx2ncnn_opt.passes._fold import ADD, DIV, MUL, RDIV, RSUB, SUB, linear
from onnx2ncnn_opt.rewrite.pattern import const, op
from onnx2ncnn_opt.rewrite.rule import require, rewrite

_COMMUTING, _OTHERS = frozenset({MUL, ADD}), frozenset({DIV, SUB, RSUB, RDIV})


@rewrite(
    op("BinaryOp", "binary", op_type=_COMMUTING | _OTHERS, with_scalar=0)("x", const("constant")),
    op("BinaryOp", "binary", op_type=_OTHERS, with_scalar=0)(const("constant"), "x"),
    exact=False,
)
def fuse_binaryop_scale(x: Blob, constant: Layer, binary: Layer) -> Layer:
    """x, MemoryData (one value per channel) ── BinaryOp ──   ⇒   x ── Scale ──"""
    require(x.shape is not None, f"the shape of '{x.name}' is unknown")
    assert x.shape is not None
    channels = x.shape[0]
    require(isinstance(channels, int), f"the number of channels of '{x.name}' is known only at run time")
    assert isinstance(channels, int)
    require(constant_array(constant).size == channels > 1, f"'{constant.name}' is not one value for each channel")
    value = per_channel(constant, x, channels)
    scale, shift = linear(binary, value, const_first=binary.inputs[0].producer is constant)
    weights = {"scale_data": scale.astype(np.float32)}
    if shift.any():
        weights["bias_data"] = shift.astype(np.float32)
    return Layer("Scale", binary.name, [x], (), {"scale_data_size": channels, "bias_term": int(shift.any())}, weights)
