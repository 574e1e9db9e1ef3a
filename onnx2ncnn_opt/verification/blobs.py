"""Comparison of the blobs inside a net with the values inside its model, in any order of axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Literal

import numpy as np

from onnx2ncnn_opt.errors import CrashError, RunError
from onnx2ncnn_opt.runtime.base import Array, Failure
from onnx2ncnn_opt.runtime.ort import OrtRunner, read_model
from onnx2ncnn_opt.verification.tolerance import Difference, Tolerance, compare

_MOST_AXES = 5  # values with more axes are not permuted


@dataclass(frozen=True)
class Verdict:
    """The verdict on a blob; "reordered" is one of the value's numbers that no permutation of its axes gives."""

    status: Literal["right", "reordered", "wrong", "unknown"]
    message: str = ""
    value: str | None = None  # the model's name of the blob
    difference: Difference | None = None  # from that value


UNKNOWN = Verdict("unknown", "the model has no such value")


def model_values(
    model: Path | bytes, feeds: Mapping[str, Array], values: Mapping[str, Array], timeout: float
) -> dict[str, Array]:
    """Return ONNX Runtime's value of every node of the model's graph, and its inputs; `values` are bound inputs."""
    proto = read_model(model)

    def computed(names: Sequence[str]) -> dict[str, Array]:
        """Return the values of these names, without values that cannot be an output, such as a sequence."""
        try:
            runner = OrtRunner(model, outputs=names, values=values, timeout=timeout)
            try:
                return runner.run_any(feeds)
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
    """Return the names of values by their number of elements."""
    found: dict[int, list[str]] = {}
    for name, array in values.items():
        found.setdefault(array.size, []).append(name)
    return found


def value_name(blob: str, names: Mapping[str, str]) -> str | None:
    """Return the model's name of a blob, from `names` or the same; None for a number, which is no name in a model."""
    name = names.get(blob, blob)
    return name if blob in names or not name.isdigit() else None


def judge(
    result: Array | Failure,
    named: str | None,
    values: Mapping[str, Array],
    sizes: Mapping[int, Sequence[str]],
    tolerance: Tolerance,
) -> Verdict:
    """Compare a blob with the model's value of that name, or else with any of its numbers; `sizes` are `by_size`."""
    value = None if named is None else values.get(named)
    if isinstance(result, Failure):
        return Verdict("wrong", result.reason, None if value is None else named)
    if value is not None:
        if value.size != result.size:
            return Verdict("wrong", f"its shape is {list(result.shape[1:])}, the model's {list(value.shape)}", named)
        return as_verdict(aligned(result, value, tolerance)[0], named)
    found = same_numbers(result, values, sizes, tolerance)
    return as_verdict(found[2], found[0]) if found else UNKNOWN


def same_numbers(
    array: Array, values: Mapping[str, Array], sizes: Mapping[int, Sequence[str]], tolerance: Tolerance
) -> tuple[str, tuple[int, ...], Difference] | None:
    """Return the first value with an array's numbers, the order of its axes, and its distance from the array."""
    for name in sizes.get(array.size, ()):
        if same_range(array, values[name], tolerance):
            difference, axes = aligned(array, values[name], tolerance)
            if difference.ok:
                return name, axes, difference
    return None


def as_verdict(difference: Difference, value: str | None) -> Verdict:
    """Return the verdict for a difference from a value of the model."""
    message = difference.special or difference.excess
    return Verdict("right" if difference.ok else "wrong", message, value, difference)


def squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without its sizes of 1."""
    return tuple(size for size in shape if size != 1)


def in_order(value: Array, axes: tuple[int, ...]) -> Array:
    """Return the elements of a value as a flat array, without axes of size 1, the others permuted."""
    return value.reshape(squeezed(value.shape)).transpose(axes).reshape(-1)


def natural(value: Array) -> tuple[int, ...]:
    """Return the order of a value's axes without a permutation, e.g. (0, 1, 2); axes of size 1 do not count."""
    return tuple(range(len(squeezed(value.shape))))


def aligned(result: Array, value: Array, tolerance: Tolerance) -> tuple[Difference, tuple[int, ...]]:
    """Compare a blob with a value of as many elements; return the difference, and the order of the value's axes.

    It is the first order that is within the tolerance (see `in_order`). If none is, it is the value's own order.
    """
    flat, order = result.reshape(-1), natural(value)
    plain = compare(flat, value.reshape(-1), tolerance)
    if plain.ok or not same_range(flat, value, tolerance):
        return plain, order
    for axes in _others(order):
        if (difference := compare(flat, in_order(value, axes), tolerance)).ok:
            return difference, axes
    return plain, order


def nearest(result: Array, value: Array) -> tuple[int, ...]:
    """Return the order of a value's axes with the smallest difference from a blob with as many elements."""
    order = natural(value)

    def distance(axes: tuple[int, ...]) -> float:
        difference = np.abs(result.reshape(-1).astype(np.float64) - in_order(value, axes).astype(np.float64))
        return float(np.nan_to_num(difference, nan=0.0, posinf=0.0).sum())

    return min((order, *_others(order)), key=distance)


def same_range(a: Array, b: Array, tolerance: Tolerance) -> bool:
    """Return True if the smallest and largest numbers agree; no permutation of axes changes them."""
    if a.dtype.kind != "f" or b.dtype.kind != "f":
        return True
    ends = [(float(np.nanmin(x)), float(np.nanmax(x))) if not np.isnan(x).all() else (0.0, 0.0) for x in (a, b)]
    allowed = max(tolerance.absolute, tolerance.relative * max(map(abs, ends[1])))
    return all(x == y or abs(x - y) <= allowed for x, y in zip(*ends, strict=True))


def _others(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield all other orders of axes; none if there are more than `_MOST_AXES`."""
    if 1 < len(order) <= _MOST_AXES:
        yield from (axes for axes in permutations(order) if axes != order)
