"""Reversed sequences, and elements left out."""

from __future__ import annotations

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.dim import product
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.fold import bounds
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import binary, number
from onnx2ncnn_opt.onnx.lower.functional.cast import as_numbers
from onnx2ncnn_opt.onnx.lower.functional.crop import pick
from onnx2ncnn_opt.onnx.lower.functional.gather import gather
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Tensor, Value, held_as_float


@onnx_op("ReverseSequence", since=10, integers=True)
def reverse_sequence(
    im: ImportContext, x: Tensor, sequence_lens: Value, *, batch_axis: int = 1, time_axis: int = 0
) -> Value:
    """Gather along both axes as one; its indices are constant or computed, as the lengths are."""
    if sorted((batch_axis, time_axis)) != [0, 1]:
        raise im.invalid(f"batch_axis {batch_axis} and time_axis {time_axis}")
    steps, batch = x.shape[time_axis], x.shape[batch_axis]
    if not isinstance(steps, int) or not isinstance(batch, int):
        raise im.refuse("the sequences have dynamic dimensions", "bind them with --shape")
    time, item = np.indices((steps, batch))
    if batch_axis == 0:
        time, item = time.T, item.T
    strides = (batch, 1) if time_axis == 0 else (1, steps)
    flat = im.reshape(x, (steps * batch, *x.shape[2:]))
    assert isinstance(flat, Tensor)
    if isinstance(sequence_lens, Constant):
        lengths = sequence_lens.array[item]
        sources = np.where(time < lengths, lengths - 1 - time, time) * strides[0] + item * strides[1]
        return im.reshape(pick(im, flat, 0, sources.reshape(-1)), x.shape)
    lens = as_numbers(im, sequence_lens)
    lens = lens.viewed(lens.view.with_axes((*lens.view.axes, ()) if batch_axis == 0 else ((), *lens.view.axes)))
    # How far the source is from the element: length - 1 - 2 * time, where time is before the length.
    over = im.tensor(binary(im, BinaryOp.SUB, lens, Constant(time.astype(np.float32))))
    moved = binary(im, BinaryOp.SUB, over, Constant(time.astype(np.float32) + 1))
    step = binary(im, BinaryOp.MUL, im.unary(over, "Threshold", threshold=0.0), moved)
    source = binary(im, BinaryOp.MUL, step, number(strides[0]))
    source = im.tensor(
        binary(im, BinaryOp.ADD, source, Constant((time * strides[0] + item * strides[1]).astype(np.float32)))
    )
    index = im.reshape(Tensor(source.blob, source.view, held_as_float(np.dtype(np.uint32))), (steps * batch,))
    return im.reshape(gather(im, flat, index), x.shape)


@onnx_op("Compress", since=9, integers=True, folds=bounds.first)
def compress(im: ImportContext, x: Tensor, condition: Array, *, axis: int | None = None) -> Value:
    """Crop and Concat."""
    if axis is None:
        flat = im.reshape(x, (product(x.shape),))
        assert isinstance(flat, Tensor)
        return compress(im, flat, condition, axis=0)
    axis = im.axis(axis, x.rank)
    size = x.shape[axis]
    if isinstance(size, int) and condition.size > size:
        raise im.invalid(f"a condition of {condition.size} elements for an axis of {size}")
    return pick(im, x, axis, np.flatnonzero(condition))
