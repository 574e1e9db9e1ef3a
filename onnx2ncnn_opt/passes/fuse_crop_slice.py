from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.passes._crops import part as part_of
from onnx2ncnn_opt.rewrite.rule import Change, Miss, attempt, graph_pass, require


class _Part(NamedTuple):
    """What a Crop keeps of one axis."""

    start: int
    end: int
    crop: Layer


@graph_pass(exact=True)
def fuse_crop_slice(graph: Graph) -> Iterator[Change | Miss]:
    """x ── Crop ── a, x ── Crop ── b   ⇒   x ── Slice ── a, b

    Crops of one blob that share it out along one axis without a gap or an overlap.
    """
    crops: dict[tuple[Blob, int], list[_Part]] = {}
    for layer in graph:
        if layer.type == "Crop" and (found := part_of(layer)) is not None:
            axis, start, end = found
            crops.setdefault((layer.input, axis), []).append(_Part(start, end, layer))
    for (blob, axis), parts in crops.items():
        if len(parts) > 1:
            yield from attempt(parts[0].crop, _merge, graph, blob, axis, parts)


def _merge(graph: Graph, blob: Blob, axis: int, parts: list[_Part]) -> Change:
    """Put one Slice before the first of the Crops, and let it make all of their blobs."""
    first, ordered = parts[0].crop, sorted(parts, key=lambda part: part.start)
    start = 0
    for part in ordered:
        require(part.start >= start, f"'{part.crop.output.name}' overlaps another part of '{blob.name}'")
        require(part.start == start, f"no Crop takes {start} to {part.start} of '{blob.name}'")
        start = part.end
    assert blob.shape is not None
    require(start == blob.shape[axis], f"no Crop takes what comes from {start} on in '{blob.name}'")
    crops = tuple(part.crop for part in ordered)
    params: dict[str | int, Any] = {"slices": tuple(part.end - part.start for part in ordered), "axis": axis}
    if mask := reduce(or_, (crop["featmask"] for crop in crops)):
        params["featmask"] = mask
    tops = [Blob(crop.output.name, crop.output.shape, crop.output.batch) for crop in crops]
    origin = [name for crop in crops for name in crop.origin]
    # Asked now: it may be a part of a blob whose Crops have just become a Slice.
    new = graph.add(Layer("Slice", first.name, [first.input], tops, params, origin=origin), before=first)
    replaced = {crop.output: top for crop, top in zip(crops, tops, strict=True)}
    for old, top in replaced.items():
        graph.redirect(old, top)
    if any(old.is_output for old in replaced):
        graph.outputs = [replaced.get(output, output) for output in graph.outputs]
    for crop in crops:
        graph.remove(crop)
    return Change(crops, (new,))
