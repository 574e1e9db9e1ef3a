from collections.abc import Iterator

from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import Miss, Replacement, attempt, graph_pass, known_shape, require

_SDPA = op("SDPA", kv_cache=0, int8_scale_term=0)
_SEQUENCE = 1  # the axis of [heads, sequence, width]


@graph_pass(
    exact=False, purpose="language models that run token by token: no copy of the past, and no past at the start"
)
def fuse_kv_cache(graph: Graph) -> Iterator[Replacement | Miss]:
    """SDPA(q, Concat(past, k), Concat(past, v))   ⇒   SDPA(q, k, v, past, past) with kv_cache

    For pasts that are inputs of the net, and joined keys and values that are its outputs. They are opaque from then on.
    """
    sdpas = [layer for layer in graph if _SDPA.fits(layer) and any(map(_past, layer.inputs[1:3]))]
    edits = [edit for sdpa in sdpas for edit in attempt(sdpa, _with_cache, sdpa)]
    cached = {layer for edit in edits if isinstance(edit, Replacement) for layer in edit.layers}
    # A net starts without a past only if all of its pasts may be unset.
    left = next((layer for layer in graph if layer not in cached and layer.outputs and _is_kept_past(layer)), None)
    for edit in edits:
        if left is None or isinstance(edit, Miss):
            yield edit
        else:
            yield Miss(
                edit.layers[-1:], f"'{left.inputs[0].name}' cannot be a cache, and a net has to start with all unset"
            )


def _is_kept_past(layer: Layer) -> bool:
    """Return True if a layer joins a past for the next run."""
    return layer.outputs[0].is_output and _past(layer.outputs[0]) is not None


def _past(blob: Blob) -> Blob | None:
    """Return the input of the net that a blob begins with; None if it begins with no input."""
    layer = blob.producer
    is_joined = layer is not None and layer.type == "Concat" and layer.inputs[0].is_input
    return layer.inputs[0] if layer is not None and is_joined else None


def _with_cache(sdpa: Layer) -> Replacement:
    """Return the SDPA that keeps its keys and values itself."""
    joins = []
    for blob in sdpa.inputs[1:3]:
        past = _past(blob)
        require(past is not None, f"'{blob.name}' has no past, but the other one of keys and values has")
        assert past is not None
        joins.append(_join(blob, past, sdpa))
    (keys, key), (values, value) = joins
    require(key is not value, f"'{key.name}' is the past of keys and of values")
    q, _, _, *mask = sdpa.inputs
    inputs = [q, keys.inputs[1], values.inputs[1], *mask, key, value]
    new = sdpa.having(inputs=inputs, kv_cache=1)
    new.outputs = tuple(Blob(blob.name, blob.shape) for blob in (sdpa.output, keys.output, values.output))
    reads = dict(zip((sdpa.output, keys.output, values.output), new.outputs, strict=True))
    return Replacement((keys, values, sdpa), added=[(new, sdpa)], reads=reads)


def _join(blob: Blob, past: Blob, sdpa: Layer) -> tuple[Layer, Blob]:
    """Return the Concat of a past with what is new, and the past; refused if anything else needs one of them."""
    join = blob.producer
    assert join is not None
    known_shape(blob, 3)
    is_sequence = join["axis"] in (_SEQUENCE, _SEQUENCE - 3) and len(join.inputs) == 2
    require(is_sequence, f"'{join.name}' does not join a past with new rows")
    require(blob.is_output, f"'{blob.name}' is no output of the net, so the cache would be lost")
    for other in (user for each in (blob, past) for user in each.users if user not in (sdpa, join)):
        needs = past.name if past in other.inputs else blob.name
        require(
            False, f"'{needs}' is also used by {other.type} '{other.name}', and a cache has no shape when it is unset"
        )
    require(blob.uses == 2 and past.uses == 1, f"'{blob.name}' is used twice")
    require(past.batch == blob.batch == sdpa.output.batch == 1, f"'{past.name}' is a batch, and caches have none")
    return join, past
