"""Interval arithmetic: what a function and its first two derivatives can be anywhere within a cell, not at samples.

An `Enclosure` goes through the same NumPy formulas as an array of numbers. Values are as float32 has them: what is too
large is infinite, what is too small may be zero. Where nothing is known, an interval is from -inf to inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from onnx2ncnn_opt.ir.weight import Array

_LARGEST, _SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
_LAST_BITS = 2.0**-50  # what rounding and the C library's functions are off by

erf: Any = np.frompyfunc(math.erf, 1, 1)
erfc: Any = np.frompyfunc(math.erfc, 1, 1)


class _Interval(NamedTuple):
    lo: Array
    hi: Array

    @property
    def largest(self) -> Array:
        return np.maximum(np.abs(self.lo), np.abs(self.hi))

    @property
    def straddles(self) -> Array:
        return (self.lo < 0) & (self.hi > 0)


def _of(lo: Any, hi: Any) -> _Interval:
    """An interval; where an end is NaN nothing is known."""
    lo, hi = np.broadcast_arrays(np.asarray(lo, np.float64), np.asarray(hi, np.float64))
    unknown = np.isnan(lo) | np.isnan(hi)
    return _Interval(np.where(unknown, -np.inf, lo), np.where(unknown, np.inf, hi))


def _either(choose: Array, a: _Interval, b: _Interval) -> _Interval:
    return _Interval(np.where(choose, a.lo, b.lo), np.where(choose, a.hi, b.hi))


def _hull(a: _Interval, b: _Interval) -> _Interval:
    return _Interval(np.minimum(a.lo, b.lo), np.maximum(a.hi, b.hi))


def _unknown(where: Array, otherwise: _Interval) -> _Interval:
    return _Interval(np.where(where, -np.inf, otherwise.lo), np.where(where, np.inf, otherwise.hi))


def _sum(a: _Interval, b: _Interval) -> _Interval:
    return _of(a.lo + b.lo, a.hi + b.hi)


def _product(a: _Interval, b: _Interval, *, of_slopes: bool = True) -> _Interval:
    """The product; 0 times infinity is 0 for slopes, which are finite, however steep; of values it is NaN."""
    ends = np.stack([a.lo * b.lo, a.lo * b.hi, a.hi * b.lo, a.hi * b.hi])
    if of_slopes:
        ends = np.where(np.isnan(ends), 0.0, ends)
    return _of(ends.min(axis=0), ends.max(axis=0))


def _scaled(a: _Interval, factor: float) -> _Interval:
    return _product(a, _of(factor, factor))


def _unimodal(x: _Interval, bump: Callable[[Array], Array]) -> _Interval:
    """The values of an even function that falls on either side of 0."""
    near = np.where(x.straddles, 0.0, np.minimum(np.abs(x.lo), np.abs(x.hi)))
    far = bump(x.largest)
    return _of(far, np.maximum(far, bump(near)))


class Enclosure(NDArrayOperatorsMixin):
    """Values, slopes and curvatures, an interval for each cell."""

    def __init__(self, value: _Interval, slope: _Interval, bend: _Interval) -> None:
        """As float32 has it: an overflow is a constant within a cell, or a jump where a cell begins or ends with it."""
        below, above = (_LAST_BITS * np.where(np.isinf(end), 0.0, np.abs(end)) for end in value)
        value = _Interval(value.lo - below, value.hi + above)
        lo = np.where(value.lo > _LARGEST, np.inf, np.where(value.lo < -_LARGEST, -np.inf, value.lo))
        hi = np.where(value.hi > _LARGEST, np.inf, np.where(value.hi < -_LARGEST, -np.inf, value.hi))
        lo, hi = np.where((lo > 0) & (lo < _SMALLEST), 0.0, lo), np.where((hi < 0) & (hi > -_SMALLEST), 0.0, hi)
        lo, hi = lo + 0.0, hi + 0.0  # no -0.0, of which roots and quotients come out negative
        same, jumps = lo == hi, (lo != hi) & (np.isinf(lo) | np.isinf(hi))
        zero = _of(np.zeros_like(lo), np.zeros_like(lo))
        self.value = _Interval(lo, hi)
        self.slope, self.bend = (_either(same, zero, _unknown(jumps, each)) for each in (slope, bend))

    @classmethod
    def of(cls, lo: Array, hi: Array) -> Enclosure:
        """The variable itself, in the cells from `lo` to `hi`."""
        return cls(_of(lo, hi), _of(np.ones_like(lo), np.ones_like(lo)), _of(np.zeros_like(lo), np.zeros_like(lo)))

    def astype(self, dtype: Any) -> Enclosure:
        """As arrays have it; an enclosure has no other type."""
        return self

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        rule = _RULES.get(ufunc)
        if rule is None or method != "__call__" or options:
            return NotImplemented
        return rule(*(each if isinstance(each, Enclosure) else self._constant(each) for each in inputs))

    def _constant(self, number: Any) -> Enclosure:
        zeros = np.zeros_like(self.value.lo)
        none = _of(zeros, zeros)
        value = _of(zeros + number, zeros + number)
        made = Enclosure.__new__(Enclosure)  # exact: no last bits
        made.value, made.slope, made.bend = value, none, none
        return made

    def _through(self, value: _Interval, first: _Interval, second: _Interval) -> Enclosure:
        """The chain rule, for a function of what this is: its values and derivatives."""
        square = _product(self.slope, self.slope)
        square = _Interval(np.maximum(square.lo, 0), square.hi)
        bend = _sum(_product(second, square), _product(first, self.bend))
        return Enclosure(value, _product(first, self.slope), bend)


def _add(a: Enclosure, b: Enclosure) -> Enclosure:
    return Enclosure(_sum(a.value, b.value), _sum(a.slope, b.slope), _sum(a.bend, b.bend))


def _negative(a: Enclosure) -> Enclosure:
    return Enclosure(*(_Interval(-each.hi, -each.lo) for each in (a.value, a.slope, a.bend)))


def _multiply(a: Enclosure, b: Enclosure) -> Enclosure:
    if a is b:
        return _square(a)
    slope = _sum(_product(a.slope, b.value), _product(a.value, b.slope))
    twice = _scaled(_product(a.slope, b.slope), 2)
    bend = _sum(_sum(_product(a.bend, b.value), twice), _product(a.value, b.bend))
    return Enclosure(_product(a.value, b.value, of_slopes=False), slope, bend)


def _square(a: Enclosure) -> Enclosure:
    x, far = a.value, a.value.largest
    near = np.where(x.straddles, 0.0, np.minimum(np.abs(x.lo), np.abs(x.hi)))
    two = _of(np.full_like(far, 2), np.full_like(far, 2))
    return a._through(_of(near * near, far * far), _scaled(x, 2), two)


def _reciprocal(a: Enclosure) -> Enclosure:
    x = a.value
    has_pole = (x.lo <= 0) & (x.hi >= 0)
    value = _unknown(has_pole, _of(1 / x.hi, 1 / x.lo))
    square = _product(value, value)
    return a._through(
        value, _unknown(has_pole, _scaled(square, -1)), _unknown(has_pole, _scaled(_product(square, value), 2))
    )


def _exp(a: Enclosure) -> Enclosure:
    power = _of(np.exp(a.value.lo), np.exp(a.value.hi))
    return a._through(power, power, power)


def _expm1(a: Enclosure) -> Enclosure:
    power = _of(np.exp(a.value.lo), np.exp(a.value.hi))
    return a._through(_of(np.expm1(a.value.lo), np.expm1(a.value.hi)), power, power)


def _log(a: Enclosure) -> Enclosure:
    x = a.value
    inverse = _of(1 / x.hi, 1 / x.lo)
    value = _of(np.log(x.lo), np.log(x.hi))  # NaN, and so unknown, below 0
    unknown = x.lo < 0
    return a._through(value, _unknown(unknown, inverse), _unknown(unknown, _scaled(_product(inverse, inverse), -1)))


def _sqrt(a: Enclosure) -> Enclosure:
    x = a.value
    root = _of(np.sqrt(x.lo), np.sqrt(x.hi))
    unknown = x.lo < 0
    first = _of(0.5 / np.sqrt(x.hi), 0.5 / np.sqrt(x.lo))
    second = _of(-0.25 * x.lo**-1.5, -0.25 * x.hi**-1.5)
    return a._through(root, _unknown(unknown, first), _unknown(unknown, second))


def _tanh(a: Enclosure) -> Enclosure:
    value = _of(np.tanh(a.value.lo), np.tanh(a.value.hi))
    first = _unimodal(a.value, lambda x: 1 / np.cosh(x) ** 2)
    return a._through(value, first, _scaled(_product(value, first), -2))


def _bell(x: Array) -> Array:
    return np.asarray(2 / math.sqrt(math.pi) * np.exp(-x * x))


def _erf(a: Enclosure) -> Enclosure:
    first = _unimodal(a.value, _bell)
    value = _of(*(erf(end).astype(np.float64) for end in a.value))
    return a._through(value, first, _scaled(_product(a.value, first), -2))


def _erfc(a: Enclosure) -> Enclosure:
    first = _scaled(_unimodal(a.value, _bell), -1)
    value = _of(*(erfc(end).astype(np.float64) for end in reversed(a.value)))
    return a._through(value, first, _scaled(_product(a.value, first), -2))


def _logaddexp(a: Enclosure, b: Enclosure) -> Enclosure:
    """Of 0 and a number: softplus."""
    assert not a.value.largest.any()
    share = _of(*(0.5 + 0.5 * np.tanh(end / 2) for end in b.value))
    rest = _of(1 - share.hi, 1 - share.lo)
    return b._through(_of(*(np.logaddexp(0, end) for end in b.value)), share, _product(share, rest))


def _maximum(a: Enclosure, b: Enclosure) -> Enclosure:
    x, y = a.value, b.value
    first, second = x.lo >= y.hi, y.lo >= x.hi
    value = _Interval(np.maximum(x.lo, y.lo), np.maximum(x.hi, y.hi))
    slope = _either(first, a.slope, _either(second, b.slope, _hull(a.slope, b.slope)))
    bend = _either(first, a.bend, _either(second, b.bend, _unknown(np.ones_like(first), a.bend)))
    return Enclosure(value, slope, bend)


def _absolute(a: Enclosure) -> Enclosure:
    return _maximum(a, _negative(a))


def _greater(a: Enclosure, b: Enclosure) -> Enclosure:
    always, never = a.value.lo > b.value.hi, a.value.hi <= b.value.lo
    value = _of(np.where(always, 1.0, 0.0), np.where(never, 0.0, 1.0))
    zero = _of(np.zeros_like(value.lo), np.zeros_like(value.lo))
    slope = _unknown(~(always | never), zero)
    return Enclosure(value, slope, slope)


_RULES: dict[Any, Callable[..., Enclosure]] = {
    np.absolute: _absolute,
    np.add: _add,
    np.divide: lambda a, b: _multiply(a, _reciprocal(b)),
    erf: _erf,
    erfc: _erfc,
    np.exp: _exp,
    np.expm1: _expm1,
    np.greater: _greater,
    np.log: _log,
    np.logaddexp: _logaddexp,
    np.maximum: _maximum,
    np.minimum: lambda a, b: _negative(_maximum(_negative(a), _negative(b))),
    np.multiply: _multiply,
    np.negative: _negative,
    np.reciprocal: _reciprocal,
    np.sqrt: _sqrt,
    np.square: _square,
    np.subtract: lambda a, b: _add(a, _negative(b)),
    np.tanh: _tanh,
}
