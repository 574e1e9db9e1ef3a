"""Quantised models as ONNX Runtime's quantiser writes them, and com.microsoft's quantised operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
import pytest
from onnx import helper

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.verification.options import Verification
from onnx2ncnn_opt.verification.tolerance import DEFAULT
from testing.compared import compare, compare_nodes, model_of, types

REL = 3e-5
SCALES = {"xs": np.float32(0.0213), "ws": np.float32(0.0117), "ys": np.float32(0.0519)}
ZEROS = {"xz": np.uint8(120), "wz": np.uint8(131), "yz": np.uint8(117)}


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def bytes_of(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


class Calibration:
    """Inputs for the quantiser."""

    def __init__(self, feeds: dict[str, Any]) -> None:
        self.left = [feeds]

    def get_next(self) -> dict[str, Any] | None:
        return self.left.pop() if self.left else None


@pytest.fixture
def plain(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """Convolutions, an addition, a pooling, and a fully connected layer."""
    nodes = [
        helper.make_node("Conv", ["x", "k", "kb"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Conv", ["r", "d"], ["e"], pads=[1, 1, 1, 1], group=4),
        helper.make_node("Add", ["r", "e"], ["a"]),
        helper.make_node("GlobalAveragePool", ["a"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "g", "gb"], ["y"], transB=1),
    ]
    constants = {
        "k": normal(1, 4, 3, 3, 3),
        "kb": normal(2, 4),
        "d": normal(3, 4, 1, 3, 3),
        "g": normal(4, 5, 4),
        "gb": normal(5, 5),
    }
    feeds = {"x": normal(0, 1, 3, 8, 8)}
    path = tmp_path / "plain.onnx"
    onnx.save(model_of(nodes, feeds, constants), path)
    return path, feeds


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("form", ["QDQ", "QOperator", "dynamic"])
def test_what_the_quantiser_writes(form: str, plain: tuple[Path, dict[str, Any]]) -> None:
    from onnxruntime import quantization

    path, feeds = plain
    made = path.with_name("quantised.onnx")
    if form == "dynamic":
        quantization.quantize_dynamic(path, made)
    else:
        quantization.quantize_static(
            path,
            made,
            Calibration(feeds),
            quant_format=quantization.QuantFormat[form],
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QUInt8 if form == "QOperator" else quantization.QuantType.QInt8,
            per_channel=form == "QDQ",
        )
    conversion = compare(onnx.load(made), feeds, rel=REL)
    if form == "QDQ":
        assert types(conversion).count("BinaryOp") < 12, "a zero point that is added and subtracted falls away"


def test_a_quantised_model_is_verified_with_what_it_rounds() -> None:
    """A number at the middle of two steps may be rounded the other way."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s"], ["y"]),
    ]
    feeds = {"x": np.array([[1.0, 0.5, 0.25]], np.float32)}  # 255, 127.5 and 63.75 steps
    conversion = lower(model_of(nodes, feeds, {"s": np.float32(1 / 255)}))
    (rounded,) = [layer for layer in conversion.graph if layer.type == "UnaryOp"]
    rounded.params["op_type"] = 2  # floor
    assert conversion.verify(verification=Verification(feeds=feeds)).ok
    assert not conversion.verify(verification=Verification(feeds=feeds, tolerance=DEFAULT)).ok
    rounded.params["op_type"] = 8  # log
    assert not conversion.verify(verification=Verification(feeds=feeds)).ok


@pytest.mark.parametrize("operator", ["QLinearAdd", "QLinearMul"])
@pytest.mark.parametrize("constant", [False, True])
def test_two_operands(operator: str, constant: bool) -> None:
    made = helper.make_node(operator, ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz"], ["y"], domain="com.microsoft")
    inputs, constants = {"x": bytes_of(0, 2, 3, 4)}, {"w": bytes_of(1, 3, 4)}
    if not constant:
        inputs, constants = inputs | constants, {}
    compare_nodes(made, inputs, constants | SCALES | ZEROS, dtype=np.uint8)


@pytest.mark.parametrize(
    ("operator", "attributes"),
    [
        ("QLinearSigmoid", {}),
        ("QLinearLeakyRelu", {"alpha": 0.2}),
        ("QLinearSoftmax", {"opset": 13, "axis": -1}),
        ("QLinearSoftmax", {"opset": 11, "axis": 2}),
        ("QLinearGlobalAveragePool", {}),
        ("QLinearAveragePool", {"kernel_shape": [2, 2], "strides": [2, 2]}),
    ],
)
def test_one_operand(operator: str, attributes: dict[str, Any]) -> None:
    made = helper.make_node(operator, ["x", "xs", "xz", "ys", "yz"], ["y"], domain="com.microsoft", **attributes)
    scales = SCALES | {"ys": np.float32(1 / 256)} if operator in ("QLinearSigmoid", "QLinearSoftmax") else SCALES
    zeros = {name: ZEROS[name] for name in ("xz", "yz")}
    constants = {name: scales[name] for name in ("xs", "ys")} | zeros
    if operator == "QLinearSoftmax":
        constants["yz"] = np.uint8(0)
    compare_nodes(made, {"x": bytes_of(0, 2, 3, 4, 6)}, constants, dtype=np.uint8)


def test_concat() -> None:
    made = helper.make_node(
        "QLinearConcat", ["ys", "yz", "x", "xs", "xz", "w", "ws", "wz"], ["y"], axis=1, domain="com.microsoft"
    )
    inputs = {"x": bytes_of(0, 2, 3, 4), "w": bytes_of(1, 2, 5, 4)}
    compare_nodes(made, inputs, SCALES | ZEROS, dtype=np.uint8)


@pytest.mark.parametrize("turned", [0, 1])
@pytest.mark.parametrize("quantised", [False, True])
def test_gemm(turned: int, quantised: bool) -> None:
    names = ["x", "xs", "xz", "w", "ws", "wz", "c"] + (["ys", "yz"] if quantised else [])
    made = helper.make_node("QGemm", names, ["y"], transB=turned, domain="com.microsoft")
    used = {name: array for name, array in (SCALES | ZEROS).items() if name in names}
    constants = {"w": bytes_of(1, *((5, 6) if turned else (6, 5))), "c": np.arange(-2, 3, dtype=np.int32) * 300, **used}
    dtype = np.uint8 if quantised else np.float32
    compare_nodes(made, {"x": bytes_of(0, 3, 6)}, constants, dtype=dtype, rel=REL)


@pytest.mark.parametrize("biased", [False, True])
def test_dynamic_matmul(biased: bool) -> None:
    made = helper.make_node(
        "DynamicQuantizeMatMul", ["x", "w", "ws", "wz"] + (["b"] if biased else []), ["y"], domain="com.microsoft"
    )
    constants = {"w": bytes_of(1, 8, 5), "ws": SCALES["ws"], "wz": ZEROS["wz"]} | (
        {"b": normal(2, 5)} if biased else {}
    )
    compare_nodes(made, {"x": normal(0, 2, 4, 8)}, constants, rel=REL)


def test_what_onnx_runtime_makes_of_a_dynamic_model(plain: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("MatMulInteger", ["q", "w", "z", "wz"], ["i"]),
        helper.make_node("Cast", ["i"], ["f"], to=1),
        helper.make_node("Mul", ["s", "ws"], ["t"]),
        helper.make_node("Mul", ["f", "t"], ["y"]),
    ]
    feeds = {"x": normal(0, 4, 8)}
    model = model_of(nodes, feeds, {"w": bytes_of(1, 8, 5), "wz": ZEROS["wz"], "ws": SCALES["ws"]})
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.log_severity_level = 4
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    optimised = onnx.load(tmp_path / "optimised.onnx")
    assert [node.op_type for node in optimised.graph.node] == ["DynamicQuantizeMatMul"]
    compare(optimised, feeds, rel=REL)


@pytest.mark.parametrize(
    ("bits", "zeros"),
    [(2, "none"), (2, "packed"), (2, "floats"), (4, "none"), (4, "packed"), (4, "floats"), (8, "none"), (8, "packed")],
)
@pytest.mark.parametrize("biased", [False, True])
def test_weights_of_few_bits(bits: int, zeros: str, biased: bool) -> None:
    inner, outputs, block = 40, 6, 16  # the last block is short
    rng = np.random.default_rng(1)
    blocks = -(-inner // block)
    constants = {
        "w": rng.integers(0, 256, (outputs, blocks, block * bits // 8)).astype(np.uint8),
        "s": rng.uniform(0.01, 0.1, (outputs, blocks)).astype(np.float32),
    }
    if zeros == "packed":
        constants["z"] = rng.integers(0, 256, (outputs, -(-blocks * bits // 8))).astype(np.uint8)
    elif zeros == "floats":
        constants["z"] = rng.uniform(0, 2**bits, (outputs, blocks)).astype(np.float32)
    if biased:
        constants["b"] = normal(2, outputs)
    names = ["x", "w", "s", "z" if "z" in constants else "", "", "b" if biased else ""]
    sizes: dict[str, Any] = {"K": inner, "N": outputs, "bits": bits, "block_size": block}
    made = helper.make_node("MatMulNBits", names, ["y"], domain="com.microsoft", **sizes)
    compare_nodes(made, {"x": normal(0, 2, 3, inner)}, constants, rel=REL)
