"""The common part of all runtimes: inputs, outputs, and the error about a missing runtime."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
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


class Fetch(NamedTuple):
    """A blob to read. `batch_axis` is the place of the Mat's batch count in the array, None if it has no batch.

    ncnn's Mats carry no type: `integer` reads the 32 bits of every element as an int32 instead of a float32.
    """

    blob: str
    batch_axis: int | None = None
    integer: bool = False

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
    if importlib.util.find_spec(package) is None:
        problem = "is not installed"
    elif package in OLDEST and is_older(version(package), OLDEST[package]):
        problem = f"is {version(package)}, but has to be {OLDEST[package]} or newer"
    else:
        return
    raise UsageError(
        f"nets run and are verified with the package {package}, which {problem}: `pip install -U {package}`, or "
        "convert with --no-verify"
    )


def is_older(version: str, than: str) -> bool:
    """Return whether one version is before another, both like 1.0.20261020."""
    return _numbers(version) < _numbers(than)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d{1,18}", text)))
