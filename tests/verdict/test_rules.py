"""Each rule of agreement is needed: without it, a right net is wrong. And each refuses what it does not allow."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.inputs.draws import Wanted
from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from onnx2ncnn_opt.verdict import rules
from onnx2ncnn_opt.verdict.errors import Tolerance
from onnx2ncnn_opt.verdict.rules import RULES, UNPROVEN, Case, judge
from onnx2ncnn_opt.verification.options import Verification
from testing.models import parsed

RNG = np.random.default_rng(0)
WHOLE = RNG.integers(-2, 3, (64, 64, 3, 3)).astype(np.float32)
WHOLE[:, :, 0, 0] -= WHOLE.sum((2, 3))
WEIGHTS: Mapping[str, Any] = {
    "m": RNG.standard_normal((16, 40)).astype(np.float32),
    "v": WHOLE,  # their sums of integers are exact, but not those of winograd
    "b": RNG.integers(-128, 128, (16, 40)).astype(np.int8),
}
PRODUCT = "(float[2,16] x) => (float[2,40] y) { y = MatMul(x, m) }"
SUMS = "{ r = Round(x) b = Add(r, d) y = Conv(b, v) }"
PARITY = """(float[30,100] x) => (float[30,100] y) <float many = {100000}, float half = {0.5}, float two = {2}> {
    s = Sigmoid(x) b = Mul(s, many) f = Floor(b) q = Mul(f, half) h = Floor(q) e = Mul(h, two) y = Sub(f, e) }"""
QUANTISED = """(float[2,16] x) => (float[2,40] y) <float s = {0.01}> { q, t, z = DynamicQuantizeLinear(x)
    i = MatMulInteger(q, b, z) f = Cast<to = 1>(i) r = Mul(t, s) y = Mul(f, r) }"""
# The models that need a rule, with the options of lowering and of verification.
NEED: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "equal": ("(float[4,9] x) => (int64[4] y) { y = ArgMax<axis = 1, keepdims = 0>(x) }", {}, {}),
    "limit": (PRODUCT, {}, {"rtol": 1e-4}),
    "rounding": (PRODUCT, {}, {}),
    "weights": (PRODUCT, {"storage": "bf16"}, {}),
    "kernels": (
        "(float[1,64,24,24] x) => (float[1,64,22,22] y) <float d = {8192}> " + SUMS,
        {},
        {"wanted": Wanted(ranges=((-9, 9),))},
    ),
    "quantised": (QUANTISED, {"quantized": "keep"}, {}),
    "decided": (PARITY, {}, {}),
}


def rule_of(name: str, worker: NcnnWorker, **more: Any) -> tuple[str, str]:
    text, lowering, options = NEED[name]
    used = {key: array for key, array in WEIGHTS.items() if f", {key}" in text}
    verification = Verification(**options, **more)
    [row] = lower(parsed(text, 17, **used), **lowering).verify(verification, worker=worker).outputs
    return row.rule, row.status


def test_every_rule_has_a_model() -> None:
    assert [rule.name for rule in RULES] == list(NEED)
    assert len(RULES) + 1 <= 8


@pytest.mark.parametrize("name", NEED)
def test_a_rule_decides(name: str, worker: NcnnWorker) -> None:
    assert rule_of(name, worker) == (name, "ok")


@pytest.mark.parametrize("name", [name for name in NEED if name != "quantised"])
def test_a_rule_is_needed(name: str, worker: NcnnWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "RULES", tuple(rule for rule in RULES if rule.name != name))
    try:
        _, status = rule_of(name, worker)
    except AssertionError:  # no other rule applies
        status = "mismatch"
    assert status == "mismatch"


def verdict(actual: Any, reference: Any, spread: Any = 0.0, **more: Any) -> tuple[str, bool]:
    """Judge an output of a model whose elements rounding moves by `spread`."""
    net, model = (np.asarray(array, np.float32) for array in (actual, reference))
    found = judge(Case(net, model, lambda: iter([np.broadcast_to(spread, model.shape)]), **more))
    return found.rule, found.accepted


def test_steps_of_8_bits_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On arrays: which number is halfway between two steps depends on the CPU."""
    reference = np.linspace(-1, 1, 256, dtype=np.float32)
    shifted, step = np.roll(reference, 1)[1:], 1 / 127
    assert verdict(shifted, reference[1:], step=step) == ("quantised", True)
    monkeypatch.setattr(rules, "RULES", tuple(rule for rule in RULES if rule.name != "quantised"))
    assert not verdict(shifted, reference[1:], step=step)[1]


def test_kernels_do_not_excuse_plain_kernels() -> None:
    reference = np.linspace(1, 2, 100)
    assert verdict(reference + 1e-5, reference) == ("rounding", True)
    assert verdict(reference + 5e-4, reference) == ("kernels", True)
    assert verdict(reference + 5e-4, reference, is_plain=True) == ("rounding", False)
    assert verdict(reference + 5e-3, reference) == ("kernels", False)


def test_a_strict_limit_leaves_no_room_for_rounding() -> None:
    reference, spread = np.linspace(1, 2, 10), np.zeros(10)
    spread[3], actual = np.inf, reference.copy()
    actual[3] += 1e-1
    assert verdict(actual, reference, limit=Tolerance(2e-2), spread=spread) == ("decided", True)
    assert verdict(actual, reference, limit=Tolerance(1e-4), spread=spread) == ("limit", False)


def test_integers_are_equal_except_where_rounding_decides() -> None:
    reference, spread = np.arange(4), np.array([np.inf, 0, 0, 0])
    for last, accepted in ((3.0, True), (4.0, False)):
        actual = np.array([9.0, 1, 2, last])
        found = judge(Case(actual, reference, lambda: iter([spread]), limit=Tolerance(2.0)))
        assert (found.rule, found.accepted, found.allowed) == ("decided", accepted, 0.0)


def test_elements_differ_only_where_rounding_moves_them() -> None:
    reference = np.arange(10.0)
    assert verdict(reference + 0.3, reference, spread=0.4) == ("kernels", True)
    assert verdict(reference + 0.3, reference, spread=0.4, is_plain=True) == ("rounding", True)
    assert verdict(reference + 0.5, reference, spread=0.4) == ("kernels", False)
    assert verdict(reference + 0.5, reference, spread=np.inf) == (UNPROVEN.name, True)


def test_half_of_an_output_has_to_be_compared() -> None:
    reference = np.array([1, 2, np.nan, np.nan])
    assert verdict([1, 2, 3, 4], reference) == ("rounding", True)
    assert verdict([1, 2.5, 3, 4], reference) == ("kernels", False)
    reference[1] = np.nan
    assert verdict([1, 2, 3, 4], reference) == (UNPROVEN.name, True)
    assert verdict([np.nan, 2, 3, 4], reference) == ("kernels", False)
