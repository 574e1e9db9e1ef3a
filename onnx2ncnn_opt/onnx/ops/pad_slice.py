"""Pad, Slice and CenterCropPad."""

import numpy as np

from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx import items
from onnx2ncnn_opt.onnx.fold.cells import vector
from onnx2ncnn_opt.onnx.fold.sizes import evaluate
from onnx2ncnn_opt.onnx.items import NodeView
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.cast import as_numbers
from onnx2ncnn_opt.onnx.lower.functional.crop import slice_count, sliced
from onnx2ncnn_opt.onnx.lower.functional.pad import pad
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Ints, Operand, Sizes, SymbolicTensor, Tensor, Value


def _cut(node: NodeView) -> int:
    axes = node.ints("axes", 3)
    return items.kept(node, range(len(node.shape(0))) if axes is None else axes, sizes=(1, 2))


@onnx_op("Slice", integers=True, moves=(0,), axes="same", items=_cut, folds=True)
def slice1(im: ImportContext, x: Tensor, *, starts: Ints, ends: Ints, axes: Ints = ()) -> Operand:
    """Crop."""
    return slice10(im, x, starts, ends, axes or None)


@onnx_op("Slice", since=10, integers=True, moves=(0,), axes="same", items=_cut, folds=True)
def slice10(
    im: ImportContext, x: Tensor, starts: Sizes, ends: Sizes, axes: Ints | None = None, steps: Ints | None = None
) -> Operand:
    """Crop; Pooling of one element for steps, after a Flip for negative ones."""
    lengths = {len(starts), len(ends), *(len(values) for values in (axes, steps) if values is not None)}
    if len(lengths) > 1 or (axes is None and len(starts) > x.rank):
        raise im.invalid(f"its starts, ends, axes and steps differ in number, or are more than {x.rank}")
    if steps is not None and 0 in steps:
        raise im.invalid("the step is 0")
    cut_axes = im.axes(axes if axes is not None else range(len(starts)), x.rank)
    cuts = list(zip(cut_axes, starts, ends, steps or (1,) * len(starts), strict=True))
    counts = {axis: slice_count(x.shape[axis], start, end, step) for axis, start, end, step in cuts}
    if 0 in counts.values():  # only its shape matters
        zeros = SymbolicTensor(np.zeros((1,) * x.rank, x.dtype), x.shape, x.dtype)
        along, *bounds = map(vector, zip(*cuts, strict=True))
        empty = evaluate("Slice", [zeros, *bounds[:2], along, bounds[2]], {})
        if empty is None:
            raise im.refuse("it is empty, and has a dynamic dimension", "bind it with --shape")
        return empty
    for axis, start, end, step in cuts:
        x = sliced(im, x, axis, start, end, step)
    return x


def _padded(node: NodeView) -> int:
    axis, rank, pads = items.kept(node, ()), len(node.shape(0)), node.ints("pads", 1) or ()
    axes = [at % rank for at in node.ints("axes", 3) or range(rank)]
    padded = axes.index(axis) if axis in axes else None
    items.require(padded is None or not any(pads[padded :: len(axes)]))
    return axis


@onnx_op("Pad", axes="same", items=_padded, folds=True)
def pad2(im: ImportContext, x: Tensor, *, pads: Ints, mode: str = "constant", value: float = 0.0) -> Value:
    """Pad; the amounts are attributes before opset 11."""
    return pad(im, x, pads, mode, value, None)


@onnx_op("Pad", since=11, integers=True, axes="same", items=_padded, folds=True)
def pad11(
    im: ImportContext,
    x: Tensor,
    pads: Sizes,
    constant_value: Array | None = None,
    axes: Ints | None = None,
    *,
    mode: str = "constant",
) -> Value:
    """Pad; Crop for negative amounts."""
    x = as_numbers(im, x)
    value = 0.0 if constant_value is None else float(constant_value.reshape(-1)[0])
    return pad(im, x, pads, mode, value, axes)


@onnx_op("CenterCropPad", since=18, integers=True)
def center_crop_pad(im: ImportContext, x: Tensor, shape: Ints, *, axes: Ints = ()) -> Value:
    """Crop of the axes that shrink, Padding of the axes that grow."""
    changed = im.axes(axes or range(x.rank), x.rank)
    if len(changed) != len(shape) or min(shape) < 1:
        raise im.invalid(f"the shape {shape} for {len(changed)} axes")
    before, after = [], []
    for axis, target in zip(changed, shape, strict=True):
        (size,) = im.fixed((x.shape[axis],), f"axis {axis} is dynamic")
        before.append(int((target - size) / 2))  # towards 0
        after.append(target - size - before[-1])
    return pad11(im, x, (*before, *after), axes=tuple(changed))
