"""Layouts: a Mat's dims and batch in terms of a tensor's own axes, and the choice of one layout for several tensors.

A layout lists the axes of the batch and of each dim, outermost first. It may omit axes of size 1.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import combinations, groupby
from typing import NamedTuple, TypeAlias

from onnx2ncnn_opt.ir.dim import Dim, Shape, broadcast, fitting
from onnx2ncnn_opt.ir.view import MAX_DIMS, Atom, Atoms, Dims, View, flat, refine
from onnx2ncnn_opt.onnx.value import Tensor

Cost: TypeAlias = Callable[["Layout"], int]
_Presence: TypeAlias = "list[tuple[bool | int, ...]]"


class Layout(NamedTuple):
    """The axes of each Mat dim, and of the batch count."""

    dims: tuple[tuple[int, ...], ...]
    batch: tuple[int, ...] = ()

    @classmethod
    def plain(cls, rank: int, batch: int | None) -> "Layout":
        """Return the layout in which each axis except the batch axis is a dim."""
        return cls(tuple((axis,) for axis in range(rank) if axis != batch) or ((),), () if batch is None else (batch,))

    def atoms(self, view: View) -> tuple[Dims, Atoms]:
        """Return the atoms of a tensor's dims and batch in this layout."""
        return tuple(flat(view.axes[a] for a in group) for group in self.dims), flat(view.axes[a] for a in self.batch)


def plain_dims(shape: Shape) -> list[list[int]]:
    """Return each axis except those of size 1 as a dim; all as one dim if they exceed four."""
    kept = [axis for axis, size in enumerate(shape) if size != 1]
    return [[axis] for axis in kept] or [[]] if len(kept) <= MAX_DIMS else [kept]


def first_batch(shape: Shape) -> int | None:
    """Return axis 0 if it can be a Mat's batch without a layer, or has to be; else None."""
    return 0 if len(shape) > 1 and (shape[0] == 1 or len(shape) > MAX_DIMS) else None


def output_layout(x: Tensor, requested: int | None, cost: Cost) -> tuple[Layout, int | None] | None:
    """Return the layout in which an output leaves the net, and its batch axis: as requested, else the cheapest."""
    one = [axis for axis in range(x.rank) if x.shape[axis] == 1]
    batches: list[int | None] = [*(a for a in one if a == 0 and x.rank > 1), None, *(a for a in one if a != 0)]
    if x.batch_axis is not None and x.rank > 1:  # a Mat needs a dim in addition to its batch
        batches = [x.batch_axis, *batches]
    if x.rank > MAX_DIMS:  # one axis has to be the batch
        batches += [axis for axis, size in enumerate(x.shape) if isinstance(size, int)]
    layouts = [(Layout.plain(x.rank, batch), batch) for batch in (batches if requested is None else [requested])]
    options = [(layout, batch) for layout, batch in layouts if len(layout.dims) <= MAX_DIMS]
    return min(options, key=lambda option: cost(option[0]), default=None)


def _axes_of(view: View, atoms: Atoms) -> tuple[int, ...] | None:
    """Return the axes that a sequence of atoms consists of; None if it contains a part of an axis."""
    axis_of = {atom: axis for axis, group in enumerate(view.axes) for atom in group}
    axes = tuple(dict.fromkeys(axis_of[atom] for atom in atoms))
    return axes if flat(view.axes[axis] for axis in axes) == atoms else None


def align(views: Sequence[View], whole: Collection[int] = ()) -> tuple[list[View], list[int]] | None:
    """Return the views over common finer axes, and for each fine axis the original axis.

    Example: if one view has factors 2 and 3 on axis 0, and another 6, both get 2 and 3, of the original axes 0 and 0.
    All views must have the same number of axes; on each axis they have the same size, or size 1. The axes `whole` are
    not split, and may differ in size. None if two views' factors of an axis have no common refinement.
    """
    views, rank = list(views), len(views[0].axes)
    for axis in range(rank):
        first, *others = [i for i, view in enumerate(views) if view.axes[axis] and axis not in whole] or [0]
        for i in others * 2:  # twice, so the first views get the cuts of later ones, too
            if len(views[i].axes[axis]) == 1 == len(views[first].axes[axis]):
                continue  # one atom each: they broadcast at run time, even if their names differ
            pair = refine(views[first], axis, views[i], axis)
            if pair is None:
                return None
            views[first], views[i] = pair
    cuts: list[tuple[int, slice]] = []  # the axis and its atoms for each fine one
    for axis in range(rank):
        pieces = max(len(view.axes[axis]) for view in views)
        cuts += [(axis, slice(None))] if axis in whole else [(axis, slice(i, i + 1)) for i in range(pieces)]
    fine = [view.with_axes(view.axes[axis][atoms] for axis, atoms in cuts) for view in views]
    return fine, [axis for axis, _ in cuts]


def presence(views: Sequence[View], axis: int) -> tuple[bool | int, ...]:
    """Return for each of the aligned views whether it has an axis: axes of equal presence may share a dim.

    Example: for shapes [2, 3, 4, 5] and [1, 3, 4, 1], the axes of sizes 3 and 4 may be one dim of 12.
    """
    # If one view's size may be 1 at run time and another's not, the axis has a unique presence.
    sizes = {atom.size for view in views for atom in view.axes[axis]}
    is_unique = any(fitting(a, b) is None for a, b in combinations(sizes, 2))
    return (*(bool(view.axes[axis]) for view in views), axis if is_unique else -1)


def broadcast_axis(axes: Sequence[Atoms]) -> Atoms:
    """Return the result of broadcasting axes of at most one atom each."""
    present = [atoms for atoms in axes if atoms]
    size: Dim = 1
    for [atom] in present:
        size = broadcast(size, atom.size) or size
    return next((atoms for atoms in present if atoms[0].size == size), (Atom(size),) if present else ())


def common_layout(
    views: Sequence[View], origin: Sequence[int], costs: Sequence[Cost | None], whole: int | None = None
) -> Layout | None:
    """Return the layout that all aligned views reach with the fewest layers; None if none fits into four dims.

    `views` and `origin` are results of `align`. Of several layouts, choose the one with the most dims that are exactly
    one original axis, which suits later consumers. `costs` are functions for the number of layers that a view needs for
    a layout; None for a constant, which has any layout for free, but no batch. The axis `whole` must be a dim.
    """
    rank = len(views[0].axes)
    present = [presence(views, axis) for axis in range(rank)]
    if whole is not None:  # Concat does not broadcast: the sizes of all other axes are equal
        present = [of_axis[:-1] for of_axis in present]
    needed = [axis for axis in range(rank) if any(view.axes[axis] for view in views) or axis == whole]
    constants = [i for i, cost in enumerate(costs) if cost is None]
    originals = [tuple(axis for axis in needed if origin[axis] == original) for original in set(origin)]

    def fits(layout: Layout) -> bool:
        groups = (*layout.dims, layout.batch)
        return (
            len(layout.dims) <= MAX_DIMS
            and sorted({axis for group in groups for axis in group}) == needed
            and all(len({present[axis] for axis in group}) <= 1 for group in groups)
            and (whole is None or (whole,) in layout.dims)
            and not any(present[axis][i] for axis in layout.batch for i in constants)
        )

    def price(layout: Layout) -> tuple[int, int, int]:
        """Return the number of layers; if equal, Concat prefers fewer empty dims, because outputs have none."""
        plain = sum(group in originals for group in (*layout.dims, layout.batch))
        empty = layout.dims.count(()) if whole is not None else 0
        return sum(cost(layout) for cost in costs if cost is not None), empty, -plain

    tensors = [view for view, cost in zip(views, costs, strict=True) if cost is not None]
    candidates = dict.fromkeys(_candidates(tensors, present, needed, whole))  # without duplicates
    return min(filter(fits, candidates), key=price, default=None)


def _candidates(
    views: Sequence[View], present: _Presence, needed: Sequence[int], whole: int | None
) -> Iterator[Layout]:
    """Yield the layouts that the views have, and those of all axes in order; each also with axes merged."""
    batches: list[tuple[int, ...]] = []
    for view in views:
        batch = _axes_of(view, view.batch)
        if batch is None:
            continue
        batches.append(batch)
        groups = [_axes_of(view, group) for group in view.dims]
        layout = Layout(tuple(group for group in groups if group is not None), batch)
        if len(layout.dims) < len(groups):  # a dim contains only a part of an axis
            continue
        yield layout
        laid_out = [axis for group in layout.dims for axis in group]
        yield Layout(_merged(laid_out, present, whole), batch)
        if whole is not None and whole not in (*laid_out, *batch) and not view.axes[whole]:
            yield from _with_dim(layout, whole)
    for batch in dict.fromkeys([*batches, ()]):
        rest = [axis for axis in needed if axis not in batch]
        yield Layout(tuple((axis,) for axis in rest) or ((),), batch)
        yield Layout(_merged(rest, present, whole), batch)


def _with_dim(layout: Layout, axis: int) -> Iterator[Layout]:
    """Yield the layout with an axis of size 1 as a dim of its own: an empty dim, or a new one."""
    for i, group in enumerate(layout.dims):
        if not group:
            yield Layout((*layout.dims[:i], (axis,), *layout.dims[i + 1 :]), layout.batch)
    for i in range(len(layout.dims) + 1):
        if all((a < axis) == (k < i) for k, group in enumerate(layout.dims) for a in group):
            yield Layout((*layout.dims[:i], (axis,), *layout.dims[i:]), layout.batch)


def _merged(axes: list[int], present: _Presence, whole: int | None) -> tuple[tuple[int, ...], ...]:
    """Return axes as dims, with runs of equal presence merged; `whole` is a dim of its own."""
    return tuple(tuple(group) for _, group in groupby(axes, lambda axis: (axis == whole, present[axis]))) or ((),)


def combined(axes: Sequence[Atoms], origin: Sequence[int], rank: int, layout: Layout) -> View:
    """Return the view of a layer's result in `layout`; its `rank` axes consist of fine `axes` of the operands."""
    # New atoms, because operands may share an atom, which would then be in two axes of the result.
    fresh = tuple(tuple(Atom(atom.size) for atom in group) for group in axes)
    dims, batch = layout.atoms(View((), (), fresh))
    return View(batch, dims, tuple(flat(g for g, o in zip(fresh, origin, strict=True) if o == a) for a in range(rank)))


def separations(view: View, axes: Sequence[int]) -> Iterator[tuple[Dims, Atoms]]:
    """Yield dims and batch in which each of the axes is a dim: first the tensor's axes, then with the rest merged."""
    chosen = [view.axes[axis] for axis in axes]
    batch = view.batch if not set(view.batch) & set(flat(chosen)) else ()
    natural = tuple(group for group in view.axes if group and not set(group) <= set(batch))
    for dims in (
        _with_fewer(natural, chosen) if flat(natural) == tuple(a for a in flat(view.axes) if a not in batch) else None,
        _around(flat(view.dims) if batch == view.batch else view.batch + flat(view.dims), chosen),
        _around(tuple(atom for atom in flat(view.axes) if atom not in batch), chosen),
    ):
        if dims is not None and len(dims) <= MAX_DIMS:
            yield dims, batch


def _with_fewer(dims: Dims, kept: Sequence[Atoms]) -> Dims:
    """Merge neighbouring dims, innermost first and except `kept`, until four are left."""
    while len(dims) > MAX_DIMS:
        i = next((i for i in range(len(dims) - 1, 0, -1) if dims[i - 1] not in kept and dims[i] not in kept), 0)
        if not i:
            break
        dims = (*dims[: i - 1], dims[i - 1] + dims[i], *dims[i + 1 :])
    return dims


def _around(order: Atoms, groups: Sequence[Atoms]) -> Dims | None:
    """Cut `order` into dims: the groups, and the runs between them; return None if a group is not contiguous."""
    group_of = {atom: number for number, group in enumerate(groups) for atom in group}
    dims = tuple(tuple(dim) for _, dim in groupby(order, group_of.get))
    return dims if all(group in dims for group in groups) else None
