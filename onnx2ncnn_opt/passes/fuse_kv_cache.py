from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.view import Regroup
from onnx2ncnn_opt.passes._views import before_views, chain_above, step_of, view_layers
from onnx2ncnn_opt.passes.fuse_sdpa import SDPA
from onnx2ncnn_opt.rewrite.rule import Edits, Miss, Replacement, attempt, graph_pass, known_shape, needed, require

_DIMS = 3  # of keys and values: heads, rows and columns


@graph_pass(
    exact=False, purpose="language models that run token by token: no copy of the past, and no past at the start"
)
def fuse_kv_cache(graph: Graph) -> Edits:
    """SDPA(q, Concat(past, k), Concat(past, v))   ⇒   SDPA(q, k, v, past, past) with kv_cache

    The pasts must be inputs of the net, and the joined keys and values outputs. Both become opaque.
    """
    sdpas = [layer for layer in graph if SDPA.fits(layer) and any(map(_join, layer.inputs[1:3]))]
    edits = [edit for sdpa in sdpas for edit in attempt(sdpa, _with_cache, sdpa)]
    for join in graph:
        reader = _next(join, "Tile") if join.outputs and _joins_past(join) else None
        if reader is not None and reader.type != "SDPA":
            edits.append(Miss((join,), _reason(join, reader)))
    cached = {layer for edit in edits if isinstance(edit, Replacement) for layer in edit.layers}
    # A net starts without a past only if all of its pasts may be unset.
    rest = next((layer for layer in graph if layer not in cached and layer.outputs and _joins_past(layer)), None)
    for edit in edits:
        if rest is None or isinstance(edit, Miss):
            yield edit
        else:
            reason = f"'{rest.outputs[0].name}' cannot be a cache, and a net has to start with all unset"
            yield Miss(edit.layers[-1:], reason)


def _joins_past(layer: Layer) -> bool:
    """Return True if a layer joins a past for the next run."""
    return layer.outputs[0].is_output and _join(layer.outputs[0]) is not None


def _reason(join: Layer, reader: Layer) -> str:
    """Return the reason why SDPA does not read a past."""
    past, after = before_views(join.inputs[0]), _next(reader, "BinaryOp")
    if past.batch != 1 or len(past.shape or ()) > _DIMS:
        return f"'{past.name}' is a batch, and caches have none"
    cap = f"{after.type} '{after.name}' caps its scores" if after and after.type == "TanH" else "it is no SDPA"
    return f"'{join.outputs[0].name}' is used by {reader.type} '{reader.name}', and {cap}"


def _next(layer: Layer, kind: str) -> Layer | None:
    """Return the first consumer of a layer's result, after views and layers of type `kind`."""
    user = next(iter(layer.outputs[0].users), None)
    while user is not None and user.outputs and (step_of(user) is not None or user.type == kind):
        user = next(iter(user.outputs[0].users), None)
    return user


def _join(blob: Blob) -> Layer | None:
    """Return the Concat that computes a blob, before views, if its first part is an input of the net."""
    layer = before_views(blob).made_by("Concat")
    return layer if layer is not None and before_views(layer.inputs[0]).is_input else None


def _with_cache(sdpa: Layer) -> Replacement:
    """Return the edit to an SDPA that keeps its keys and values itself."""
    added: list[Layer] = []
    layers: list[Layer] = []
    inputs: list[Blob] = []
    pasts: list[Blob] = []
    for blob in sdpa.inputs[1:3]:
        join = needed(_join(blob), f"'{blob.name}' has no past, but the other one of keys and values has")
        past, views = before_views(join.inputs[0]), (*chain_above(join.inputs[0]), *chain_above(blob))
        _check(blob, join, past, [sdpa, join, *views])
        layers += [layer for layer in (*views, join) if layer not in layers]
        new = join.inputs[1]
        rows = new.known_shape
        if len(rows) < len(blob.known_shape):  # one head
            added += view_layers(new, (Regroup((1, *rows)),), like=[join])
            new = added[-1].output
        inputs.append(new)
        pasts.append(past)
    require(pasts[0] is not pasts[1], f"'{pasts[0].name}' is the past of keys and of values")
    reads = {blob: Blob(blob.name, blob.shape) for blob in (sdpa.output, *sdpa.inputs[1:3])}
    inputs = [sdpa.inputs[0], *inputs, *sdpa.inputs[3:], *pasts]
    made = sdpa.having(inputs=inputs, outputs=reads.values(), kv_cache=1)
    return Replacement((*layers, sdpa), added=[(layer, sdpa) for layer in (*added, made)], reads=reads)


def _check(blob: Blob, join: Layer, past: Blob, layers: list[Layer]) -> None:
    """Refuse a Concat that does not join a past with new rows, or if other layers read it or its past."""
    shape, heads = known_shape(blob, 3), len(known_shape(join.output)) == 3
    is_whole = join.output.shape == (shape if heads else shape[1:])
    is_rows = join["axis"] in (-2, len(join.output.known_shape) - 2) and len(join.inputs) == 2
    require(is_rows and is_whole and (heads or shape[0] == 1), f"'{join.name}' does not join a past with new rows")
    require(known_shape(past)[::2] == shape[::2], f"'{past.name}' is not [heads, past, width]")
    require(blob.is_output, f"'{blob.name}' is no output of the net, so the cache would be lost")
    for needs, other in ((b, user) for b in (blob, past) for user in b.users if user not in layers):
        why = "a cache has no shape when it is unset"
        require(False, f"'{needs.name}' is also used by {other.type} '{other.name}', and {why}")
    require(blob.uses == 2 and past.uses == 1, f"'{blob.name}' is used twice")
    require(past.batch == blob.batch == 1, f"'{past.name}' is a batch, and caches have none")
