"""The index of the largest or smallest number: ArgMax, ArgMin and Hardmax.

ncnn has none of them, but the index of the first 0 in a row of 0 and 1 is the minimum of ``i + n * row[i]``.
As in comparisons, numbers closer to each other than the smallest normal float32 are equal.
"""

from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.onnx import items
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.activation import flattened
from onnx2ncnn_opt.onnx.lower.functional.binary import binary
from onnx2ncnn_opt.onnx.lower.functional.cast import FLT_MIN, as_numbers
from onnx2ncnn_opt.onnx.lower.functional.reduce import arg_max, mark_largest, reduce
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Tensor

onnx_op("ArgMax", integers=True, jumps=True, items=items.reduced(0, "axis"), folds=True)(arg_max)


@onnx_op("ArgMin", integers=True, jumps=True, items=items.reduced(0, "axis"), folds=True)
def arg_min(im: ImportContext, x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    """ArgMax of the negated operand."""
    opposite = im.apply(as_numbers(im, x), UnaryOp.NEG)
    return arg_max(im, opposite, axis=axis, keepdims=keepdims, select_last_index=select_last_index)


@onnx_op("Hardmax", jumps=True, axes="same", items=items.from_axis(1))
def hardmax1(im: ImportContext, x: Tensor, *, axis: int = 1) -> Tensor:
    """1 at the first of the largest numbers of all axes from `axis` on."""
    return flattened(im, x, axis, lambda im, rows, axis: hardmax13(im, rows, axis=axis))


@onnx_op("Hardmax", since=13, jumps=True, axes="same", items=items.along(-1), folds=True)
def hardmax13(im: ImportContext, x: Tensor, *, axis: int = -1) -> Tensor:
    """1 at the first of the largest numbers along an axis."""
    marked = mark_largest(im, x, axis, last=False)
    first = reduce(im, marked, "ReduceMin", (axis,), 1)
    return im.unary(binary(im, BinaryOp.SUB, first, marked), "Threshold", threshold=-FLT_MIN)
