"""Concatenation and splitting of tensors along an axis."""

from collections.abc import Sequence
from functools import partial
from itertools import combinations, groupby

import numpy as np

from onnx2ncnn_opt.ir.dim import known, shape_text, sum_of
from onnx2ncnn_opt.ir.view import View
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.cast import number_value
from onnx2ncnn_opt.onnx.lower.functional.crop import crop, split
from onnx2ncnn_opt.onnx.lower.functional.views import squeeze
from onnx2ncnn_opt.onnx.lower.layout import align, combined, common_layout
from onnx2ncnn_opt.onnx.read.given import solved
from onnx2ncnn_opt.onnx.value import Constant, SymbolicTensor, Tensor, Value, is_float, is_held_as_float


def concat(im: ImportContext, *operands: Value | SymbolicTensor, axis: int) -> Value:
    """Concat along one dim of a common layout of all operands.

    Adjacent constants are joined here.
    """
    rank = operands[0].rank
    axis = im.axis(axis, rank)
    _check_shapes(im, operands, axis)
    nonempty = [x for x in operands if x.shape[axis] != 0] or operands[:1]
    xs: list[Value] = []
    for _, group in groupby(nonempty, type):
        alike = [*group]
        constants = [x.array for x in alike if isinstance(x, Constant)]
        alike = [Constant(np.concatenate(constants, axis))] if len(constants) > 1 else alike
        xs += [im.tensor(x) if isinstance(x, SymbolicTensor) else x for x in alike]
    if len(xs) == 1:
        return xs[0]
    if (cropped := _cropped(im, xs, axis)) is not None:
        return cropped
    if any(is_float(x.dtype) or is_held_as_float(x.dtype) for x in xs):
        xs = [number_value(im, x) for x in xs]
    dtype = next((x.dtype for x in xs if isinstance(x, Tensor)), xs[0].dtype)
    tensors = [im.tensor(x) for x in xs]
    aligned = align([x.view for x in tensors], (axis,))
    if aligned is None:
        return concat(im, *(im.with_plain_axes(x) for x in tensors), axis=axis)
    views, origin = aligned
    whole = origin.index(axis)
    tensors = [x.viewed(view) for x, view in zip(tensors, views, strict=True)]
    layout = common_layout(views, origin, [partial(im.cost, x) for x in tensors], whole)
    if layout is None:
        raise im.refuse("the operands have no common layout of at most four dims", "reshape the operands in the model")
    laid_out = [im.in_layout(x, layout) for x in tensors]
    dim = layout.dims.index((whole,))
    blob = im.layer("Concat", *(x.blob for x in laid_out), axis=dim)
    axes = [next(filter(None, groups), ()) for groups in zip(*(view.axes for view in views), strict=True)]
    axes[whole] = View.of((blob.known_shape[dim],), [[0]]).axes[0]
    return Tensor(blob, combined(axes, origin, rank, layout), dtype)


def _cropped(im: ImportContext, xs: Sequence[Value], axis: int) -> Value | None:
    """Join operands of which one may be empty at run time: join a longer one, and crop the excess; None if none may."""
    for i, x in enumerate(xs):
        size = x.shape[axis]
        # A slice [5:] of n elements is of n - 5, which may be negative.
        longer = im.longer(x, axis) if im.is_known(size, 0) and not im.is_known(size, 1) else None
        if longer is not None:
            count = i + 1 if i else len(xs)
            whole = im.tensor(concat(im, *xs[:i], longer, *xs[i + 1 : count], axis=axis))
            start = 0 if i else longer.shape[axis] - size
            cropped = crop(im, whole, axis, start, start + sum_of(part.shape[axis] for part in xs[:count]))
            return concat(im, cropped, *xs[count:], axis=axis)
    return None


def _check_shapes(im: ImportContext, operands: Sequence[Value | SymbolicTensor], axis: int) -> None:
    """Refuse operands of different ranks, or of different sizes along other axes than `axis`."""
    rank = operands[0].rank
    if any(x.rank != rank for x in operands):
        raise im.invalid(f"ranks differ: {', '.join(shape_text(x.shape) for x in operands)}")
    for other in range(rank):
        sizes = dict.fromkeys(x.shape[other] for x in operands) if other != axis else ()
        pairs = list(combinations(sizes, 2))
        is_fixed = sum(isinstance(size, int) for size in sizes) > 1
        if is_fixed or solved(pairs):  # such as (1 + h)//2 and the height of a recurrent state
            reason = f"sizes of axis {other} differ: {', '.join(shape_text(x.shape) for x in operands)}"
            raise (im.mismatch if is_fixed else im.invalid)(reason, pairs)


def unstacked(im: ImportContext, x: Value, axis: int) -> tuple[Value, ...]:
    """Return the slices of a tensor along an axis of fixed size, without the axis."""
    if isinstance(x, Constant):
        return tuple(Constant(x.array.take(i, axis)) for i in range(x.array.shape[axis]))
    [size] = known([x.shape[axis]])
    return tuple(squeeze(im, im.tensor(part), (axis,)) for part in split(im, x, axis, (1,) * size))


def stacked(im: ImportContext, xs: Sequence[Value], axis: int) -> Value:
    """Stack tensors along a new axis."""
    shape = xs[0].shape
    axis = im.axis(axis, len(shape) + 1)
    if axis == len(shape) or any(isinstance(x, Tensor) and x.batch_axis == axis for x in xs):
        return concat(im, *(im.reshape(x, (*x.shape[:axis], 1, *x.shape[axis:])) for x in xs), axis=axis)
    # Concatenating along an existing axis gives the same elements, without a Reshape of each tensor.
    return im.reshape(concat(im, *xs, axis=axis), (*shape[:axis], len(xs), *shape[axis:]))
