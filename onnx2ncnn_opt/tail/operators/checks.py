"""Checks shared by several families."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray


def axis_of(axis: int, rank: int) -> int:
    """Return an axis counted from the front."""
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} of a tensor with {rank} axes")
    return axis % rank


def axes_of(axes: Iterable[int], rank: int) -> list[int]:
    """Return axes counted from the front; raise ValueError if one occurs twice."""
    result = [axis_of(axis, rank) for axis in axes]
    if len(set(result)) < len(result):
        raise ValueError(f"an axis twice in {result}")
    return result


def sized(*shape: int) -> tuple[int, ...]:
    """Return the shape of a result; raise ValueError if it is too large."""
    if min(shape, default=0) < 0 or np.prod(shape, dtype=np.float64) > 2**28:
        raise ValueError(f"a result of the shape {shape}")
    return shape


def slice_indices(size: int, start: int, end: int, step: int) -> range:
    """Return the indices of a slice; with a negative step, ONNX clamps a start before the axis to 0, unlike Python."""
    if step < 0:  # and the largest integers as the end mean "to the first element"
        return range(size)[max(start, -size) : None if end in (2**31 - 1, 2**63 - 1) else end : step]
    return range(size)[start:end:step]


def wrapped(indices: NDArray[Any], size: int) -> NDArray[np.int64]:
    """Return indices counted from the front; raise ValueError if one is out of range."""
    if np.any((indices < -size) | (indices >= size)):
        raise ValueError(f"an index that is not below the size {size}")
    return np.where(indices < 0, indices + size, indices).astype(np.int64)
