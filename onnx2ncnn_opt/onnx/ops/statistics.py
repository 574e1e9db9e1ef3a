"""Normalisations and poolings by means and powers that are not those of a network's usual layers."""

from __future__ import annotations

import math

import numpy as np

from onnx2ncnn_opt.ir.dim import known
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.importer import ImportContext
from onnx2ncnn_opt.onnx.ops.cast import FLT_MIN
from onnx2ncnn_opt.onnx.ops.elementwise import ADD, DIV, MAX, MUL, SUB, binary
from onnx2ncnn_opt.onnx.ops.normalization import rows
from onnx2ncnn_opt.onnx.ops.pooling import average_pool
from onnx2ncnn_opt.onnx.ops.reduction import reduce
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Ints, Tensor, Value

_ABS, _SQUARE, _SQRT = 0, 4, 5
_MVN_EPSILON = 1e-9


def number(value: float) -> Constant:
    """A scalar operand."""
    return Constant(np.array(value, np.float32))


@onnx_op("RMSNormalization", since=23)
def rms_norm(
    im: ImportContext, x: Tensor, scale: Array, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    """RMSNorm over the axes from `axis` on, as the innermost dim of the Mat."""
    axis = im.axis(axis, x.rank)
    shape = x.shape[axis:]
    if not all(isinstance(size, int) for size in shape):
        raise im.refuse("the normalised axes have sizes that are not fixed", "bind them with --shape")
    gamma = im.spread(scale, known(shape)).reshape(-1)
    weights = {} if (gamma == 1).all() else {"gamma_data": gamma}
    last = rows(im, x, axis)
    params = {"affine_size": gamma.size, "affine": int(bool(weights))}
    return im.like(last, im.layer("RMSNorm", last.blob, weights=weights, eps=epsilon, **params))


@onnx_op("GroupNormalization", since=18, batch=0)
def group_norm(
    im: ImportContext,
    x: Tensor,
    scale: Array,
    bias: Array,
    *,
    epsilon: float = 1e-5,
    num_groups: int,
    stash_type: int = 1,
) -> Tensor:
    """GroupNorm; before opset 21 scale and bias are those of whole groups."""
    channels = x.shape[1] if x.rank > 1 else None
    if not isinstance(channels, int) or num_groups < 1 or channels % num_groups:
        raise im.refuse(f"{channels} channels do not divide into {num_groups} groups")
    size = channels if im.opset >= 21 else num_groups
    if scale.shape != (size,) or bias.shape != (size,):
        raise im.refuse(f"scale and bias of shapes {list(scale.shape)} and {list(bias.shape)}, not [{size}]")
    weights = {"gamma_data": np.repeat(scale, channels // size), "beta_data": np.repeat(bias, channels // size)}
    blob = im.layer("GroupNorm", im.channels(x), weights=weights, group=num_groups, channels=channels, eps=epsilon)
    return im.wrap(blob, x.shape, [[axis] for axis in range(1, x.rank)], [0], x.dtype)


@onnx_op("MeanVarianceNormalization", since=9)
def mean_variance_norm(im: ImportContext, x: Tensor, *, axes: Ints = (0, 2, 3)) -> Value:
    """What ONNX says it is: means, differences, and a square root."""
    apart = binary(im, SUB, x, reduce(im, x, "ReduceMean", axes, 1))
    variance = reduce(im, im.unary(apart, "UnaryOp", op_type=_SQUARE), "ReduceMean", axes, 1)
    deviation = binary(im, ADD, im.unary(variance, "UnaryOp", op_type=_SQRT), number(_MVN_EPSILON))
    return binary(im, DIV, apart, deviation)


@onnx_op("LpNormalization")
def lp_norm(im: ImportContext, x: Tensor, *, axis: int = -1, p: int = 2) -> Value:
    """A division by a Reduction; zeros stay zeros."""
    if p not in (1, 2):
        raise im.refuse(f"p is {p}, not 1 or 2")
    norm = reduce(im, x, f"ReduceL{p}", (im.axis(axis, x.rank),), 1)
    return binary(im, DIV, x, binary(im, MAX, norm, number(FLT_MIN)))


@onnx_op("LpPool", since=2, batch=0)
def lp_pool(
    im: ImportContext,
    x: Tensor,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Ints = (),
    kernel_shape: Ints,
    p: int = 2,
    pads: Ints = (),
    strides: Ints = (),
) -> Value:
    """Pooling avg of powers, times the size of the window."""
    if ceil_mode:
        # Its last windows have as many zeros as any other, but ncnn would divide by fewer.
        raise im.refuse("ceil_mode: the last windows divide by another number than in ncnn")
    powers = _power(im, x, p)
    pooled = average_pool(
        im,
        powers,
        auto_pad=auto_pad,
        count_include_pad=1,
        dilations=dilations,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )
    return _root(im, binary(im, MUL, pooled, number(math.prod(kernel_shape))), p)


@onnx_op("GlobalLpPool", since=2, batch=0)
def global_lp_pool(im: ImportContext, x: Tensor, *, p: int = 2) -> Value:
    """A Reduction of powers."""
    axes = tuple(range(2, x.rank))
    if p in (1, 2):
        return reduce(im, x, f"ReduceL{p}", axes, 1)
    return _root(im, reduce(im, _power(im, x, p), "ReduceSum", axes, 1), p)


def _power(im: ImportContext, x: Tensor, p: int) -> Tensor:
    if p < 1:
        raise im.refuse(f"p is {p}")
    if p == 2:
        return im.unary(x, "UnaryOp", op_type=_SQUARE)
    positive = im.unary(x, "UnaryOp", op_type=_ABS)
    return positive if p == 1 else im.unary(positive, "Power", power=float(p))


def _root(im: ImportContext, x: Value, p: int) -> Value:
    if p == 1:
        return x
    return im.unary(x, "UnaryOp", op_type=_SQRT) if p == 2 else im.unary(x, "Power", power=1 / p)
