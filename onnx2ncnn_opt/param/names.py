"""Names that ncnn can read back: no white space, at most 255 bytes of UTF-8, and unique among the blobs."""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_NAME_BYTES = 255

# White space (C's, not Unicode's) ends a name for ncnn's parser, NUL ends its strings; a surrogate has no UTF-8 form.
_UNSAFE = re.compile(r"[\0\t\n\v\f\r \ud800-\udfff]")


def clean_name(name: str, instead: str = "unnamed") -> str:
    """The name with everything that ncnn cannot read replaced by ``_``; `instead` where nothing is left."""
    return _shortened(_UNSAFE.sub("_", name), MAX_NAME_BYTES) or instead


class NamePool:
    """Hands out every name once."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._next: dict[str, int] = {}

    def take(self, wanted: str) -> str:
        """`wanted` made safe, with a number after it where that is taken."""
        name = clean = clean_name(wanted, "blob")
        while name in self._taken:
            number = self._next[clean] = self._next.get(clean, 0) + 1
            suffix = f"_{number}"
            name = _shortened(clean, MAX_NAME_BYTES - len(suffix)) + suffix
        self._taken.add(name)
        return name

    def take_all(self, wanted: Iterable[str]) -> list[str]:
        """A name for each: those that are safe and free stay as they are, whatever stands before them."""
        wanted = list(wanted)
        kept = {name: i for i, name in reversed(list(enumerate(wanted))) if self._is_free(name)}
        self._taken.update(kept)
        return [name if kept.get(name) == i else self.take(name) for i, name in enumerate(wanted)]

    def _is_free(self, name: str) -> bool:
        return name not in self._taken and clean_name(name, "") == name != ""


def safe_names(wanted: Iterable[str]) -> list[str]:
    """Names in the same order that ncnn can read and that differ from each other; safe unique names do not change."""
    return NamePool().take_all(wanted)


def _shortened(name: str, size: int) -> str:
    encoded = name.encode()
    return name if len(encoded) <= size else encoded[:size].decode(errors="ignore")
