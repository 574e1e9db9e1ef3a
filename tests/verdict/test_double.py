"""Models in float64 against ONNX Runtime's float32, and against sums that float32 loses."""

import numpy as np
import onnx
import onnx.parser
import pytest

from onnx2ncnn_opt.errors import RunError
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.verdict.float64_model import InDouble
from testing.models import serialized


def both(data: bytes, *inputs: Array) -> tuple[Array, Array]:
    feeds = dict(zip(OrtRunner(data).input_names(), inputs, strict=True))
    return OrtRunner(data).run(feeds)["y"], OrtRunner(InDouble(data).data).run(feeds)["y"]


def random(*shape: int) -> Array:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


CONVOLUTIONS = [
    ("pads = [1, 0, 2, 1], strides = [2, 1]", (6, 4, 3, 2), (2, 4, 9, 7)),
    ('group = 2, dilations = [2, 3], auto_pad = "VALID"', (6, 2, 3, 2), (1, 4, 9, 8)),
    ("group = 4, pads = [1, 1, 1, 1]", (8, 1, 3, 3), (3, 4, 5, 6)),
    ("strides = [3]", (5, 4, 4), (2, 4, 17)),
    ("pads = [1, 1, 1, 0, 0, 0], strides = [1, 2, 1]", (2, 3, 2, 3, 2), (1, 3, 5, 6, 4)),
]


@pytest.mark.parametrize(("attributes", "kernel", "shape"), CONVOLUTIONS)
def test_convolutions(attributes: str, kernel: tuple[int, ...], shape: tuple[int, ...]) -> None:
    sizes = ",".join(map(str, shape))
    graph = f"(float[{sizes}] x) => (float[{','.join('ABCDE'[: len(shape)])}] y) {{ y = Conv<{attributes}>(x, w, b) }}"
    data = serialized(graph, 20, w=random(*kernel), b=random(kernel[0]))
    single, exact = both(data, random(*shape))
    assert exact.dtype == np.float64
    assert exact.shape == single.shape
    assert 0 < np.abs(exact - single).max() < 1e-5


def test_errors_of_float32() -> None:
    weights = np.array([1e8, 1.0, -1e8], np.float32).reshape(1, 3, 1, 1)
    data = serialized("(float[1, 3, 1, 2] x) => (float[1, 1, 1, 2] y) { y = Conv(x, w) }", 20, w=weights)
    single, exact = both(data, np.ones((1, 3, 1, 2), np.float32))
    assert (exact == 1).all()
    assert (single == 0).all()


@pytest.mark.parametrize(
    "node",
    [
        "AveragePool<kernel_shape = [2, 3], strides = [2, 1]>(x)",
        "AveragePool<kernel_shape = [3, 3], pads = [1, 1, 1, 1], count_include_pad = 1>(x)",
        "AveragePool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(x)",
        "GlobalAveragePool(x)",
        "Gelu(x)",
        "GridSample(x, places)",
        "Softmax<axis = 1>(x)",
    ],
)
@pytest.mark.parametrize("opset", [17, 20])
def test_other_operators(node: str, opset: int) -> None:
    graph = f"(float[2, 3, 6, 7] x) => (float[A, B, C, D] y) {{ y = {node} }}"
    data = serialized(graph, 20 if node.startswith("Gelu") else opset, places=random(2, 4, 5, 2) / 3)
    single, exact = both(data, random(2, 3, 6, 7))
    assert exact.dtype == np.float64
    np.testing.assert_allclose(single, exact, rtol=1e-5, atol=1e-6)


OLD = [
    ("Pad<pads = [0, 0, 1, 1, 0, 0, 1, 0]>(a)", range(7, 11)),
    ("Slice<axes = [2, 3], starts = [1, 1], ends = [3, 5]>(a)", range(7, 10)),
    ("Clip<min = 0.0, max = 1.0>(a)", range(7, 11)),
    ("Clip(a, , largest)", (11, 12)),
    ("Softmax<axis = 1>(a)", range(7, 13)),
    ("BatchNormalization(a, three, three, three, three)", range(7, 13)),
    ("ReduceSum<axes = [1], keepdims = 1>(a)", range(7, 13)),
    *[(f'Upsample<mode = "{mode}", scales = [1.0, 1.0, 1.5, 2.5]>(a)', (7, 8)) for mode in ("linear", "nearest")],
    *[(f'Upsample<mode = "{mode}">(a, scales)', (9,)) for mode in ("linear", "nearest")],
    *[(f'Resize<mode = "{mode}">(a, scales)', (10,)) for mode in ("linear", "nearest")],
    ("Resize(a, none, scales)", (11, 12)),
]


@pytest.mark.parametrize(("node", "opset"), [(node, opset) for node, opsets in OLD for opset in opsets])
def test_old_operators(node: str, opset: int) -> None:
    numbers = {"three": [1, 2, 3], "largest": 1.5, "scales": [1, 1, 1.5, 2.5], "none": []}
    weights = {name: np.array(each, np.float32) for name, each in numbers.items()} | {"w": random(3, 3, 3, 3)}
    graph = f"(float[1, 3, 4, 6] x) => (float[A, B, C, D] y) {{ a = Conv<pads = [1, 1, 1, 1]>(x, w) y = {node} }}"
    single, exact = both(serialized(graph, opset, **weights), random(1, 3, 4, 6))
    assert exact.dtype == np.float64
    assert exact.std() > 0.01
    np.testing.assert_allclose(single, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("node", ["STFT(x, step, window)", "DFT<axis = 1>(bits)"])
def test_spectra(node: str) -> None:
    graph = f"(float[1, 64] x) => (float[A, B, C, D] y) {{ bits = Unsqueeze(x, last) y = {node} }}"
    constants = {"step": np.array(8), "window": random(16), "last": np.array([2])}
    single, exact = both(serialized(graph, 17, **constants), random(1, 64) + 1)
    assert 0 < np.abs(exact - single).max() < 1e-5


@pytest.mark.parametrize("stash", ["", ", stash_type = 1"])
def test_statistics_in_float64(stash: str) -> None:
    x = random(1, 4, 5, 6) * np.float32(1e-2) + 1
    node = f"GroupNormalization<num_groups = 4{stash}>(x, scale, bias)"
    ones, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)
    data = serialized(f"(float[1, 4, 5, 6] x) => (float[A, B, C, D] y) {{ y = {node} }}", 21, scale=ones, bias=zeros)
    _, exact = both(data, x)
    centred = x - x.mean((2, 3), keepdims=True, dtype=np.float64)
    right = centred / np.sqrt(np.square(centred).mean((2, 3), keepdims=True) + np.float32(1e-5))
    np.testing.assert_allclose(exact, right, rtol=1e-7)


@pytest.mark.parametrize("size", [1, 5])
def test_normalization_by_large_neighbours(size: int) -> None:
    """ONNX Runtime's own LRN is off by 1e-4 of the largest number."""
    x = 32 * random(1, 6, 3, 4)
    data = serialized(
        f"(float[1, 6, 3, 4] x) => (float[A, B, C, D] y) {{ y = LRN<alpha = 0.5, size = {size}>(x) }}", 20
    )
    _, exact = both(data, x)
    padded = np.pad(np.square(x, dtype=np.float64), ((0, 0), (size // 2, size // 2), (0, 0), (0, 0)))
    total = np.sum([padded[:, index : index + 6] for index in range(size)], 0)
    np.testing.assert_allclose(exact, x / (1 + 0.5 / size * total) ** 0.75, rtol=1e-7)


def test_the_sigmoid_of_numbers_far_below_zero() -> None:
    x = np.array([-700, -80, 0, 700], np.float32)
    _, exact = both(serialized("(float[4] x) => (float[A] y) { y = Sigmoid(x) }", 20), x)
    np.testing.assert_allclose(exact, [np.exp(-700), np.exp(-80), 0.5, 1], rtol=1e-12)


def test_types_of_other_values_stay() -> None:
    graph = (
        "(float[4, 5] x) => (int64[4] y, float[4, 5] z) <float a = {0.5}> { c = Greater(x, a) w = Where(c, x, a) "
        "y = ArgMax<axis = 1, keepdims = 0>(w) i = Cast<to = 7>(w) z = Cast<to = 1>(i) }"
    )
    single, exact = both(serialized(graph, 20), random(4, 5))
    assert exact.dtype == np.int64
    assert (single == exact).all()


def test_functions_of_the_model() -> None:
    text = """<ir_version: 9, opset_import: ["": 20, "own": 1]>
        g (float[2, 3] x) => (float[2, 3] y) <float[2, 2] w = {1e8, 1.0, 0.0, 1.0}> { y = own.product(w, x) }
        <domain: "own", opset_import: ["": 20]> product (a, b) => (c) { c = MatMul(a, b) }"""
    data = onnx.parser.parse_model(text).SerializeToString()
    x = np.array([[1, 1, 1], [0.125, 0.25, 0.5]], np.float32)
    _, exact = both(data, x)
    assert exact[0].tolist() == [1e8 + 0.125, 1e8 + 0.25, 1e8 + 0.5]


def test_an_output_that_is_an_input_has_no_errors() -> None:
    graph = "(float[1, 2, 4, 4] x) => (float[1, 2, 4, 4] x, float[A, B, C, D] y) { y = Conv(x, w) }"
    double = OrtRunner(InDouble(serialized(graph, 20, w=random(3, 2, 2, 2))).data)
    assert {name: array.dtype for name, array in double.run({"x": random(1, 2, 4, 4)}).items()} == {"y": np.float64}


IF = (
    "(float[2] x, bool c) => (float[2] y) { y = If(c)<then_branch = t () => (float[2] a) { a = Relu(x) }, "
    "else_branch = e () => (float[2] b) { b = Neg(x) }> }"
)


@pytest.mark.parametrize(
    ("graph", "opset", "reason"),
    [
        ("(float[2] x) => (float[2] y) { y = Older(x) }", 9, "opset 9 cannot be converted"),
        (IF, 20, "branches or loops"),
    ],
)
def test_models_that_are_not_rewritten(graph: str, opset: int, reason: str) -> None:
    with pytest.raises(RunError, match=reason):
        InDouble(serialized(graph, opset))


@pytest.mark.parametrize("node", ["GRU<{}>", "GRU<{}, linear_before_reset = 1>", "LSTM<{}>", "RNN<{}>"])
@pytest.mark.parametrize("is_given", [False, True])
def test_recurrent_layers_with_clip_and_weights_at_run_time(node: str, is_given: bool) -> None:
    rows = 5 * {"GRU": 3, "LSTM": 4, "RNN": 1}[node.partition("<")[0]]
    weights = {"w": random(1, rows, 4), "r": random(1, rows, 5)}
    call = node.format("hidden_size = 5, clip = 0.5")
    given = f", float[1, {rows}, 4] w, float[1, {rows}, 5] r" if is_given else ""
    graph = f"(float[7, 3, 4] x{given}) => (float[A, B, C, D] y) {{ y, z = {call}(x, w, r) }}"
    data = serialized(graph, 20, **({} if is_given else weights))
    single, exact = both(data, random(7, 3, 4), *(weights.values() if is_given else ()))
    assert exact.dtype == np.float64
    assert 0 < np.abs(exact - single).max() < 1e-5


@pytest.mark.parametrize("node", ["GRU", "LSTM", "RNN"])
def test_a_sequence_of_unknown_rank(node: str) -> None:
    rows = 5 * {"GRU": 3, "LSTM": 4, "RNN": 1}[node]
    call = f"Reshape(x, shape) y, z = {node}<hidden_size = 5>(sequence, w, r)"
    graph = f"(float[84] x, int64[K] shape) => (float[A, B, C, D] y) {{ sequence = {call} }}"
    data = serialized(graph, 20, w=random(1, rows, 4), r=random(1, rows, 5))
    single, exact = both(data, random(84), np.array([7, 3, 4]))
    assert exact.dtype == np.float64
    assert 0 < np.abs(exact - single).max() < 1e-5


@pytest.mark.parametrize("node", ["GRU<{}>", "GRU<{}, linear_before_reset = 1>", "LSTM<{}>", "RNN<{}>"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("inputs", ["x, w, r", "x, w, r, b, , h"])
def test_recurrent_layers(node: str, direction: str, inputs: str) -> None:
    gates, ways = {"GRU": 3, "LSTM": 4, "RNN": 1}[node.partition("<")[0]], 2 if direction == "bidirectional" else 1
    weights = {
        "w": random(ways, gates * 5, 4),
        "r": random(ways, gates * 5, 5),
        "b": random(ways, gates * 10),
        "h": random(ways, 3, 5),
    }
    call = node.format(f'hidden_size = 5, direction = "{direction}"') + f"({inputs})"
    graph = f"(float[7, 3, 4] x) => (float[A, B, C, D] y) {{ y, z = {call} }}"
    single, exact = both(serialized(graph, 20, **weights), random(7, 3, 4))
    assert exact.dtype == np.float64
    assert exact.shape == single.shape
    assert 0 < np.abs(exact - single).max() < 1e-5
