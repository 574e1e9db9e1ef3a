"""LayerNorm and RMSNorm over the last axes."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.ir.dim import is_fixed, product
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import binary
from onnx2ncnn_opt.onnx.lower.functional.reduce import reduce
from onnx2ncnn_opt.onnx.lower.functional.views import rows
from onnx2ncnn_opt.onnx.lower.tensors import AxesOfDims
from onnx2ncnn_opt.onnx.value import Constant, Operand, Tensor, Value


def deviation(im: ImportContext, variance: Value, epsilon: float) -> Tensor:
    """sqrt(variance + epsilon)."""
    return im.apply(im.apply(variance, BinaryOp.ADD, epsilon), UnaryOp.SQRT)


def layer_norm(
    im: ImportContext,
    x: Tensor,
    scale: Operand,
    bias: Operand | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> tuple[Value | None, ...]:
    """LayerNorm over the axes from `axis` on, as the innermost dim; BinaryOps for a computed scale."""
    axis = im.axis(axis, x.rank)
    y, axes = normal(im, "LayerNorm", x, scale, bias, axis, epsilon), tuple(range(axis, x.rank))
    if not im.is_used(1) and not im.is_used(2):  # the mean, and the reciprocal of the deviation
        return y, None, None
    mean = reduce(im, x, "ReduceMean", axes, 1)
    squares = im.apply(binary(im, BinaryOp.SUB, x, mean), UnaryOp.SQUARE)
    return y, mean, im.apply(deviation(im, reduce(im, squares, "ReduceMean", axes, 1), epsilon), UnaryOp.RECIPROCAL)


def rms_norm(
    im: ImportContext, x: Tensor, scale: Value, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Value:
    """RMSNorm over the axes from `axis` on, as the innermost dim; BinaryOp mul for a computed scale."""
    return normal(im, "RMSNorm", x, scale, None, im.axis(axis, x.rank), epsilon)


def normal(
    im: ImportContext, kind: str, x: Tensor, scale: Operand, bias: Operand | None, axis: int, epsilon: float
) -> Value:
    """Return `x` normalised by a layer of this `kind` over the axes from `axis` on, scaled and shifted."""
    if kind == "LayerNorm" and not is_fixed(x.shape[axis:]):
        dims = [[*range(axis)], [], [*range(axis, x.rank)]]
        return _affine(im, instance_normal(im, x, dims, epsilon, affine=0), scale, bias)
    shape = im.fixed(x.shape[axis:], "the normalised axes are dynamic", "bind them with --shape")
    gamma, beta = (_of_row(im, param, shape) for param in (scale, bias))
    weights: dict[str, Array] = {}
    is_constant = gamma is not None and (bias is None or beta is not None)
    if gamma is not None and is_constant and ((gamma != 1).any() or (beta is not None and (beta != 0).any())):
        weights["gamma_data"] = gamma
        if kind == "LayerNorm":
            weights["beta_data"] = np.zeros_like(gamma) if beta is None else beta
    last = rows(im, x, axis)
    params = {"affine_size": math.prod(shape), "affine": int(bool(weights))}
    y = im.like(last, im.layer(kind, last.blob, weights=weights, eps=epsilon, **params))
    return y if is_constant else _affine(im, y, scale, bias)


def instance_normal(
    im: ImportContext, x: Tensor, dims: AxesOfDims, epsilon: float, batch: Sequence[int] = (), **params: Any
) -> Tensor:
    """InstanceNorm over all dims but the outermost of three or four."""
    # Of one element ncnn computes x / s - x / s with rounding errors, and ONNX 0.
    im.try_demand(product(x.shape[axis] for dim in dims[1:] for axis in dim), 2)
    return im.wrap(im.layer("InstanceNorm", im.mat(x, dims, batch), eps=epsilon, **params), x.shape, dims, batch)


def _affine(im: ImportContext, x: Tensor, scale: Operand, bias: Operand | None) -> Value:
    y = binary(im, BinaryOp.MUL, x, scale)
    return y if bias is None else binary(im, BinaryOp.ADD, y, bias)


def _of_row(im: ImportContext, param: Operand | None, shape: tuple[int, ...]) -> Array | None:
    """Return a constant as one row of `shape`; None if it is not constant, or has different rows."""
    if not isinstance(param, Constant):
        return None
    outer = param.array.reshape(-1, *param.shape[max(0, param.rank - len(shape)) :])
    return im.spread(outer[0], shape).reshape(-1) if (outer == outer[:1]).all() else None
