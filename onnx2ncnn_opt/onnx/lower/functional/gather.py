"""Gather operators: Crops and Concats for constant indices, unless there are very many.

Embed looks up int32 inputs in a constant table. GridSample does everything else: in mode nearest it copies the pixel at
an index. The indices are exact if the image is not larger than `_LARGEST_IMAGE`.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, Interp, PadMode, Pooling, Sample, SamplePadding, UnaryOp
from onnx2ncnn_opt.ir.dim import Call, Dim, Shape, Sym, at_least, is_fixed, known, product, symbol
from onnx2ncnn_opt.ir.graph import Blob
from onnx2ncnn_opt.ir.permute import inverted
from onnx2ncnn_opt.ir.view import View
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.fold.cells import as_constant, materialised, or_none
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import arithmetic, binary, expand, spread
from onnx2ncnn_opt.onnx.lower.functional.cast import as_numbers, float_array
from onnx2ncnn_opt.onnx.lower.functional.concat import concat
from onnx2ncnn_opt.onnx.lower.functional.crop import MOST_RUNS, TO_END, crop, from_front, pick, resized
from onnx2ncnn_opt.onnx.lower.functional.reduce import reduce
from onnx2ncnn_opt.onnx.lower.functional.symbolic_tensor import number_of
from onnx2ncnn_opt.onnx.value import (
    Constant,
    Operand,
    SymbolicTensor,
    Tensor,
    Value,
    element_type,
    held_as_float,
    is_float,
)

# Most runs of indices into several axes that become one Crop each; MOST_RUNS if an image would be too large.
_FEW_RUNS = 16
_LARGEST_IMAGE = 2**20


def gather(im: ImportContext, data: Value, indices: Operand, *, axis: int = 0) -> Value:
    """Crop for constant indices; Embed if int32 inputs index a constant table, else GridSample."""
    axis = im.axis(axis, data.rank)
    if isinstance(indices, SymbolicTensor):
        consecutive = _picked(im, data, axis, indices)
        if consecutive is not None:
            return consecutive
        indices = im.tensor(indices)
    if isinstance(indices, Constant):
        size = data.shape[axis]
        is_image = isinstance(size, int) and size <= _LARGEST_IMAGE
        return pick(im, im.tensor(data), axis, indices.array, partial(_looked_up, im) if is_image else None)
    check_indices(im, indices)
    others, size = [a for a in range(data.rank) if a != axis], data.shape[axis]
    are_int32 = element_type(indices.dtype) == "int32" and indices.blob.batch == 1
    if isinstance(data, Constant) and isinstance(size, int) and are_int32:
        table = float_array(im, data.array.transpose(axis, *others).reshape(size, -1))
        params = {"num_output": table.shape[1], "input_dim": size, "weight_data_size": table.size}
        blob = im.layer("Embed", im.mat(indices, [range(indices.rank)]), weights={"weight_data": table}, **params)
        return replaced(im, blob, data, axis, indices.shape, is_table=True)
    axes = range(indices.rank)
    blob = _sampled(im, image(im, data, others, [], [axis]), indices, [[], axes[:-1], axes[-1:]], size, 1)
    return replaced(im, blob, data, axis, indices.shape)


def replaced(im: ImportContext, blob: Blob, data: Value, axis: int, shape: Shape, *, is_table: bool = False) -> Tensor:
    """Return the result of a lookup: the axes of the indices, with this shape, replace the axis of the data."""
    kept = range(data.rank - 1)
    new = range(len(kept), len(kept) + len(shape))
    sizes = (*data.shape[:axis], *data.shape[axis + 1 :], *shape)
    result = im.wrap(blob, sizes, [new, kept] if is_table else [kept, new[:-1], new[-1:]], dtype=type_of(data))
    return result.transpose([*kept[:axis], *new, *kept[axis:]])


def _sampled(
    im: ImportContext, image: Blob, indices: Tensor, dims: Sequence[Sequence[int]], size: Dim, rows: Dim
) -> Blob:
    """Pick the pixels at `indices` from each row of an image of width `size`; `dims` is the layout of the indices."""
    targets = nonnegative_indices(im, indices, size)
    _check_size(im, *(1 if isinstance(count, Sym) else count for count in (size, rows)))
    if isinstance(size, Sym):
        centres = im.apply(targets, BinaryOp.ADD, 0.5)
        is_sum = sum(map(bool, size.terms)) > 1 and at_least(size, 0)  # of which a row of ones is shorter
        whole = number_of(im, size) if is_sum else numbers_of(im, size)
        share = binary(im, BinaryOp.DIV, centres, whole)
        return pixels(im, image, _grid(im, share, dims, 2.0, -1.0, rows))
    return pixels(im, image, _grid(im, targets, dims, 2 / size, 1 / size - 1, rows))


def _grid(im: ImportContext, x: Value, dims: Sequence[Sequence[int]], scale: float, shift: float, rows: Dim) -> Blob:
    """Return the grid [2, rows, indices] of GridSample: x-coordinates ``x * scale + shift``, and the row's y."""
    if rows == 1 and not dims[1]:  # y is x; numbers of 1 are exact if weights have 16 bits
        weights = {"A_data": np.ones(2), "C_data": np.ones(1)}
        params = {"constantA": 1, "constantC": 1, "constantM": 2, "constantK": 1, "transB": 1, "output_N1M": 1}
        column = im.mat(x, [dims[2], []])
        return im.layer("Gemm", column, weights=weights, alpha=scale, beta=shift / scale, **params)
    if rows == 1:
        return row_grid(im, im.layer("Tile", im.mat(x, dims), repeats=(2, 1, 1)), scale, shift)
    scaled = im.layer("BinaryOp", im.mat(x, dims), _planes(im, scale, 0), op_type=BinaryOp.MUL)
    return im.layer("BinaryOp", scaled, offsets(im, shift, rows), op_type=BinaryOp.ADD)


def row_grid(im: ImportContext, pairs: Blob, scale: float, shift: float) -> Blob:
    """Return the grid for an image of one row, of equal `pairs`: there, y is x, because any y will do."""
    weights = {"scale_data": np.full(2, scale, np.float32), "bias_data": np.full(2, shift, np.float32)}
    return im.layer("Scale", pairs, weights=weights, scale_data_size=2, bias_term=1)


def offsets(im: ImportContext, shift: float, rows: Dim) -> Blob:
    """Return the same x for all rows of a grid, and the y of each."""
    if not isinstance(rows, Sym):
        _check_size(im, 1, rows)
        return _planes(im, np.full(rows, shift), pixel_centres(rows))
    return im.mat(dynamic_centres(im, rows, shift), [[0], [1], []])


def dynamic_centres(im: ImportContext, size: Sym, *others: float) -> Tensor:
    """Return a row of the centres of pixels after rows of other numbers: a centre is the mean of two borders."""
    [text], blobs = im.size_expressions([(size + 1,)])
    ends = im.memory(np.array([*([x, x] for x in others), [-1, 1]], np.float32))
    borders = im.layer("Interp", ends, *blobs, resize_type=Interp.BILINEAR, align_corner=1, size_expr=text)
    centres = im.layer("Pooling1D", borders, pooling_type=Pooling.AVG, kernel_w=2, pad_mode=PadMode.VALID)
    return im.wrap(centres, (len(others) + 1, size), [[0], [1]])


def _planes(im: ImportContext, x: Array | float, y: Array | float) -> Blob:
    """Return numbers for the x and the y of each row of a grid."""
    return im.memory(np.stack([x, y]).astype(np.float32).reshape(2, -1, 1))


def numbers_of(im: ImportContext, *sizes: Dim) -> Value:
    """Return sizes as a row of numbers, or one as a scalar; dynamic sizes are computed at run time."""
    shape = () if len(sizes) == 1 else (len(sizes),)
    if not any(isinstance(size, Sym) for size in sizes):
        return Constant(np.array(sizes, np.float32).reshape(shape))
    return im.tensor(SymbolicTensor(np.array(sizes, dtype=object).reshape(shape), shape, np.dtype(np.float32)))


def _check_size(im: ImportContext, size: int, rows: int) -> None:
    if size * rows > _LARGEST_IMAGE:
        reason = f"a lookup in {rows} times {size} elements, whose indices float32 cannot tell apart"
        raise im.refuse(reason, "look up in a smaller table")


def pixel_centres(size: int) -> Array:
    """Return the centres of `size` pixels between -1 and 1: of four pixels -3/4, -1/4, 1/4 and 3/4."""
    return np.asarray((2 * np.arange(size) + 1) / size - 1)


def pixels(im: ImportContext, image: Blob, grid: Blob, padding: SamplePadding = SamplePadding.BORDER) -> Blob:
    """Return the pixels of an image of three dims at the x and y of a grid; -1 and 1 are the outer borders."""
    return im.layer("GridSample", image, grid, sample_type=Sample.NEAREST, padding_mode=padding, permute_fusion=1)


def image(im: ImportContext, data: Value, *dims: list[int]) -> Blob:
    """Return the operand as a float32 Mat of three dims."""
    if isinstance(data, Tensor):
        return im.mat(as_numbers(im, data), dims)
    sizes = [math.prod(data.array.shape[axis] for axis in group) for group in dims]
    return im.memory(float_array(im, data.array.transpose([axis for group in dims for axis in group]).reshape(sizes)))


def nonnegative_indices(im: ImportContext, indices: Tensor, *sizes: Dim) -> Tensor:
    """Return the indices as floats, with the axes' sizes added to negative ones."""
    indices = as_numbers(im, indices)
    if not np.issubdtype(indices.dtype, np.signedinteger) or im.range_of(indices).low >= 0:
        return indices
    negative = im.unary(im.apply(indices, UnaryOp.NEG), "Threshold", threshold=0.5)
    return binary(im, BinaryOp.ADD, indices, binary(im, BinaryOp.MUL, negative, numbers_of(im, *sizes)))


def check_indices(im: ImportContext, indices: Tensor) -> None:
    """Check that indices are integers."""
    if is_float(indices.dtype) or indices.dtype == np.bool_:
        raise im.invalid(f"indices of type {indices.dtype}")


def type_of(data: Value) -> np.dtype[np.generic]:
    """Return the type of the elements to look up."""
    return np.dtype(np.float32) if is_float(data.dtype) else held_as_float(data.dtype)


def gather_elements(im: ImportContext, data: Value, indices: Value, *, axis: int = 0) -> Operand:
    """Crop and Concat for constant indices of elements or whole rows; nothing for equal elements; else GridSample."""
    axis = im.axis(axis, data.rank)
    if indices.rank != data.rank:
        raise im.invalid(f"indices of rank {indices.rank} for rank {data.rank}")
    if isinstance(indices, Constant):
        return _constant_elements(im, im.tensor(data), indices.array, axis)
    check_indices(im, indices)
    if isinstance(data, Constant) and data.array.size and (data.array == data.array.flat[0]).all():  # as token types
        return as_constant(SymbolicTensor(data.array.flat[:1].reshape((1,) * data.rank), indices.shape, data.dtype))
    data, others = kept(im, data, indices.shape, axis)
    rows = repeated_rows(indices, axis)
    if rows is not None:
        return gather(im, data, rows, axis=axis)
    dims: list[list[int]] = [[], others, [axis]]
    count = product(tuple(indices.shape[a] for a in others))
    blob = _sampled(im, image(im, data, *dims), indices, dims, data.shape[axis], count)
    return im.wrap(blob, indices.shape, dims, dtype=type_of(data))


def kept(im: ImportContext, data: Value, shape: Shape, axis: int) -> tuple[Value, list[int]]:
    """Return the data of GatherElements, cropped to the indices' shape along all axes but one, and these axes."""
    others = [a for a in range(data.rank) if a != axis]
    if isinstance(data, Constant):
        sizes = dict(zip(others, fixed(im, tuple(shape[a] for a in others)), strict=True))
        return Constant(data.array[tuple(slice(sizes.get(a)) for a in range(data.rank))]), others
    for a in others:
        if shape[a] != data.shape[a]:
            data = crop(im, data, a, 0, shape[a])
    return data, others


def repeated_rows(indices: Tensor, axis: int) -> Tensor | None:
    """Return the indices along an axis if a Tile repeats them along all other axes: they pick whole rows."""
    view, tile = indices.view, indices.blob.made_by("Tile")
    if tile is None or tile.input.shape is None or len(tile.input.shape) != len(view.dims):
        return None
    tiled = {atom for size, group in zip(tile.input.shape, view.dims, strict=True) if size == 1 for atom in group}
    if tiled & {*view.axes[axis]} or any({*atoms} - tiled for a, atoms in enumerate(view.axes) if a != axis):
        return None
    dims = tuple(group if not tiled & {*group} else () for group in view.dims)
    return Tensor(tile.input, View(view.batch, dims, (view.axes[axis],)), indices.dtype)


def _constant_elements(im: ImportContext, data: Tensor, indices: Array, axis: int) -> Value:
    shape = fixed(im, data.shape)
    indices = from_front(im, indices, shape[axis])
    if not indices.size:
        raise im.refuse("no indices: ncnn has no empty tensors", "remove the node, or pick one element at least")
    for other in range(data.rank):
        if other != axis and indices.shape[other] < shape[other]:
            data = crop(im, data, other, 0, indices.shape[other])
    # Move the axes along which the indices are constant behind the others: whole slices are picked there.
    first = [a for a in range(data.rank) if a == axis or (indices != indices.take([0], a)).any()]
    order = [*first, *(a for a in range(data.rank) if a not in first)]
    ordered = data.transpose(order)
    distinct = indices.transpose(order).reshape(*(indices.shape[a] for a in first), -1)[..., 0]
    targets: list[Array] = list(np.indices(distinct.shape, sparse=True))
    targets[first.index(axis)] = distinct
    result = _take(im, ordered, targets, ordered.shape[: distinct.ndim])
    return result.transpose(inverted(order))


def gather_nd(im: ImportContext, data: Value, indices: Operand, *, batch_dims: int = 0) -> Value:
    """Crop and Concat of constant indices; else Gather from the flat tensor."""
    if isinstance(indices, SymbolicTensor):
        consecutive = None if batch_dims else _picked_nd(im, data, indices)
        if consecutive is not None:
            return consecutive
        indices = im.tensor(indices)
    depth = indices.shape[-1] if indices.rank else None
    if not isinstance(depth, int) or depth + batch_dims > data.rank:
        raise im.invalid(f"indices of shape {list(indices.shape)} into rank {data.rank}")
    picked = batch_dims + depth
    if isinstance(indices, Constant) and indices.array.min(initial=0) >= 0 and not is_fixed(data.shape[:picked]):
        indices = as_indices(im, Constant(indices.array.astype(np.float32)))
    if isinstance(indices, Tensor):
        flat_index = flat_indices(im, indices, data.shape[:picked], batch_dims)
        return gather(im, im.reshape(data, (product(data.shape[:picked]), *data.shape[picked:])), flat_index)
    sizes = fixed(im, data.shape[:picked])
    limits = np.array(sizes[batch_dims:])
    targets = indices.array
    if (targets < -limits).any() or (targets >= limits).any():
        raise im.invalid(f"indices are not all in axes of sizes {limits.tolist()}")
    targets = np.where(targets < 0, targets + limits, targets)
    outer = np.indices(targets.shape[:-1], sparse=True)[:batch_dims]
    return _take(im, im.tensor(data), [*outer, *np.moveaxis(targets, -1, 0)], sizes)


def flat_indices(im: ImportContext, indices: Tensor, sizes: Shape, batch_dims: int) -> Tensor:
    """Return multi-dimensional indices, given by the last axis of `indices`, as indices into the flattened axes."""
    check_indices(im, indices)
    strides = [product(sizes[axis + 1 :]) for axis in range(len(sizes))]
    numbers = nonnegative_indices(im, indices, *sizes[batch_dims:])
    weighted = binary(im, BinaryOp.MUL, numbers, numbers_of(im, *strides[batch_dims:]))
    flat_index: Value = reduce(im, weighted, "ReduceSum", (indices.rank - 1,), 0)
    for axis, size in enumerate(fixed(im, sizes[:batch_dims])):
        row = Constant(np.arange(size, dtype=np.float32).reshape(-1, *(1,) * (flat_index.rank - axis - 1)))
        row_index = arithmetic(im, BinaryOp.MUL, row, numbers_of(im, strides[axis]))
        flat_index = binary(im, BinaryOp.ADD, flat_index, row_index)
    return as_indices(im, flat_index)


def as_indices(im: ImportContext, x: Value) -> Tensor:
    """Return computed indices that are not negative, as unsigned numbers."""
    return im.tensor(x).of_type(held_as_float(np.dtype(np.uint32)))


def _take(im: ImportContext, data: Tensor, indices: list[Array], shape: Shape) -> Tensor:
    """Compute ``data[indices]``, with an array of indices for each of the first axes, whose sizes are `shape`.

    The method with the fewest layers picks along each axis if the indices form a grid, or from the flattened axes.
    """
    targets = np.zeros((), np.int64)  # indices into the flattened axes
    for index, size in zip(indices, known(shape), strict=True):
        targets = targets * size + index
    rest, count = data.shape[len(shape) :], math.prod(known(shape))
    flat = im.tensor(im.reshape(data, (count, *rest)))
    # Axes along which the indices are constant are expanded at the end.
    changes = [(targets != targets.take([0], axis)).any() for axis in range(targets.ndim)]
    distinct = targets[tuple(slice(None if change else 1) for change in changes)]
    runs, grid = _runs(distinct), _grid_indices(indices)
    if grid is not None and sum(map(_runs, grid)) < runs:
        for axis, line in enumerate(grid):
            data = pick(im, data, axis, line)
        return data
    is_cropped = runs <= _FEW_RUNS or (runs <= MOST_RUNS and count > _LARGEST_IMAGE)
    picked = pick(im, flat, 0, distinct) if is_cropped else _looked_up(im, flat, 0, distinct)
    return im.tensor(expand(im, picked, (*targets.shape, *rest)))


def _runs(indices: Array) -> int:
    """Return the number of runs of consecutive indices."""
    return 1 + int((np.diff(indices.reshape(-1)) != 1).sum())


def _grid_indices(indices: Sequence[Array]) -> list[Array] | None:
    """Return one vector of indices per axis if they form a grid: those of axis k change only along axis k."""
    grid = np.broadcast_arrays(*indices)
    if grid[0].ndim != len(grid):
        return None
    lines = [np.moveaxis(targets, axis, 0).reshape(targets.shape[axis], -1) for axis, targets in enumerate(grid)]
    return [line[:, 0] for line in lines] if all((line == line[:, :1]).all() for line in lines) else None


def _looked_up(im: ImportContext, data: Tensor, axis: int, targets: Array) -> Tensor:
    """Pick constant indices along an axis with GridSample."""
    [count] = known([data.shape[axis]])
    _check_size(im, count, 1)
    x = pixel_centres(count)[targets.reshape(-1, *targets.shape[-1:] or (1,))]
    grid = im.memory(np.stack([x, np.zeros(x.shape)]).astype(np.float32))
    blob = pixels(im, image(im, data, [a for a in range(data.rank) if a != axis], [], [axis]), grid)
    return replaced(im, blob, data, axis, targets.shape)


def fixed(im: ImportContext, shape: Shape) -> tuple[int, ...]:
    """Return the shape of an operand; raise Refusal if a size is dynamic."""
    return im.fixed(shape, "the operand has dynamic dimensions", "bind them with --shape")


class Consecutive(NamedTuple):
    """Indices `start`, `start` + `step`, ... along an axis of the index tensor; without an axis, `start` everywhere."""

    start: Dim
    axis: int | None
    step: Dim = 1


def _picked(im: ImportContext, data: Operand, axis: int, indices: SymbolicTensor) -> Value | None:
    """ONNX Gather by a symbolic tensor; None if its elements are not consecutive."""
    if indices.cells.size != 1:
        return None
    data, cell = _rolled(im, data, axis, indices)
    run = run_of(cell, indices.rank)
    return None if run is None else _runs_picked(im, im.tensor(data), axis, [run], indices.shape)


def _picked_nd(im: ImportContext, data: Operand, indices: SymbolicTensor) -> Value | None:
    """ONNX GatherND by a symbolic tensor, without a batch; None if the indices of an axis are not consecutive."""
    expanded = or_none(materialised, indices, indices.rank - 1)
    if expanded is None or expanded.cells.size != expanded.cells.shape[-1]:
        return None
    cells = expanded.cells.reshape(-1)
    runs = [run for cell in cells if (run := run_of(cell, indices.rank)) is not None]
    along = [run.axis for run in runs if run.axis is not None]
    if len(runs) < len(cells) or len(set(along)) < len(along) or indices.rank - 1 in along:
        return None
    return _runs_picked(im, im.tensor(data), 0, runs, indices.shape[:-1])


def _runs_picked(im: ImportContext, x: Tensor, first: int, runs: Sequence[Consecutive], shape: Shape) -> Value:
    """Crop each axis from `first` on to its run, and give the result the axes of the indices, which have this shape."""
    for axis, run in enumerate(runs, first):
        x = _cropped(im, x, axis, run, shape)
    groups = x.view.axes
    along = {run.axis: group for run, group in zip(runs, groups[first:], strict=False)}
    inner = [along.get(axis, ()) for axis in range(len(shape))]
    x = x.viewed(x.view.with_axes((*groups[:first], *inner, *groups[first + len(runs) :])))
    return spread(im, x, (*x.shape[:first], *shape, *x.shape[first + len(shape) :]))


def _rolled(im: ImportContext, data: Operand, axis: int, indices: SymbolicTensor) -> tuple[Operand, Any]:
    """For n indices (#0 + k) % n, as of torch.roll, return the data rolled by k along the axis, and the index #0."""
    size, cell = data.shape[axis], indices.cells.reshape(-1)[0]
    names = _index_names(cell)
    if isinstance(size, Sym) and len(names) == 1 and indices.shape[-1 - int(names[0][1:])] == size:
        index = symbol(names[0])
        # The cell is #0 + k - (#0 + k)//n * n; without the quotient and #0 it is k.
        k = cell.subs({factor: 0 for term in cell.terms for factor in term if isinstance(factor, Call)}) - index
        if isinstance(k, int) and cell == index + k - (index + k) // size * size:
            im.demand(size, abs(k) + 1)
            parts = [crop(im, im.tensor(data), axis, *ends) for ends in ((k, TO_END), (0, k))]
            return concat(im, *parts, axis=axis), index
    return data, cell


def run_of(cell: object, rank: int, *, any_step: bool = False) -> Consecutive | None:
    """Return the run of indices in a cell of a symbolic tensor of this rank; None if they are no run."""
    if not isinstance(cell, Sym):
        return Consecutive(int(cell), None)  # type: ignore[call-overload]
    indices = _index_names(cell)
    if not indices:
        return Consecutive(cell, None)
    start = cell.subs(dict.fromkeys(indices, 0))
    step = cell.subs({indices[0]: 1}) - start if any_step else 1
    if len(indices) > 1 or cell - start != symbol(indices[0]) * step:
        return None
    return Consecutive(start, rank - 1 - int(indices[0][1:]), step)


def _index_names(cell: object) -> list[str]:
    """Return the axis indices in a cell; ``#k`` is the index along axis k, counted from the last one."""
    return [name for name in cell.names() if name.startswith("#")] if isinstance(cell, Sym) else []


def _cropped(im: ImportContext, x: Tensor, axis: int, run: Consecutive, shape: Shape) -> Tensor:
    """Crop an axis to a run, and demand that the axis contains it, as ONNX does."""
    size, count = x.shape[axis], 1 if run.axis is None else shape[run.axis]
    start = run.start
    if not at_least(start, 0):
        if not at_least(-start, 1):
            reason = f"an index from {start} on, whose sign depends on dynamic dimensions"
            raise im.refuse(reason, "bind them with --shape")
        start = start + size
    if (start, count) == (0, size):
        return x
    cropped = crop(im, x, axis, start, start + count)
    im.demand(size - start - count, 0)
    return Tensor(cropped.blob, resized(cropped.view, axis, count), x.dtype)
