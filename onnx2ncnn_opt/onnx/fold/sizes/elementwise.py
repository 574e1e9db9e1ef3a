"""Elementwise operators (arithmetic, comparisons, logic) and reductions."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from itertools import combinations
from typing import Any

import numpy as np
import onnx_ir

from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym, at_least, axis_index, exact_div, larger, smaller
from onnx2ncnn_opt.onnx.fold.sizes.cells import (
    Attributes,
    Operator,
    UnknownValue,
    axes_of,
    axis_of,
    broadcast,
    is_dynamic,
    map_cells,
    materialised,
    moved,
    plain,
    require,
    whole,
    with_size,
)
from onnx2ncnn_opt.onnx.value import SymbolicTensor, is_float

_BOOL = np.dtype(np.bool_)


def _elementwise(function: Callable[..., Any], dtype: np.dtype[np.generic] | None = None, source: int = 0) -> Any:
    """Return an operator that broadcasts; its result has the type `dtype`, by default that of operand `source`."""

    def operator(x: Sequence[SymbolicTensor], _: Attributes) -> SymbolicTensor:
        shape = broadcast([operand.shape for operand in x])
        kind = x[source].dtype
        cells = map_cells(lambda *elements: function(kind, shape, *map(plain, elements)), *(o.cells for o in x))
        cells = cells.reshape((1,) * (len(shape) - cells.ndim) + cells.shape)
        return SymbolicTensor(cells, shape, dtype or kind)

    return operator


def _is_at_least(size: Dim, bound: int, shape: Shape) -> bool:
    """Return True as `at_least` does, and if the bound follows from an axis index being less than the axis's size."""
    if at_least(size, bound):
        return True
    if not isinstance(size, Sym):
        return False
    # An index counted from the other end is a valid index, too.
    axes = {name: int(name[1:]) for name in size.names() if name[0] == "#"}
    flipped = [(name, shape[-1 - axis] - 1 - axis_index(axis)) for name, axis in axes.items()]
    subsets = (subset for count in range(1, len(flipped) + 1) for subset in combinations(flipped, count))
    return any(at_least(size.subs(dict(subset)), bound) for subset in subsets)


def _less(shape: Shape, a: Any, b: Any) -> bool:
    if not is_dynamic(a, b):
        return bool(a < b)
    a, b = whole(a, b)
    if _is_at_least(b - a, 1, shape):
        return True
    if _is_at_least(a - b, 0, shape):
        return False
    raise UnknownValue


def _equal(shape: Shape, a: Any, b: Any) -> bool:
    if a == b:
        return True
    if not is_dynamic(a, b):
        return False
    a, b = whole(a, b)
    if _is_at_least(a - b, 1, shape) or _is_at_least(b - a, 1, shape):
        return False
    raise UnknownValue


def _arithmetic(function: Callable[[Any, Any], Any]) -> Any:
    def compute(kind: np.dtype[np.generic], shape: Shape, *cells: Any) -> Any:
        return reduce(lambda a, b: function(*whole(a, b)) if is_dynamic(a, b) else function(a, b), cells)

    return _elementwise(compute)


def _divided(kind: np.dtype[np.generic], shape: Shape, a: Any, b: Any) -> Any:
    if not is_dynamic(a, b):
        require(b != 0)
        if is_float(kind):
            return a / b
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    a, b = whole(a, b)
    quotient = exact_div(a, b) if b != 0 else None
    if quotient is not None:
        return quotient
    require(not is_float(kind) and isinstance(a, Sym) and _is_at_least(b, 1, shape))
    # ONNX rounds towards 0.
    if _is_at_least(a, 0, shape):
        return a // b
    if _is_at_least(-a, 0, shape):
        return -(-a // b)
    raise UnknownValue


def _remainder(fmod: int, kind: np.dtype[np.generic], shape: Shape, a: Any, b: Any) -> Any:
    """Compute Mod: its sign is the divisor's, with `fmod` the operand's; both agree for positive operands."""
    require(is_dynamic(a, b))
    a, b = whole(a, b)
    is_positive = _is_at_least(a, 0, shape)
    require(_is_at_least(b, 1, shape) and (is_positive or not fmod))
    if is_positive and _is_at_least(b - a, 1, shape):
        return a
    return a - (exact_div(a, b) or a // b) * b


def _power(a: Any, b: Any) -> Any:
    require(b in (1, 2, 3))
    return math.prod([a] * int(b))


def _extreme(of_sizes: Callable[[Dim, Dim], Dim], of_numbers: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def compute(a: Any, b: Any) -> Any:
        return of_sizes(*whole(a, b)) if is_dynamic(a, b) else plain(of_numbers(a, b))

    return compute


_larger, _smaller = _extreme(larger, np.maximum), _extreme(smaller, np.minimum)


def _clip(x: Sequence[SymbolicTensor], attributes: Attributes) -> SymbolicTensor:
    for bound, function in zip(x[1:], (_larger, _smaller), strict=False):
        x = [_arithmetic(function)([x[0], bound], attributes)]
    return x[0]


def _cast(x: Sequence[SymbolicTensor], attributes: Attributes) -> SymbolicTensor:
    target = np.dtype(onnx_ir.DataType(attributes["to"]).numpy())
    if target == _BOOL:
        shape = x[0].shape
        return SymbolicTensor(map_cells(lambda cell: not _equal(shape, plain(cell), 0), x[0].cells), shape, _BOOL)
    require(target in (np.int64, np.int32, np.float32, np.float64))
    cells = x[0].cells if is_dynamic(*x[0].cells.flat) else x[0].cells.astype(x[0].dtype).astype(target)
    return SymbolicTensor(cells, x[0].shape, target)


def _rounded(x: Sequence[SymbolicTensor], _: Attributes) -> SymbolicTensor:
    """Return whole numbers, which Floor, Ceil and Round do not change; raise UnknownValue for others."""
    map_cells(lambda cell: whole(plain(cell)), x[0].cells)
    return x[0]


def _reduction(function: Callable[[Dim, Dim], Dim]) -> Any:
    def operator(x: Sequence[SymbolicTensor], attributes: Attributes) -> SymbolicTensor:
        data, axes = x[0], axes_of(x, attributes)
        default = [] if attributes.get("noop_with_empty_axes") else range(data.rank)
        reduced = [axis_of(axis, data.rank) for axis in axes or default]
        for axis in reduced:
            data = materialised(data, axis)
            parts = [np.take(data.cells, [i], axis) for i in range(data.cells.shape[axis])]
            cells = reduce(partial(map_cells, lambda a, b: function(plain(a), plain(b))), parts)
            data = SymbolicTensor(cells, with_size(data.shape, axis, 1), data.dtype)
        if attributes.get("keepdims", 1):
            return data
        return moved(data, [axis for axis in range(data.rank) if axis not in reduced])

    return operator


OPERATORS: Mapping[str, Operator] = {
    "Add": _arithmetic(lambda a, b: a + b),
    "Sub": _arithmetic(lambda a, b: a - b),
    "Mul": _arithmetic(lambda a, b: a * b),
    "Pow": _arithmetic(_power),
    "Neg": _elementwise(lambda kind, shape, a: -a),
    "Div": _elementwise(_divided),
    "Mod": lambda x, attributes: _elementwise(partial(_remainder, attributes.get("fmod", 0)))(x, attributes),
    "Max": _arithmetic(_larger),
    "Min": _arithmetic(_smaller),
    "Equal": _elementwise(lambda kind, shape, a, b: _equal(shape, a, b), _BOOL),
    "Less": _elementwise(lambda kind, shape, a, b: _less(shape, a, b), _BOOL),
    "Greater": _elementwise(lambda kind, shape, a, b: _less(shape, b, a), _BOOL),
    "LessOrEqual": _elementwise(lambda kind, shape, a, b: not _less(shape, b, a), _BOOL),
    "GreaterOrEqual": _elementwise(lambda kind, shape, a, b: not _less(shape, a, b), _BOOL),
    "And": _elementwise(lambda kind, shape, a, b: bool(a and b), _BOOL),
    "Or": _elementwise(lambda kind, shape, a, b: bool(a or b), _BOOL),
    "Not": _elementwise(lambda kind, shape, a: not a, _BOOL),
    "Where": _elementwise(lambda kind, shape, condition, a, b: a if condition else b, source=1),
    "Floor": _rounded,
    "Ceil": _rounded,
    "Round": _rounded,
    "Cast": _cast,
    "Clip": _clip,
    "ReduceMax": _reduction(_larger),
    "ReduceMin": _reduction(_smaller),
    "ReduceProd": _reduction(lambda a, b: a * b),
    "ReduceSum": _reduction(lambda a, b: a + b),
}
