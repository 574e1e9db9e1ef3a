"""Casts between element types."""

from __future__ import annotations

import onnx_ir

from onnx2ncnn_opt.onnx.fold import bounds
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.cast import cast_to
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Tensor, Value


@onnx_op("Cast", since=6, integers=True, moves=(0,), jumps=True, axes="each", folds=bounds.first)
def cast(im: ImportContext, x: Tensor, *, to: int, saturate: int = 1, round_mode: str = "up") -> Tensor:
    """Nothing between floats; Dequantize from integers, UnaryOp trunc to them; to bool by thresholds.

    Integers of 8 and 16 bits turn over as ONNX's do.
    """
    known = {int(kind) for kind in onnx_ir.DataType} - {onnx_ir.DataType.UNDEFINED, onnx_ir.DataType.STRING}
    if to not in known:
        raise im.refuse(f"a cast to element type {to}", "cast to a type of numbers or bools")
    return cast_to(im, x, onnx_ir.DataType(to).numpy())


@onnx_op("CastLike", since=15, integers=True, axes="each", folds=bounds.first)
def cast_like(im: ImportContext, x: Value, target: Value, *, saturate: int = 1, round_mode: str = "up") -> Value:
    """As Cast."""
    if isinstance(x, Constant):
        return Constant(x.array.astype(target.dtype))
    return cast_to(im, x, target.dtype)
