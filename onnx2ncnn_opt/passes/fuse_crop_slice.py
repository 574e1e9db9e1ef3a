from collections import defaultdict

from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.passes._crops import part as part_of
from onnx2ncnn_opt.rewrite.rule import Edits, Replacement, attempt, graph_pass, require

_Kept = tuple[int, int, Layer]  # start and end of the part that a Crop keeps


@graph_pass(exact=True)
def fuse_crop_slice(graph: Graph) -> Edits:
    """x ── Crop ── a, x ── Crop ── b   ⇒   x ── Slice ── a, b

    For Crops that divide a blob along one axis, without gaps and overlaps.
    """
    crops = defaultdict[tuple[Blob, int], list[_Kept]](list)
    for layer in graph:
        if layer.type == "Crop" and (part := part_of(layer)) is not None:
            axis, start, end = part
            crops[layer.input, axis].append((start, end, layer))
    for (blob, axis), parts in crops.items():
        if len(parts) > 1:
            yield from attempt(parts[0][-1], _merge, blob, axis, parts)


def _merge(blob: Blob, axis: int, parts: list[_Kept]) -> Replacement:
    """Return the edit that replaces the Crops by one Slice, before the first of them."""
    first, ordered = parts[0][-1], sorted(parts, key=lambda part: part[0])
    done = 0
    for start, end, crop in ordered:
        require(start >= done, f"'{crop.output.name}' overlaps another part of '{blob.name}'")
        require(start == done, f"no Crop takes {done} to {start} of '{blob.name}'")
        done = end
    require(done == blob.known_shape[axis], f"no Crop takes '{blob.name}' from {done} on")
    crops = tuple(crop for *_, crop in ordered)
    params = {"slices": tuple(end - start for start, end, _ in ordered), "axis": axis}
    tops = [Blob(crop.output.name, crop.output.shape, crop.output.batch) for crop in crops]
    # Read the input now, because an earlier edit may have replaced it by an output of a Slice.
    new = Layer("Slice", first.name, [first.input], tops, params)
    reads = {crop.output: top for crop, top in zip(crops, tops, strict=True)}
    return Replacement(crops, added=[(new, first)], reads=reads)
