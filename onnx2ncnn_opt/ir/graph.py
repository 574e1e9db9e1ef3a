"""The ncnn layer IR: blobs, layers, and the graph that keeps their def-use links true.

Shapes are numpy shapes, outermost axis first, without the batch: (w), (h, w), (c, h, w) or (c, d, h, w); `Blob.batch`
is the Mat's batch count. A blob may have any number of users: the writer inserts Splits. A Split layer in a graph only
gives a tensor a second public name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from enum import IntEnum
from itertools import pairwise
from typing import Any, TypeAlias

from onnx2ncnn_opt.errors import GraphError, ShapeError
from onnx2ncnn_opt.ir.dim import Dim, Shape
from onnx2ncnn_opt.ir.layers import LAYERS
from onnx2ncnn_opt.ir.spec import COMMON_BY_NAME, LayerSpec, Trait
from onnx2ncnn_opt.ir.weight import Array, Weight, Weights


class Blob:
    """A tensor between layers. Its identity is the object; the name matters only in the file.

    `shape` is None if unknown; `producer` is None until its layer is in a graph.
    """

    __slots__ = ("_users", "batch", "is_output", "name", "producer", "shape")

    def __init__(self, name: str, shape: Shape | None = None, batch: Dim = 1) -> None:
        self.name = name
        self.shape = shape
        self.batch = batch
        self.producer: Layer | None = None
        self.is_output = False
        self._users: dict[Layer, int] = {}

    def __repr__(self) -> str:
        return f"Blob({self.name!r}, {self.shape})"

    @property
    def users(self) -> tuple[Layer, ...]:
        """The layers that read the blob, each once."""
        return tuple(self._users)

    def is_read_only_by(self, layers: Container[Layer]) -> bool:
        """Return whether all users are among these layers, without copying them: there may be thousands."""
        return all(user in layers for user in self._users)

    @property
    def uses(self) -> int:
        """The number of uses: one for each input that the blob feeds, and one for being a graph output."""
        return sum(self._users.values()) + self.is_output

    @property
    def known_shape(self) -> Shape:
        """The shape; ShapeError if it is unknown."""
        if self.shape is None:
            raise ShapeError(f"the shape of '{self.name}' is unknown")
        return self.shape

    @property
    def known_producer(self) -> Layer:
        """The producer; GraphError if the blob is in no graph."""
        if self.producer is None:
            raise GraphError(f"no layer produces '{self.name}'")
        return self.producer

    def made_by(self, *types: str) -> Layer | None:
        """Return the producer if it is of one of these types, else None."""
        return self.producer if self.producer is not None and self.producer.type in types else None

    def computed_by(self, *operations: IntEnum, scalar: bool | None = None) -> Layer | None:
        """Return the producer if it `computes` one of these operations, else None."""
        layer = self.producer
        return layer if layer is not None and layer.computes(*operations, scalar=scalar) else None

    @property
    def is_input(self) -> bool:
        """True if the caller of the net feeds this blob."""
        return self.made_by("Input") is not None


Origin: TypeAlias = "str | tuple[Origin, ...]"


class Layer:
    """One ncnn layer: type, name, blobs, parameters by name, weights, and the ONNX nodes it came from.

    ``layer["stride_w"]`` is the parameter or its default. A parameter that is not in the table has its id, an int, as
    key. Types that ncnn's registry lacks are custom; their `spec` is None unless they are declared. Only a graph
    changes `inputs` and `outputs`.
    """

    __slots__ = ("_next", "_prev", "graph", "inputs", "name", "outputs", "params", "spec", "traced", "type", "weights")

    def __init__(
        self,
        type: str,
        name: str,
        inputs: Iterable[Blob] = (),
        outputs: Iterable[Blob] = (),
        params: Mapping[Any, Any] | None = None,
        weights: Mapping[str, Array | Weight] | None = None,
        origin: Iterable[Origin] = (),
        spec: LayerSpec | None = None,
    ) -> None:
        self.type = type
        self.name = name
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.params: dict[str | int, Any] = dict(params or {})
        self.weights = weights if isinstance(weights, Weights) else Weights(weights)
        self.traced = tuple(origin)
        self.spec = spec or LAYERS.get(type)
        self.graph: Graph | None = None
        self._prev: Layer | None = None
        self._next: Layer | None = None

    def __repr__(self) -> str:
        return f"Layer({self.type} {self.name!r})"

    def __getitem__(self, name: str) -> Any:
        if name in self.params:
            return self.params[name]
        if self.spec is None:
            if name in COMMON_BY_NAME:
                return self.params.get(COMMON_BY_NAME[name].id, COMMON_BY_NAME[name].default)
            raise KeyError(f"custom layer type {self.type} has no parameter {name}")
        param = self.spec.by_name[name]
        return param.default if param.is_plain else param.default_in(self)

    def get(self, name: str, other: Any = None) -> Any:
        """Return a parameter or its default; `other` if the layer type has no such parameter."""
        return self[name] if name in self.params or (self.spec and name in self.spec.by_name) else other

    @property
    def origin(self) -> tuple[str, ...]:
        """The ONNX nodes that the layer came from, each once; `traced` holds them.

        If a thousand layers become one, each step stores only its two sources, and this property collects the names.
        """
        names: dict[str, None] = {}
        seen: set[int] = set()
        pending: list[Origin] = [self.traced]
        while pending:
            origin = pending.pop()
            if isinstance(origin, str):
                names[origin] = None
            elif id(origin) not in seen:
                seen.add(id(origin))
                pending += reversed(origin)
        return tuple(names)

    @property
    def is_custom(self) -> bool:
        """True if ncnn's own registry lacks the type."""
        return self.spec is None or self.spec.is_custom

    def has(self, trait: Trait) -> bool:
        """Return whether the layer's type has a trait; an undeclared type has none."""
        return self.spec is not None and trait in self.spec.traits

    def computes(self, *operations: IntEnum, scalar: bool | None = None) -> bool:
        """Return True for a BinaryOp, UnaryOp or Eltwise of one of these operations, such as ``BinaryOp.MUL``.

        With ``scalar=True`` the second operand must be the parameter `b`, with ``scalar=False`` a blob.
        """
        if not any(self.type == type(code).__name__ and self["op_type"] == code for code in operations):
            return False
        return scalar is None or bool(self["with_scalar"]) == scalar

    @property
    def is_used(self) -> bool:
        """True if an output has a use."""
        return any(blob.uses for blob in self.outputs)

    @property
    def output(self) -> Blob:
        """The only output."""
        (blob,) = self.outputs
        return blob

    @property
    def input(self) -> Blob:
        """The only input."""
        (blob,) = self.inputs
        return blob

    def having(
        self,
        *,
        type: str | None = None,
        inputs: Iterable[Blob] | None = None,
        outputs: Iterable[Blob] = (),
        weights: Mapping[str, Array | Weight | None] | None = None,
        **params: Any,
    ) -> Layer:
        """Return a copy outside any graph, with these changes, and with no outputs but these.

        `weights` add to the existing ones or replace them, and None removes one. A parameter given as None gets its
        default.
        """
        merged: dict[Any, Any] = {**self.params, **params}
        blocks = {**dict(self.weights.stored_items()), **(weights or {})}
        return Layer(
            type or self.type,
            self.name,
            self.inputs if inputs is None else inputs,
            outputs,
            params={k: v for k, v in merged.items() if v is not None},
            weights={k: v for k, v in blocks.items() if v is not None},
            origin=self.traced,
            spec=self.spec if type in (None, self.type) else None,
        )

    def without_defaults(self) -> Layer:
        """Remove the parameters that have their default value, and return the layer itself."""
        for name in [name for name in self.params if isinstance(name, str) and self._is_default(name)]:
            del self.params[name]
        return self

    def _is_default(self, name: str) -> bool:
        assert self.spec is not None
        value, default = self.params[name], self.spec.by_name[name].default_in(self)
        return tuple(value) == tuple(default) if isinstance(value, (tuple, list)) else bool(value == default)


class Graph:
    """Layers in topological order, and the output blobs.

    `types` is the table of layers, with the custom ones that are declared for this net. `file_names` are names of
    inputs and outputs in the file, in place of the blobs' own; if there are any, other blobs have numbers there.
    """

    def __init__(self, types: Mapping[str, LayerSpec] = LAYERS) -> None:
        self.types = types
        self.file_names: Mapping[Blob, str] = {}
        self._head: Layer | None = None
        self._tail: Layer | None = None
        self._count = 0
        self._outputs: tuple[Blob, ...] = ()

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Layer]:
        """Yield the layers in order; the graph may be changed while iterating."""
        layer = self._head
        while layer is not None:
            following = layer._next
            yield layer
            # A layer that was removed or replaced meanwhile has lost its links; continue where it pointed to.
            layer = layer._next if layer.graph is self else following
            while layer is not None and layer.graph is not self:
                layer = layer._next

    def __reversed__(self) -> Iterator[Layer]:
        """Yield the layers from last to first; the current one may be removed while iterating."""
        layer = self._tail
        while layer is not None:
            preceding = layer._prev
            yield layer
            layer = layer._prev if layer.graph is self else preceding

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers in order, as a snapshot."""
        return tuple(self)

    @property
    def inputs(self) -> tuple[Blob, ...]:
        """The blobs that Input layers produce, in order."""
        return tuple(blob for layer in self if layer.type == "Input" for blob in layer.outputs)

    @property
    def outputs(self) -> tuple[Blob, ...]:
        """The blobs that the caller gets; layers may read them too."""
        return self._outputs

    @outputs.setter
    def outputs(self, blobs: Iterable[Blob]) -> None:
        for blob in self._outputs:
            blob.is_output = False
        self._outputs = tuple(dict.fromkeys(blobs))
        for blob in self._outputs:
            blob.is_output = True

    def add_output(self, blob: Blob) -> None:
        """Append an output; the blob must not be one yet."""
        assert not blob.is_output
        self._outputs = (*self._outputs, blob)
        blob.is_output = True

    def add(self, layer: Layer, *, before: Layer | None = None) -> Layer:
        """Insert a layer, at the end or before another, and link its blobs."""
        if layer.graph is not None:
            raise GraphError(f"layer '{layer.name}' is already in a graph")
        layer.graph = self
        layer.spec = layer.spec or self.types.get(layer.type)
        self._join(self._tail if before is None else before._prev, layer)
        self._join(layer, before)
        self._count += 1
        for blob in layer.outputs:
            if blob.producer is not None:
                raise GraphError(f"blob '{blob.name}' has two producers: '{blob.producer.name}' and '{layer.name}'")
            blob.producer = layer
        self._add_uses(layer)
        return layer

    def order(self, layers: Iterable[Layer]) -> None:
        """Bring all layers into another topological order."""
        for layer, following in pairwise((None, *layers, None)):
            self._join(layer, following)

    def remove(self, layer: Layer) -> None:
        """Remove a layer; nothing may use its outputs any more."""
        for blob in layer.outputs:
            if blob.uses:
                raise GraphError(f"layer '{layer.name}' cannot be removed: '{blob.name}' is still used")
        self._detach(layer)

    def replace(self, layer: Layer, new: Layer) -> Layer:
        """Replace a layer by a new one without outputs, which takes over the output blobs; return the new one."""
        if new.outputs and len(new.outputs) != len(layer.outputs):
            raise GraphError(f"'{new.name}' has {len(new.outputs)} outputs, '{layer.name}' has {len(layer.outputs)}")
        following = layer._next
        self._detach(layer)
        new.outputs = layer.outputs
        for blob in new.outputs:
            blob.producer = None
        return self.add(new, before=following)

    def redirect(self, old: Blob, new: Blob) -> None:
        """Make every layer that reads `old` read `new` instead; the graph's outputs stay as they are."""
        for user in old.users:
            self.set_inputs(user, [new if blob is old else blob for blob in user.inputs])

    def set_inputs(self, layer: Layer, blobs: Iterable[Blob]) -> None:
        """Replace a layer's inputs."""
        self._drop_uses(layer)
        layer.inputs = tuple(blobs)
        self._add_uses(layer)

    def copy(self) -> Graph:
        """Return a graph of new layers and blobs; both graphs share the arrays of the weights."""
        graph, blobs = Graph(self.types), dict[Blob, Blob]()
        for layer in self:
            tops = [Blob(blob.name, blob.shape, blob.batch) for blob in layer.outputs]
            blobs |= zip(layer.outputs, tops, strict=True)
            graph.add(layer.having(inputs=[blobs[blob] for blob in layer.inputs], outputs=tops))
        graph.outputs = [blobs[blob] for blob in self.outputs]
        graph.file_names = {blobs[blob]: name for blob, name in self.file_names.items()}
        return graph

    def checkpoint(self) -> Callable[[], None]:
        """Return a function that undoes all later edits, except changes of parameters and weights."""
        layers = [(layer, layer.inputs, layer.outputs, layer.traced) for layer in self]
        blobs = [(blob, blob.name, blob.shape, blob.batch) for layer in self for blob in layer.outputs]
        outputs = self.outputs

        def undo() -> None:
            self.outputs = ()
            for layer in self.layers:
                layer.graph = None
            self._head, self._tail, self._count = None, None, 0
            for blob, name, shape, batch in blobs:
                blob.name, blob.shape, blob.batch, blob.producer, blob._users = name, shape, batch, None, {}
            for layer, inputs, tops, traced in layers:
                layer.inputs, layer.outputs, layer.traced = inputs, tops, traced
                self.add(layer)
            self.outputs = outputs

        return undo

    def check(self) -> None:
        """Raise GraphError if the links of layers and blobs are wrong, or a layer does not fit its table entry."""
        produced: set[Blob] = set()
        names: dict[str, Blob] = {}
        uses: dict[Blob, int] = dict.fromkeys(self._outputs, 1)
        for layer in self:
            for blob in layer.inputs:
                if blob not in produced:
                    raise GraphError(f"layer '{layer.name}' uses '{blob.name}' before anything produces it")
                uses[blob] = uses.get(blob, 0) + 1
            for blob in layer.outputs:
                if blob.producer is not layer:
                    raise GraphError(f"blob '{blob.name}' does not know its producer '{layer.name}'")
                if names.setdefault(blob.name, blob) is not blob:
                    raise GraphError(f"two blobs are called '{blob.name}'")
                produced.add(blob)
            check_layer(layer)
        for blob in produced:
            if blob.uses != uses.get(blob, 0):
                raise GraphError(f"blob '{blob.name}' counts {blob.uses} uses, but has {uses.get(blob, 0)}")
        for blob in self._outputs:
            if blob not in produced:
                raise GraphError(f"no layer produces the output '{blob.name}'")

    def _join(self, first: Layer | None, second: Layer | None) -> None:
        """Make `second` follow `first`; None stands for the end of the list."""
        if first is None:
            self._head = second
        else:
            first._next = second
        if second is None:
            self._tail = first
        else:
            second._prev = first

    def _detach(self, layer: Layer) -> None:
        """Unlink a layer, but keep its `_next`: an iteration over the graph continues there."""
        self._join(layer._prev, layer._next)
        self._count -= 1
        layer.graph = None
        self._drop_uses(layer)

    @staticmethod
    def _add_uses(layer: Layer) -> None:
        for blob in layer.inputs:
            blob._users[layer] = blob._users.get(layer, 0) + 1

    @staticmethod
    def _drop_uses(layer: Layer) -> None:
        for blob in layer.inputs:
            blob._users.pop(layer, None)


def check_layer(layer: Layer) -> None:
    """Raise GraphError if blob counts, parameters or weight sizes do not fit the layer's table entry."""
    check_blob_counts(layer)
    spec = layer.spec
    if spec is None:
        return
    for name, allowed in spec.enums.items():
        codes = [code.value for code in allowed]
        if layer[name] not in codes and name in ("op_type", "activation_type", "operation"):
            raise GraphError(f"{spec.type} '{layer.name}': {name}={layer[name]} is none of {codes}")
    present = [weight for weight in spec.weights if weight.present(layer)]
    check_weight_names(layer, [weight.name for weight in present])
    for weight in present:
        size, count = layer.weights.stored(weight.name).data.size, weight.count(layer)
        if size != count:
            raise GraphError(
                f"{spec.type} '{layer.name}': {weight.name} has {size} elements, the parameters say {count}"
            )


def check_weight_names(layer: Layer, names: Collection[str]) -> None:
    """Raise GraphError unless a layer has exactly these weights."""
    if unexpected := set(layer.weights) - set(names):
        raise GraphError(f"{layer.type} '{layer.name}' cannot hold the weights {sorted(unexpected)}")
    for name in names:
        if name not in layer.weights:
            raise GraphError(f"{layer.type} '{layer.name}' lacks its weight {name}")


def check_blob_counts(layer: Layer) -> None:
    """Raise GraphError if a layer has more or fewer inputs or outputs than its type and parameters allow."""
    spec = layer.spec
    if spec is None:
        return
    for side, blobs, (least, most) in (("input", layer.inputs, spec.inputs), ("output", layer.outputs, spec.outputs)):
        if len(blobs) < least or (most is not None and len(blobs) > most):
            wanted = f"{least}" if least == most else f"{least} or more" if most is None else f"{least} to {most}"
            raise GraphError(f"{spec.type} '{layer.name}' has {len(blobs)} {side}s, needs {wanted}")
    if spec.is_one_blob_only(layer) and (len(layer.inputs), len(layer.outputs)) != (1, 1):
        raise GraphError(f"{spec.type} '{layer.name}' must have one input and one output")
