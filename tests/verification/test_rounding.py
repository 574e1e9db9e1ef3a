from __future__ import annotations

import numpy as np
import onnx.parser

from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.verification.rounding import Rounding


def spread(graph: str, x: Array) -> Array:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> g {graph}').SerializeToString()
    reference = OrtRunner(model).run({"x": x})
    return Rounding(model, (), {}).spread({"x": x}, reference)["y"]


def test_sums_move_by_their_last_bits() -> None:
    x = np.linspace(1, 2, 50, dtype=np.float32)
    moved = spread("(float[50] x) => (float[50] y) <float a = {3}> { b = Add(x, a) y = Sub(b, a) }", x)
    assert 0 < moved.max() < 1e-4


def test_what_a_last_bit_decides_moves_by_a_step() -> None:
    graph = "(float[3] x) => (float[3] y) <float a = {3}> { b = Mul(x, a) y = Floor(b) }"
    moved = spread(graph, np.array([1 / 3, 0.5, 0.0], np.float32))
    assert moved[0] >= 1
    assert moved[1] < 1e-4
    assert moved[2] == 0


def test_what_is_exact_decides_for_itself() -> None:
    graph = "(float[4] x) => (float[4] y) <float a = {0}> { b = Relu(x) c = Greater(b, a) y = Cast<to = 1>(c) }"
    assert not spread(graph, np.array([0, -0.0, 1e-7, 1], np.float32)).any()


def test_what_may_be_infinite_moves_without_bounds() -> None:
    graph = "(float[2] x) => (float[2] y) <float a = {3}> { b = Mul(x, a) c = Floor(b) y = Reciprocal(c) }"
    moved = spread(graph, np.array([1 / 3, 1.5], np.float32))
    assert np.isinf(moved[0])
    assert moved[1] < 1e-4
