"""Decisions that the last bit makes: no right net is wrong for them, and no wrong one right."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.onnx.edit.model import read_model
from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.verdict.deciding import scores
from onnx2ncnn_opt.verification.model import verify_net
from onnx2ncnn_opt.verification.model_accuracy import Rounding
from testing.hard_models import FAMILIES, SEEDS, hard_model
from testing.models import serialized

OUTCOMES = Path(__file__).parents[2] / "fixtures" / "hard_models.tsv"


def test_the_floats_that_decide_integers() -> None:
    graph = (
        "(float[2,6] x) => (int64[2] best, float[2] number, float16[2,6] half, int64[2] sizes, bool[12] large) {"
        "s = Sigmoid(x) t = Transpose(s) best = ArgMax<axis = 0, keepdims = 0>(t) "
        "u = Neg(x) v, i = TopK(u, k) j = Squeeze(i, one) number = Cast<to = 1>(j) "
        "half = Cast<to = 10>(u) sizes = Shape(s) r = Reshape(u, flat) large = Less(r, zero) }"
    )
    model = read_model(serialized(graph, 17, k=[1], one=[1], flat=[12], zero=np.float32(0)), typed=True)
    assert scores(model.graph) == {"best": {"s", "t"}, "number": {"u"}, "large": {"r", "u"}}


def test_each_run_has_errors_of_its_own() -> None:
    """Ten equal scores: each run must put them into another order, or a net's own order looks wrong."""
    graph = "(float[1,10] x) => (int64[1,10] y) { a = Sigmoid(x) v, y = TopK(a, k) }"
    data, feeds = serialized(graph, 17, k=[10]), {"x": np.full((1, 10), 2, np.float32)}
    assert np.isinf(Rounding(data, (), {}).spread(feeds, OrtRunner(data).run(feeds))["y"]).all()


def test_a_wrong_choice_is_found(tmp_path: Path) -> None:
    """The second best is no near choice, and neither is the best of another axis."""
    weights = {"w": np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)}
    graph = "(float[9,6] x) => (int64[9] y) {{ a = MatMul(x, w) s = Sigmoid(a) {} }}"
    right = serialized(graph.format("y = ArgMax<axis = 1, keepdims = 0>(s)"), 17, **weights)
    second = "v, i = TopK(s, k) y = Gather<axis = 1>(i, one)"
    wrong = serialized(graph.format(second), 17, **weights, k=[2], one=1)
    files = lower(wrong, tail="never").save(tmp_path / "net")
    report = verify_net(right, files.param, files.bin, manifest=lower(right).manifest())
    assert [row.status for row in report.outputs] == ["mismatch"]


def test_wrong_scores_are_found_though_no_index_differs(tmp_path: Path) -> None:
    """The last class never has the largest score, and its scores are wrong by 4 %."""
    weights = {"w": np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)}
    graph = (
        "(float[1,15,6] x) => (int64[1,15] y) { p = MatMul(x, w) s = Add(p, b) y = ArgMax<axis = 2, keepdims = 0>(s) }"
    )
    right, wrong = (serialized(graph, 17, **weights, b=np.array([0] * 7 + [last], np.float32)) for last in (-500, -520))
    conversion = lower(right)
    for model, status in ((right, "ok"), (wrong, "mismatch")):
        files = lower(model).save(tmp_path / status)
        report = verify_net(right, files.param, files.bin, manifest=conversion.manifest())
        assert [row.status for row in report.outputs] == [status]
    assert "'s', which decides it, is off by" in report.outputs[0].message


def test_a_blob_has_a_value_of_its_name(worker: NcnnWorker) -> None:
    """`move_views` reshapes x before the sum, and only the sum is called t."""
    graph = (
        "(float x) => (int64[1,1,1] i, float[1,1,1] w) {"
        " t = Add(x, a) u = Reshape(t, s) v, i = TopK<largest = 0>(u, k) w = Log(v) }"
    )
    data = serialized(graph, 17, a=np.array(0.6, np.float32), s=[1, 1, 1], k=[1])
    assert [row.message for row in lower(data).verify(worker=worker).rows if row.status != "ok"] == []


def test_few_right_nets_are_called_wrong() -> None:
    rows = [line.split("\t") for line in OUTCOMES.read_text().splitlines()[1:]]
    assert [row[:2] for row in rows] == [[family, str(seed)] for family in FAMILIES for seed in range(SEEDS)]
    assert sum(row[2] != "ok" for row in rows) <= len(rows) / 100


@pytest.mark.parametrize("options", ["", ", clip = 0.1", ', direction = "reverse"'])
def test_small_outputs_of_gates(worker: NcnnWorker, options: str) -> None:
    """Where a sigmoid is nearly 0, LSTMs differ by the last bit of 1, which is much of their outputs."""
    graph = "(float[1,1,1] x, float[1,4,1] w, float[1,4,1] r) => (float[A,B,C,D] y) "
    data = serialized(graph + f"{{ y = LSTM<hidden_size = 1{options}>(x, w, r) }}", 17)
    assert [row.message for row in lower(data).verify(worker=worker).rows if row.status != "ok"] == []


def test_small_scores_with_a_soft_cap(worker: NcnnWorker) -> None:
    """The cap's tanh has errors of the last bit of 1."""
    graph = "(float[1,1,2,2] q, float[1,1,2,2] k) => (float[A,B,C,D] scores) "
    graph += "{ y, p, c, scores = Attention<softcap = 2.0, qk_matmul_output_mode = 1>(q, k, k) }"
    verified = lower(serialized(graph, 23)).verify(worker=worker)
    assert [row.message for row in verified.rows if row.status != "ok"] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_hard_models(family: str, worker: NcnnWorker) -> None:
    """The first models of the list: the rest takes minutes (`python -m scripts.fuzz.false_alarms hard --write`)."""
    for seed in range(2):
        report = lower(hard_model(family, seed)).verify(worker=worker)
        assert [row.message for row in report.rows if row.status != "ok"] == [], seed


def test_a_quantised_net_with_wrong_weights_is_found(worker: NcnnWorker) -> None:
    """Errors of 5 % in the last of 16 kernels are more than the steps that rounding decides."""
    rng = np.random.default_rng(0)
    weights: dict[str, Any] = {f"w{n}": (rng.standard_normal((8, 8, 3, 3)) / 6).astype("f4") for n in range(16)}
    weights |= {"s": np.float32(5 / 255), "z": np.uint8(0), "sx": np.float32(8 / 255), "zx": np.uint8(128)}
    nodes = "q = QuantizeLinear(x, sx, zx) a0 = DequantizeLinear(q, sx, zx) " + " ".join(
        f"c{n} = Conv<pads = [1, 1, 1, 1]>(a{n}, w{n}) r{n} = Relu(c{n}) q{n} = QuantizeLinear(r{n}, s, z) "
        f"a{n + 1} = DequantizeLinear(q{n}, s, z)"
        for n in range(16)
    )
    graph = f"(float[1,8,16,16] x) => (float[1,8,16,16] y) {{ {nodes} y = Identity(a16) }}"
    conversion = lower(serialized(graph, 17, **weights))
    conversion.verify(worker=worker).check()
    layer = [layer for layer in conversion.graph if layer.type == "Convolution"][-1]
    right = layer.weights["weight_data"]
    noise = 0.05 * right.std() * np.random.default_rng(1).standard_normal(right.shape)
    layer.weights["weight_data"] = (right + noise).astype(np.float32)
    assert [row.status for row in conversion.verify(worker=worker).outputs] == ["mismatch"]


def test_a_model_in_float16_that_overflows(worker: NcnnWorker) -> None:
    """The net computes in float32, and has numbers where the model has infinity; wrong ones are found there, too."""
    weight = 3 * np.random.default_rng(0).standard_normal((16, 8)).astype(np.float16)
    graph = "(float16[2,16] x) => (float16[2,8] y) { a = Tanh(x) b = MatMul(a, w) y = Exp(b) }"
    conversion = lower(serialized(graph, 17, w=weight))
    [row] = conversion.verify(worker=worker).outputs
    assert (row.rule, row.status) == ("quantised", "ok")
    [layer] = (layer for layer in conversion.graph if layer.type in ("Gemm", "InnerProduct"))
    [(name, right)] = layer.weights.items()
    layer.weights[name] = (right * np.float32(1.01)).astype(np.float32)
    assert [row.status for row in conversion.verify(worker=worker).outputs] == ["nan"]
