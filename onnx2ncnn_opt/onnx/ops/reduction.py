"""Reductions over axes, and Softmax along one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onnx2ncnn_opt.ir.codes import BinaryOp, Reduction, UnaryOp
from onnx2ncnn_opt.ir.dim import product
from onnx2ncnn_opt.ir.graph import Blob
from onnx2ncnn_opt.ir.view import View
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.cast import FLT_MAX, as_numbers
from onnx2ncnn_opt.onnx.lower.layout import Form
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Ints, Tensor

# ONNX operator -> Reduction operation, and the opset from which its axes are an input.
_OPERATIONS = {
    "ReduceSum": (Reduction.SUM, 13),
    "ReduceSumSquare": (Reduction.SUMSQ, 18),
    "ReduceMean": (Reduction.MEAN, 18),
    "ReduceMax": (Reduction.MAX, 18),
    "ReduceMin": (Reduction.MIN, 18),
    "ReduceProd": (Reduction.PROD, 18),
    "ReduceL1": (Reduction.L1, 18),
    "ReduceL2": (Reduction.L2, 18),
    "ReduceLogSum": (Reduction.LOGSUM, 18),
    "ReduceLogSumExp": (Reduction.LOGSUMEXP, 18),
}
_OF_INTEGERS = ("ReduceSum", "ReduceSumSquare", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1")
# What a reduction over axes of size 1 (or none) leaves to do.
_ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "ReduceSumSquare": ("UnaryOp", {"op_type": UnaryOp.SQUARE}),
    "ReduceL1": ("UnaryOp", {"op_type": UnaryOp.ABS}),
    "ReduceL2": ("UnaryOp", {"op_type": UnaryOp.ABS}),
    "ReduceLogSum": ("Log", {}),
}


def _register(name: str, operation: Reduction, axes_input: int) -> None:
    def by_attribute(im: ImportContext, x: Tensor, *, axes: Ints | None = None, keepdims: int = 1) -> Tensor:
        return reduce(im, x, name, axes, keepdims)

    def by_input(
        im: ImportContext, x: Tensor, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
    ) -> Tensor:
        if not axes and noop_with_empty_axes:
            return _alone(im, as_numbers(im, x), name)
        return reduce(im, x, name, axes or None, keepdims)

    functions: tuple[tuple[Callable[..., Tensor], int], ...] = ((by_attribute, 1), (by_input, axes_input))
    for function, since in functions:
        function.__doc__ = f"Reduction {operation.name.lower()}; constant axes."
        domains = {0: (0.1, 4.0)} if name == "ReduceLogSum" else None
        onnx_op(name, since=since, integers=name in _OF_INTEGERS, domains=domains)(function)


for _name, (_operation, _axes_input) in _OPERATIONS.items():
    _register(_name, _operation, _axes_input)


def reduce(im: ImportContext, x: Tensor, name: str, axes: Ints | None, keepdims: int) -> Tensor:
    """Reduction over the axes (all, for None), each of them a dim or a run of dims of the Mat."""
    x = as_numbers(im, x)
    reduced = sorted(im.axes(axes, x.rank)) if axes is not None else list(range(x.rank))
    atoms = [axis for axis in reduced if x.view.axes[axis]]
    result = _reduced(im, x, name, atoms, keepdims=bool(keepdims)) if atoms else _alone(im, x, name)
    axes_out = [group for axis, group in enumerate(result.view.axes) if keepdims or axis not in reduced]
    return result.viewed(result.view.with_axes(axes_out))


def _reduced(im: ImportContext, x: Tensor, name: str, axes: list[int], *, keepdims: bool) -> Tensor:
    """The tensor with these axes, which are not of size 1, reduced to size 1."""
    lying = im.separated(x, axes)
    if lying is None:  # they lie apart in too many dims: all of them as one
        kept = tuple(axis for axis in range(x.rank) if axis not in axes)
        lying = im.formed(x, Form((kept, tuple(axes))))
        dims = [1]
    else:
        dims = sorted(d for d in (lying.view.dim_of(axis) for axis in axes) if d is not None)
    kept_dims = [i for i in range(len(lying.view.dims)) if i not in dims]
    # Behind the kept dims a size of 1 says nothing; before them it keeps later broadcasts aligned.
    trailing = dims == list(range(len(kept_dims), len(lying.view.dims)))
    operation = _OPERATIONS[name][0]
    if operation == Reduction.LOGSUMEXP:
        blob = _log_sum_exp(im, lying, dims)
    else:
        blob = _reduction(im, lying.blob, dims, operation, keepdims=keepdims and (not trailing or not kept_dims))
    left = tuple(lying.view.dims[i] for i in kept_dims) or ((),)
    if len(blob.known_shape) == len(lying.view.dims):
        left = tuple(() if i in dims else group for i, group in enumerate(lying.view.dims))
    axes_left = tuple(() if axis in axes else group for axis, group in enumerate(lying.view.axes))
    return Tensor(blob, View(lying.view.batch, left, axes_left), x.dtype)


def _reduction(
    im: ImportContext, blob: Blob, dims: Sequence[int], operation: Reduction, *, keepdims: bool = True
) -> Blob:
    return im.layer(
        "Reduction", blob, operation=operation, reduce_all=0, axes=tuple(dims), keepdims=int(keepdims), fixbug0=1
    )


def _log_sum_exp(im: ImportContext, x: Tensor, dims: Sequence[int]) -> Blob:
    """m + log(sum(exp(x - m))) with the largest number m: without it exp overflows from 89 on."""
    # Infinite, it would make NaN of itself.
    largest = im.layer("Clip", _reduction(im, x.blob, dims, Reduction.MAX), min=-FLT_MAX, max=FLT_MAX)
    low = im.layer("BinaryOp", x.blob, largest, op_type=BinaryOp.SUB)
    return im.layer("BinaryOp", _reduction(im, low, dims, Reduction.LOGSUMEXP), largest, op_type=BinaryOp.ADD)


def _alone(im: ImportContext, x: Tensor, name: str) -> Tensor:
    if name not in _ALONE:
        return x
    layer, params = _ALONE[name]
    return im.unary(x, layer, **params)


def _softmax(im: ImportContext, x: Tensor, axis: int) -> Tensor:
    axis = im.axis(axis, x.rank)
    if not x.view.axes[axis]:
        # The softmax of one element is 1; written so that NaN and infinity stay NaN as in ONNX.
        zero = im.like(x, im.layer("BinaryOp", x.blob, x.blob, op_type=BinaryOp.SUB))
        return im.unary(zero, "BinaryOp", op_type=BinaryOp.ADD, with_scalar=1, b=1.0)  # exp of NaN is a number on x86
    lying = im.along(x, [axis])
    dim = lying.view.dim_of(axis)
    return im.like(lying, im.layer("Softmax", lying.blob, axis=dim, fixbug0=1))


def coerced(im: ImportContext, x: Tensor, axis: int) -> Tensor:
    """Two axes, as Softmax and its like were defined before opset 13: over all axes from `axis` on, flattened."""
    axis = im.axis(axis, x.rank)
    shape = (product(x.shape[:axis]), product(x.shape[axis:]))
    flat = im.reshape(x, shape)
    assert isinstance(flat, Tensor)
    return flat


@onnx_op("Softmax", axes="same")
def softmax1(im: ImportContext, x: Tensor, *, axis: int = 1) -> Tensor:
    """Softmax over the flattened axes from `axis` on."""
    return back(im, _softmax(im, coerced(im, x, axis), 1), x)


@onnx_op("Softmax", since=13, axes="same")
def softmax13(im: ImportContext, x: Tensor, *, axis: int = -1) -> Tensor:
    """Softmax along one axis."""
    return _softmax(im, x, axis)


@onnx_op("LogSoftmax", axes="same")
def log_softmax1(im: ImportContext, x: Tensor, *, axis: int = 1) -> Tensor:
    """LogSoftmax over the flattened axes from `axis` on."""
    return back(im, _log_softmax(im, coerced(im, x, axis), 1), x)


@onnx_op("LogSoftmax", since=13, axes="same")
def log_softmax13(im: ImportContext, x: Tensor, *, axis: int = -1) -> Tensor:
    """y - ReduceLogSumExp(y) with y = x - ReduceMax(x): the logarithm of Softmax would underflow to -inf."""
    return _log_softmax(im, x, axis)


def _log_softmax(im: ImportContext, x: Tensor, axis: int) -> Tensor:
    axis %= max(x.rank, 1)
    if not x.view.axes[axis]:
        return im.like(x, im.layer("BinaryOp", x.blob, x.blob, op_type=BinaryOp.SUB))
    lying = im.along(x, [axis])
    dim = lying.view.dim_of(axis)
    assert dim is not None
    low = im.layer("BinaryOp", lying.blob, _reduction(im, lying.blob, [dim], Reduction.MAX), op_type=BinaryOp.SUB)
    return im.like(
        lying, im.layer("BinaryOp", low, _reduction(im, low, [dim], Reduction.LOGSUMEXP), op_type=BinaryOp.SUB)
    )


def back(im: ImportContext, result: Tensor, x: Tensor) -> Tensor:
    """The result for a `coerced` operand in that operand's shape."""
    shaped = im.reshape(result, x.shape)
    assert isinstance(shaped, Tensor)
    return shaped
