"""The two kinds of passes: a `rewrite` of a pattern, or a `graph_pass` over the whole graph."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias, TypeVar

from onnx2ncnn_opt.ir.dim import Shape
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.rewrite.pattern import Kind, Match, Op, kinds_of, matches_above

_T = TypeVar("_T")
Result: TypeAlias = Layer | Blob | Sequence[Layer] | Sequence[Blob]


class Refused(Exception):
    """A pattern was found, but rewriting it would change the net's meaning: no error, the reason is reported."""


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
    """Return the shape of a blob; refuse an unknown shape, and a rank that is not in `ranks`, if there are any."""
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
class Rewrite:
    """A pattern, and a function that says what replaces it; it never edits the graph.

    The function's parameters are captures of the pattern; one with a default may be missing in some of `patterns`.
    It returns a Layer without outputs, which takes over the root's output; a Blob, which is used instead of the root's
    output (a sequence of Blobs for a root with several outputs); or a sequence of Layers, the last of which takes over
    the root's output while the others come with their own new output blobs. `exact` promises bit-equal results
    on every CPU, so a pass that changes a division, or the rows that a function computes, is not exact. `purpose` says
    why the pass exists, where the models and numbers of docs/passes.md do not show it. `covers` are the names that
    ncnnoptimize has for parts of it; ``--skip`` and ``--only`` take them for the whole.
    """

    name: str
    summary: str
    exact: bool
    patterns: tuple[Op, ...]
    function: Callable[..., Result]
    purpose: str = ""
    covers: tuple[str, ...] = ()

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
        """Return the patterns for a root of such `kinds_of`, in their order; those in a row with one root together."""
        if kinds not in self._by_kinds:
            chosen = (p for p in self.patterns if p.may_be(kinds[0]) and p.may_read(kinds[1:]))
            groups = groupby(chosen, lambda pattern: pattern._replace(inputs=None))
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
        """Return the function's result for a match; raises Refused."""
        return self.function(**{name: match.captures[name] for name in self._parameters if name in match.captures})

    @cached_property
    def _parameters(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.function).parameters)


@dataclass(frozen=True, eq=False)
class Replacement:
    """Layers that go, and the layers and blobs that replace them.

    `layers` are all layers of the edit, the last one last. They are removed, except those that `takes` has a new layer
    for: that one comes without outputs, and takes over the position and the blobs of the old one. `added` are new
    layers with blobs of their own, each with the layer that it stands before (None: at the end). Layers that read a key
    of `reads` read its value instead, and a name that the net's caller knows moves along. With `may_stay` a layer that
    others read too stays where it is, as views do; otherwise such an edit is refused. `sources` are layers that stay,
    although the result comes from their ONNX nodes too; `heirs` stand for the removed layers from now on.
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
        """The layers that nothing replaces."""
        return [layer for layer in self.layers if layer not in self.takes]


class Miss(NamedTuple):
    """Layers that a graph pass would have changed, and why it could not."""

    layers: tuple[Layer, ...]
    reason: str


def attempt(layer: Layer, find: Callable[..., Replacement | None], *arguments: Any) -> Iterator[Replacement | Miss]:
    """Yield the edit that `find` proposes because of a layer, if any; a refusal becomes a near miss."""
    try:
        edit = find(*arguments)
    except Refused as refusal:
        yield Miss((layer,), str(refusal))
    else:
        if edit is not None:
            yield edit


@dataclass(frozen=True, eq=False)
class GraphPass:
    """A pass that needs to see the whole graph.

    Its function never edits the graph: it yields each `Replacement`, which the engine checks and carries out before the
    function goes on. One that the engine refuses becomes a near miss.
    """

    name: str
    summary: str
    exact: bool
    function: Callable[[Graph], Iterator[Replacement | Miss]]
    purpose: str = ""
    covers: tuple[str, ...] = ()


Pass: TypeAlias = Rewrite | GraphPass


def is_foreign(p: Pass) -> bool:
    """Return whether another package brought the pass."""
    return not p.function.__module__.startswith("onnx2ncnn_opt.")


def rewrite(
    *patterns: Op, exact: bool, name: str = "", summary: str = "", purpose: str = "", covers: Iterable[str] = ()
) -> Callable[[Callable[..., Result]], Rewrite]:
    """Make a Rewrite of a function; its name and the first line of its docstring are the defaults."""

    def decorate(function: Callable[..., Result]) -> Rewrite:
        picture = summary or _first_line(function)
        return Rewrite(name or function.__name__, picture, exact, patterns, function, purpose, tuple(covers))

    return decorate


def graph_pass(
    *, exact: bool, purpose: str = ""
) -> Callable[[Callable[[Graph], Iterator[Replacement | Miss]]], GraphPass]:
    """Make a GraphPass of a generator function."""

    def decorate(function: Callable[[Graph], Iterator[Replacement | Miss]]) -> GraphPass:
        return GraphPass(function.__name__, _first_line(function), exact, function, purpose)

    return decorate


def _first_line(function: Callable[..., Any]) -> str:
    return (function.__doc__ or "").strip().partition("\n")[0]
