"""Unique names of layers and blobs."""

from collections.abc import Iterable


class NamePool:
    """The names in use. A name that is used already gets a number: "relu", "relu_1", "relu_2".

    `limit` is the largest size of a name with its number, in bytes of UTF-8.
    """

    def __init__(self, taken: Iterable[str] = (), limit: int | None = None) -> None:
        self._taken, self._limit = set(taken), limit
        self._lowest: dict[str, int] = {}  # the lowest number of a name that may be free

    def __contains__(self, name: str) -> bool:
        return name in self._taken

    def add(self, *names: str) -> None:
        """Take names as they are."""
        self._taken.update(names)

    def take(self, wanted: str) -> str:
        """Take a name, with the lowest free number if it is in use; return it."""
        name = wanted
        if name in self._taken:
            number = self._lowest.get(wanted, 1)
            while (name := self._numbered(wanted, f"_{number}")) in self._taken:
                number += 1
            self._lowest[wanted] = number + 1
        self._taken.add(name)
        return name

    def release(self, *names: str) -> None:
        """Make names free again."""
        for name in names:
            self._taken.discard(name)
            base, _, number = name.rpartition("_")
            if base in self._lowest and number.isdecimal() and len(number) < 10:
                self._lowest[base] = min(max(int(number), 1), self._lowest[base])

    def _numbered(self, name: str, suffix: str) -> str:
        return (name if self._limit is None else shortened(name, self._limit - len(suffix))) + suffix


def shortened(name: str, size: int) -> str:
    """Return the longest start of a name that fits into `size` bytes of UTF-8."""
    encoded = name.encode()
    return name if len(encoded) <= size else encoded[:size].decode(errors="ignore")
