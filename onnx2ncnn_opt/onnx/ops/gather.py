"""Gather and its kin."""

from __future__ import annotations

from onnx2ncnn_opt.onnx.fold import bounds
from onnx2ncnn_opt.onnx.items import ItemsMixed, NodeView
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.gather import gather, gather_elements, gather_nd
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Operand, Value


def _gathered(seen: NodeView) -> int:
    """Rows of each item, or rows of what is the same for all, as the indices of each item say."""
    axis, more = seen.number("axis", 0) % len(seen.shape(0)), len(seen.shape(1))
    data = seen.axis(0)
    if data == axis:  # all items have their rows there, and each one is told its own
        own, size = seen.indices(1), seen.inner(0)
        if not all(own.is_within(index, size) for index in own.own(own.cells, size)):
            raise ItemsMixed
        return axis + own.axis
    indices = seen.axis(1)
    if (data is None) == (indices is None):
        raise ItemsMixed
    if data is not None:
        return data if data < axis else data + more - 1
    assert indices is not None
    return axis + indices


def _gathered_elements(seen: NodeView) -> int:
    data, indices = seen.axis(0), seen.axis(1)
    axis = seen.number("axis", 0) % len(seen.shape(0))
    if data is None or data != indices or data == axis or seen.shape(0)[data] != seen.shape(1)[data]:
        raise ItemsMixed
    return data


onnx_op("Gather", integers=True, moves=(0,), indexes=1, items=_gathered, folds=bounds.gather)(gather)
onnx_op(
    "GatherElements", since=11, integers=True, moves=(0,), indexes=1, items=_gathered_elements, folds=bounds.second
)(gather_elements)


def _gathered_nd(seen: NodeView) -> int:
    """Apply the rule of GatherND whose first index is each item's own number."""
    own = seen.indices(1)
    if seen.number("batch_dims", 0) or seen.axis(0) != 0 or seen.inner(0) != 1 or own.axis == len(own.shape) - 1:
        raise ItemsMixed
    own.own(own.cells[..., 1:], 0)
    if any(own.own(own.cells[..., :1], 1)):
        raise ItemsMixed
    return own.axis


@onnx_op("GatherND", since=11, integers=True, items=_gathered_nd, folds=bounds.gather_nd)
def gather_nd11(im: ImportContext, data: Value, indices: Operand) -> Value:
    """Crop and Concat of constant indices; else Gather by what they are in all."""
    return gather_nd(im, data, indices)


onnx_op("GatherND", since=12, integers=True, items=_gathered_nd, folds=bounds.gather_nd)(gather_nd)
