"""Floats in .param files: what ncnn reads is, bit for bit, what was meant."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx2ncnn_opt.errors import GraphError
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.param.files import write_net
from onnx2ncnn_opt.param.text import format_param, parse_param
from onnx2ncnn_opt.param.values import float_text
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner
from testing.param_text import one_layer

FLT_MAX = float(np.finfo(np.float32).max)
SPECIAL = [0.0, -0.0, 1.0, 0.1, 1e-45, -1e-45, 1.17549435e-38, 1.1754942e-38, FLT_MAX, -FLT_MAX]
SPECIAL += [2.0**24, 2.0**24 + 2, 1e9, 4294967296.0, 123456.789, 9.5367431640625e-07, 8388607.5]


def from_bits(bits: int) -> np.float32:
    return np.float32(np.uint32(bits).view(np.float32))


def finite_floats(count: int) -> Array:
    """Floats of all magnitudes, denormals included."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 2 * count, np.uint32).view(np.float32)
    numbers = np.concatenate([np.array(SPECIAL, np.float32), bits[np.isfinite(bits)]])
    return numbers[:count]


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.integers(0, 2**32 - 1).map(from_bits).filter(np.isfinite))
def test_text_is_short_and_reads_back(number: np.float32) -> None:
    text = float_text(float(number))
    assert len(text) <= 15
    assert "." in text or "e" in text
    assert np.float32(text).tobytes() == number.tobytes()
    line = f"7767517\n2 2\nInput i 0 1 x\nReLU r 1 1 x y 0={text}\n"
    assert np.float32(parse_param(line).graph.layers[1]["slope"]).tobytes() == number.tobytes()


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0.0"), (-0.0, "-0.0"), (1, "1.0"), (0.1, "0.1"), (1e-5, "1e-5"), (1e9, "1e9"), (-1e-45, "-1e-45"),
        (16777216, "16777216.0"), (FLT_MAX, "3.4028235e38"), (np.float64(0.1), "0.1"), (123456.789, "123456.79"),
        (-1.1754944e-38, "-1.1754944e-38"), (np.inf, "3.402823e38"), (-np.inf, "-3.402823e38"), (1e300, "3.402823e38"),
    ],
)  # fmt: skip
def test_texts(number: float, text: str) -> None:
    assert float_text(number) == text


def test_texts_that_are_no_float() -> None:
    with pytest.raises(ValueError, match="NaN"):
        float_text(float("nan"))
    with pytest.raises(GraphError, match="Clip 'l': min=nan: NaN cannot be written"):
        format_param(one_layer("Clip", {"min": float("nan")}))


def run_each(folder: Path, type: str, inputs: int, params: Sequence[dict[str | int, Any]]) -> Array:
    """The results of a layer of each of these parameters, whose inputs are all 1."""
    graph = Graph()
    source = Blob("in")
    graph.add(Layer("Input", "in", (), [source]))
    results = [Blob(f"b{i}") for i in range(len(params))]
    for blob, values in zip(results, params, strict=True):
        graph.add(Layer(type, blob.name, [source] * inputs, [blob], values))
    graph.add(Layer("Concat", "concat", results, [Blob("out")]))
    write_net(graph, folder / "net.param", folder / "net.bin")
    with NcnnRunner(folder / "net.param", folder / "net.bin") as runner:
        return runner.run({"in": np.ones(1, np.float32)})["out"]


def test_ncnn_reads_the_same_bits(tmp_path: Path) -> None:
    """Padding writes its parameter into the output without computing, so that even denormals arrive."""
    numbers = finite_floats(2000)
    found = run_each(tmp_path, "Padding", 1, [{"left": 1, "value": float(number)} for number in numbers])
    assert found[0::2].tobytes() == numbers.tobytes()


def test_ncnn_reads_arrays_of_floats(tmp_path: Path) -> None:
    """An Eltwise sum of ones with one coefficient each, the other zero; denormals would be flushed there."""
    numbers = [number for number in finite_floats(300) if abs(number) > np.finfo(np.float32).tiny]
    found = run_each(tmp_path, "Eltwise", 2, [{"op_type": 1, "coeffs": (float(number), 0.0)} for number in numbers])
    assert found.tobytes() == np.array(numbers).tobytes()
