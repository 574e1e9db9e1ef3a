"""Models as ONNX Runtime's optimiser and quantiser write them, with com.microsoft's operators."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime  # type: ignore[import-untyped]
import pytest
from onnx import numpy_helper

from onnx2ncnn_opt.api.inspect import inspect
from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.cli.summary import verdict
from onnx2ncnn_opt.verification.options import Verification
from testing.compared import compare, types
from testing.op_cases import fill_weights

REL = 3e-5
# A block of a transformer, and a convolution, with every fusion for the CPU.
FUSED = """
(float[1,5,8] x, float[1,3,6,6] i) => (float[] y, float[] z) <
    float[8,16] w1, float[16] b1, float[16,8] w2, float[8] gamma, float[8] beta, float[4,3,3,3] k, float[4] kb,
    float root = {1.4142135}, float one = {1}, float half = {0.5}
> {
    h = MatMul(x, w1)
    hb = Add(h, b1)
    d = Div(hb, root)
    e = Erf(d)
    e1 = Add(e, one)
    m = Mul(hb, e1)
    g = Mul(m, half)
    o = MatMul(g, w2)
    s = Add(o, x)
    n = LayerNormalization(s, gamma, beta)
    t = Transpose<perm = [0, 2, 1]>(n)
    y = MatMul(n, t)
    c = Conv(i, k, kb)
    z = Relu(c)
}
"""
DYNAMIC = """
(float[4,8] x) => (float[] y) <uint8[8,5] w, uint8 wz = {131}, float ws = {0.0117}> {
    q, s, z = DynamicQuantizeLinear(x)
    i = MatMulInteger(q, w, z, wz)
    f = Cast<to = 1>(i)
    t = Mul(s, ws)
    y = Mul(f, t)
}
"""
# Convolutions, an addition, a pooling, and a fully connected layer.
PLAIN = """
(float[1,3,8,8] x) => (float[] y) <float[4,3,3,3] k, float[4] kb, float[4,1,3,3] d, float[5,4] g, float[5] gb> {
    c = Conv<pads = [1, 1, 1, 1]>(x, k, kb)
    r = Relu(c)
    e = Conv<pads = [1, 1, 1, 1], group = 4>(r, d)
    a = Add(r, e)
    p = GlobalAveragePool(a)
    f = Flatten(p)
    y = Gemm<transB = 1>(f, g, gb)
}
"""
# Several steps of a quantised LSTM; its weights are random bytes.
STEPS = """
(float[5,2,5] x) => (float[] y) <
    int8[2,5,16] w, int8[2,4,16] r, float[2,32] b, float[2] ws = {0.006, 0.009}, float[2] rs = {0.008, 0.007},
    int8[2] z = {0, 0}
> {
    y = com.microsoft.DynamicQuantizeLSTM<hidden_size = 4, direction = "bidirectional">(
        x, w, r, b, , , , , ws, z, rs, z
    )
}
"""


def parsed(text: str) -> onnx.ModelProto:
    header = '<ir_version: 10, opset_import: ["": 17, "com.microsoft": 1]> net'
    model: onnx.ModelProto = onnx.parser.parse_model(header + text)
    fill_weights(model, 0)
    return model


def feeds(model: onnx.ModelProto) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in model.graph.input}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("text", "operators"),
    [
        (FUSED, {"Gelu", "FusedConv", "FusedMatMul", "SkipLayerNormalization"}),
        (DYNAMIC, {"DynamicQuantizeMatMul"}),
    ],
)
def test_operators_of_the_optimiser(text: str, operators: set[str], tmp_path: Path) -> None:
    model, path = parsed(text), tmp_path / "optimised.onnx"
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 4
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    optimised = onnx.load(path)
    assert {node.op_type for node in optimised.graph.node if node.domain == "com.microsoft"} == operators
    compare(optimised, feeds(model), rel=REL, reference=model if text == FUSED else None)


class Calibration:
    """What the quantiser asks for inputs."""

    def __init__(self, feeds: dict[str, Any]) -> None:
        self.left = [feeds]

    def get_next(self) -> dict[str, Any] | None:
        return self.left.pop() if self.left else None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("form", ["QDQ", "QOperator", "dynamic"])
def test_operators_of_the_quantiser(form: str, tmp_path: Path) -> None:
    from onnxruntime import quantization

    model, made = parsed(PLAIN), tmp_path / "quantised.onnx"
    given = feeds(model)
    if form == "dynamic":
        quantization.quantize_dynamic(model, made)
    else:
        quantization.quantize_static(
            model,
            made,
            Calibration(given),
            quant_format=quantization.QuantFormat[form],
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QUInt8 if form == "QOperator" else quantization.QuantType.QInt8,
            per_channel=form == "QDQ",
        )
    conversion = compare(onnx.load(made), given, rel=REL)
    if form == "QDQ":
        assert types(conversion).count("BinaryOp") < 12, "a zero point that is added and subtracted falls away"


def test_a_quantised_model_is_verified_with_its_rounding() -> None:
    """A number at the middle of two steps may be rounded the other way."""
    text = "(float[1,3] x) => (float[] y) <float s = {0.003921569}> { q = QuantizeLinear(x, s)"
    conversion = lower(parsed(f"{text} y = DequantizeLinear(q, s) }}"))
    given = {"x": np.array([[1.0, 0.5, 0.25]], np.float32)}  # 255, 127.5 and 63.75 steps
    (rounded,) = [layer for layer in conversion.graph if layer.type == "UnaryOp"]
    rounded.params["op_type"] = 2  # floor
    assert conversion.verify(verification=Verification(feeds=given)).ok
    assert not conversion.verify(verification=Verification(feeds=given, rtol=1e-3)).ok
    rounded.params["op_type"] = 8  # log
    assert not conversion.verify(verification=Verification(feeds=given)).ok


def test_a_quantised_lstm_is_as_near_to_the_float_model_as_the_model_is() -> None:
    """ONNX Runtime rounds each state, and ncnn none: rounding the operand took 80 layers, and made nothing exact."""
    large = (
        STEPS.replace("[5,2,5]", "[40,2,5]").replace("0.006, 0.009", "0.06, 0.09").replace("0.008, 0.007", "0.08, 0.07")
    )
    for text in (STEPS, large):
        conversion = lower(parsed(text))
        assert [layer.type for layer in conversion.graph] == ["Input", "Permute", "Reshape", "LSTM", "Reshape"]
        report = conversion.verify()
        assert report.outputs[0].rule == "quantised"
        assert "explained by the model's own roundings" in verdict(report, "net", "model")
    [lstm] = [layer for layer in conversion.graph if layer.type == "LSTM"]
    lstm.weights["bias_c_data"] = lstm.weights["bias_c_data"] + np.float32(0.3)
    assert not conversion.verify().ok


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("kind", ["int8", "uint8"])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_forms_of_a_quantised_lstm(direction: str, kind: str, columns: bool, tmp_path: Path) -> None:
    count = 1 + (direction == "bidirectional")
    scales = f"{count}, 16" if columns else f"{count}"
    model = parsed(
        f"(float[3,2,5] x) => (float[] y) <{kind}[{count},5,16] w, {kind}[{count},4,16] r, float[{count},32] b, "
        f"float[{scales}] ws, float[{scales}] rs, {kind}[{scales}] wz, {kind}[{scales}] rz> {{ "
        f'y = com.microsoft.DynamicQuantizeLSTM<direction = "{direction}", hidden_size = 4>'
        "(x, w, r, b, , , , , ws, wz, rs, rz) }"
    )
    rng = np.random.default_rng(2)
    for tensor in model.graph.initializer:
        dims = tuple(tensor.dims)
        if tensor.name in ("ws", "rs"):
            tensor.CopyFrom(numpy_helper.from_array(rng.uniform(0.005, 0.01, dims).astype(np.float32), tensor.name))
        elif tensor.name in ("wz", "rz"):
            tensor.CopyFrom(numpy_helper.from_array(np.full(dims, 100 * (kind == "uint8"), kind), tensor.name))
    conversion = lower(model)
    assert "LSTM" in [layer.type for layer in conversion.graph]
    assert conversion.verify().ok
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    assert not inspect(path).refused
