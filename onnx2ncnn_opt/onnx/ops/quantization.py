"""Operators of quantised tensors."""

from __future__ import annotations

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx import items
from onnx2ncnn_opt.onnx.fold import bounds
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import binary
from onnx2ncnn_opt.onnx.lower.functional.conv import conv
from onnx2ncnn_opt.onnx.lower.functional.quantize import (
    beside,
    centred,
    dequantize_linear,
    dynamic_quantize_linear,
    per_row,
    quantize_linear,
    quantized,
    scaling,
    sums_of,
    type_of,
)
from onnx2ncnn_opt.onnx.lower.functional.window import ConvAttributes
from onnx2ncnn_opt.onnx.registry import MICROSOFT, onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Tensor, Value, held_as_float

onnx_op("QuantizeLinear", since=10, integers=True, divisor=1, quantises=True, axes="each", folds=bounds.first)(
    onnx_op("QuantizeLinear", domain=MICROSOFT, integers=True, divisor=1, quantises=True, axes="each")(quantize_linear)
)


onnx_op("DequantizeLinear", since=10, integers=True, axes="each", folds=bounds.first)(
    onnx_op("DequantizeLinear", domain=MICROSOFT, integers=True, axes="each")(dequantize_linear)
)


onnx_op("DynamicQuantizeLinear", since=11, quantises=True)(dynamic_quantize_linear)


@onnx_op("MatMulInteger", since=10, integers=True, items=items.product_of(0, 1))
def matmul_integer(
    im: ImportContext, a: Value, b: Value, a_zero_point: Value | None = None, b_zero_point: Value | None = None
) -> Value:
    """MatMul of whole numbers; sums beyond 2**24 are rounded."""
    return _whole(sums_of(im, a, a_zero_point, b, b_zero_point))


@onnx_op("ConvInteger", since=10, batch=0, integers=True)
def conv_integer(
    im: ImportContext,
    x: Value,
    w: Value,
    x_zero_point: Value | None = None,
    w_zero_point: Value | None = None,
    *,
    given: ConvAttributes,
) -> Value:
    """Convolution of whole numbers; sums beyond 2**24 are rounded."""
    return _whole(conv(im, im.tensor(centred(im, x, x_zero_point)), _kernel(im, w, w_zero_point), given=given))


@onnx_op("QLinearConv", since=10, batch=0, integers=True, quantises=True)
def qlinear_conv(
    im: ImportContext,
    x: Value,
    x_scale: Value,
    x_zero_point: Value,
    w: Value,
    w_scale: Value,
    w_zero_point: Value,
    y_scale: Value,
    y_zero_point: Value,
    b: Array | None = None,
    *,
    given: ConvAttributes,
) -> Value:
    """Convolution of whole numbers, and as QuantizeLinear of the sums."""
    sums = conv(
        im,
        im.tensor(centred(im, x, x_zero_point)),
        _kernel(im, w, w_zero_point),
        None if b is None else Constant(b.astype(np.float32)),
        given=given,
    )
    factor = scaling(im, BinaryOp.DIV, scaling(im, BinaryOp.MUL, x_scale, beside(im, sums, w_scale, 1)), y_scale)
    return quantized(im, binary(im, BinaryOp.MUL, sums, factor), y_zero_point, type_of(y_zero_point))


@onnx_op("QLinearMatMul", since=10, integers=True, quantises=True, items=items.product_of(0, 3))
def qlinear_matmul(
    im: ImportContext,
    a: Value,
    a_scale: Value,
    a_zero_point: Value,
    b: Value,
    b_scale: Value,
    b_zero_point: Value,
    y_scale: Value,
    y_zero_point: Value,
) -> Value:
    """MatMul of whole numbers, and as QuantizeLinear of the sums."""
    sums = sums_of(im, a, a_zero_point, b, b_zero_point)
    factor = scaling(
        im, BinaryOp.DIV, scaling(im, BinaryOp.MUL, per_row(im, a, a_scale), b_scale), per_row(im, a, y_scale)
    )
    zero = per_row(im, a, y_zero_point)
    return quantized(im, binary(im, BinaryOp.MUL, sums, factor), zero, type_of(y_zero_point))


def _kernel(im: ImportContext, w: Value, zero_point: Value | None) -> Value:
    """Return the weight of a convolution minus its zero point, which there may be for each kernel."""
    return centred(im, w, None if zero_point is None else beside(im, w, zero_point, 0))


def _whole(x: Value) -> Value:
    """Return a result of whole numbers, as integers."""
    return Tensor(x.blob, x.view, held_as_float(np.dtype(np.int32))) if isinstance(x, Tensor) else x
