from __future__ import annotations

from collections.abc import Iterator

from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.rewrite.rule import Change, Miss, attempt, graph_pass, require


@graph_pass(exact=True, kept="assignments to slices, and feature pyramids")
def fuse_concat_concat(graph: Graph) -> Iterator[Change | Miss]:
    """a, b ── Concat ── x; x, c ── Concat ──   ⇒   a, b, c ── Concat ──"""
    for layer in graph.layers:
        if layer.type == "Concat":
            for blob in layer.inputs:
                if blob.producer is not None and blob.producer.type == "Concat":
                    yield from attempt(layer, _merge, graph, blob.producer, layer)


def _merge(graph: Graph, inner: Layer, outer: Layer) -> Change:
    """Let `outer` read what `inner` reads."""
    blob = inner.output
    require(blob.uses == 1, f"'{blob.name}' is also used elsewhere")
    require(not (inner["featmask"] or outer["featmask"]), "a layer has a feature mask")
    require(blob.shape is not None, f"the shape of '{blob.name}' is unknown")
    assert blob.shape is not None
    require(inner["axis"] % len(blob.shape) == outer["axis"] % len(blob.shape), "the axes differ")
    parts: list[Blob] = []
    for part in outer.inputs:
        parts.extend(inner.inputs if part is blob else (part,))
    graph.set_inputs(outer, parts)
    outer.origin = tuple(dict.fromkeys((*inner.origin, *outer.origin)))
    graph.remove(inner)
    return Change((inner,), (outer,))
