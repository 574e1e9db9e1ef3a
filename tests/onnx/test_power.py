"""Pow of two tensors, for any base."""

from typing import Any

import numpy as np
import pytest

from testing.compared import compare_nodes
from testing.models import nodes

INF = np.float32(np.inf)
BASES = np.array([0, -0.0, 1, -1, 2, -2, 0.5, -0.5, 7.25, -7.25, 1e-20, -1e-20, 1e10, -1e10, INF, -INF, np.nan], "f4")
EXPONENTS = np.array([0, 1, -1, 2, -2, 3, -3, 4, 5, 0.5, -0.5, 1.5, 1 / 3, 2.2, 9, 10, 101, -101], "f4")
POW = nodes("y = Pow(a, b)")


def usual(a: Any, b: Any) -> Any:
    """Where C has no rule of its own: those of -0, of NaN to the power of 0, and of -inf to that of a half."""
    return ~((a == 0) & np.signbit(a)) & ~np.isnan(a) & ~((a == -INF) & (b != np.floor(b)))


def test_every_kind_of_base_and_exponent() -> None:
    a, b = (part.reshape(-1) for part in np.meshgrid(BASES, EXPONENTS))
    kept = usual(a, b)
    compare_nodes(POW, {"a": a[kept], "b": b[kept]})


@pytest.mark.parametrize("exponents", [EXPONENTS, EXPONENTS[:9], EXPONENTS[3:5]], ids=["any", "whole", "even"])
def test_constant_exponents(exponents: Any) -> None:
    a = BASES[usual(BASES, np.float32(0.5))]
    compare_nodes(POW, {"a": a[:, None].repeat(len(exponents), 1)}, {"b": exponents})


def test_constant_bases() -> None:
    a = np.array([-2, 0, 3, -0.5], "f4")
    compare_nodes(POW, {"b": EXPONENTS[:, None].repeat(4, 1)}, {"a": a})


def test_random_numbers() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 50, 60)).astype("f4") * 3
    whole = rng.integers(-6, 7, (50, 60)).astype("f4")
    compare_nodes(POW, {"a": a, "b": whole})
    compare_nodes(POW, {"a": np.abs(a), "b": b})
