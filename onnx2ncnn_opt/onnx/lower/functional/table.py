"""Lookups by an index that is a table of one integer."""

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.onnx.fold.tables import Items, fits, formula_of, integer_table
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.gather import as_indices, gather
from onnx2ncnn_opt.onnx.value import Constant, Operand, SymbolicTensor, held_as_float

LOOKUPS = frozenset({"Gather", "GatherElements"})


def tabulated(im: ImportContext, data: Operand, items: Items, axis: int) -> list[Operand] | None:
    """Return data and indices of a lookup, with a table in place of the nodes before it; None for other indices."""
    value = im.node.inputs[1]
    formula = formula_of(value, items, im.opset) if value is not None else None
    source = items.get(formula.source) if formula is not None else None
    if formula is None or not isinstance(source, SymbolicTensor):
        return None
    place, table = formula.place(source), integer_table(formula, source.dtype)
    if place is None or table is None:
        return None
    first, values = table
    clipped = im.unary(im.tensor(place), "Clip", min=float(first), max=float(first + values.size - 1))
    index = as_indices(im, im.apply(clipped, BinaryOp.ADD, float(-first)))
    if isinstance(data, Constant) and im.node.op_type == "Gather" and fits(values, data.array.shape[axis]):
        return [Constant(data.array.take(values, axis)), index]
    return [data, im.tensor(gather(im, Constant(values), index)).of_type(held_as_float(np.dtype(np.int64)))]
