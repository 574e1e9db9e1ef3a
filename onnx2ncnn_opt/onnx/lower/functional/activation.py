"""Activations that need several layers, and Softmax along an axis."""

from collections.abc import Callable

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, Reduction, UnaryOp
from onnx2ncnn_opt.ir.dim import product
from onnx2ncnn_opt.ir.graph import Blob
from onnx2ncnn_opt.ir.ranges import EXP_LIMIT, Ranges
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.cast import FLT_MAX
from onnx2ncnn_opt.onnx.lower.functional.reduce import reduction
from onnx2ncnn_opt.onnx.value import Tensor


def softsign(im: ImportContext, x: Tensor) -> Tensor:
    """x / (1 + |x|)."""
    one_more = im.apply(im.apply(x, UnaryOp.ABS), BinaryOp.ADD, 1.0)
    return im.like(x, im.layer("BinaryOp", x.blob, one_more.blob, op_type=BinaryOp.DIV))


def softplus(im: ImportContext, x: Tensor) -> Tensor:
    """max(x, Softplus(min(x, 40))): Softplus alone overflows from 89 on."""
    if im.range_of(x).high <= EXP_LIMIT:
        return im.unary(x, "Softplus")
    low = im.apply(x, BinaryOp.MIN, 40.0)  # for x >= 40, softplus(x) is x in float32
    return im.like(x, im.layer("BinaryOp", x.blob, im.unary(low, "Softplus").blob, op_type=BinaryOp.MAX))


def clip(im: ImportContext, x: Tensor, low: float = -FLT_MAX, high: float = FLT_MAX) -> Tensor:
    """Clip, or ReLU for its bounds; for a quotient that may be 0 / 0, max and min, which keep NaN."""
    # .param files cannot express infinite bounds.
    low, high = np.clip((low, high), -FLT_MAX, FLT_MAX).tolist()
    if _may_be_0_by_0(x.blob):
        above = im.apply(x, BinaryOp.MAX, low) if low > -FLT_MAX else x
        return im.apply(above, BinaryOp.MIN, high) if high < FLT_MAX else above
    return im.unary(x, "ReLU") if (low, high) == (0, FLT_MAX) else im.unary(x, "Clip", min=low, max=high)


def _may_be_0_by_0(quotient: Blob) -> bool:
    layer = quotient.computed_by(BinaryOp.DIV, scalar=False)
    if layer is None or any(blob.made_by("MemoryData") for blob in layer.inputs):
        return False
    return all(Ranges().of(blob).has(0) for blob in layer.inputs)


def softmax(im: ImportContext, x: Tensor, axis: int) -> Tensor:
    """Softmax along one axis."""
    axis = im.axis(axis, x.rank)
    if not x.view.axes[axis]:
        # The softmax of one element is 1. This form returns NaN for NaN and infinity, as ONNX does.
        return im.apply(log_softmax(im, x, axis), BinaryOp.ADD, 1.0)
    laid_out = im.along(x, [axis])
    return im.like(laid_out, im.layer("Softmax", laid_out.blob, axis=laid_out.view.dim_of(axis), fixbug0=1))


def flattened(
    im: ImportContext, x: Tensor, axis: int, function: Callable[[ImportContext, Tensor, int], Tensor]
) -> Tensor:
    """Apply a function along one axis, after merging all axes from `axis` on, as before opset 13."""
    axis = im.axis(axis, x.rank)
    rows = im.tensor(im.reshape(x, (product(x.shape[:axis]), product(x.shape[axis:]))))
    return im.tensor(im.reshape(function(im, rows, 1), x.shape))


def log_softmax(im: ImportContext, x: Tensor, axis: int) -> Tensor:
    """y - ReduceLogSumExp(y) with y = x - ReduceMax(x): the logarithm of Softmax would underflow to -inf."""
    axis = im.axis(axis, x.rank)
    if not x.view.axes[axis]:
        return im.like(x, im.layer("BinaryOp", x.blob, x.blob, op_type=BinaryOp.SUB))
    laid_out = im.along(x, [axis])
    dim = laid_out.view.dim_of(axis)
    assert dim is not None
    low = im.layer("BinaryOp", laid_out.blob, reduction(im, laid_out.blob, [dim], Reduction.MAX), op_type=BinaryOp.SUB)
    total = reduction(im, low, [dim], Reduction.LOGSUMEXP)
    return im.like(laid_out, im.layer("BinaryOp", low, total, op_type=BinaryOp.SUB))
