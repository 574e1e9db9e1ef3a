"""Gather by indices that only dynamic dimensions leave open: ranges, which are Crops, and single elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from onnx2ncnn_opt.ir.dim import Call, Dim, Sym, at_least, symbol
from onnx2ncnn_opt.ir.view import Atoms
from onnx2ncnn_opt.onnx.fold.sizes.cells import materialised_or_none
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import spread
from onnx2ncnn_opt.onnx.lower.functional.concat import concat
from onnx2ncnn_opt.onnx.lower.functional.crop import TO_END, crop, resized
from onnx2ncnn_opt.onnx.value import Operand, SymbolicTensor, Tensor, Value


class _Run(NamedTuple):
    """Indices from `start` on, one more for each element along an axis of theirs; the same everywhere without one."""

    start: Dim
    axis: int | None


def picked(im: ImportContext, data: Operand, axis: int, indices: SymbolicTensor) -> Value | None:
    """ONNX Gather by a symbolic tensor; None if its elements are not a run of neighbours."""
    if indices.cells.size != 1:
        return None
    data, cell = _rolled(im, data, axis, indices)
    run = _run(cell, indices.rank)
    if run is None:
        return None
    x = _cropped(im, im.tensor(data), axis, run, indices)
    groups = x.view.axes
    inner = _placed([groups[axis]], [run], indices.rank)
    return _spread(im, x, (*groups[:axis], *inner, *groups[axis + 1 :]), x.shape[:axis] + indices.shape)


def picked_together(im: ImportContext, data: Operand, indices: SymbolicTensor) -> Value | None:
    """ONNX GatherND by a symbolic tensor, without a batch; None if its elements are not runs along their axes."""
    listed = materialised_or_none(indices, indices.rank - 1)
    if listed is None or listed.cells.size != listed.cells.shape[-1]:
        return None
    runs = [_run(cell, indices.rank) for cell in listed.cells.reshape(-1)]
    x, found = im.tensor(data), [run for run in runs if run is not None]
    along = [run.axis for run in found if run.axis is not None]
    if len(found) < len(runs) or len(set(along)) < len(along) or indices.rank - 1 in along:
        return None
    for axis, run in enumerate(found):
        x = _cropped(im, x, axis, run, indices)
    groups = x.view.axes
    inner = _placed(groups[: len(found)], found, indices.rank - 1)
    return _spread(im, x, (*inner, *groups[len(found) :]), indices.shape[:-1])


def _rolled(im: ImportContext, data: Operand, axis: int, indices: SymbolicTensor) -> tuple[Operand, Any]:
    """Return the axis from element k on, the first k behind it, and index #0, for n indices (#0 + k) % n."""
    size, cell = data.shape[axis], indices.cells.reshape(-1)[0]
    names = [name for name in cell.names() if name.startswith("#")] if isinstance(cell, Sym) else []
    if isinstance(size, Sym) and len(names) == 1 and indices.shape[-1 - int(names[0][1:])] == size:
        index = symbol(names[0])
        k = cell.subs({factor: 0 for term in cell.terms for factor in term if isinstance(factor, Call)}) - index
        if isinstance(k, int) and cell == index + k - (index + k) // size * size:
            im.demand(size, abs(k) + 1)
            parts = [crop(im, im.tensor(data), axis, *ends) for ends in ((k, TO_END), (0, k))]
            return concat(im, *parts, axis=axis), index
    return data, cell


def _run(cell: object, rank: int) -> _Run | None:
    if not isinstance(cell, Sym):
        return _Run(int(cell), None)  # type: ignore[call-overload]
    indices = [name for name in cell.names() if name.startswith("#")]
    if len(indices) > 1:
        return None
    start = cell.subs(dict.fromkeys(indices, 0))
    if indices and cell - start != Sym({(indices[0],): 1}):
        return None
    return _Run(start, rank - 1 - int(indices[0][1:]) if indices else None)


def _cropped(im: ImportContext, x: Tensor, axis: int, run: _Run, indices: SymbolicTensor) -> Tensor:
    """Return the elements of a run; ONNX demands that the axis has them."""
    size, count = x.shape[axis], 1 if run.axis is None else indices.shape[run.axis]
    start = run.start
    if not at_least(start, 0):
        if not at_least(-start, 1):
            reason = f"an index from {start} on, whose sign depends on dynamic dimensions"
            raise im.refuse(reason, "bind them with --shape")
        start = start + size
    if (start, count) == (0, size):
        return x
    cropped = crop(im, x, axis, start, start + count)
    return Tensor(cropped.blob, resized(cropped.view, axis, count), x.dtype)


def _placed(groups: Sequence[Atoms], runs: Sequence[_Run], rank: int) -> list[Atoms]:
    """Return the axes of the indices, each that of the run along it."""
    along = {run.axis: group for group, run in zip(groups, runs, strict=True)}
    return [along.get(axis, ()) for axis in range(rank)]


def _spread(im: ImportContext, x: Tensor, axes: Sequence[Atoms], shape: tuple[Dim, ...]) -> Value:
    x = x.viewed(x.view.with_axes(axes))
    return spread(im, x, shape + x.shape[len(shape) :])
