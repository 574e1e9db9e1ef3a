"""Scatter operators."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym, known, product
from onnx2ncnn_opt.ir.permute import inverted
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.fold.cells import Known, as_symbolic, is_dynamic, materialised, or_none
from onnx2ncnn_opt.onnx.fold.sizes import progression
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import add, arithmetic, binary, maximum, minimum, mul, number
from onnx2ncnn_opt.onnx.lower.functional.cast import as_float, as_numbers
from onnx2ncnn_opt.onnx.lower.functional.concat import concat
from onnx2ncnn_opt.onnx.lower.functional.crop import crop, from_front, pick
from onnx2ncnn_opt.onnx.lower.functional.division import mod
from onnx2ncnn_opt.onnx.lower.functional.gather import (
    as_indices,
    check_indices,
    fixed,
    flat_indices,
    gather,
    gather_elements,
    nonnegative_indices,
    numbers_of,
    repeated_rows,
    run_of,
)
from onnx2ncnn_opt.onnx.lower.functional.logic import equals
from onnx2ncnn_opt.onnx.lower.functional.matmul import matmul
from onnx2ncnn_opt.onnx.lower.functional.reduce import reduce
from onnx2ncnn_opt.onnx.lower.functional.symbolic_tensor import arange
from onnx2ncnn_opt.onnx.lower.functional.views import unsqueeze
from onnx2ncnn_opt.onnx.lower.functional.where import where
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Operand, SymbolicTensor, Tensor, Value

_MOST_PIECES, _MOST_ROUNDS = 256, 32
_MOST_PAIRS = 2**22  # comparisons of an element with an update
_REDUCTIONS: Mapping[str, Callable[..., Value]] = {"add": add, "mul": mul, "max": maximum, "min": minimum}
_NEUTRAL = {"add": 0.0, "mul": 1.0, "max": -np.inf, "min": np.inf}
_REDUCERS = {"mul": "ReduceProd", "max": "ReduceMax", "min": "ReduceMin"}


@onnx_op("ScatterND", since=11, later=("reduction",), integers=True, folds=True)
@onnx_op("ScatterND", since=16, integers=True, folds=True)
def scatter_nd(im: ImportContext, data: Value, indices: Operand, updates: Operand, *, reduction: str = "none") -> Value:
    """Concat of old and new rows, or the reduction of both."""
    _check_reduction(im, reduction)
    depth = indices.shape[-1]
    if not isinstance(depth, int) or not 1 <= depth <= data.rank:
        raise im.invalid(f"indices of {depth} axes into rank {data.rank}")
    if 0 in indices.shape:
        return data
    if isinstance(indices, SymbolicTensor):
        phases, shape = _phases(indices, data.shape)
        if shape != data.shape:
            new = scatter_nd(im, im.reshape(data, shape), phases, updates, reduction=reduction)
            return im.reshape(new, data.shape)
        placed = _scatter_beside(im, data, indices, updates, reduction)
        if placed is not None:
            return placed
        indices = im.tensor(indices)
    updates = im.tensor(updates) if isinstance(updates, SymbolicTensor) else updates
    if isinstance(indices, Constant):
        return _scatter(im, data, np.moveaxis(indices.array, -1, 0), updates, data.rank - depth, reduction)
    return _scatter_rows(im, data, flat_indices(im, indices, data.shape[:depth], 0), updates, depth, reduction)


def _phases(indices: SymbolicTensor, shape: Shape) -> tuple[SymbolicTensor, Shape]:
    """Return indices and a shape in which the step of every step-th index, as of ``x[::2] = y``, is an axis."""
    cells = indices.cells
    for k, size in enumerate(indices.shape[:-1]):
        listed = or_none(progression, cells, k, 0) if cells.shape[k] == size else None
        cells = cells if listed is None else listed
    columns, sizes = [], []
    for column, size in zip(np.moveaxis(cells, -1, 0), shape, strict=False):
        run = run_of(column.flat[0], indices.rank, any_step=True) if column.size == 1 else None
        count = indices.shape[run.axis] if run and run.axis is not None else 0
        is_phase = run and isinstance(run.step, int) and run.step > 1 and run.start in range(run.step)
        if run and is_phase and count * run.step == size:
            columns += [(column - run.start) // run.step, np.full_like(column, run.start)]
            sizes += [count, run.step]
        else:
            columns, sizes = [*columns, column], [*sizes, size]
    places = (*indices.shape[:-1], len(columns))
    return replace(indices, cells=np.stack(columns, -1), shape=places), (*sizes, *shape[cells.shape[-1] :])


def _scatter_beside(
    im: ImportContext, data: Value, indices: SymbolicTensor, updates: Operand, reduction: str
) -> Value | None:
    """Scatter to constant places beside dynamic runs, as ``x[:, 2, n - 4 :] = y``; None for others."""
    last, depth, x = indices.rank - 1, indices.cells.shape[-1], indices
    for k in range(last):  # a list of n - 2 and n - 1 is a run
        is_listed = x.cells.shape[k] > 1 and is_dynamic(*x.cells.flat)
        cells = or_none(progression, x.cells, k, 0) if is_listed else None
        x = x if cells is None else replace(x, cells=cells)
    starts = [run for cell in x.cells.flat if (run := run_of(cell, x.rank)) and isinstance(run.start, Sym)]
    open_axes = [k for k, size in enumerate(x.shape) if isinstance(size, Sym) or k in {run.axis for run in starts}]
    kept = [k for k in range(last) if k not in open_axes]
    for k in (*kept, last):
        x = or_none(materialised, x, k) or x
    cells = np.moveaxis(x.cells, -1, 0).reshape(depth, -1)
    found = [run_of(row[0], x.rank) if (row == row[0]).all() else None for row in cells]
    runs = {run.axis: (axis, run.start) for axis, run in enumerate(found) if run is not None and run.axis in open_axes}
    picked = [axis for axis in range(depth) if axis not in dict(runs.values())]
    rows = (*indices.shape[:-1], *data.shape[depth:])
    for size in updates.shape:  # no blob is empty
        im.try_demand(size, 1)
    are_rows = [*map(im.within_limits, updates.shape)] == [*map(im.within_limits, rows)]
    if not are_rows or not (picked or (reduction == "none" and not kept)) or is_dynamic(*cells[picked].flat):
        return None
    if len(runs) < len(open_axes) or cells.shape[1] != math.prod(known(tuple(indices.shape[k] for k in kept))):
        return None
    levels, inside = [], data
    for k in open_axes:
        axis, start = runs[k]
        levels.append((inside, axis, start))
        for size in (start, data.shape[axis] - start - indices.shape[k]):
            im.try_demand(size, int(size != 0))
        count = im.within_limits(indices.shape[k])
        if start != 0 or count != data.shape[axis]:
            inside = crop(im, im.tensor(inside), axis, start, start + count)
    order = [*picked, *(runs[k][0] for k in open_axes), *range(depth, data.rank)]
    if isinstance(updates, SymbolicTensor):  # of the sizes that are left
        updates = im.tensor(replace(updates, shape=tuple(map(im.within_limits, updates.shape))))
    new = updates.transpose([*kept, *open_axes, *range(last, updates.rank)])
    if picked:
        index = cells[picked].reshape(len(picked), *(x.cells.shape[k] for k in kept)).astype(np.int64)
        new = _scatter(im, inside.transpose(order), index, new, data.rank - len(picked), reduction)
    new = new.transpose(inverted(order))
    for outer, axis, start in reversed(levels):
        new = _joined(im, outer, new, axis, start)
    return new


def _joined(im: ImportContext, data: Value, new: Value, axis: int, start: Dim) -> Value:
    """Return the data with new elements in place of its own from `start` on along an axis."""
    size, end = (im.within_limits(n) for n in (data.shape[axis], start + new.shape[axis]))
    parts: list[Value] = []
    for first, last in ((0, start), (end, size)):
        if first != last and not im.try_demand(last - first, 1):
            raise im.refuse(f"it leaves {last - first} elements, which may be none", "bind sizes with --shape")
        parts += [crop(im, im.tensor(data), axis, first, last)] if first != last else []
        parts += [new] if first == 0 else []
    return concat(im, *parts, axis=axis)


@onnx_op("Scatter", since=9, later=("reduction",), integers=True)
@onnx_op("ScatterElements", since=11, later=("reduction",), integers=True, folds=True)
@onnx_op("ScatterElements", since=16, integers=True, folds=True)
def scatter_elements(
    im: ImportContext, data: Value, indices: Operand, updates: Value, *, axis: int = 0, reduction: str = "none"
) -> Value:
    """Concat of old and new rows, or the reduction of both."""
    _check_reduction(im, reduction)
    if indices.rank != data.rank:
        raise im.invalid(f"indices of rank {indices.rank} for rank {data.rank}")
    axis = im.axis(axis, data.rank)
    rows = None if isinstance(indices, Tensor) else _rows_of(indices, axis)
    if rows is not None and updates.shape == indices.shape == (*data.shape[:axis], len(rows), *data.shape[axis + 1 :]):
        size, first = data.shape[axis], int(rows[0])  # as of x[:, 2] = y
        if isinstance(size, Sym) and reduction == "none" and first < 0 and (np.diff(rows) == 1).all():
            return _joined(im, data, updates, axis, size + first)
        order = [axis, *(a for a in range(data.rank) if a != axis)]
        moved, new = data.transpose(order), updates.transpose(order)
        return _scatter(im, moved, rows[None], new, data.rank - 1, reduction).transpose(inverted(order))
    if isinstance(indices, (Tensor, SymbolicTensor)):
        return _scatter_cells(im, data, im.tensor(indices), updates, axis, reduction)
    targets: list[Array] = list(np.indices(indices.array.shape))
    targets[axis] = indices.array
    return _scatter(im, data, np.stack(targets), updates, 0, reduction)


def _rows_of(indices: Known, axis: int) -> Array | None:
    """Return the indices of rows along an axis; None if they are dynamic, or are not the same for all other axes."""
    listed = or_none(materialised, as_symbolic(indices), axis)
    if listed is None or is_dynamic(*listed.cells.flat):
        return None
    rows = np.moveaxis(listed.cells, axis, 0).reshape(listed.cells.shape[axis], -1).astype(np.int64)
    return rows[:, 0] if rows.size and (rows == rows[:, :1]).all() else None


@onnx_op("TensorScatter", since=24, integers=True, axes="same")
def tensor_scatter(
    im: ImportContext,
    past_cache: Value,
    update: Value,
    write_indices: Value | None = None,
    *,
    axis: int = -2,
    mode: str = "linear",
) -> Value:
    """Concat of old and new rows."""
    along = im.axis(axis, past_cache.rank)
    batch, length, new = _size(im, past_cache, 0), _size(im, past_cache, along), _size(im, update, along)
    if along == 0:
        raise im.refuse("it writes along the axis of the batch", "give it another axis")
    perm = [0, along, *(a for a in range(1, past_cache.rank) if a != along)]
    cache, rows = past_cache.transpose(perm), update.transpose(perm)
    if isinstance(write_indices, Tensor):
        begins = im.tensor(im.reshape(as_numbers(im, write_indices), (batch, 1)))
        row: Value = as_indices(im, binary(im, BinaryOp.ADD, begins, Constant(np.arange(new, dtype=np.float32))))
        if mode == "circular":
            row = mod(im, row, Constant(np.array(length)))
        starts = length * np.arange(batch, dtype=np.float32)[:, None]
        flat = as_indices(im, binary(im, BinaryOp.ADD, row, Constant(starts)))
        placed = _scatter_rows(im, cache, flat, rows, 2, "none")
    else:
        first = np.zeros(batch, np.int64) if write_indices is None else write_indices.array
        targets = first[:, None] + np.arange(new)
        items = np.broadcast_to(np.arange(batch)[:, None], targets.shape)
        index = np.stack([items, targets % length if mode == "circular" else targets])
        placed = _scatter(im, cache, index, rows, past_cache.rank - 2)
    return placed.transpose(inverted(perm))


def _check_reduction(im: ImportContext, reduction: str) -> None:
    if reduction not in ("none", *_REDUCTIONS):
        raise im.invalid(f"reduction {reduction} is not known")


def _scatter(
    im: ImportContext, data: Value, targets: Array, updates: Value, rest: int, reduction: str = "none"
) -> Value:
    """Return the data after ``data[targets] = updates`` over all axes except the last `rest`, or after a reduction."""
    if len(targets) == 1 and isinstance(data.shape[0], Sym) and reduction == "none" and targets.min(initial=0) >= 0:
        return _place_along(im, data, updates, targets.reshape(-1), 0)
    sizes = fixed(im, data.shape[: data.rank - rest])
    rows = [from_front(im, index, size).reshape(-1) for index, size in zip(targets, sizes, strict=True)]
    inner = data.shape[data.rank - rest :]
    if updates.shape != (*targets.shape[1:], *inner):
        raise im.invalid(f"updates of shape {list(updates.shape)}, not {[*targets.shape[1:], *inner]}")
    if not targets.size:
        return data
    if reduction != "none":
        return _reduced(im, data, np.ravel_multi_index(rows, sizes), updates, inner, reduction)
    box = [np.unique(row) for row in rows]
    grid = [axis.reshape(-1) for axis in np.meshgrid(*box, indexing="ij")]
    if all(np.array_equal(row, axis) for row, axis in zip(rows, grid, strict=True)):
        return _place(im, data, im.reshape(updates, (*map(len, box), *inner)), box, 0)
    flat, count = np.ravel_multi_index(rows, sizes), math.prod(sizes)
    columns = im.reshape(data, (count, *inner)), im.reshape(updates, (flat.size, *inner))
    return im.reshape(_place_along(im, *columns, flat, 0), data.shape)


def _scatter_rows(im: ImportContext, data: Value, targets: Tensor, updates: Value, depth: int, reduction: str) -> Value:
    """Scatter rows of updates to `targets`, indices into the merged first `depth` axes."""
    inner = fixed(im, data.shape[depth:])
    if updates.shape != (*targets.shape, *inner):
        raise im.invalid(f"updates of shape {list(updates.shape)}, not {[*targets.shape, *inner]}")
    old, new = product(data.shape[:depth]), product(targets.shape)
    row = im.tensor(im.reshape(targets, (1, new)))
    if reduction != "none":
        size = math.prod(inner)
        cells = im.reshape(data, (1, old, size)), im.reshape(updates, (1, new, size))
        return im.reshape(_combined(im, *cells, _hits(im, row, old, size), reduction), data.shape)
    both = concat(im, im.reshape(data, (old, *inner)), im.reshape(updates, (new, *inner)), axis=0)
    source = im.reshape(_sources(im, row, old), (old,))
    return im.reshape(gather(im, both, as_indices(im, source)), data.shape)


def _scatter_cells(im: ImportContext, data: Value, indices: Tensor, updates: Value, axis: int, reduction: str) -> Value:
    """Scatter single elements to computed indices along an axis."""
    shape, index_shape, size = data.shape, indices.shape, data.shape[axis]
    others = [a for a in range(data.rank) if a != axis]
    if updates.shape != index_shape or any(index_shape[a] != shape[a] for a in others):
        raise im.refuse(
            f"indices of shape {list(index_shape)} computed at run time, and updates of shape {list(updates.shape)}, "
            f"for {list(shape)}",
            f"such indices must cover the other axes than {axis}",
        )
    order, count = [*others, axis], product(tuple(shape[a] for a in others))
    check_indices(im, indices)
    rows = repeated_rows(indices, axis)
    if rows is not None:
        moved, new = data.transpose([axis, *others]), updates.transpose([axis, *others])
        rows = as_indices(im, nonnegative_indices(im, rows, size))
        return _scatter_rows(im, moved, rows, new, 1, reduction).transpose(inverted([axis, *others]))
    indices = as_indices(im, nonnegative_indices(im, indices, size))
    old, targets, new = (im.reshape(x.transpose(order), (count, x.shape[axis])) for x in (data, indices, updates))
    row = im.tensor(targets)
    if reduction == "none":
        both = concat(im, old, new, axis=1)
        result: Value = im.tensor(gather_elements(im, both, _sources(im, row, size), axis=1))
    else:
        old, new = (im.reshape(x, (*x.shape, 1)) for x in (old, new))
        result = _combined(im, old, new, _hits(im, row, size, 1), reduction)
    return im.reshape(result, tuple(shape[a] for a in order)).transpose(inverted(order))


def _combined(im: ImportContext, data: Value, updates: Value, hits: Tensor, reduction: str) -> Value:
    """Reduce data [rows, elements, size] with the updates [rows, count, size] that `hits` assigns to each element."""
    combine = _REDUCTIONS[reduction]
    if reduction == "add" and (isinstance(updates.shape[1], Sym) or im.range_of(updates).is_finite):
        return combine(im, data, matmul(im, hits.transpose((0, 2, 1)), updates))
    count = updates.shape[1]
    new = im.reshape(updates, (*updates.shape[:2], 1, *updates.shape[2:]))
    x = im.tensor(where(im, im.tensor(im.reshape(hits, (*hits.shape, 1))), new, number(_NEUTRAL[reduction])))
    if isinstance(count, Sym):
        x = reduce(im, x, _REDUCERS[reduction], (1,), 0)
        is_hit = unsqueeze(im, reduce(im, hits, "ReduceMax", (1,), 0), (2,))
        return where(im, is_hit, combine(im, data, x), data)
    # In pairs, because ncnn's Reduction starts from the largest finite number.
    while count > 1:
        half = count // 2
        pairs = combine(im, crop(im, x, 1, 0, half), crop(im, x, 1, half, 2 * half))
        x = im.tensor(concat(im, pairs, crop(im, x, 1, 2 * half, count), axis=1) if count % 2 else pairs)
        count -= half
    return combine(im, data, im.reshape(x, data.shape))


def _sources(im: ImportContext, targets: Tensor, size: Dim) -> Tensor:
    """Return the source index of each of `size` elements in the concatenation of elements and updates.

    It is the last update of the element, or the element itself. Each row of elements has a row of targets.
    """
    hits = _hits(im, targets, size, 1)
    numbers = arithmetic(im, BinaryOp.ADD, arange(im, targets.shape[1], 0, 2), numbers_of(im, size))
    last = reduce(im, binary(im, BinaryOp.MUL, hits, numbers), "ReduceMax", (1,), 0)
    return as_indices(im, binary(im, BinaryOp.MAX, last, arange(im, size, 0, 1)))


def _hits(im: ImportContext, targets: Tensor, size: Dim, elements: int) -> Tensor:
    """Compare targets [rows, count] with each of `size` indices: 1 if equal, else 0; refused if that is too much."""
    rows, count, least = (1 if isinstance(n, Sym) else n for n in (*targets.shape, size))
    if rows * count * least * elements > _MOST_PAIRS:
        raise im.refuse(
            f"{count} indices computed at run time into {size} elements, {rows * elements} times: too many to compare",
            "scatter fewer indices, or make them constant",
        )
    return equals(im, unsqueeze(im, as_float(im, targets), (2,)), arange(im, size, 0, 1))


def _reduced(im: ImportContext, data: Value, targets: Array, updates: Value, inner: Shape, reduction: str) -> Value:
    """Reduce rows with updates at constant targets; several updates of one row are applied in successive rounds."""
    order = np.argsort(targets, kind="stable")
    rounds = np.empty_like(targets)
    rounds[order] = np.arange(targets.size) - np.searchsorted(targets[order], targets[order])
    if rounds.max() >= _MOST_ROUNDS:
        reason = f"its constant indices name one element {rounds.max() + 1} times"
        raise im.refuse(reason, "add up the updates of an element before")
    rows = im.reshape(data, (product(data.shape[: data.rank - len(inner)]), *inner))
    new = im.reshape(updates, (targets.size, *inner))
    for k in range(rounds.max() + 1):
        chosen = order[rounds[order] == k]
        result = _REDUCTIONS[reduction](im, _rows(im, rows, targets[chosen], 0), _rows(im, new, chosen, 0))
        rows = _place_along(im, rows, result, targets[chosen], 0)
    return im.reshape(rows, data.shape)


def _place(im: ImportContext, data: Value, updates: Value, box: list[Array], axis: int) -> Value:
    """Return the data after ``data[box] = updates``; the box has sorted indices for each axis from `axis` on."""
    partial = [a for a in range(axis, len(box)) if len(box[a]) < _size(im, data, a)]
    if not partial:
        return updates
    first, *others = partial
    if others:
        updates = _place(im, _rows(im, data, box[first], first), updates, box, first + 1)
    return _place_along(im, data, updates, box[first], first)


def _place_along(im: ImportContext, data: Value, updates: Value, rows: Array, axis: int) -> Value:
    """Replace `rows` of an axis by the rows of `updates`: Concat of runs of old and new rows."""
    whole = data.shape[axis]
    size = int(rows.max()) + 1 if isinstance(whole, Sym) else whole
    steps = {*np.diff(rows).tolist()}
    if len(steps) == 1 and 0 <= rows[0] < (step := steps.pop()) and step * rows.size == size and step > 1:
        phases = im.reshape(data, (*data.shape[:axis], rows.size, step, *data.shape[axis + 1 :]))
        new = im.reshape(updates, (*updates.shape[: axis + 1], 1, *updates.shape[axis + 1 :]))
        return im.reshape(_place_along(im, phases, new, rows[:1], axis + 1), data.shape)
    source = np.arange(size)
    source[rows] = size + np.arange(rows.size)  # the last of several updates of an element counts
    runs = np.split(source, np.flatnonzero(np.diff(source) != 1) + 1)
    if len(runs) > _MOST_PIECES:
        reason = f"its constant indices cut the operand into more than {_MOST_PIECES} pieces"
        raise im.refuse(reason, "scatter fewer runs of elements")
    parts = [_rows(im, data, run, axis) if run[0] < size else _rows(im, updates, run - size, axis) for run in runs]
    if size != whole:
        im.demand(whole, size + 1)  # no blob is empty
        parts.append(crop(im, im.tensor(data), axis, size, whole))
    return concat(im, *parts, axis=axis)


def _rows(im: ImportContext, x: Value, rows: Array, axis: int) -> Value:
    return Constant(x.array.take(rows, axis)) if isinstance(x, Constant) else pick(im, x, axis, rows)


def _size(im: ImportContext, x: Value, axis: int) -> int:
    (size,) = fixed(im, (x.shape[axis],))
    return size
