"""Operators that choose elements: the largest, the different, those that are not zero, boxes."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx2ncnn_opt.onnx.tail.operators.checks import axis_of
from onnx2ncnn_opt.onnx.tail.registry import F4, Ints, L, N, T, tail_op


@tail_op("TopK", cpp="")
def top_k(x: N, k: Ints, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[N, L]:
    """Return the k largest or smallest elements and their indices, the lower index first; NaN is the largest."""
    axis = axis_of(axis, x.ndim)
    [count] = k
    if not 0 <= count <= x.shape[axis]:
        raise ValueError(f"k = {count} of {x.shape[axis]}")
    rows = np.moveaxis(x, axis, -1)
    if largest:
        order = rows.shape[-1] - 1 - np.argsort(rows[..., ::-1], -1, "stable")[..., ::-1]
    else:
        order = np.argsort(rows, -1, "stable")
    indices = np.moveaxis(order[..., :count], -1, axis).astype(np.int64)
    return np.take_along_axis(x, indices, axis), indices


@tail_op("ArgMax", cpp="")
def arg_max(x: N, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> L:
    """Return the index of the largest element; NaN is larger than all."""
    return chosen(np.argmax, x, axis, keepdims, select_last_index)


@tail_op("ArgMin", cpp="")
def arg_min(x: N, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> L:
    """Return the index of the smallest element; NaN is smaller than all."""
    return chosen(np.argmin, x, axis, keepdims, select_last_index)


def chosen(choose: Callable[..., Any], x: NDArray[Any], axis: int, keepdims: int, last: int) -> NDArray[Any]:
    """Return the first or last index that a function chooses."""
    axis = axis_of(axis, x.ndim)
    index = choose(np.flip(x, axis) if last else x, axis, keepdims=bool(keepdims))
    return np.asarray(x.shape[axis] - 1 - index if last else index, np.int64)


@tail_op("NonZero", cpp="")
def non_zero(x: T) -> L:
    """Return the indices of elements that are not 0, one row for each axis."""
    return np.stack(np.nonzero(np.atleast_1d(x))).astype(np.int64)


@tail_op("Unique", cpp="")
def unique(x: T, *, axis: int | None = None, sorted: int = 1) -> tuple[T, L, L, L]:
    """Return the different elements or slices, their first indices, the inverse and the counts."""
    slices = x.reshape(-1) if axis is None else np.moveaxis(x, axis, 0)
    rows = slices.reshape(len(slices), -1 if slices.size else int(np.prod(slices.shape[1:])))
    order = np.lexsort((np.arange(len(rows)), *rows.T[::-1]))
    starts = np.ones(len(rows), bool)
    starts[1:] = np.any(rows[order[1:]] != rows[order[:-1]], axis=1)
    group = np.cumsum(starts) - 1
    first, counts = order[starts], np.bincount(group)
    inverse = np.empty_like(order)
    inverse[order] = group
    if not sorted:
        ranks = np.argsort(first)
        first, counts = first[ranks], counts[ranks]
        inverse = np.argsort(ranks)[inverse]
    y = slices[first] if axis is None else np.moveaxis(slices[first], 0, axis)
    return y, first.astype(np.int64), inverse.astype(np.int64), counts.astype(np.int64)


@tail_op("NonMaxSuppression", cpp="")
def non_max_suppression(
    boxes: F4,
    scores: F4,
    max_output_boxes_per_class: Ints | None = None,
    iou_threshold: F4 | None = None,
    score_threshold: F4 | None = None,
    *,
    center_point_box: int = 0,
) -> L:
    """Return [batch, class, box] of boxes that overlap no box with a higher score by more than the threshold."""
    most = max_output_boxes_per_class[0] if max_output_boxes_per_class else 0
    overlap = np.float32(0) if iou_threshold is None else iou_threshold.reshape(())
    if boxes.ndim != 3 or boxes.shape[2] != 4 or scores.ndim != 3 or boxes.shape[:2] != scores.shape[::2]:
        raise ValueError(f"boxes of the shape {boxes.shape} and scores of {scores.shape}")
    if not 0 <= overlap <= 1:
        raise ValueError(f"iou_threshold = {overlap}")
    found: list[tuple[int, int, int]] = []
    for batch, label in np.ndindex(scores.shape[:2]) if most > 0 else ():
        values = scores[batch, label]
        order = np.argsort(-values, kind="stable")
        if score_threshold is not None:
            order = order[values[order] > score_threshold.reshape(())]
        corners = corners_of(boxes[batch], center_point_box)
        count = 0
        while len(order) and count < most:
            found.append((batch, label, int(order[0])))
            count += 1
            order = order[1:][~overlaps(corners[:, order[0]], corners[:, order[1:]], overlap)]
    return np.array(found, np.int64).reshape(-1, 3)


def corners_of(boxes: NDArray[Any], center_point_box: int) -> NDArray[Any]:
    """Return the rows x1, y1, x2, y2 of boxes, the lower ones first."""
    a, b, c, d = boxes.T
    if center_point_box:
        return np.stack([a - c / 2, b - d / 2, a + c / 2, b + d / 2])
    swapped_y, swapped_x = a >= c, b >= d
    lows = np.where(swapped_x, d, b), np.where(swapped_y, c, a)
    return np.stack([*lows, np.where(swapped_x, b, d), np.where(swapped_y, a, c)])


def overlaps(box: NDArray[Any], others: NDArray[Any], threshold: Any) -> NDArray[Any]:
    """Return True for boxes whose intersection over union with a box is above a threshold."""
    low = np.where(box[:2, None] < others[:2], others[:2], box[:2, None])
    high = np.where(others[2:] < box[2:, None], others[2:], box[2:, None])
    width, height = high - low
    shared = width * height
    area = (box[2] - box[0]) * (box[3] - box[1])
    areas = (others[2] - others[0]) * (others[3] - others[1])
    union = area + areas - shared
    apart = (high <= low).any(axis=0) | (shared <= 0) | (area <= 0) | (areas <= 0) | (union <= 0)
    return np.asarray(~apart & (shared / union > threshold))
