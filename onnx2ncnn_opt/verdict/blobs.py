"""The verdict on a net's blobs: the model's values with their numbers, in any order of axes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Literal

import numpy as np

from onnx2ncnn_opt.runtime.base import Array, Failure
from onnx2ncnn_opt.verdict.errors import Difference, Tolerance, compare

_SIMILAR = 3e-2  # a wrong blob within this error, relative to a value's largest element, still belongs to the value
_MAX_AXES = 5  # values with more axes are not permuted


@dataclass(frozen=True)
class Match:
    """A blob as a value of the model; "reordered": it has the value's numbers, but in no order of its axes."""

    status: Literal["right", "reordered", "wrong", "unknown"]
    message: str = ""
    value: str | None = None  # the model's name of the blob
    difference: Difference | None = None  # from that value


UNKNOWN = Match("unknown", "the model has no such value")


@dataclass(frozen=True)
class Reference:
    """The model's values by name; `names` maps blobs to values with other names."""

    values: Mapping[str, Array]
    names: Mapping[str, str] = field(default_factory=dict)

    def judge(self, blob: str, result: Array | Failure, tolerance: Tolerance) -> Match:
        """Compare a blob with the model's value of its name, or with any value that has the same numbers."""
        name = self.names.get(blob, blob)
        # Other converters number their blobs, so a name such as "12" is another value.
        value = self.values.get(name) if blob in self.names or not name.isdigit() else None
        if isinstance(result, Failure):
            return Match("wrong", result.reason, None if value is None else name)
        if value is not None:
            if value.size != result.size:
                return Match("wrong", f"its shape is {list(result.shape[1:])}, the model's {list(value.shape)}", name)
            return as_verdict(aligned(result, value, tolerance)[0], name)
        match = self.same_numbers(result, tolerance)
        return as_verdict(match[2], match[0]) if match else UNKNOWN

    def same_numbers(self, array: Array, tolerance: Tolerance) -> tuple[str, tuple[int, ...], Difference] | None:
        """Return the first value with an array's numbers, the order of its axes, and its difference from the array."""
        for name, value in self.values.items():
            if value.size == array.size and same_range(array, value, tolerance):
                difference, axes = aligned(array, value, tolerance)
                if difference.ok:
                    return name, axes, difference
        return None

    def judge_similar(self, blob: str, result: Array | Failure, tolerance: Tolerance) -> Match:
        """Judge a blob; if the error exceeds the tolerance, compare the blob with similar values too."""
        verdict = self.judge(blob, result, tolerance)
        if verdict.status == "right" or isinstance(result, Failure):
            return verdict
        wide = replace(tolerance, relative=max(tolerance.relative, _SIMILAR), slices=False)
        similar = self.judge(blob, result, wide)
        if similar.status == "right" and similar.difference is not None:
            message = verdict.message or f"off by up to {similar.difference.max_abs:.3g}"
            return Match("wrong", message, similar.value, similar.difference)
        value = self.values[verdict.value] if verdict.status == "wrong" and verdict.value is not None else None
        if value is None or value.size != result.size or value.dtype.kind != "f":
            return verdict
        difference = compare(np.sort(result, axis=None), np.sort(value, axis=None), replace(tolerance, slices=False))
        return Match("reordered", "", verdict.value, difference) if difference.ok else verdict


def as_verdict(difference: Difference, value: str | None) -> Match:
    """Return the verdict for a difference from a value of the model."""
    return Match("right" if difference.ok else "wrong", difference.problem, value, difference)


def squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without its sizes of 1."""
    return tuple(size for size in shape if size != 1)


def in_order(value: Array, axes: tuple[int, ...]) -> Array:
    """Permute a value's axes, without sizes of 1, and flatten it; e.g. (1, 0) makes 4x3 of 1x3x4 first."""
    return value.reshape(squeezed(value.shape)).transpose(axes).reshape(-1)


def natural(value: Array) -> tuple[int, ...]:
    """Return the identity permutation of a value's axes, e.g. (0, 1, 2); axes of size 1 do not count."""
    return tuple(range(len(squeezed(value.shape))))


def aligned(result: Array, value: Array, tolerance: Tolerance) -> tuple[Difference, tuple[int, ...]]:
    """Compare a blob with a value of the same size; return the difference, and the order of the value's axes.

    The order is the first within the tolerance (see `in_order`), or the value's own if there is none.
    """
    flat, (order, *others) = result.reshape(-1), _orders(value)
    plain = compare(flat, value.reshape(-1), tolerance)
    for axes in others if not plain.ok and same_range(flat, value, tolerance) else ():
        if (difference := compare(flat, in_order(value, axes), tolerance)).ok:
            return difference, axes
    return plain, order


def nearest(result: Array, value: Array) -> tuple[int, ...]:
    """Return the order of a value's axes with the smallest difference from a blob of the same size."""

    def distance(axes: tuple[int, ...]) -> float:
        with np.errstate(invalid="ignore"):  # the difference of two infinities
            difference = np.abs(result.reshape(-1).astype(np.float64) - in_order(value, axes).astype(np.float64))
        return float(np.nan_to_num(difference, nan=0.0, posinf=0.0).sum())

    return min(_orders(value), key=distance)


def in_axes_of(value: Array, result: Array) -> Array:
    """Return a blob in the shape of a value of the same size, its axes in the order with the smallest difference."""
    axes = nearest(result, value)
    sizes = squeezed(value.shape)
    permuted = result.reshape([sizes[axis] for axis in axes])
    return permuted.transpose(np.argsort(axes)).reshape(value.shape)


def same_range(a: Array, b: Array, tolerance: Tolerance) -> bool:
    """Return True if minima and maxima agree, which no permutation of axes changes."""
    if a.dtype.kind != "f" or b.dtype.kind != "f":
        return True
    ends = [(float(np.nanmin(x)), float(np.nanmax(x))) if not np.isnan(x).all() else (0.0, 0.0) for x in (a, b)]
    allowed = max(tolerance.absolute, tolerance.relative * max(map(abs, ends[1])))
    return all(x == y or abs(x - y) <= allowed for x, y in zip(*ends, strict=True))


def _orders(value: Array) -> list[tuple[int, ...]]:
    """Return the natural order of a value's axes, and all others unless there are more than `_MAX_AXES`."""
    order = natural(value)
    return list(permutations(order)) if len(order) <= _MAX_AXES else [order]
