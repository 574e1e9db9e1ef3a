from typing import Any

import numpy as np
import pytest

from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.runtime.latency import in_turns
from onnx2ncnn_opt.verdict.blobs import nearest
from onnx2ncnn_opt.verdict.errors import Difference, Tolerance, compare

B = np.array([[1.0, -20.0], [3.0, 4.0]], np.float32)


def test_equal_arrays() -> None:
    same = compare(B, B)
    assert same.ok
    assert (same.max_abs, same.max_rel) == (0, 0)
    assert same.cosine == pytest.approx(1)


def test_errors_are_those_of_the_worst_element() -> None:
    a = B.copy()
    a[1, 0] += 0.5
    off = compare(a, B)
    assert off.max_abs == pytest.approx(0.5)
    assert off.max_rel == pytest.approx(0.5 / 20)
    assert off.cosine == pytest.approx(np.vdot(a, B) / np.linalg.norm(a) / np.linalg.norm(B), abs=1e-7)
    assert not off.ok


@pytest.mark.parametrize(("error", "ok"), [(0.019, True), (0.021, False)])
def test_the_largest_element_sets_the_tolerance(error: float, ok: bool) -> None:
    assert compare(B + np.float32(error), B).ok is ok
    assert compare(B + np.float32(error), B, Tolerance(relative=1e-4)).ok is False


def test_small_values_do_not_hide_beside_large_ones() -> None:
    # The rows of a detector's output: pixels and probabilities.
    rng = np.random.default_rng(0)
    reference = (rng.uniform(size=(1, 6, 100)) * [[[640], [640], [640], [640], [1], [1]]]).astype(np.float32)
    assert compare(reference * np.float32(1.0009), reference).ok
    wrong = reference.copy()
    wrong[0, 5] /= 2
    off = compare(wrong, reference)
    assert off.max_rel is not None
    assert off.max_rel < 2e-3
    assert "index 5 of axis 1" in off.excess
    # Rounding errors of what the large ones were computed from are not the fault of the small ones.
    wrong[0, 5] = reference[0, 5] + 640e-5
    assert compare(wrong, reference).ok


@pytest.mark.parametrize(
    ("actual", "reference", "ok"),
    [
        (np.full(1000, 1.1e-3), np.full(1000, 1e-3, np.float32), False),  # probabilities: all of them are below 1e-2
        (np.zeros(3), np.full(3, 1e-7, np.float32), True),
        # the largest float stands for infinity: it is what ncnn's masks are made of
        ([1.0, np.finfo(np.float32).min], np.array([1.0, -np.inf], np.float32), True),
        ([1.0, np.finfo(np.float32).max], np.array([1.0, -np.inf], np.float32), False),
        ([-0.0, 0.0], np.array([0, 0]), True),
        ([5001, 1], np.array([5000, 1]), False),  # integers have to be right, however large
        ([4999.5, 1], np.array([5000, 1]), False),
        ([1, 0], np.array([True, False]), True),
        ([1, 1], np.array([True, False]), False),
        ([1.0, 2.01], np.array([1.0, 2.0], np.float16), True),  # to its own precision
        ([1.0, 2.02], np.array([1.0, 2.0], np.float16), False),
        (2.0, np.array(2.0, np.float32), True),
    ],
)
def test_numbers_that_agree(actual: Any, reference: Array, ok: bool) -> None:
    assert compare(np.asarray(actual, np.float32), reference).ok is ok


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_special_values_have_to_be_at_the_same_indices(value: float) -> None:
    special = B.copy()
    special[0, 0] = value
    assert compare(special, special).ok
    assert "in 1 of 4 elements" in compare(special, B).special
    assert "in the reference in 1" in compare(B, special).special
    moved = np.roll(special, 1)
    assert not compare(moved, special).ok
    assert not compare(-special, special).ok


def test_other_elements_are_compared_beside_special_ones() -> None:
    reference = np.array([1.0, np.nan, np.inf], np.float32)
    off = compare(np.array([1.5, np.nan, np.inf], np.float32), reference)
    assert (off.special, off.ok) == ("", False)
    assert off.max_abs == 0.5


@pytest.mark.parametrize("values", [[0, 1, 2], [-1, 5, -(2**31)], [0, 0, 0], [2**30, 2**24 + 1, 7]])
def test_integers_are_values_or_bits(values: list[int]) -> None:
    reference = np.array(values, np.int64)
    bits = reference.astype(np.int32).view(np.float32)
    assert compare(bits, reference).ok
    assert not compare(bits, reference + 1).ok
    if max(map(abs, values)) < 2**24:
        assert compare(reference.astype(np.float32), reference).ok


def test_wrong_bits_are_shown_as_numbers() -> None:
    bits = np.array([-1, 5], np.int32).view(np.float32)
    assert compare(bits, np.array([-1, 7])).max_abs == 2
    assert compare(np.array([-1, 5], np.float32), np.array([-1, 7])).max_abs == 2


def test_directions_of_zeros() -> None:
    zero = np.zeros(2, np.float32)
    assert compare(zero, zero).cosine == 1
    assert compare(zero, np.ones(2, np.float32)).cosine == 0


def test_nothing_to_compare_has_no_numbers() -> None:
    nothing = np.full(3, np.nan, np.float32)
    same = compare(nothing, nothing)
    assert same.ok
    assert (same.max_abs, same.max_rel, same.cosine) == (None, None, None)


def test_the_spread_of_the_reference_is_allowed() -> None:
    reference, spread = np.array([1.0, 2.0, 3.0]), np.array([0.0, 0.5, np.inf])
    assert compare(np.array([1.0, 2.5, np.nan], np.float32), reference, spread=spread).ok
    assert not compare(np.array([1.0, 2.6, 3.0], np.float32), reference, spread=spread).ok
    assert not compare(np.array([np.nan, 2.0, 3.0], np.float32), reference, spread=spread).ok


@pytest.mark.parametrize("shape", [(2**19 + 5,), (1, 2, 5, 2**18)])
def test_large_arrays(shape: tuple[int, ...]) -> None:
    reference = np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    actual = reference.copy()
    assert compare(actual, reference) == Difference(0.0, 0.0, pytest.approx(1.0), size=1.0)  # type: ignore[arg-type]
    actual.flat[-1] += 1
    off = compare(actual, reference)
    assert (off.max_abs, off.excess) == (1.0, "off by up to 1, 0.001 is allowed")
    actual.flat[[0, 1, -1]] = np.nan
    assert compare(actual, reference).special == f"NaN in 3 of {actual.size} elements, in the reference in 0"


def test_differences_beyond_float32() -> None:
    difference = compare(np.array([2e38, 1], np.float32), np.array([-2e38, 1], np.float32))
    assert difference.max_rel == pytest.approx(2.0)


def test_the_latency_by_a_clock_that_stands_still() -> None:
    latency = in_turns(lambda seconds: [0.0, 2e-3, 3e-3], lambda seconds: [0.0, 1e-3], 0.0)
    assert (latency.net, latency.other, latency.ratio) == (2.0, 1.0, 2.0)
    assert in_turns(lambda seconds: [1e-3], lambda seconds: [0.0], 0.0).other > 0


@pytest.mark.parametrize(("number", "ok"), [(254.0, True), (256.0, False), (-1.0, False)])
def test_rounding_makes_no_number_that_the_type_lacks(number: float, ok: bool) -> None:
    reference, spread = np.array([255, 3], np.uint8), np.array([np.inf, 0.0])
    assert compare(np.array([number, 3.0]), reference, Tolerance(), spread).ok == ok


def test_the_order_of_axes_of_a_value_with_infinities() -> None:
    value = np.array([[np.inf, 1, 2], [3, 4, np.inf]], np.float32)
    assert nearest(value.T.copy(), value) == (1, 0)
