"""Helpers for symbolic tensors: cells, axes, and conversion to constants."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym, axis_index, broadcast_shape, fitting, known, substituted
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.value import Constant, SymbolicTensor

Attributes = Mapping[str, Any]
Known = Constant | SymbolicTensor
Operator = Callable[[Sequence[SymbolicTensor], Attributes], SymbolicTensor]

MOST_CELLS = 1 << 16
_LARGEST = 1 << 26  # elements of a constant that was a symbolic tensor
INT = np.dtype(np.int64)
_T = TypeVar("_T")


class UnknownValue(Exception):
    """Raised if sizes cannot express a result."""


def require(is_known: bool) -> None:
    """Raise UnknownValue unless a condition holds with which sizes can express the result."""
    if not is_known:
        raise UnknownValue


def as_symbolic(x: Known) -> SymbolicTensor:
    """Return a constant as a symbolic tensor."""
    return x if isinstance(x, SymbolicTensor) else SymbolicTensor(x.array, x.shape, x.dtype)


def as_constant(x: SymbolicTensor) -> Known:
    """Return a symbolic tensor as a constant if no dynamic size is left in it."""
    if is_dynamic(*x.shape, *x.cells.flat):
        return x
    shape = known(x.shape)
    return x if math.prod(shape) > _LARGEST else Constant(np.broadcast_to(x.cells.astype(x.dtype), shape))


def vector(sizes: Sequence[Dim]) -> SymbolicTensor:
    """Return a tensor of rank 1 with these elements."""
    cells = np.empty(len(sizes), dtype=object)
    cells[:] = sizes
    return SymbolicTensor(cells, (len(sizes),), INT)


def plain(cell: Any) -> Any:
    """Return NumPy's integers as Python's."""
    return int(cell) if isinstance(cell, np.integer) else cell


def numbers(x: SymbolicTensor) -> list[Dim]:
    """Return the elements of a tensor that is a list of sizes."""
    return [plain(cell) for cell in all_materialised(x).cells.reshape(-1)]


def whole_numbers(x: SymbolicTensor) -> list[int]:
    """Return the elements of a tensor that is a list of numbers."""
    elements = numbers(x)
    require(not is_dynamic(*elements))
    return list(known(elements))


def replaced(cells: Array, values: Mapping[int, Dim]) -> Array:
    """Return the cells with axis indices replaced; the keys of `values` are axes counted from the last one."""
    if cells.dtype != object:
        return cells
    names = {str(axis_index(axis)): value for axis, value in values.items()}
    return map_cells(lambda cell: substituted(cell, names), cells)


def map_cells(function: Callable[..., Any], *cells: Array) -> Array:
    """Apply a function to the elements of arrays that broadcast."""
    require(np.broadcast(*cells).size <= MOST_CELLS)
    result = np.frompyfunc(function, len(cells), 1)(*(x.astype(object) for x in cells))
    return np.asarray(result, dtype=object)


def moved(x: SymbolicTensor, axes: Sequence[int | None]) -> SymbolicTensor:
    """Return a tensor whose axis i is axis ``axes[i]`` of x, or a new axis (None). Dropped axes must have size 1."""
    last, rank = len(axes) - 1, x.rank
    values = {rank - 1 - old: axis_index(last - new) for new, old in enumerate(axes) if old is not None}
    dropped = {rank - 1 - old: 0 for old in range(rank) if old not in axes}
    cells = replaced(x.cells, {**values, **dropped})
    kept = [old for old in axes if old is not None]
    cells = cells.transpose([*kept, *(old for old in range(rank) if old not in axes)])
    cells = cells.reshape([1 if old is None else x.cells.shape[old] for old in axes])
    return SymbolicTensor(cells, tuple(1 if old is None else x.shape[old] for old in axes), x.dtype)


def materialised(x: SymbolicTensor, axis: int) -> SymbolicTensor:
    """Return the symbolic tensor with a cell for every element along an axis."""
    size = x.shape[axis]
    if not isinstance(size, int) or size > MOST_CELLS:
        raise UnknownValue
    if x.cells.shape[axis] == size:
        return x
    parts = [replaced(x.cells, {x.rank - 1 - axis: i}) for i in range(size)] or [np.delete(x.cells, 0, axis)]
    return SymbolicTensor(np.concatenate(parts, axis), x.shape, x.dtype)


def all_materialised(x: SymbolicTensor) -> SymbolicTensor:
    """Return the symbolic tensor with a cell for every element."""
    for axis in range(x.rank):
        x = materialised(x, axis)
    return x


def or_none(function: Callable[..., _T], *arguments: Any) -> _T | None:
    """Return the result of a function such as `materialised` or `numbers`; None for dynamic or very long axes."""
    try:
        return function(*arguments)
    except UnknownValue:
        return None


def axis_of(axis: int, rank: int) -> int:
    """Return an axis counted from the front."""
    require(-rank <= axis < rank)
    return axis % rank


def axes_of(x: Sequence[SymbolicTensor], attributes: Attributes) -> list[int] | None:
    """Return the operand `axes` of newer opsets, or the attribute of older ones."""
    if len(x) > 1:
        return whole_numbers(x[1])
    axes = attributes.get("axes")
    return None if axes is None else list(axes)


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """Return the shape to which shapes broadcast; raise UnknownValue if the sizes do not determine it."""
    shape = broadcast_shape(shapes, lambda a, b: b if a == 1 else a if b == 1 else fitting(a, b))
    if shape is None:
        raise UnknownValue
    return shape


def with_size(shape: Shape, axis: int, size: Dim) -> Shape:
    """Return the shape with another size of one axis."""
    return (*shape[:axis], size, *shape[axis + 1 :])


def whole(*cells: Any) -> tuple[Any, ...]:
    """Return whole numbers as integers; raise UnknownValue for fractions, because sizes cannot have any."""
    require(all(isinstance(cell, (int, Sym)) or float(cell).is_integer() for cell in cells))
    return tuple(cell if isinstance(cell, Sym) else int(cell) for cell in cells)


def is_dynamic(*cells: Any) -> bool:
    """Return True if one of the cells depends on a dynamic size."""
    return any(isinstance(cell, Sym) for cell in cells)
