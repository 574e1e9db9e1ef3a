"""Symbolic sizes compute like the numbers that they stand for."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx2ncnn_opt.ir.dim import (
    Dim,
    Sym,
    at_least,
    at_most,
    axis_index,
    broadcast,
    exact_div,
    fitting,
    larger,
    left_of_table,
    limits,
    product,
    smaller,
    symbol,
    total_length,
)

NAMES = ("a", "b", "c")
Values = dict[str, int]
Formula = Callable[[Callable[[str], Dim]], Dim]

values = st.fixed_dictionaries({name: st.integers(1, 40) for name in NAMES})
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
        st.builds(lambda x, y: lambda at: smaller(x(at), y(at)), parts, parts),
        st.builds(lambda x, y: lambda at: larger(x(at), y(at)), parts, parts),
    )


formulas: st.SearchStrategy[Formula] = st.recursive(
    st.builds(lambda name: lambda at: at(name), st.sampled_from(NAMES)) | st.builds(lambda k: lambda at: k, constants),
    combined,
    max_leaves=8,
)


def numbers(size: Dim, at: Values) -> Dim:
    return size.subs(at) if isinstance(size, Sym) else size


@settings(max_examples=200, derandomize=True, deadline=None)
@given(formulas, st.lists(values, min_size=1, max_size=5))
def test_bounds_hold_for_all_sizes(formula: Formula, many: list[Values]) -> None:
    symbolic = formula(symbol)
    reached = [formula(lambda name, at=at: at[name]) for at in many]  # type: ignore[misc]
    least = min(number for number in reached if isinstance(number, int))
    assert not at_least(symbolic, least + 1)
    most = at_most(symbolic)
    assert most is None or all(isinstance(size, int) and size <= most for size in reached)


def test_bounds_are_found() -> None:
    h, w, n = symbol("h"), symbol("w"), symbol("n")
    missing = -n - -n // 8 * 8  # what n lacks to a multiple of 8
    for size, bound in (
        (h * w, 1),
        ((h - 1) // 32 + 1, 1),
        (h - h // 2, 1),
        (h * w - h, 0),
        (n - smaller(n, 512), 0),
        (larger(n - 5, 0), 0),
        (n // 4 * 4 - n // 4 * 4 // 5 * 5, 0),
        (missing, 0),
        (7 - missing, 0),
        (axis_index(0) * w + axis_index(1), 0),
        ((h // 2) * (w // 2), 0),
        (-(-n // 7) * 7 + 2, 9),
    ):
        assert at_least(size, bound), size
        assert not at_least(size, bound + 1), size
    assert at_most(missing) == 7
    assert at_most(smaller(n, 512)) == 512
    assert at_most(larger(256 - n, 0)) == 255
    assert at_most(n) is None
    assert at_most(larger(n, 3)) is None


def test_sizes_that_broadcast_only_if_equal() -> None:
    n, m = symbol("n"), symbol("m")
    assert fitting(n, smaller(n, 512)) == n == fitting(smaller(512, n), n)
    assert fitting(n, n) == n
    assert fitting(n, m) is None
    assert fitting(n, n // 2) is None
    assert fitting(n, smaller(n, m)) is None  # m may be 1


def test_rows_of_a_table_between_past_and_total() -> None:
    new = symbol("s")
    total = total_length("p", new)
    past = total - new
    rows, end = smaller(total, 64) - smaller(past, 64), smaller(total, 64)
    assert left_of_table(rows, new) == 64 - total
    assert left_of_table(rows, total) is None
    assert left_of_table(rows - 1, new) is None
    assert [*limits(rows, new)] == [*limits(end, total)] == [64 - total]
    assert not [*limits(new, new)]
    assert broadcast(rows, new) == new == broadcast(new, rows)
    # dynamo writes the end of a slice as the past and what is left of the table
    written = past + larger(end - past, 0)
    assert smaller(written, 64) == end
    assert fitting(smaller(total, written), total) == total
    assert larger(end, smaller(total, written)) == smaller(total, written)


def test_long_division() -> None:
    h, w = symbol("h"), symbol("w")
    assert exact_div((h * w + 1) * 32, (h * w + 1) * 8) == 4
    assert exact_div((h + 1) * (w + h), w + h) == h + 1
    assert exact_div(h * w + 1, h + 1) is None


@settings(max_examples=200, derandomize=True, deadline=None)
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


def test_expressions_without_symbols_are_ints() -> None:
    h = symbol("h")
    assert h - h == 0
    assert type(h - h + 3) is int
    assert type((2 * h + 3) // 1 - 2 * h) is int
    assert h * 2 != 2
    assert product([]) == 1
    assert product([h, 3, symbol("w")]) == 3 * h * symbol("w")


def test_the_largest_of_many_is_one_however_they_came_together() -> None:
    k, m, n = symbol("k"), symbol("m"), symbol("n")
    assert larger(larger(k, m), larger(n, k)) == larger(n, larger(m, k))
    assert larger(larger(m, n), n) == larger(n, m)
    assert smaller(smaller(n, 5), smaller(m, 5)) == smaller(m, smaller(5, n))


def test_strided_layers_stay_flat() -> None:
    h = symbol("h")
    halved = ((h + 1) // 2 + 1) // 2
    assert halved == (h + 3) // 4
    assert (4 * h) // 2 == 2 * h
    assert (4 * h + 5) // 2 == 2 * h + 2
    assert (h * symbol("w")) // symbol("w") == h
    assert -(-h // 7) == (h + 6) // 7


def test_divisions_lose_common_factors() -> None:
    h, w = symbol("h"), symbol("w")
    assert (8 * h * w) // (16 * w) == h // 2
    assert (6 * h * w + 2 * w) // (4 * w * w) == (3 * h + 1) // (2 * w)
    assert (h // 2 * w) // (h // 2 * 3) == w // 3


def test_divisions_that_are_no_sizes() -> None:
    h = symbol("h")
    with pytest.raises(ZeroDivisionError):
        h // 0
    assert str(6 // h) == "((6)//(h))"
    assert exact_div(6, 4) is None
    assert exact_div(6, 0) is None
    assert exact_div(h + 1, 2) is None


def test_names_and_text() -> None:
    size = (symbol("h") + 1) // (symbol("w") + symbol("d")) * 2 + 3
    assert isinstance(size, Sym)
    assert size.names() == {"h", "w", "d"}
    assert "h" in str(size)
    assert "3" in repr(size)
