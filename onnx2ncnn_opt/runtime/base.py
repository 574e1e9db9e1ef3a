"""The common part of all runtimes: inputs, outputs, and the error about a missing runtime."""

import importlib.util
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnx2ncnn_opt.errors import RunError, UsageError
from onnx2ncnn_opt.runtime._ncnn_net import EMPTY

Array = NDArray[Any]


class Feed(NamedTuple):
    """An array for an ncnn blob. `batch_axis` becomes the Mat's batch count; None for no batch."""

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

    `caches` are pairs of blobs: a cache before and after a step. Caches stay in ncnn's process. Each gets the first
    `past` rows from the step `before`, or stays unset if `past` is 0. Without `before`, the process has these rows.
    """

    def __init__(
        self, feeds: Mapping[str, Feed], caches: Sequence[tuple[str, str]], past: int, before: "Step | None" = None
    ) -> None:
        super().__init__(feeds)
        self.caches, self.past, self.before = caches, past, before


class Fetch(NamedTuple):
    """A blob to read."""

    blob: str
    batch_axis: int | None = None  # the array's axis for the Mat's batch count, None without a batch
    integer: bool = False  # elements are int32 instead of float32: ncnn's Mats carry no type
    boxes: str | None = None  # the blob of the boxes that DetectionOutput selects: if it is empty, there are no rows

    def read(self, array: Array) -> Array:
        """Return the array as int32 if its elements are integers."""
        return array.view(np.int32) if self.integer and array.itemsize == 4 else array


class Failure(NamedTuple):
    """The reason why an output of a net is missing; `crashed` if ncnn crashed while it computed the output."""

    reason: str
    crashed: bool = False

    def __str__(self) -> str:
        return self.reason

    @property
    def is_empty(self) -> bool:
        """True if ncnn computed the output, but it has no elements."""
        return self.reason.startswith(EMPTY)


def all_there(results: Mapping[str, Array | Failure], net: Path) -> dict[str, Array]:
    """Return the results of a net; raises RunError if one of them is missing."""
    if failures := [f"  {blob}: {result}" for blob, result in results.items() if isinstance(result, Failure)]:
        raise RunError(f"ncnn could not compute outputs of {net}:\n" + "\n".join(failures))
    return {blob: result for blob, result in results.items() if not isinstance(result, Failure)}


# The oldest versions that work: ncnn's Python package takes batches since this one.
OLDEST = {"ncnn": "1.0.20261020"}
_version = cache(version)  # which parses a file of a hundred lines


def require(package: str) -> None:
    """Raise UsageError, with the command to install it, if a runtime is missing or too old; import nothing."""
    is_missing = importlib.util.find_spec(package) is None
    if problem := "is not installed" if is_missing else outdated(package, _version(package)):
        raise UsageError(
            f"nets run and are verified with the package {package}, which {problem}: `pip install -U {package}`, or "
            "convert with --no-verify"
        )


def outdated(package: str, version: str) -> str:
    """Return the end of an error message if a package's version, such as 1.0.20261020, is too old, else ""."""
    oldest = OLDEST.get(package, "0")
    numbers, least = (tuple(map(int, re.findall(r"\d{1,18}", text))) for text in (version, oldest))
    return f"is {version:.40}, but has to be {oldest} or newer" if numbers < least else ""
