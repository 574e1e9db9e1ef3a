"""Symbolic sizes calculate like the numbers that they stand for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx2ncnn_opt.ir.dim import Dim, Sym, exact_div, product, symbol

NAMES = ("a", "b", "c")
Values = dict[str, int]
Formula = Callable[[Callable[[str], Dim]], Dim]

values = st.fixed_dictionaries({name: st.integers(-40, 40) for name in NAMES})
constants = st.integers(-7, 7)


def combined(parts: st.SearchStrategy[Formula]) -> st.SearchStrategy[Formula]:
    """A formula made of smaller ones; divisors are constants, so that they cannot become zero."""
    divisors = st.integers(1, 6) | st.integers(-6, -1)
    return st.one_of(
        st.builds(lambda x, y: lambda at: x(at) + y(at), parts, parts),
        st.builds(lambda x, y: lambda at: x(at) - y(at), parts, parts),
        st.builds(lambda x, y: lambda at: x(at) * y(at), parts, parts),
        st.builds(lambda x: lambda at: -x(at), parts),
        st.builds(lambda x, d: lambda at: x(at) // d, parts, divisors),
    )


formulas: st.SearchStrategy[Formula] = st.recursive(
    st.builds(lambda name: lambda at: at(name), st.sampled_from(NAMES)) | st.builds(lambda k: lambda at: k, constants),
    combined,
    max_leaves=8,
)


def numbers(size: Dim, at: Values) -> Dim:
    return size.subs(at) if isinstance(size, Sym) else size


@settings(max_examples=400, derandomize=True, deadline=None)
@given(formulas, values)
def test_calculates_like_integers(formula: Formula, at: Values) -> None:
    symbolic = formula(symbol)
    assert numbers(symbolic, at) == formula(lambda name: at[name]), symbolic


@settings(max_examples=200, derandomize=True, deadline=None)
@given(formulas, values)
def test_substitution_in_steps(formula: Formula, at: Values) -> None:
    first = numbers(formula(symbol), {"a": at["a"]})
    assert not isinstance(first, Sym) or first.names() <= {"b", "c"}
    assert numbers(first, at) == numbers(formula(symbol), at)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(formulas, formulas, formulas)
def test_one_form_however_it_was_calculated(f: Formula, g: Formula, h: Formula) -> None:
    a, b, c = f(symbol), g(symbol), h(symbol)
    assert a + b == b + a
    assert a * b == b * a
    assert (a + b) + c == a + (b + c)
    assert a * (b + c) == a * b + a * c
    assert a - a == 0
    assert hash(a * b) == hash(b * a)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(formulas, st.integers(1, 9), values)
def test_exact_division(formula: Formula, divisor: int, at: Values) -> None:
    size = formula(symbol)
    assert exact_div(size * divisor, divisor) == size
    quotient = exact_div(size, divisor)
    if quotient is not None:
        assert quotient * divisor == size
        assert numbers(quotient, at) == formula(lambda name: at[name]) // divisor


def test_what_is_no_symbol_is_an_int() -> None:
    h = symbol("h")
    assert h - h == 0
    assert type(h - h + 3) is int
    assert type((2 * h + 3) // 1 - 2 * h) is int
    assert h * 2 != 2
    assert product([]) == 1
    assert product([h, 3, symbol("w")]) == 3 * h * symbol("w")


def test_strided_layers_stay_flat() -> None:
    h = symbol("h")
    halved = ((h + 1) // 2 + 1) // 2
    assert halved == (h + 3) // 4
    assert (4 * h) // 2 == 2 * h
    assert (4 * h + 5) // 2 == 2 * h + 2
    assert (h * symbol("w")) // symbol("w") == h


def test_divisions_that_are_no_sizes() -> None:
    h = symbol("h")
    with pytest.raises(ZeroDivisionError):
        h // 0
    with pytest.raises(TypeError, match="constant divided by a symbolic size"):
        6 // h
    assert exact_div(6, 4) is None
    assert exact_div(6, 0) is None
    assert exact_div(h + 1, 2) is None


def test_names_and_text() -> None:
    size = (symbol("h") + 1) // (symbol("w") + symbol("d")) * 2 + 3
    assert isinstance(size, Sym)
    assert size.names() == {"h", "w", "d"}
    assert "h" in str(size)
    assert "3" in repr(size)
