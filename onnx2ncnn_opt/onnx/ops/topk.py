"""ArgMax, ArgMin, Hardmax, and TopK: the largest or smallest elements, in order.

ncnn has none of them. The index of the first 0 in a row of 0 and 1 is the minimum of ``i + n * row[i]``. As in
comparisons, numbers closer to each other than the smallest normal float32 are equal.

DetectionOutput sorts one row, equal numbers in any order. Elsewhere, for a small k, layers find the numbers in rounds:
each round picks the first of the largest numbers and removes it. For a larger k, they compute each element's rank: the
number of larger elements, and of equal elements to its left. For an axis of n elements that is n * n comparisons.

The rank of NaN is undefined, as in ONNX Runtime: it may be among the largest or the smallest numbers. In a row with
NaN an index may occur twice, but every index is valid.
"""

import math
from collections.abc import Sequence

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.ir.detections import LOWEST, SORT
from onnx2ncnn_opt.ir.dim import exact_div, product
from onnx2ncnn_opt.ir.graph import Blob
from onnx2ncnn_opt.ir.half import HALF_WEIGHTS
from onnx2ncnn_opt.ir.permute import inverted
from onnx2ncnn_opt.ir.reached import reached
from onnx2ncnn_opt.ir.spec import Trait
from onnx2ncnn_opt.onnx import items
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.activation import flattened
from onnx2ncnn_opt.onnx.lower.functional.binary import binary, number
from onnx2ncnn_opt.onnx.lower.functional.cast import FLT_MAX, FLT_MIN, as_numbers
from onnx2ncnn_opt.onnx.lower.functional.concat import concat
from onnx2ncnn_opt.onnx.lower.functional.crop import crop
from onnx2ncnn_opt.onnx.lower.functional.gather import as_indices, gather_elements
from onnx2ncnn_opt.onnx.lower.functional.logic import between
from onnx2ncnn_opt.onnx.lower.functional.reduce import arg_max, mark_largest, reduce
from onnx2ncnn_opt.onnx.lower.functional.views import unsqueeze
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Ints, Tensor, Value, held_as_float

_MOST_COMPARISONS = 2**24
_MOST_ROUNDS = 128  # nine layers each
_LARGEST_INDEX = 2**20
_SCALE = 4  # dividing by it makes room for infinite and removed numbers
_SUMS = HALF_WEIGHTS | {"MatMul"}
_SMOOTH = frozenset({"GridSample", "Reduction", "Sigmoid", "Softmax"})
_SMOOTH_CODES = BinaryOp.MUL, BinaryOp.DIV, UnaryOp.EXP, UnaryOp.LOG, UnaryOp.SQRT, UnaryOp.TANH
_SIZED = frozenset({"Crop", "GridSample", "Reshape"})  # their further inputs choose elements
_INDEX = held_as_float(np.dtype(np.int64))

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


@onnx_op("TopK", jumps=True, items=items.along(-1), folds=True)
def top_k1(im: ImportContext, x: Tensor, *, k: int, axis: int = -1) -> tuple[Value, ...]:
    """ReduceMax and ArgMax for k = 1; DetectionOutput for one row of sums, as scores are; else rounds, or all pairs."""
    return top_k10(im, x, (k,), axis=axis)


@onnx_op("TopK", since=10, later=("largest", "sorted"), jumps=True, items=items.along(-1), folds=True)
@onnx_op("TopK", since=11, integers=True, jumps=True, items=items.along(-1), folds=True)
def top_k10(
    im: ImportContext, x: Tensor, k: Ints, *, axis: int = -1, largest: int = 1, sorted: int = 1
) -> tuple[Value, ...]:
    """ReduceMax and ArgMax for k = 1; DetectionOutput for one row of sums, as scores are; else rounds, or all pairs."""
    axis, x, count = im.axis(axis, x.rank), as_numbers(im, x), k[0]
    size = x.shape[axis]
    if isinstance(size, int) and count > size:
        raise im.invalid(f"k is {count}, for an axis of {size} elements")
    if count < 1:
        raise im.refuse(f"k is {count}", "ask for 1 up to as many as there are")
    if count == 1:
        order = x if largest else im.apply(x, UnaryOp.NEG)
        return reduce(im, x, "ReduceMax" if largest else "ReduceMin", (axis,), 1), arg_max(im, order, axis=axis)
    (size,) = im.fixed((size,), "the axis is dynamic")
    if not sorted:
        raise im.refuse("sorted is 0: ONNX leaves the order undefined", "export it with sorted=True")
    rows = exact_div(product(x.shape), size)
    is_small = rows == 1 and size <= _LARGEST_INDEX and count**2 <= _MOST_COMPARISONS
    if is_small and im.range_of(x).within(LOWEST, -LOWEST) and _are_ties_chance(x.blob):
        return _as_boxes(im, x, axis, size, count, largest=bool(largest))
    order = x if largest else im.apply(x, UnaryOp.NEG)
    comparisons = rows * size**2 if isinstance(rows, int) else math.inf
    is_possible = comparisons <= _MOST_COMPARISONS
    # The times are measured nanoseconds. Less than half, because rounds are more layers.
    are_rounds_better = 2 * count * (3500 + 5 * comparisons / size) < 20_000 + comparisons
    if are_rounds_better if is_possible else count <= _MOST_ROUNDS:
        return _in_rounds(im, x, order, axis, size, count)
    if not isinstance(rows, int) or not is_possible:
        reason = f"{rows} rows of {size} numbers: too many to compare all with all"
        raise im.refuse(reason, "convert what is before it with --outputs, and pick the largest numbers outside ncnn")
    perm = [a for a in range(x.rank) if a != axis] + [axis]
    flat, ordered = (im.reshape(y.transpose(perm), (rows, size)) for y in (x, order))
    indices = _of_rank(im, _ranks(im, im.tensor(ordered), size), size, count)
    shape, back = (*(x.shape[a] for a in perm[:-1]), count), inverted(perm)
    numbers = im.tensor(gather_elements(im, flat, indices, axis=1))
    values, places = (im.tensor(im.reshape(y, shape)).transpose(back) for y in (numbers, indices))
    return values, places.of_type(_INDEX)


def _are_ties_chance(blob: Blob) -> bool:
    """Return True if all numbers are sums of products behind smooth functions; zeros, integers and copies often tie."""

    def operands(blob: Blob) -> Sequence[Blob]:
        layer = blob.producer
        if layer is None or layer.type in _SUMS | {"Tile"}:
            return ()
        if layer.computes(BinaryOp.ADD, BinaryOp.SUB):
            return [x for x in layer.inputs if x.producer and x.producer.type != "MemoryData"]
        joined = layer.input.producer if layer.type == "Slice" else None
        if joined and joined.type == "Concat" and [x.shape for x in joined.inputs] == [x.shape for x in layer.outputs]:
            return joined.inputs[layer.outputs.index(blob) :][:1]
        is_smooth = layer.type in _SMOOTH or layer.computes(*_SMOOTH_CODES) or layer.has(Trait.MOVES)
        return layer.inputs[: 1 if layer.type in _SIZED else None] if is_smooth else ()

    ends = (each.producer for each in reached([blob], operands) if not operands(each))
    return all(layer is not None and layer.type in _SUMS for layer in ends)


def _as_boxes(im: ImportContext, x: Tensor, axis: int, size: int, count: int, *, largest: bool) -> tuple[Value, ...]:
    """Return the first of the boxes that DetectionOutput sorts by their scores; box i begins at i.

    It omits NaN, so `count` lower numbers with the last index follow the row: there are always `count` boxes.
    """
    ordered = x if largest else im.apply(x, UnaryOp.NEG)
    row = im.wrap(im.mat(im.reshape(ordered, (size,)), [[], [0]]), (1, size), [[0], [1]])
    # A row of scores of the background, and a row of those of the only class.
    scores = im.layer("Padding", im.mat(row, [[0], [1]]), top=1, right=count, value=LOWEST)
    left = np.minimum(np.arange(size + count), size - 1)
    boxes = im.memory(np.stack([left, 0 * left, left + 0.5, 0 * left + 1], 1))
    found = im.layer("DetectionOutput", boxes, scores, boxes, nms_top_k=count, keep_top_k=count, **SORT)
    columns = im.wrap(found, (count, 6), [[0], [1]])
    shape = (*x.shape[:axis], count, *x.shape[axis + 1 :])
    values, indices = (im.tensor(im.reshape(crop(im, columns, 1, at, at + 1), shape)) for at in (1, 2))
    values = values if largest else im.apply(values, UnaryOp.NEG)
    return values.of_type(x.dtype), indices.of_type(_INDEX)


def _in_rounds(im: ImportContext, x: Tensor, order: Tensor, axis: int, size: int, count: int) -> tuple[Value, ...]:
    """Return the first of the largest numbers, then the first of the largest remaining numbers, and so on.

    Infinite numbers become finite, because their difference is NaN. A quarter of each number is exact; it leaves room
    for infinity above the others, and for removed numbers below them.
    """
    quarter = im.apply(order, BinaryOp.MUL, 1 / _SCALE)
    remaining = im.unary(quarter, "Clip", min=-1.5 / _SCALE * FLT_MAX, max=1.5 / _SCALE * FLT_MAX)
    from_end = Constant(np.arange(size, 0, -1, dtype=np.float32).reshape(-1, *(1,) * (x.rank - axis - 1)))
    numbers, from_ends = [], []
    for step in range(count):
        largest = reduce(im, remaining, "ReduceMax", (axis,), 1)
        is_largest = im.unary(binary(im, BinaryOp.SUB, remaining, largest), "Threshold", threshold=-FLT_MIN)
        marked = binary(im, BinaryOp.MUL, is_largest, from_end)
        first = reduce(im, marked, "ReduceMax", (axis,), 1)
        numbers.append(largest)
        from_ends.append(first)
        if step < count - 1:
            # 0 at the first largest number, -1 or less elsewhere.
            others = binary(im, BinaryOp.SUB, marked, first)
            limit = im.apply(binary(im, BinaryOp.ADD, others, number(0.5)), BinaryOp.MUL, -FLT_MAX)
            remaining = binary(im, BinaryOp.MIN, remaining, limit)
    sign = 1 if order is x else -1
    values = im.apply(concat(im, *numbers, axis=axis), BinaryOp.MUL, sign * _SCALE)
    # No number equals NaN, so `first` may be 0 in a row with NaN.
    places = im.apply(concat(im, *from_ends, axis=axis), BinaryOp.MAX, 1.0)
    indices = im.apply(places, BinaryOp.RSUB, float(size))
    return values.of_type(x.dtype), indices.of_type(_INDEX)


def _ranks(im: ImportContext, x: Tensor, size: int) -> Tensor:
    """Return the rank of each number in its row."""
    difference = binary(im, BinaryOp.SUB, unsqueeze(im, x, (1,)), unsqueeze(im, x, (2,)))
    # The rank is the index, plus the larger numbers to the right, minus the smaller numbers to the left.
    side = Constant(np.sign(np.arange(size) - np.arange(size)[:, None]).astype(np.float32))
    is_misplaced = im.unary(binary(im, BinaryOp.MUL, difference, side), "Threshold", threshold=0.0)
    correction = reduce(im, binary(im, BinaryOp.MUL, is_misplaced, side), "ReduceSum", (2,), 0)
    return binary(im, BinaryOp.ADD, correction, Constant(np.arange(size, dtype=np.float32)))


def _of_rank(im: ImportContext, ranks: Tensor, size: int, count: int) -> Tensor:
    """Return the index of each of the first `count` ranks in each row."""
    row = unsqueeze(im, ranks, (1,))
    distance = binary(im, BinaryOp.SUB, row, Constant(np.arange(count, dtype=np.float32)[:, None]))
    own = Constant(np.arange(size, dtype=np.float32))
    index = binary(im, BinaryOp.MUL, between(im, distance, -0.5, 0.5), own)
    return as_indices(im, reduce(im, index, "ReduceMax", (2,), 0))  # two elements in a row with NaN may have one rank
