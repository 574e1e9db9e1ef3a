"""Tensors one after the other along an axis, and apart again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.concat import concat
from onnx2ncnn_opt.onnx.lower.functional.split import split
from onnx2ncnn_opt.onnx.lower.functional.views import squeeze, unsqueeze
from onnx2ncnn_opt.onnx.value import Constant, Tensor, Value


def parts(im: ImportContext, x: Value, axis: int, sizes: Sequence[int]) -> tuple[Value, ...]:
    """Return the pieces of a tensor along an axis."""
    if isinstance(x, Tensor):
        return split(im, x, axis, tuple(sizes))
    if sum(sizes) != x.shape[axis] or min(sizes, default=0) < 0:
        raise im.invalid(f"parts of {sizes} do not make up the axis of size {x.shape[axis]}")
    return tuple(Constant(part) for part in np.split(x.array, np.cumsum(sizes)[:-1], axis))


def unstacked(im: ImportContext, x: Value, axis: int) -> tuple[Value, ...]:
    """Return the slices of a tensor along an axis whose size is fixed, without the axis."""
    if isinstance(x, Constant):
        return tuple(Constant(x.array.take(i, axis)) for i in range(x.array.shape[axis]))
    size = x.shape[axis]
    assert isinstance(size, int)
    return tuple(
        squeeze(im, part, (axis,)) if isinstance(part, Tensor) else part for part in parts(im, x, axis, (1,) * size)
    )


def joined(im: ImportContext, xs: Sequence[Value], axis: int) -> Value:
    """Return the tensors one after the other along an axis."""
    if not xs:
        raise im.refuse("the sequence is empty, and ncnn has no empty tensors", "remove the node")
    constants = [x.array for x in xs if isinstance(x, Constant)]
    if len(constants) == len(xs):
        return Constant(np.concatenate(constants, axis))
    return concat(im, *xs, axis=axis)


def stacked(im: ImportContext, xs: Sequence[Value], axis: int) -> Value:
    """Return the tensors one after the other along a new axis."""
    if not xs:
        raise im.refuse("the sequence is empty, and ncnn has no empty tensors", "remove the node")
    shape = xs[0].shape
    axis = im.axis(axis, len(shape) + 1)
    is_batch = any(isinstance(x, Tensor) and x.view.batch and x.view.axes[axis:][:1] == (x.view.batch,) for x in xs)
    if axis == len(shape) or is_batch:
        return joined(im, [_unsqueezed(im, x, axis) for x in xs], axis)
    # One after the other along an axis that is there is the same, and takes no layer for each.
    return im.reshape(joined(im, xs, axis), (*shape[:axis], len(xs), *shape[axis:]))


def _unsqueezed(im: ImportContext, x: Value, axis: int) -> Value:
    return unsqueeze(im, x, (axis,)) if isinstance(x, Tensor) else Constant(np.expand_dims(x.array, axis))
