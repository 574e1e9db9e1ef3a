"""Arithmetic on tensors that are known up to open sizes: what exporters make of `x.shape`, `arange` and `zeros`.

Every operator here does to the cells of a `Formula` what it would do to elements, and renames the places in them where
axes move. What depends on more than a size can say (a comparison that sizes do not decide, a fraction of one) has no
result here; the importers then calculate with the tensor itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product as choices
from typing import Any

import numpy as np
import onnx_ir

from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym, at_least, exact_div, fitting, larger, place, product, smaller
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.value import Constant, Formula, is_float

Attributes = Mapping[str, Any]
Known = Constant | Formula

_MOST_CELLS = 1 << 16
_LARGEST = 1 << 26  # elements of a constant that was a formula
_INT, _FLOAT, _BOOL = np.dtype(np.int64), np.dtype(np.float32), np.dtype(np.bool_)


class _Undecided(Exception):
    """The result cannot be said in sizes."""


def shape_of(shape: Shape, start: int = 0, end: int | None = None) -> Known:
    """ONNX Shape (with the `start` and `end` of opset 15)."""
    return _known(_vector(shape[start:end]))


def size_of(shape: Shape) -> Known:
    """ONNX Size."""
    return _known(Formula(np.array(product(shape), dtype=object), (), _INT))


def evaluate(operator: str, inputs: Sequence[Known | None], attributes: Attributes) -> Known | None:
    """The result of an operator; None where it cannot be said in sizes."""
    function = _OPERATORS.get(operator)
    given = [_formula(x) for x in inputs if x is not None]
    if function is None or None in inputs[: len(given)]:
        return None
    try:
        result = function(given, attributes)
        return None if result.cells.size > _MOST_CELLS else _known(result)
    except _Undecided:
        return None


def sizes_of(x: Formula) -> tuple[Dim, ...] | None:
    """The elements of a tensor that is a list of sizes; None where its length is open, or very large."""
    whole: Formula | None = x
    for axis in range(x.rank):
        whole = whole and spelled(whole, axis)
    return tuple(_plain(cell) for cell in whole.cells.reshape(-1)) if whole else None


def _plain(cell: Any) -> Any:
    """Numpy's integers as Python's."""
    return int(cell) if isinstance(cell, np.integer) else cell


def _formula(x: Known) -> Formula:
    return x if isinstance(x, Formula) else Formula(x.array, x.shape, x.dtype)


def _known(x: Formula) -> Known:
    """A constant, where nothing is open about it."""
    if not all(isinstance(size, int) for size in x.shape) or any(isinstance(cell, Sym) for cell in x.cells.flat):
        return x
    if product(x.shape) > _LARGEST:  # type: ignore[operator]
        return x
    return Constant(np.broadcast_to(x.cells.astype(x.dtype), x.shape))  # type: ignore[arg-type]


def _vector(sizes: Sequence[Dim], dtype: np.dtype[np.generic] = _INT) -> Formula:
    cells = np.empty(len(sizes), dtype=object)
    cells[:] = sizes
    return Formula(cells, (len(sizes),), dtype)


# ---- axes


def _replaced(cells: Array, values: Mapping[int, Dim]) -> Array:
    """The cells with places replaced, given by axes counted from the last one."""
    names = {str(place(axis)): value for axis, value in values.items()}
    if cells.dtype != object:
        return cells
    return _each(lambda cell: cell.subs(names) if isinstance(cell, Sym) else cell, cells)


def _each(function: Callable[..., Any], *cells: Array) -> Array:
    """A function of elements, on arrays that broadcast."""
    if np.broadcast(*cells).size > _MOST_CELLS:
        raise _Undecided
    result = np.frompyfunc(function, len(cells), 1)(*(x.astype(object) for x in cells))
    return np.asarray(result, dtype=object)


def _moved(x: Formula, axes: Sequence[int | None]) -> Formula:
    """A tensor whose axis i is axis ``axes[i]`` of x, or a new one of size 1; axes that are left out have size 1."""
    last, rank = len(axes) - 1, x.rank
    values = {rank - 1 - old: place(last - new) for new, old in enumerate(axes) if old is not None}
    gone = {rank - 1 - old: 0 for old in range(rank) if old not in axes}
    cells = _replaced(x.cells, {**values, **gone})
    kept = [old for old in axes if old is not None]
    cells = cells.transpose([*kept, *(old for old in range(rank) if old not in axes)])
    cells = cells.reshape([1 if old is None else x.cells.shape[old] for old in axes])
    return Formula(cells, tuple(1 if old is None else x.shape[old] for old in axes), x.dtype)


def _spelled(x: Formula, axis: int) -> Formula:
    """The formula with a cell for every element along an axis."""
    size = x.shape[axis]
    if not isinstance(size, int) or size > _MOST_CELLS:
        raise _Undecided
    if x.cells.shape[axis] == size:
        return x
    where = x.rank - 1 - axis
    parts = [_replaced(x.cells, {where: i}) for i in range(size)]
    return Formula(np.concatenate(parts, axis), x.shape, x.dtype)


def spelled(x: Formula, axis: int) -> Formula | None:
    """The formula with a cell for every element along an axis; None for an axis that is open, or very long."""
    try:
        return _spelled(x, axis)
    except _Undecided:
        return None


def _axis(axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise _Undecided
    return axis % rank


def _axes(x: Sequence[Formula], attributes: Attributes) -> list[int] | None:
    """The operand `axes` of newer opsets, or the attribute of older ones."""
    if len(x) > 1:
        return _whole(x[1])
    given = attributes.get("axes")
    return None if given is None else list(given)


def _numbers(x: Formula) -> list[Dim]:
    found = sizes_of(x)
    if found is None:
        raise _Undecided
    return list(found)


def _whole(x: Formula) -> list[int]:
    numbers = _numbers(x)
    if not all(isinstance(n, int) for n in numbers):
        raise _Undecided
    return numbers  # type: ignore[return-value]


def _broadcast(shapes: Sequence[Shape]) -> Shape:
    rank = max(map(len, shapes))
    result: list[Dim] = []
    for column in zip(*((1,) * (rank - len(shape)) + tuple(shape) for shape in shapes), strict=True):
        size: Dim = 1
        for other in column:
            common = other if size == 1 else size if other == 1 else fitting(size, other)
            if common is None:
                raise _Undecided
            size = common
        result.append(size)
    return tuple(result)


# ---- element by element


def _elementwise(function: Callable[..., Any], dtype: np.dtype[np.generic] | None = None, source: int = 0) -> Any:
    """An operator that broadcasts; its result is of the type of operand `source`, if no other is said."""

    def operator(x: Sequence[Formula], _: Attributes) -> Formula:
        shape = _broadcast([operand.shape for operand in x])
        kind = x[source].dtype
        cells = _each(lambda *elements: function(kind, shape, *map(_plain, elements)), *(o.cells for o in x))
        cells = cells.reshape((1,) * (len(shape) - cells.ndim) + cells.shape)
        return Formula(cells, shape, dtype or kind)

    return operator


def _surely(size: Dim, bound: int, shape: Shape) -> bool:
    """`at_least`, where places also are less than the size of their axis."""
    if at_least(size, bound):
        return True
    if not isinstance(size, Sym):
        return False
    # A place counted from the other end is a place as well.
    turned = {name: shape[-1 - int(name[1:])] - 1 - place(int(name[1:])) for name in size.names() if name[0] == "#"}
    for some in choices(*((None, name) for name in turned)):
        values = {name: turned[name] for name in some if name is not None}
        if values and at_least(size.subs(values), bound):
            return True
    return False


def _less(shape: Shape, a: Any, b: Any) -> bool:
    if not isinstance(a, Sym) and not isinstance(b, Sym):
        return bool(a < b)
    _sizes(a, b)
    if _surely(b - a, 1, shape):
        return True
    if _surely(a - b, 0, shape):
        return False
    raise _Undecided


def _equal(shape: Shape, a: Any, b: Any) -> bool:
    if a == b:
        return True
    if not isinstance(a, Sym) and not isinstance(b, Sym):
        return False
    _sizes(a, b)
    if _surely(a - b, 1, shape) or _surely(b - a, 1, shape):
        return False
    raise _Undecided


def _sizes(*cells: Any) -> None:
    """Whole numbers only: what a size and a fraction make is no size."""
    if not all(isinstance(cell, (int, Sym)) or float(cell).is_integer() for cell in cells):
        raise _Undecided


def _arithmetic(function: Callable[[Any, Any], Any]) -> Any:
    def calculate(kind: np.dtype[np.generic], shape: Shape, a: Any, b: Any) -> Any:
        if isinstance(a, Sym) or isinstance(b, Sym):
            _sizes(a, b)
            a, b = (cell if isinstance(cell, Sym) else int(cell) for cell in (a, b))
        return function(a, b)

    return _elementwise(calculate)


def _divided(kind: np.dtype[np.generic], shape: Shape, a: Any, b: Any) -> Any:
    if not isinstance(a, Sym) and not isinstance(b, Sym):
        if b == 0:
            raise _Undecided
        if is_float(kind):
            return a / b
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    _sizes(a, b)
    a, b = (cell if isinstance(cell, Sym) else int(cell) for cell in (a, b))
    even = exact_div(a, b) if b != 0 else None
    if even is not None:
        return even
    if is_float(kind) or isinstance(a, int) or not _surely(b, 1, shape):
        raise _Undecided
    # ONNX rounds towards 0.
    if _surely(a, 0, shape):
        return a // b
    if _surely(-a, 0, shape):
        return -(-a // b)
    raise _Undecided


def _remainder(kind: np.dtype[np.generic], shape: Shape, a: Any, b: Any) -> Any:
    """Mod, whose sign is the divisor's; the operands' where `fmod` is set, which is the same for what is positive."""
    if not isinstance(a, Sym) and not isinstance(b, Sym):
        raise _Undecided
    _sizes(a, b)
    if not (_surely(b, 1, shape) and _surely(a, 0, shape)):
        raise _Undecided
    if _surely(b - a, 1, shape):
        return a
    if not isinstance(a, Sym):
        raise _Undecided
    return a - (exact_div(a, b) or a // b) * b


def _extreme(function: Callable[[Dim, Dim], Dim]) -> Any:
    def calculate(kind: np.dtype[np.generic], shape: Shape, *cells: Any) -> Any:
        result = cells[0]
        for cell in cells[1:]:
            if isinstance(result, Sym) or isinstance(cell, Sym):
                _sizes(result, cell)
                result = function(result, cell if isinstance(cell, Sym) else int(cell))
            else:
                result = function(result, cell)
        return result

    return _elementwise(calculate)


def _clip(x: Sequence[Formula], attributes: Attributes) -> Formula:
    for bound, function in zip(x[1:], (larger, smaller), strict=False):
        x = [_extreme(function)([x[0], bound], attributes)]
    return x[0]


def _cast(x: Sequence[Formula], attributes: Attributes) -> Formula:
    target = np.dtype(onnx_ir.DataType(attributes["to"]).numpy())
    if target == _BOOL:
        shape = x[0].shape
        return Formula(_each(lambda cell: not _equal(shape, _plain(cell), 0), x[0].cells), shape, _BOOL)
    if target not in (np.int64, np.int32, np.float32, np.float64):
        raise _Undecided
    if any(isinstance(cell, Sym) for cell in x[0].cells.flat):
        return Formula(x[0].cells, x[0].shape, target)
    return Formula(x[0].cells.astype(x[0].dtype).astype(target), x[0].shape, target)


def _rounded(x: Sequence[Formula], _: Attributes) -> Formula:
    """Floor, Ceil and Round of what is whole already."""
    _each(lambda cell: _sizes(_plain(cell)), x[0].cells)
    return x[0]


# ---- shapes


def _reshape(x: Sequence[Formula], attributes: Attributes) -> Formula:
    data, allowzero = x[0], attributes.get("allowzero", 0)
    wanted = _numbers(x[1])
    if not allowzero:
        wanted = [data.shape[i] if size == 0 and i < data.rank else size for i, size in enumerate(wanted)]
    if -1 in wanted:
        rest = exact_div(product(data.shape), product(size for size in wanted if size != -1))
        if rest is None:
            raise _Undecided
        wanted[wanted.index(-1)] = rest
    return reshaped(data, tuple(wanted))


def reshaped(x: Formula, shape: Shape) -> Formula:
    """The formula under another shape."""
    kept = [axis for axis, size in enumerate(x.shape) if size != 1]
    if [x.shape[axis] for axis in kept] == [size for size in shape if size != 1]:
        axes = iter(kept)
        return _moved(x, [None if size == 1 else next(axes) for size in shape])
    if not all(isinstance(size, int) for size in (*x.shape, *shape)) or product(x.shape) != product(shape):
        raise _Undecided
    for axis in range(x.rank):
        x = _spelled(x, axis)
    return Formula(x.cells.reshape(shape), shape, x.dtype)  # type: ignore[arg-type]


def _unsqueeze(x: Sequence[Formula], attributes: Attributes) -> Formula:
    axes = _axes(x, attributes) or []
    rank = x[0].rank + len(axes)
    new = {_axis(axis, rank) for axis in axes}
    old = iter(range(x[0].rank))
    return _moved(x[0], [None if axis in new else next(old) for axis in range(rank)])


def _squeeze(x: Sequence[Formula], attributes: Attributes) -> Formula:
    axes = _axes(x, attributes)
    given = {_axis(axis, x[0].rank) for axis in axes} if axes is not None else None
    gone = given if given is not None else {axis for axis, size in enumerate(x[0].shape) if size == 1}
    if any(x[0].shape[axis] != 1 for axis in gone):
        raise _Undecided
    return _moved(x[0], [axis for axis in range(x[0].rank) if axis not in gone])


def _transpose(x: Sequence[Formula], attributes: Attributes) -> Formula:
    return _moved(x[0], attributes.get("perm") or list(reversed(range(x[0].rank))))


def _expand(x: Sequence[Formula], _: Attributes) -> Formula:
    shape = _broadcast([x[0].shape, tuple(_numbers(x[1]))])
    cells = x[0].cells.reshape((1,) * (len(shape) - x[0].rank) + x[0].cells.shape)
    return Formula(cells, shape, x[0].dtype)


def _concat(x: Sequence[Formula], attributes: Attributes) -> Formula:
    axis = _axis(attributes["axis"], x[0].rank)
    others = _broadcast([tuple(1 if i == axis else size for i, size in enumerate(part.shape)) for part in x])
    if any(others[i] != size for part in x for i, size in enumerate(part.shape) if i != axis):
        raise _Undecided
    parts = [_spelled(part, axis).cells for part in x]
    cells = [max(part.shape[i] for part in parts) for i in range(x[0].rank)]
    for i, count in enumerate(cells):
        if i != axis and count > 1:
            parts = [_spelled(Formula(p, _with(others, axis, p.shape[axis]), x[0].dtype), i).cells for p in parts]
    return Formula(np.concatenate(parts, axis), _with(others, axis, sum(p.shape[axis] for p in parts)), x[0].dtype)


def _with(shape: Shape, axis: int, size: Dim) -> Shape:
    return (*shape[:axis], size, *shape[axis + 1 :])


def _gather(x: Sequence[Formula], attributes: Attributes) -> Formula:
    data, indices = x[0], x[1]
    axis = _axis(attributes.get("axis", 0), data.rank)
    if any(isinstance(cell, Sym) for cell in indices.cells.flat):
        raise _Undecided
    data = _spelled(data, axis)
    places = indices.cells.astype(np.int64)
    count = data.cells.shape[axis]
    if places.size and (places.min() < -count or places.max() >= count):
        raise _Undecided
    # The axes before the gathered one count anew from the last.
    grown = indices.rank - 1
    behind = data.rank - 1 - axis
    cells = _replaced(data.cells, {k: place(k + grown) for k in range(behind + 1, data.rank)})
    shape = (*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])
    return Formula(np.asarray(np.take(cells, places, axis), cells.dtype), shape, data.dtype)


def _gather_elements(x: Sequence[Formula], attributes: Attributes) -> Formula:
    """Of a table that is the same all along the axis, whatever the indices are."""
    data, indices = x
    axis = _axis(attributes.get("axis", 0), data.rank)
    for i, count in enumerate(data.cells.shape):
        if count == 1 or (i != axis and data.shape[i] == indices.shape[i]):
            continue
        head = np.take(data.cells, [0], i)
        if not (data.cells == head).all():
            raise _Undecided
        data = Formula(head, data.shape, data.dtype)
    name = str(place(data.rank - 1 - axis))
    if any(name in cell.names() for cell in data.cells.flat if isinstance(cell, Sym)):
        raise _Undecided
    return Formula(data.cells, indices.shape, data.dtype)


def _slice(x: Sequence[Formula], attributes: Attributes) -> Formula:
    data = x[0]
    if len(x) == 1:  # opset 1: attributes
        starts, ends = list(attributes["starts"]), list(attributes["ends"])
        axes = list(attributes.get("axes", range(len(starts))))
        steps = [1] * len(starts)
    else:
        starts, ends = _numbers(x[1]), _numbers(x[2])
        axes = _whole(x[3]) if len(x) > 3 else list(range(len(starts)))
        steps = _whole(x[4]) if len(x) > 4 else [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        data = _cut(data, _axis(axis, data.rank), start, end, step)
    return data


def _cut(x: Formula, axis: int, start: Dim, end: Dim, step: int) -> Formula:
    size = x.shape[axis]
    if isinstance(size, int) and isinstance(start, int) and isinstance(end, int):
        found = range(size)[start:end:step]
        first: Dim = found.start if found else 0
        count: Dim = len(found)
    else:
        bounds = cut(size, start, end) if step == 1 else None
        if bounds is None:
            raise _Undecided
        first, count = bounds[0], bounds[1] - bounds[0]
    if x.cells.shape[axis] == 1:
        where = x.rank - 1 - axis
        cells = _replaced(x.cells, {where: place(where) * step + first if count != 1 else first})
    elif isinstance(first, int) and isinstance(count, int):
        cells = np.take(x.cells, range(first, first + count * step, step), axis)
    else:
        cells = _progression(x.cells, axis, first)
    return Formula(cells, _with(x.shape, axis, count), x.dtype)


def _progression(cells: Array, axis: int, first: Dim) -> Array:
    """The one cell that numbers of equal distance along an axis make, from `first` on: for ``positions[:n]``."""
    if cells.dtype == object or cells.dtype.kind not in "iub":
        raise _Undecided
    head = np.take(cells, [0], axis)
    steps = np.diff(cells.astype(np.int64), axis=axis)
    if steps.size and (steps != np.take(steps, [0], axis)).any():
        raise _Undecided
    step = np.take(steps, [0], axis) if steps.size else head * 0
    if cells.dtype == np.bool_ and step.any():
        raise _Undecided
    if not step.any():
        return head
    where = place(cells.ndim - 1 - axis) + first
    return _each(lambda a, k: int(a) + where * int(k), head, step)


def cut(size: Dim, start: Dim, end: Dim) -> tuple[Dim, Dim] | None:
    """First and behind the last element that a slice of step 1 takes; None where sizes do not tell a sign."""
    if isinstance(end, int) and end >= 2**31 - 1:
        end = size
    bounds: list[Dim] = []
    for bound in (start, end):
        if at_least(bound, 0):
            bounds.append(smaller(bound, size))
        elif at_least(-bound, 1):
            bounds.append(larger(size + bound, 0))
        else:
            return None
    return bounds[0], bounds[1]


def _constant_of_shape(x: Sequence[Formula], attributes: Attributes) -> Formula:
    shape = tuple(_numbers(x[0]))
    value = np.asarray(attributes.get("value", np.zeros(1, np.float32)))
    return Formula(value.reshape((1,) * len(shape)), shape, value.dtype)


def _range(x: Sequence[Formula], _: Attributes) -> Formula:
    start, limit, step = (_numbers(part)[0] if part.dtype.kind != "f" else _number(part) for part in x)
    if not isinstance(step, int) or step == 0:
        raise _Undecided
    far, step_size = (limit - start, step) if step > 0 else (start - limit, -step)
    count = larger((far + step_size - 1) // step_size, 0)
    return Formula(np.array([place(0) * step + start], dtype=object), (count,), x[0].dtype)


def _number(x: Formula) -> Dim:
    """A number of type float that is whole."""
    cell = x.cells.reshape(-1)[0]
    _sizes(cell)
    return cell if isinstance(cell, Sym) else int(cell)


def _reduction(function: Callable[[Dim, Dim], Dim]) -> Any:
    def operator(x: Sequence[Formula], attributes: Attributes) -> Formula:
        data, axes = x[0], _axes(x, attributes)
        along = range(data.rank) if axes is None else [_axis(axis, data.rank) for axis in axes]
        for axis in along:
            data = _spelled(data, axis)
            parts = [np.take(data.cells, [i], axis) for i in range(data.cells.shape[axis])]
            cells = parts[0]
            for part in parts[1:]:
                cells = _each(lambda a, b: function(_plain(a), _plain(b)), cells, part)
            data = Formula(cells, _with(data.shape, axis, 1), data.dtype)
        if attributes.get("keepdims", 1):
            return data
        return _moved(data, [axis for axis in range(data.rank) if axis not in along])

    return operator


def _not_less(function: Any) -> Any:
    return _elementwise(lambda kind, shape, a, b: not function(shape, a, b), _BOOL)


_OPERATORS: Mapping[str, Callable[[Sequence[Formula], Attributes], Formula]] = {
    "Add": _arithmetic(lambda a, b: a + b),
    "Sub": _arithmetic(lambda a, b: a - b),
    "Mul": _arithmetic(lambda a, b: a * b),
    "Neg": _elementwise(lambda kind, shape, a: -a),
    "Div": _elementwise(_divided),
    "Mod": _elementwise(_remainder),
    "Max": _extreme(larger),
    "Min": _extreme(smaller),
    "Equal": _elementwise(lambda kind, shape, a, b: _equal(shape, a, b), _BOOL),
    "Less": _elementwise(lambda kind, shape, a, b: _less(shape, a, b), _BOOL),
    "Greater": _elementwise(lambda kind, shape, a, b: _less(shape, b, a), _BOOL),
    "LessOrEqual": _not_less(lambda shape, a, b: _less(shape, b, a)),
    "GreaterOrEqual": _not_less(_less),
    "And": _elementwise(lambda kind, shape, a, b: bool(a and b), _BOOL),
    "Or": _elementwise(lambda kind, shape, a, b: bool(a or b), _BOOL),
    "Not": _elementwise(lambda kind, shape, a: not a, _BOOL),
    "Where": _elementwise(lambda kind, shape, condition, a, b: a if condition else b, source=1),
    "Identity": lambda x, _: x[0],
    "Floor": _rounded,
    "Ceil": _rounded,
    "Round": _rounded,
    "Cast": _cast,
    "Clip": _clip,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Expand": _expand,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "Range": _range,
    "ReduceMax": _reduction(larger),
    "ReduceMin": _reduction(smaller),
    "ReduceProd": _reduction(lambda a, b: a * b),
    "ReduceSum": _reduction(lambda a, b: a + b),
    "Reshape": _reshape,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
