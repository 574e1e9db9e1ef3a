from collections.abc import Iterator
from typing import NamedTuple

from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.passes._crops import part as part_of
from onnx2ncnn_opt.rewrite.rule import Miss, Replacement, attempt, graph_pass, require


class _Kept(NamedTuple):
    """The part of an axis that a Crop keeps."""

    start: int
    end: int
    crop: Layer


@graph_pass(exact=True)
def fuse_crop_slice(graph: Graph) -> Iterator[Miss | Replacement]:
    """x ── Crop ── a, x ── Crop ── b   ⇒   x ── Slice ── a, b

    For Crops that divide a blob along one axis, without gaps and overlaps.
    """
    crops: dict[tuple[Blob, int], list[_Kept]] = {}
    for layer in graph:
        if layer.type == "Crop" and (part := part_of(layer)) is not None:
            axis, start, end = part
            crops.setdefault((layer.input, axis), []).append(_Kept(start, end, layer))
    for (blob, axis), parts in crops.items():
        if len(parts) > 1:
            yield from attempt(parts[0].crop, _merge, blob, axis, parts)


def _merge(blob: Blob, axis: int, parts: list[_Kept]) -> Replacement:
    """Return the edit that replaces the Crops by one Slice, before the first of them."""
    first, ordered = parts[0].crop, sorted(parts, key=lambda part: part.start)
    start = 0
    for part in ordered:
        require(part.start >= start, f"'{part.crop.output.name}' overlaps another part of '{blob.name}'")
        require(part.start == start, f"no Crop takes {start} to {part.start} of '{blob.name}'")
        start = part.end
    require(start == blob.known_shape[axis], f"no Crop takes '{blob.name}' from {start} on")
    crops = tuple(part.crop for part in ordered)
    params = {"slices": tuple(part.end - part.start for part in ordered), "axis": axis}
    tops = [Blob(crop.output.name, crop.output.shape, crop.output.batch) for crop in crops]
    # Read the input now, because an earlier edit may have replaced it by an output of a Slice.
    new = Layer("Slice", first.name, [first.input], tops, params)
    reads = {crop.output: top for crop, top in zip(crops, tops, strict=True)}
    return Replacement(crops, added=[(new, first)], reads=reads)
