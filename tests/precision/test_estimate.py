import math
from pathlib import Path

import numpy as np
import pytest

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import RunError
from onnx2ncnn_opt.ir.features import FP32, Feature
from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.ir.half import to_half
from onnx2ncnn_opt.ir.shapes import infer_graph
from onnx2ncnn_opt.param.binary import write_weights
from onnx2ncnn_opt.precision.fp16_run import Estimator, most_ordinary
from onnx2ncnn_opt.precision.mask_judge import MaskJudge
from onnx2ncnn_opt.precision.masks import Precision, find_masks
from onnx2ncnn_opt.rewrite.prove_masks import put_masks
from onnx2ncnn_opt.runtime.base import Feed
from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from testing import present
from testing.models import write_model
from testing.param_text import bare as net
from testing.param_text import layer


def estimator(graph: Graph, *arrays: np.ndarray, batch_axis: int | None = None) -> Estimator:
    return Estimator(graph, {blob: Feed(a, batch_axis) for blob, a in zip(graph.inputs, arrays, strict=True)})


LENGTH = (
    "Input x 0 1 x 0=64",
    "UnaryOp sq 1 1 x a 0=4",
    "Reduction sum 1 1 a b 0=0 1=1 4=1 5=1",
    "UnaryOp y 1 1 b y 0=5",
)


@pytest.mark.parametrize("is_rounded", [False, True])
def test_every_blob_is_rounded(*, is_rounded: bool) -> None:
    x = np.linspace(0.1, 3.0, 64, dtype=np.float32)
    graph = net("Input x 0 1 x 0=64", "UnaryOp a 1 1 x a 0=7", "UnaryOp y 1 1 a y 0=8")
    with estimator(graph, x) as estimate:
        (y,) = estimate.run(rounded=is_rounded).outputs.values()

    def rounded(array: np.ndarray) -> np.ndarray:
        return array.astype(np.float16).astype(np.float32) if is_rounded else array

    expected = rounded(np.log(rounded(np.exp(rounded(x)).astype(np.float32))))
    np.testing.assert_allclose(y, expected, rtol=1e-3 if is_rounded else 1e-5)
    assert (np.abs(y - x).max() > 1e-4) == is_rounded


def test_blobs_are_walked_through_that_are_too_large_for_glibc_to_keep() -> None:
    x = np.linspace(-7, 3, 2**23 + 16, dtype=np.float32)
    with estimator(net(f"Input x 0 1 x 0={x.size}", "ReLU a 1 1 x a", "UnaryOp y 1 1 a y 0=1"), x) as estimate:
        for rounded, expected in ((False, np.maximum(x, 0)), (True, np.maximum(x, 0).astype(np.float16))):
            walk = estimate.run(rounded=rounded)
            (y,) = walk.outputs.values()
            np.testing.assert_array_equal(y, -expected.astype(np.float32))
            assert walk.largest[estimate.graph.outputs[0]] == 3


def test_blobs_of_a_walk_are_freed() -> None:
    size, count = 2**20, 32
    lines = [f"BatchNorm n{i} 1 1 {i or 'x'} {i + 1} 0=4" for i in range(count)]
    graph = net(f"Input x 0 1 x 0=1024 1={size // 4096} 2=4", *lines)
    for norm in graph.layers[1:]:
        for name in ("slope_data", "mean_data", "var_data", "bias_data"):
            norm.weights[name] = np.array([1.0, 1.1, 1.2, 1.3], np.float32)
    blob = np.ones((4, size // 4096, 1024), np.float32)
    with NcnnWorker() as worker:
        before = worker.memory(restart=True)
        with Estimator(graph, {graph.inputs[0]: Feed(blob)}, worker=worker) as estimate:
            estimate.run(rounded=True)
        after = worker.memory()
    assert before is None or present(after) - before < count // 2 * blob.nbytes


def test_overflow_is_seen_and_masks_undo_it() -> None:
    graph = net(*LENGTH)
    x = np.full(64, 300.0, np.float32)
    with estimator(graph, x) as estimate:
        assert math.isnan(find_masks([estimate], masks=False)[1].error)
        found, precision = find_masks([estimate])
    assert {each.name: mask.features for each, mask in found.items()} == dict.fromkeys(["sq", "sum", "y"], FP32)
    assert found[layer(graph, "sum")].largest == pytest.approx(64 * 300.0**2)
    assert precision.error < 1e-3
    assert precision.ok
    assert not any(each["featmask"] for each in graph)  # they are put on by those who want them
    put_masks(graph, ((each, mask.features) for each, mask in found.items()))
    with estimator(graph, x) as estimate:
        assert find_masks([estimate], masks=False)[1].error < 1e-3
        assert find_masks([estimate])[0] == {}


@pytest.mark.parametrize(("operation", "number"), [(3, 100.0), (8, 20.0), (10, 5.0)], ids=["mean", "L2", "LogSumExp"])
def test_sums_that_are_too_large_for_gpus_are_masked(operation: int, number: float) -> None:
    graph = net("Input x 0 1 x 0=800", "UnaryOp a 1 1 x a 0=0", f"Reduction y 1 1 a y 0={operation} 1=1 4=1 5=1")
    with estimator(graph, np.full(800, number, np.float32)) as estimate:
        found, precision = find_masks([estimate])
    assert {each.name: mask.features for each, mask in found.items()} == {"y": Feature.NO_FP16_ARITHMETIC}
    assert precision.error < 1e-3
    with estimator(graph, np.full(800, 0.1, np.float32)) as estimate:
        assert find_masks([estimate])[0] == {}


def test_changed_integers_are_reported() -> None:
    graph = net("Input x 0 1 x 0=64", "UnaryOp y 1 1 x y 0=2")
    for number, is_held in ((2048.5, True), (2050.5, True), (2051.0, False)):
        with estimator(graph, np.full(64, number, np.float32)) as estimate:
            precision = find_masks([estimate], integers=graph.outputs)[1]
        assert precision.error < 1e-3
        assert precision.ok == is_held
        assert ("an output has other integers" in str(precision)) != is_held


@pytest.mark.parametrize("width", [4, 8, 64])
def test_scores_of_queries_that_see_no_key_are_masked(width: int) -> None:
    """Their scores have 16 bits without fp16 arithmetic, too, where numbers of 1e4 are 8 apart."""
    sizes = f"0={width} 1=6 2=2"
    inputs = (f"Input {name} 0 1 {name} {sizes}" for name in "qkv")
    graph = net(*inputs, "Input m 0 1 m 0=6 1=6", "SDPA y 4 1 q k v m y 5=1")
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 6, width), np.float32)
    with estimator(graph, q, k, v, np.full((6, 6), -1e4, np.float32)) as estimate:
        masks, _ = find_masks([estimate])
    assert [mask.features for mask in masks.values()] == [FP32]


def test_nets_without_need_get_none() -> None:
    graph = net(*LENGTH)
    with estimator(graph, np.linspace(-2, 2, 64, dtype=np.float32)) as estimate:
        found, precision = find_masks([estimate])
    assert found == {}
    assert 0 < precision.error < 1e-3
    assert "off by up to" in str(precision)


def test_a_divisor_that_becomes_0_is_found() -> None:
    graph = net(
        "Input x 0 1 x 0=64", "BinaryOp a 1 1 x a 0=2 1=1 2=1e-9", "Split s 1 2 a a0 a1", "BinaryOp y 2 1 a0 a1 y 0=3"
    )
    with estimator(graph, np.linspace(1, 2, 64, dtype=np.float32)) as estimate:
        assert math.isnan(find_masks([estimate], masks=False)[1].error)
        found, precision = find_masks([estimate])
    assert {each.name for each in found} == {"a", "y"}
    assert precision.error < 2e-3


def test_indexes_are_not_rounded() -> None:
    graph = net("Input x 0 1 x 0=3", "Reshape r 1 1 x a 0=3", "Embed y 1 1 a y 0=1 1=5000 3=5000")
    layer(graph, "y").weights["weight_data"] = np.arange(5000, dtype=np.float32) % 1000
    with estimator(graph, np.array([4097, 1, 2049], np.int32)) as estimate:
        (y,) = estimate.run(rounded=True).outputs.values()
    assert y.ravel().tolist() == [97.0, 1.0, 49.0]


def test_a_batch_is_walked_through() -> None:
    graph = net("Input x 0 1 x 0=8 1=6", "ReLU a 1 1 x a", "InnerProduct y 1 1 a y 0=4 2=32")
    layer(graph, "y").weights["weight_data"] = np.ones(32, np.float32)
    x = np.random.default_rng(0).standard_normal((3, 6, 8), np.float32)
    with estimator(graph, x, batch_axis=0) as estimate:
        walk = estimate.run(sampled=True)
    (y,) = walk.outputs.values()
    np.testing.assert_allclose(y, np.maximum(x, 0) @ np.ones((8, 4), np.float32), rtol=1e-5)
    assert [way.how for way in walk.inner[layer(graph, "y")]] == ["sums of 8 products"]


def convolutions(count: int) -> tuple[Graph, np.ndarray]:
    """Return a net whose errors are mostly those of winograd, and its input."""
    lines = ["Input b0 0 1 b0 0=20 1=20 2=32"]
    lines += [f"Convolution c{i} 1 1 b{i} b{i + 1} 0=32 1=3 4=1 6=9216" for i in range(count)]
    graph = net(*lines)
    rng = np.random.default_rng(0)
    for each in graph:
        if each.type == "Convolution":
            each.weights["weight_data"] = (rng.standard_normal(9216) / 17).astype(np.float32)
    return graph, rng.standard_normal((32, 20, 20), np.float32)


def test_winograd_that_costs_too_much_is_masked() -> None:
    graph, x = convolutions(4)
    infer_graph(graph)
    with estimator(graph, x) as estimate:
        before = find_masks([estimate], masks=False)[1]
        found, after = find_masks([estimate])
    assert before.error > 1e-2
    assert after.error <= 1e-2
    assert found
    assert {mask.features for mask in found.values()} == {Feature.NO_WINOGRAD}  # which is the mildest
    assert all("winograd's sums in fp16 make errors of" in mask.reason for mask in found.values())


def test_winograd_that_overflows_is_masked() -> None:
    graph, x = convolutions(10)
    with estimator(graph, x * 1e3) as estimate:
        found, _ = find_masks([estimate])
    assert len(found) == 10
    assert all(mask.features & Feature.NO_WINOGRAD for mask in found.values())
    overflow = [mask for mask in found.values() if "larger than 65504" in mask.reason]
    assert overflow
    assert {mask.features for mask in overflow} == {Feature.NO_WINOGRAD}  # plain sums are small enough


def test_masks_are_where_they_cost_little() -> None:
    """Two layers make the same noise; one of them has a hundredth of the multiplications."""
    graph = net(
        "Input x 0 1 x 0=512 1=64",
        "Gemm large 1 1 x a 3=1 5=1 6=1 8=512 9=512 10=-1",
        "Gemm small 1 1 a y 3=1 5=1 6=1 8=5 9=512 10=-1",
    )
    rng = np.random.default_rng(0)
    for name, columns in (("large", 512), ("small", 5)):
        layer(graph, name).weights["B_data"] = (rng.standard_normal((columns, 512)) / 22).astype(np.float32)
    infer_graph(graph)
    with estimator(graph, rng.standard_normal((64, 512), np.float32)) as estimate:
        judge, one = MaskJudge(estimate), {layer(graph, "small"): Feature.NO_FP16_ARITHMETIC}
        before, budget = judge.error(), 1.8 * judge.error(one)
        found, precision = find_masks([estimate], budget=budget)
    assert {each: mask.features for each, mask in found.items()} == one
    assert precision.price == pytest.approx(5 / 517)
    assert before > budget >= precision.error


def test_the_price_of_earlier_masks_ends_the_search() -> None:
    """A mask that the net has takes most of the multiplications; the layer with errors has few."""
    graph, x = convolutions(4)
    infer_graph(graph)
    for each in graph.layers[1:4]:
        each.params["featmask"] = int(Feature.NO_FP16_ARITHMETIC)
    with estimator(graph, 30 * x) as estimate:
        before = find_masks([estimate], masks=False)[1]
        found, _ = find_masks([estimate])
        judge = MaskJudge(estimate)
        unmasked, after = judge.error(), judge.error({each: mask.features for each, mask in found.items()})
    assert before.price == pytest.approx(0.75)
    assert before.error > 5e-3
    assert after <= unmasked
    assert len(found) <= 1


def test_the_scale_of_ordinary_numbers_is_chosen() -> None:
    graph = net("Input x 0 1 x 0=64 1=16", "Gemm y 1 1 x y 3=1 5=1 6=1 7=0 8=32 9=64 10=4")
    rng = np.random.default_rng(0)
    layer(graph, "y").weights["B_data"] = (rng.standard_normal((32, 64)) / 8).astype(np.float32)
    layer(graph, "y").weights["C_data"] = rng.standard_normal(32, np.float32)
    x = rng.standard_normal((16, 64), np.float32)
    with estimator(graph, x) as estimate:
        scales = [estimate.on({blob: Feed(x * size) for blob in graph.inputs}) for size in (1e-2, 1.0, 1e2)]
        assert most_ordinary(scales) == 1
        assert most_ordinary([estimate, estimate.on(estimate.feeds)]) == 0


def test_a_failing_net_is_reported() -> None:
    graph = net("Input x 0 1 x 0=8", "PixelShuffle y 1 1 x y 0=3")
    with estimator(graph, np.ones(8, np.float32)) as estimate, pytest.raises(RunError):
        estimate.run()


def test_nets_of_very_many_layers_are_not_estimated() -> None:
    graph = net("Input x 0 1 b0 0=4", *(f"Sigmoid s{n} 1 1 b{n} b{n + 1}" for n in range(2**14)))
    with pytest.raises(RunError, match="16,384 layers, not 16,385"), estimator(graph, np.ones(4, np.float32)):
        pass


@pytest.mark.parametrize(
    ("precision", "said"),
    [
        (Precision(5e-3), ""),
        (
            Precision(1.5e-2, is_undecided=True),
            "; compute it in fp32; an index may be another one where two numbers are nearly equal",
        ),
        (
            Precision(1e-2),
            "; perhaps compute it in fp32; with other inputs perhaps 0.02; --budget 0.005 looks for more masks",
        ),
        (Precision(5e-2), "; compute it in fp32; `mixed` looks for more masks"),
    ],
)
def test_descriptions_of_fp16(precision: Precision, said: str) -> None:
    assert str(precision) == f"off by up to {precision.error:.1e} of an output's largest value{said}"
    assert len(precision.summary) < 80


@pytest.mark.parametrize(("other", "is_undecided"), [(-1.0, False), (1 + 2.0**-11, True)])
def test_places_of_the_largest_number_are_measured_by_the_numbers(
    tmp_path: Path, other: float, *, is_undecided: bool
) -> None:
    """Some of the places are others if two numbers are nearly equal."""
    graph = "(float[5, 64] x) => (int64[5] y) { z = MatMul(x, w) y = ArgMax<axis = 1, keepdims = 0>(z) }"
    column = np.random.default_rng(0).standard_normal((64, 1)).astype(np.float32)
    precision = lower(write_model(tmp_path, graph, w=np.hstack([column, other * column]))).estimated().precision
    assert precision is not None
    assert 1e-4 < precision.error < 1e-2
    assert precision.is_undecided == precision.may_exceed == is_undecided


def test_silent_places_have_less_noise() -> None:
    """wav2vec2, whose normalisation amplifies silence, was estimated at 9.2e-2; devices are off by 4.4e-3."""
    graph = net("Input x 0 1 x 0=128 1=1 2=16", "Convolution y 1 1 x y 0=16 1=3 11=1 6=768")
    layer(graph, "y").weights["weight_data"] = np.random.default_rng(0).standard_normal(768).astype(np.float32)
    x = np.random.default_rng(1).standard_normal((16, 1, 128)).astype(np.float32)
    x[..., 64:] *= 1e-3
    with estimator(graph, x) as estimate:
        judge = MaskJudge(estimate)
        ((y, exact),) = zip(estimate.run(judge.noise()).outputs.values(), judge.reference.outputs.values(), strict=True)
    loud, silent = (np.square(y - exact)[..., half].mean() for half in (slice(62), slice(64, None)))
    assert 0 < silent < 1e-4 * loud


def test_an_output_that_is_small_by_chance_does_not_decide() -> None:
    """One number is nearly 0 for one of the inputs: the same errors are larger than the number then."""
    graph = net("Input x 0 1 x 0=64", "InnerProduct y 1 1 x y 0=1 1=0 2=64")
    weight = to_half(np.random.default_rng(0).standard_normal(64))
    layer(graph, "y").weights["weight_data"] = weight
    x = np.random.default_rng(1).standard_normal(64).astype(np.float32)
    with estimator(graph, x) as estimate:
        small = estimate.on({blob: Feed(x - weight * (weight @ x - 1e-2) / (weight @ weight)) for blob in graph.inputs})
        assert find_masks([small], masks=False)[1].error > 2e-2
        precision = find_masks([small, estimate])[1]
    assert precision.error < 5e-3


def test_tanh_of_small_numbers_is_masked_for_gpus() -> None:
    """On Vulkan a policy whose actions were below 1e-3 was off by 0.17 of the largest."""
    graph = net("Input x 0 1 x 0=64", "TanH y 1 1 x y")
    x = np.linspace(-1e-3, 1e-3, 64, dtype=np.float32)
    with estimator(graph, x) as estimate:
        found, precision = find_masks([estimate])
    assert {each.name: mask.features for each, mask in found.items()} == {"y": Feature.NO_FP16_ARITHMETIC}
    assert precision.ok
    with estimator(graph, 1e3 * x) as estimate:
        assert find_masks([estimate])[0] == {}


def test_written_weights_are_used_and_unchanged(tmp_path: Path) -> None:
    graph = net("Input x 0 1 x 0=2 1=2 2=4", "Scale y 1 1 x y 0=4")
    layer(graph, "y").weights["scale_data"] = np.full(4, 1.0001)
    feeds = {graph.inputs[0]: Feed(np.ones((4, 2, 2), np.float32))}
    path = tmp_path / "net.bin"
    with path.open("wb") as stream:
        write_weights(graph, stream)
    before = path.read_bytes()
    with Estimator(graph, feeds, bin=path) as estimate:
        precision = find_masks([estimate])[1]
    with Estimator(graph, feeds) as estimate:
        assert precision == find_masks([estimate])[1]
    assert precision.error > 0
    assert path.read_bytes() == before
    assert len(graph) == 2
