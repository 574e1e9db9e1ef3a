"""The part of its operand that a Crop keeps, if it is known at compile time."""

from collections.abc import Mapping
from typing import TypeAlias

from onnx2ncnn_opt.ir.dim import Dim
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.shapes.registry import evaluated

_PARAMS = {"starts", "ends", "axes", "featmask", "shape_hints"}
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
    removed: dict[int, tuple[int, int]] = {}
    for axis, first in (starts_of(crop) or {}).items():
        last = crop.input.known_shape[axis] - first - crop.output.known_shape[axis]
        if not isinstance(first, int) or not isinstance(last, int) or min(first, last) < 0:
            return None
        removed[axis] = first, last
    return removed or None


def starts_of(crop: Layer) -> Mapping[int, Dim] | None:
    """Return the index of the first element that the Crop keeps of each axis it names; None if one is unknown."""
    if len(crop.inputs) != 1 or set(crop.params) - {*_PARAMS, "starts_expr", "ends_expr", "axes_expr"}:
        return None
    before, after = crop.input.shape, crop.output.shape
    names = "starts", "axes"
    starts, axes = (evaluated(crop, f"{name}_expr") if crop[f"{name}_expr"] else crop[name] for name in names)
    if before is None or after is None or starts is None or axes is None or len(starts) != len(axes):
        return None
    pairs = [(axis % len(before), start) for start, axis in zip(starts, axes, strict=True)]
    firsts = {axis: before[axis] + start if isinstance(start, int) and start < 0 else start for axis, start in pairs}
    return firsts if len(firsts) == len(pairs) else None


def part(crop: Layer) -> tuple[int, int, int] | None:
    """Return the only axis that the Crop cuts, its start and its end; None for several axes or unknown ranges."""
    kept = ranges(crop)
    if kept is None or len(kept) != 1:
        return None
    [(axis, (start, end))] = kept.items()
    return axis, start, end


def last_row(crop: Layer) -> tuple[int, int, int] | None:
    """Return axis, `starts` and `ends` of a Crop that keeps the last element of one axis; None for other Crops."""
    if len(crop.inputs) != 1 or set(crop.params) - _PARAMS:  # with expressions, or another operand
        return None
    if crop["starts"] != (-1,) or len(crop["ends"]) != 1 or len(crop["axes"]) != 1:
        return None
    shape, end = crop.input.shape, crop["ends"][0]
    return None if shape is None or end not in _TO_THE_END else (crop["axes"][0] % len(shape), -1, _TO_THE_END[0])


def cropped(like: Layer, source: Blob, kept: Ranges) -> Layer:
    """Return a Crop that keeps these ranges of another blob."""
    starts, ends = zip(*kept.values(), strict=True)
    params = {"starts": starts, "ends": ends, "axes": tuple(kept)}
    return Layer("Crop", like.name, [source], (), params, origin=like.traced)
