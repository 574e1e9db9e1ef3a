"""What a pass is: a `rewrite` of a pattern, or a `graph_pass` over the whole graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.rewrite.pattern import Match, Op, matches

Result: TypeAlias = Layer | Blob | Sequence[Layer] | Sequence[Blob]


class Refused(Exception):
    """A pattern was found, but rewriting it would change the net's meaning: no error, the reason is reported."""


def require(condition: object, reason: str) -> None:
    """Go on only if the condition holds; otherwise the match becomes a near miss with this reason."""
    if not condition:
        raise Refused(reason)


@dataclass(frozen=True, eq=False)
class Rewrite:
    """A pattern, and a function that says what stands in its place; it never edits the graph.

    The function's parameters are captures of the pattern; one with a default may be missing in some of `patterns`.
    It returns a Layer without outputs, which takes over the root's output; a Blob, which is used instead of the root's
    output (a sequence of Blobs for a root with several outputs); or a sequence of Layers, the last of which takes over
    the root's output while the others come with their own new output blobs. `exact` promises bit-equal results. `kept`
    says what it is for where that is not seen in the models and numbers of docs/passes.md.
    """

    name: str
    summary: str
    exact: bool
    patterns: tuple[Op, ...]
    function: Callable[..., Result]
    kept: str = ""

    def __post_init__(self) -> None:
        for pattern in self.patterns:
            missing = [name for name in self._required if name not in pattern.captures]
            if missing:
                raise TypeError(f"{self.name}: the pattern does not capture {', '.join(missing)}")

    @cached_property
    def root_types(self) -> frozenset[str]:
        """The types of the layer that a match ends in."""
        return frozenset().union(*(pattern.types for pattern in self.patterns))

    @cached_property
    def depth(self) -> int:
        """The most layers on a way through a match."""
        return max(pattern.depth for pattern in self.patterns)

    def matches(self, root: Layer) -> Iterator[Match]:
        """Every match that ends in `root`, in the order of the patterns."""
        for pattern in self.patterns:
            yield from matches(pattern, root)

    def result(self, match: Match) -> Result:
        """What the function returns for a match; raises Refused."""
        return self.function(**{name: match.captures[name] for name in self._parameters if name in match.captures})

    @cached_property
    def _parameters(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.function).parameters)

    @property
    def _required(self) -> list[str]:
        parameters = inspect.signature(self.function).parameters.values()
        return [p.name for p in parameters if p.default is inspect.Parameter.empty]


@dataclass(frozen=True)
class Change:
    """One edit of a graph pass: the layers that were removed, and those that were added or got other inputs."""

    before: tuple[Layer, ...]
    after: tuple[Layer, ...] = ()


@dataclass(frozen=True)
class Miss:
    """Layers that a graph pass would have changed, and why it could not."""

    layers: tuple[Layer, ...]
    reason: str


def attempt(layer: Layer, edit: Callable[..., Change | None], *arguments: Any) -> Iterator[Change | Miss]:
    """What an edit for the sake of a layer did, if anything; a refusal becomes a near miss."""
    try:
        change = edit(*arguments)
    except Refused as refusal:
        yield Miss((layer,), str(refusal))
    else:
        if change is not None:
            yield change


Allow: TypeAlias = Callable[[Layer], None]


@dataclass(frozen=True, eq=False)
class GraphPass:
    """A pass that needs to see the whole graph: it edits it, and yields after every edit what it did.

    A function with a second parameter gets `allow`, to call with every layer of a new kind before it edits anything:
    that raises Refused where the layer must not be made.
    """

    name: str
    summary: str
    exact: bool
    function: Callable[..., Iterator[Change | Miss]]
    kept: str = ""

    def sweep(self, graph: Graph, allow: Allow) -> Iterator[Change | Miss]:
        """Every change as it is made, and every one that nearly was."""
        asks = len(inspect.signature(self.function).parameters) > 1
        return self.function(graph, allow) if asks else self.function(graph)


Pass: TypeAlias = Rewrite | GraphPass


def rewrite(
    *patterns: Op, exact: bool, name: str = "", summary: str = "", kept: str = ""
) -> Callable[[Callable[..., Result]], Rewrite]:
    """Make a Rewrite of a function; its name and the first line of its docstring serve where none are given."""

    def decorate(function: Callable[..., Result]) -> Rewrite:
        return Rewrite(name or function.__name__, summary or _first_line(function), exact, patterns, function, kept)

    return decorate


def graph_pass(*, exact: bool, kept: str = "") -> Callable[[Callable[..., Iterator[Change | Miss]]], GraphPass]:
    """Make a GraphPass of a generator function."""

    def decorate(function: Callable[..., Iterator[Change | Miss]]) -> GraphPass:
        return GraphPass(function.__name__, _first_line(function), exact, function, kept)

    return decorate


def _first_line(function: Callable[..., Any]) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0]
