"""Common parts of tests/ and scripts/: cases, random nets and models, comparison, files."""

from typing import TypeVar

_T = TypeVar("_T")


def present(value: _T | None) -> _T:
    """Return a value that has to be there."""
    assert value is not None
    return value
