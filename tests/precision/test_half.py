from typing import Any

import numpy as np
import pytest

from onnx2ncnn_opt.ir.codes import Activation
from onnx2ncnn_opt.ir.dim import Dim, symbol
from onnx2ncnn_opt.ir.features import FP32, Device, Feature, features_of
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.half import faulty_kernels, to_half, winograd_tile
from onnx2ncnn_opt.precision.half_sums import inner_arithmetic


def convolution(inputs: int, outputs: int, kernel: int = 3, *, type: str = "Convolution", **params: object) -> Layer:
    rng = np.random.default_rng(0)
    size = outputs * inputs * kernel**2
    weights = {"weight_data": rng.standard_normal(size).astype(np.float32) / kernel / inputs**0.5}
    values = {"num_output": outputs, "kernel_w": kernel, "weight_data_size": size, **params}
    return Layer(type, "c", (), [Blob("y")], values, weights)


@pytest.mark.parametrize(
    ("inputs", "outputs", "params", "tile"),
    [
        (16, 16, {}, 6),
        (3, 16, {}, 6),
        (128, 128, {}, 6),
        (129, 128, {}, 4),
        (8, 256, {}, 2),
        (15, 15, {}, 0),
        (16, 16, {"stride_w": 2}, 0),
        (16, 16, {"featmask": int(Feature.NO_WINOGRAD)}, 0),
        (16, 16, {"featmask": int(Feature.NO_FP16_ARITHMETIC)}, 0),
    ],
)
def test_winograd_is_where_ncnn_has_it(inputs: int, outputs: int, params: dict[str, Any], tile: int) -> None:
    assert winograd_tile(convolution(inputs, outputs, **params)) == tile


@pytest.mark.parametrize(("inputs", "tile"), [(32, 6), (160, 4)])
def test_winograd_costs_more_than_sums(inputs: int, tile: int) -> None:
    layer = convolution(inputs, 32, pad_left=1)
    x = np.random.default_rng(1).standard_normal((inputs, 20, 22)).astype(np.float32)
    winograd, sums = inner_arithmetic(layer, [x])
    assert winograd_tile(layer) == tile
    # The output is N(0, 1). On aarch64 two such layers in a row are off by 1.2e-2 in the mean, 3e-2 to 4e-2 at most.
    assert {6: 2e-3, 4: 1e-3}[tile] < winograd.error < {6: 2.5e-2, 4: 1e-2}[tile]
    assert 1e-4 < sums.error < winograd.error
    assert not winograd.overflows
    assert not sums.overflows


@pytest.mark.parametrize(
    ("inputs", "side", "measured"),
    # The last two are smaller than their tiles: a sample of what lies outside as well is off by 0.6.
    [(32, 20, 1.9e-2), (160, 20, 9.5e-3), (64, 62, 2.6e-2), (32, 9, 2.1e-2), (64, 4, 2.1e-2)],
)
def test_winograd_is_as_inexact_as_on_aarch64(inputs: int, side: int, measured: float) -> None:
    layer = convolution(inputs, 32, pad_left=1)
    layer.weights["weight_data"] = to_half(layer.weights["weight_data"])
    x = to_half(np.random.default_rng(1).standard_normal((inputs, side, side + 2 * (side == 20))))
    winograd, _ = inner_arithmetic(layer, [x])
    assert 0.8 < winograd.error / measured < 1.2  # twelve tiles and channels, and any BLAS; 0.74 without the steps


@pytest.mark.parametrize(
    ("classes", "aarch64", "vulkan"), [(100, 1.8e-3, 2.7e-3), (1000, 2.2e-2, 2.3e-2), (6625, 0.12, 0.16)]
)
def test_a_softmax_of_many_classes_is_as_inexact_as_on_devices(classes: int, aarch64: float, vulkan: float) -> None:
    """Most of thousands of exponentials are lost in a sum in fp16; on ARM whether or not arithmetic may use fp16."""
    x = to_half(2 * np.random.default_rng(0).standard_normal((8, classes), np.float32))
    for mask, exact in ((0, False), (Feature.NO_FP16_ARITHMETIC, False), (FP32, True)):
        ways = inner_arithmetic(Layer("Softmax", "y", params={"axis": 1, "featmask": int(mask)}), [x])
        assert exact == (not ways)
        for way in ways:
            assert min(aarch64, vulkan) / 2 < way.relative < 2 * max(aarch64, vulkan)


@pytest.mark.parametrize(("keys", "largest"), [(200, 5.4e-3), (1000, 9.7e-3), (4096, 2.7e-2)])
def test_attention_adds_up_values_as_inexactly_as_on_aarch64(keys: int, largest: float) -> None:
    """With weights that are nearly equal, the products of queries and keys hardly matter."""
    rng = np.random.default_rng(0)
    q, k, v = (to_half(rng.standard_normal((2, rows, 32), np.float32)) for rows in (8, keys, keys))
    v = to_half(v + np.float32(0.5))
    (way,) = inner_arithmetic(Layer("SDPA", "y", [Blob("q")], [Blob("y")]), [q / 10, k, v])
    error = way.error / np.abs(v.mean(axis=1)).max()  # in units of the largest output, about
    assert largest / 5 < error < largest / 1.5  # root mean square, and largest of 512 numbers


def test_a_softmax_over_an_axis_that_its_input_lacks_adds_up_nothing() -> None:
    layer = Layer("Softmax", "y", [Blob("x", (7, 4096))], [Blob("y")], {"axis": 2})
    assert [*faulty_kernels(layer)] == []
    assert inner_arithmetic(layer, [np.zeros((7, 4096), np.float32)]) == ()


@pytest.mark.parametrize(("classes", "devices"), [(2048, ()), (2049, ("arm", "vulkan")), (symbol("N"), ("vulkan",))])
def test_a_softmax_of_thousands_of_classes_is_a_fault(classes: Dim, devices: tuple[Device, ...]) -> None:
    layer = Layer("Softmax", "y", [Blob("x", (7, classes))], [Blob("y")], {"axis": -1})
    features = {device: feature for feature, _, device in faulty_kernels(layer)}
    both: dict[Device, Feature] = {"arm": FP32, "vulkan": Feature.NO_FP16_ARITHMETIC}
    assert features == {device: both[device] for device in devices}


@pytest.mark.parametrize(
    ("type", "keys", "features", "kind"),
    [
        ("SDPA", 2048, None, None),
        ("SDPA", 2049, Feature.NO_FP16_ARITHMETIC, "arm"),
        ("SDPA", 20_000, FP32, "arm"),
        ("SDPA", symbol("N"), Feature.NO_FP16_ARITHMETIC, "arm"),
        ("SDPA", symbol("T"), None, None),
        ("MultiHeadAttention", 1024, None, None),
        ("MultiHeadAttention", 1025, Feature.NO_FP16_ARITHMETIC, None),
        ("MultiHeadAttention", symbol("T"), None, None),
    ],
)
def test_attention_to_thousands_of_keys_is_a_fault(
    type: str, keys: Dim, features: Feature | None, kind: Device | None
) -> None:
    """SDPA is off by 1.5e-2 on aarch64 at 2100 keys, and MultiHeadAttention by 4.3e-2 on Vulkan; mask 1: 2e-3, 4e-4."""
    blobs = [Blob(name, (8, size, 64) if type == "SDPA" else (size, 64)) for name, size in (("q", 9), ("k", keys))]
    layer = Layer(type, "y", [*blobs, blobs[1]], [Blob("y")])
    found = [(feature, device) for feature, _, device in faulty_kernels(layer, {512 - symbol("T"): 0})]
    assert found == ([] if features is None else [(features, kind)])
    layer.params["kv_cache"], layer.inputs = 1, (*layer.inputs, Blob("past_k"), Blob("past_v"))
    assert [*faulty_kernels(layer)]  # which grows without a limit


@pytest.mark.parametrize(
    ("shape", "faulty"),
    [
        ((262_140,), False),
        ((262_144,), True),
        ((300_000, 2), True),
        ((2, 300_000), True),
        ((3, 512, 512), False),
        ((262_141, 1, 2), True),
        ((8, 512, 511, 4), False),
        ((8, 512, 512, 4), True),
        ((symbol("N"), 2), False),
        (None, False),
    ],
)
def test_gpus_do_not_compute_blobs_with_a_long_axis(shape: tuple[Dim, ...] | None, faulty: bool) -> None:
    for blobs in ((Blob("x", shape), Blob("y", (1,))), (Blob("x", (1,)), Blob("y", shape))):
        layer = Layer("Reshape", "y", [blobs[0]], [blobs[1]])
        features = {device: feature for feature, _, device in faulty_kernels(layer)}
        assert features == ({"vulkan": Feature.NO_VULKAN} if faulty else {})
    assert [*faulty_kernels(Layer("Input", "x", [], [Blob("x", shape)]))] == []


@pytest.mark.parametrize(
    ("before", "after", "options", "is_masked"),
    [
        ((8, 40, 512), (8, 80, 1024), {}, False),
        ((8, 40, 513), (8, 80, 1026), {}, True),
        ((8, 80, 1024), (8, 40, 512), {}, False),
        ((8, 40, 40), (8, 60, 60), {}, True),
        ((8, 40, 40), (8, 40, 80), {"align_corner": 1}, True),
        ((8, 40, 40), (8, 40, 40), {"align_corner": 1}, False),
        ((8, 1, 1), (8, 3000, 3000), {}, False),
        ((8,), (8, 3000, 3000), {}, False),
        ((4, 300), (4, 900), {}, True),
        ((8, symbol("h"), 4), (8, 2 * symbol("h"), 8), {}, True),
        (None, None, {}, True),
    ],
)
def test_coordinates_that_gpus_round(before: Any, after: Any, options: dict[str, int], is_masked: bool) -> None:
    layer = Layer("Interp", "y", [Blob("x", before)], [Blob("y", after)], {"resize_type": 2, **options})
    assert [feature for feature, *_ in faulty_kernels(layer)] == [Feature.NO_FP16_ARITHMETIC] * is_masked


@pytest.mark.parametrize(
    ("type", "shape", "is_masked"),
    [
        ("InstanceNorm", (8, 511, 513), True),
        ("InstanceNorm", (8, 511, 511), False),
        ("GroupNorm", (8, 300, 300), True),
        ("GroupNorm", (8, 255, 255), False),
        ("GroupNorm", (8, symbol("h"), 300), True),
        ("InstanceNorm", (8, symbol("h"), 9), True),
    ],
)
def test_norms_of_more_numbers_than_gpus_add_up(type: str, shape: tuple[Dim, ...], is_masked: bool) -> None:
    layer = Layer(
        type, "y", [Blob("x", shape)], [Blob("y", shape)], {"channels": 8, "group": 2} if type[0] == "G" else {}
    )
    assert [feature for feature, *_ in faulty_kernels(layer)] == [Feature.NO_VULKAN] * is_masked


def test_infinite_inputs_have_no_infinite_errors() -> None:
    x = np.random.default_rng(1).standard_normal((32, 20, 22)).astype(np.float32)
    x[3, 4, 5] = np.inf
    for way in inner_arithmetic(convolution(32, 32, pad_left=1), [x]):
        assert way.overflows
        assert np.isfinite(way.spread).all()


@pytest.mark.parametrize("rest", [0.0, 1.0])
def test_tiles_that_are_empty_in_most_channels_have_no_larger_errors(rest: float) -> None:
    """Behind ReLUs, most channels may be 0, but for some rows or everywhere. A blob of 0.9 got errors of 5e11."""
    rng = np.random.default_rng(0)
    x = rng.random((128, 16, 16), np.float32)
    few = np.isin(np.arange(128), (3, 17, 59, 101))
    x[few, 13:], x[~few, 13:] = 0, rest * x[~few, 13:]
    x[~few, :13] = 0
    layer = convolution(128, 64, pad_left=1, activation_type=int(Activation.RELU))
    weight = layer.weights["weight_data"].reshape(64, 128, 9)
    weight[:, ~few] = -np.abs(weight[:, ~few])  # so ReLU leaves neither numbers nor errors in the last rows
    winograd, sums = inner_arithmetic(layer, [x])
    assert max(sums.spread) < max(winograd.spread) < 50 * max(sums.spread)


def test_large_numbers_overflow_in_winograd_before_they_do_in_sums() -> None:
    layer = convolution(32, 32, pad_left=1)
    x = 2000 * np.random.default_rng(1).standard_normal((32, 20, 22)).astype(np.float32)
    assert [way.overflows for way in inner_arithmetic(layer, [x])] == [True, False]


def test_an_activation_that_is_saturated_has_no_errors() -> None:
    layer = convolution(32, 8, 1, activation_type=4)
    x = 1000 * np.ones((32, 4, 4), np.float32)
    layer.weights["weight_data"] = np.ones(256, np.float32)
    (way,) = inner_arithmetic(layer, [x])
    assert way.error == 0


def test_layers_without_fp16_arithmetic_have_no_errors() -> None:
    layer = convolution(32, 32, featmask=int(Feature.NO_FP16_ARITHMETIC))
    assert inner_arithmetic(layer, [np.ones((32, 8, 8), np.float32)]) == ()


def test_matrices_of_all_kinds_are_sampled() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, 64), (64, 7)))
    product = Layer("MatMul", "m", (), [Blob("y")], {})
    constants = {"constantB": 1, "constantN": 7, "constantK": 64, "transB": 1}
    gemm = Layer("Gemm", "g", (), [Blob("y")], constants, {"B_data": np.ascontiguousarray(b.T).ravel()})
    inner = Layer(
        "InnerProduct", "i", (), [Blob("y")], {"num_output": 7, "weight_data_size": 448}, {"weight_data": b.T.ravel()}
    )
    ways = [inner_arithmetic(product, [a, b]), inner_arithmetic(gemm, [a]), inner_arithmetic(inner, [a])]
    assert {way.how for (way,) in ways} == {"sums of 64 products"}
    assert all(1e-4 < way.error < 3e-2 for (way,) in ways)


def test_channels_that_are_more_inexact_than_others_are_seen() -> None:
    """In a trained policy one channel of 100 made errors 20 times as large as the others."""
    weight = np.random.default_rng(0).standard_normal((200, 64)).astype(np.float32)
    weight[7] *= 50
    x = np.random.default_rng(1).standard_normal(64).astype(np.float32)
    inner = Layer(
        "InnerProduct", "i", (), [Blob("y")], {"num_output": 200, "weight_data_size": 12800}, {"weight_data": weight}
    )
    (way,) = inner_arithmetic(inner, [x])
    assert max(way.spread) > 20 * float(np.median(way.spread))
    exact = weight[7].astype(np.float64) @ x
    lanes = np.zeros(8, np.float16)
    for terms in (weight[7] * x).reshape(-1, 8):
        lanes = (lanes + terms).astype(np.float16)
    assert 0.3 < abs(lanes.sum(dtype=np.float64) - exact) / max(way.spread) < 3


def test_sums_of_one_term_are_exact() -> None:
    """A one-hot row picks a column of weights that fp16 holds."""
    one = np.zeros((4, 64), np.float32)
    one[:, 5] = 1
    gemm = Layer(
        "Gemm",
        "g",
        (),
        [Blob("y")],
        {"constantB": 1, "constantN": 7, "constantK": 64, "transB": 1},
        {"B_data": np.full(448, 0.3, np.float32)},
    )
    (way,) = inner_arithmetic(gemm, [one])
    assert way.error == 0


@pytest.mark.parametrize(("width", "faulty"), [(8, False), (9, False), (10, True), (11, True), (symbol("w"), True)])
def test_widths_that_the_faulty_kernel_spoils(width: Dim, faulty: bool) -> None:
    layer = convolution(1, 16, type="ConvolutionDepthWise", group=16, stride_w=2)
    layer.output.shape = (16, 4, width)
    assert [features for features, *_ in faulty_kernels(layer)] == [Feature.NO_FP16_ARITHMETIC] * faulty


def test_too_large_for_half() -> None:
    assert to_half(np.array([65504.0, 65536.0, 1e-9], np.float32)).tolist() == [65504.0, np.inf, 0.0]


def test_features_in_words() -> None:
    assert features_of(65) == "no fp16 arithmetic, no winograd"


@pytest.mark.parametrize(
    ("size", "remedy"), [(1, None), (60, Feature.NO_FP16_ARITHMETIC), (300, FP32)], ids=["small", "sums", "scores"]
)
def test_products_of_queries_and_keys_are_scaled_too_late(size: float, remedy: Feature | None) -> None:
    rng = np.random.default_rng(0)
    q, v = (rng.choice(np.array([-1, 1], np.float32), (2, 6, 64)) for _ in range(2))
    (way,) = inner_arithmetic(Layer("SDPA", "y", (), [Blob("y")]), [size * q, size * q, v])
    assert (way.remedy if way.overflows else None) == remedy
