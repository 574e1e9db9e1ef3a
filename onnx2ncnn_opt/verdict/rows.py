"""The verdict on boxes that a net selects from its own candidates."""

from typing import Any

import numpy as np

from onnx2ncnn_opt.outputs import Status
from onnx2ncnn_opt.runtime.base import Array

_LARGEST = 1e18  # of corners: the area of larger boxes is no float32
_MARGIN = 2.0**-21  # of the largest coordinate: rounding errors of corners


def judge_selection(rows: Array, boxes: Array, *others: Any) -> tuple[Status, str]:
    """Return the status of selected boxes with the reason, see `wrong_selection`; `others` are its other arguments."""
    if not (np.abs(boxes) < _LARGEST).all():
        return "unproven", "the areas of its boxes are too large for float32"
    problem = wrong_selection(rows, boxes, *others)
    return ("mismatch", f"its boxes are not a selection from the net's values: {problem}") if problem else ("ok", "")


def wrong_selection(
    rows: Array, boxes: Array, scores: Array, most: int, iou: float, conf: float, table: Array | None = None
) -> str:
    """Return how rows (x1, y1, x2, y2, score, class) differ from every greedy selection of boxes; "" if they do not.

    `scores` are [classes, boxes]. A `table` has other rows, of the boxes of one class; then rows of zeros follow the
    selected ones. Equal scores may be in any order, and an IoU may have rounding errors.
    """
    labels, index = np.nonzero(scores > conf)
    corners = np.concatenate([np.minimum(boxes[:, :2], boxes[:, 2:]), np.maximum(boxes[:, :2], boxes[:, 2:])], 1)[index]
    found, places = scores[labels, index], list[int]()
    if table is None:
        table = np.concatenate([corners, found[:, None], labels[:, None]], 1)
    else:
        table, rows = table[index], rows.reshape(-1, table.shape[1])
        rows = rows[: np.flatnonzero(rows.any(1)).max(initial=-1) + 1]
    for row in rows:
        allowed = _MARGIN * np.abs(row)
        allowed[:4] = allowed[:4].max()  # corners have rounding errors of the largest one
        fits = (np.abs(table - row) <= allowed).all(1)
        fits[places] = False
        if not fits.any():
            return f"no candidate is {row.round(3).tolist()}"
        places.append(int(np.argmax(fits)))
    if len(rows) > most or (np.diff(found[places]) > 0).any():
        return f"they are not the best {most} in order"
    is_other = ~np.isin(np.arange(len(found)), places)
    shared = (labels[places, None] == labels[places]) & (_overlaps(corners[places], corners[places], -_MARGIN) > iou)
    if np.triu(shared, 1).any():
        return "two boxes of a class overlap"
    is_better = (labels[is_other, None] == labels[places]) & (found[is_other, None] <= found[places])
    is_removed = is_better & (_overlaps(corners[is_other], corners[places], _MARGIN) > iou)
    is_beyond = found[is_other] <= found[places[-1]] if len(rows) == most else np.zeros(is_other.sum(), bool)
    if not (is_removed.any(1) | is_beyond).all():
        return "a box is missing, which no better one overlaps"
    return ""


def _overlaps(boxes: Array, others: Array, margin: float) -> Array:
    """Return the IoU of all pairs, at most (`margin` above 0) or at least (below 0) for corners that are so inexact."""
    a, b = boxes[:, None].astype(np.float64), others[None].astype(np.float64)
    inexact = margin * np.maximum(np.abs(a).max(-1), np.abs(b).max(-1))[..., None]
    sides = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2]) + inexact
    shared = sides.clip(0).prod(-1)
    areas = sum((x[..., 2:] - x[..., :2] - inexact).clip(0).prod(-1) for x in (a, b))
    return np.asarray(shared / np.maximum(areas - shared, 1e-30))
