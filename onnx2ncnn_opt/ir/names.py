"""Unique names of layers and blobs."""

from collections.abc import Iterable


class NamePool(set[str]):
    """The names in use. A name that is used already gets a number: "relu", "relu_1", "relu_2".

    `limit` is the largest size of a name with its number, in bytes of UTF-8.
    """

    def __init__(self, taken: Iterable[str] = (), limit: int | None = None) -> None:
        super().__init__(taken)
        self._limit = limit
        self._lowest: dict[str, int] = {}  # the lowest number of a name that may be free

    def take(self, wanted: str) -> str:
        """Take a name, with the lowest free number if it is in use; return it."""
        name = wanted
        if name in self:
            number = self._lowest.get(wanted, 1)
            while (name := self._numbered(wanted, f"_{number}")) in self:
                number += 1
            self._lowest[wanted] = number + 1
        self.add(name)
        return name

    def release(self, *names: str) -> None:
        """Make names free again."""
        for name in names:
            self.discard(name)
            base, _, number = name.rpartition("_")
            if base in self._lowest and number.isdecimal() and len(number) < 10:
                self._lowest[base] = min(max(int(number), 1), self._lowest[base])

    def _numbered(self, name: str, suffix: str) -> str:
        return (name if self._limit is None else shortened(name, self._limit - len(suffix))) + suffix


def shortened(name: str, size: int) -> str:
    """Return the longest start of a name that fits into `size` bytes of UTF-8."""
    encoded = name.encode()
    return name if len(encoded) <= size else encoded[:size].decode(errors="ignore")
