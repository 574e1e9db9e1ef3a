"""Traversal of a graph."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

_Node = TypeVar("_Node", bound=Hashable)


def reached(starts: Iterable[_Node], neighbours: Callable[[_Node], Iterable[_Node]]) -> Iterator[_Node]:
    """Yield the starts and all nodes (layers, blobs) that `neighbours` leads to from them, each once."""
    seen = dict.fromkeys(starts)
    pending = list(seen)
    while pending:
        node = pending.pop()
        yield node
        new = [other for other in dict.fromkeys(neighbours(node)) if other not in seen]
        seen.update(dict.fromkeys(new))
        pending += new
