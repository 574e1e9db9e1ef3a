"""Selection of elements along an axis: Crop for a slice, Slice for a split, Crops and Concat for other indices."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial, reduce
from itertools import pairwise
from typing import Any

import numpy as np

from onnx2ncnn_opt.ir.codes import PadMode
from onnx2ncnn_opt.ir.dim import AXES, Dim, Shape, Sym, at_least, larger, product, smaller
from onnx2ncnn_opt.ir.graph import Blob
from onnx2ncnn_opt.ir.view import View
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.fold.sizes import ENDLESS, slice_ends
from onnx2ncnn_opt.onnx.lower.checks import Refusal
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.cast import as_numbers
from onnx2ncnn_opt.onnx.lower.functional.views import repeated, unsqueeze
from onnx2ncnn_opt.onnx.value import Constant, Tensor, Value
from onnx2ncnn_opt.tail.operators.checks import slice_indices

TO_END = -233  # Crop: to the end
MOST_RUNS = 256  # runs of constant indices that become one Crop each
Lookup = Callable[[Tensor, int, Array], Tensor]  # picks indices along an axis without Crops


def sliced(im: ImportContext, x: Tensor, axis: int, start: Dim, end: Dim, step: int) -> Tensor:
    """ONNX's slice [start:end:step] of an axis, which must not be empty: Crop, Pooling for steps, Flip."""
    size = x.shape[axis]
    if isinstance(start, Sym) or isinstance(end, Sym):
        x = _between_dynamic(im, x, axis, start, end, step)
    elif isinstance(size, Sym):
        if step < 0:
            return sliced(im, flip(im, x, axis), axis, *_flipped(size, start, end), -step)
        x = _of_dynamic(im, x, axis, start, end)
    else:
        elements = slice_indices(size, start, end, step)
        if step < 0 and len(elements) > 1:
            x = flip(im, x, axis)
            elements = range(size - 1 - elements.start, size - elements[-1], -step)
        step = elements.step if len(elements) > 1 else 1
        if elements.start > 0 or elements[-1] + 1 < size:
            x = crop(im, x, axis, elements.start, elements[-1] + 1)
    return x if step == 1 or x.shape[axis] == 1 else _strided(im, x, axis, step)


def _between_dynamic(im: ImportContext, x: Tensor, axis: int, start: Dim, end: Dim, step: int) -> Tensor:
    """Return all elements between two bounds, one of which depends on dynamic dimensions."""
    size = x.shape[axis]
    # A table that is cut around its middle, as [64 - n:63 + n], has to be long enough.
    demand = im.try_demand if isinstance(size, Sym) else im.try_demand_place
    bounds = slice_ends(size, start, end, demand) if step > 0 else None
    if bounds is None:
        reason = f"[{start}:{end}:{step}] of an axis of size {size} depends on dynamic dimensions"
        raise im.refuse(reason, "bind them with --shape")
    first, last = (im.within_limits(bound) for bound in bounds)
    return crop(im, x, axis, first, last) if (first, last) != (0, size) else x


def _of_dynamic(im: ImportContext, x: Tensor, axis: int, start: int, end: int) -> Tensor:
    """Return all elements between two bounds of an axis of dynamic size."""
    if end == 0:  # in ncnn, 0 is the end of the axis
        raise im.refuse(f"[{start}:0] is empty, and ncnn has no empty tensors", "slice one element at least")
    size = x.shape[axis]
    bounds = slice_ends(size, start, end) if start < 0 and not at_least(size + start, 0) else None
    if bounds is not None:  # ncnn would read before the axis
        return crop(im, x, axis, *bounds)
    if start == 0 and end >= ENDLESS:
        return x
    return crop(im, x, axis, start, end if end < ENDLESS else TO_END)


def _flipped(size: Dim, start: int, end: int) -> tuple[Dim, int]:
    """Return the bounds, in the flipped axis, of a slice with a negative step."""
    first: Dim = 0 if start >= 2**31 - 1 else -1 - start
    if start < 0 and not at_least(size + start, 0):  # ONNX clamps the start to the axis
        first = smaller(first, size - 1)
    return first, -1 - end if -(2**31) + 1 < end < 2**31 - 1 else 2**31 - 1


def slice_count(size: Dim, start: Dim, end: Dim, step: int) -> Dim | None:
    """Return the number of elements of a slice of an axis; None if it is dynamic."""
    if isinstance(start, Sym) or isinstance(end, Sym):
        return None
    if isinstance(size, Sym):
        return 0 if step > 0 and (end == 0 or (start >= end and (start < 0) == (end < 0))) else None
    return len(slice_indices(size, start, end, step))


def crop(im: ImportContext, x: Tensor, axis: int, start: Dim, end: Dim) -> Tensor:
    """Return the elements from `start` to before `end` (negative: from the end, -233: to the end) of an axis."""
    if not x.view.axes[axis]:
        return x  # size 1
    size = x.shape[axis]
    if isinstance(start, int) and isinstance(end, int):
        is_single = end == start + 1 > 0 and isinstance(size, int)
        laid_out, dim, inner = sliceable(im, x, axis, is_single)
        ends = (end if end == TO_END else end * inner,)
        blob = im.layer("Crop", laid_out.blob, starts=(start * inner,), ends=ends, axes=(dim,))
        view = resized(laid_out.view, axis, blob.known_shape[dim] if inner == 1 else 1)
    else:
        laid_out, dim, _ = sliceable(im, x, axis)
        [begin, stop], others = im.size_expressions([(start,), (end,)], laid_out.blob)
        blob = im.layer("Crop", laid_out.blob, *others, starts_expr=begin, ends_expr=stop, axes_expr=str(dim))
        view = resized(laid_out.view, axis, end - start)
    result = Tensor(blob, view, x.dtype)
    if isinstance(size, Sym):
        bounds = (at if isinstance(at, Sym) or at >= 0 else size + (at != TO_END) * at for at in (start, end))
        first, last = (smaller(bound, top) for bound, top in zip(bounds, (size - 1, size), strict=True))
        im.note_longer(result, axis, partial(crop, im, x, axis, first, larger(last, first + 1)))
    return result


def crop_axes(im: ImportContext, x: Tensor, ranges: Mapping[int, tuple[Dim, Dim]]) -> Tensor:
    """Return the elements of several axes from a start to before an end, in one Crop if possible."""
    laid_out, texts = im.separated(x, [*ranges]) if len(ranges) > 1 else None, None
    if laid_out is not None:
        with suppress(Refusal):  # together, the expressions may be too long
            texts, others = im.size_expressions([*zip(*ranges.values(), strict=True)], laid_out.blob)
    if laid_out is None or texts is None:
        return reduce(lambda x, axis: crop(im, x, axis, *ranges[axis]), ranges, x)
    axes, view = ",".join(str(laid_out.view.dim_of(axis)) for axis in ranges), laid_out.view
    blob = im.layer("Crop", laid_out.blob, *others, starts_expr=texts[0], ends_expr=texts[1], axes_expr=axes)
    for axis, (start, end) in ranges.items():
        view = resized(view, axis, end - start)
    return Tensor(blob, view, x.dtype)


def flip(im: ImportContext, x: Tensor, axis: int) -> Tensor:
    """Reverse an axis."""
    laid_out = im.along(x, [axis])
    dim = laid_out.view.dim_of(axis)
    return x if dim is None else im.like(laid_out, im.layer("Flip", laid_out.blob, axes=(dim,)))


def _strided(im: ImportContext, x: Tensor, axis: int, step: int) -> Tensor:
    """Return every `step`-th element from the first on, by max pooling over windows of one element."""
    x = as_numbers(im, x)
    axes = [a for a in range(x.rank) if x.view.axes[a]]
    batch = axes[:1] if axes[0] == x.batch_axis != axis else []
    dims = [[a for a in axes if a < axis and a not in batch], [axis], [a for a in axes if a > axis]]
    blob = im.mat(x, dims, batch)
    blob = im.layer("Pooling", blob, kernel_w=1, stride_w=1, stride_h=step, pad_mode=PadMode.VALID)
    shape = tuple(blob.known_shape[1] if a == axis else n for a, n in enumerate(x.shape))
    return im.wrap(blob, shape, dims, batch, x.dtype)


def sliceable(im: ImportContext, x: Tensor, axis: int, is_single: bool = False) -> tuple[Tensor, int, int]:
    """Return a layout with an axis as a Mat dim, the dim, and the number of its elements per element of the axis.

    To take single elements (`is_single`), the axis may also be the outer part of a dim. Then each of its elements is a
    run of the dim. That saves a Reshape.
    """
    atoms = x.view.axes[axis]
    for dim, group in enumerate(x.view.dims if is_single else ()):
        run = product(atom.size for atom in group[len(atoms) :])
        if group[: len(atoms)] == atoms and isinstance(run, int):
            return x, dim, run
    laid_out = im.along(x, [axis])
    alone = laid_out.view.dim_of(axis)
    assert alone is not None
    return laid_out, alone, 1


def resized(view: View, axis: int, size: Dim) -> View:
    """Return the view with another size of an axis, which is a Mat dim, or the outer part of a dim."""
    old, new = view.axes[axis], View.of((size,), [[0]]).axes[0]
    dims = (new + group[len(old) :] if group[: len(old)] == old else group for group in view.dims)
    return View(view.batch, tuple(dims), tuple(new if i == axis else group for i, group in enumerate(view.axes)))


def pick(im: ImportContext, x: Tensor, axis: int, indices: Array, lookup: Lookup | None = None) -> Tensor:
    """ONNX Gather with constant indices: Crop for each run of consecutive indices, and Concat; `lookup` if too many."""
    size = x.shape[axis]
    flat = indices.reshape(-1)
    if isinstance(size, int):
        flat = from_front(im, flat, size)
    elif flat.size:
        im.demand(size, int(max(flat.max() + 1, -flat.min())))
    if not flat.size:
        raise im.refuse("no indices: ncnn has no empty tensors", "remove the node, or pick one element at least")
    picked = _picked(im, x, axis, [int(i) for i in flat], lookup)
    shape: Shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    return im.tensor(im.reshape(picked, shape))


def from_front(im: ImportContext, indices: Array, size: int) -> Array:
    """Return indices into an axis counted from its front; raise Refusal if one is out of range."""
    if indices.size and (indices.min() < -size or indices.max() >= size):
        raise im.invalid(f"indices {indices.min()} to {indices.max()} are not all in an axis of size {size}")
    return np.where(indices < 0, indices + size, indices)


def _picked(im: ImportContext, x: Tensor, axis: int, indices: list[int], lookup: Lookup | None) -> Tensor:
    """Return the elements by the first method that fits the indices."""
    return (
        _by_slice(im, x, axis, indices)
        or _by_strided_rows(im, x, axis, indices)
        or _by_repeats(im, x, axis, indices, lookup)
        or _by_runs(im, x, axis, indices, lookup)
    )


def _by_slice(im: ImportContext, x: Tensor, axis: int, indices: list[int]) -> Tensor | None:
    """Pick indices with equal steps."""
    steps = {b - a for a, b in pairwise(indices)}
    if len(steps) > 1 or 0 in steps or not isinstance(x.shape[axis], int):
        return None
    step = steps.pop() if steps else 1
    stop = indices[-1] + (1 if step > 0 else -1)
    return sliced(im, x, axis, indices[0], stop if stop >= 0 else -(2**31), step)


def _by_strided_rows(im: ImportContext, x: Tensor, axis: int, indices: list[int]) -> Tensor | None:
    """Pick rows with consecutive starts, as in torch's unfold: [0, 2, 4, 1, 3, 5] is a transposed [3, 2]."""
    size, (rows, count, step) = x.shape[axis], _rows(indices)
    if not 1 < rows <= step or not isinstance(size, int) or not 0 <= indices[0] <= size - step * count:
        return None
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    laid_out = sliced(im, x, axis, indices[0], indices[0] + step * count, 1)
    patches = im.tensor(im.reshape(laid_out, (*before, count, step, *after)))
    few = sliced(im, patches, axis + 1, 0, rows, 1)
    transposed = few.transpose([*range(axis), axis + 1, axis, *range(axis + 2, few.rank)])
    return im.tensor(im.reshape(transposed, (*before, len(indices), *after)))


def _by_repeats(im: ImportContext, x: Tensor, axis: int, indices: list[int], lookup: Lookup | None) -> Tensor | None:
    """Pick indices that all come the same number of times in a row."""
    times = next((i for i, index in enumerate(indices) if index != indices[0]), len(indices))
    if not 1 < times < len(indices) or indices != np.repeat(indices[::times], times).tolist():
        return None
    column = unsqueeze(im, _picked(im, x, axis, indices[::times], lookup), (axis + 1,))
    copies = repeated(im, column, [times if a == axis + 1 else 1 for a in range(column.rank)])
    return im.tensor(im.reshape(copies, (*x.shape[:axis], len(indices), *x.shape[axis + 1 :])))


def _by_runs(im: ImportContext, x: Tensor, axis: int, indices: list[int], lookup: Lookup | None) -> Tensor:
    """Pick runs of consecutive indices; `lookup` if there are too many."""
    flat, size = np.array(indices), x.shape[axis]
    cuts = np.flatnonzero((np.diff(flat) != 1) | (flat[1:] == 0)) + 1  # 0 after -1 is at the other end
    runs = [(int(run[0]), run.size) for run in np.split(flat, cuts)]  # first index and count
    if lookup is not None and len(set(runs)) > MOST_RUNS:
        return lookup(x, axis, flat)
    laid_out = im.along(x, [axis])
    dim = laid_out.view.dim_of(axis)
    if dim is None:  # size 1: all indices are 0
        return repeated(im, laid_out, [len(indices) if a == axis else 1 for a in range(x.rank)])
    crops = {run: _run(im, laid_out.blob, dim, size, *run) for run in dict.fromkeys(runs)}
    blob = im.layer("Concat", *(crops[run] for run in runs), axis=dim) if len(runs) > 1 else crops[runs[0]]
    return Tensor(blob, resized(laid_out.view, axis, len(indices)), x.dtype)


def _run(im: ImportContext, blob: Blob, dim: int, size: Dim, start: int, count: int) -> Blob:
    """Return `count` elements of an axis from `start` on, which must exist, even if the size is dynamic."""
    if start < 0 or at_least(size, start + count):
        return im.layer("Crop", blob, starts=(start,), ends=(start + count or TO_END,), axes=(dim,))
    names = AXES[len(blob.known_shape)]
    params: dict[str, Any] = {f"out{name}": TO_END for name in names}
    return im.layer("Crop", blob, **params | {f"{names[dim]}offset": start, f"out{names[dim]}": count})


def _rows(indices: list[int]) -> tuple[int, int, int]:
    """Return the number of rows, indices per row and step, for strided rows that begin at consecutive indices."""
    step = indices[1] - indices[0] if len(indices) > 1 else 1
    count = next((i for i, (a, b) in enumerate(pairwise(indices), 1) if b - a != step), len(indices))
    rows = len(indices) // count
    grid = np.arange(rows)[:, None] + step * np.arange(count) + indices[0]
    return (rows, count, step) if grid.reshape(-1).tolist() == indices else (1, len(indices), 1)


def split(im: ImportContext, x: Value, axis: int, sizes: Sequence[int]) -> tuple[Value, ...]:
    """Split an axis into parts of these sizes, by one Slice; return constants for a constant."""
    axis = im.axis(axis, x.rank)
    size = x.shape[axis]
    if isinstance(size, int) and sum(sizes) != size:
        raise im.invalid(f"parts of {tuple(sizes)} do not make up the axis of size {size}")
    if min(sizes, default=0) < 0:
        raise im.invalid(f"parts of {tuple(sizes)}")
    if isinstance(x, Constant):
        return tuple(Constant(part) for part in np.split(x.array, np.cumsum(sizes)[:-1], axis))
    if 0 in sizes:
        whole = iter(split(im, x, axis, [*filter(None, sizes)]))
        empty = im.empty((*x.shape[:axis], 0, *x.shape[axis + 1 :]), x.dtype)
        return tuple(next(whole) if part else empty for part in sizes)
    if len(sizes) == 1:
        return (x,)
    laid_out, dim, inner = sliceable(im, x, axis, is_single=set(sizes) == {1})
    slices = tuple(part * inner for part in sizes)
    blobs = im.layers("Slice", laid_out.blob, outputs=len(sizes), slices=slices, axis=dim)
    pairs = zip(blobs, sizes, strict=True)
    return tuple(Tensor(blob, resized(laid_out.view, axis, part), x.dtype) for blob, part in pairs)
