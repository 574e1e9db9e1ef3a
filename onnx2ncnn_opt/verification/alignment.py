"""Axis orders: the permutation of a model value's axes that gives the elements of a net's blob."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import numpy as np

from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.verification.tolerance import Difference, Tolerance, compare

_MOST_AXES = 5  # values with more axes are not permuted


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
