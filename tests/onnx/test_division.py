"""Quotients that are rounded to whole numbers, and remainders: bit by bit, where ncnn's own division is off."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from testing.compared import compare_nodes

COUNT = 4096
DIVISORS = (3.0, 0.1, 7.3, -1.5, 255.0, 1000003.0)
INF = np.float32(np.inf)
NUMBERS = np.array([INF, -INF, np.nan, 0, 1e38, -1e38, 1e-30, 5, -6, 7.5, 2**24], "f4")


def rounding(name: str) -> list[Any]:
    """a / b, rounded as torch's exporters write it."""
    divide = helper.make_node("Div", ["a", "b"], ["q"])
    if name == "trunc":  # torch.export
        steps = [("Abs", ["q"], "size"), ("Floor", ["size"], "whole"), ("Sign", ["q"], "sign")]
        return [
            divide,
            *(helper.make_node(op, inputs, [output]) for op, inputs, output in steps),
            helper.make_node("Mul", ["whole", "sign"], ["y"]),
        ]
    if name == "Cast":  # TorchScript
        return [
            divide,
            helper.make_node("Cast", ["q"], ["i"], to=TensorProto.INT64),
            helper.make_node("Cast", ["i"], ["y"], to=TensorProto.FLOAT),
        ]
    return [divide, helper.make_node(name, ["q"], ["y"])]


def dividends(divisor: Any, seed: int) -> Any:
    """Whole and half multiples of the divisor and their neighbours, and any numbers."""
    rng = np.random.default_rng(seed)
    halves = (rng.integers(-3000, 3000, COUNT) / 2).astype("f4") * np.float32(divisor)
    near = np.nextafter(halves, np.where(rng.integers(0, 2, COUNT), INF, -INF).astype("f4"))
    spread = rng.standard_normal(COUNT).astype("f4") * 1000
    return np.concatenate([np.resize(halves, COUNT), near, spread]).astype("f4")


@pytest.mark.parametrize("name", ["Floor", "Ceil", "Round", "trunc", "Cast"])
@pytest.mark.parametrize("divisor", DIVISORS)
def test_by_a_number(name: str, divisor: float) -> None:
    compare_nodes(rounding(name), {"a": dividends(divisor, 0)}, {"b": np.float32(divisor)}, rel=0)


@pytest.mark.parametrize("name", ["Floor", "Ceil", "Round", "trunc", "Cast"])
def test_by_a_tensor(name: str) -> None:
    divisors = np.resize(np.random.default_rng(1).standard_normal(COUNT), 3 * COUNT).astype("f4") * 3
    compare_nodes(rounding(name), {"a": dividends(divisors[:COUNT], 2), "b": divisors}, rel=0)


def test_a_number_by_a_tensor() -> None:
    divisors = np.arange(1, 1000, dtype="f4")
    compare_nodes(rounding("Floor"), {"b": divisors}, {"a": np.float32(5040)}, rel=0)


def test_whole_numbers() -> None:
    rng = np.random.default_rng(3)
    b = rng.integers(1, 1000, COUNT).astype("f4") * rng.choice([1, -1], COUNT).astype("f4")
    compare_nodes(rounding("Floor"), {"a": b * rng.integers(-9000, 9000, COUNT).astype("f4"), "b": b}, rel=0)


@pytest.mark.parametrize("name", ["Floor", "Round"])
def test_infinities_and_large_numbers(name: str) -> None:
    compare_nodes(rounding(name), {"a": np.resize(NUMBERS, 64)}, {"b": np.float32(3)}, rel=1e-6)


def test_some_steps_later() -> None:
    nodes = [
        helper.make_node("Div", ["a", "b"], ["q"]),
        helper.make_node("Reshape", ["q", "shape"], ["r"]),
        helper.make_node("Add", ["r", "half"], ["s"]),
        helper.make_node("Floor", ["s"], ["y"]),
    ]
    constants = {"b": np.float32(7), "half": np.float32(0.5), "shape": np.array([-1, 3])}
    compare_nodes(nodes, {"a": (np.arange(-3000, 3000) / 2 * 7).astype("f4")}, constants, rel=0)


@pytest.mark.parametrize("divisor", DIVISORS)
def test_fmod_by_a_number(divisor: float) -> None:
    node = helper.make_node("Mod", ["a", "b"], ["y"], fmod=1)
    compare_nodes(node, {"a": dividends(divisor, 4)}, {"b": np.float32(divisor)}, rel=0)


def test_fmod_by_a_tensor() -> None:
    divisors = np.resize(np.random.default_rng(5).standard_normal(COUNT), 3 * COUNT).astype("f4") * 3
    node = helper.make_node("Mod", ["a", "b"], ["y"], fmod=1)
    compare_nodes(node, {"a": dividends(divisors[:COUNT], 6), "b": divisors}, rel=0)


def test_fmod_by_zero_and_of_infinities() -> None:
    node = helper.make_node("Mod", ["a", "b"], ["y"], fmod=1)
    a, b = np.array([1, -5, 0, INF, -INF, np.nan] * 8, "f4"), np.array([0] * 24 + [2] * 24, "f4")
    compare_nodes(node, {"a": a, "b": b}, rel=0)
