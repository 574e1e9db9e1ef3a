from __future__ import annotations

from collections.abc import Iterator

from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.passes._views import Writer
from onnx2ncnn_opt.rewrite.rule import Change, graph_pass


@graph_pass(exact=True)
def eliminate_slice_concat(graph: Graph) -> Iterator[Change]:
    """a, b ── Concat ── Slice ── c, d   ⇒   a, b; and x ── Slice ── Concat ──   ⇒   x ──

    Where the parts are the same in number, order and size, along the same axis.
    """
    writer = Writer(graph)
    for layer in graph.layers:
        if layer.graph is not graph:
            continue
        pairs = _uncut(layer) if layer.type == "Slice" else _rejoined(layer) if layer.type == "Concat" else None
        if pairs is None:
            continue
        users = [user for old, _ in pairs for user in old.users]
        other = layer.inputs[0].producer
        for old, new in pairs:
            writer.take_over(old, new)
        graph.remove(layer)
        removed = [layer]
        if other is not None and not any(blob.uses for blob in other.outputs):
            graph.remove(other)
            removed.append(other)
        yield Change(tuple(removed), tuple(dict.fromkeys(users)))


def _axis(layer: Layer, blob: Blob) -> int | None:
    return layer["axis"] % len(blob.shape) if blob.shape else None


def _uncut(layer: Layer) -> list[tuple[Blob, Blob]] | None:
    """The outputs of a Slice with the blobs that were concatenated before it."""
    concat = layer.input.producer
    if concat is None or concat.type != "Concat" or layer["featmask"] or concat["featmask"]:
        return None
    same = [a.shape for a in concat.inputs] == [b.shape for b in layer.outputs]
    if None in [a.shape for a in concat.inputs] or not same:
        return None
    if _axis(concat, layer.input) != _axis(layer, layer.input):
        return None
    pairs = list(zip(layer.outputs, concat.inputs, strict=True))
    return pairs if _all_free(pairs) else None


def _rejoined(layer: Layer) -> list[tuple[Blob, Blob]] | None:
    """The output of a Concat with the blob whose parts it puts together again."""
    cut = layer.inputs[0].producer
    if cut is None or cut.type != "Slice" or cut.outputs != layer.inputs or layer["featmask"] or cut["featmask"]:
        return None
    if cut.input.shape is None or cut.input.shape != layer.output.shape:
        return None
    if _axis(cut, cut.input) != _axis(layer, cut.input):
        return None
    pairs = [(layer.output, cut.input)]
    return pairs if _all_free(pairs) else None


def _all_free(pairs: list[tuple[Blob, Blob]]) -> bool:
    """Whether every public name finds a blob that has none."""
    takers = [new for old, new in pairs if old.is_output]
    return len(set(takers)) == len(takers) and not any(new.is_output or new.is_input for new in takers)
