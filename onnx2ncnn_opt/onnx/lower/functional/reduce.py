"""Reductions over axes, and the index of the largest element along an axis."""

from collections.abc import Sequence

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, Reduction, UnaryOp
from onnx2ncnn_opt.ir.dim import Sym
from onnx2ncnn_opt.ir.graph import Blob
from onnx2ncnn_opt.ir.view import View
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import binary, number
from onnx2ncnn_opt.onnx.lower.functional.cast import FLT_MAX, as_numbers
from onnx2ncnn_opt.onnx.lower.functional.infinity import are_infinities_tested, at_quarter_scale
from onnx2ncnn_opt.onnx.lower.functional.symbolic_tensor import arange
from onnx2ncnn_opt.onnx.lower.functional.views import squeeze
from onnx2ncnn_opt.onnx.lower.layout import Layout
from onnx2ncnn_opt.onnx.value import Ints, Tensor, held_as_float

# ONNX operator -> Reduction operation, and the first opset in which its axes are an input.
OPERATIONS = {
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

_LONGEST = 2**23  # larger than any dynamic axis; float32 is exact for indices i and for i + 2**23
# Reductions of one element, except identities and the logarithm.
_OF_ONE = {"ReduceSumSquare": UnaryOp.SQUARE, "ReduceL1": UnaryOp.ABS, "ReduceL2": UnaryOp.ABS}


def reduce(im: ImportContext, x: Tensor, name: str, axes: Ints | None, keepdims: int) -> Tensor:
    """Reduction over the axes (None: all), each of which is a dim or a run of dims of the Mat."""
    x = as_numbers(im, x)
    reduced = sorted(im.axes(axes, x.rank)) if axes is not None else list(range(x.rank))
    atoms = [axis for axis in reduced if x.view.axes[axis]]

    def result(x: Tensor) -> Tensor:
        y = _reduced(im, x, name, atoms, keepdims=bool(keepdims)) if atoms else reduced_element(im, x, name)
        return y if keepdims else squeeze(im, y, tuple(reduced))

    is_extreme = name in ("ReduceMax", "ReduceMin") and im.range_of(x).may_be_inf
    return at_quarter_scale(im, x, result) if is_extreme and are_infinities_tested(im) else result(x)


def _reduced(im: ImportContext, x: Tensor, name: str, axes: list[int], *, keepdims: bool) -> Tensor:
    """Reduce axes, which must not have size 1, to size 1."""
    laid_out = im.separated(x, axes)
    if laid_out is None:  # more than four dims: merge the reduced axes
        kept = tuple(axis for axis in range(x.rank) if axis not in axes)
        laid_out = im.in_layout(x, Layout((kept, tuple(axes))))
        dims = [1]
    else:
        dims = sorted(d for d in (laid_out.view.dim_of(axis) for axis in axes) if d is not None)
    groups = laid_out.view.dims
    inner = max((i + 1 for i, group in enumerate(groups) if group and i not in dims), default=0)
    if laid_out.blob.made_by("Reduction") and 0 < inner <= dims[0]:
        dims = list(range(inner, len(groups)))  # with the sizes of 1 that it left: one layer can reduce them all
    kept_dims = [i for i in range(len(groups)) if i not in dims]
    # A size of 1 after the kept dims is redundant; before them it keeps later broadcasts aligned.
    trailing = dims == list(range(len(kept_dims), len(groups)))
    operation = OPERATIONS[name][0]
    if operation == Reduction.LOGSUMEXP:
        blob = _log_sum_exp(im, laid_out, dims)
    else:
        blob = reduction(im, laid_out.blob, dims, operation, keepdims=keepdims and (not trailing or not kept_dims))
    left = tuple(groups[i] for i in kept_dims) or ((),)
    if len(blob.known_shape) == len(groups):
        left = tuple(() if i in dims else group for i, group in enumerate(groups))
    axes_left = tuple(() if axis in axes else group for axis, group in enumerate(laid_out.view.axes))
    return Tensor(blob, View(laid_out.view.batch, left, axes_left), x.dtype)


def reduction(
    im: ImportContext, blob: Blob, dims: Sequence[int], operation: Reduction, *, keepdims: bool = True
) -> Blob:
    """Return a Reduction layer over dims of the Mat."""
    return im.layer(
        "Reduction", blob, operation=operation, reduce_all=0, axes=tuple(dims), keepdims=int(keepdims), fixbug0=1
    )


def _log_sum_exp(im: ImportContext, x: Tensor, dims: Sequence[int]) -> Blob:
    """Compute m + log(sum(exp(x - m))) with the largest finite number m: exp alone overflows from 89 on."""
    largest = im.layer("Clip", reduction(im, x.blob, dims, Reduction.MAX), min=-FLT_MAX, max=FLT_MAX)
    low = im.layer("BinaryOp", x.blob, largest, op_type=BinaryOp.SUB)
    return im.layer("BinaryOp", reduction(im, low, dims, Reduction.LOGSUMEXP), largest, op_type=BinaryOp.ADD)


def reduced_element(im: ImportContext, x: Tensor, name: str) -> Tensor:
    """Reduce each element on its own, for axes of size 1 or no axes: ReduceL1 is Abs."""
    if name == "ReduceLogSum":
        return im.unary(x, "Log")
    return im.apply(x, _OF_ONE[name]) if name in _OF_ONE else x


def arg_max(im: ImportContext, x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    """Threshold of the distance to the largest number, and Reduction of the indices where the distance is 0."""
    marked = mark_largest(im, as_numbers(im, x), axis, last=bool(select_last_index))
    index = reduce(im, marked, "ReduceMax" if select_last_index else "ReduceMin", (axis,), keepdims)
    return index.of_type(held_as_float(np.dtype(np.int64)))


def mark_largest(im: ImportContext, x: Tensor, axis: int, *, last: bool) -> Tensor:
    """Return the index i at the largest numbers of an axis and ``i + n`` elsewhere; ``i - n`` with `last`.

    n is the size of the axis, or more if that is dynamic. NaN counts as the largest number, so every row has one: the
    distance to NaN is NaN, and Threshold returns 0 for it.
    """
    axis = im.axis(axis, x.rank)
    size = x.shape[axis]
    finite = im.unary(x, "Clip", min=-FLT_MAX, max=FLT_MAX)  # the difference of two infinities is NaN
    distance = binary(im, BinaryOp.SUB, reduce(im, finite, "ReduceMax", (axis,), 1), finite)
    others = im.unary(distance, "Threshold", threshold=0.0)
    index, span = arange(im, size, 0, x.rank - axis), _LONGEST if isinstance(size, Sym) else size
    offset = binary(im, BinaryOp.MUL, others, number(-span if last else span))
    return binary(im, BinaryOp.ADD, offset, index)
