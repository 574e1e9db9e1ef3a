"""The rules that decide about nets of a real model: weights in 16 or 8 bits, other modes, and faults."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from onnx2ncnn_opt.api.bisect import bisect
from onnx2ncnn_opt.api.lower import Files, lower
from onnx2ncnn_opt.ir.weight import Encoding, Weight
from onnx2ncnn_opt.outputs import OutputReport
from onnx2ncnn_opt.param.files import read_net, write_net
from onnx2ncnn_opt.runtime.base import Array, Failure, Feed
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.verdict.errors import DEFAULT
from onnx2ncnn_opt.verdict.rules import LEAST_ROUNDING, UNKNOWN_ROUNDING
from onnx2ncnn_opt.verification.inner_values import extract_all
from onnx2ncnn_opt.verification.model import verify_net
from onnx2ncnn_opt.verification.model_runs import any_feeds
from onnx2ncnn_opt.verification.net_facts import NetFacts
from onnx2ncnn_opt.verification.options import Verification
from testing import handmade, present
from testing.exports import save_refilled
from testing.models import serialized, write_model


def output(model: Path, files: Files, mode: str = "fp32") -> OutputReport:
    (found,) = verify_net(model, files.param, files.bin, verification=Verification(modes=(mode,))).outputs
    return found


def wrong_weight(files: Files, factor: float) -> None:
    """A convolution's weights are off by a factor, in the files."""
    graph = read_net(files.param, files.bin).graph
    layer = [layer for layer in graph if layer.type == "Convolution"][2]
    layer.weights["weight_data"] = layer.weights["weight_data"] * np.float32(factor)
    write_net(graph, files.param, files.bin)


def quantise(param: Path, bin: Path, feeds: Mapping[str, Feed]) -> None:
    """Give the convolutions and InnerProducts of a net int8 weights, and scales for these inputs."""
    graph = read_net(param, bin).graph
    with NcnnRunner(param, bin) as runner:
        found: dict[str, Array | Failure] = extract_all(runner, graph, feeds)
    blobs = found | {name: feed.array for name, feed in feeds.items()}
    for layer in graph:
        if layer.type in ("Convolution", "InnerProduct"):
            before = blobs[layer.inputs[0].name]
            assert isinstance(before, np.ndarray)
            rows = layer.weights["weight_data"].reshape(layer["num_output"], -1)
            scales = (127 / np.abs(rows).max(axis=1)).astype(np.float32)
            layer.params["int8_scale_term"] = 2
            integers = np.round(rows * scales[:, None]).astype(np.int8).reshape(-1)
            layer.weights["weight_data"] = Weight(integers, Encoding.INT8)
            layer.weights["weight_data_int8_scales"] = scales
            layer.weights["bottom_blob_int8_scales"] = np.array([127 / np.abs(before).max()], np.float32)
    write_net(graph, param, bin)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_refilled("residual.dyn", tmp_path)


def test_rounding_and_16_bits(model: Path, tmp_path: Path) -> None:
    plain = output(model, lower(model).save(tmp_path / "plain"))
    assert (plain.status, plain.rule) == ("ok", "rounding")
    files = lower(model, storage="fp16").save(tmp_path / "short")
    short = output(model, files)
    assert (short.status, short.rule) == ("ok", "weights")
    assert 1 < present(short.allowed) / present(short.max_rel) < 16  # four times the error of the model's own weights
    half = output(model, files, "bf16")
    assert (half.status, half.rule) == ("ok", "limit")


def test_the_only_number_of_an_output_may_be_right_by_chance(tmp_path: Path, worker: NcnnWorker) -> None:
    """One rounding of the model's weights moves the cosine of two almost equal vectors by 8e-6, others by 5e-4."""
    conversion = lower(save_refilled("siamese.dyn", tmp_path), storage="fp16")
    assert [row.message for row in conversion.verify(worker=worker).outputs] == ["", ""]


def test_a_table_in_16_bits_is_no_fault(worker: NcnnWorker) -> None:
    """As the coordinates of a soft argmax, which the model has in a vector."""
    columns = ", ".join(str(number / 23) for number in range(24))
    graph = (
        "(float[1,8,24] x) => (float[1,8] y) { t = Constant<value_floats = [" + columns + "]>()"
        " p = Softmax(x) w = Mul(p, t) y = ReduceSum<keepdims = 0>(w, axes) }"
    )
    conversion = lower(serialized(graph, axes=[2]), storage="fp16")
    assert [(row.message, row.rule) for row in conversion.verify(worker=worker).outputs] == [("", "weights")]
    policy = lower(
        serialized(
            "(float[1,4] x) => (float y, float[3] deviations) { y = Relu(x) deviations = Identity(d) }",
            d=np.array([-0.7, -0.3, 0.1], np.float32),
        ),
        storage="fp16",
    )
    assert [row.message for row in policy.verify(worker=worker).outputs] == ["", ""]


@pytest.mark.parametrize(("storage", "factor"), [("fp16", 1.02), (None, 1.0001)])
def test_a_fault_is_not_taken_for_rounding(model: Path, tmp_path: Path, storage: str | None, factor: float) -> None:
    """The small one is less than any fixed tolerance of float32, and more than what rounding does."""
    files = lower(model, storage=storage).save(tmp_path / "net")
    wrong_weight(files, factor)
    found = output(model, files)
    assert found.status == "mismatch"
    assert storage or present(found.allowed) < present(found.max_rel) < 1e-3


def test_a_fault_in_small_outputs_is_found(tmp_path: Path, worker: NcnnWorker) -> None:
    """Weights in 16 bits do not let errors of any size pass where the largest output is 1e-7."""
    w, v = np.random.default_rng(0).standard_normal((2, 4, 4, 3, 3)).astype(np.float32)
    graph = (
        "(float[1,4,9,9] x) => (float y) { a = Conv(x, w) r = Relu(a) b = Conv(r, v) s = Sigmoid(b) y = Mul(s, tiny) }"
    )
    conversion = lower(serialized(graph, w=w, v=v, tiny=np.float32(1e-7)), storage="fp16")
    conversion.verify(worker=worker).check()
    conv = next(layer for layer in conversion.graph if layer.type == "Convolution")
    conv.weights["weight_data"] = conv.weights["weight_data"] * np.float32(1.02)
    assert [row.status for row in conversion.verify(worker=worker).outputs] == ["mismatch"]


def test_int8(model: Path, tmp_path: Path) -> None:
    """What 8 bits explain is measured: a fault is more than that, and an error of 8 bits is no fault."""
    conversion = lower(model)
    files, manifest = conversion.save(tmp_path / "net"), conversion.manifest()
    (entry,) = manifest.inputs
    feeds = any_feeds(model, conversion.model, manifest)
    quantise(files.param, files.bin, {entry.blob: Feed(feeds[entry.name], entry.batch_axis)})

    def found() -> OutputReport:
        how = Verification(feeds=feeds)
        return verify_net(model, files.param, files.bin, manifest=manifest, verification=how).outputs[0]

    right = found()
    assert (right.status, right.rule) == ("ok", "weights")
    graph = read_net(files.param, files.bin).graph
    (layer,) = (layer for layer in graph if layer.type == "InnerProduct")
    layer.weights["weight_data_int8_scales"] = layer.weights["weight_data_int8_scales"] * np.float32(2)
    write_net(graph, files.param, files.bin)
    wrong = found()
    assert wrong.status == "mismatch"
    located = bisect(model, files.param, files.bin, verification=Verification(feeds=feeds), write=tmp_path / "pair")
    assert present(located.located).layer.name == layer.name
    pair = present(located.pair)
    assert (pair.layers, pair.report.outputs[0].status) == (1, "mismatch")


CANCELS = "(float[1, 64] x) => (float[1, 8] y) <float k = {3000}> { a = Add(x, k) b = MatMul(a, w) y = MatMul(b, v) }"


def test_errors_of_rounding_are_allowed(tmp_path: Path) -> None:
    """Columns whose sum is nearly 0 leave little but rounding errors of a large number."""
    rng = np.random.default_rng(3)
    weights = rng.standard_normal((64, 64)).astype(np.float32)
    v = rng.standard_normal((64, 8)).astype(np.float32)
    model = write_model(tmp_path, CANCELS, w=weights - weights.mean(0), v=v)
    files = lower(model).save(tmp_path / "net")
    found = output(model, files)
    assert found.status == "ok"
    assert present(found.max_rel) > 1e-4
    strict = Verification(rtol=1e-5, atol=0.0)
    (fixed,) = verify_net(model, files.param, files.bin, verification=strict).outputs
    assert (fixed.status, fixed.allowed) == ("mismatch", 1e-5)


def test_a_model_whose_errors_are_hidden(tmp_path: Path) -> None:
    branches = (
        "then_branch = t () => (float[2, 3] a) { a = Relu(x) }, else_branch = e () => (float[2, 3] b) { b = Neg(x) }"
    )
    text = f"(float[2, 3] x) => (float[2, 3] y) <bool c = {{1}}> {{ y = If(c)<{branches}> }}"
    model = write_model(tmp_path, text, opset=17)
    files = lower(model).save(tmp_path / "net")
    assert verify_net(model, files.param, files.bin).notes == ()
    net = handmade.write_net(tmp_path, "Input x 0 1 x", "ReLU r 1 1 x r", "BinaryOp m 1 1 r y 0=2 1=1 2=1.00005")
    report = verify_net(model, *net)
    assert [(o.status, o.rule) for o in report.outputs] == [("ok", "kernels")]


@pytest.mark.parametrize(
    ("layer", "vulkan", "budget"),
    [
        ("GELU g 1 1 x y", True, DEFAULT.relative),  # its shader has the one with tanh only
        ("GELU g 1 1 x y 0=1", True, UNKNOWN_ROUNDING),
        ("GELU g 1 1 x y 31=16", True, UNKNOWN_ROUNDING),  # on the CPU
        ("Sigmoid g 1 1 x y", True, UNKNOWN_ROUNDING),
        ("GELU g 1 1 x y", False, LEAST_ROUNDING),
    ],
)
def test_errors_that_a_gpu_may_have(tmp_path: Path, layer: str, *, vulkan: bool, budget: float) -> None:
    net = handmade.write_net(tmp_path, "Input x 0 1 x 0=4", layer)
    assert NetFacts.of(*net).least_rounding(vulkan=vulkan) == budget


def test_a_gelu_on_vulkan_is_named_as_the_cause(tmp_path: Path, device: NcnnWorker) -> None:
    model = write_model(tmp_path, "(float[1,8] x) => (float[1,8] y) { y = Gelu (x) }", opset=20)
    files = lower(model).save(tmp_path / "net")
    masked = tmp_path / "masked.param"
    masked.write_text(re.sub("^GELU.*", r"\g<0> 31=16", files.param.read_text(), flags=re.MULTILINE))
    x = np.linspace(-3, -2, 8, dtype=np.float32)[None]  # where the results are small, and the error of tanh large
    is_gpu = device.target.vulkan
    how = Verification(feeds={"x": x}, on="vulkan" if is_gpu else None, modes=["fp32"])
    report = verify_net(model, files.param, files.bin, how, worker=device)
    assert report.ok != is_gpu
    assert any("GELU on Vulkan" in note for note in report.notes) == is_gpu
    assert verify_net(model, masked, files.bin, how, worker=device).ok
