"""Tables of what many elementwise nodes compute from one integer (a bucket of positions), or by comparing one float.

NumPy computes a table from all values that matter. Large integers give the results at its ends, as intervals prove. A
float that is only compared with constants matters by its place among these.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import onnx_ir

from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.fold import sizes
from onnx2ncnn_opt.onnx.fold.evaluate import CannotFold, evaluate_node
from onnx2ncnn_opt.onnx.read.structure import attributes_of, names_of
from onnx2ncnn_opt.onnx.value import Constant, Item, Operand, SymbolicTensor

Bounds: TypeAlias = tuple[Array, Array]
Items: TypeAlias = Mapping[str, Item | None]

_LARGEST = 2**24  # of integers, which float32 holds exactly
_MOST = 2**12  # from this integer on, the results must be constant
_MOST_LIMITS = 256  # each is compared with each float
_FLT_MIN = np.finfo(np.float32).tiny
_FEWEST_NODES = 5  # of fewer nodes, layers are as good as a table
_COMPARISONS = frozenset({"Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
# Monotonic in each operand. Those of `_KEEP_SIGN` are, while the operand of this number is above 0, or below.
_MONOTONIC = _COMPARISONS | {
    *("Abs", "Add", "And", "Cast", "Ceil", "Clip", "Div", "Exp", "Floor", "Identity", "Log", "Max", "Min", "Mul"),
    *("Neg", "Not", "Or", "Round", "Sign", "Sqrt", "Sub", "Where"),
}
_KEEP_SIGN = {"Abs": 0, "Cast": 0, "Div": 1}
_LOOKUPS = frozenset({"Gather", "GatherND"})
_VIEWS = frozenset({"Expand", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})
_OPERATORS = _MONOTONIC | _LOOKUPS | _VIEWS | {"Equal", "Mod"}


class Formula(NamedTuple):
    """Nodes, in order, that compute a value from the one called `source` and from constants alone."""

    nodes: Sequence[onnx_ir.Node]
    source: str
    items: Items
    opset: int

    def place(self, source: SymbolicTensor) -> SymbolicTensor | None:
        """Return the source with the axes of the result; None if operands differ in axes."""
        places = {self.source: source}
        for node in self.nodes:
            own = [places[name] for name in names_of(node.inputs) if name in places]
            if not own:  # the same number everywhere
                continue
            if any(x.shape != own[0].shape or not np.array_equal(x.cells, own[0].cells) for x in own):
                return None
            place: Item | None = own[0]
            if node.op_type in _VIEWS:
                others = [self.items.get(name) for name in names_of(node.inputs[1:])]
                operands = [own[0], *(x for x in others if isinstance(x, (Constant, SymbolicTensor)))]
                place = sizes.evaluate(node.op_type, operands, attributes_of(node))
            result = self.items.get(_result(node))
            if not isinstance(place, SymbolicTensor) or not isinstance(result, Operand) or place.shape != result.shape:
                return None
            places[_result(node)] = place
        return places.get(_result(self.nodes[-1]))

    def compute(self, low: Array, high: Array, limits: Array | None = None) -> Bounds:
        """Return bounds of the results for bounds of the source; raise CannotFold if there are none.

        With `limits`, also if a node does more with the source than compare it with these.
        """
        bounds = {self.source: (low, high)}
        for node in self.nodes:
            names = names_of(node.inputs[:1] if node.op_type in _VIEWS else node.inputs)
            operands = [bounds.get(name) or self._constant(name) for name in names]
            is_row = [low.ndim == 1 and name not in bounds for name, (low, _) in zip(names, operands, strict=True)]
            _require(is_row == [node.op_type in _LOOKUPS, *[False] * (len(names) - 1)])
            if limits is not None and self.source in names:
                others = [x for x, name in zip(operands, names, strict=True) if name != self.source]
                _require(node.op_type in _COMPARISONS and len(others) == 1 and np.isin(others[0][0], limits).all())
            bounds[_result(node)] = _bounds(node, operands, self.opset)
        return bounds[_result(self.nodes[-1])]

    def _constant(self, name: str) -> Bounds:
        array = _known(self.items[name])
        if array is None:
            raise CannotFold(f"{name} is not constant")
        return array, array


def _result(node: onnx_ir.Node) -> str:
    return node.outputs[0].name or ""


def _require(condition: object) -> None:
    if not condition:
        raise CannotFold("the nodes are no table")


def _known(item: Item | None) -> Array | None:
    """Return a constant, one number as a scalar; also of a symbolic tensor that is the same number everywhere."""
    if isinstance(item, Constant):
        return item.array.reshape(()) if item.array.size == 1 else item.array
    if not isinstance(item, SymbolicTensor) or item.cells.size != 1 or isinstance(item.cells.flat[0], Sym):
        return None
    return item.cells.reshape(()).astype(item.dtype)


def formula_of(value: onnx_ir.Value, items: Items, opset: int) -> Formula | None:
    """Return the formula of a value; None if it has several operands, or few nodes."""
    nodes, sources, pending = dict[onnx_ir.Node, None](), set[str](), [(value, False)]
    while pending and len(sources) < 2:
        x, is_done = pending.pop()
        node, item = x.producer(), items.get(x.name or "")
        if node in nodes or _known(item) is not None:
            continue
        is_known = node is None or (node.op_type != "Cast" and _is_polynomial(item))
        if is_known or node is None or node.op_type not in _OPERATORS or node.domain or "" in names_of(node.inputs):
            sources.add(x.name or "")
        elif is_done:
            nodes[node] = None
        else:
            operands = node.inputs[:1] if node.op_type in _VIEWS else node.inputs
            pending += [(x, True), *((operand, False) for operand in operands if operand is not None)]
    is_many = len(sources) == 1 and len(nodes) >= _FEWEST_NODES
    return Formula([*nodes], sources.pop(), items, opset) if is_many else None


def _is_polynomial(item: Item | None) -> bool:
    """Return True for a symbolic tensor without divisions, minima and maxima of indices."""
    cells = item.cells.flat if isinstance(item, SymbolicTensor) else ()
    factors = {factor for cell in cells if isinstance(cell, Sym) for term in cell.terms for factor in term}
    calls = (Sym({(factor,): 1}) for factor in factors if not isinstance(factor, str))
    return isinstance(item, SymbolicTensor) and not any("#" in name for call in calls for name in call.names())


def fits(indices: Array, size: Dim) -> bool:
    """Return True if all indices are valid in an axis of a size."""
    return isinstance(size, int) and bool(((-size <= indices) & (indices < size)).all())


def _bounds(node: onnx_ir.Node, operands: Sequence[Bounds], opset: int) -> Bounds:
    if node.op_type in _VIEWS:
        return operands[0]
    is_exact = all(low is high or np.array_equal(low, high) for low, high in operands)
    if node.op_type in _LOOKUPS:
        (row, _), (index, _) = operands
        _require(is_exact and fits(index, row.size) and not attributes_of(node).get("batch_dims"))
        return row[index], row[index]
    if is_exact:
        result = evaluate_node(node, [low for low, _ in operands], opset)[0]
        return result, result
    low, high = operands[_KEEP_SIGN.get(node.op_type, 0)]
    _require(node.op_type not in _KEEP_SIGN or ((low > 0) | (high < 0)).all())
    _require(node.op_type in _MONOTONIC)
    # Each operand varies along an axis of its own; the last axis are the intervals.
    count = len(operands)
    axes = [(1,) * i + (2,) + (1,) * (count - 1 - i) + (-1,) for i in range(count)]
    corners = [np.stack(np.broadcast_arrays(*x)).reshape(shape) for x, shape in zip(operands, axes, strict=True)]
    results = evaluate_node(node, corners, opset)[0].reshape(2**count, -1)
    # Smaller types wrap around. Products of two such numbers fit into int64; NaN is no such number.
    _require(results.dtype.name in ("bool", "float32", "float64", "int64") and (np.abs(results) <= 2**31).all())
    return results.min(axis=0), results.max(axis=0)


def integer_table(formula: Formula, dtype: np.dtype[np.generic]) -> tuple[int, Array] | None:
    """Return the results for `first` and the integers after it; others have the results at the ends of the table."""
    ends = np.array([[-_LARGEST, -_MOST], [_MOST, _LARGEST]]).astype(dtype)
    integers = np.arange(-_MOST, _MOST + 1).astype(dtype)
    try:
        low, high = np.concatenate([formula.compute(low[None], high[None]) for low, high in ends], axis=1)
        values, _ = formula.compute(integers, integers)
    except CannotFold:
        return None
    changes = np.flatnonzero(values[1:] != values[:-1])
    is_constant = (low == high).all() and values[0] == low[0] and values[-1] == low[-1]
    if not changes.size or not is_constant or values.dtype.kind not in "iu":
        return None
    return int(changes[0]) - _MOST, values[changes[0] : changes[-1] + 2]


def steps_of(formula: Formula, shape: Shape) -> tuple[Array, Array] | None:
    """Return limits that a float of this shape may exceed, and the results; None if it is not only compared.

    The results are for floats up to each limit, for larger ones, and for NaN.
    """
    moves = any(node.op_type in ("Slice", "Transpose") for node in formula.nodes)
    results = [formula.items.get(_result(node)) for node in formula.nodes]
    if moves or not all(isinstance(x, Operand) and x.shape in (shape, (*shape, 1)) for x in results):
        return None
    names = {name for node in formula.nodes for name in names_of(node.inputs)}
    constants = [x.reshape(-1) for name in names if (x := _known(formula.items.get(name))) is not None]
    limits = np.unique(np.concatenate([np.zeros(0, np.float32), *(x for x in constants if x.dtype == np.float32)]))
    if not 0 < limits.size <= _MOST_LIMITS or not np.isfinite(limits).all():
        return None
    before = np.nextafter(limits, np.float32(-np.inf))
    before[np.abs(before) < _FLT_MIN] = 0  # ncnn has no denormal numbers
    before[limits == 0] = -_FLT_MIN
    nan = np.full(1, np.nan, np.float32)
    points = np.unique([*before, *limits, np.float32(np.inf)])
    try:
        values, _ = formula.compute(points, points, limits)
        (of_nan,), _ = formula.compute(nan, nan, limits)
    except CannotFold:
        return None
    changes = np.flatnonzero(values[1:] != values[:-1])
    if values.dtype.kind not in "iu" or not changes.size or of_nan not in (values[0], values[-1]):
        return None
    return points[changes], np.array([*values[changes], values[-1], of_nan])
