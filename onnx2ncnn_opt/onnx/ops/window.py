"""Convolutions, poolings over windows, and global poolings."""

import math

from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import binary, number
from onnx2ncnn_opt.onnx.lower.functional.conv import conv, conv_transpose
from onnx2ncnn_opt.onnx.lower.functional.pool import average_pool, global_average_pool, global_pool, max_pool
from onnx2ncnn_opt.onnx.lower.functional.reduce import reduce
from onnx2ncnn_opt.onnx.lower.functional.window import PoolAttributes
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Ints, Tensor, Value

onnx_op("Conv", batch=0)(conv)
onnx_op("ConvTranspose", batch=0)(conv_transpose)
onnx_op("MaxPool", batch=0, integers=True, moves=(0,))(max_pool)
onnx_op("AveragePool", since=7, batch=0)(average_pool)
onnx_op("GlobalAveragePool", batch=0)(global_average_pool)


@onnx_op("GlobalMaxPool", batch=0, moves=(0,))
def global_max_pool(im: ImportContext, x: Tensor) -> Tensor:
    """Pooling max over each channel."""
    return global_pool(im, x, 0)


@onnx_op("LpPool", since=2, batch=0)
def lp_pool(im: ImportContext, x: Tensor, *, attrs: PoolAttributes, dilations: Ints = (), p: int = 2) -> Value:
    """Pooling avg of powers, times the size of the window."""
    if attrs.ceil_mode:
        # ncnn divides the sums of the last windows by fewer elements.
        reason = "ceil_mode: the last windows divide by another number than in ncnn"
        raise im.refuse(reason, "export it with ceil_mode = 0")
    pooled = average_pool(im, _power(im, x, p), attrs=attrs, count_include_pad=1, dilations=dilations)
    return _root(im, binary(im, BinaryOp.MUL, pooled, number(math.prod(attrs.kernel_shape))), p)


@onnx_op("GlobalLpPool", since=2, batch=0)
def global_lp_pool(im: ImportContext, x: Tensor, *, p: int = 2) -> Value:
    """Reduction of powers."""
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
