"""Sizes that may be known only at run time.

A `Dim` is a Python int, or a `Sym`: a polynomial with integer coefficients over named sizes and floor divisions of such
polynomials. Sums and products are kept in one canonical form, so that two sizes computed on different ways through a
model compare equal when they are (``3*h`` and ``h + h*2``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias


class _FloorDiv:
    """``numerator // divisor`` that does not divide evenly term by term."""

    __slots__ = ("divisor", "numerator")

    def __init__(self, numerator: Sym, divisor: Dim) -> None:
        self.numerator, self.divisor = numerator, divisor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _FloorDiv) and (self.numerator, self.divisor) == (other.numerator, other.divisor)

    def __hash__(self) -> int:
        return hash((self.numerator, self.divisor))

    def __str__(self) -> str:
        return f"(({self.numerator})//({self.divisor}))"


class Sym:
    """A size that is not a constant; make one with `symbol`, then calculate."""

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: Mapping[_Monomial, int]) -> None:
        self.terms = dict(sorted(terms.items(), key=lambda term: tuple(map(str, term[0]))))
        self._hash = hash(frozenset(self.terms.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sym) and self.terms == other.terms

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Sym({self})"

    def __str__(self) -> str:
        return " + ".join(_term(factors, k) for factors, k in self.terms.items())

    def __add__(self, other: Dim) -> Dim:
        total = dict(self.terms)
        for factors, k in _terms(other).items():
            total[factors] = total.get(factors, 0) + k
        return _dim(total)

    def __mul__(self, other: Dim) -> Dim:
        total: dict[_Monomial, int] = {}
        for a, ka in self.terms.items():
            for b, kb in _terms(other).items():
                factors = tuple(sorted((*a, *b), key=str))
                total[factors] = total.get(factors, 0) + ka * kb
        return _dim(total)

    def __neg__(self) -> Dim:
        return self * -1

    def __sub__(self, other: Dim) -> Dim:
        return self + other * -1

    def __rsub__(self, other: int) -> Dim:
        return self * -1 + other

    def __floordiv__(self, other: Dim) -> Dim:
        return _divide(self, other)

    def __rfloordiv__(self, other: int) -> Dim:
        raise TypeError("a constant divided by a symbolic size is not a size")

    __radd__ = __add__
    __rmul__ = __mul__

    def names(self) -> set[str]:
        """The symbols that the size depends on."""
        found: set[str] = set()
        for factors in self.terms:
            for factor in factors:
                if isinstance(factor, str):
                    found.add(factor)
                else:
                    found |= factor.numerator.names()
                    if isinstance(factor.divisor, Sym):
                        found |= factor.divisor.names()
        return found

    def subs(self, values: Mapping[str, int]) -> Dim:
        """The size with symbols replaced by numbers."""
        total: Dim = 0
        for factors, k in self.terms.items():
            term: Dim = k
            for factor in factors:
                if isinstance(factor, str):
                    term = term * values.get(factor, symbol(factor))
                else:
                    divisor = factor.divisor.subs(values) if isinstance(factor.divisor, Sym) else factor.divisor
                    term = term * (factor.numerator.subs(values) // divisor)
            total = total + term
        return total


Dim: TypeAlias = int | Sym
Shape: TypeAlias = tuple[Dim, ...]

_Factor: TypeAlias = str | _FloorDiv
_Monomial: TypeAlias = tuple[_Factor, ...]


def symbol(name: str) -> Sym:
    """The size called `name`."""
    return Sym({(name,): 1})


def product(sizes: Iterable[Dim]) -> Dim:
    """The product of sizes; 1 for none."""
    total: Dim = 1
    for size in sizes:
        total = total * size
    return total


def known(sizes: Iterable[Dim]) -> tuple[int, ...]:
    """Sizes that the caller knows to be numbers, as such; TypeError for one that is symbolic."""
    numbers = tuple(sizes)
    if not all(isinstance(size, int) for size in numbers):
        raise TypeError(f"the sizes {', '.join(map(str, numbers))} are not all known")
    return numbers  # type: ignore[return-value]


def exact_div(size: Dim, divisor: Dim) -> Dim | None:
    """`size / divisor` where that is surely a whole number, else None."""
    if isinstance(size, int) and isinstance(divisor, int):
        return size // divisor if divisor and size % divisor == 0 else None
    quotient = _divide_terms(size, divisor)
    return None if quotient is None else _dim(quotient)


def _terms(size: Dim) -> Mapping[_Monomial, int]:
    if isinstance(size, Sym):
        return size.terms
    return {(): int(size)} if size else {}


def _dim(terms: Mapping[_Monomial, int]) -> Dim:
    left = {factors: k for factors, k in terms.items() if k}
    if not left:
        return 0
    if len(left) == 1 and () in left:
        return left[()]
    return Sym(left)


def _divide_terms(size: Dim, divisor: Dim) -> dict[_Monomial, int] | None:
    """Every term divided by a divisor of one term; None where one does not divide evenly."""
    by = _terms(divisor)
    if len(by) != 1:
        return {(): 1} if size == divisor else None
    [(factors, k)] = by.items()
    result: dict[_Monomial, int] = {}
    for term, coefficient in _terms(size).items():
        rest = list(term)
        for factor in factors:
            if factor not in rest:
                return None
            rest.remove(factor)
        if coefficient % k:
            return None
        result[tuple(rest)] = coefficient // k
    return result


def _divide(size: Sym, divisor: Dim) -> Dim:
    if isinstance(divisor, int) and divisor == 0:
        raise ZeroDivisionError("a size divided by zero")
    even = _divide_terms(size, divisor)
    if even is not None:
        return _dim(even)
    if isinstance(divisor, int) and divisor > 0:
        # (a*d + r) // d == a + r // d holds for floor division, whatever the signs.
        whole = {f: k - k % divisor for f, k in size.terms.items()}
        rest = _dim({f: k % divisor for f, k in size.terms.items()})
        quotient = _dim({f: k // divisor for f, k in whole.items()})
        if isinstance(rest, int):
            return quotient + rest // divisor
        # ((x // a) + r) // b == (x + r*a) // (a*b): keeps chains of strided layers flat.
        flat = _flatten_nested(rest, divisor)
        return quotient + Sym({(flat,): 1})
    return Sym({(_FloorDiv(size, divisor),): 1})


def _flatten_nested(size: Sym, divisor: int) -> _FloorDiv:
    nested = [(f, k) for f, k in size.terms.items() if f]
    if len(nested) == 1 and nested[0][1] == 1 and len(nested[0][0]) == 1:
        inner = nested[0][0][0]
        if isinstance(inner, _FloorDiv) and isinstance(inner.divisor, int):
            total = inner.numerator + size.terms.get((), 0) * inner.divisor
            if isinstance(total, Sym):
                return _FloorDiv(total, inner.divisor * divisor)
    return _FloorDiv(size, divisor)


def _term(factors: _Monomial, k: int) -> str:
    text = "*".join(map(str, factors))
    if not text:
        return str(k)
    return text if k == 1 else f"{k}*{text}"
