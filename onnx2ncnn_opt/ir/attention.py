"""The inputs of attention: queries, keys, values, a mask, and KV caches, which keep keys and values between runs.

SDPA's are q, k, v, (mask), (2 caches); MultiHeadAttention's are q, (k), (v), (mask), (2 caches).
"""

from collections.abc import Iterator

from onnx2ncnn_opt.ir.dim import Dim, symbol
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer

ATTENTION = frozenset({"SDPA", "MultiHeadAttention"})
_CACHES = 2  # of keys and of values


def operand_count(attention: Layer) -> int:
    """Return the number of inputs before mask and caches."""
    return len(attention.inputs) - bool(attention["attn_mask"]) - _CACHES * bool(attention["kv_cache"])


def mask_slot(attention: Layer) -> int | None:
    """Return the index of the mask among the inputs; None without a mask."""
    return operand_count(attention) if attention["attn_mask"] else None


def key_count(attention: Layer) -> Dim:
    """Return the number of keys of a query, with a symbol for those in a cache; 0 if the shape is not known."""
    keys = (attention.inputs[min(operand_count(attention), 2) - 1].shape or (0, 0))[-2]
    return keys + symbol("past") if attention["kv_cache"] else keys


def cache_pairs(graph: Graph) -> Iterator[tuple[Layer, str, Blob, Blob]]:
    """Yield each attention layer with a cache, the cache's role, and the blobs before and after a run."""
    for layer in graph:
        if not layer.is_custom and layer.get("kv_cache"):
            for role, past, present in zip(("key", "value"), layer.inputs[-_CACHES:], layer.outputs[1:], strict=True):
                yield layer, role, past, present


def caches(graph: Graph) -> set[Blob]:
    """Return the blobs that hold attention's keys and values: inputs that may be unset, and outputs.

    ncnn chooses their layout in memory, so a caller can neither fill nor interpret them.
    """
    return {blob for _, _, *pair in cache_pairs(graph) for blob in pair}


def join_cache_inputs(graph: Graph) -> None:
    """Merge the Input layers of single caches into one, after the other inputs."""
    pasts = [past for _, _, past, _ in cache_pairs(graph)]
    single = [
        blob.producer for blob in graph.inputs if blob in pasts and blob.producer and len(blob.producer.outputs) == 1
    ]
    if len(single) < 2:
        return
    blobs = [layer.output for layer in single]
    for layer in single:
        layer.outputs = ()
        graph.remove(layer)
    for blob in blobs:
        blob.producer = None
    following = next(layer for layer in graph if layer.type != "Input")
    graph.add(Layer("Input", single[0].name, (), blobs), before=following)
