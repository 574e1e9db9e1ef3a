"""Reductions. Floats are added in float64, in order, and rounded once: C++ then gives the same bits."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx2ncnn_opt.onnx.tail.operators.checks import axis_of
from onnx2ncnn_opt.onnx.tail.registry import F, Ints, N, T, tail_op


@tail_op("ReduceMax", cpp="")
def reduce_max(x: T, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> T:
    """Return the largest elements; NaN wins."""
    lowest = -np.inf if x.dtype.kind == "f" else 0 if x.dtype.kind == "b" else np.iinfo(x.dtype).min
    return reduced(np.maximum, x, lowest, axes, keepdims, noop_with_empty_axes)


@tail_op("ReduceMin", cpp="")
def reduce_min(x: T, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> T:
    """Return the smallest elements; NaN wins."""
    highest = np.inf if x.dtype.kind == "f" else 1 if x.dtype.kind == "b" else np.iinfo(x.dtype).max
    return reduced(np.minimum, x, highest, axes, keepdims, noop_with_empty_axes)


@tail_op("ReduceSum", cpp="")
def reduce_sum(x: N, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> N:
    """Return the sums."""
    return reduced(np.add, x, 0, axes, keepdims, noop_with_empty_axes)


@tail_op("ReduceProd", cpp="")
def reduce_prod(x: N, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> N:
    """Return the products."""
    return reduced(np.multiply, x, 1, axes, keepdims, noop_with_empty_axes)


@tail_op("ReduceMean", cpp="")
def reduce_mean(x: N, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> N:
    """Return the means; those of integers are cut, those of nothing are 0."""
    if not axes and noop_with_empty_axes:
        return x
    wide = x.astype(np.float64) if x.dtype.kind == "f" else x
    total = reduced(np.add, wide, 0, axes, keepdims, 0)
    count = x.size // max(total.size, 1) or 1
    mean = total / count if x.dtype.kind == "f" else np.where(total < 0, -(-total // count), total // count)
    return np.asarray(mean, x.dtype)


@tail_op("Softmax", cpp="", older={13: {"axis": 1, "joint": 1}})
def softmax(x: F, *, axis: int = -1, joint: int = 0) -> F:
    """Return exp(x) over its sum along an axis; `joint`: along it and all axes after it, as before opset 13."""
    axis = axis_of(axis, x.ndim)
    size = int(np.prod(x.shape[axis:])) if joint else x.shape[axis]
    wide = x.astype(np.float64).reshape(int(np.prod(x.shape[:axis])), size, -1 if x.size else 0)
    powers = np.exp(wide - np.max(wide, axis=1, keepdims=True, initial=-np.inf))
    return np.asarray(powers / reduced(np.add, powers, 0, [1], 1, 0), x.dtype).reshape(x.shape)


@tail_op("CumSum", cpp="")
def cum_sum(x: N, axis: Ints, *, exclusive: int = 0, reverse: int = 0) -> N:
    """Return the sums up to each element."""
    along = np.moveaxis(x, axis_of(axis[0], x.ndim), -1)
    along = along[..., ::-1] if reverse else along
    wide = np.cumsum(along, axis=-1, dtype=np.float64 if x.dtype.kind == "f" else x.dtype)
    if exclusive:
        wide = np.concatenate([np.zeros_like(wide[..., :1]), wide[..., :-1]], axis=-1)
    return np.moveaxis((wide[..., ::-1] if reverse else wide).astype(x.dtype), -1, axis_of(axis[0], x.ndim))


def reduced(
    ufunc: np.ufunc, x: NDArray[Any], first: float, axes: list[int] | None, keepdims: int, noop: int
) -> NDArray[Any]:
    """Return the results of a function of two numbers along axes (all if there are none), beginning with `first`."""
    if not axes and noop:
        return x
    chosen = sorted(axis_of(axis, x.ndim) for axis in axes) if axes else list(range(x.ndim))
    kept = [axis for axis in range(x.ndim) if axis not in chosen]
    rows = np.transpose(x, (*chosen, *kept)).reshape(
        -1 if x.size else int(np.prod([x.shape[a] for a in chosen])), *(x.shape[axis] for axis in kept)
    )
    dtype = np.float64 if x.dtype.kind == "f" else x.dtype
    start = np.full((1, *rows.shape[1:]), first, dtype)
    y = ufunc.accumulate(np.concatenate([start, rows.astype(dtype)]), axis=0)[-1].astype(x.dtype)
    return (
        np.asarray(y).reshape([1 if axis in chosen else x.shape[axis] for axis in range(x.ndim)])
        if keepdims
        else np.asarray(y)
    )
