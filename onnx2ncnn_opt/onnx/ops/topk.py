"""ArgMax, ArgMin, Hardmax, TopK, and rows that NonMaxSuppression selects: the largest or smallest elements, in order.

ncnn has none of them. The index of the first 0 in a row of 0 and 1 is the minimum of ``i + n * row[i]``. As in
comparisons, numbers closer to each other than the smallest normal float32 are equal.

DetectionOutput sorts, and returns equal numbers in any order. Where these are not rare, a second one sorts numbers that
are never equal.

The rank of NaN is undefined, as in ONNX Runtime: it may be among the largest or the smallest numbers. In a row with
NaN an index may occur twice, but every index is valid.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import isqrt, prod

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, Interp, Padding, UnaryOp
from onnx2ncnn_opt.ir.detections import ALL, BY_RANK, LOWEST, OF_BOXES, SORT
from onnx2ncnn_opt.ir.dim import Dim, Sym, axis_index, is_fixed, known, product
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.half import HALF_WEIGHTS
from onnx2ncnn_opt.ir.permute import inverted
from onnx2ncnn_opt.ir.reached import reached
from onnx2ncnn_opt.ir.spec import Trait
from onnx2ncnn_opt.onnx import items
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.activation import flattened
from onnx2ncnn_opt.onnx.lower.functional.binary import binary
from onnx2ncnn_opt.onnx.lower.functional.cast import FLT_MAX, FLT_MIN, as_numbers
from onnx2ncnn_opt.onnx.lower.functional.concat import concat
from onnx2ncnn_opt.onnx.lower.functional.crop import crop
from onnx2ncnn_opt.onnx.lower.functional.gather import as_indices, fixed, gather, gather_elements, numbers_of
from onnx2ncnn_opt.onnx.lower.functional.logic import equals
from onnx2ncnn_opt.onnx.lower.functional.reduce import arg_max, mark_largest, reduce
from onnx2ncnn_opt.onnx.lower.functional.symbolic_tensor import arange
from onnx2ncnn_opt.onnx.lower.functional.views import unsqueeze
from onnx2ncnn_opt.onnx.read.structure import OWN, ROWS
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Sizes, SymbolicTensor, Tensor, Value, held_as_float

_MOST_COMPARISONS = 2**24  # also the largest integer that float32 tells from its neighbours
_FEW_COMPARISONS = 2**18
_LARGEST_INDEX = 2**20
_FEW_ROWS, _MOST_ROWS = 8, 128  # that are sorted one by one: if few comparisons replace that, and if not
_SCALE = 4  # dividing by it makes room for infinite numbers
_FAR = 1e18  # from all boxes; ncnn multiplies it by the height of a box
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
    """ReduceMax and ArgMax for k = 1, else DetectionOutput; a second one puts numbers in order that are often equal."""
    return top_k10(im, x, (k,), axis=axis)


@onnx_op("TopK", since=10, later=("largest", "sorted"), jumps=True, items=items.along(-1), folds=True)
@onnx_op("TopK", since=11, integers=True, jumps=True, items=items.along(-1), folds=True)
def top_k10(
    im: ImportContext, x: Tensor, k: Sizes, *, axis: int = -1, largest: int = 1, sorted: int = 1
) -> tuple[Value, ...]:
    """ReduceMax and ArgMax for k = 1, else DetectionOutput; a second one puts numbers in order that are often equal."""
    axis, count = im.axis(axis, x.rank), im.within_limits(k[0])
    size = x.shape[axis]
    if size == count == 1 and is_fixed(x.shape):
        return x, Constant(np.zeros(known(x.shape), np.int64))
    x = as_numbers(im, x)
    if isinstance(size, int) and isinstance(count, int) and count > size:
        raise im.invalid(f"k is {count}, for an axis of {size} elements")
    if isinstance(count, int) and count < 1:
        raise im.refuse(f"k is {count}", "ask for 1 up to as many as there are")
    order = x if largest else im.apply(x, UnaryOp.NEG)
    if count == 1:
        return reduce(im, x, "ReduceMax" if largest else "ReduceMin", (axis,), 1), arg_max(im, order, axis=axis)
    if not sorted:
        raise im.refuse("sorted is 0: ONNX leaves the order undefined", "export it with sorted=True")
    im.demand(size - count, 0)
    im.demand(count, 1)
    perm = [a for a in range(x.rank) if a != axis] + [axis]
    shape, back = (*(x.shape[a] for a in perm[:-1]), count), inverted(perm)
    rows = im.tensor(im.reshape(order.transpose(perm), (product(shape[:-1]), size)))
    ties = _are_ties_chance(x.blob)
    results = _ranked(im, rows, count) if isinstance(count, Sym) else _sorted(im, rows, count, in_any_order=ties)
    values, indices = (im.tensor(im.reshape(y, shape)).transpose(back) for y in results)
    values = values if largest else im.apply(values, UnaryOp.NEG)
    return values.of_type(x.dtype), indices.of_type(_INDEX)


def _are_ties_chance(blob: Blob) -> bool:
    """Return True if all numbers are sums of products behind smooth functions; zeros, integers and copies often tie."""

    def operands(blob: Blob) -> Sequence[Blob]:
        layer = blob.producer
        if layer is None or layer.type in _SUMS | {"Tile"}:
            return ()
        if layer.computes(BinaryOp.ADD, BinaryOp.SUB):
            return [x for x in layer.inputs if x.producer and x.producer.type != "MemoryData"]
        if (part := _joined(layer, blob)) is not None:
            return [part]
        is_smooth = layer.type in _SMOOTH or layer.computes(*_SMOOTH_CODES) or layer.has(Trait.MOVES)
        return layer.inputs[: 1 if layer.type in _SIZED else None] if is_smooth else ()

    ends = (each.producer for each in reached([blob], operands) if not operands(each))
    return all(layer is not None and layer.type in _SUMS for layer in ends)


def _joined(layer: Layer, blob: Blob) -> Blob | None:
    """Return the operand of a Concat that a Crop or Slice picks; None for other layers and other parts."""
    joined = layer.input.made_by("Concat") if layer.type in ("Crop", "Slice") else None
    if joined is None:
        return None
    axis, others = joined["axis"], layer.outputs[: layer.outputs.index(blob)]
    at = sum(x.known_shape[axis] for x in others) if layer.type == "Slice" else layer["starts"][0]
    starts = accumulate((x.known_shape[axis] for x in joined.inputs), initial=0)
    return next(
        (x for x, start in zip(joined.inputs, starts, strict=False) if (start, x.shape) == (at, blob.shape)), None
    )


def _sorted(im: ImportContext, x: Tensor, count: int, *, in_any_order: bool) -> tuple[Tensor, Tensor]:
    """Return the largest numbers of each row, and their indices; equal numbers `in_any_order`, or by index.

    One DetectionOutput sorts one row; equal numbers in any order. It sorts any number of rows of numbers that are never
    equal, if those of the first row are the largest ones: ``-n * (larger numbers in the row) - index - offset``.
    """
    rows, size = x.shape
    is_short = isinstance(size, int) and isinstance(rows, int) and rows * size**2 <= _FEW_COMPARISONS
    boxes, compared = _boxes(im, size, count), x
    if isinstance(rows, int) and rows <= _MOST_ROWS and (not is_short or (in_any_order and rows <= _FEW_ROWS)):
        _limit(im, x, size, _LARGEST_INDEX)
        _limit(im, x, rows * count**2, _MOST_COMPARISONS)
        is_scaled = not im.range_of(x).within(LOWEST, -LOWEST)
        if is_scaled:  # a quarter of each number is exact, and leaves room for infinity above the others
            quarter = im.apply(x, BinaryOp.MUL, 1 / _SCALE)
            x = im.unary(quarter, "Clip", min=-1.5 / _SCALE * FLT_MAX, max=1.5 / _SCALE * FLT_MAX)
        compared, indices = _first_boxes(im, x, boxes, count, by_row=True)
        values = im.apply(compared, BinaryOp.MUL, _SCALE) if is_scaled else compared
        if in_any_order:
            return values, indices
    span = size * (compared.shape[1] + 1)
    _limit(im, x, rows * span, _MOST_COMPARISONS)
    order: Value = binary(im, BinaryOp.MUL, _larger(im, compared, x), numbers_of(im, -size))
    for shape, cell in (((1, size), axis_index(0)), ((rows, 1), axis_index(1) * span)):
        offset = im.tensor(SymbolicTensor(np.array([[cell]], object), shape, np.dtype(np.float32)))
        order = binary(im, BinaryOp.SUB, order, offset) if shape != (1, 1) else order
    _, indices = _first_boxes(im, im.tensor(order), boxes, count, by_row=False)
    return (im.tensor(gather_elements(im, x, indices, axis=1)) if compared is x else values), indices


def _larger(im: ImportContext, compared: Tensor, x: Tensor) -> Tensor:
    """Return how many of the numbers to compare with are larger, for each number of a row."""
    difference = binary(im, BinaryOp.SUB, unsqueeze(im, compared, (1,)), unsqueeze(im, x, (2,)))
    return reduce(im, im.unary(difference, "Threshold", threshold=0.0), "ReduceSum", (2,), 0)


def _ranked(im: ImportContext, x: Tensor, count: Sym) -> tuple[Tensor, Tensor]:
    """Return the numbers of a dynamic count of ranks, and their indices; numbers to count are never equal, as above."""
    rows, size = x.shape
    _limit(im, x, rows * size * (size + 1), _MOST_COMPARISONS)
    index = arange(im, size, 0, 1)
    order = binary(im, BinaryOp.SUB, binary(im, BinaryOp.MUL, _larger(im, x, x), numbers_of(im, -size)), index)
    ranks = unsqueeze(im, _larger(im, order, order), (1,))
    chosen = equals(im, ranks, arange(im, count, 0, 2))
    indices = as_indices(im, reduce(im, binary(im, BinaryOp.MUL, chosen, index), "ReduceSum", (2,), 0))
    return im.tensor(gather_elements(im, x, indices, axis=1)), indices


def _boxes(im: ImportContext, size: Dim, count: int) -> Blob:
    """Return boxes that begin at 0, 1, 2, ..., and `count` times the last one again; none is empty."""
    if isinstance(size, int):
        index = np.minimum(np.arange(size + count, dtype=np.float32), size - 1)
        return im.memory(np.stack([index, index, index + 1, index + 1], 1))
    [text], others = im.size_expressions([(4, size)])
    step = im.memory(np.array([[[1, 1, 2, 2]]], np.float32))
    steps = im.layer("Interp", step, *others, resize_type=Interp.NEAREST, size_expr=text)
    boxes = im.layer("BinaryOp", im.layer("CumulativeSum", steps, axis=1), op_type=BinaryOp.ADD, with_scalar=1, b=-1.0)
    return im.layer("Padding", boxes, bottom=count, type=Padding.REPLICATE)


def _first_boxes(im: ImportContext, x: Tensor, boxes: Blob, count: int, *, by_row: bool) -> tuple[Tensor, Tensor]:
    """Return the scores and the indices of the boxes that DetectionOutput sorts by their scores."""
    columns, shape = _sorted_boxes(im, x, boxes, count, by_row=by_row), (x.shape[0], count)
    numbers, indices = (im.reshape(crop(im, columns, 1, at, at + 1), shape) for at in (1, 2))
    return im.tensor(numbers), as_indices(im, indices)


def _sorted_boxes(im: ImportContext, x: Tensor, boxes: Blob, count: int, *, by_row: bool) -> Tensor:
    """Return the rows of boxes that DetectionOutput sorts by their scores, `count` of each row of x.

    It omits NaN, so `count` lower numbers with the last index follow each row: there are always `count` boxes.
    """
    rows = x.shape[0]
    parts = rows if by_row and isinstance(rows, int) and rows > 1 else 0
    # A row of scores of the background, and then those of a class in each row.
    scores = im.layer("Padding", im.mat(x, [[0], *[()] * min(parts, 1), [1]]), top=1, right=count, value=LOWEST)
    split = im.layers("Slice", scores, outputs=parts, slices=(1,) * parts, axis=0) if parts else (scores,)
    found = [im.layer("DetectionOutput", boxes, each, boxes, nms_top_k=count, **SORT) for each in split]
    return im.wrap(im.layer("Concat", *found, axis=0) if parts else found[0], (rows * count, 6), [[0], [1]])


def _limit(im: ImportContext, x: Tensor, amount: Dim, most: int) -> None:
    """Refuse to sort if a number of elements or comparisons is too large; demand it of dynamic sizes."""
    if isinstance(amount, int) and amount > most:
        reason = f"{x.shape[0]} rows of {x.shape[1]} numbers: too many to compare all with all"
        raise im.refuse(reason, "convert what is before it with --outputs, and pick the largest numbers outside ncnn")
    im.demand(most - amount, 0)


@onnx_op(ROWS, domain=OWN, jumps=True)
def select_rows(
    im: ImportContext, boxes: Tensor, scores: Tensor, table: Tensor, *, most: int, iou: float, conf: float
) -> Tensor:
    """Two DetectionOutputs: one sorts boxes by score, and the other one selects from them by rank.

    The score of a box is its rank then, so the index of each box that ncnn selects is known. Rows of zeros follow.
    """
    _, count, _ = fixed(im, boxes.shape)
    width = prod(fixed(im, table.shape)) // count
    values, indices = _sorted_row(im, im.tensor(im.reshape(scores, (count,))), count)
    parts = (im.tensor(im.reshape(x, (count, n))).transpose((1, 0)) for x, n in ((boxes, 4), (table, width)))
    columns = im.tensor(gather(im, concat(im, *parts, axis=0), indices, axis=1)).transpose((1, 0))
    corners = im.layer("Padding", im.mat(crop(im, columns, 1, 0, 4), [[0], [1]]), bottom=most)
    halves = [crop(im, im.wrap(corners, (count + most, 4), [[0], [1]]), 1, at, at + 2) for at in (0, 2)]
    low, high = (binary(im, code, *halves) for code in (BinaryOp.MIN, BinaryOp.MAX))
    # ncnn divides 0 by 0 for two boxes without an area, so these have places of their own.
    area = reduce(im, binary(im, BinaryOp.SUB, high, low), "ReduceProd", (1,), 1)
    has_area = im.unary(area, "Threshold", threshold=0.0)
    ranks = np.arange(count + most, 0, -1, dtype=np.float32)
    others = Constant(np.stack([ranks, 0 * ranks - 2 * _FAR, ranks + 1, 0 * ranks - _FAR], 1).astype(np.float32))
    apart = binary(im, BinaryOp.MUL, im.tensor(others), im.apply(has_area, BinaryOp.RSUB, 1.0))
    own = binary(im, BinaryOp.MUL, concat(im, low, high, axis=1), has_area)
    location = im.mat(im.tensor(binary(im, BinaryOp.ADD, own, apart)), [[0], [1]])
    # Scores count down to 1. Boxes that fill the rows have 0, so their rank is the index of a row of zeros.
    passes = im.unary(im.apply(values, BinaryOp.SUB, conf), "Threshold", threshold=0.0)
    order = im.apply(binary(im, BinaryOp.MUL, passes, Constant(ranks[most - 1 : -1])), BinaryOp.SUB, 1.0)
    confidence = im.layer("Padding", im.mat(order, [[], [0]]), top=1, right=most)
    params = {**OF_BOXES, "nms_threshold": iou, "confidence_threshold": BY_RANK, "keep_top_k": most}
    found = im.layer("DetectionOutput", location, confidence, location, nms_top_k=ALL, **params)
    found = im.layer("Reshape", found, w=6, h=most)  # there are always as many
    score = im.reshape(crop(im, im.wrap(found, (most, 6), [[0], [1]]), 1, 1, 2), (most,))
    chosen = as_indices(im, im.apply(score, BinaryOp.RSUB, float(count)))
    filled = im.layer("Padding", im.mat(crop(im, columns, 1, 4, 4 + width), [[0], [1]]), bottom=1)
    return im.tensor(gather(im, im.wrap(filled, (count + 1, width), [[0], [1]]), chosen, axis=0))


def _sorted_row(im: ImportContext, x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return all numbers of a row, the largest first, and their indices.

    ncnn compares each box with all of its class, so each of about sqrt(n) classes gets a part of the row:

        9 numbers -> 3 classes of 3 numbers -> rows of class (from 1), number, box -> index = 3 * (class - 1) + box
    """
    width = isqrt(size - 1) + 1
    parts = -(-size // width)
    whole = im.layer("Padding", im.mat(x, [[0]]), right=parts * width - size, value=LOWEST)
    part = im.tensor(im.reshape(im.wrap(whole, (parts * width,), [[0]]), (parts, width)))
    rows = im.tensor(crop(im, _sorted_boxes(im, part, _boxes(im, width, width), width, by_row=False), 0, 0, size))
    label, numbers, box = (im.tensor(im.reshape(crop(im, rows, 1, at, at + 1), (size,))) for at in range(3))
    start = im.apply(im.apply(label, BinaryOp.SUB, 1.0), BinaryOp.MUL, float(width))
    index = im.apply(binary(im, BinaryOp.ADD, start, box), BinaryOp.MIN, float(size - 1))
    return numbers, as_indices(im, index)
