"""The index of the largest elements along an axis."""

from __future__ import annotations

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.dim import Sym, axis_index
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import binary, number
from onnx2ncnn_opt.onnx.lower.functional.cast import FLT_MAX, as_numbers
from onnx2ncnn_opt.onnx.lower.functional.reduce import reduce
from onnx2ncnn_opt.onnx.value import Constant, SymbolicTensor, Tensor, Value, held_as_float

# Longer than any dynamic axis; the indices in it and this more are whole numbers that float32 holds.
_LONGEST = 2**23


def arg_max(im: ImportContext, x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    """Threshold of the distance to the largest number, and Reduction of the indices if there is none."""
    marked = mark_largest(im, as_numbers(im, x), axis, last=bool(select_last_index))
    found = reduce(im, marked, "ReduceMax" if select_last_index else "ReduceMin", (axis,), keepdims)
    return Tensor(found.blob, found.view, held_as_float(np.dtype(np.int64)))


def mark_largest(im: ImportContext, x: Tensor, axis: int, *, last: bool) -> Tensor:
    """Return ``i`` where the largest number of an axis is and ``i + n`` elsewhere, or ``i - n`` with `last`.

    n is the size of the axis, or more where that is dynamic. NaN counts as the largest, so every row has one: the
    distance to NaN is NaN, and Threshold gives 0 for it.
    """
    axis = im.axis(axis, x.rank)
    size = x.shape[axis]
    finite = im.unary(x, "Clip", min=-FLT_MAX, max=FLT_MAX)  # the difference of two infinities is NaN
    below = binary(im, BinaryOp.SUB, reduce(im, finite, "ReduceMax", (axis,), 1), finite)
    others = im.unary(below, "Threshold", threshold=0.0)
    ones = (1,) * (x.rank - axis - 1)
    if isinstance(size, Sym):
        cells = np.full((1, *ones), axis_index(len(ones)), dtype=object)
        index: Value = im.tensor(SymbolicTensor(cells, (size, *ones), np.dtype(np.float32)))
        span = _LONGEST
    else:
        index, span = Constant(np.arange(size, dtype=np.float32).reshape(-1, *ones)), size
    far = binary(im, BinaryOp.MUL, others, number(-span if last else span))
    return im.tensor(binary(im, BinaryOp.ADD, far, index))
