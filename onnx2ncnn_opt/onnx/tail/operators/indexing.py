"""Gather, Scatter and OneHot. An index out of range is an error."""

from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from onnx2ncnn_opt.onnx.tail.operators.checks import axis_of, sized, wrapped
from onnx2ncnn_opt.onnx.tail.registry import I, L, M, N, T, tail_op

Reduction: TypeAlias = Literal["none", "add", "mul", "max", "min"]


@tail_op("Gather", cpp="")
def gather(x: T, indices: I, *, axis: int = 0) -> T:
    """Take slices of an axis."""
    axis = axis_of(axis, x.ndim)
    sized(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    return np.take(x, wrapped(indices, x.shape[axis]), axis)


@tail_op("GatherElements", cpp="")
def gather_elements(x: T, indices: I, *, axis: int = 0) -> T:
    """Take elements whose places differ from the indices' along one axis."""
    return x[places(x, indices, axis)]


@tail_op("ScatterElements", "Scatter", cpp="")
def scatter_elements(x: T, indices: I, updates: T, *, axis: int = 0, reduction: Reduction = "none") -> T:
    """Write elements to places that differ from the indices' along one axis; the last one of a place wins."""
    if updates.shape != indices.shape:
        raise ValueError(f"updates of the shape {updates.shape} for indices of {indices.shape}")
    return scattered(x, places(x, indices, axis), updates, reduction)


@tail_op("GatherND", cpp="")
def gather_nd(x: T, indices: L, *, batch_dims: int = 0) -> T:
    """Take slices at tuples of indices."""
    count = batch_dims + indices.shape[-1]
    if count > x.ndim or batch_dims >= indices.ndim or x.shape[:batch_dims] != indices.shape[:batch_dims]:
        raise ValueError(f"indices of the shape {indices.shape} into {x.shape}")
    sized(*indices.shape[:-1], *x.shape[count:])
    where: list[Any] = [*np.indices(indices.shape[:-1], sparse=True)[:batch_dims]]
    where += [wrapped(indices[..., i - batch_dims], x.shape[i]) for i in range(batch_dims, count)]
    return np.asarray(x[tuple(where)])


@tail_op("ScatterND", cpp="")
def scatter_nd(x: T, indices: L, updates: T, *, reduction: Reduction = "none") -> T:
    """Write slices at tuples of indices; the last one of a place wins."""
    count = indices.shape[-1]
    if count > x.ndim or updates.shape != indices.shape[:-1] + x.shape[count:]:
        raise ValueError(f"updates of the shape {updates.shape} at indices of {indices.shape} in {x.shape}")
    where = tuple(wrapped(indices[..., i], x.shape[i]) for i in range(count))
    return scattered(x, where, updates, reduction)


@tail_op("OneHot", cpp="")
def one_hot(indices: N, depth: M, values: T, *, axis: int = -1) -> T:
    """Return values[1] at the indices and values[0] elsewhere."""
    axis = axis_of(axis, indices.ndim + 1)
    size = int(depth.reshape(()))
    sized(*indices.shape, size)
    at = np.expand_dims(indices.astype(np.int64), axis)
    at = np.where(at < 0, at + size, at)
    classes = np.arange(size).reshape([-1] + [1] * (indices.ndim - axis))
    return np.asarray(np.where(classes == at, values[1], values[0]))


def places(x: NDArray[Any], indices: NDArray[Any], axis: int) -> tuple[NDArray[np.int64], ...]:
    """Return the places of elements as indices along all axes."""
    axis = axis_of(axis, x.ndim)
    if indices.ndim != x.ndim or any(
        a > b for i, (a, b) in enumerate(zip(indices.shape, x.shape, strict=True)) if i != axis
    ):
        raise ValueError(f"indices of the shape {indices.shape} into {x.shape}")
    grid: list[NDArray[np.int64]] = [*np.indices(indices.shape, sparse=True)]
    grid[axis] = wrapped(indices, x.shape[axis])
    return tuple(grid)


def scattered(x: NDArray[Any], where: tuple[Any, ...], updates: NDArray[Any], reduction: str) -> NDArray[Any]:
    """Return a copy with updates, one after the other."""
    y = x.copy()
    if reduction == "none":
        y[where] = updates
    else:
        ufuncs: dict[str, Any] = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
        ufuncs[reduction].at(y, where, updates)
    return y
