"""The only function that changes a graph for passes, of both kinds, and the checks of every edit."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from onnx2ncnn_opt.ir.features import Feature
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.names import NamePool
from onnx2ncnn_opt.ir.shapes import assign_shapes
from onnx2ncnn_opt.ir.weight import Encoding, Weight
from onnx2ncnn_opt.rewrite.rule import Replacement, require

_STORAGE = int(Feature.NO_FP16_STORAGE | Feature.NO_BF16_STORAGE)


class Names:
    """The names of a graph's layers and blobs."""

    def __init__(self, graph: Graph) -> None:
        self._layers = NamePool(layer.name for layer in graph)
        self._blobs = NamePool(blob.name for layer in graph for blob in layer.outputs)

    def release(self, layer: Layer, blobs: Iterable[Blob]) -> None:
        """Forget the names of a removed layer and of its removed blobs."""
        self._layers.release(layer.name)
        self._blobs.release(*(blob.name for blob in blobs))

    def move(self, old: Blob, new: Blob, *, is_new: bool, stays: bool) -> None:
        """Give `new` the name of `old`; if `old` stays in the graph, it gets the former name of `new`."""
        wanted, new.name = new.name, old.name
        if not is_new:
            self._blobs.release(wanted)
        if stays:
            old.name = self._blobs.take(wanted)

    def give(self, layer: Layer, kept: Collection[Blob]) -> None:
        """Make the names of a new layer and of its blobs unique; `kept` blobs keep theirs."""
        layer.name = self._layers.take(layer.name)
        for blob in layer.outputs:
            if blob not in kept:
                blob.name = self._blobs.take(blob.name)


def require_private(
    layers: Sequence[Layer], replaced: Collection[Blob], needed: Iterable[Blob] = (), sources: Sequence[Layer] = ()
) -> None:
    """Refuse layers with unknown parameters, or with blobs that other layers read.

    Another blob replaces each of the blobs in `replaced`. The new layers read the blobs in `needed`. The result also
    depends on the layers in `sources`, which stay.
    """
    inside = set(layers)
    inner = [blob for layer in layers for blob in layer.outputs if blob not in replaced]
    for blob in inner:
        require(not blob.is_output, f"'{blob.name}' is an output of the net")
        for user in blob.users:
            require(user in inside, f"'{blob.name}' is also used by {user.type} '{user.name}'")
    removed = set(inner)
    for blob in needed:
        # The blob is both inside and an operand: the result would need a removed layer.
        require(blob not in removed, f"'{blob.name}' is needed for itself, too")
    # The fused layer gets all masks, but its inputs have 32 bits only if the inputs of each masked layer had.
    storage = {layer["featmask"] & _STORAGE for layer in layers}
    require(len(storage) <= 1, "not all layers have 16 bit storage: their feature masks differ")
    for layer in (*layers, *sources):
        for name in layer.params:
            require(isinstance(name, str), f"parameter {name} of {layer.type} '{layer.name}' is unknown")


def carry_out(
    graph: Graph, edit: Replacement, names: Names, veto: Callable[[Layer], str | None] = lambda layer: None
) -> tuple[Layer, ...]:
    """Edit the graph; return the new layers and the layers that now read another blob.

    Raises Refused, and leaves the graph unchanged, if the edit would lose a blob, a name or a parameter, or if `veto`
    returns a reason against a new layer.
    """
    replaced = {*edit.reads, *(blob for layer in edit.takes for blob in layer.outputs)}
    new_layers = set(edit.made)
    needed = [*(blob for layer in edit.made for blob in layer.inputs), *edit.reads.values()]
    if edit.may_stay:
        replaced.update(blob for layer in edit.layers for blob in layer.outputs)
    require_private(edit.layers, replaced, needed, edit.sources)
    public = _public_names(edit, new_layers)
    for layer in edit.made:
        reason = veto(layer)
        require(reason is None, reason or "")
    _inherit(edit)
    _keep_storage(edit)
    readers = [user for blob in edit.reads for user in blob.users if user not in new_layers]
    for layer, before in edit.added:
        graph.add(layer, before=before)
        assign_shapes(layer)
    for old, new in edit.takes.items():
        graph.replace(old, new)
    # Each user once: a Concat may read thousands of replaced blobs.
    for user in dict.fromkeys(user for blob in edit.reads for user in blob.users if user not in new_layers):
        graph.set_inputs(user, [edit.reads.get(blob, blob) for blob in user.inputs])
    for blob, other in edit.reads.items():
        other.shape = blob.shape if other.shape is None else other.shape
    if public:
        graph.outputs = [public.get(blob, blob) for blob in graph.outputs]
    remove_all(graph, edit.removed, may_stay=edit.may_stay)
    _name(graph, edit, public, names)
    redirected = (user for user in readers if user.graph is graph)
    return tuple(dict.fromkeys((*edit.made, *redirected)))


def _name(graph: Graph, edit: Replacement, public: Mapping[Blob, Blob], names: Names) -> None:
    """Give every new layer and blob a name; the names of inputs and outputs stay."""
    new_layers = set(edit.made)
    for layer in edit.layers:
        if layer.graph is not graph:
            names.release(layer, () if layer in edit.takes else (b for b in layer.outputs if b not in public))
    for old, new in public.items():
        stays = old.producer is not None and old.producer.graph is graph
        names.move(old, new, is_new=new.producer in new_layers, stays=stays)
    kept = {*public.values(), *(blob for layer in edit.takes for blob in layer.outputs)}
    for layer in edit.made:
        names.give(layer, kept)


def _public_names(edit: Replacement, new_layers: Collection[Layer]) -> dict[Blob, Blob]:
    """Return the replaced outputs of the net with their new blobs; refuse a new blob that has a public name already."""
    public: dict[Blob, Blob] = {}
    for old, new in edit.reads.items():
        if not old.is_output:
            continue
        if new.producer is not None and new.producer not in new_layers:
            require(not new.is_input, f"both '{new.name}' and '{old.name}' are public names: an input and an output")
            require(not new.is_output, f"both '{new.name}' and '{old.name}' are outputs of the net")
        require(new not in public.values(), f"'{old.name}' is one of several outputs with the same value")
        public[old] = new
    return public


def _inherit(edit: Replacement) -> None:
    """Copy origins, feature masks and shape hints to the new layers: an opt-out of fp16 must survive a fusion.

    One layer that replaces several gets their union. If `takes` has several layers, each new one gets those of its own.
    """
    is_single = len(edit.takes) <= 1
    sources = edit.layers if is_single else edit.removed
    origin = tuple(layer.traced for layer in (*sources, *edit.sources) if layer.traced)
    mask = 0
    for layer in sources:
        mask |= layer["featmask"]
    for new, _ in edit.added:
        new.traced = new.traced or origin
        _set(new, "featmask", mask | new["featmask"])
        new.params.pop("shape_hints", None)
    for old, new in edit.takes.items():
        new.traced = origin if is_single else old.traced
        _set(new, "featmask", mask | old["featmask"])
        _set(new, "shape_hints", old["shape_hints"])
    for heir in edit.heirs:
        heir.traced = (*heir.traced, *origin)


def _keep_storage(edit: Replacement) -> None:
    """Give a new weight the encoding of an old one with equal numbers; else its `short`, if all old ones are equal.

    Only weights that ncnn reads after a tag have encodings.
    """
    old = [weight for layer in (*edit.layers, *edit.sources) for _, weight in _tagged(layer)]
    encodings = {weight.short or weight.encoding for weight in old}
    short = encodings.pop() if len(encodings) == 1 and encodings < {Encoding.FP16, Encoding.BF16} else None
    for layer in edit.made:
        for name, new in _tagged(layer):
            if new in old or new.encoding is not Encoding.FP32:
                continue
            candidates = (w for w in old if w.encoding is not Encoding.FP32 and w.data.size == new.data.size)
            equal = next((w for w in candidates if np.array_equal(w.array, new.data)), None)
            layer.weights[name] = equal or replace(new, short=short)


def _tagged(layer: Layer) -> list[tuple[str, Weight]]:
    specs = layer.spec.weights if layer.spec else ()
    names = {spec.name for spec in specs if spec.is_tagged(layer)}
    return [(name, weight) for name, weight in layer.weights.stored_items() if name in names]


def _set(layer: Layer, name: str, value: object) -> None:
    layer.params.pop(name, None)
    if value:
        layer.params[name] = value


def remove_all(graph: Graph, layers: Iterable[Layer], *, may_stay: bool = False) -> None:
    """Remove layers, in any order, that only these layers use.

    Another user raises GraphError; with `may_stay` the used layer stays.
    """
    remaining = list(layers)
    while remaining:
        unused = [layer for layer in remaining if not layer.is_used]
        if not unused and may_stay:
            return
        for layer in unused or remaining[:1]:
            graph.remove(layer)
        remaining = [layer for layer in remaining if layer.graph is graph]
