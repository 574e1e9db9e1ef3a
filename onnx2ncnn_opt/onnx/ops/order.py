"""The largest numbers in order: TopK.

ncnn does not sort, but where a number would stand is how many others come before it: all that are larger, and of equal
ones those to the left. For an axis of n elements that is n times n comparisons.
"""

from __future__ import annotations

import numpy as np

from onnx2ncnn_opt.ir.dim import exact_div, product
from onnx2ncnn_opt.onnx.context import ImportContext
from onnx2ncnn_opt.onnx.ops.arg import arg_max
from onnx2ncnn_opt.onnx.ops.cast import as_numbers
from onnx2ncnn_opt.onnx.ops.elementwise import ADD, MUL, SUB, binary
from onnx2ncnn_opt.onnx.ops.gather import gather_elements
from onnx2ncnn_opt.onnx.ops.reduction import reduce
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Ints, Tensor, Value, held_as_float

_MOST_COMPARISONS = 2**24
_NEG = 1
_PLACE = held_as_float(np.dtype(np.uint32))
_INDEX = held_as_float(np.dtype(np.int64))


@onnx_op("TopK")
def top_k1(im: ImportContext, x: Tensor, *, k: int, axis: int = -1) -> tuple[Value, ...]:
    """For one number ReduceMax and ArgMax; else comparisons of all with all."""
    return top_k11(im, x, (k,), axis=axis)


@onnx_op("TopK", since=10)
def top_k10(im: ImportContext, x: Tensor, k: Ints, *, axis: int = -1) -> tuple[Value, ...]:
    """For one number ReduceMax and ArgMax; else comparisons of all with all."""
    return top_k11(im, x, k, axis=axis)


@onnx_op("TopK", since=11, integers=True)
def top_k11(
    im: ImportContext, x: Tensor, k: Ints, *, axis: int = -1, largest: int = 1, sorted: int = 1
) -> tuple[Value, ...]:
    """For one number ReduceMax and ArgMax; else comparisons of all with all."""
    axis, x, count = im.axis(axis, x.rank), as_numbers(im, x), k[0]
    size = x.shape[axis]
    if count < 1 or (isinstance(size, int) and count > size):
        raise im.refuse(f"k is {count}, for an axis of {size} elements")
    order = x if largest else im.unary(x, "UnaryOp", op_type=_NEG)
    if count == 1:
        found = reduce(im, x, "ReduceMax" if largest else "ReduceMin", (axis,), 1)
        return found, arg_max(im, order, axis=axis)
    if not isinstance(size, int):
        raise im.refuse("the axis has a size that is not fixed", "bind it with --shape")
    if not sorted:
        raise im.refuse("sorted is 0: ONNX does not say in which order", "export with sorted=True")
    rows = exact_div(product(x.shape), size)
    if not isinstance(rows, int) or rows * size * size > _MOST_COMPARISONS:
        raise im.refuse(
            f"{rows} rows of {size} numbers: too many to compare all with all",
            "convert what is before it with --outputs, and pick the largest numbers outside ncnn",
        )
    perm = [a for a in range(x.rank) if a != axis] + [axis]
    flat, ordered = (im.reshape(y.viewed(y.view.transpose(perm)), (rows, size)) for y in (x, order))
    assert isinstance(ordered, Tensor)
    places = _of_rank(im, _ranks(im, ordered, size), size, count)
    shape = (*(x.shape[a] for a in perm[:-1]), count)
    results = []
    for y in (gather_elements(im, flat, places, axis=1), places):
        result = im.tensor(im.reshape(y, shape))
        results.append(result.viewed(result.view.transpose([perm.index(a) for a in range(x.rank)])))
    return results[0], Tensor(results[1].blob, results[1].view, _INDEX)


def _ranks(im: ImportContext, x: Tensor, size: int) -> Tensor:
    """How many of its row come before each number."""
    rows, numbers = x.view.axes
    row, column = (x.viewed(x.view.with_axes(axes)) for axes in ((rows, (), numbers), (rows, numbers, ())))
    ahead = im.tensor(binary(im, SUB, row, column))
    # To the right a larger number comes before; to the left all do but the smaller ones.
    side = Constant(np.sign(np.arange(size) - np.arange(size)[:, None]).astype(np.float32))
    counted = im.unary(binary(im, MUL, ahead, side), "Threshold", threshold=0.0)
    moved = reduce(im, im.tensor(binary(im, MUL, counted, side)), "ReduceSum", (2,), 0)
    return im.tensor(binary(im, ADD, moved, Constant(np.arange(size, dtype=np.float32))))


def _of_rank(im: ImportContext, ranks: Tensor, size: int, count: int) -> Tensor:
    """Where the first `count` ranks are in each row."""
    row = ranks.viewed(ranks.view.with_axes((ranks.view.axes[0], (), ranks.view.axes[1])))
    distance = im.tensor(binary(im, SUB, row, Constant(np.arange(count, dtype=np.float32)[:, None])))
    above = (im.unary(distance, "Threshold", threshold=limit).blob for limit in (-0.5, 0.5))
    found = im.like(distance, im.layer("BinaryOp", *above, op_type=SUB))
    index = im.tensor(binary(im, MUL, found, Constant(np.arange(size, dtype=np.float32))))
    places = reduce(im, index, "ReduceSum", (2,), 0)
    return Tensor(places.blob, places.view, _PLACE)
