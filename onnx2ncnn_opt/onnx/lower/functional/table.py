"""Lookups by an index that is a table of one integer, or that counts the constants below one float."""

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.fold.tables import Items, fits, formula_of, integer_table, steps_of
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import binary
from onnx2ncnn_opt.onnx.lower.functional.cast import FLT_MIN
from onnx2ncnn_opt.onnx.lower.functional.gather import as_indices, gather
from onnx2ncnn_opt.onnx.lower.functional.logic import below, threshold
from onnx2ncnn_opt.onnx.lower.functional.matmul import linear
from onnx2ncnn_opt.onnx.lower.functional.views import unsqueeze
from onnx2ncnn_opt.onnx.value import Constant, Operand, SymbolicTensor, Tensor, held_as_float, is_float

LOOKUPS = frozenset({"Gather", "GatherElements"})
_LEAST_ROW = 2.0**-10  # of the largest: sums of differences lose the digits of smaller rows


def tabulated(im: ImportContext, data: Operand, items: Items, axis: int) -> tuple[Operand, Tensor | None] | None:
    """Return data and indices of a lookup, with a table in place of the nodes before it; None for other indices.

    Without indices, the data is the result.
    """
    value = im.node.inputs[1]
    formula = formula_of(value, items, im.opset) if value is not None else None
    source = items.get(formula.source) if formula is not None else None
    rows = data.array if isinstance(data, Constant) and im.node.op_type == "Gather" else None
    if formula is not None and isinstance(source, Tensor) and rows is not None and rows.ndim == 2 and axis == 0:
        steps = steps_of(formula, source.shape) if is_float(source.dtype) and is_float(rows.dtype) else None
        if steps is None or not fits(steps[2], len(rows)) or not _are_alike(rows[steps[2]]):
            return None
        return _sum_of_steps(im, source, steps[0], steps[1], rows[steps[2]].astype(np.float64)), None
    place = formula.place(source) if formula is not None and isinstance(source, SymbolicTensor) else None
    table = integer_table(formula, source.dtype) if formula and place and isinstance(source, SymbolicTensor) else None
    if place is None or table is None:
        return None
    first, values = table
    clipped = im.unary(im.tensor(place), "Clip", min=float(first), max=float(first + values.size - 1))
    index = as_indices(im, im.apply(clipped, BinaryOp.ADD, float(-first)))
    if rows is not None and fits(values, rows.shape[axis]):
        return Constant(rows.take(values, axis)), index
    return data, im.tensor(gather(im, Constant(values), index)).of_type(held_as_float(np.dtype(np.int64)))


def _are_alike(rows: Array) -> bool:
    largest = np.abs(rows.astype(np.float64)).max(axis=1)
    return bool(np.isfinite(largest).all() and (largest >= largest.max() * _LEAST_ROW).all())


def _sum_of_steps(im: ImportContext, x: Tensor, limits: Array, belongs_below: Array, rows: Array) -> Tensor:
    """Return the row of each step: that of the end to which NaN belongs, plus the differences of the steps passed."""
    *values, of_nan = rows
    pairs = zip(limits.tolist(), belongs_below, strict=True)
    passed = Constant(np.array([limit if is_below else below(limit) for limit, is_below in pairs], np.float32))
    from_below, column = np.array_equal(values[0], of_nan), unsqueeze(im, x, (x.rank,))
    distance = binary(im, BinaryOp.SUB, *((column, passed) if from_below else (passed, column)))
    is_passed = threshold(im, distance, 0.0 if from_below else -FLT_MIN)
    changes = np.diff(values, axis=0).T
    return linear(im, is_passed, im.f32(changes if from_below else -changes), im.f32(of_nan))
