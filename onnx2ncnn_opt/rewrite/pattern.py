"""Patterns over def-use links: the layers that a rewrite looks for, written as an expression.

``op("BatchNorm", "bn")(op("Convolution", "conv", activation_type=0))`` is a BatchNorm that reads a Convolution without
activation. An input of an operator is another operator, a constant (`const`), or a name, which captures any blob. A
name that occurs twice must capture the same object. Commutative operators match in either order of their inputs.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from onnx2ncnn_opt.errors import PatternError
from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.layers import LAYERS
from onnx2ncnn_opt.ir.spec import LayerSpec

_COMMUTATIVE = frozenset(code for code in BinaryOp if code.commutes)

Kind: TypeAlias = tuple[str, Any]  # a layer's type, and its operation if it has one
MOST_KINDS = 8  # of inputs: a Concat may read thousands of blobs


def kinds_of(layer: Layer) -> tuple[Kind, ...]:
    """Return the kinds of a layer and of the producers of its first inputs."""
    producers = (blob.producer for blob in layer.inputs[:MOST_KINDS])
    return tuple(("", 0) if x is None else (x.type, x.params.get("op_type", 0)) for x in (layer, *producers))


class Op(NamedTuple):
    """A layer of one of `types` whose parameters, defaults included, have the values of `params`.

    A frozenset matches each of its members. `where` is another condition on the layer alone. A call with patterns, one
    for each input, returns the operator with these inputs.
    """

    types: frozenset[str]
    capture: str
    params: Mapping[str, Any]
    where: Callable[[Layer], bool] | None = None
    inputs: tuple[Pattern, ...] | None = None
    is_kept: bool = False

    def __call__(self, *inputs: Pattern) -> Op:
        """Return the operator with patterns for its inputs."""
        return self._replace(inputs=inputs)

    @property
    def depth(self) -> int:
        """The number of layers on the longest path through the pattern."""
        return 1 + max((p.depth for p in self.inputs or () if not isinstance(p, str)), default=0)

    @property
    def captures(self) -> frozenset[str]:
        """Every name that a match binds."""
        names = {self.capture} if self.capture else set()
        for pattern in self.inputs or ():
            names |= {pattern} if isinstance(pattern, str) else pattern.captures
        return frozenset(names)

    def fits(self, layer: Layer) -> bool:
        """Return whether the layer itself matches, whatever its inputs are."""
        if layer.type not in self.types:
            return False
        for name, wanted in self.params.items():
            value = layer[name]
            if value not in wanted if isinstance(wanted, frozenset) else value != wanted:
                return False
        return self.where is None or self.where(layer)

    def may_be(self, kind: Kind) -> bool:
        """Return whether a layer of this kind may match."""
        wanted = self.params.get("op_type", kind[1])
        return kind[0] in self.types and (kind[1] in wanted if isinstance(wanted, frozenset) else kind[1] == wanted)

    def may_read(self, kinds: Sequence[Kind]) -> bool:
        """Return whether producers of these kinds may match its inputs, in this order or exchanged."""
        orders = (kinds, kinds[::-1]) if len(kinds) == 2 else (kinds,)
        inputs = self.inputs and self.inputs[:MOST_KINDS]
        return inputs is None or any(
            all(isinstance(p, str) or p.may_be(kind) for p, kind in zip(inputs, order, strict=True))
            for order in orders
            if len(inputs) == len(order)
        )


Pattern: TypeAlias = Op | str


def op(
    types: str | LayerSpec | Collection[str | LayerSpec],
    capture: str = "",
    where: Callable[[Layer], bool] | None = None,
    **params: Any,
) -> Op:
    """Return a pattern for a layer of these types with these parameters; see `Op`. A custom type is a LayerSpec.

    Raises PatternError for a type that ncnn does not have, and for a parameter that one of the types does not have.
    """
    specs = [_spec(t) for t in ([types] if isinstance(types, (str, LayerSpec)) else types)]
    for spec in specs:
        for name in params:
            if name not in spec.by_name:
                raise PatternError(f"{spec.type} has no parameter {name!r}{_suggestion(name, spec.by_name)}")
    return Op(frozenset(spec.type for spec in specs), capture, params, where)


def _spec(type: str | LayerSpec) -> LayerSpec:
    if isinstance(type, LayerSpec):
        return type
    if type not in LAYERS:
        raise PatternError(f"ncnn has no layer type {type!r}{_suggestion(type, LAYERS)}; give a custom one's LayerSpec")
    return LAYERS[type]


def _suggestion(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def kept(pattern: Op) -> Op:
    """Return a pattern for a layer that a match needs, but does not replace: other layers may use it too."""
    return pattern._replace(is_kept=True)


def const(capture: str, where: Callable[[Layer], bool] | None = None) -> Op:
    """Return a constant operand; captures its MemoryData layer, which is kept."""
    return kept(op("MemoryData", capture, where))


class Match(NamedTuple):
    """Captured layers and blobs by name, the layers to replace (root first), and the kept layers."""

    captures: Mapping[str, Layer | Blob]
    layers: tuple[Layer, ...] = ()
    kept: tuple[Layer, ...] = ()

    @property
    def root(self) -> Layer:
        """The last layer, whose outputs the result replaces."""
        return self.layers[0]

    @property
    def blobs(self) -> list[Blob]:
        """The captured blobs."""
        return [captured for captured in self.captures.values() if isinstance(captured, Blob)]

    def _bound(self, name: str, value: Layer | Blob) -> Match | None:
        """Return the match with a name bound; None if the name is bound to another object."""
        if not name:
            return self
        captured = self.captures.get(name)
        if captured is not None:
            return self if captured is value else None
        return Match({**self.captures, name: value}, self.layers, self.kept)


_NOTHING = Match({})


def matches(pattern: Op, root: Layer) -> Iterator[Match]:
    """Yield all matches of the pattern with `root` as its last layer."""
    return matches_above(pattern, root) if pattern.fits(root) else iter(())


def matches_above(pattern: Op, layer: Layer, partial: Match = _NOTHING) -> Iterator[Match]:
    """Yield all ways to extend a partial match by a layer that `fits`, and by the layers above it."""
    bound = partial._bound(pattern.capture, layer)
    if bound is None:
        return
    if pattern.is_kept:
        bound = Match(bound.captures, bound.layers, (*bound.kept, layer))
    elif layer not in bound.layers:
        bound = Match(bound.captures, (*bound.layers, layer), bound.kept)
    if pattern.inputs is None:
        yield bound
        return
    for blobs in _orders(layer) if len(pattern.inputs) == len(layer.inputs) else ():
        yield from _match_inputs(pattern.inputs, blobs, bound)


def _match_inputs(patterns: tuple[Pattern, ...], blobs: tuple[Blob, ...], partial: Match) -> Iterator[Match]:
    if not patterns:
        yield partial
        return
    for first in _match_blob(patterns[0], blobs[0], partial):
        yield from _match_inputs(patterns[1:], blobs[1:], first)


def _match_blob(pattern: Pattern, blob: Blob, partial: Match) -> Iterator[Match]:
    if isinstance(pattern, str):
        bound = partial._bound(pattern, blob)
        if bound is not None:
            yield bound
        return
    layer = blob.producer
    if layer is not None and len(layer.outputs) == 1 and pattern.fits(layer):
        yield from matches_above(pattern, layer, partial)


def _orders(layer: Layer) -> Iterator[tuple[Blob, ...]]:
    yield layer.inputs
    if len(layer.inputs) == 2 and layer.inputs[0] is not layer.inputs[1]:
        is_sum = layer.type == "Eltwise" and not layer["coeffs"]
        if is_sum or (layer.type == "BinaryOp" and layer["op_type"] in _COMMUTATIVE):
            yield layer.inputs[::-1]
