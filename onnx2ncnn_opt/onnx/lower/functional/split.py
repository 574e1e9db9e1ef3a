"""Parts of a tensor along an axis."""

from __future__ import annotations

from collections.abc import Sequence

from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.crop import resized, sliceable
from onnx2ncnn_opt.onnx.value import Tensor, Value


def split(im: ImportContext, x: Tensor, axis: int, sizes: Sequence[int]) -> tuple[Value, ...]:
    """Parts of these sizes, as one Slice."""
    axis = im.axis(axis, x.rank)
    size = x.shape[axis]
    if isinstance(size, int) and sum(sizes) != size:
        raise im.invalid(f"parts of {tuple(sizes)} do not make up the axis of size {size}")
    if any(part < 0 for part in sizes):
        raise im.invalid(f"parts of {tuple(sizes)}")
    if 0 in sizes:
        whole = iter(split(im, x, axis, [part for part in sizes if part]))
        empty = im.empty((*x.shape[:axis], 0, *x.shape[axis + 1 :]), x.dtype)
        return tuple(next(whole) if part else empty for part in sizes)
    if len(sizes) == 1:
        return (x,)
    laid_out, dim, inner = sliceable(im, x, axis, is_single=set(sizes) == {1})
    slices = tuple(part * inner for part in sizes)
    blobs = im.layers("Slice", laid_out.blob, outputs=len(sizes), slices=slices, axis=dim)
    return tuple(
        Tensor(blob, resized(laid_out.view, axis, part), x.dtype) for blob, part in zip(blobs, sizes, strict=True)
    )
