"""Pad, Slice, and picking elements by constant indices."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import Any

import numpy as np

from onnx2ncnn_opt.ir.codes import Padding
from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym, at_least, at_most, known, larger, smaller
from onnx2ncnn_opt.ir.graph import Blob
from onnx2ncnn_opt.ir.shapes.registry import AXES
from onnx2ncnn_opt.ir.view import MAX_DIMS, View
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.fold.sizes.movement import cut, taken
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.cast import as_numbers
from onnx2ncnn_opt.onnx.lower.functional.repeat import batch_beside, dims_around, repeated
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Ints, Sizes, Tensor, Value

_OPEN = -233  # Crop: to the end
_MODES = {"constant": Padding.CONSTANT, "edge": Padding.REPLICATE, "reflect": Padding.REFLECT}


@onnx_op("Slice", integers=True, moves=(0,), axes="same")
def slice1(im: ImportContext, x: Tensor, *, starts: Ints, ends: Ints, axes: Ints = ()) -> Value:
    """Crop."""
    return slice10(im, x, starts, ends, axes or None)


@onnx_op("Slice", since=10, integers=True, moves=(0,), axes="same")
def slice10(
    im: ImportContext, x: Tensor, starts: Sizes, ends: Sizes, axes: Ints | None = None, steps: Ints | None = None
) -> Value:
    """Crop; other steps than 1 as Pooling of one element, negative ones behind a Flip."""
    lengths = {len(starts), len(ends), *(len(given) for given in (axes, steps) if given is not None)}
    if len(lengths) > 1 or (axes is None and len(starts) > x.rank):
        raise im.refuse(f"its starts, ends, axes and steps differ in number, or are more than {x.rank}")
    if steps is not None and 0 in steps:
        raise im.refuse("the step is 0")
    which = im.axes(axes if axes is not None else range(len(starts)), x.rank)
    cuts = list(zip(which, starts, ends, steps or (1,) * len(starts), strict=True))
    counts = {axis: _count(x.shape[axis], start, end, step) for axis, start, end, step in cuts}
    if 0 in counts.values():
        return im.empty([counts.get(axis, size) for axis, size in enumerate(x.shape)], x.dtype)
    for axis, start, end, step in cuts:
        x = _slice(im, x, axis, start, end, step)
    return x


def _slice(im: ImportContext, x: Tensor, axis: int, start: Dim, end: Dim, step: int) -> Tensor:
    size = x.shape[axis]
    if isinstance(start, Sym) or isinstance(end, Sym):
        bounds = cut(size, start, end) if step > 0 else None
        if bounds is None:
            reason = f"[{start}:{end}:{step}] of an axis of size {size} depends on dynamic dimensions"
            raise im.refuse(reason, "bind them with --shape")
        x = crop(im, x, axis, *bounds) if bounds != (0, size) else x
        return x if step == 1 else _every(im, x, axis, step)
    if isinstance(size, Sym):
        if step < 0:
            first: Dim = 0 if start >= 2**31 - 1 else -1 - start
            if start < 0 and not at_least(size + start, 0):  # at least the first element is taken
                first = smaller(first, size - 1)
            last = -1 - end if end > -(2**31) + 1 else 2**31 - 1
            return _slice(im, flip(im, x, axis), axis, first, last, -step)
        if end == 0:  # the whole axis to ncnn
            raise im.refuse(f"[{start}:0] is empty, and ncnn has no empty tensors")
        if start < 0 and not at_least(size + start, 0):  # ncnn would take elements before the axis
            bounds = cut(size, start, end)
            assert bounds is not None
            x = crop(im, x, axis, *bounds)
        elif start != 0 or end < 2**31 - 1:
            x = crop(im, x, axis, start, end if end < 2**31 - 1 else _OPEN)
        return x if step == 1 else _every(im, x, axis, step)
    places = taken(size, start, end, step)
    begin, count = places.start, len(places)
    if step < 0 and count > 1:
        x = flip(im, x, axis)
        begin, step = size - 1 - begin, -step
    if count == 1:
        step = 1
    if begin > 0 or begin + (count - 1) * step + 1 < size:
        x = crop(im, x, axis, begin, begin + (count - 1) * step + 1)
    return x if step == 1 else _every(im, x, axis, step)


def _count(size: Dim, start: Dim, end: Dim, step: int) -> Dim | None:
    """How many elements a slice of an axis has; None where that is not fixed."""
    if isinstance(size, Sym) or isinstance(start, Sym) or isinstance(end, Sym):
        return None
    return len(taken(size, start, end, step))


def crop(im: ImportContext, x: Tensor, axis: int, start: Dim, end: Dim) -> Tensor:
    """The elements from `start` to before `end` (negative: from the end, -233: to the end) of an axis."""
    lying = im.along(x, [axis])
    dim = lying.view.dim_of(axis)
    if dim is None:
        return x  # a size of 1: all there is
    if isinstance(start, int) and isinstance(end, int):
        blob = im.layer("Crop", lying.blob, starts=(start,), ends=(end,), axes=(dim,))
        return Tensor(blob, resized(lying.view, axis, blob.known_shape[dim]), x.dtype)
    [starts, ends], others = im.stated([(start,), (end,)], lying.blob)
    blob = im.layer("Crop", lying.blob, *others, starts_expr=starts, ends_expr=ends, axes_expr=str(dim))
    return Tensor(blob, resized(lying.view, axis, end - start), x.dtype)


def flip(im: ImportContext, x: Tensor, axis: int) -> Tensor:
    """The axis backwards."""
    lying = im.along(x, [axis])
    dim = lying.view.dim_of(axis)
    return x if dim is None else im.like(lying, im.layer("Flip", lying.blob, axes=(dim,)))


def _every(im: ImportContext, x: Tensor, axis: int, step: int) -> Tensor:
    """Every `step`-th element, the first included: a max pooling over windows of one element."""
    x = as_numbers(im, x)
    before = [a for a in range(axis) if x.view.axes[a]]
    after = [a for a in range(axis + 1, x.rank) if x.view.axes[a]]
    batch = [before.pop(0)] if before and x.view.batch and x.view.axes[before[0]] == x.view.batch else []
    dims = [before, [axis], after]
    blob = im.mat(x, dims, batch)
    blob = im.layer("Pooling", blob, kernel_w=1, stride_w=1, stride_h=step, pad_mode=1)
    shape = tuple(blob.known_shape[1] if a == axis else n for a, n in enumerate(x.shape))
    return im.wrap(blob, shape, dims, batch, x.dtype)


def resized(view: View, axis: int, size: Dim) -> View:
    """The view after a layer has changed the size of an axis that is a dim of its own."""
    atoms = View.of((size,), [[0]]).axes[0]
    dim = view.dim_of(axis)
    return View(
        view.batch,
        tuple(atoms if i == dim else group for i, group in enumerate(view.dims)),
        tuple(atoms if i == axis else group for i, group in enumerate(view.axes)),
    )


def pick(im: ImportContext, x: Tensor, axis: int, indices: Array) -> Tensor:
    """ONNX Gather with constant indices: Crop for each run of neighbours, and Concat."""
    size = x.shape[axis]
    flat = indices.reshape(-1)
    if isinstance(size, int):
        if flat.size and (flat.min() < -size or flat.max() >= size):
            raise im.refuse(f"indices {flat.min()} to {flat.max()} are not all in an axis of size {size}")
        flat = np.where(flat < 0, flat + size, flat)
    if not flat.size:
        raise im.refuse("no indices: ncnn has no empty tensors")
    picked = _picked(im, x, axis, [int(i) for i in flat])
    shape: Shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    result = im.reshape(picked, shape)
    assert isinstance(result, Tensor)
    return result


def _picked(im: ImportContext, x: Tensor, axis: int, indices: list[int]) -> Tensor:
    steps, size = {b - a for a, b in pairwise(indices)}, x.shape[axis]
    if len(steps) <= 1 and 0 not in steps and isinstance(size, int):
        step = steps.pop() if steps else 1
        stop = indices[-1] + (1 if step > 0 else -1)
        return _slice(im, x, axis, indices[0], stop if stop >= 0 else -(2**31), step)
    rows, count, step = _rows(indices)
    if 1 < rows <= step and isinstance(size, int) and 0 <= indices[0] <= size - step * count:
        # Every step-th element of so many neighbours each, as torch's unfold has them: patches, transposed.
        lying = _slice(im, x, axis, indices[0], indices[0] + step * count, 1)
        patches = im.tensor(im.reshape(lying, (*x.shape[:axis], count, step, *x.shape[axis + 1 :])))
        few = _slice(im, patches, axis + 1, 0, rows, 1)
        order = [*range(axis), axis + 1, axis, *range(axis + 2, few.rank)]
        turned = few.viewed(few.view.transpose(order))
        return im.tensor(im.reshape(turned, (*x.shape[:axis], len(indices), *x.shape[axis + 1 :])))
    times = next((i for i, index in enumerate(indices) if index != indices[0]), len(indices))
    if 1 < times < len(indices) and indices == [index for index in indices[::times] for _ in range(times)]:
        each = _picked(im, x, axis, indices[::times])
        apart = im.tensor(im.reshape(each, (*each.shape[: axis + 1], 1, *each.shape[axis + 1 :])))
        grown = repeated(im, apart, [times if a == axis + 1 else 1 for a in range(apart.rank)])
        return im.tensor(im.reshape(grown, (*x.shape[:axis], len(indices), *x.shape[axis + 1 :])))
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1 != 0:
            runs[-1].append(index)
        else:
            runs.append([index])
    lying = im.along(x, [axis])
    dim = lying.view.dim_of(axis)
    if dim is None:  # size 1: the same element again and again
        return repeated(im, lying, [len(indices) if a == axis else 1 for a in range(x.rank)])
    made = {run: _run(im, lying.blob, dim, size, *run) for run in dict.fromkeys((run[0], len(run)) for run in runs)}
    parts = [made[run[0], len(run)] for run in runs]
    blob = im.layer("Concat", *parts, axis=dim) if len(parts) > 1 else parts[0]
    return Tensor(blob, resized(lying.view, axis, len(indices)), x.dtype)


def _run(im: ImportContext, blob: Blob, dim: int, size: Dim, start: int, count: int) -> Blob:
    """So many elements of an axis from an index on, which are there even if its size is open."""
    if start < 0 or at_least(size, start + count):
        return im.layer("Crop", blob, starts=(start,), ends=(start + count or _OPEN,), axes=(dim,))
    names = AXES[len(blob.known_shape)]
    params: dict[str, Any] = {f"out{name}": _OPEN for name in names}
    return im.layer("Crop", blob, **params | {f"{names[dim]}offset": start, f"out{names[dim]}": count})


def _rows(indices: list[int]) -> tuple[int, int, int]:
    """Of rows of so many indices, each a step behind the other, that begin one beside the other: their numbers."""
    step = indices[1] - indices[0] if len(indices) > 1 else 1
    count = next((i for i, (a, b) in enumerate(pairwise(indices), 1) if b - a != step), len(indices))
    rows = len(indices) // count
    grid = np.arange(rows)[:, None] + step * np.arange(count) + indices[0]
    return (rows, count, step) if grid.reshape(-1).tolist() == indices else (1, len(indices), 1)


@onnx_op("Pad", axes="same")
def pad2(im: ImportContext, x: Tensor, *, pads: Ints, mode: str = "constant", value: float = 0.0) -> Value:
    """Padding; the amounts are attributes before opset 11."""
    return _pad(im, x, pads, mode, value, None)


@onnx_op("Pad", since=11, integers=True, axes="same")
def pad11(
    im: ImportContext,
    x: Tensor,
    pads: Sizes,
    constant_value: Array | None = None,
    axes: Ints | None = None,
    *,
    mode: str = "constant",
) -> Value:
    """Padding; negative amounts as Crop."""
    x = as_numbers(im, x)
    value = 0.0 if constant_value is None else float(constant_value.reshape(-1)[0])
    return _pad(im, x, pads, mode, value, axes)


@onnx_op("CenterCropPad", since=18, integers=True)
def center_crop_pad(im: ImportContext, x: Tensor, shape: Ints, *, axes: Ints = ()) -> Value:
    """Crop of the axes that shrink, Padding of those that grow."""
    places = im.axes(axes or range(x.rank), x.rank)
    if len(places) != len(shape) or min(shape) < 1:
        raise im.refuse(f"the shape {shape} for {len(places)} axes")
    before, after = [], []
    for axis, wanted in zip(places, shape, strict=True):
        size = x.shape[axis]
        if not isinstance(size, int):
            raise im.refuse(f"axis {axis} is dynamic", "bind it with --shape")
        less = abs(wanted - size) // 2
        more = abs(wanted - size) - less
        before.append(less if wanted > size else -less)
        after.append(more if wanted > size else -more)
    return pad11(im, x, (*before, *after), axes=tuple(places))


def _pad(im: ImportContext, x: Tensor, pads: Sizes, mode: str, value: float, axes: Ints | None) -> Tensor:
    if mode not in _MODES and mode != "wrap":
        raise im.refuse(f"mode {mode} is not known")
    n = len(pads) // 2
    if len(pads) != 2 * (x.rank if axes is None else len(axes)):
        raise im.refuse(f"{len(pads)} pads for {x.rank if axes is None else len(axes)} axes")
    which = im.axes(axes, x.rank) if axes is not None else list(range(n))
    open_ = {a: (pads[i], pads[n + i]) for i, a in enumerate(which) if not _are_fixed(pads[i], pads[n + i])}
    for axis, sides in open_.items():
        x = _pad_openly(im, x, axis, *sides, mode, value)
    given = {a: (pads[i], pads[n + i]) for i, a in enumerate(which) if a not in open_ and (pads[i] or pads[n + i])}
    amounts = {axis: (known([begin])[0], known([end])[0]) for axis, (begin, end) in given.items()}
    grown = {a: (max(b, 0), max(e, 0)) for a, (b, e) in amounts.items() if b > 0 or e > 0}
    shrinks_openly = any(min(sides) < 0 and isinstance(x.shape[axis], Sym) for axis, sides in amounts.items())
    if mode == "constant" and grown and shrinks_openly:  # first, so that nothing is empty in between
        x, grown = _padding(im, x, grown, mode, value), {}
    for axis, (begin, end) in amounts.items():
        if begin < 0 or end < 0:
            size = x.shape[axis]
            if isinstance(size, int) and -min(begin, 0) - min(end, 0) >= size:
                raise im.refuse(f"pads {pads} take away all of an axis")
            x = crop(im, x, axis, max(0, -begin), min(end, 0) or _OPEN)
    amounts = grown
    for axis, (begin, end) in amounts.items():
        size = x.shape[axis]
        if mode == "reflect" and isinstance(size, int) and max(begin, end) >= size:
            raise im.refuse(f"reflecting {max(begin, end)} elements of an axis of size {size}")
    if mode == "wrap":
        for axis, (begin, end) in amounts.items():
            x = _wrapped(im, x, axis, begin, end)
        return x
    return _padding(im, x, amounts, mode, value) if amounts else x


def _are_fixed(*sizes: Dim) -> bool:
    return all(isinstance(size, int) for size in sizes)


def _pad_openly(im: ImportContext, x: Tensor, axis: int, begin: Dim, end: Dim, mode: str, value: float) -> Tensor:
    """Padding by as much as the amounts can become, and a Crop of what is too much."""
    if mode == "wrap":
        raise im.refuse(f"mode {mode} with dynamic pads of {begin} and {end}", "bind sizes with --shape")
    before, behind = at_most(begin), at_most(end)
    positive = at_least(begin, 0) and at_least(end, 0)
    if mode == "reflect" and positive:
        return _reflected(im, x, axis, begin, end)
    if not positive or before is None or behind is None:
        reason = f"pads of {begin} and {end}, which may be below 0, or any number"
        raise im.refuse(reason, "bind sizes with --shape")
    wide = _padding(im, x, {axis: (before, behind)}, mode, value) if before or behind else x
    return crop(im, wide, axis, before - begin, before + x.shape[axis] + end)


def _reflected(im: ImportContext, x: Tensor, axis: int, begin: Dim, end: Dim) -> Tensor:
    """The axis between all that can be reflected of it, and a Crop of what is too much."""
    lying, size = im.along(x, [axis]), x.shape[axis]
    dim = lying.view.dim_of(axis)
    if dim is None:  # size 1: there is nothing to reflect
        return x
    mirrored, parts, before = flip(im, lying, axis), [lying], larger(size - 1, 1)
    if begin != 0:
        parts.insert(0, crop(im, mirrored, axis, 0, before))
    if end != 0:
        parts.append(crop(im, mirrored, axis, smaller(size - 1, 1), size))
    blob = im.layer("Concat", *(part.blob for part in parts), axis=dim)
    whole = Tensor(blob, resized(lying.view, axis, blob.known_shape[dim]), x.dtype)
    first = before if begin != 0 else 0
    return crop(im, whole, axis, first - begin, first + size + end)


def _wrapped(im: ImportContext, x: Tensor, axis: int, begin: int, end: int) -> Tensor:
    """The last elements of an axis before it, and the first ones behind it."""
    size = x.shape[axis]
    if not isinstance(size, int) or max(begin, end) > size:
        raise im.refuse(f"{max(begin, end)} elements wrapped around an axis of size {size}")
    lying = im.along(x, [axis])
    dim = lying.view.dim_of(axis)
    if dim is None:  # size 1: the same element again and again
        return repeated(im, lying, [1 + begin + end if a == axis else 1 for a in range(x.rank)])
    parts = [lying.blob]
    if begin:
        parts.insert(0, im.layer("Crop", lying.blob, starts=(size - begin,), ends=(size,), axes=(dim,)))
    if end:
        parts.append(im.layer("Crop", lying.blob, starts=(0,), ends=(end,), axes=(dim,)))
    blob = im.layer("Concat", *parts, axis=dim)
    return Tensor(blob, resized(lying.view, axis, begin + size + end), x.dtype)


def _padding(im: ImportContext, x: Tensor, amounts: dict[int, tuple[int, int]], mode: str, value: float) -> Tensor:
    """One Padding layer where the axes fit into a Mat of which it pads up to three dims (of four: all but c)."""
    batch = batch_beside(x, amounts)
    dims = dims_around(x, amounts, batch)
    if len(amounts) > 3 or not _can_pad(dims, amounts):
        if len(amounts) > 1:
            for axis, both in amounts.items():
                x = _padding(im, x, {axis: both}, mode, value)
            return x
        [axis] = amounts
        rest = [a for a in range(x.rank) if a not in batch]
        groups = tuple(a for a in rest if a < axis), (axis,), tuple(a for a in rest if a > axis)
        dims = [group for group in groups if group]
    sides = {"w": ("left", "right"), "h": ("top", "bottom"), "c": ("front", "behind"), "d": ("front", "behind")}
    params: dict[str, Any] = {}
    for axis, (begin, end) in amounts.items():
        before, behind = sides[AXES[len(dims)][dims.index((axis,))]]
        params |= {before: begin, behind: end}
    blob = im.layer("Padding", im.mat(x, dims, batch), type=_MODES[mode], value=value, **params)
    shape = tuple(n + sum(amounts.get(axis, (0, 0))) for axis, n in enumerate(x.shape))
    return im.wrap(blob, shape, dims, batch, x.dtype)


def _can_pad(dims: list[tuple[int, ...]], axes: Collection[int]) -> bool:
    return len(dims) < MAX_DIMS or (len(dims) == MAX_DIMS and dims[0][0] not in axes)
