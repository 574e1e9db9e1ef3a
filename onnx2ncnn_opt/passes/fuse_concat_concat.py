from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.rewrite.rule import Edits, Replacement, attempt, graph_pass, known_shape, require


@graph_pass(exact=True, purpose="assignments to slices, and feature pyramids")
def fuse_concat_concat(graph: Graph) -> Edits:
    """a, b ── Concat ── x; x, c ── Concat ──   ⇒   a, b, c ── Concat ──"""
    for layer in graph.layers:
        outer = layer
        for blob in layer.inputs if layer.type == "Concat" else ():
            if blob.producer is not None and blob.producer.type == "Concat":
                outer = yield from attempt(outer, _merge, blob.producer, outer)


def _merge(inner: Layer, outer: Layer) -> Replacement:
    """Return the edit that makes `outer` read the inputs of `inner`."""
    blob = inner.output
    require(blob.uses == 1, f"'{blob.name}' is also used elsewhere")
    rank = len(known_shape(blob))
    require(inner["axis"] % rank == outer["axis"] % rank, "the axes differ")
    parts: list[Blob] = []
    for part in outer.inputs:
        parts.extend(inner.inputs if part is blob else (part,))
    return Replacement((inner, outer), takes={outer: outer.having(inputs=parts)})
