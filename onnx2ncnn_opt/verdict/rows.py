"""The rows of a tail's output that are not where they should be, because ties and thresholds decide about rows."""

import math
from bisect import bisect_left

import numpy as np

from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.verdict.errors import DEFAULT

_MAX_ROWS = 2048  # more rows are not compared in another order
_LARGEST = 1e18
_MARGIN = 2.0**-21  # of the largest coordinate: rounding errors of corners


def undecided(actual: Array, expected: Array, axis: int | None = None) -> tuple[int, int]:
    """Return the number of rows of an output that are not at their expected place, and the number of all rows.

    If the shapes differ in an axis, rows lie along it, else along `axis`. Without one, arrays of three axes or more
    have the columns of a row in the last axis; in other arrays each number is a row. Rows are equal within the usual
    tolerance for each column. Example: expected are a b c d; then b a c d, a x b c d, and a b c have one such row each.
    """
    if actual.ndim != expected.ndim or actual.dtype != expected.dtype:
        return 1, 1
    axes = [axis for axis, sizes in enumerate(zip(actual.shape, expected.shape, strict=True)) if sizes[0] != sizes[1]]
    if len(axes) > 1:
        return 1, 1
    rows, right = (_rows(array, axes[0] if axes else axis) for array in (actual, expected))
    total = max(len(rows), len(right))
    allowed = _allowed(right)
    size = min(len(rows), len(right))
    places = np.full(len(rows), -1)
    same = _agree(rows[:size], right[:size], allowed)
    places[:size][same] = np.flatnonzero(same)
    left, free = np.flatnonzero(places < 0), np.setdiff1d(np.arange(len(right)), places)
    if len(left) <= _MAX_ROWS >= len(free):
        for row in left:
            fits = np.flatnonzero(_agree(rows[row], right[free], allowed))
            if fits.size:
                places[row] = free[fits[0]]
                free = np.delete(free, fits[0])
    return total - _longest_rise([int(place) for place in places if place >= 0]), total


def wrong_selection(rows: Array, boxes: Array, scores: Array, most: int, iou: float, conf: float) -> str:
    """Return how rows (x1, y1, x2, y2, score, class) differ from every greedy selection of boxes; "" if they do not.

    `scores` are [classes, boxes]. Equal scores may be in any order, and an IoU may have rounding errors. Boxes whose
    area is no float32 prove nothing.
    """
    if not (np.abs(boxes) < _LARGEST).all():
        return ""
    taken = np.zeros(scores.shape, bool)
    for *box, score, label in rows:
        is_class = 0 <= label < len(scores) and label == int(label)
        near = (np.abs(boxes - box) <= _MARGIN * np.abs(box).max()).all(1)
        fits = near & (scores[int(label)] == score) & ~taken[int(label)] if is_class else near & False
        if not fits.any() or not score > conf:
            return f"no candidate is {[round(float(x), 3) for x in box]} with score {score:.6g} and class {label:g}"
        taken[int(label), np.argmax(fits)] = True
    if len(rows) > most or (np.diff(rows[:, 4]) > 0).any():
        return f"they are not the best {most} in order"
    for label in range(len(scores)):
        own, others = rows[rows[:, 5] == label], np.flatnonzero((scores[label] > conf) & ~taken[label])
        shared = _overlaps(own[:, :4], own[:, :4], -_MARGIN) > iou
        if np.triu(shared, 1).any():
            return f"two boxes of class {label} overlap"
        left = scores[label, others]
        is_removed = (_overlaps(boxes[others], own[:, :4], _MARGIN) > iou) & (left[:, None] <= own[:, 4])
        is_beyond = left <= rows[-1, 4] if len(rows) == most else np.zeros(len(left), bool)
        if not (is_removed.any(1) | is_beyond).all():
            return f"a box of class {label} is missing, which no better one overlaps"
    return ""


def _overlaps(boxes: Array, others: Array, margin: float) -> Array:
    """Return the IoU of all pairs, at most (`margin` above 0) or at least (below 0) for corners that are so inexact."""
    a, b = boxes[:, None].astype(np.float64), others[None].astype(np.float64)
    inexact = margin * np.maximum(np.abs(a).max(-1), np.abs(b).max(-1))[..., None]
    sides = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2]) + inexact
    shared = sides.clip(0).prod(-1)
    areas = sum((x[..., 2:] - x[..., :2] - inexact).clip(0).prod(-1) for x in (a, b))
    return np.asarray(shared / np.maximum(areas - shared, 1e-30))


def _rows(array: Array, axis: int | None) -> Array:
    if axis is not None:
        array = np.moveaxis(array, axis, 0)
        return array.reshape(len(array), math.prod(array.shape[1:]))
    columns = array.shape[-1] if array.ndim > 2 else 1
    return array.reshape(math.prod(array.shape[:-1]) if array.ndim > 2 else array.size, columns)


def _allowed(rows: Array) -> Array:
    """Return the allowed error of each column."""
    if rows.dtype.kind != "f":
        return np.zeros(rows.shape[1])
    size = np.abs(rows.astype(np.float64))
    largest = np.where(np.isfinite(size), size, 0.0).max(axis=0, initial=0.0)
    return np.asarray(np.maximum(DEFAULT.relative * largest, DEFAULT.absolute))


def _agree(rows: Array, right: Array, allowed: Array) -> Array:
    """Return which rows agree in all columns."""
    if right.dtype.kind != "f":
        return np.asarray((rows == right).all(axis=-1))
    a, b = rows.astype(np.float64), right.astype(np.float64)
    with np.errstate(invalid="ignore"):
        close = (np.abs(a - b) <= allowed) | (a == b) | (np.isnan(a) & np.isnan(b))
    return np.asarray(close.all(axis=-1))


def _longest_rise(places: list[int]) -> int:
    """Return the length of the longest increasing subsequence."""
    ends: list[int] = []
    for place in places:
        index = bisect_left(ends, place)
        ends[index : index + 1] = [place]
    return len(ends)
