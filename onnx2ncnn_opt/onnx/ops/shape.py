"""Operators that move elements without computing: most of them only change the view.

Also operators that fold if their results depend only on dynamic sizes, and are refused otherwise.
"""

from collections.abc import Iterator
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import onnx_ir

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.dim import (
    Dim,
    Shape,
    Sym,
    axis_index,
    exact_div,
    is_fixed,
    known,
    product,
    shape_text,
)
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx import items
from onnx2ncnn_opt.onnx.fold.sizes import evaluate
from onnx2ncnn_opt.onnx.items import ItemsMixed, NodeView
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import binary, expand, number, spread
from onnx2ncnn_opt.onnx.lower.functional.concat import concat
from onnx2ncnn_opt.onnx.lower.functional.crop import crop
from onnx2ncnn_opt.onnx.lower.functional.crop import split as parts_of
from onnx2ncnn_opt.onnx.lower.functional.logic import equals
from onnx2ncnn_opt.onnx.lower.functional.views import multiples_of, repeated, squeeze, unsqueeze
from onnx2ncnn_opt.onnx.registry import ALL, onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Ints, Operand, Sizes, SymbolicTensor, Tensor, Value


@onnx_op("Reshape", since=5, integers=True, moves=(0,), items=items.in_order, folds=True)
def reshape(im: ImportContext, x: Tensor, shape: Sizes, *, allowzero: int = 0) -> Value:
    """Regroup axes; Reshape if their factors do not fit."""
    if not allowzero and 0 in shape[x.rank :]:
        raise im.invalid(f"{shape_text(shape)} copies sizes that {shape_text(x.shape)} does not have")
    target: list[Dim] = [x.shape[i] if size == 0 and not allowzero else size for i, size in enumerate(shape)]
    if -1 in target:
        whole, others = product(x.shape), product(size for size in target if size != -1)
        rest = exact_div(whole, others)
        if rest is None and isinstance(whole, Sym) and others != 0:
            rest = whole // others  # ONNX demands that the quotient is whole
        if rest is None:
            reason = f"{shape_text(x.shape)} cannot be reshaped to {shape_text(shape)}"
            raise im.refuse(reason, "bind sizes with --shape")
        target[target.index(-1)] = rest
    size, total = product(x.shape), product(target)
    if isinstance(size, int) and isinstance(total, int) and size != total:
        raise im.mismatch(f"{shape_text(x.shape)} cannot be reshaped to {shape_text(tuple(target))}", [(size, total)])
    if size != total and x.view.reshape(tuple(target)) is None and (multiples := multiples_of(im, size, total)):
        raise im.invalid(f"{shape_text(x.shape)} may differ from {shape_text(tuple(target))}", multiples)
    return im.reshape(x, tuple(target))


@onnx_op("Flatten", integers=True, moves=(0,), items=items.in_order, folds=True)
def flatten(im: ImportContext, x: Tensor, *, axis: int = 1) -> Value:
    """Regroup the axes into two."""
    axis = axis + x.rank if axis < 0 else axis
    return im.reshape(x, (product(x.shape[:axis]), product(x.shape[axis:])))


_regrouped = partial(onnx_op, integers=True, moves=(0,), items=items.in_order, folds=True)
_regrouped("Squeeze", later=("axes",))(squeeze)
_regrouped("Unsqueeze", later=("axes",))(unsqueeze)
_regrouped("Squeeze", since=13)(squeeze)
_regrouped("Unsqueeze", since=13)(unsqueeze)


def _permuted(node: NodeView) -> int:
    axis, rank = items.kept(node, ()), len(node.shape(0))
    order = node.ints("perm") or tuple(reversed(range(rank)))
    return order.index(axis) if axis in order else -1


@onnx_op("Transpose", integers=True, moves=(0,), items=_permuted, folds=True)
def transpose(im: ImportContext, x: Tensor, *, perm: Ints = ()) -> Value:
    """Reorder axes; Permute only if a consumer needs the layout."""
    order = perm or tuple(reversed(range(x.rank)))
    if sorted(order) != list(range(x.rank)):
        raise im.invalid(f"perm {perm} does not fit rank {x.rank}")
    return x.transpose(order)


def _joined(node: NodeView) -> int:
    axis, *others = {node.axis(i) for i in range(len(node.operands))}
    if others or axis is None or axis == node.number("axis", 0) % len(node.shape(0)):
        raise ItemsMixed
    return axis


onnx_op("Concat", since=4, integers=True, moves=ALL, axes="same", items=_joined, folds=True)(concat)


_split = partial(onnx_op, "Split", integers=True, moves=(0,), axes="same", items=items.along(0), folds=True)


@_split(later=("split", "num_outputs"))
@_split(since=13, later=("num_outputs",))
@_split(since=18)
def split(
    im: ImportContext, x: Tensor, split: Sizes | None = None, *, axis: int = 0, num_outputs: int | None = None
) -> tuple[Value, ...]:
    """Slice; Crops for parts of dynamic sizes."""
    axis = im.axis(axis, x.rank)
    size = x.shape[axis]
    if not split:
        is_whole, count = num_outputs is None, num_outputs or len(im.node.outputs)
        if not isinstance(size, int):
            return tuple(_equal_parts(im, x, axis, size, count, is_whole=is_whole))
        part = -(-size // count)
        split = tuple(min(part, size - part * i) for i in range(count))
    if is_fixed(split):
        return parts_of(im, x, axis, known(split))
    ends = [*accumulate(split, initial=0)]
    if ends[-1] != size:
        raise im.invalid(f"parts of {shape_text(split)} for an axis of size {size}", [(ends[-1], size)])
    return tuple(crop(im, x, axis, *cut) for cut in pairwise(ends))


def _equal_parts(im: ImportContext, x: Tensor, axis: int, size: Dim, count: int, *, is_whole: bool) -> Iterator[Tensor]:
    """Yield parts of a dynamic axis of one size; unless `is_whole`, the last part may be smaller."""
    part = exact_div(size, count) or (size if is_whole else size + count - 1) // count
    for i in range(count):
        end = part * (i + 1) if is_whole or i < count - 1 else size
        yield crop(im, x, axis, part * i, end)


def _grown(node: NodeView) -> int:
    """Apply the rule of Expand and Tile: keep the items, or copy one array for each item."""
    before, after = node.shape(0), node.result
    result_axis = node.batch.axis_of(after)
    if result_axis is None:
        raise ItemsMixed
    at = result_axis - len(after)  # from the last axis, because Expand prepends axes
    size = before[at] if len(before) >= -at else 1
    axis = node.axis(0)
    items.require(size == 1 if axis is None else axis - len(before) == at and size == after[at])
    return result_axis


onnx_op("Expand", since=8, integers=True, moves=(0,), items=_grown, folds=True)(expand)


@onnx_op("Tile", since=6, integers=True, moves=(0,), items=_grown, folds=True)
def tile(im: ImportContext, x: Tensor, repeats: Sizes) -> Value:
    """Tile."""
    if len(repeats) != x.rank:
        raise im.invalid(f"{len(repeats)} repeats for rank {x.rank}")
    if any(isinstance(n, int) and n < 1 for n in repeats):
        raise im.refuse(f"repeats {shape_text(repeats)}: ncnn has no empty tensors", "keep one element at least")
    grown = [axis for axis, n in enumerate(repeats) if isinstance(n, Sym)]
    x = repeated(im, x, [1 if isinstance(n, Sym) else n for n in repeats])
    for axis in grown:
        # Insert an axis of size 1 before it, broadcast that, and merge both.
        count, size = repeats[axis], x.shape[axis]
        inserted = im.tensor(im.reshape(x, (*x.shape[:axis], 1, *x.shape[axis:])))
        copies = im.tensor(spread(im, inserted, (*x.shape[:axis], count, *x.shape[axis:])))
        x = im.tensor(im.reshape(copies, (*x.shape[:axis], count * size, *x.shape[axis + 1 :])))
    return x


@onnx_op("EyeLike", since=9, integers=True, folds=True)
def eye_like(im: ImportContext, x: Value, *, dtype: int | None = None, k: int = 0) -> Value:
    """Return a constant, or 1 where a column's place less the row's is `k`."""
    if x.rank != 2:
        raise im.invalid(f"{shape_text(x.shape)} is not a matrix")
    kind = x.dtype if dtype is None else onnx_ir.DataType(dtype).numpy()
    if is_fixed(x.shape):
        rows, columns = x.shape
        return Constant(np.eye(rows, columns, k, kind))
    places = np.full((1, 1), axis_index(0) - axis_index(1), dtype=object)
    to_the_right = im.tensor(SymbolicTensor(places, x.shape, np.dtype(np.float32)))
    return equals(im, to_the_right, number(k)).of_type(kind)


@onnx_op("DepthToSpace", batch=0, folds=True)
def depth_to_space(im: ImportContext, x: Tensor, *, blocksize: int, mode: str = "DCR") -> Value:
    """Regroup axes; PixelShuffle only if a consumer needs the layout."""
    n, c, h, w = _image(im, x)
    b = blocksize
    depth = exact_div(c, b * b)
    if depth is None:
        raise im.invalid(f"{c} channels do not divide by the block of {b} x {b}")
    order = (n, depth, b, b, h, w) if mode == "CRD" else (n, b, b, depth, h, w)
    perm = (0, 1, 4, 2, 5, 3) if mode == "CRD" else (0, 3, 4, 1, 5, 2)
    return im.reshape(im.reshape(x, order).transpose(perm), (n, depth, h * b, w * b))


@onnx_op("SpaceToDepth", batch=0, folds=True)
def space_to_depth(im: ImportContext, x: Tensor, *, blocksize: int, mode: str = "DCR") -> Value:
    """Regroup axes; Reorg only if a consumer needs the layout."""
    n, c, h, w = _image(im, x)
    b = blocksize
    if any(isinstance(size, int) and size % b for size in (h, w)):
        raise im.invalid(f"an image of {h} x {w} does not divide into blocks of {b}")
    rows, columns = h // b, w // b
    for axis, size, kept in ((2, h, rows * b), (3, w, columns * b)):
        x = x if size == kept else crop(im, x, axis, 0, kept)  # ONNX refuses the sizes that lose elements
    perm = (0, 1, 3, 5, 2, 4) if mode == "CRD" else (0, 3, 5, 1, 2, 4)
    return im.reshape(im.reshape(x, (n, c, rows, b, columns, b)).transpose(perm), (n, c * b * b, rows, columns))


def _image(im: ImportContext, x: Tensor) -> Shape:
    if x.rank != 4:
        raise im.invalid(f"the operand has rank {x.rank}, not 4")
    return x.shape


@onnx_op("Range", since=11, integers=True, folds=True)
def range_(im: ImportContext, start: Operand, limit: Operand, delta: Operand, *, stash_type: int = 1) -> Value:
    """CumulativeSum of ones; the bounds must depend on sizes only. From 0.5 on it is a Range from 0 on, plus 0.5."""
    if isinstance(start, Constant) and isinstance(limit, SymbolicTensor) and isinstance(delta, Constant):
        fraction = start.array % 1
        whole = evaluate("Range", [Constant(start.array - fraction), limit, delta], {})
        if whole is not None and (delta.array > 0).all():
            return binary(im, BinaryOp.ADD, im.tensor(whole), Constant(fraction))
    reason = "its length depends on values that are computed at run time, or on a step that is not an integer"
    raise im.refuse(reason, "make it depend on the shapes of inputs only, with an integer step")


@onnx_op("ConstantOfShape", since=9, integers=True, folds=True)
def constant_of_shape(im: ImportContext, shape: Value, *, value: Array | None = None) -> Value:
    """Ones of dynamic sizes times a constant."""
    raise im.refuse("its shape is computed at run time", "make it depend on the shapes of inputs only")
