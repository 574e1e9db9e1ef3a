"""A walk along a graph, of layers, blobs, or what else it has."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

_Place = TypeVar("_Place", bound=Hashable)


def reached(starts: Iterable[_Place], onward: Callable[[_Place], Iterable[_Place]]) -> Iterator[_Place]:
    """Yield the starts, and all places that `onward` leads to from them, each once."""
    seen = dict.fromkeys(starts)
    left = list(seen)
    while left:
        place = left.pop()
        yield place
        further = [each for each in dict.fromkeys(onward(place)) if each not in seen]
        seen.update(dict.fromkeys(further))
        left += further
