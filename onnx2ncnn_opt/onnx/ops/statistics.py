"""Normalisations and poolings by means and powers that are not those of a network's usual layers."""

from __future__ import annotations

import math

from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.onnx import items
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import binary, number
from onnx2ncnn_opt.onnx.lower.functional.cast import FLT_MIN
from onnx2ncnn_opt.onnx.lower.functional.pool import average_pool
from onnx2ncnn_opt.onnx.lower.functional.reduce import reduce
from onnx2ncnn_opt.onnx.lower.functional.window import PoolAttributes
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Ints, Tensor, Value

_MVN_EPSILON = 1e-9


@onnx_op("MeanVarianceNormalization", since=9, axes="same", items=items.along((0, 2, 3), "axes"), errors="input")
def mean_variance_norm(im: ImportContext, x: Tensor, *, axes: Ints = (0, 2, 3)) -> Value:
    """Compute means, differences, and a square root, as ONNX defines it."""
    apart = binary(im, BinaryOp.SUB, x, reduce(im, x, "ReduceMean", axes, 1))
    variance = reduce(im, im.apply(apart, UnaryOp.SQUARE), "ReduceMean", axes, 1)
    deviation = binary(im, BinaryOp.ADD, im.apply(variance, UnaryOp.SQRT), number(_MVN_EPSILON))
    return binary(im, BinaryOp.DIV, apart, deviation)


@onnx_op("LpNormalization", axes="same", items=items.along(-1))
def lp_norm(im: ImportContext, x: Tensor, *, axis: int = -1, p: int = 2) -> Value:
    """Divide by a Reduction; zeros stay zeros."""
    if p not in (1, 2):
        raise im.refuse(f"p is {p}: only 1 and 2 are norms in ONNX", "export it with p = 1 or 2")
    norm = reduce(im, x, f"ReduceL{p}", (im.axis(axis, x.rank),), 1)
    return binary(im, BinaryOp.DIV, x, binary(im, BinaryOp.MAX, norm, number(FLT_MIN)))


@onnx_op("LpPool", since=2, batch=0)
def lp_pool(
    im: ImportContext,
    x: Tensor,
    *,
    given: PoolAttributes,
    dilations: Ints = (),
    p: int = 2,
) -> Value:
    """Pooling avg of powers, times the size of the window."""
    if given.ceil_mode:
        # Its last windows have as many zeros as any other, but ncnn would divide by fewer.
        reason = "ceil_mode: the last windows divide by another number than in ncnn"
        raise im.refuse(reason, "export it with ceil_mode = 0")
    powers = _power(im, x, p)
    pooled = average_pool(im, powers, given=given, count_include_pad=1, dilations=dilations)
    return _root(im, binary(im, BinaryOp.MUL, pooled, number(math.prod(given.kernel_shape))), p)


@onnx_op("GlobalLpPool", since=2, batch=0)
def global_lp_pool(im: ImportContext, x: Tensor, *, p: int = 2) -> Value:
    """Reduce powers."""
    axes = tuple(range(2, x.rank))
    if p in (1, 2):
        return reduce(im, x, f"ReduceL{p}", axes, 1)
    return _root(im, reduce(im, _power(im, x, p), "ReduceSum", axes, 1), p)


def _power(im: ImportContext, x: Tensor, p: int) -> Tensor:
    if p < 1:
        raise im.refuse(f"p is {p}: it must be at least 1", "export it with p >= 1")
    if p == 2:
        return im.apply(x, UnaryOp.SQUARE)
    positive = im.apply(x, UnaryOp.ABS)
    return positive if p == 1 else im.unary(positive, "Power", power=float(p))


def _root(im: ImportContext, x: Value, p: int) -> Value:
    if p == 1:
        return x
    return im.apply(x, UnaryOp.SQRT) if p == 2 else im.unary(x, "Power", power=1 / p)
