"""Padding by constant and dynamic amounts."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from onnx2ncnn_opt.ir.codes import Padding
from onnx2ncnn_opt.ir.dim import AXES, Dim, Sym, at_least, at_most, larger, smaller
from onnx2ncnn_opt.ir.view import MAX_DIMS
from onnx2ncnn_opt.ir.windows import SIDES
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import spread
from onnx2ncnn_opt.onnx.lower.functional.cast import FLT_MAX
from onnx2ncnn_opt.onnx.lower.functional.concat import concat
from onnx2ncnn_opt.onnx.lower.functional.crop import TO_END, crop, crop_axes, flip
from onnx2ncnn_opt.onnx.lower.functional.infinity import are_infinities_tested, at_quarter_scale
from onnx2ncnn_opt.onnx.lower.functional.views import dims_around, repeated
from onnx2ncnn_opt.onnx.value import Constant, Ints, Sizes, Tensor, Value

_MODES = {"constant": Padding.CONSTANT, "edge": Padding.REPLICATE, "reflect": Padding.REFLECT}


def pad(
    im: ImportContext, x: Tensor, pads: Sizes, mode: str = "constant", value: float = 0.0, axes: Ints | None = None
) -> Tensor:
    """ONNX's Pad: `pads` are the amounts before, then after the axes (by default all); negative amounts crop."""
    if mode == "constant" and math.isinf(value) and (im.node.outputs[0].is_graph_output() or are_infinities_tested(im)):
        return at_quarter_scale(im, x, lambda y: pad(im, y, pads, mode, math.copysign(FLT_MAX, value), axes))
    if mode not in _MODES and mode != "wrap":
        raise im.invalid(f"mode {mode} is not known")
    n = x.rank if axes is None else len(axes)
    if len(pads) != 2 * n:
        raise im.invalid(f"{len(pads)} pads for {n} axes")
    amounts: dict[int, tuple[int, int]] = {}
    limited: dict[int, tuple[Dim, Dim]] = {}
    for axis, begin, end in zip(range(n) if axes is None else im.axes(axes, x.rank), pads[:n], pads[n:], strict=True):
        if not isinstance(begin, Sym) and not isinstance(end, Sym):
            amounts |= {axis: (begin, end)} if begin or end else {}
        elif mode in ("constant", "edge") and None not in map(_most, (begin, end)):
            limited[axis] = begin, end
        else:
            x = _pad_openly(im, x, axis, begin, end, mode, value)
    x = _pad_widely(im, x, limited, mode, value) if limited else x
    return _pad_fixed(im, x, amounts, mode, value, pads)


def _most(pad: Dim) -> int | None:
    """Return the largest possible amount of a pad; None if there is none."""
    return at_most(larger(pad, 0))


def _pad_widely(im: ImportContext, x: Tensor, pads: Mapping[int, tuple[Dim, Dim]], mode: str, value: float) -> Tensor:
    """Pad by the largest possible amounts, and crop the excess.

    Example: n elements up to a length of 80 have the pad 80 - n. They are padded by 80, and cropped to 80.
    """
    most = {axis: (_most(begin) or 0, _most(end) or 0) for axis, (begin, end) in pads.items()}
    grown = {axis: sides for axis, sides in most.items() if any(sides)}
    wide, ranges = _padding(im, x, grown, mode, value) if grown else x, {}
    for axis, (begin, end) in pads.items():
        im.demand(x.shape[axis] + begin + end, 1)
        if wide.view.axes[axis]:
            first = most[axis][0]
            ranges[axis] = first - begin, first + x.shape[axis] + end
    return crop_axes(im, wide, ranges)


def _pad_fixed(
    im: ImportContext, x: Tensor, amounts: dict[int, tuple[int, int]], mode: str, value: float, pads: Sizes
) -> Tensor:
    """Crop by the negative amounts before and after axes, and pad by the others; `pads` are for errors."""
    grown = {a: (max(b, 0), max(e, 0)) for a, (b, e) in amounts.items() if b > 0 or e > 0}
    crops_dynamic = any(min(sides) < 0 and isinstance(x.shape[axis], Sym) for axis, sides in amounts.items())
    if mode == "constant" and grown and crops_dynamic:  # pad first, because the cropped tensor must not be empty
        x, grown = _padding(im, x, grown, mode, value), {}
    for axis, (begin, end) in amounts.items():
        if begin < 0 or end < 0:
            size = x.shape[axis]
            if isinstance(size, int) and -min(begin, 0) - min(end, 0) >= size:
                raise im.refuse(f"pads {pads} take away all of an axis", "keep one element at least")
            x = crop(im, x, axis, max(0, -begin), min(end, 0) or TO_END)
    for axis, (begin, end) in grown.items():
        size = x.shape[axis]
        if mode == "wrap":
            x = _wrapped(im, x, axis, begin, end)
        if mode == "reflect":
            most = max(begin, end)
            im.demand(size, most + 1)
            if isinstance(size, int) and most >= size:
                raise im.refuse(f"reflecting {most} elements of an axis of size {size}", "pad by less than the axis")
    return _padding(im, x, grown, mode, value) if grown and mode != "wrap" else x


def _pad_openly(im: ImportContext, x: Tensor, axis: int, begin: Dim, end: Dim, mode: str, value: float) -> Tensor:
    """Pad by amounts without a limit, or in a mode that needs elements of the axis."""
    if mode == "wrap":
        raise im.refuse(f"mode {mode} with dynamic pads of {begin} and {end}", "bind sizes with --shape")
    if mode == "reflect":
        if at_least(begin, 0) and at_least(end, 0):
            return _reflected(im, x, axis, begin, end)
        raise im.refuse(f"reflecting pads of {begin} and {end}, which may be below 0", "bind sizes with --shape")
    if mode == "constant" and math.isfinite(value):
        return _pad_without_limit(im, x, axis, begin, end, value)
    raise im.refuse(f"pads of {begin} and {end}, which may be any number", "bind sizes with --shape")


def _pad_without_limit(im: ImportContext, x: Tensor, axis: int, begin: Dim, end: Dim, value: float) -> Tensor:
    """Concatenate the axis and at least one number at each end, and crop the excess, as pads may be 0 or negative."""
    laid_out, number = im.along(x, [axis]), Constant(np.array(value, np.float32))

    def filled(size: Dim) -> list[Value]:
        return [spread(im, number, (*x.shape[:axis], size, *x.shape[axis + 1 :]))] if size != 0 else []

    before, after = (larger(pad, 1) if pad != 0 else 0 for pad in (begin, end))
    im.demand(x.shape[axis] + begin + end, 1)
    whole = im.tensor(concat(im, *filled(before), laid_out, *filled(after), axis=axis))
    return crop(im, whole, axis, before - begin, before + x.shape[axis] + end).of_type(x.dtype)


def _reflected(im: ImportContext, x: Tensor, axis: int, begin: Dim, end: Dim) -> Tensor:
    """Concatenate the axis and its longest possible reflections at both ends, and crop the excess."""
    laid_out, size = im.along(x, [axis]), x.shape[axis]
    if size == 1:  # dynamic pads of one element are 0
        return x
    mirrored, first = flip(im, laid_out, axis), larger(size - 1, 1) if begin != 0 else 0
    before = [crop(im, mirrored, axis, 0, first)] if begin != 0 else []
    after = [crop(im, mirrored, axis, smaller(size - 1, 1), size)] if end != 0 else []
    whole = im.tensor(concat(im, *before, laid_out, *after, axis=axis))
    return crop(im, whole, axis, first - begin, first + size + end)


def _wrapped(im: ImportContext, x: Tensor, axis: int, begin: int, end: int) -> Tensor:
    """Prepend the last elements of an axis, and append the first ones."""
    laid_out, size = im.along(x, [axis]), x.shape[axis]
    if size == 1:  # repeat the element
        return repeated(im, laid_out, [1 + begin + end if a == axis else 1 for a in range(x.rank)])
    if isinstance(size, int) and max(begin, end) > size:
        reason = f"{max(begin, end)} elements wrapped around an axis of size {size}"
        raise im.refuse(reason, "pad by at most the size of the axis")
    im.demand(size, max(begin, end))
    before = [crop(im, laid_out, axis, size - begin, size)] if begin else []
    after = [crop(im, laid_out, axis, 0, end)] if end else []
    return im.tensor(concat(im, *before, laid_out, *after, axis=axis))


def _padding(im: ImportContext, x: Tensor, amounts: dict[int, tuple[int, int]], mode: str, value: float) -> Tensor:
    """Append one Padding layer if possible: ncnn pads up to three dims, of four all except c; else one per axis."""
    dims, batch = dims_around(x, amounts)
    if len(amounts) > 3 or len(dims) > MAX_DIMS or (len(dims) == MAX_DIMS and dims[0][0] in amounts):
        if len(amounts) > 1:
            for axis, sides in amounts.items():
                x = _padding(im, x, {axis: sides}, mode, value)
            return x
        [axis] = amounts
        before, after = (tuple(a for a in side if a not in batch) for side in (range(axis), range(axis + 1, x.rank)))
        dims = [group for group in (before, (axis,), after) if group]
    params: dict[str, Any] = {}
    for axis, sides in amounts.items():
        params |= zip(SIDES[AXES[len(dims)][dims.index((axis,))]], sides, strict=True)
    blob = im.layer("Padding", im.mat(x, dims, batch), type=_MODES[mode], value=value, **params)
    shape = tuple(n + sum(amounts.get(axis, (0, 0))) for axis, n in enumerate(x.shape))
    return im.wrap(blob, shape, dims, batch, x.dtype)
