from __future__ import annotations

from collections.abc import Iterator

from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.passes._views import Writer
from onnx2ncnn_opt.rewrite.rule import Change, Miss, attempt, graph_pass, require


@graph_pass(exact=True, kept="what other passes leave between a Slice and a Concat")
def eliminate_slice_concat(graph: Graph) -> Iterator[Change | Miss]:
    """a, b ── Concat ── Slice ── c, d   ⇒   a, b; and x ── Slice ── Concat ──   ⇒   x ──

    Where the parts are the same in number, order and size, along the same axis.
    """
    writer = Writer(graph)
    for layer in graph.layers:
        other = layer.inputs[0].producer if layer.graph is graph and layer.inputs else None
        if other is None or {other.type, layer.type} != {"Concat", "Slice"}:
            continue
        if all(blob.producer is other for blob in layer.inputs):
            yield from attempt(layer, _eliminate, writer, other, layer)


def _eliminate(writer: Writer, other: Layer, layer: Layer) -> Change:
    """Use what stands before the first of both layers instead of what comes out of the second."""
    require(not (other["featmask"] or layer["featmask"]), "a layer has a feature mask")
    whole = layer.inputs[0] if layer.type == "Slice" else other.inputs[0]
    require(whole.shape is not None, f"the shape of '{whole.name}' is unknown")
    assert whole.shape is not None
    rank = len(whole.shape)
    require(other["axis"] % rank == layer["axis"] % rank, "the axes differ")
    if layer.type == "Slice":
        same = [blob.shape for blob in other.inputs] == [blob.shape for blob in layer.outputs]
        require(same and None not in {blob.shape for blob in other.inputs}, "it is not cut where it was put together")
    else:
        whole_again = layer.inputs == other.outputs and layer.output.shape == whole.shape
        require(whole_again, "not all parts are put together in their order")
    pairs = list(zip(layer.outputs, other.inputs, strict=True))
    _require_free(pairs)
    users = [user for old, _ in pairs for user in old.users]
    for old, new in pairs:
        writer.take_over(old, new)
    writer.graph.remove(layer)
    removed = [layer]
    if not any(blob.uses for blob in other.outputs):
        writer.graph.remove(other)
        removed.append(other)
    return Change(tuple(removed), tuple(dict.fromkeys(users)))


def _require_free(pairs: list[tuple[Blob, Blob]]) -> None:
    """Every public name must find a blob that has none."""
    takers = [new for old, new in pairs if old.is_output]
    free = len(set(takers)) == len(takers) and not any(new.is_output or new.is_input for new in takers)
    require(free, "both ends are public names")
