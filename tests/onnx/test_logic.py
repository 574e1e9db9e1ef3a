"""Comparisons, logic, Where and casts, with infinities wherever numbers stand."""

import itertools
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import UnsupportedError
from testing.compared import compare_nodes, model_of, types
from testing.models import nodes

COMPARISONS = ("Greater", "Less", "GreaterOrEqual", "LessOrEqual", "Equal")
NUMBERS = np.array([-np.inf, -3.4e38, -2, -1, -0.5, -1e-30, -0.0, 0, 1e-30, 0.5, 1, 2, 3.4e38, np.inf, np.nan], "f4")
SHAPES = [((15,), (15, 1)), ((1, 5, 3), (5, 3)), ((2, 3, 4), (4,)), ((1, 3, 4, 5), (3, 1, 5)), ((6,), ())]
INF = np.float32(np.inf)


@pytest.mark.parametrize("limit", [0.0, -0.0, 1.0, -2.0, 1e-30, 3.4e38, -3.4e38, np.inf, -np.inf])
@pytest.mark.parametrize("operator", COMPARISONS)
@pytest.mark.parametrize("swapped", [False, True])
def test_against_a_number(operator: str, limit: float, swapped: bool) -> None:
    if np.isinf(limit) and operator != "Equal":
        return
    names = "c, x" if swapped else "x, c"
    compared = nodes(f"b = {operator}({names}) y = Cast<to = 1>(b)")
    compare_nodes(compared, {"x": NUMBERS}, {"c": np.float32(limit)}, rel=0)


@pytest.mark.parametrize("operator", COMPARISONS)
def test_two_tensors(operator: str) -> None:
    """Every pair, but for two equal infinities."""
    a, b = (grid.reshape(-1) for grid in np.meshgrid(NUMBERS, NUMBERS))
    kept = ~(np.isinf(a) & (a == b))
    compare_nodes(nodes(f"m = {operator}(a, b) y = Cast<to = 1>(m)"), {"a": a[kept], "b": b[kept]}, rel=0)


# What stands after each operand of Where, and whether it runs.
OPERANDS = ["fed", "array", "infinite array", "0", "2.5", "-inf", "inf", "-3.4028234663852886e38", "1e9"]
WHERE = [(m, a, b) for m in ("fed", "constant") for a, b in itertools.product(OPERANDS, OPERANDS)]


@pytest.mark.parametrize(("mask", "a", "b"), WHERE)
def test_where(mask: str, a: str, b: str) -> None:
    """Exact for everything that is a number or an infinity."""
    seed = WHERE.index((mask, a, b))
    rng = np.random.default_rng(seed)
    mask_shape, shape = SHAPES[seed % 4]
    inputs: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    condition = rng.integers(0, 2, mask_shape).astype(bool)
    (inputs if mask == "fed" else constants)["m"] = condition
    for name, kind in (("a", a), ("b", b)):
        array = rng.standard_normal(shape).astype(np.float32)
        if kind != "array":
            array[rng.integers(0, 3, shape) == 0] = INF
            array[rng.integers(0, 3, shape) == 0] = -INF
        if kind in ("fed",):
            inputs[name] = array
        elif kind.endswith("array"):
            constants[name] = array
        else:
            constants[name] = np.float32(kind)
    if not inputs:
        return
    if "-3.4028234663852886e38" in (a, b):  # nothing is below, but an infinity
        inputs = {name: np.nan_to_num(x) if name != "m" else x for name, x in inputs.items()}
    compare_nodes(nodes("y = Where(m, a, b)"), inputs, constants, rel=0)


@pytest.mark.parametrize("fed", [False, True])
@pytest.mark.parametrize(("shape", "masks"), [((7,), (7,)), ((3, 5), (3, 1)), ((2, 3, 9), (3, 1)), ((2, 3, 4), (4,))])
def test_nan_that_is_not_picked_is_gone(fed: bool, shape: tuple[int, ...], masks: tuple[int, ...]) -> None:
    """As in safe divisions, and after the softmax of a row that is masked away."""
    rng = np.random.default_rng(0)
    mask = rng.integers(0, 2, masks).astype(bool)
    x = np.where(mask, rng.standard_normal(shape), np.nan).astype(np.float32)
    inputs, constants = ({"x": x, "m": mask}, {}) if fed else ({"x": x}, {"m": mask})
    compare_nodes(nodes("y = Where(m, x, zero)"), inputs, {**constants, "zero": np.float32(0)}, rel=0)


@pytest.mark.parametrize("limit", [0.0, 1.5, -2.0])
@pytest.mark.parametrize("operator", ["Greater", "Less", "GreaterOrEqual", "LessOrEqual"])
@pytest.mark.parametrize("sides", ["c, t", "t, c"])
def test_a_choice_between_a_number_and_a_limit_is_min_or_max(operator: str, sides: str, limit: float) -> None:
    """As in the clamps of Brevitas; with another number than the limit it stays a choice."""
    chosen = nodes(f"t = MatMul(x, w) m = {operator}(t, c) y = Where(m, {sides})")
    x, w = np.array([[-3, limit, -1, 0, 2]], np.float32), np.eye(5, dtype=np.float32)
    conversion = compare_nodes(chosen, {"x": x}, {"c": np.float32(limit), "w": w}, rel=0)
    assert len(types(conversion)) <= 2
    assert "Threshold" not in types(conversion)
    other = nodes(f"t = MatMul(x, w) m = {operator}(t, d) y = Where(m, {sides})")
    conversion = compare_nodes(other, {"x": x}, {"c": np.float32(limit), "d": np.float32(1), "w": w}, rel=0)
    assert "Threshold" in types(conversion)


NUMBERS_OF: dict[int, Any] = {
    TensorProto.INT64: np.array([-7, -1, 0, 1, 2, 16777216]),
    TensorProto.INT32: np.array([-7, -1, 0, 1, 2, 16777216], np.int32),
    TensorProto.UINT8: np.array([0, 1, 2, 254, 255], np.uint8),
    TensorProto.INT8: np.array([-128, -1, 0, 127], np.int8),
    TensorProto.BOOL: np.array([True, False]),
    TensorProto.FLOAT: np.array([-2.7, -0.5, 0, 0.2, 3.999, 1e7], np.float32),
}


@pytest.mark.parametrize(("source", "target"), list(itertools.product(NUMBERS_OF, (1, 6, 7, 9, 11))))
def test_casts(source: int, target: int) -> None:
    compare_nodes(nodes(f"c = Cast<to = {target}>(x) y = Cast<to = 1>(c)"), {"x": NUMBERS_OF[source]}, rel=0)


def test_integers_that_were_computed_are_indices() -> None:
    table = np.array([[0.5, np.inf], [-np.inf, 1e-30], [3e38, 2.0], [np.nan, 7.0]], np.float32)
    read = nodes("i = Cast<to = 7>(x) y = Gather(table, i)")
    compare_nodes(read, {"x": np.array([3.9, 0.2, 2.0, 1.5, -4.0], np.float32)}, {"table": table}, rel=0)


@pytest.mark.parametrize("divisor", [1, 3, 7, 10, 64, 1000, -12])
@pytest.mark.parametrize("operator", ["Div", "Mod"])
def test_quotients_of_integers(operator: str, divisor: int) -> None:
    x = np.concatenate([np.arange(-5000, 5000), np.random.default_rng(1).integers(-(2**20), 2**20, 5000)])
    divide = nodes(f"q = {operator}(x, d) y = Cast<to = 1>(q)")
    compare_nodes(divide, {"x": x}, {"d": np.int64(divisor)}, rel=0)
    compare_nodes(divide, {"x": x, "d": np.full(1, divisor)}, rel=0)


@pytest.mark.parametrize("divisor", [3.0, 4.0, 7.0, 0.1])
def test_quotients_of_whole_numbers_rounded_down(divisor: float) -> None:
    x = np.arange(-3000, 3000).astype(np.float32)
    compare_nodes(nodes("q = Div(x, d) y = Floor(q)"), {"x": x}, {"d": np.float32(divisor)}, rel=0)


def test_complex_numbers_are_refused() -> None:
    model = model_of(nodes("y = Equal(x, c)"), {"x": np.zeros(3, np.float32)}, {"c": np.complex64(1j)}, dtype=bool)
    with pytest.raises(UnsupportedError) as error:
        lower(model)
    assert "b is complex64: ncnn has real numbers only" in str(error.value)
