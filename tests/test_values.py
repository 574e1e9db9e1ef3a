"""Inputs that are bound to a value: constants of the net, and fed to ONNX Runtime."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import UnsupportedError, UsageError
from onnx2ncnn_opt.manifest import read_manifest
from onnx2ncnn_opt.verification.model import verify_net
from onnx2ncnn_opt.verification.options import Verification
from testing.models import parsed, write_model
from testing.worker import WORKER

# As silero-vad has it: one model for two sample rates.
TWO_RATES = (
    "(float[1, 8] x, int64 sr) => (float[1, 8] y) <int64 rate = {16000}, float a = {0.5}, float b = {2.0}>"
    "{ is_wide = Equal(sr, rate) y = If(is_wide) <then_branch = wide () => (float[1, 8] t) { t = Mul(x, a) },"
    " else_branch = narrow () => (float[1, 8] e) { e = Add(x, b) }> }"
)


@pytest.mark.parametrize(("rate", "operation"), [(16000, 2), (8000, 0)])
def test_a_branch_that_a_value_chooses(rate: int, operation: int) -> None:
    conversion = lower(parsed(TWO_RATES), values={"sr": rate})
    assert [port.name for port in conversion.inputs] == ["x"]
    [layer] = [layer for layer in conversion.graph if layer.type == "BinaryOp"]
    assert layer["op_type"] == operation
    conversion.verify(worker=WORKER).check()


def test_the_hint_names_the_option() -> None:
    with pytest.raises(UnsupportedError) as error:
        lower(parsed(TWO_RATES.replace("Mul(x, a)", "Elu(x)")))  # no tail has an Elu
    [node] = error.value.nodes
    assert node.hint == "bind it with --value sr=..."
    with pytest.raises(UsageError, match=r"no input is called 'rate'; inputs are: x: float\[1, 8\]; sr: int64"):
        lower(parsed(TWO_RATES), values={"rate": 1})


def test_operands_that_have_to_be_constant_name_their_inputs() -> None:
    graph = "(float[1, 8] x, int64[1] k) => (float[1, n] y, int64[1, n] i) { y, i = TopK(x, k) }"
    with pytest.raises(UnsupportedError, match="bind it with --value k="):
        lower(parsed(graph))
    lower(parsed(graph), values={"k": 3}).verify(worker=WORKER).check()


def test_images_are_not_taken_for_flags() -> None:
    graph = (
        "(float[1, 8] x, int64[1] axes) => (float y) { s = Cast<to = 7>(x) t = Flatten<axis = 0>(s) y = Expand(x, t) }"
    )
    with pytest.raises(UnsupportedError) as error:
        lower(parsed(graph))
    assert not any("--value" in node.hint for node in error.value.nodes)


@pytest.mark.parametrize(
    ("declared", "value", "held"),
    [
        ("bool[1]", True, [True]),
        ("bool", 0, False),
        ("float", 0.25, 0.25),
        ("float[1]", 3, [3.0]),
        ("int64[2]", [640, 480], [640, 480]),
        ("int64[n]", (1, 2, 3), [1, 2, 3]),
        ("int64[1, 2]", [7, 8], [[7, 8]]),
        ("int32[2, 2]", 5, [[5, 5], [5, 5]]),
        ("uint8[2]", np.array([255, 0], np.uint8), [255, 0]),
        ("float16", 0.1, float(np.float16(0.1))),
    ],
)
def test_values_take_the_inputs_type_and_shape(declared: str, value: Any, held: Any) -> None:
    model = parsed(
        f"(float[2, 2] x, {declared} v) => (float y) {{ f = Cast<to = 1>(v) s = ReduceSum(f) y = Mul(x, s) }}"
    )
    conversion = lower(model, values={"v": value})
    [entry] = conversion.manifest().values
    assert np.array_equal(entry.array(), held)
    assert conversion.model.values["v"].shape == np.shape(held)
    conversion.verify(worker=WORKER).check()


@pytest.mark.parametrize(
    ("declared", "value", "said"),
    [
        ("int64", 0.5, "cannot hold the value 0.5"),
        ("uint8", 256, "cannot hold the value 256"),
        ("bool", 2, "cannot hold the value 2"),
        ("int64", float("inf"), "cannot hold the value inf"),
        ("float16", 1e6, "cannot hold"),
        ("int64[2]", [1, 2, 3], r"has shape \[3\]"),
        ("int64[2]", "16000", "has to be a number"),
        ("int64[2]", [], "has to be a number"),
        ("int64[2]", [[1], [2, 3]], "not an array"),
        ("int64[2, n]", 1, "size n is dynamic"),
        ("int64[100000, 100000]", 1, "too large"),
    ],
)
def test_values_that_do_not_fit(declared: str, value: Any, said: str) -> None:
    model = parsed(f"(float[2] x, {declared} v) => (float y) {{ f = Cast<to = 1>(v) y = Mul(x, f) }}")
    with pytest.raises(UsageError, match=said):
        lower(model, values={"v": value})


def test_sizes_of_a_value_hold_for_other_inputs() -> None:
    model = parsed("(float[n, 2] x, int64[n, 1] m) => (float[n, 2] y) { f = Cast<to = 1>(m) y = Mul(x, f) }")
    conversion = lower(model, values={"m": [[1], [0], [1]]})
    assert conversion.inputs[0].shape == (3, 2)
    assert lower(model, values={"m": 1}, shapes={"x": (3, 2)}).model.values["m"].tolist() == [[1], [1], [1]]
    assert lower(model, values={"m": 1}, shapes={"m": (4, 1)}).inputs[0].shape == (4, 2)
    with pytest.raises(UsageError, match="cannot be both"):
        lower(model, values={"m": [[1], [0], [1]]}, shapes={"x": (4, 2)})


def test_a_default_is_replaced() -> None:
    model = parsed("(float[4] x, float t = {0.5}) => (float[4] y) { y = Mul(x, t) }")
    assert len(model.graph.input) == 2
    conversion = lower(model, values={"t": 3.0})
    assert [layer["b"] for layer in conversion.graph if layer.type == "BinaryOp"] == [3.0]
    conversion.verify(worker=WORKER).check()


def test_values_of_inputs_that_a_cut_leaves_out() -> None:
    model = parsed("(float[4] x, float t) => (float[4] z) { y = Abs(x) z = Mul(y, t) }")
    lower(model, values={"t": 3.0}, outputs=["y"]).verify(worker=WORKER).check()


def test_the_manifest_says_it_and_verify_reads_it(tmp_path: Path) -> None:
    path = write_model(tmp_path, TWO_RATES)
    files = lower(path, values={"sr": 8000}).save(tmp_path / "net")
    manifest = read_manifest(files.manifest)
    assert [(entry.name, entry.dtype, entry.value) for entry in manifest.values] == [("sr", "int64", 8000)]
    verified = partial(verify_net, path, files.param, files.bin, manifest=manifest)
    assert verified().ok
    assert not verified(Verification(values={"sr": 16000})).ok
    x = np.ones((1, 8), np.float32)
    assert verified(Verification(feeds={"x": x, "sr": np.array(8000)})).ok
    with pytest.raises(UsageError, match="sr is bound to 8000"):
        verified(Verification(feeds={"x": x, "sr": np.array(16000)}))
