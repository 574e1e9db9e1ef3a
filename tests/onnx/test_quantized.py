"""Quantised models as nets with int8 layers."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnx2ncnn_opt.api.lower import Conversion, lower
from onnx2ncnn_opt.cli.summary import conversion_blocks, conversion_fields
from onnx2ncnn_opt.ir.features import Feature
from onnx2ncnn_opt.verification.options import Verification
from testing.compared import types
from testing.models import parsed

SIGNED = "float sx = {0.03}, int8 zx = {0}, float sy = {0.05}, int8 zy = {0}, float sw = {0.01}, int8 zw = {0}"
UNSIGNED = "float sx = {0.02}, uint8 zx = {100}, float sy = {0.03}, uint8 zy = {0}, float sw = {0.01}, int8 zw = {0}"


def model(shape: str, nodes: str, constants: str, *, opset: int = 17, **arrays: Any) -> onnx.ModelProto:
    """Return a model of a float x and y."""
    return parsed(f"(float[{shape}] x) => (float[] y) <{constants}> {{ {nodes} }}", opset, **arrays)


def pair(name: str, of: str, ends: str = "x") -> str:
    """Return QuantizeLinear and DequantizeLinear of a value."""
    q = f"QuantizeLinear({of}, s{ends}, z{ends})"
    return f"{name}_q = {q} {name} = DequantizeLinear({name}_q, s{ends}, z{ends})"


def integers(*shape: int, seed: int = 0, dtype: Any = np.int8) -> np.ndarray:
    return np.random.default_rng(seed).integers(-127, 128, shape).astype(dtype)


def checked(proto: onnx.ModelProto, verification: Verification = Verification(effort="thorough")) -> Conversion:
    conversion = lower(proto, quantized="keep")
    report = conversion.verify(verification)
    assert report.ok, [str(row) + row.message for row in report.outputs]
    return conversion


def int8_types(conversion: Conversion) -> list[str]:
    return [layer.type for layer in conversion.graph if any("scale" in name for name in layer.weights)]


WEIGHT = "v = DequantizeLinear<axis = 0>(w, sw, zw)"


@pytest.mark.parametrize("constants", [SIGNED, UNSIGNED])
def test_convolutions_beside_a_shortcut(constants: str) -> None:
    nodes = f"""
        {pair("a", "x")} {WEIGHT} c = Conv<pads = [1,1,1,1]>(a, v, b) r = Relu(c) {pair("d", "r", "y")}
        e = Conv<pads = [1,1,1,1]>(d, v, b) {pair("f", "e")} g = Add(f, a) {pair("y", "g", "y")}
    """
    b = np.linspace(-0.5, 0.5, 8).astype("f4")
    conversion = checked(model("1,8,9,7", nodes, constants, w=integers(8, 8, 3, 3), b=b))
    assert int8_types(conversion) == ["Convolution", "Convolution"]
    assert "UnaryOp" not in types(conversion), "no rounding is left"
    assert set(conversion.kept.values()) == {""}


def test_scales_and_weights_are_the_models() -> None:
    w, scales = integers(6, 4, 3, 3), np.linspace(0.005, 0.02, 6).astype("f4")
    nodes = f"{pair('a', 'x')} {WEIGHT} y = Conv(a, v)"
    constants = "float sx = {0.03}, int8 zx = {0}"
    conversion = checked(model("1,4,9,7", nodes, constants, w=w, sw=scales, zw=np.zeros(6, "i1")))
    [layer] = [layer for layer in conversion.graph if layer.type == "Convolution"]
    np.testing.assert_array_equal(layer.weights["weight_data"].reshape(w.shape), w)
    np.testing.assert_allclose(layer.weights["weight_data_int8_scales"], 1 / scales, rtol=1e-6)
    np.testing.assert_allclose(layer.weights["bottom_blob_int8_scales"], [1 / 0.03], rtol=1e-6)
    assert types(conversion) == ["Convolution"], "the layer clips its input itself"


def test_float_layers_between_the_models_roundings() -> None:
    nodes = f"{pair('a', 'x')} {WEIGHT} c = Conv(a, v) {pair('y', 'c', 'y')}"
    proto = model("1,4,9,7", nodes, SIGNED, w=integers(6, 4, 3, 3))
    conversion = lower(proto, quantized="float")
    assert not int8_types(conversion)
    assert types(conversion).count("UnaryOp") == 2
    assert conversion.verify().ok
    assert not conversion.kept


@pytest.mark.parametrize("constants", [SIGNED, UNSIGNED])
def test_operators_of_integers(constants: str) -> None:
    nodes = """
        q = QuantizeLinear(x, sx, zx)
        c = QLinearConv<pads = [1,1,1,1]>(q, sx, zx, w, sw, zw, sy, zy, b)
        p = MaxPool<kernel_shape = [2,2], strides = [2,2]>(c)
        a = com.microsoft.QLinearAdd(p, sy, zy, p, sy, zy, sx, zx)
        g = com.microsoft.QLinearGlobalAveragePool(a, sx, zx, sy, zy)
        f = Flatten(g)
        m = QLinearMatMul(f, sy, zy, k, sw, zw, sx, zx)
        y = DequantizeLinear(m, sx, zx)
    """
    arrays: dict[str, Any] = {
        "w": integers(8, 4, 3, 3),
        "b": integers(8, seed=1, dtype=np.int32) * 20,
        "k": integers(8, 5, seed=2),
    }
    conversion = checked(model("1,4,8,8", nodes, constants, **arrays))
    assert int8_types(conversion) == ["Convolution", "InnerProduct"]


@pytest.mark.parametrize(
    ("scales", "kinds"), [("tensor", {"B_data_int8_scale"}), ("channel", {"B_data_quantize_scales"})]
)
def test_products_of_rows(scales: str, kinds: set[str]) -> None:
    """A scale for each row needs blocks: ncnn's other int8 Gemm has one for all."""
    size = 16 if scales == "channel" else 1
    sw = np.linspace(0.005, 0.02, size).astype("f4").reshape(-1 if size > 1 else ())
    weight = "v = DequantizeLinear<axis = 1>(w, sw, zw)"
    nodes = f"{pair('a', 'x')} {weight} m = MatMul(a, v) c = Add(m, b) {pair('y', 'c')}"
    arrays: dict[str, Any] = {
        "w": integers(40, 16),
        "sw": sw,
        "zw": np.zeros(sw.shape, "i1"),
        "b": np.linspace(-1, 1, 16).astype("f4"),
    }
    conversion = checked(model("1,7,40", nodes, "float sx = {0.03}, int8 zx = {0}", **arrays))
    [gemm] = [layer for layer in conversion.graph if layer.type == "Gemm"]
    assert kinds <= set(gemm.weights)


@pytest.mark.parametrize(
    ("shape", "weight", "conv", "reason"),
    [
        ("1,16,6,6", (16, 8, 3, 3), "Conv<group = 2>", "groups of 8n channels is wrong on x86"),
        ("1,8,9", (6, 8, 3), "Conv", "ncnn has no int8 Convolution1D"),
    ],
)
def test_products_that_stay_float_are_named(shape: str, weight: tuple[int, ...], conv: str, reason: str) -> None:
    """The other convolution is int8."""
    rank = len(weight) - 2
    nodes = f"""
        {pair("a", "x")} {WEIGHT} u = DequantizeLinear(k, sw, zw) c = Conv(a, u) {pair("d", "c", "y")} y = {conv}(d, v)
    """
    channels = int(shape.split(",")[1])
    k = integers(channels, channels, *(1,) * rank, seed=3)
    proto = model(shape, nodes, SIGNED, w=integers(*weight), k=k)
    conversion = lower(proto, quantized="keep")
    assert conversion.verify().ok
    if rank == 2:
        assert int8_types(conversion) == ["Convolution"]
        assert any(reason in text for text in conversion.kept.values())
    else:
        assert not int8_types(conversion)
        assert not conversion.kept, "without an int8 layer the net rounds as the model does"


@pytest.mark.parametrize("zero", [3, 128])
def test_weights_with_zero_points(zero: int) -> None:
    """Numbers from -127 to 127 are exact in int8; others stay float."""
    constants = SIGNED.replace("int8 zw = {0}", f"uint8 zw = {{{zero}}}")
    w = np.clip(integers(6, 4, 3, 3).astype(int) + 128, 1, 255).astype(np.uint8)
    conversion = checked(model("1,4,9,7", f"{pair('a', 'x')} {WEIGHT} y = Conv(a, v)", constants, w=w))
    assert len(int8_types(conversion)) == (zero == 128)


def test_a_scale_for_each_channel_of_a_group() -> None:
    constants = "float sx = {0.03}, int8 zx = {0}, float su = {0.01}, int8 zu = {0}"
    nodes = f"""
        {pair("a", "x")} {WEIGHT} u = DequantizeLinear(k, su, zu) c = Conv(a, u) {pair("d", "c")}
        y = Conv<group = 4>(d, v)
    """
    arrays: dict[str, Any] = {
        "w": integers(8, 3, 3, 3),
        "sw": np.linspace(0.01, 0.02, 8).astype("f4"),
        "zw": np.zeros(8, "i1"),
    }
    conversion = checked(model("1,12,6,6", nodes, constants, k=integers(12, 12, 1, 1), **arrays))
    assert "its weight has several scales in a group" in conversion.kept.values()


def test_16_bits_stay_float() -> None:
    constants = SIGNED.replace("int8 zx", "int16 zx")
    conversion = lower(
        model("1,4,9,7", f"{pair('a', 'x')} {WEIGHT} y = Conv(a, v)", constants, opset=21, w=integers(6, 4, 3, 3)),
        quantized="keep",
    )
    assert not int8_types(conversion)


@pytest.mark.parametrize(("size", "is_masked"), [(3_728_270 // 127 // 127 // 9, False), (40, True)])
def test_sums_too_large_for_winograd(size: int, is_masked: bool) -> None:
    w = np.full((16, size, 3, 3), 127, np.int8)
    conversion = checked(model(f"1,{size},12,12", f"{pair('a', 'x')} {WEIGHT} y = Conv(a, v)", SIGNED, w=w))
    [layer] = [layer for layer in conversion.graph if layer.type == "Convolution"]
    assert bool(layer["featmask"] & Feature.NO_WINOGRAD) == is_masked


def test_outputs_of_8_bits_and_unknown_readers() -> None:
    nodes = f"""
        q = QuantizeLinear(x, sx, zx) {WEIGHT} a = DequantizeLinear(q, sx, zx)
        c = Conv(a, v) z = QuantizeLinear(c, sy, zy) d = DequantizeLinear(z, sy, zy) f = Cast<to = 1>(q)
        y = ReduceMean(f)
    """
    text = f"(float[1,4,9,7] x) => (float[] y, int8[] z) <{SIGNED}> {{ {nodes} }}"
    conversion = checked(parsed(text, 17, w=integers(6, 4, 3, 3)))
    assert int8_types(conversion) == ["Convolution"]


@pytest.mark.parametrize("factor", [1.5, 0.6])
def test_a_wrong_int8_net_is_found(factor: float) -> None:
    proto = model("1,4,9,7", f"{pair('a', 'x')} {WEIGHT} y = Conv(a, v)", SIGNED, w=integers(6, 4, 3, 3))
    conversion = lower(proto, quantized="keep")
    [layer] = [layer for layer in conversion.graph if layer.type == "Convolution"]
    layer.weights["bottom_blob_int8_scales"] = layer.weights["bottom_blob_int8_scales"] * np.float32(factor)
    assert not conversion.verify().ok


def test_the_summary_names_one_layer_for_each_reason() -> None:
    nodes = f"{at_run_time('a', 'x', 'ConvInteger', 'w')} {at_run_time('y', 'a', 'ConvInteger', 'w')}"
    conversion = checked(model("1,4,9,7", nodes, RUN_TIME, w=integers(4, 4, 3, 3)))
    blocks = conversion_blocks(conversion, conversion.manifest(), Path("m"), Path("m"), [], 0.0, verbose=False)
    assert any("'a_i.Conv' and 1 more in float: the model finds" in str(block) for block in blocks)


def test_the_summary_names_the_differences() -> None:
    conversion = checked(model("1,4,9,7", f"{pair('a', 'x')} {WEIGHT} y = Conv(a, v)", SIGNED, w=integers(6, 4, 3, 3)))
    [note] = conversion_fields(conversion, conversion.manifest(), [], 0.0)["notes"]
    assert note.startswith("1 of 1 quantised product in int8; ncnn rounds half away from 0")


def at_run_time(name: str, of: str, product: str, weight: str) -> str:
    """Return a product as quantize_dynamic of ONNX Runtime writes it: rounded input, integers, both scales behind."""
    return f"""
        {name}_q, {name}_s, {name}_z = DynamicQuantizeLinear({of}) {name}_f = Mul({name}_s, s{weight})
        {name}_i = {product}({name}_q, {weight}, {name}_z, z{weight}) {name}_c = Cast<to = 1>({name}_i)
        {name} = Mul({name}_c, {name}_f)
    """


RUN_TIME = "float sw = {0.01}, int8 zw = {0}, float sk = {0.01}, uint8 zk = {130}"


def test_inputs_that_are_rounded_at_run_time() -> None:
    """Convolutions are float without the roundings; ncnn's Gemm rounds its input itself."""
    nodes = f"""
        {at_run_time("a", "x", "ConvInteger<pads = [1,1,1,1]>", "w")} r = Relu(a) t = Reshape(r, to)
        {at_run_time("b", "t", "MatMulInteger", "m")} {at_run_time("y", "b", "MatMulInteger", "k")}
    """
    arrays: dict[str, Any] = {
        "w": integers(8, 4, 3, 3),
        "m": integers(9, 16, seed=1),
        "k": (integers(16, 5, seed=2) + 130.0).clip(0, 255).astype(np.uint8),
        "to": np.array([1, 56, 9]),
    }
    constants = f"{RUN_TIME}, float sm = {{0.02}}, int8 zm = {{0}}"
    conversion = checked(model("1,4,9,7", nodes, constants, **arrays))
    assert types(conversion) == ["Convolution", "Reshape", "Gemm", "Gemm"]
    assert int8_types(conversion) == ["Gemm", "Gemm"]
    assert [reason[:44] for reason in conversion.kept.values() if reason] == [
        "the model finds the scale of its input at ru"
    ]
    exact = lower(model("1,4,9,7", nodes, constants, **arrays))
    assert len(exact.graph) > 100, "by default each rounding is that of the model"
    notes = conversion_fields(exact, exact.manifest(), [], 0.0)["notes"]
    assert any("--quantized keep leaves it out" in note for note in notes)


@pytest.mark.parametrize(
    "change",
    [
        ("a_i = ConvInteger(a_q, w, a_z, zw)", "a_i = ConvInteger(a_q, w, zk, zw)"),  # another zero point
        ("a_f = Mul(a_s, sw)", "a_f = Mul(sk, sw)"),  # another scale
        ("a_f = Mul(a_s, sw)", "a_f = Add(a_s, sw)"),
        ("a_c = Cast<to = 1>(a_i)", "a_n = Neg(a_i) a_c = Cast<to = 1>(a_n)"),  # another reader of the integers
        ("y = Relu(a)", "o = Cast<to = 1>(a_q) p = ReduceMean(o) y = Add(a, p)"),  # of the rounded input
    ],
)
def test_roundings_at_run_time_that_stay(change: tuple[str, str]) -> None:
    """Whatever is not the quantiser's form is computed as it stands."""
    nodes = f"{at_run_time('a', 'x', 'ConvInteger', 'w')} y = Relu(a)"
    assert change[0] in nodes
    proto = model("1,4,9,7", nodes.replace(*change), RUN_TIME, w=integers(6, 4, 3, 3))
    conversion = checked(proto)
    assert len(conversion.graph) > 30
    notes = conversion_fields(conversion, conversion.manifest(), [], 0.0)["notes"]
    assert not any("--quantized keep" in note for note in notes), "it was given"


def test_a_net_without_the_roundings_is_no_worse_than_the_model() -> None:
    """A weight that is off by more than the roundings make is found."""
    nodes = f"{at_run_time('a', 'x', 'ConvInteger', 'w')} y = Relu(a)"
    conversion = lower(model("1,4,9,7", nodes, RUN_TIME, w=integers(6, 4, 3, 3)), quantized="keep")
    [layer] = [layer for layer in conversion.graph if layer.type == "Convolution"]
    assert conversion.verify().ok
    weights = layer.weights["weight_data"].copy()
    weights[0] *= 3
    layer.weights["weight_data"] = weights
    assert not conversion.verify().ok
