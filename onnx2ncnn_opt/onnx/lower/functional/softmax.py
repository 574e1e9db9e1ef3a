"""Softmax along an axis, and its logarithm."""

from __future__ import annotations

from onnx2ncnn_opt.ir.codes import BinaryOp, Reduction
from onnx2ncnn_opt.ir.dim import product
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.reduce import reduction
from onnx2ncnn_opt.onnx.value import Tensor


def softmax(im: ImportContext, x: Tensor, axis: int) -> Tensor:
    """Softmax along one axis."""
    axis = im.axis(axis, x.rank)
    if not x.view.axes[axis]:
        # The softmax of one element is 1; written so that NaN and infinity stay NaN as in ONNX.
        zero = im.like(x, im.layer("BinaryOp", x.blob, x.blob, op_type=BinaryOp.SUB))
        return im.apply(zero, BinaryOp.ADD, 1.0)  # exp of NaN is a number on x86
    laid_out = im.along(x, [axis])
    dim = laid_out.view.dim_of(axis)
    return im.like(laid_out, im.layer("Softmax", laid_out.blob, axis=dim, fixbug0=1))


def flat_softmax(im: ImportContext, x: Tensor, axis: int) -> Tensor:
    """Softmax over all axes from `axis` on as one, as it was defined before opset 13."""
    return back(im, softmax(im, coerced(im, x, axis), 1), x)


def coerced(im: ImportContext, x: Tensor, axis: int) -> Tensor:
    """Two axes, as Softmax and its like were defined before opset 13: over all axes from `axis` on, flattened."""
    axis = im.axis(axis, x.rank)
    shape = (product(x.shape[:axis]), product(x.shape[axis:]))
    flat = im.reshape(x, shape)
    assert isinstance(flat, Tensor)
    return flat


def log_softmax(im: ImportContext, x: Tensor, axis: int) -> Tensor:
    """y - ReduceLogSumExp(y) with y = x - ReduceMax(x): the logarithm of Softmax would underflow to -inf."""
    axis = im.axis(axis, x.rank)
    if not x.view.axes[axis]:
        return im.like(x, im.layer("BinaryOp", x.blob, x.blob, op_type=BinaryOp.SUB))
    laid_out = im.along(x, [axis])
    dim = laid_out.view.dim_of(axis)
    assert dim is not None
    low = im.layer("BinaryOp", laid_out.blob, reduction(im, laid_out.blob, [dim], Reduction.MAX), op_type=BinaryOp.SUB)
    return im.like(
        laid_out, im.layer("BinaryOp", low, reduction(im, low, [dim], Reduction.LOGSUMEXP), op_type=BinaryOp.SUB)
    )


def back(im: ImportContext, result: Tensor, x: Tensor) -> Tensor:
    """Return the result for a `coerced` operand in that operand's shape."""
    shaped = im.reshape(result, x.shape)
    assert isinstance(shaped, Tensor)
    return shaped
