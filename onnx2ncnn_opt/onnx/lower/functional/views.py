"""Changes of a tensor's axes, most of which need no layer, and repetition along axes."""

import re
from collections.abc import Collection, Sequence
from itertools import groupby

from onnx2ncnn_opt.ir.dim import Dim, calls, names_in, shape_text, substituted, symbol
from onnx2ncnn_opt.ir.view import MAX_DIMS, Atom, View, flat
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.layout import Layout
from onnx2ncnn_opt.onnx.value import Ints, Tensor, Value


def rows(im: ImportContext, x: Tensor, axis: int) -> Tensor:
    """Return the tensor with the axes from `axis` on as the innermost dim of the Mat, in as few layers as possible."""
    inner = tuple(range(axis, x.rank))
    if x.view.dims[-1] == flat(x.view.axes[axis:]):
        return x
    outer = [a for a in range(axis) if x.view.axes[a]]
    batch = outer[:1] if outer and outer[0] == x.batch_axis else []
    outer = outer[len(batch) :]
    dims = [(a,) for a in outer] if len(outer) <= 2 else [tuple(outer)]
    return im.in_layout(x, Layout((*dims, inner), tuple(batch)))


def with_rank(x: Tensor, rank: int) -> Tensor:
    """Prepend axes of size 1 up to a rank."""
    return x.viewed(x.view.with_axes(((),) * (rank - x.rank) + x.view.axes))


def transposed(x: Value) -> Value:
    """Swap the last two axes."""
    return x if x.rank < 2 else x.transpose((*range(x.rank - 2), x.rank - 1, x.rank - 2))


def squeeze(im: ImportContext, x: Tensor, axes: Ints | None = None) -> Tensor:
    """Drop axes of size 1; by default all, and dynamic dimensions stay and must not be 1."""
    if axes is None:
        axes = tuple(i for i, size in enumerate(x.shape) if size == 1)
        for size in x.shape:
            im.demand(size, 2)
    dropped = set(im.axes(axes, x.rank))
    if any(x.shape[axis] != 1 for axis in dropped):
        raise im.invalid(f"axes {sorted(dropped)} of {shape_text(x.shape)} are not all of size 1")
    return x.viewed(x.view.with_axes(group for axis, group in enumerate(x.view.axes) if axis not in dropped))


def unsqueeze(im: ImportContext, x: Tensor, axes: Ints) -> Tensor:
    """Insert axes of size 1."""
    rank = x.rank + len(axes)
    new = im.axes(axes, rank)
    groups = iter(x.view.axes)
    return x.viewed(x.view.with_axes(() if axis in new else next(groups) for axis in range(rank)))


def repeated(im: ImportContext, x: Tensor, repeats: Sequence[int]) -> Tensor:
    """Repeat as numpy.tile does, by one Tile, or by one for each axis if that needs more than four dims."""
    grown = [axis for axis, n in enumerate(repeats) if n != 1]
    if not grown:
        return x
    dims, batch = dims_around(x, grown)
    is_cheap = len(dims) <= MAX_DIMS and im.cost(x, Layout(tuple(dims), tuple(batch))) < 2 * len(grown)
    if not is_cheap and all(x.shape[axis] == 1 for axis in grown):
        for axis in grown:
            x = _spread(im, x, axis, repeats[axis])
        return x
    if len(dims) > MAX_DIMS:
        for axis in grown:
            x = repeated(im, x, [n if a == axis else 1 for a, n in enumerate(repeats)])
        return x
    counts = tuple(int(repeats[group[0]]) if group[0] in grown else 1 for group in dims)
    blob = im.layer("Tile", im.mat(x, dims, batch), repeats=counts)
    return im.wrap(blob, tuple(size * n for size, n in zip(x.shape, repeats, strict=True)), dims, batch, x.dtype)


def _spread(im: ImportContext, x: Tensor, axis: int, count: int) -> Tensor:
    """Repeat an axis of size 1, as a new dim of the Mat between the dims before and after it."""
    before = set(flat(x.view.axes[:axis]))
    atoms = flat(x.view.dims)
    cut = next((i for i, atom in enumerate(atoms) if atom not in before), len(atoms))
    around = [group for group in (atoms[:cut], None, atoms[cut:]) if group != ()]
    dim = around.index(None)
    one = im.in_mat(x, tuple(group or () for group in around), x.view.batch)
    blob = im.layer("Tile", one.blob, repeats=tuple(count if i == dim else 1 for i in range(len(around))))
    new = (Atom(count),)
    dims = tuple(new if i == dim else group for i, group in enumerate(one.view.dims))
    axes = tuple(new if a == axis else group for a, group in enumerate(x.view.axes))
    return Tensor(blob, View(x.view.batch, dims, axes), x.dtype)


def dims_around(x: Tensor, axes: Collection[int]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return dims and batch for a layer on `axes`, each of which is a dim; merge other axes if there are too many.

    The dims are in the order of the tensor's own Mat, if each is a dim there, and none of `axes` is the first of four.
    """
    batch = [] if x.batch_axis is None or x.batch_axis in axes else [x.batch_axis]
    dims: list[tuple[int, ...]] = [(a,) for a in range(x.rank) if a not in batch and (x.shape[a] != 1 or a in axes)]
    if len(dims) <= MAX_DIMS:
        places = {dim: x.view.dim_of(dim[0]) for dim in dims}
        here = sorted(dims, key=lambda dim: places[dim] or 0)
        is_laid_out = None not in places.values() and not (len(dims) == MAX_DIMS and here[0][0] in axes)
        return here if is_laid_out else dims, batch
    others = groupby((axis for (axis,) in dims), lambda axis: axis if axis in axes else None)
    return [tuple(run) for _, run in others], batch


def multiples_of(im: ImportContext, size: Dim, total: Dim) -> Sequence[tuple[Dim, Dim]]:
    """Return multiples for dimensions, as (h, 2 * h_2) for a `total` of h // 2 * 2, if only they make it the `size`."""
    names = names_in(size for info in im.model.inputs for size in info.shape)
    halves = {str(call.a): call.b for call in calls(total) if call.operator == "//" and isinstance(call.b, int)}
    # torch names a multiple "16*h"; a new name is an identifier.
    new = {name: re.sub(r"\W+", "_", name.lstrip("0123456789*")) for name in names}
    multiples = {name: symbol(f"{new[name]}_{by}") * by for name, by in halves.items() if name in names}
    made = names_in(multiples.values())
    are_new = names.isdisjoint(made) and len(made) == len(multiples)
    fits = substituted(size, multiples) == substituted(total, multiples)
    return [(symbol(name), multiple) for name, multiple in multiples.items()] if fits and are_new else ()
