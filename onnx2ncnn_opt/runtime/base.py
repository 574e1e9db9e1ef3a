"""The common part of all runtimes: inputs, outputs, and the error about a missing runtime."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnx2ncnn_opt.errors import RunError, UsageError
from onnx2ncnn_opt.runtime._ncnn_net import EMPTY

Array = NDArray[Any]


class Feed(NamedTuple):
    """An array for an ncnn blob. `batch_axis` is the axis that becomes the Mat's batch count, None for no batch."""

    array: Array
    batch_axis: int | None = None

    @property
    def mat(self) -> tuple[tuple[int, ...], int]:
        """The shape of the Mat, outermost first, and its batch count."""
        shape = list(self.array.shape) or [1]
        batch = 1 if self.batch_axis is None else shape.pop(self.batch_axis)
        return tuple(shape), batch


class Step(dict[str, Feed]):
    """The feeds of a decoder's step by blob.

    `caches` are the blobs of each cache before and after a step. They stay in ncnn's process: they get the first `past`
    rows that the step `before` leaves, or stay unset. Without `before` the process has to hold these rows.
    """

    def __init__(
        self, feeds: Mapping[str, Feed], caches: Sequence[tuple[str, str]], past: int, before: Step | None = None
    ) -> None:
        super().__init__(feeds)
        self.caches, self.past, self.before = caches, past, before


class Fetch(NamedTuple):
    """A blob to read."""

    blob: str
    batch_axis: int | None = None  # the place of the Mat's batch count in the array, None if it has no batch
    integer: bool = False  # every element's 32 bits are an int32 instead of a float32: ncnn's Mats carry no type

    def read(self, array: Array) -> Array:
        """Return the elements in their own type."""
        return array.view(np.int32) if self.integer and array.itemsize == 4 else array


class Failure(NamedTuple):
    """The reason why one output of a net is missing, and whether ncnn died on it."""

    reason: str
    crashed: bool = False

    def __str__(self) -> str:
        return self.reason

    @property
    def is_empty(self) -> bool:
        """True if ncnn computed the output, and it has no elements."""
        return self.reason.startswith(EMPTY)


def all_there(results: Mapping[str, Array | Failure], net: Path) -> dict[str, Array]:
    """Return the results of a net; raises RunError if one of them is missing."""
    if failures := [f"  {blob}: {result}" for blob, result in results.items() if isinstance(result, Failure)]:
        raise RunError(f"ncnn could not compute outputs of {net}:\n" + "\n".join(failures))
    return {blob: result for blob, result in results.items() if not isinstance(result, Failure)}


# The oldest version that works: from this one on, ncnn takes batches from Python.
OLDEST = {"ncnn": "1.0.20261020"}


def require(package: str) -> None:
    """Raise UsageError if a runtime is not installed or too old, with the way to get it (without importing it)."""
    is_missing = importlib.util.find_spec(package) is None
    if problem := "is not installed" if is_missing else outdated(package, version(package)):
        raise UsageError(
            f"nets run and are verified with the package {package}, which {problem}: `pip install -U {package}`, or "
            "convert with --no-verify"
        )


def outdated(package: str, version: str) -> str:
    """Return what is wrong with a version, like 1.0.20261020, of a package; empty if nothing is."""
    oldest = OLDEST.get(package, "0")
    found, least = (tuple(map(int, re.findall(r"\d{1,18}", text))) for text in (version, oldest))
    return f"is {version:.40}, but has to be {oldest} or newer" if found < least else ""
