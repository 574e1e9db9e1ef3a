"""The two kinds of passes: a `rewrite` of a pattern, or a `graph_pass` over the whole graph."""

import inspect
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias, TypeVar

from onnx2ncnn_opt.ir.dim import Shape
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.rewrite.pattern import Kind, Match, Op, kinds_of, matches_above

_T = TypeVar("_T")
Result: TypeAlias = Layer | Blob | Sequence[Layer] | Sequence[Blob]


class Refused(Exception):
    """A matched pattern must not be rewritten: the engine catches this and reports the reason."""


def require(condition: object, reason: str) -> None:
    """Raise Refused unless the condition holds: the match becomes a near miss with this reason."""
    if not condition:
        raise Refused(reason)


def needed(value: _T | None, reason: str) -> _T:
    """Return a value; refuse None with this reason."""
    if value is None:
        raise Refused(reason)
    return value


def known_shape(blob: Blob, *ranks: int) -> Shape:
    """Return the shape of a blob; refuse an unknown shape and, if there are `ranks`, any other rank."""
    shape = needed(blob.shape, f"the shape of '{blob.name}' is unknown")
    wanted = " or ".join(f"{rank}-D" for rank in ranks)
    require(not ranks or len(shape) in ranks, f"'{blob.name}' is {len(shape)}-D, not {wanted}")
    return shape


def fixed_shape(blob: Blob, *ranks: int) -> tuple[int, ...]:
    """Return the `known_shape`; refuse a dynamic dimension, too."""
    sizes = tuple(size for size in known_shape(blob, *ranks) if isinstance(size, int))
    require(len(sizes) == len(blob.known_shape), f"'{blob.name}' has a dynamic dimension")
    return sizes


def fixed_size(blob: Blob, axis: int) -> int:
    """Return the size of a blob along an axis; refuse an unknown or dynamic one."""
    size = known_shape(blob)[axis]
    if not isinstance(size, int):
        raise Refused(f"the size of '{blob.name}' along axis {axis} is not fixed")
    return size


@dataclass(frozen=True, eq=False)
class _Pass:
    """The facts about a pass: its function, and whether it promises bit-equal results on every CPU.

    So a pass that changes a division, or the rows of a function, is not exact. `purpose` says why the pass exists, if
    docs/passes.md has no models or numbers for it.
    """

    function: Callable[..., Any]
    exact: bool
    purpose: str = ""

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        return (self.function.__doc__ or "").strip().partition("\n")[0]

    @property
    def is_foreign(self) -> bool:
        """True if another package brought the pass."""
        return not self.function.__module__.startswith("onnx2ncnn_opt.")


@dataclass(frozen=True, eq=False)
class Rewrite(_Pass):
    """A pattern, and a function that returns its replacement; it never edits the graph.

    The function's parameters are captures of the pattern; one with a default may be missing in some of `patterns`.
    Its result replaces the root: a Layer without outputs takes over the root's output. A Blob replaces it (a sequence
    of Blobs if there are several). Of a sequence of Layers, the last one takes it over; the others have own outputs.
    """

    patterns: tuple[Op, ...] = ()

    def __post_init__(self) -> None:
        parameters = inspect.signature(self.function).parameters.values()
        required = [p.name for p in parameters if p.default is inspect.Parameter.empty]
        for pattern in self.patterns:
            captures = pattern.captures
            if missing := [name for name in required if name not in captures]:
                raise TypeError(f"{self.name}: the pattern does not capture {', '.join(missing)}")

    @cached_property
    def _by_kinds(self) -> dict[tuple[Kind, ...], list[tuple[Op, list[Op]]]]:
        return {}

    def candidates(self, kinds: tuple[Kind, ...]) -> list[tuple[Op, list[Op]]]:
        """Return the patterns for a root of these `kinds_of`, in order; neighbours with equal roots are one group."""
        if kinds not in self._by_kinds:
            possible = (p for p in self.patterns if p.may_be(kinds[0]) and p.may_read(kinds[1:]))
            groups = groupby(possible, lambda pattern: pattern._replace(inputs=None))
            self._by_kinds[kinds] = [(head, list(patterns)) for head, patterns in groups]
        return self._by_kinds[kinds]

    @cached_property
    def depth(self) -> int:
        """The largest number of layers on a path through a match."""
        return max(pattern.depth for pattern in self.patterns)

    def matches(self, root: Layer) -> Iterator[Match]:
        """Yield every match that ends in `root`, in the order of the patterns."""
        for head, patterns in self.candidates(kinds_of(root)):
            if head.fits(root):
                for pattern in patterns:
                    yield from matches_above(pattern, root)

    def result(self, match: Match) -> Result:
        """Return the function's result for a match; it may raise Refused."""
        captures = {name: match.captures[name] for name in self._parameters if name in match.captures}
        result: Result = self.function(**captures)
        return result

    @cached_property
    def _parameters(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.function).parameters)


@dataclass(frozen=True, eq=False)
class Replacement:
    """An edit: layers to remove, and the layers and blobs that replace them.

    `layers` are all layers of the edit, in order; the edit removes them. `takes` maps some of them to new layers
    without outputs, which take over the position and the output blobs. `added` are new layers with blobs of their own,
    each with the layer that follows it (None: at the end). Layers that read a key of `reads` read its value instead,
    and the value gets the key's name if that is public. If other layers read a removed layer, the edit is refused; with
    `may_stay` that layer stays, as views do. `sources` are layers that stay, but the new layers inherit their ONNX
    nodes; `heirs` are existing layers that inherit the ONNX nodes of the removed ones.
    """

    layers: tuple[Layer, ...]
    takes: Mapping[Layer, Layer] = field(default_factory=dict)
    added: Sequence[tuple[Layer, Layer | None]] = ()
    reads: Mapping[Blob, Blob] = field(default_factory=dict)
    may_stay: bool = False
    sources: tuple[Layer, ...] = ()
    heirs: tuple[Layer, ...] = ()

    @property
    def made(self) -> tuple[Layer, ...]:
        """The new layers."""
        return (*(layer for layer, _ in self.added), *self.takes.values())

    @property
    def removed(self) -> list[Layer]:
        """The layers without a new layer in their place."""
        return [layer for layer in self.layers if layer not in self.takes]


class Miss(NamedTuple):
    """Layers that a graph pass could not change, and why."""

    layers: tuple[Layer, ...]
    reason: str


Edits: TypeAlias = Iterator[Replacement | Miss]


def attempt(
    layer: Layer, find: Callable[..., Replacement | None], *arguments: Any
) -> Generator[Replacement | Miss, None, Layer]:
    """Yield the edit that `find` returns, if any; its refusal becomes a near miss at the layer.

    Return the layer, or the one that the edit has put in its place.
    """
    try:
        edit = find(*arguments)
    except Refused as refusal:
        yield Miss((layer,), str(refusal))
    else:
        if edit is not None:
            yield edit
            return layer if layer.graph is not None else edit.takes.get(layer, layer)
    return layer


class GraphPass(_Pass):
    """A pass over the whole graph.

    Its function takes the graph and never edits it: it yields each `Replacement`, which the engine checks and carries
    out before the function continues. A refused edit becomes a near miss.
    """


Pass: TypeAlias = Rewrite | GraphPass


def rewrite(*patterns: Op, exact: bool, purpose: str = "") -> Callable[[Callable[..., Result]], Rewrite]:
    """Turn a function into a Rewrite."""
    return lambda function: Rewrite(function, exact, purpose, patterns)


def graph_pass(*, exact: bool, purpose: str = "") -> Callable[[Callable[[Graph], Edits]], GraphPass]:
    """Turn a generator function into a GraphPass."""
    return lambda function: GraphPass(function, exact, purpose)


def layer_pass(
    pattern: Op, *, exact: bool, purpose: str = ""
) -> Callable[[Callable[[Layer], Replacement | None]], GraphPass]:
    """Turn a function into a GraphPass that calls it for each layer that fits a pattern; it returns an edit or None."""

    def decorate(function: Callable[[Layer], Replacement | None]) -> GraphPass:
        @wraps(function)
        def sweep(graph: Graph) -> Edits:
            for layer in graph.layers:
                if layer.graph is graph and pattern.fits(layer):
                    yield from attempt(layer, function, layer)

        return GraphPass(sweep, exact, purpose)

    return decorate
