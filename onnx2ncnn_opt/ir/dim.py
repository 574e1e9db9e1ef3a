"""Sizes that may be known only at run time.

A `Dim` is a Python int, or a `Sym`: a polynomial with integer coefficients over named sizes, and over floor divisions,
minima and maxima of such polynomials. Sums and products have one canonical form. So equal sizes compare equal, even if
a model computes them on different paths (``3*h`` and ``h + h*2``).

Named sizes are 1 or more. That decides most comparisons (`at_least`); for others, `smaller` and `larger` return a
symbolic ``min`` or ``max``. A name that starts with "#" is an index along an axis, 0 or more (`axis_index`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache, reduce
from itertools import chain, combinations, islice
from itertools import product as choices
from math import ceil, gcd
from operator import and_, mul
from typing import Any, NamedTuple, TypeAlias, TypeGuard, TypeVar


class Call(NamedTuple):
    """``a // b`` if a term leaves a remainder, or the ``min`` or ``max`` of sizes whose order is unknown."""

    operator: str
    a: Dim
    b: Dim

    def __str__(self) -> str:
        return f"(({self.a})//({self.b}))" if self.operator == "//" else f"{self.operator}({self.a}, {self.b})"


class Sym:
    """A size that is not a constant; make one with `symbol`, then compute."""

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: Mapping[_Monomial, int]) -> None:
        several = len(terms) > 1
        self.terms = dict(sorted(terms.items(), key=lambda term: tuple(map(str, term[0])))) if several else dict(terms)
        self._hash = hash(frozenset(self.terms.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sym) and self.terms == other.terms

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return " + ".join(_term(factors, k) for factors, k in self.terms.items())

    __repr__ = __str__  # for shapes in messages

    def __add__(self, other: Dim) -> Dim:
        return sum_of((self, other))

    def __mul__(self, other: Dim) -> Dim:
        if isinstance(other, int):
            return _dim({factors: k * other for factors, k in self.terms.items()})
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
        quotient = -(other < 0)  # 3 // n is 0 from n = 4 on, -3 // n is -1 from n = 3 on
        return quotient if at_least(self, abs(other) + quotient + 1) else _of_factor(Call("//", other, self))

    __radd__ = __add__
    __rmul__ = __mul__

    def names(self) -> set[str]:
        """Return the symbols that the size depends on."""
        names: set[str] = set()
        for factor in chain.from_iterable(self.terms):
            if isinstance(factor, str):
                names.add(factor)
            else:
                names |= names_in((factor.a, factor.b))
        return names

    def subs(self, values: Mapping[Any, Dim]) -> Dim:
        """Return the size with symbols and calls replaced by other sizes."""
        terms: list[Dim] = []
        for factors, k in self.terms.items():
            term: Dim = k
            for factor in factors:
                if factor in values or isinstance(factor, str):
                    term = term * values.get(factor, _of_factor(factor))
                else:
                    term = term * _CALLS[factor.operator](*named((factor.a, factor.b), values))
            terms.append(term)
        return sum_of(terms)


Dim: TypeAlias = int | Sym
Shape: TypeAlias = tuple[Dim, ...]

# ncnn's names of a blob's axes, outermost first, by rank.
AXES = {1: "w", 2: "hw", 3: "chw", 4: "cdhw"}

_Size = TypeVar("_Size", bound=Dim)
_Factor: TypeAlias = str | Call
_Monomial: TypeAlias = tuple[_Factor, ...]


def symbol(name: str) -> Sym:
    """Return the size called `name`."""
    return _of_factor(name)


def axis_index(axis: int) -> Sym:
    """Return the index of an element along an axis, counted from the last axis, which is 0."""
    return symbol(f"#{axis}")


def total_length(past: str, new: Dim) -> Sym:
    """Return the length of a past, which may be empty, plus `new`, as one symbol: "[P + S]"."""
    return symbol(f"[{past} + {new}]")


def _with_split_totals(size: Sym) -> Dim:
    """Return a size with total lengths as sums, "[P + S]" as #P + S: a past is 0 or more, like an index."""
    parts: dict[str, Dim] = {}
    for name in size.names():
        if name.startswith("["):
            past, _, new = name[1:-1].rpartition(" + ")
            parts[name] = symbol(f"#{past}") + (int(new) if new.isdigit() else symbol(new))
    return size.subs(parts) if parts else size


def sum_of(sizes: Iterable[Dim]) -> Dim:
    """Return the sum of sizes; fast for thousands of them."""
    terms: dict[_Monomial, int] = {}
    for size in sizes:
        for factors, k in _terms(size).items():
            terms[factors] = terms.get(factors, 0) + k
    return _dim(terms)


def product(sizes: Iterable[Dim]) -> Dim:
    """Return the product of sizes; 1 for none."""
    return reduce(mul, sizes, 1)


def by_axis(shape: Sequence[_Size]) -> dict[str, _Size]:
    """Return the sizes of a blob by ncnn's names of its axes."""
    return dict(zip(AXES[len(shape)], shape, strict=True))


def shape_text(shape: Iterable[Dim]) -> str:
    """Return a shape as messages show it: "[1, n, 3]"."""
    return f"[{', '.join(map(str, shape))}]"


def texts(shape: Iterable[Dim]) -> tuple[int | str, ...]:
    """Return a shape as files have it: dynamic sizes as their expressions."""
    return tuple(size if isinstance(size, int) else str(size) for size in shape)


def names_in(sizes: Iterable[Dim]) -> set[str]:
    """Return the symbols that sizes depend on."""
    return {name for size in sizes if isinstance(size, Sym) for name in size.names()}


def substituted(size: Dim, values: Mapping[Any, Dim]) -> Dim:
    """Return a size with symbols and calls replaced by other sizes."""
    return size.subs(values) if isinstance(size, Sym) else size


def named(shape: Iterable[Dim], values: Mapping[Any, Dim]) -> Shape:
    """Return a shape with other sizes for symbols."""
    return tuple(substituted(size, values) for size in shape)


def is_fixed(sizes: Iterable[Dim] | None) -> TypeGuard[tuple[int, ...]]:
    """Return True if all sizes are known and none is dynamic."""
    return sizes is not None and all(isinstance(size, int) for size in sizes)


def known(sizes: Iterable[Dim]) -> tuple[int, ...]:
    """Return sizes as ints; TypeError if one is symbolic, which the caller rules out."""
    numbers = tuple(sizes)
    if not is_fixed(numbers):
        raise TypeError(f"the sizes {', '.join(map(str, numbers))} are not all known")
    return numbers


def exact_div(size: Dim, divisor: Dim) -> Dim | None:
    """Return `size / divisor` if it is an integer for all values of the symbols; None if that is not known."""
    if isinstance(size, int) and isinstance(divisor, int):
        return size // divisor if divisor and size % divisor == 0 else None
    if len(_terms(divisor)) > 1:
        return _long_division(size, divisor)
    quotient = _divide_terms(size, divisor)
    return None if quotient is None else _dim(quotient)


def _long_division(size: Dim, divisor: Dim) -> Dim | None:
    """Return the quotient of polynomials; None if there is a remainder."""
    quotient: Dim = 0
    for _ in range(len(_terms(size))):
        if size == 0:
            return quotient
        part = _divide_terms(_leading(size), _leading(divisor))
        if part is None:
            return None
        quotient = quotient + _dim(part)
        size = size - divisor * _dim(part)
    return quotient if size == 0 else None


def _leading(size: Dim) -> Dim:
    factors, k = max(_terms(size).items(), key=lambda term: (len(term[0]), tuple(map(str, term[0]))))
    return _dim({factors: k})


def smaller(a: Dim, b: Dim) -> Dim:
    """Return the smaller one of two sizes."""
    if at_least(b - a, 0):
        return a
    return b if at_least(a - b, 0) else _without_maximum(a, b) or _without_maximum(b, a) or _call("min", a, b)


def _without_maximum(bound: Dim, size: Dim) -> Dim | None:
    """Return ``min(bound, size)`` without its maximum: ``min(bound, x)``, if x is at least y + z.

    None for sizes other than ``y + max(min(bound, x) - y, z)``, which is the end of a slice of a slice.
    """
    for factors, k in _terms(size).items():
        if k == 1 and len(factors) == 1 and isinstance(factors[0], Call) and factors[0].operator == "max":
            parts = [size - _of_factor(factors[0]) + part for part in factors[0][1:]]
            for inner, other in (parts, parts[::-1]):
                call = _as_call(inner)
                rest = [operand for operand in call[1:] if operand != bound] if call and call.operator == "min" else []
                if len(rest) == 1 and at_least(rest[0] - other, 0):
                    return inner
    return None


def larger(a: Dim, b: Dim) -> Dim:
    """Return the larger one of two sizes."""
    return a if _reaches(a, b) else b if _reaches(b, a) else _call("max", a, b)


def _reaches(a: Dim, b: Dim) -> bool:
    """Return True if a is proven to be at least b."""
    call = _as_call(a)
    if call is not None and call.operator == "min" and all(at_least(size - b, 0) for size in call[1:]):
        return True
    return at_least(a - b, 0)


def at_most(size: Dim) -> int | None:
    """Return an upper bound of a size, for all values of its symbols; None if none is known."""
    if isinstance(size, int):
        return size
    bounds = [_least(below) for below in _below(-size)]
    return min((-bound for bound in bounds if bound is not None), default=None)


def fitting(a: Dim, b: Dim) -> Dim | None:
    """Return the common size of two sizes that must be equal to broadcast, such as n for n and ``min(n, 512)``.

    None if that is not certain.
    """
    for less, more in ((a, b), (b, a)):
        call = _as_call(less)
        sizes = (call.a, call.b) if call is not None and call.operator == "min" else ()
        others = [size for size in sizes if size != more]
        if less == more or (len(others) == 1 and _is_more_than_one(others[0], more)):
            return more
    return None


def _is_more_than_one(size: Dim, other: Dim) -> bool:
    """Return True if a size is 2 or more, or ``min(2, other)`` or more, even if it is below `other`."""
    return at_least(size, 2) or any(
        call.operator == "min" and fitting(_of_factor(call), other) == other and at_least(size - _of_factor(call), 0)
        for call in calls(size)
    )


def calls(size: Dim) -> Iterator[Call]:
    """Yield all calls in a size."""
    for factor in chain.from_iterable(_terms(size)):
        if isinstance(factor, Call):
            yield from (factor, *calls(factor.a), *calls(factor.b))


def broadcast(a: Dim, b: Dim) -> Dim | None:
    """Return the size that two sizes broadcast to (numpy's rules); None if they do not.

    Two dynamic sizes are equal at run time, or one of them is 1: the result is the larger one. Rows p to p + s of a
    table are at most s.
    """
    if a == 1:
        return b
    if b == 1 or a == b:
        return a
    if isinstance(a, int):
        return None if isinstance(b, int) else a
    if isinstance(b, int):
        return b
    cut = (y for x, y in ((a, b), (b, a)) if left_of_table(x, y) is not None)
    return fitting(a, b) or next(cut, None) or larger(a, b)


def left_of_table(rows: Dim, whole: Dim) -> Dim | None:
    """Return ``n - end`` for rows ``min(n, end) - min(n, start)``, if `whole` is ``end - start``; None for others."""
    if not isinstance(rows, Sym):
        return None
    calls = {k: factors[0] for factors, k in rows.terms.items() if len(factors) == 1 and isinstance(factors[0], Call)}
    if len(rows.terms) != 2 or calls.keys() != {1, -1} or any(call.operator != "min" for call in calls.values()):
        return None
    for n, end in (calls[1][1:], calls[1][:0:-1]):
        for m, start in (calls[-1][1:], calls[-1][:0:-1]):
            if n == m and end - start == whole and at_least(whole, 1):
                return n - end
    return None


def limits(a: Dim, b: Dim) -> Iterator[Dim]:
    """Yield sizes that are 0 or more if and only if a equals b: n - b if a is ``min(n, b)``; see `left_of_table`."""
    left, call = left_of_table(a, b), _as_call(a)
    if left is not None:
        yield left
    elif isinstance(b, Sym) and a != b and fitting(a, b) == b and call is not None and call.operator == "min":
        yield from (size - b for size in call[1:] if size != b)


def broadcast_shape(shapes: Iterable[Shape], common: Callable[[Dim, Dim], Dim | None] = broadcast) -> Shape | None:
    """Return the shape that shapes broadcast to (numpy's rules), () for none.

    None if `common`, which gives the size that two sizes broadcast to, is None for a pair.
    """
    result: Shape = ()
    for shape in shapes:
        rank = max(len(shape), len(result))
        pairs = zip(*((1,) * (rank - len(operand)) + operand for operand in (result, shape)), strict=True)
        sizes = tuple(size for a, b in pairs if (size := common(a, b)) is not None)
        if len(sizes) < rank:
            return None
        result = sizes
    return result


@lru_cache(maxsize=4096)
def at_least(size: Dim, bound: int) -> bool:
    """Return True if a size is proven to be `bound` or more, for all values of its symbols."""
    if isinstance(size, Sym):
        size = _with_split_totals(size)
    if isinstance(size, int):
        return size >= bound
    constant = size.terms.get((), 0)
    step = gcd(*(k for factors, k in size.terms.items() if factors))
    if step > 1:  # 7 * n + 2 is 9 or more if n is 1 or more
        return at_least(_dim({f: k // step for f, k in size.terms.items() if f}), -((constant - bound) // step))
    return any((least := _least(below)) is not None and least >= bound for below in _below(size))


_MOST_BOUNDS = 64

# A polynomial over symbols only.
_Bound: TypeAlias = dict[tuple[str, ...], Fraction]


def _least(bound: _Bound) -> int | None:
    """Return an integer that a polynomial never falls below; None if none is known."""
    # Replace every size by 1 + t. Without negative coefficients, the polynomial is smallest where all t are 0.
    shifted: _Bound = {}
    for names, k in bound.items():
        indices = tuple(name for name in names if name.startswith("#"))
        rest = [name for name in names if not name.startswith("#")]
        for count in range(len(rest) + 1):
            for kept in combinations(rest, count):
                key = tuple(sorted(indices + kept))
                shifted[key] = shifted.get(key, Fraction(0)) + k
    constant = shifted.pop((), Fraction(0))
    return ceil(constant) if all(k >= 0 for k in shifted.values()) else None


def _below(size: Dim) -> Iterator[_Bound]:
    """Yield lower bounds of a size: polynomials over symbols only, without calls."""
    options = [list(_term_below(factors, k)) for factors, k in _terms(size).items()]
    for chosen in islice(choices(*options), _MOST_BOUNDS):
        total: _Bound = {}
        for bound in chosen:
            for names, k in bound.items():
                total[names] = total.get(names, Fraction(0)) + k
        yield total


def _term_below(factors: _Monomial, k: int) -> Iterator[_Bound]:
    calls = [factor for factor in factors if isinstance(factor, Call)]
    if not calls:
        yield {tuple(factor for factor in factors if isinstance(factor, str)): Fraction(k)}
    elif len(factors) == 1:
        least = max((least for bound in _call_below(calls[0]) if (least := _least(bound)) is not None), default=-1)
        if least >= 0:
            yield {(f"#{calls[0]}",): Fraction(k), (): Fraction(k * least)}  # `least` and a symbol that is 0 or more
        yield from (_times(bound, k) for bound in (_call_below(calls[0]) if k > 0 else _call_above(calls[0])))
    elif k > 0 and all(at_least(_of_factor(factor), 0) for factor in factors):
        yield {(): Fraction(k * all(at_least(_of_factor(factor), 1) for factor in factors))}


def _call_below(call: Call) -> Iterator[_Bound]:
    a, b = call.a, call.b
    if call.operator == "//":
        if isinstance(b, int) and b > 0:
            for bound in _below(a - (b - 1)):
                yield _times(bound, Fraction(1, b))
        if at_least(a, 0) and at_least(b, 1):
            yield {}
    elif call.operator == "max":
        yield from (*_below(a), *_below(b))
    else:
        for bound in (*_below(a), *_below(b)):
            least = _least(bound)
            if least is not None and at_least(a, least) and at_least(b, least):
                yield {(): Fraction(least)}


def _call_above(call: Call) -> Iterator[_Bound]:
    a, b = call.a, call.b
    if call.operator == "min":
        yield from (_times(bound, -1) for size in (a, b) for bound in _below(size * -1))
    elif call.operator == "//" and isinstance(b, int) and b > 0:
        yield from (_times(bound, Fraction(-1, b)) for bound in _below(a * -1))
    elif call.operator == "max":
        bounds = [bound for size in (a, b) if (bound := at_most(size)) is not None]
        if len(bounds) == 2:
            yield {(): Fraction(max(bounds))}


def _times(bound: _Bound, k: Fraction | int) -> _Bound:
    return {names: k * value for names, value in bound.items()}


def _terms(size: Dim) -> Mapping[_Monomial, int]:
    if isinstance(size, Sym):
        return size.terms
    return {(): int(size)} if size else {}


def _dim(terms: Mapping[_Monomial, int]) -> Dim:
    left = {factors: k for factors, k in terms.items() if k}
    return Sym(left) if left.keys() - {()} else left.get((), 0)


def _of_factor(factor: _Factor) -> Sym:
    return Sym({(factor,): 1})


def _divide_terms(size: Dim, divisor: Dim) -> dict[_Monomial, int] | None:
    """Return every term divided by a divisor of one term; None if a division leaves a remainder."""
    by = _terms(divisor)
    if len(by) != 1:
        return None
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
    even = exact_div(size, divisor)
    if even is not None:
        return even
    terms = [*size.terms.items(), *_terms(divisor).items()]
    factors = reduce(and_, (Counter(factors) for factors, _ in terms)).elements()
    common = _dim({tuple(sorted(factors, key=str)): gcd(*(k for _, k in terms))})
    if common != 1:  # 6*a*w // (4*b*w) is 3*a // (2*b)
        return (exact_div(size, common) or 0) // (exact_div(divisor, common) or 0)
    if isinstance(divisor, int) and divisor > 0:
        # (a*d + r) // d == a + r // d holds for floor division, for all signs.
        rest = _dim({f: k % divisor for f, k in size.terms.items()})
        quotient = _dim({f: k // divisor for f, k in size.terms.items()})
        if isinstance(rest, int):
            return quotient + rest // divisor
        if all(2 * k > divisor for f, k in rest.terms.items() if f):
            return -((divisor - 1 - size) // divisor)  # -(-h // 7) is (h + 6) // 7, not h - 6*h // 7
        # ((x // a) + r) // b == (x + r*a) // (a*b): keeps chains of strided layers flat.
        return quotient + _of_factor(_flatten_nested(rest, divisor))
    return _of_factor(Call("//", size, divisor))


def _flatten_nested(size: Sym, divisor: int) -> Call:
    constant = size.terms.get((), 0)
    inner = _as_call(size - constant)
    if inner is not None and inner.operator == "//" and isinstance(inner.b, int):
        total = inner.a + constant * inner.b
        if isinstance(total, Sym):
            return Call("//", total, inner.b * divisor)
    return Call("//", size, divisor)


def _call(operator: str, a: Dim, b: Dim) -> Dim:
    """Return the ``min`` or ``max`` of sizes in canonical form: every order of nested calls gives the same."""
    *rest, result = sorted({*_operands(operator, a), *_operands(operator, b)}, key=str)
    for size in reversed(rest):
        result = _of_factor(Call(operator, size, result))
    return result


def _operands(operator: str, size: Dim) -> Iterator[Dim]:
    """Yield the operands of a size that is a call of `operator`; the size itself if it is not."""
    call = _as_call(size)
    if call is not None and call.operator == operator:
        yield from (*_operands(operator, call.a), *_operands(operator, call.b))
    else:
        yield size


def _as_call(size: Dim) -> Call | None:
    """Return a size that is only one call; None for other sizes."""
    factors, k = next(iter(size.terms.items())) if isinstance(size, Sym) and len(size.terms) == 1 else ((), 0)
    return factors[0] if k == 1 and len(factors) == 1 and isinstance(factors[0], Call) else None


_CALLS: Mapping[str, Callable[[Dim, Dim], Dim]] = {"//": lambda a, b: a // b, "min": smaller, "max": larger}


def _term(factors: _Monomial, k: int) -> str:
    text = "*".join(map(str, factors))
    if not text:
        return str(k)
    return text if k == 1 else f"{k}*{text}"
