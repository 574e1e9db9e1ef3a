"""LayerNorm and RMSNorm over the last axes."""

import math

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import binary
from onnx2ncnn_opt.onnx.lower.functional.reduce import reduce
from onnx2ncnn_opt.onnx.lower.functional.views import rows
from onnx2ncnn_opt.onnx.value import Constant, Tensor, Value


def deviation(im: ImportContext, variance: Value, epsilon: float) -> Tensor:
    """sqrt(variance + epsilon)."""
    return im.apply(im.apply(variance, BinaryOp.ADD, epsilon), UnaryOp.SQRT)


def layer_norm(
    im: ImportContext,
    x: Tensor,
    scale: Value,
    bias: Value | None = None,
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
    im: ImportContext, kind: str, x: Tensor, scale: Value, bias: Value | None, axis: int, epsilon: float
) -> Value:
    """Return `x` normalised by a layer of this `kind` over the axes from `axis` on, scaled and shifted."""
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
    if not is_constant:
        y = binary(im, BinaryOp.MUL, y, scale)
        y = y if bias is None else binary(im, BinaryOp.ADD, y, bias)
    return y


def _of_row(im: ImportContext, param: Value | None, shape: tuple[int, ...]) -> Array | None:
    """Return a constant as one row of `shape`; None if it is not constant, or has different rows."""
    if not isinstance(param, Constant):
        return None
    outer = param.array.reshape(-1, *param.shape[max(0, param.rank - len(shape)) :])
    return im.spread(outer[0], shape).reshape(-1) if (outer == outer[:1]).all() else None
