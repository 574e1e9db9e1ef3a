"""Symbolic tensors computed at run time: Interp creates rows of ones, the rest is arithmetic."""

from functools import partial, reduce
from typing import TypeAlias

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, Reduction
from onnx2ncnn_opt.ir.dim import Call, Dim, Sym, at_least
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import arithmetic, binary, spread
from onnx2ncnn_opt.onnx.lower.functional.cast import LARGEST_EXACT
from onnx2ncnn_opt.onnx.lower.functional.division import floored
from onnx2ncnn_opt.onnx.value import Constant, SymbolicTensor, Tensor, Value, held_as_float, is_float

_Factors: TypeAlias = tuple[str | Call, ...]


def computed(im: ImportContext, x: SymbolicTensor, copies: int = 1) -> Tensor:
    """Return the sum of the cells' terms, products of indices and sizes; equal `copies` are along the first axis."""
    if 0 in x.shape:
        raise im.refuse("a tensor is empty, and ncnn has no empty tensors", "remove it from the model")
    return im.tensor(spread(im, _sum(im, x, copies), x.shape)).of_type(held_as_float(x.dtype))


def _sum(im: ImportContext, x: SymbolicTensor, copies: int) -> Value:
    if not any(isinstance(cell, Sym) for cell in x.cells.flat):
        return _constant(im, x.cells, whole=not is_float(x.dtype))
    factors: dict[_Factors, Array] = {(): np.zeros(x.cells.shape)}
    for index, cell in np.ndenumerate(x.cells):
        for term, k in (cell.terms if isinstance(cell, Sym) else {(): cell}).items():
            factors.setdefault(term, np.zeros(x.cells.shape))[index] = k
    indices = [term for term in factors if any(name.startswith("#") for name in Sym({term: 1}).names())]
    first = int(all(len(term) == 1 and isinstance(term[0], str) for term in indices))
    for term in indices if first else ():  # counts from 1: the difference of two is that of the indices
        factors[()] -= factors[term]
    constant = factors.pop(())
    terms = sorted(factors.items(), key=lambda item: bool((item[1] < 0).all()))
    total = _term(im, x, *terms[0], copies, first)
    for term, k in terms[1:]:
        is_less = (k < 0).all()
        part = _term(im, x, term, -k if is_less else k, copies, first)
        total = arithmetic(im, BinaryOp.SUB if is_less else BinaryOp.ADD, total, part)
    return arithmetic(im, BinaryOp.ADD, total, _constant(im, constant, whole=True)) if constant.any() else total


def _term(im: ImportContext, x: SymbolicTensor, factors: _Factors, k: Array, copies: int, first: int) -> Value:
    coefficients = _constant(im, k, whole=True)
    parts: list[Value] = [_factor(im, x, factor, copies, first) for factor in factors]
    if not parts or (k != 1).any():
        parts.append(coefficients)
    return reduce(partial(arithmetic, im, BinaryOp.MUL), parts)


def _constant(im: ImportContext, numbers: Array, *, whole: bool) -> Constant:
    array = numbers.astype(np.float64)
    if whole and np.abs(array).max(initial=0) > LARGEST_EXACT:
        reason = "it computes with integers beyond 2**24, which float32 does not hold exactly"
        raise im.refuse(reason, "bind sizes with --shape")
    return Constant(im.f32(array))


def _factor(im: ImportContext, x: SymbolicTensor, factor: str | Call, copies: int, first: int) -> Value:
    size = Sym({(factor,): 1})
    if isinstance(factor, str) and factor.startswith("#"):
        axis = x.rank - 1 - int(factor[1:])
        return arange(im, x.shape[axis], axis, x.rank, copies, first)
    if isinstance(factor, Call) and any(name.startswith("#") for name in size.names()):
        cells = [np.full((1,) * x.rank, part, dtype=object) for part in (factor.a, factor.b)]
        a, b = (_sum(im, SymbolicTensor(cell, x.shape, x.dtype), copies) for cell in cells)
        if factor.operator == "//":
            return floored(im, a, b)
        return binary(im, BinaryOp.MIN if factor.operator == "min" else BinaryOp.MAX, a, b)
    return number_of(im, size)


def arange(im: ImportContext, size: Dim, axis: int, rank: int, copies: int = 1, first: int = 0) -> Value:
    """Return `first`, `first` + 1, ... along an axis: the cumulative sum of ones is 1, 2, ...; copies along axis 0."""
    if isinstance(size, int):
        return Constant(np.arange(first, first + size, dtype=np.float32).reshape(-1, *(1,) * (rank - 1 - axis)))
    ones = im.ones(size, copies)
    indices = im.like(ones, im.layer("CumulativeSum", ones.blob, axis=2))
    if not first:
        indices = im.apply(indices, BinaryOp.ADD, -1.0)
    *before, own = ones.view.axes
    axes = (*before, *((),) * (axis - len(before)), own, *((),) * (rank - 1 - axis))
    return indices.viewed(indices.view.with_axes(axes))


def number_of(im: ImportContext, size: Sym) -> Tensor:
    """Return a dynamic size as a scalar tensor: the sum of a row of ones of this length."""
    if not at_least(size, 0):
        raise im.refuse(f"it computes with {size}, which may be below 0", "bind sizes with --shape")
    more = 0 if at_least(size, 1) or im.has_ones(size) else 1
    longer = size + more
    assert isinstance(longer, Sym)
    blob = im.layer("Reduction", im.ones(longer).blob, operation=Reduction.SUM, reduce_all=0, axes=(0, 1, 2), fixbug0=1)
    number = im.wrap(blob, (), [[]])
    return im.apply(number, BinaryOp.ADD, -1.0) if more else number
