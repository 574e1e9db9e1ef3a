"""Picking and placing single elements by constant indices."""

from __future__ import annotations

import numpy as np

from onnx2ncnn_opt.ir.dim import Shape, known
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.importer import ImportContext
from onnx2ncnn_opt.onnx.ops.pad_slice import crop, pick
from onnx2ncnn_opt.onnx.ops.shape import expand
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Tensor, Value

# Single elements that are picked as layers of their own, at most.
_MOST_RUNS = 256


@onnx_op("GatherElements", since=11, integers=True)
def gather_elements(im: ImportContext, data: Value, indices: Array, *, axis: int = 0) -> Value:
    """Crop and Concat of constant indices, each of which may stand for a whole row."""
    axis = im.axis(axis, data.rank)
    shape = _fixed(im, data.shape)
    if indices.ndim != data.rank:
        raise im.refuse(f"indices of rank {indices.ndim} for rank {data.rank}")
    if indices.size and (indices.min() < -shape[axis] or indices.max() >= shape[axis]):
        raise im.refuse(f"indices {indices.min()} to {indices.max()} are not all in an axis of size {shape[axis]}")
    indices = np.where(indices < 0, indices + shape[axis], indices)
    places: list[Array] = list(np.indices(indices.shape, sparse=True))
    if isinstance(data, Constant):
        places[axis] = indices
        return Constant(data.array[tuple(places)])
    row = np.moveaxis(indices, axis, 0).reshape(indices.shape[axis], -1)
    if (row == row[:, :1]).all():
        for other, size in enumerate(indices.shape):
            if other != axis and size < shape[other]:
                data = crop(im, data, other, 0, size)
        return pick(im, data, axis, row[:, 0])
    places[axis] = indices
    return _take(im, data, places, shape)


@onnx_op("GatherND", since=11, integers=True)
def gather_nd11(im: ImportContext, data: Value, indices: Array) -> Value:
    """Crop and Concat of constant indices."""
    return gather_nd12(im, data, indices)


@onnx_op("GatherND", since=12, integers=True)
def gather_nd12(im: ImportContext, data: Value, indices: Array, *, batch_dims: int = 0) -> Value:
    """Crop and Concat of constant indices."""
    shape = _fixed(im, data.shape)
    picked = batch_dims + indices.shape[-1]
    limits = np.array(shape[batch_dims:picked])
    if (indices < -limits).any() or (indices >= limits).any():
        raise im.refuse(f"indices are not all in axes of sizes {limits.tolist()}")
    indices = np.where(indices < 0, indices + limits, indices)
    outer = np.indices(indices.shape[:-1], sparse=True)[:batch_dims]
    return _take(im, im.tensor(data), [*outer, *np.moveaxis(indices, -1, 0)], shape[:picked])


def _take(im: ImportContext, data: Tensor, indices: list[Array], shape: tuple[int, ...]) -> Value:
    """``data[indices]``, an array of indices for each of the first axes, whose sizes are `shape`."""
    places = np.zeros((), np.int64)
    for index, size in zip(indices, shape, strict=True):
        places = places * size + index
    flat = im.reshape(data, (int(np.prod(shape)), *data.shape[len(shape) :]))
    assert isinstance(flat, Tensor)
    # Axes along which nothing changes are repeated at the end.
    kept = tuple(
        slice(None) if (places != places.take([0], axis)).any() else slice(0, 1) for axis in range(places.ndim)
    )
    few = places[kept]
    runs = 1 + int((np.diff(few.reshape(-1)) != 1).sum())
    if runs > _MOST_RUNS:
        raise im.refuse(f"its constant indices pick {runs} separate pieces")
    picked = pick(im, flat, 0, few)
    wanted: Shape = (*places.shape, *data.shape[len(shape) :])
    return picked if picked.shape == wanted else expand(im, picked, wanted)


def _fixed(im: ImportContext, shape: Shape) -> tuple[int, ...]:
    if not all(isinstance(size, int) for size in shape):
        raise im.refuse("the operand has sizes that are not fixed", "bind them with --shape")
    return known(shape)
