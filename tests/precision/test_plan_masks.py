from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from onnx2ncnn_opt.ir.features import FP32
from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.ir.shapes import infer_graph
from onnx2ncnn_opt.precision import search_masks
from onnx2ncnn_opt.precision.effort import Effort
from onnx2ncnn_opt.precision.fp16_run import Estimator, Walk
from onnx2ncnn_opt.precision.mask_judge import MaskJudge
from onnx2ncnn_opt.precision.noise_shares import NoiseShares
from onnx2ncnn_opt.precision.plan_masks import COSTLY_TARGETS, TARGETS, Plan, Planner, Target
from onnx2ncnn_opt.precision.search_masks import find_masks
from onnx2ncnn_opt.runtime.base import Feed
from testing.param_text import bare as net
from testing.param_text import layer

_X = np.random.default_rng(0).standard_normal((16, 24, 24), np.float32)


def pointwise(count: int, *, first: str = "x") -> list[str]:
    """Return the lines of 1x1 convolutions."""
    names = [first, *(f"c{i}" for i in range(count))]
    return [f"Convolution {b} 1 1 {a} {b} 0=16 1=1 5=1 6=256" for a, b in pairwise(names)]


def weighted(graph: Graph) -> Graph:
    """Give the convolutions weights that keep the size of numbers."""
    rng = np.random.default_rng(1)
    for each in graph:
        if each.type == "Convolution":
            each.weights["weight_data"] = rng.standard_normal(each["weight_data_size"], np.float32) / 4
            each.weights["bias_data"] = np.zeros(each["num_output"], np.float32)
    infer_graph(graph)
    return graph


def masked(graph: Graph, x: np.ndarray) -> dict[str, int]:
    """Return the masks that bring the error below 1e-2, where it was above the budget."""
    with Estimator(graph, {graph.inputs[0]: Feed(x)}) as estimator:
        before = find_masks([estimator], masks=False)[1]
        found, after = find_masks([estimator])
    assert before.error > 2e-2
    assert after.error < 1e-2
    assert after.price <= 0.2
    return {each.name: found[each].features for each in graph if each in found}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the roundings of the runs of estimators, which tests fill."""
    counted: list[str] = []
    run = Estimator.run

    def recorded(self: Estimator, rounding: str = "", *args: Any, **kwargs: Any) -> Walk:
        counted.append(rounding)
        return run(self, rounding, *args, **kwargs)

    monkeypatch.setattr(Estimator, "run", recorded)
    return counted


def test_an_input_whose_rounding_is_enlarged() -> None:
    """300 less than numbers near 300: these are rounded to a quarter before."""
    graph = weighted(net("Input x 0 1 x 0=24 1=24 2=16", "BinaryOp d 1 1 x d 0=1 1=1 2=3e2", *pointwise(8, first="d")))
    assert masked(graph, _X + 300) == {"d": FP32}


def test_large_numbers_that_cancel_at_the_end() -> None:
    """The last convolution takes differences of numbers near 1000, as nets that predict noise do."""
    end = ["Convolution large 1 1 c11 large 0=16 1=1 5=1 6=256", "Convolution y 1 1 large y 0=8 1=1 5=1 6=128"]
    graph = weighted(net("Input x 0 1 x 0=24 1=24 2=16", *pointwise(12), *end))
    layer(graph, "large").weights["bias_data"] = np.full(16, 1000, np.float32)
    difference = np.kron(np.eye(8), [1, -1]).astype(np.float32)
    layer(graph, "y").weights["weight_data"] = difference.ravel()
    found = masked(graph, _X)
    assert {"large": FP32, "y": FP32}.items() <= found.items()


@pytest.mark.parametrize("layers", [12, 48])
def test_the_search_runs_a_net_a_fixed_number_of_times(layers: int, runs: list[str]) -> None:
    """However many layers a net has: an attempt, a run for each of about 10 blocks, and two rows of three."""
    lines = pointwise(layers, first="d")
    graph = weighted(net("Input x 0 1 x 0=24 1=24 2=16", "BinaryOp d 1 1 x d 0=1 1=1 2=3e3", *lines))
    with Estimator(graph, {graph.inputs[0]: Feed(_X + 3000)}) as estimator:
        found, precision = find_masks([estimator])
    assert found
    assert precision.error < 2e-2
    assert len(runs) <= 40


def test_a_blob_stays_only_if_its_producer_writes_32_bits() -> None:
    graph = net("Input x 0 1 x 0=64", "UnaryOp a 1 1 x a 0=7", "UnaryOp b 1 1 a b 0=8", "UnaryOp y 1 1 b y 0=7")
    x = np.linspace(0.1, 3.0, 64, dtype=np.float32)
    with Estimator(graph, {graph.inputs[0]: Feed(x)}) as estimator:
        judge = MaskJudge(estimator)
        layers = {each.name: each for each in graph}
        errors = [
            judge.error({layers[name]: FP32 for name in names}) for names in (("b", "y"), ("a", "b"), ("a", "b", "y"))
        ]
    assert errors[0] > 1e-4
    assert errors[1] > 1e-4
    assert errors[2] == 0


def test_every_judge_knows_the_errors_of_arithmetic() -> None:
    """A judge made from the second one once had no noise."""
    graph = weighted(net("Input x 0 1 x 0=24 1=24 2=16", *pointwise(12)))
    with Estimator(graph, {graph.inputs[0]: Feed(_X)}) as estimator:
        first = MaskJudge(estimator)
        second = MaskJudge(estimator.on({graph.inputs[0]: Feed(_X / 2)}), (), first, 1)
        third = MaskJudge(estimator.on({graph.inputs[0]: Feed(_X / 3)}), (), second, 2)
        assert first.noise()
        assert third.noise().keys() == first.noise().keys()


def noisy(mask: int) -> Graph:
    """A net that is off by more than the budget, because the rounding of its input is enlarged."""
    graph = weighted(net("Input x 0 1 x 0=24 1=24 2=16", "BinaryOp d 1 1 x d 0=1 1=1 2=3e3", *pointwise(12, first="d")))
    for each in graph:
        if each.type == "Convolution":
            each.params["featmask"] = mask
    return graph


def test_a_net_that_computes_in_32_bits_already_gets_no_more_masks(runs: list[str]) -> None:
    """Nets that round at run time are such nets. They are slow, so one input is enough to estimate their error."""
    graph = noisy(1)
    with Estimator(graph, {graph.inputs[0]: Feed(_X + 3000)}) as estimator:
        found, precision = find_masks([estimator, estimator])
        assert runs == ["", "fp16", "fp16"]  # in fp32, with noise, and with rounding alone
        assert find_masks([estimator], budget=5e-3)[0]
    assert found == {}
    assert precision.price == 1
    assert precision.error > 2e-2


def differences() -> Graph:
    """A net whose layers hand on their numbers, of which the last one takes differences: all need 32 bits, or none."""
    lines = [*pointwise(6), "Convolution y 1 1 c5 y 0=8 1=1 5=1 6=128"]
    graph = weighted(net("Input x 0 1 x 0=24 1=24 2=16", *lines))
    for each in graph:
        if each.type == "Convolution":
            each.weights["weight_data"] = np.eye(16, dtype=np.float32).ravel()
            each.weights["bias_data"] = np.zeros(each["num_output"], np.float32)
    layer(graph, "y").weights["weight_data"] = np.kron(np.eye(8), [1, -1]).astype(np.float32).ravel()
    return graph


@pytest.mark.parametrize(("error", "meets"), [(1.9e-2, True), (2.1e-2, False)])
def test_costly_masks_reach_the_budget(error: float, *, meets: bool) -> None:
    plan = Plan({}, {}, NoiseShares({}, np.zeros(1)), error, 0.5)
    assert plan.meets(COSTLY_TARGETS) == meets
    assert not plan.meets(TARGETS)


def test_a_net_that_just_misses_the_budget_says_that_masks_are_dear() -> None:
    graph = differences()
    with Estimator(graph, {graph.inputs[0]: Feed(_X + 200)}) as estimator:
        found, precision = find_masks([estimator])
    assert not found
    assert 2e-2 < precision.error < 2.5e-2
    assert precision.closer == "--budget 0.02 takes masks for more than 60% of the multiplications"


@pytest.mark.parametrize(("added", "price"), [(800, 0), (1500, 1)])
def test_an_error_that_makes_a_net_useless_justifies_any_price(added: float, price: float) -> None:
    """Without masks the nets are off by 0.09 and 0.18. YOLOX-Nano was off by 0.08 on aarch64 (estimated: 0.16)."""
    graph = differences()
    with Estimator(graph, {graph.inputs[0]: Feed(_X + added)}) as estimator:
        _, precision = find_masks([estimator])
    assert precision.price == price
    assert (precision.error <= 2e-2) == bool(price)
    assert "masks for more than 60% of the multiplications" in precision.closer


@pytest.mark.parametrize(("left", "is_masked"), [(0.09, True), (0.3, False)])
def test_costly_masks_make_fp16_usable_or_stay_away(
    left: float, monkeypatch: pytest.MonkeyPatch, *, is_masked: bool
) -> None:
    """Of an error of 0.5 a few masks leave 0.45, and many leave 0.09 or 0.3."""
    graph = weighted(net("Input x 0 1 x 0=24 1=24 2=16", *pointwise(12)))

    def best(planner: Planner, targets: Sequence[Target], attempts: int) -> Plan:
        error, price = (left, 0.8) if targets[-1].price > 0.2 else (0.45, 0.1)
        return Plan({layer(graph, "c0"): FP32}, {}, NoiseShares({}, np.zeros(1)), error, price)

    monkeypatch.setattr(Planner, "best", best)
    monkeypatch.setattr(Planner, "confirmed", lambda _, plan: plan)
    monkeypatch.setattr(search_masks, "joint_error", lambda *_: 0.5)
    with Estimator(graph, {graph.inputs[0]: Feed(_X)}) as estimator:
        found, _ = find_masks([estimator])
    assert bool(found) == is_masked


@pytest.mark.parametrize(
    ("effort", "large", "times"), [("quick", 2**27, 0), ("normal", 2**27, 1), ("normal", 0, 0), ("thorough", 0, 1)]
)
def test_quick_searches_and_those_of_large_nets_leave_costly_masks_out(
    effort: Effort, large: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, measure_blocks = list[None](), Planner.measure_blocks

    def counted(self: Planner) -> None:
        calls.append(None)
        measure_blocks(self)

    monkeypatch.setattr(Planner, "measure_blocks", counted)
    monkeypatch.setattr(search_masks, "_LARGE_NET", large)
    graph = differences()
    with Estimator(graph, {graph.inputs[0]: Feed(_X + 3000)}) as estimator:
        _, precision = find_masks([estimator], effort=effort)
    assert len(calls) == times
    assert ("--effort thorough looks for more masks" in precision.details) == (not times)
