"""The verdict on boxes that a net selects from its own candidates."""

from typing import Any

import numpy as np

from onnx2ncnn_opt.outputs import Status
from onnx2ncnn_opt.runtime.base import Array

_LARGEST = 1e18  # of corners: the area of larger boxes is no float32
_MARGIN = 2.0**-21  # of the largest coordinate: rounding errors of corners


def judge_selection(rows: Array, boxes: Array, *limits: Any) -> tuple[Status, str]:
    """Return the status of selected boxes with the reason, see `wrong_selection`; `limits` are its other arguments."""
    if not (np.abs(boxes) < _LARGEST).all():
        return "unproven", "the areas of its boxes are too large for float32"
    problem = wrong_selection(rows, boxes, *limits)
    return ("mismatch", f"its boxes are not a selection from the net's values: {problem}") if problem else ("ok", "")


def wrong_selection(rows: Array, boxes: Array, scores: Array, most: int, iou: float, conf: float) -> str:
    """Return how rows (x1, y1, x2, y2, score, class) differ from every greedy selection of boxes; "" if they do not.

    `scores` are [classes, boxes]. Equal scores may be in any order, and an IoU may have rounding errors.
    """
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
