"""Tensors under other axes: what costs no layer by itself."""

from __future__ import annotations

from collections.abc import Sequence

from onnx2ncnn_opt.ir.dim import shape_text
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.layout import Layout
from onnx2ncnn_opt.onnx.value import Constant, Tensor, Value


def rows(im: ImportContext, x: Tensor, axis: int) -> Tensor:
    """Return the tensor with the axes from `axis` on as the innermost dim of the Mat, in as few layers as possible."""
    inner = tuple(range(axis, x.rank))
    atoms = tuple(atom for a in inner for atom in x.view.axes[a])
    if x.view.dims[-1] == atoms:
        return x
    outer = [a for a in range(axis) if x.view.axes[a]]
    batch: list[int] = []
    if outer and outer[0] == x.batch_axis:
        batch, outer = outer[:1], outer[1:]
    dims = [[a] for a in outer] if len(outer) <= 2 else [outer]
    return im.in_layout(x, Layout((*map(tuple, dims), inner), tuple(batch)))


def transposed(x: Value) -> Value:
    """Return the last two axes exchanged."""
    if x.rank < 2:
        return x
    order = (*range(x.rank - 2), x.rank - 1, x.rank - 2)
    return Constant(x.array.transpose(order)) if isinstance(x, Constant) else x.viewed(x.view.transpose(order))


def squeeze(im: ImportContext, x: Tensor, axes: Sequence[int] | None) -> Tensor:
    """Axes of size 1 go; where none are named, dynamic dimensions stay, and must not be 1."""
    if axes is None:
        axes = tuple(i for i, size in enumerate(x.shape) if size == 1)
        for size in x.shape:
            im.demand(size, 2)
    gone = set(im.axes(axes, x.rank))
    if any(x.shape[axis] != 1 for axis in gone):
        raise im.invalid(f"axes {sorted(gone)} of {shape_text(x.shape)} are not all of size 1")
    return x.viewed(x.view.with_axes(group for axis, group in enumerate(x.view.axes) if axis not in gone))


def unsqueeze(im: ImportContext, x: Tensor, axes: Sequence[int]) -> Tensor:
    """Axes of size 1 come."""
    rank = x.rank + len(axes)
    new = im.axes(axes, rank)
    groups = iter(x.view.axes)
    return x.viewed(x.view.with_axes(() if axis in new else next(groups) for axis in range(rank)))
