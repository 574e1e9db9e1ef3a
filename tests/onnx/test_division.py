"""Quotients that are rounded to whole numbers, and remainders: bit by bit, where ncnn's own division is off."""

from typing import Any

import numpy as np
import pytest

from testing.compared import compare_nodes
from testing.models import nodes

COUNT = 4096
DIVISORS = (3.0, 0.1, 7.3, -1.5, 255.0, 1000003.0)
INF = np.float32(np.inf)
NUMBERS = np.array([INF, -INF, np.nan, 0, 1e38, -1e38, 1e-30, 5, -6, 7.5, 2**24], "f4")


# a / b rounded, two of them as torch.export and TorchScript write it; and the remainder.
ROUNDED = {
    "Floor": "q = Div(a, b) y = Floor(q)",
    "Ceil": "q = Div(a, b) y = Ceil(q)",
    "Round": "q = Div(a, b) y = Round(q)",
    "trunc": "q = Div(a, b) size = Abs(q) whole = Floor(size) sign = Sign(q) y = Mul(whole, sign)",
    "Cast": "q = Div(a, b) i = Cast<to = 7>(q) y = Cast<to = 1>(i)",
    "fmod": "y = Mod<fmod = 1>(a, b)",
}


def dividends(divisor: Any, seed: int) -> Any:
    """Whole and half multiples of the divisor and their neighbours, and any numbers."""
    rng = np.random.default_rng(seed)
    halves = (rng.integers(-3000, 3000, COUNT) / 2).astype("f4") * np.float32(divisor)
    near = np.nextafter(halves, np.where(rng.integers(0, 2, COUNT), INF, -INF).astype("f4"))
    spread = rng.standard_normal(COUNT).astype("f4") * 1000
    return np.concatenate([np.resize(halves, COUNT), near, spread]).astype("f4")


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("divisor", DIVISORS)
def test_by_a_number(name: str, divisor: float) -> None:
    compare_nodes(nodes(ROUNDED[name]), {"a": dividends(divisor, 0)}, {"b": np.float32(divisor)}, rel=0)


@pytest.mark.parametrize("name", ROUNDED)
def test_by_a_tensor(name: str) -> None:
    divisors = np.resize(np.random.default_rng(1).standard_normal(COUNT), 3 * COUNT).astype("f4") * 3
    compare_nodes(nodes(ROUNDED[name]), {"a": dividends(divisors[:COUNT], 2), "b": divisors}, rel=0)


def test_a_number_by_a_tensor() -> None:
    compare_nodes(nodes(ROUNDED["Floor"]), {"b": np.arange(1, 1000, dtype="f4")}, {"a": np.float32(5040)}, rel=0)


def test_whole_numbers() -> None:
    rng = np.random.default_rng(3)
    b = rng.integers(1, 1000, COUNT).astype("f4") * rng.choice([1, -1], COUNT).astype("f4")
    compare_nodes(nodes(ROUNDED["Floor"]), {"a": b * rng.integers(-9000, 9000, COUNT).astype("f4"), "b": b}, rel=0)


@pytest.mark.parametrize("name", ["Floor", "Round"])
def test_infinities_and_large_numbers(name: str) -> None:
    compare_nodes(nodes(ROUNDED[name]), {"a": np.resize(NUMBERS, 64)}, {"b": np.float32(3)}, rel=1e-6)


def test_some_steps_later() -> None:
    steps = nodes("q = Div(a, b) r = Reshape(q, shape) s = Add(r, half) y = Floor(s)")
    constants = {"b": np.float32(7), "half": np.float32(0.5), "shape": np.array([-1, 3])}
    compare_nodes(steps, {"a": (np.arange(-3000, 3000) / 2 * 7).astype("f4")}, constants, rel=0)


def test_fmod_by_zero_and_of_infinities() -> None:
    a, b = np.array([1, -5, 0, INF, -INF, np.nan] * 8, "f4"), np.array([0] * 24 + [2] * 24, "f4")
    compare_nodes(nodes(ROUNDED["fmod"]), {"a": a, "b": b}, rel=0)
