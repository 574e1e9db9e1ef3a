"""The blobs inside a net against the values inside its model, whatever the order of their axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Literal

import numpy as np
import onnx

from onnx2ncnn_opt.errors import CrashError, RunError
from onnx2ncnn_opt.runtime.base import Array, Failure
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.verification.compare import Difference, Tolerance, compare

_MOST_AXES = 5  # that are permuted to find out how a Mat lies


@dataclass(frozen=True)
class Verdict:
    """What is known of a blob; `value` is what the model calls it, `difference` how far it is from that."""

    status: Literal["right", "wrong", "unknown"]
    message: str = ""
    value: str | None = None
    difference: Difference | None = None


UNKNOWN = Verdict("unknown", "the model has no such value")


def model_values(
    model: Path | bytes, feeds: Mapping[str, Array], values: Mapping[str, Array], timeout: float
) -> dict[str, Array]:
    """What ONNX Runtime computes for every node of the model's graph, and its inputs; `values` are bound inputs."""
    proto = onnx.ModelProto.FromString(model if isinstance(model, bytes) else model.read_bytes())

    def computed(names: Sequence[str]) -> dict[str, Array]:
        """The values of these names; what cannot be an output, such as a sequence, is left out."""
        try:
            runner = OrtRunner(model, outputs=names, values=values, timeout=timeout)
            taken = set(runner.input_names())
            try:
                return runner.run({name: array for name, array in feeds.items() if name in taken})
            finally:
                runner.close()
        except CrashError:
            raise
        except RunError:
            if len(names) == 1:
                return {}
            half = len(names) // 2
            return {**computed(names[:half]), **computed(names[half:])}

    names = dict.fromkeys(name for node in proto.graph.node for name in node.output if name)
    return {**feeds, **computed(list(names))}


def by_size(values: Mapping[str, Array]) -> dict[int, list[str]]:
    """The names of values with so many elements."""
    found: dict[int, list[str]] = {}
    for name, array in values.items():
        found.setdefault(array.size, []).append(name)
    return found


def judge(
    result: Array | Failure,
    named: str | None,
    values: Mapping[str, Array],
    sizes: Mapping[int, Sequence[str]],
    tolerance: Tolerance,
) -> Verdict:
    """A blob against the model's value of that name, or else against any value with the same numbers.

    `sizes` are the names `by_size`.
    """
    if isinstance(result, Failure):
        return Verdict("wrong", result.reason)
    if named is not None and named in values:
        value = values[named]
        if value.size != result.size:
            return Verdict("wrong", f"its shape is {list(result.shape[1:])}, the model's {list(value.shape)}", named)
        return as_verdict(aligned(result, value, tolerance), named)
    for candidate in sizes.get(result.size, ()):
        value = values[candidate]
        if _same_range(result, value, tolerance) and (difference := aligned(result, value, tolerance)).ok:
            return as_verdict(difference, candidate)
    return UNKNOWN


def as_verdict(difference: Difference, value: str | None) -> Verdict:
    """A difference from a value of the model, in words."""
    message = difference.special or difference.excess
    return Verdict("right" if difference.ok else "wrong", message, value, difference)


def aligned(result: Array, value: Array, tolerance: Tolerance) -> Difference:
    """The difference from a value of the model, in the order of axes in which there is none; else in its own order."""
    flat = result.reshape(-1)
    plain = compare(flat, value.reshape(-1), tolerance)
    shape = tuple(size for size in value.shape if size != 1)
    if plain.ok or not 1 < len(shape) <= _MOST_AXES or not _same_range(flat, value, tolerance):
        return plain
    squeezed = value.reshape(shape)
    for axes in list(permutations(range(len(shape))))[1:]:
        if (difference := compare(flat, squeezed.transpose(axes).reshape(-1), tolerance)).ok:
            return difference
    return plain


def _same_range(a: Array, b: Array, tolerance: Tolerance) -> bool:
    """Whether the least and largest numbers agree, as they do in any order."""
    if a.dtype.kind != "f" or b.dtype.kind != "f":
        return True
    ends = [(float(np.nanmin(x)), float(np.nanmax(x))) if not np.isnan(x).all() else (0.0, 0.0) for x in (a, b)]
    allowed = max(tolerance.absolute, tolerance.relative * max(map(abs, ends[1])))
    return all(x == y or abs(x - y) <= allowed for x, y in zip(*ends, strict=True))
