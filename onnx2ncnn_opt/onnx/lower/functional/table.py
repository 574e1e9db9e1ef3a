"""Lookups by an index that is a function of one integer, or that counts the constants below one float."""

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.dim import known, product
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.fold.tables import Items, fits, formula_of, integer_table, steps_of
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import binary
from onnx2ncnn_opt.onnx.lower.functional.cast import FLT_MIN
from onnx2ncnn_opt.onnx.lower.functional.gather import (
    image,
    kept,
    offsets,
    pixel_centres,
    pixels,
    replaced,
    row_grid,
    type_of,
)
from onnx2ncnn_opt.onnx.lower.functional.logic import threshold
from onnx2ncnn_opt.onnx.lower.functional.matmul import linear
from onnx2ncnn_opt.onnx.lower.functional.symbolic_tensor import computed
from onnx2ncnn_opt.onnx.lower.functional.views import unsqueeze
from onnx2ncnn_opt.onnx.value import Constant, Operand, SymbolicTensor, Tensor, Value, held_as_float, is_float

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
        if steps is None or not fits(steps[1], len(rows)) or not _are_alike(rows[steps[1]]):
            return None
        return _sum_of_steps(im, source, steps[0], rows[steps[1]].astype(np.float64)), None
    place = formula.place(source) if formula is not None and isinstance(source, SymbolicTensor) else None
    table = integer_table(formula, source.dtype) if formula and place and isinstance(source, SymbolicTensor) else None
    if place is None or table is None:
        return None
    first, values = table
    if rows is not None and fits(values, rows.shape[axis]):
        return _rows(im, rows.take(values, axis), axis, place, first), None
    picks_elements = im.node.op_type == "GatherElements" and fits(values, data.shape[axis])
    if picks_elements and not isinstance(data, SymbolicTensor):
        return _elements(im, data, axis, place, first, values), None
    return data, _rows(im, values, 0, place, first).of_type(held_as_float(np.dtype(np.int64)))


def _rows(im: ImportContext, table: Array, axis: int, place: SymbolicTensor, first: int) -> Tensor:
    """Gather from a table the entries of `first` and the integers after it; other integers get the nearest entry."""
    others, size = [a for a in range(table.ndim) if a != axis], table.shape[axis]
    pairs = SymbolicTensor(place.cells[np.newaxis], (2, *place.shape), place.dtype)
    axes = range(1, pairs.rank)
    x = im.mat(computed(im, pairs, copies=2), [[0], axes[:-1], axes[-1:]])
    grid = row_grid(im, x, 2 / size, (1 - 2 * first) / size - 1)
    data = Constant(table)
    return replaced(im, pixels(im, image(im, data, others, [], [axis]), grid), data, axis, place.shape)


def _elements(im: ImportContext, data: Value, axis: int, place: SymbolicTensor, first: int, values: Array) -> Tensor:
    """Gather the elements at `values` for `first` and the integers after it, as `_rows` does."""
    data, others = kept(im, data, place.shape, axis)
    own = [a for a in others if place.varies(a - place.rank)]
    shared = [a for a in others if a not in own]
    shape = tuple(1 if a in shared else size for a, size in enumerate(place.shape))
    centres = pixel_centres(*known([data.shape[axis]]))[values]
    table = np.stack([centres, np.zeros(len(values))])
    x = _rows(im, table, 1, SymbolicTensor(place.cells, shape, place.dtype), first)
    grid = im.mat(x, [[0], [a + 1 for a in own], [axis + 1]])
    if own:
        rows = product(tuple(place.shape[a] for a in own))
        grid = im.layer("BinaryOp", grid, offsets(im, 0.0, rows), op_type=BinaryOp.ADD)
    dims = [shared, own, [axis]]
    return im.wrap(pixels(im, image(im, data, *dims), grid), place.shape, dims, dtype=type_of(data))


def _are_alike(rows: Array) -> bool:
    largest = np.abs(rows.astype(np.float64)).max(axis=1)
    return bool(np.isfinite(largest).all() and (largest >= largest.max() * _LEAST_ROW).all())


def _sum_of_steps(im: ImportContext, x: Tensor, limits: Array, rows: Array) -> Tensor:
    """Return the row of each step: that of the end to which NaN belongs, plus the differences of the steps passed."""
    *values, of_nan = rows
    passed, column = Constant(limits), unsqueeze(im, x, (x.rank,))
    from_below = np.array_equal(values[0], of_nan)
    distance = binary(im, BinaryOp.SUB, *((column, passed) if from_below else (passed, column)))
    is_passed = threshold(im, distance, 0.0 if from_below else -FLT_MIN)
    changes = np.diff(values, axis=0).T
    return linear(im, is_passed, im.f32(changes if from_below else -changes), im.f32(of_nan))
