"""Gather operators, ReverseSequence and Compress."""

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.dim import product
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.items import ItemsMixed, NodeView, require
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import binary, number
from onnx2ncnn_opt.onnx.lower.functional.cast import as_numbers
from onnx2ncnn_opt.onnx.lower.functional.crop import pick
from onnx2ncnn_opt.onnx.lower.functional.gather import as_indices, gather, gather_elements, gather_nd
from onnx2ncnn_opt.onnx.lower.functional.views import unsqueeze
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Tensor, Value


def _gathered(node: NodeView) -> int:
    """Apply the rule of Gather: each item picks its own rows, or rows of a common table."""
    axis, more = node.number("axis", 0) % len(node.shape(0)), len(node.shape(1))
    data = node.axis(0)
    if data == axis:  # the axis consists of the items' rows, and each item has its own indices
        own, size = node.indices(1), node.inner(0)
        require(all(own.is_within(index, size) for index in own.first_item(own.cells, size)))
        return axis + own.axis
    indices = node.axis(1)
    require((data is None) != (indices is None))
    if data is not None:
        return data if data < axis else data + more - 1
    assert indices is not None
    return axis + indices


def _gathered_elements(node: NodeView) -> int:
    data, indices = node.axis(0), node.axis(1)
    axis = node.number("axis", 0) % len(node.shape(0))
    if data is None or data != indices or data == axis or node.shape(0)[data] != node.shape(1)[data]:
        raise ItemsMixed
    return data


onnx_op("Gather", integers=True, moves=(0,), indexes={1: 0}, items=_gathered, folds=True)(gather)
onnx_op("GatherElements", since=11, integers=True, moves=(0,), indexes={1: 0}, items=_gathered_elements, folds=True)(
    gather_elements
)


def _gathered_nd(node: NodeView) -> int:
    """Apply the rule of GatherND whose first index is the item's number."""
    own = node.indices(1)
    require(not node.number("batch_dims", 0) and node.axis(0) == 0)
    require(node.inner(0) == 1 and own.axis != len(own.shape) - 1)
    own.first_item(own.cells[..., 1:], 0)
    require(not any(own.first_item(own.cells[..., :1], 1)))
    return own.axis


for _since, _later in ((11, ("batch_dims",)), (12, ())):
    onnx_op("GatherND", since=_since, later=_later, integers=True, items=_gathered_nd, folds=True)(gather_nd)


@onnx_op("ReverseSequence", since=10, integers=True)
def reverse_sequence(
    im: ImportContext, x: Tensor, sequence_lens: Value, *, batch_axis: int = 1, time_axis: int = 0
) -> Value:
    """Gather from both axes merged into one; indices are computed if the lengths are."""
    if sorted((batch_axis, time_axis)) != [0, 1]:
        raise im.invalid(f"batch_axis {batch_axis} and time_axis {time_axis}")
    sizes = x.shape[time_axis], x.shape[batch_axis]
    steps, batch = im.fixed(sizes, "the sequences have dynamic dimensions", "bind them with --shape")
    time, item = np.indices((steps, batch))
    if batch_axis == 0:
        time, item = time.T, item.T
    strides = (batch, 1) if time_axis == 0 else (1, steps)
    flat = im.tensor(im.reshape(x, (steps * batch, *x.shape[2:])))
    if isinstance(sequence_lens, Constant):
        lengths = sequence_lens.array[item]
        sources = np.where(time < lengths, lengths - 1 - time, time) * strides[0] + item * strides[1]
        return im.reshape(pick(im, flat, 0, sources.reshape(-1)), x.shape)
    lens = unsqueeze(im, as_numbers(im, sequence_lens), (time_axis,))
    # The distance from the element to its source: length - 1 - 2 * time for times before the length, else 0.
    left = binary(im, BinaryOp.SUB, lens, Constant(time.astype(np.float32)))
    distance = binary(im, BinaryOp.SUB, left, Constant(time.astype(np.float32) + 1))
    step = binary(im, BinaryOp.MUL, im.unary(left, "Threshold", threshold=0.0), distance)
    own = Constant((time * strides[0] + item * strides[1]).astype(np.float32))
    source = binary(im, BinaryOp.ADD, binary(im, BinaryOp.MUL, step, number(strides[0])), own)
    return im.reshape(gather(im, flat, im.reshape(as_indices(im, source), (steps * batch,))), x.shape)


@onnx_op("Compress", since=9, integers=True, folds=True)
def compress(im: ImportContext, x: Tensor, condition: Array, *, axis: int | None = None) -> Value:
    """Crop and Concat."""
    if axis is None:
        return compress(im, im.tensor(im.reshape(x, (product(x.shape),))), condition, axis=0)
    axis = im.axis(axis, x.rank)
    size = x.shape[axis]
    if isinstance(size, int) and condition.size > size:
        raise im.invalid(f"a condition of {condition.size} elements for an axis of {size}")
    return pick(im, x, axis, np.flatnonzero(condition))
