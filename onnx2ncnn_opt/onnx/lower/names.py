"""Names of layers and blobs while a graph is built: each one once."""

from __future__ import annotations

from collections.abc import Iterable


class Names:
    """Names that are taken. Where one is asked for again, it gets the lowest number that is free."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)
        self._lowest: dict[str, int] = {}  # below it no number of a name is free
        self._made: dict[str, tuple[str, int]] = {}  # what a numbered name was made of

    def new(self, name: str) -> str:
        """The name, or one made of it, which is taken from now on."""
        if name not in self._taken:
            self._taken.add(name)
            return name
        number = self._lowest.get(name, 1)
        while (candidate := f"{name}_{number}") in self._taken:
            number += 1
        self._lowest[name] = number + 1
        self._made[candidate] = name, number
        self._taken.add(candidate)
        return candidate

    def rename(self, old: str, new: str) -> None:
        """Take a name, and give another one back."""
        self._taken.discard(old)
        if old in self._made:
            name, number = self._made.pop(old)
            self._lowest[name] = min(number, self._lowest[name])
        self._taken.add(new)
