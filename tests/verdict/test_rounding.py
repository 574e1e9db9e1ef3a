from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.verdict.rules import UNKNOWN_ROUNDING
from onnx2ncnn_opt.verification.model_accuracy import Rounding
from testing.models import parsed, serialized


def spread(graph: str, x: Array) -> Array:
    model = serialized(graph)
    reference = OrtRunner(model).run({"x": x})
    return Rounding(model, (), {}).spread({"x": x}, reference)["y"]


def test_sums_move_by_their_last_bits() -> None:
    x = np.linspace(1, 2, 50, dtype=np.float32)
    moved = spread("(float[50] x) => (float[50] y) <float a = {3}> { b = Add(x, a) y = Sub(b, a) }", x)
    assert 0 < moved.max() < 1e-4


def test_numbers_in_16_bits_move() -> None:
    x = np.linspace(1, 2, 50, dtype=np.float16)
    assert 0 < spread("(float16[50] x) => (float16[50] y) { b = Exp(x) y = Log(b) }", x).max() < 2e-2
    graph = "(float[50] x) => (float[50] y) { b = Cast<to = 10>(x) y = Cast<to = 1>(b) }"
    assert 2**-11 < spread(graph, x.astype(np.float32)).max() < 2e-2


def test_constants_in_16_bits_are_exact() -> None:
    """Fp16 exports of YOLO have scales of Resize in 16 bits: with errors, its result would have other sizes."""
    graph = """(float[1, 1, 2, 3] x) => (float[1, 1, 4, 6] y) {
        bits = Constant<value = float16[4] {15360, 15360, 16384, 16384}>() scales = Cast<to = 1>(bits)
        z = Mul(x, x) y = Resize(z, , scales) }"""
    assert 0 < spread(graph, np.ones((1, 1, 2, 3), np.float32)).max() < 1e-5


def test_values_decided_by_a_last_bit_move_by_a_step() -> None:
    graph = "(float[3] x) => (float[3] y) <float a = {3}> { b = Mul(x, a) y = Floor(b) }"
    moved = spread(graph, np.array([1 / 3, 0.5, 0.0], np.float32))
    assert moved[0] >= 1
    assert moved[1] < 1e-4
    assert moved[2] == 0


def test_sums_of_integers_move_by_a_step() -> None:
    """A net adds up scaled weights, so it may round a sum near half a step to another integer."""
    graph = """(float[1, 3] x) => (float[1, 3] y) <float s = {1}, uint8 z = {0}, float half = {0.5},
        uint8[3, 3] w = {1, 0, 0, 0, 2, 0, 0, 0, 1}> {
        q = QuantizeLinear(x, s, z) p = QLinearMatMul(q, s, z, w, half, z, s, z) y = DequantizeLinear(p, s, z) }"""
    moved = spread(graph, np.array([[3, 3, 0]], np.float32))
    assert moved[0, 0] >= 1
    assert moved[0, 1:].max() < 1e-4


def test_exact_values_decide_without_a_step() -> None:
    graph = "(float[4] x) => (float[4] y) <float a = {0}> { b = Relu(x) c = Greater(b, a) y = Cast<to = 1>(c) }"
    assert not spread(graph, np.array([0, -0.0, 1e-7, 1], np.float32)).any()


@pytest.mark.parametrize(("fill", "score", "decides"), [(-3e38, 1e6, False), (-1e9, 25, False), (-1e9, 40, True)])
def test_a_mask_that_absorbs_scores_is_exact(fill: float, score: float, decides: bool) -> None:
    """In rows that a mask hides, all probabilities are equal; but steps near 1e9 are 64."""
    graph = f"(float[4] x) => (float[4] y) <float low = {{{fill}}}> {{ s = Exp(x) m = Add(s, low) y = Softmax(m) }}"
    moved = spread(graph, np.log(np.array([1, 2, 3, score], np.float32)))
    assert np.isinf(moved).all() if decides else moved.max() < 1e-4


def test_a_quotient_of_integers_decides_for_itself() -> None:
    """The row of a cell's index is the same everywhere; an error would make it another row, or none."""
    graph = """(float[6] x) => (float[2] y) <float three = {3}, int64[1] two = {2}> {
        v, i = TopK(x, two) f = Cast<to = 1>(i) q = Div(f, three) r = Floor(q) n = Cast<to = 7>(r) y = Gather(x, n) }"""
    assert spread(graph, np.array([0, 0.5, 0, 1, 0, 0], np.float32)).max() < 1e-4


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize(("to", "limit"), [(6, 2.0**31), (7, 2.0**63), (2, 256), (3, 128)])
def test_casts_that_onnx_does_not_define_decide_nothing(to: int, limit: float, constant: bool) -> None:
    """ONNX Runtime gives the lowest integer on x86, and the nearest on ARM."""
    x = np.array([3.5, np.nan, limit, -1.1 * limit, np.inf, limit / 2], np.float32)
    proto = parsed(f"(float[6] x) => (float[6] y) {{ a = Cast<to = {to}>(x) b = Cast<to = 1>(a) y = Neg(b) }}")
    if constant:
        proto.graph.input[0].name = "unused"
        proto.graph.initializer.append(numpy_helper.from_array(x, "x"))
    model, feeds = bytes(proto.SerializeToString()), {proto.graph.input[0].name: x}
    reference = OrtRunner(model).run(feeds)
    moved = Rounding(model, (), {}).spread(feeds, reference)["y"]
    np.testing.assert_array_equal(moved > 0.5, [False, True, True, True, True, False])


def test_values_that_may_be_infinite_move_without_bounds() -> None:
    graph = "(float[2] x) => (float[2] y) <float a = {3}> { b = Mul(x, a) c = Floor(b) y = Reciprocal(c) }"
    moved = spread(graph, np.array([1 / 3, 1.5], np.float32))
    assert np.isinf(moved[0])
    assert moved[1] < 1e-4


@pytest.mark.parametrize("opset", [7, 9, 10, 11, 13, 22, 23])
def test_errors_of_any_opset(opset: int) -> None:
    model, x = serialized("(float[2] x) => (float[2] y) { b = Exp(x) y = Log(b) }", opset), np.array([1, 2], np.float32)
    rounding = Rounding(model, (), {})
    assert (rounding.spread({"x": x}, {"y": x})["y"] > 1e-7).all()
    assert not rounding.unmoved


def test_why_no_errors_move_a_model() -> None:
    unimported = parsed("(float[2] x) => (float[2] y) { y = ai.onnx.ml.Scaler<offset = [1.0], scale = [2.0]>(x) }")
    del unimported.opset_import[1:]  # ONNX Runtime takes it
    x = np.ones(2, np.float32)
    for model, reason in (
        (serialized("(float[2] x) => (float[2] y) { y = Older(x) }", 9), "opset 9"),
        (bytes(unimported.SerializeToString()), "No opset import for domain ai.onnx.ml"),
    ):
        rounding = Rounding(model, (), {})
        moved = rounding.spread({"x": x}, {"y": np.exp(x)})["y"]
        np.testing.assert_allclose(moved, UNKNOWN_ROUNDING * np.exp(x))
        assert reason in rounding.unmoved


def test_names_that_are_numbers() -> None:
    proto = parsed("(float[2] x) => (float[2] y) { b = Exp(x) y = Log(b) }")
    proto.graph.output[0].name = proto.graph.node[1].output[0] = "5"
    x = np.array([1, 2], np.float32)
    moved = Rounding(proto.SerializeToString(), (), {}).spread({"x": x}, {"5": x})["5"]
    assert moved.all()


@pytest.mark.parametrize(
    ("nodes", "size"),
    [
        ("a = Sigmoid(x) y = Log(a)", 48),  # ONNX Runtime's Sigmoid(-18) is 0
        ("a = Sigmoid(x) b = Sub(one, a) c = Div(a, b) y = Log(c)", 48),
        ("a = Exp(x) b = CumSum(a, axis) y = Log(b)", 504),  # a subnormal number, or 0
        ("y = ReduceProd(x)", 504),
        ("y = Softplus(x)", 120),  # of -16 another sum with 1
        ("a = Softplus(x) b = Tanh(a) y = Mul(x, b)", 120),
        ("y = Tan(x)", 120),
        ("a = Sqrt(x) y = Reciprocal(a)", 495),  # 1 / 0 is NaN in ncnn
        ("y = ReduceMean(x)", 70000),  # nearly 0, of large terms
    ],
)
def test_right_nets_at_the_ends_of_float32(nodes: str, size: int) -> None:
    graph = f"(float[1,{size}] x) => (float[M,N] y) <float one = {{1}}, int64 axis = {{1}}> {{ {nodes} }}"
    assert [row.message for row in lower(parsed(graph)).verify().rows if row.status != "ok"] == []


def test_reflected_pixels_move_with_their_coordinates() -> None:
    """A coordinate far outside an image is divided and folded; its last bits are whole parts of a pixel."""
    node = 'GridSample<mode = "bilinear", padding_mode = "reflection">(x, grid)'
    graph = f"(float[1,3,16,24] x, float[1,8,10,2] grid) => (float[M,N,P,Q] y) {{ y = {node} }}"
    assert [row.message for row in lower(parsed(graph, 16)).verify().rows if row.status != "ok"] == []


def test_products_whose_partial_products_are_subnormal() -> None:
    graph = "(float[1,3,12,14] x) => (float y) { y = ReduceProd<keepdims = 0>(x) }"
    assert [row.message for row in lower(parsed(graph)).verify().rows if row.status != "ok"] == []


def test_pixels_of_small_cubic_weights_move() -> None:
    """A cubic weight is a sum of much larger terms."""
    node = 'GridSample<mode = "bicubic">(x, grid)'
    graph = f"(float[1,3,6,7] x, float[1,5,4,2] grid) => (float[M,N,P,Q] y) {{ y = {node} }}"
    assert [row.message for row in lower(parsed(graph, 16)).verify().rows if row.status != "ok"] == []


def test_nearly_equal_probabilities_decide_in_any_direction() -> None:
    """ONNX Runtime's Sigmoid is 0 for -47 and for -69; others make a difference, or none near 1."""
    graph = "(float[3,2] x) => (int64[3] y) { a = Sigmoid(x) y = ArgMax<axis = 1, keepdims = 0>(a) }"
    moved = spread(graph, np.array([[-69, -47], [16.8, 200], [-1, 1]], np.float32))
    np.testing.assert_array_equal(np.isinf(moved), [True, True, False])


def test_a_file_and_its_bytes_have_the_same_errors(tmp_path: Path) -> None:
    """ONNX Runtime adds up sums in another order where it copies weights into another layout."""
    rng = np.random.default_rng(0)
    w, r = rng.standard_normal((2, 1, 48, 16)).astype(np.float32)
    graph = "(float[100, 1, 16] x) => (float[A, B, C, D] y) { y = GRU<hidden_size = 16>(x, w, r) }"
    model = parsed(graph, w=w, r=r)
    onnx.save(model, tmp_path / "m.onnx")
    feeds = {"x": rng.standard_normal((100, 1, 16)).astype(np.float32)}
    found = []
    for source in (tmp_path / "m.onnx", model.SerializeToString()):
        reference, rounding = OrtRunner(source).run(feeds), Rounding(source, (), {})
        found.append(rounding.spread(feeds, reference)["y"])
    assert found[0].max() > 0
    np.testing.assert_array_equal(found[0], found[1])
