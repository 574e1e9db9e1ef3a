"""One run shows which layers make the noise at the outputs; runs of each layer alone say the same."""

from typing import Any

import numpy as np
import pytest

from onnx2ncnn_opt.ir.graph import Graph, Layer
from onnx2ncnn_opt.ir.shapes import infer_graph
from onnx2ncnn_opt.precision.fp16_run import Estimator
from onnx2ncnn_opt.precision.mask_judge import MaskJudge
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
    errors = [error / size for error, size in judge.errors().values()]
    noise, (own, rounded) = judge.noise(), judge.shares(np.square(errors))
    reference = judge.reference.outputs

    def alone(layer: Layer) -> np.ndarray:
        outputs = estimator.run(noise={layer: noise[layer]}).outputs
        return np.array([np.square(outputs[blob] - reference[blob]).mean() for blob in reference])

    powers = {layer: alone(layer) for layer in noise}
    expected = np.array([*powers.values()]) / sum(powers.values())
    found = np.array([own[layer] for layer in noise]) / sum(own.values())
    assert (np.minimum(found, expected).sum(axis=0) > 0.8).all()
    parts = {layer.name: power > 0 for layer, power in own.items()}
    assert (parts["branch"].tolist(), parts["last"].tolist(), parts["g1"].tolist()) == ([1, 0], [0, 1], [1, 1])
    assert (sum(rounded.values()) < 0.1 * np.square(errors)).all()  # little noise is that of rounding blobs
