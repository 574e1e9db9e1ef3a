"""Arithmetic on tensors that depend only on dynamic sizes, such as `x.shape`, `arange` and `zeros`.

Every operator here treats the cells of a `SymbolicTensor` as elements, and renames the axis indices in them if axes
move. If sizes cannot express a result (an undecided comparison, a fraction of a size), the importers emit layers.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from itertools import combinations
from typing import Any

import numpy as np
import onnx_ir

from onnx2ncnn_opt.ir.dim import (
    Dim,
    Shape,
    Sym,
    at_least,
    axis_index,
    exact_div,
    known,
    larger,
    product,
    smaller,
)
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.fold.cells import (
    INT,
    MOST_CELLS,
    Attributes,
    Known,
    Operator,
    UnknownValue,
    all_materialised,
    as_constant,
    as_symbolic,
    axes_of,
    axis_of,
    broadcast,
    is_dynamic,
    map_cells,
    materialised,
    moved,
    numbers,
    or_none,
    plain,
    replaced,
    require,
    vector,
    whole,
    whole_numbers,
    with_size,
)
from onnx2ncnn_opt.onnx.value import SymbolicTensor, is_float
from onnx2ncnn_opt.tail.operators.checks import slice_indices

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
    if b == 2:  # what a lacks to an even number: sums with it, as a model pads, are multiples of 2
        return _up_to_even(a) - a
    return a - (exact_div(a, b) or a // b) * b


def _product(a: Any, b: Any) -> Any:
    """Return a product; raise UnknownValue for two positions, whose squares are too large for float32 from 4096 on."""
    require(not all(isinstance(cell, Sym) and any("#" in name for name in cell.names()) for cell in (a, b)))
    return a * b


def _up_to_even(a: Sym) -> Dim:
    return (a + 1) // 2 * 2


def _difference(a: Any, b: Any) -> Any:
    return a // 2 * 2 if isinstance(a, Sym) and b == _up_to_even(a) - a else a - b


def _power(a: Any, b: Any) -> Any:
    require(b in (1, 2, 3))
    return reduce(_product, [a] * int(b))


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


def _reshape(x: Sequence[SymbolicTensor], attributes: Attributes) -> SymbolicTensor:
    data, allowzero = x[0], attributes.get("allowzero", 0)
    target = numbers(x[1])
    if not allowzero:
        target = [data.shape[i] if size == 0 and i < data.rank else size for i, size in enumerate(target)]
    if -1 in target:
        rest = exact_div(product(data.shape), product(size for size in target if size != -1))
        if rest is None:
            raise UnknownValue
        target[target.index(-1)] = rest
    kept = [axis for axis, size in enumerate(data.shape) if size != 1]
    if [data.shape[axis] for axis in kept] == [size for size in target if size != 1]:
        axes = iter(kept)
        return moved(data, [None if size == 1 else next(axes) for size in target])
    require(not is_dynamic(*data.shape, *target) and product(data.shape) == product(target))
    return SymbolicTensor(all_materialised(data).cells.reshape(known(target)), tuple(target), data.dtype)


def _unsqueeze(x: Sequence[SymbolicTensor], attributes: Attributes) -> SymbolicTensor:
    axes = axes_of(x, attributes) or []
    rank = x[0].rank + len(axes)
    new = {axis_of(axis, rank) for axis in axes}
    old = iter(range(x[0].rank))
    return moved(x[0], [None if axis in new else next(old) for axis in range(rank)])


def _squeeze(x: Sequence[SymbolicTensor], attributes: Attributes) -> SymbolicTensor:
    axes = axes_of(x, attributes)
    if axes is None:
        axes = [axis for axis, size in enumerate(x[0].shape) if size == 1]
    dropped = {axis_of(axis, x[0].rank) for axis in axes}
    require(all(x[0].shape[axis] == 1 for axis in dropped))
    return moved(x[0], [axis for axis in range(x[0].rank) if axis not in dropped])


def _expand(x: Sequence[SymbolicTensor], _: Attributes) -> SymbolicTensor:
    shape = broadcast([x[0].shape, tuple(numbers(x[1]))])
    cells = x[0].cells.reshape((1,) * (len(shape) - x[0].rank) + x[0].cells.shape)
    return SymbolicTensor(cells, shape, x[0].dtype)


def _tile(x: Sequence[SymbolicTensor], _: Attributes) -> SymbolicTensor:
    """Compute Tile if all repeated axes have equal elements."""
    pairs = list(zip(x[0].shape, numbers(x[1]), strict=True))
    require(not any(count != 1 and x[0].varies(axis - x[0].rank) for axis, (_, count) in enumerate(pairs)))
    return SymbolicTensor(x[0].cells, tuple(size * count for size, count in pairs), x[0].dtype)


def _concat(x: Sequence[SymbolicTensor], attributes: Attributes) -> SymbolicTensor:
    axis = axis_of(attributes["axis"], x[0].rank)
    others = broadcast([with_size(part.shape, axis, 1) for part in x])
    require(all(others[i] == size for part in x for i, size in enumerate(part.shape) if i != axis))
    parts = [materialised(part, axis) for part in x]
    for i in range(x[0].rank):
        if i != axis and any(part.cells.shape[i] > 1 for part in parts):
            parts = [materialised(part, i) for part in parts]
    cells = np.concatenate([part.cells for part in parts], axis)
    return SymbolicTensor(cells, with_size(others, axis, cells.shape[axis]), x[0].dtype)


def _gather(x: Sequence[SymbolicTensor], attributes: Attributes) -> SymbolicTensor:
    data, indices = x[0], x[1]
    axis = axis_of(attributes.get("axis", 0), data.rank)
    require(not is_dynamic(*indices.cells.flat))
    data = materialised(data, axis)
    places = indices.cells.astype(np.int64)
    count = data.cells.shape[axis]
    require(not places.size or bool(places.min() >= -count and places.max() < count))
    # Axis indices count from the last axis: renumber those of the axes before the gathered one.
    grown = indices.rank - 1
    inner = data.rank - 1 - axis
    cells = replaced(data.cells, {k: axis_index(k + grown) for k in range(inner + 1, data.rank)})
    shape = (*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])
    return SymbolicTensor(np.asarray(np.take(cells, places, axis), cells.dtype), shape, data.dtype)


def _gather_elements(x: Sequence[SymbolicTensor], attributes: Attributes) -> SymbolicTensor:
    """Compute GatherElements for any indices, if the data is constant along the axis."""
    data, indices = x
    axis = axis_of(attributes.get("axis", 0), data.rank)
    for i, count in enumerate(data.cells.shape):
        if count == 1 or (i != axis and data.shape[i] == indices.shape[i]):
            continue
        head = np.take(data.cells, [0], i)
        require(bool((data.cells == head).all()))
        data = SymbolicTensor(head, data.shape, data.dtype)
    name = str(axis_index(data.rank - 1 - axis))
    require(not any(name in cell.names() for cell in data.cells.flat if isinstance(cell, Sym)))
    return SymbolicTensor(data.cells, indices.shape, data.dtype)


def _scatter_elements(x: Sequence[SymbolicTensor], attributes: Attributes) -> SymbolicTensor:
    """Compute ScatterElements for lists of numbers, as torch writes index_copy."""
    data = all_materialised(x[0])
    require(data.rank == 1 and attributes.get("reduction", "none") == "none")
    cells = data.cells.astype(object)
    cells[whole_numbers(x[1])] = numbers(x[2])
    return SymbolicTensor(cells, data.shape, data.dtype)


def _slice(x: Sequence[SymbolicTensor], attributes: Attributes) -> SymbolicTensor:
    data = x[0]
    if len(x) == 1:  # opset 1: attributes
        starts, ends = list(attributes["starts"]), list(attributes["ends"])
        axes = list(attributes.get("axes", range(len(starts))))
    else:
        starts, ends = numbers(x[1]), numbers(x[2])
        axes = whole_numbers(x[3]) if len(x) > 3 else list(range(len(starts)))
    steps = whole_numbers(x[4]) if len(x) > 4 else [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        data = _cut(data, axis_of(axis, data.rank), start, end, step)
    return data


def _cut(x: SymbolicTensor, axis: int, start: Dim, end: Dim, step: int) -> SymbolicTensor:
    size = x.shape[axis]
    if isinstance(size, int) and isinstance(start, int) and isinstance(end, int):
        indices = slice_indices(size, start, end, step)
        first: Dim = indices.start if indices else 0
        count: Dim = len(indices)
    else:
        bounds = slice_ends(size, start, end) if step > 0 else None
        if bounds is None or (step > 1 and x.cells.shape[axis] > 1):
            raise UnknownValue
        first, count = bounds[0], (larger(bounds[1] - bounds[0], 0) + step - 1) // step
    if x.cells.shape[axis] == 1:
        from_last = x.rank - 1 - axis
        cells = replaced(x.cells, {from_last: axis_index(from_last) * step + first if count != 1 else first})
    elif isinstance(first, int) and isinstance(count, int):
        cells = np.take(x.cells, range(first, first + count * step, step), axis)
    else:
        cells = progression(x.cells, axis, first)
    return SymbolicTensor(cells, with_size(x.shape, axis, count), x.dtype)


def progression(cells: Array, axis: int, first: Dim) -> Array:
    """Return one cell for an arithmetic progression along an axis from `first` on, as in ``positions[:n]``."""
    head = np.take(cells.astype(object), [0], axis)
    steps = np.diff(cells.astype(object), axis=axis)
    step = np.take(steps, [0], axis) if steps.size else head * 0
    require(all(isinstance(k, int) for k in step.flat) and bool((steps == step).all()))
    if not step.any():
        return np.take(cells, [0], axis)
    require(cells.dtype != np.bool_)
    index = axis_index(cells.ndim - 1 - axis) + first
    return map_cells(lambda a, k: a + index * k, head, step)


# Ends from here on mean "to the end": tf2onnx writes this one if TensorFlow masks the end, others write larger ones.
ENDLESS = 10**9


def slice_ends(size: Dim, start: Dim, end: Dim, check: Callable[[Dim, int], bool] = at_least) -> tuple[Dim, Dim] | None:
    """Return start and end of a slice of step 1, both from the front; None if a bound's sign is unknown."""
    if isinstance(end, int) and end >= ENDLESS:
        end = size
    bounds: list[Dim] = []
    for bound in (start, end):
        if bound == size or check(bound, 0):
            bounds.append(smaller(bound, size))
        elif check(-bound, 1):
            bounds.append(size - smaller(size, -bound))
        else:
            return None
    return bounds[0], bounds[1]


def _constant_of_shape(x: Sequence[SymbolicTensor], attributes: Attributes) -> SymbolicTensor:
    shape = tuple(numbers(x[0]))
    value = np.asarray(attributes.get("value", np.zeros(1, np.float32)))
    return SymbolicTensor(value.reshape((1,) * len(shape)), shape, value.dtype)


def _range(x: Sequence[SymbolicTensor], _: Attributes) -> SymbolicTensor:
    start, limit, step = (whole(*numbers(part))[0] for part in x)
    if not isinstance(step, int) or step == 0:
        raise UnknownValue
    span, step_size = (limit - start, step) if step > 0 else (start - limit, -step)
    count = larger((span + step_size - 1) // step_size, 0)
    return SymbolicTensor(np.array([axis_index(0) * step + start], dtype=object), (count,), x[0].dtype)


_OPERATORS: Mapping[str, Operator] = {
    "Add": _arithmetic(lambda a, b: a + b),
    "Sub": _arithmetic(_difference),
    "Mul": _arithmetic(_product),
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
    "Identity": lambda x, _: x[0],
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Expand": _expand,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "Range": _range,
    "Reshape": _reshape,
    "ScatterElements": _scatter_elements,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": lambda x, attributes: moved(x[0], attributes.get("perm") or list(reversed(range(x[0].rank)))),
    "Unsqueeze": _unsqueeze,
}


def shape_of(shape: Shape, start: int = 0, end: int | None = None) -> Known:
    """Return the result of ONNX's Shape (with the `start` and `end` of opset 15)."""
    return as_constant(vector(shape[start:end]))


def size_of(shape: Shape) -> Known:
    """Return the result of ONNX's Size."""
    return as_constant(SymbolicTensor(np.array(product(shape), dtype=object), (), INT))


def evaluate(operator: str, inputs: Sequence[Known | None], attributes: Attributes) -> Known | None:
    """Return the result of an operator; None if sizes cannot express it."""
    function = _OPERATORS.get(operator)
    operands = [as_symbolic(x) for x in inputs if x is not None]
    if function is None or None in inputs[: len(operands)]:
        return None
    result = or_none(function, operands, attributes)
    return None if result is None or result.cells.size > MOST_CELLS else as_constant(result)
