"""One run shows which layers make the noise at the outputs; runs of each layer alone say the same."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from onnx2ncnn_opt.ir.features import Feature
from onnx2ncnn_opt.ir.graph import Graph, Layer
from onnx2ncnn_opt.ir.half import Noise
from onnx2ncnn_opt.ir.shapes import infer_graph
from onnx2ncnn_opt.precision.fp16_run import Estimator, Walk
from onnx2ncnn_opt.precision.mask_judge import MaskJudge
from onnx2ncnn_opt.precision.noise_shares import NoiseShares
from onnx2ncnn_opt.precision.search_masks import find_masks
from onnx2ncnn_opt.runtime.base import Feed
from testing.param_text import bare as net

LAYERS = 40


def deep() -> Graph:
    """Matrix products one after the other, with a branch that is added at the end, and a second output."""
    lines = ["Input x 0 1 b0 0=64 1=32", "Split s 1 2 b0 b1 side"]
    lines += [f"Gemm g{n} 1 1 b{n} b{n + 1} 3=1 5=1 6=1 8=64 9=64 10=-1" for n in range(1, LAYERS)]
    lines += [f"Split t 1 2 b{LAYERS} left second", "Gemm branch 1 1 side part 3=1 5=1 6=1 8=64 9=64 10=-1"]
    graph = net(*lines, "BinaryOp add 2 1 left part y 0=0", "Gemm last 1 1 second z 3=1 5=1 6=1 8=64 9=64 10=-1")
    rng = np.random.default_rng(0)
    for layer in graph:
        if layer.type == "Gemm":
            layer.weights["B_data"] = (rng.standard_normal((64, 64)) / 8).astype(np.float32)
    infer_graph(graph)
    return graph


@pytest.fixture
def estimator() -> Any:
    graph = deep()
    x = np.random.default_rng(1).standard_normal((32, 64), np.float32)
    with Estimator(graph, {graph.inputs[0]: Feed(x)}) as estimate:
        yield estimate


def test_shares_are_those_of_runs_of_single_layers(estimator: Estimator) -> None:
    judge = MaskJudge(estimator)
    noise, shares = judge.noise(), judge.shares()
    reference = judge.reference.outputs

    def alone(layer: Layer) -> np.ndarray:
        outputs = estimator.run(noise={layer: noise[layer]}).outputs
        return np.array([np.square(outputs[blob] - reference[blob]).mean() for blob in reference])

    powers = {layer: alone(layer) for layer in noise}
    expected = np.array([*powers.values()]) / sum(powers.values())
    found = np.array([shares.arithmetic[layer] for layer in noise]) / sum(shares.arithmetic.values())
    assert (np.minimum(found, expected).sum(axis=0) > 0.8).all()
    parts = {layer.name: power > 0 for layer, power in shares.arithmetic.items()}
    assert (parts["branch"].tolist(), parts["last"].tolist(), parts["g1"].tolist()) == ([1, 0], [0, 1], [1, 1])
    assert (shares.rounding < 0.1 * shares.total).all()  # little noise is that of rounding blobs


def test_masks_are_found_in_a_few_runs(estimator: Estimator, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Mapping[Layer, Noise] | None] = []
    run = Estimator.run

    def counted(self: Estimator, rounding: str = "", noise: Any = None, **options: Any) -> Walk:
        runs.append(noise)
        return run(self, rounding, noise, **options)

    monkeypatch.setattr(Estimator, "run", counted)
    before = find_masks([estimator], masks=False)[1].error
    runs.clear()
    found, precision = find_masks([estimator], budget=before / 2)
    assert precision.error <= before / 2
    assert 0 < len(found) < LAYERS
    assert len(runs) <= 16  # each with two kinds of noise, and two more judges


def test_masks_reveal_the_noise_of_layers() -> None:
    """Masks that took a tenth of the noise away are worth a tenth; layers that were hidden behind them show now."""
    first, second, third = (Layer("ReLU", name) for name in ("first", "second", "third"))
    shares = NoiseShares({first: np.array([8.0]), second: np.array([1.0]), third: np.array([0.5])}, np.array([0.5]))
    left = NoiseShares({second: np.array([7.0]), third: np.array([1.5])}, np.array([0.5]))
    shares.correct(left, {first: Feature.NO_FP16_ARITHMETIC})
    assert {layer.name: power.tolist() for layer, power in shares.arithmetic.items()} == {
        "first": [1.0],
        "second": [7.0],
        "third": [1.5],
    }


def test_layers_have_the_noise_beyond_rounding() -> None:
    """One run takes much of the layers' noise for that of rounding; if that is known, their proportions are left."""
    first, second = (Layer("ReLU", name) for name in ("first", "second"))
    shares = NoiseShares({first: np.array([2.0, 4.0]), second: np.array([1.0, 0.0])}, np.array([7.0, 0.0]))
    known = shares.with_rounding(np.array([1.0, 9.0]))
    assert known.rounding.tolist() == [1.0, 9.0]
    assert {layer.name: power.tolist() for layer, power in known.arithmetic.items()} == {
        "first": [6.0, 2.0],  # of the second output no more than half is taken away
        "second": [3.0, 0.0],
    }
