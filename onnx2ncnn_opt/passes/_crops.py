"""The part of its operand that a Crop keeps, if it is known at compile time."""

from collections.abc import Mapping
from typing import TypeAlias

from onnx2ncnn_opt.ir.graph import Blob, Layer

_TO_THE_END = (-233, 0x7FFFFFFF)

Ranges: TypeAlias = Mapping[int, tuple[int, int]]
"""The start and the end of the kept part, for each cut axis."""


def ranges(crop: Layer) -> Ranges | None:
    """Return the range that the Crop keeps of each axis it names; None if one is unknown."""
    removed = ends_cut(crop)
    if removed is None:
        return None
    kept: dict[int, tuple[int, int]] = {}
    for axis, (first, last) in removed.items():
        size = crop.input.known_shape[axis]
        if not isinstance(size, int):
            return None
        kept[axis] = first, size - last
    return kept


def ends_cut(crop: Layer) -> Ranges | None:
    """Return how many elements the Crop removes at both ends of each axis it names; None if one number is unknown.

    The axes may be dynamic.
    """
    if not _is_plain(crop):
        return None
    before, after = crop.input.shape, crop.output.shape
    if before is None or after is None or not len(crop["starts"]) == len(crop["axes"]) > 0:
        return None
    removed: dict[int, tuple[int, int]] = {}
    for start, axis in zip(crop["starts"], crop["axes"], strict=True):
        axis %= len(before)
        first = start if start >= 0 else before[axis] + start
        last = before[axis] - first - after[axis]
        if not isinstance(first, int) or not isinstance(last, int) or min(first, last) < 0 or axis in removed:
            return None
        removed[axis] = first, last
    return removed


def part(crop: Layer) -> tuple[int, int, int] | None:
    """Return the only axis that the Crop cuts, its start and its end; None for several axes or unknown ranges."""
    kept = ranges(crop)
    if kept is None or len(kept) != 1:
        return None
    [(axis, (start, end))] = kept.items()
    return axis, start, end


def last_row(crop: Layer) -> tuple[int, int, int] | None:
    """Return axis, `starts` and `ends` of a Crop that keeps the last element of one axis; None for other Crops."""
    if not _is_plain(crop) or crop["starts"] != (-1,) or len(crop["ends"]) != 1 or len(crop["axes"]) != 1:
        return None
    shape, end = crop.input.shape, crop["ends"][0]
    return None if shape is None or end not in _TO_THE_END else (crop["axes"][0] % len(shape), -1, _TO_THE_END[0])


def _is_plain(crop: Layer) -> bool:
    """Return True if the Crop has no expressions and no other operand."""
    return len(crop.inputs) == 1 and not set(crop.params) - {"starts", "ends", "axes", "featmask", "shape_hints"}


def cropped(like: Layer, source: Blob, kept: Ranges) -> Layer:
    """Return a Crop that keeps these ranges of another blob."""
    starts, ends = zip(*kept.values(), strict=True)
    params = {"starts": starts, "ends": ends, "axes": tuple(kept)}
    return Layer("Crop", like.name, [source], (), params, origin=like.traced)
