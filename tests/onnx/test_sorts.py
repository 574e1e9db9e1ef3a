"""TopK by DetectionOutput: numbers, indices and rows on devices, equal numbers, and layers that are no sort."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx2ncnn_opt import convert
from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.api.optimize import optimize
from onnx2ncnn_opt.errors import UnsupportedError
from onnx2ncnn_opt.ir.codes import Padding
from onnx2ncnn_opt.ir.detections import before_boxes, counting, is_sort, sorted_indices
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.releases import OLDEST, least_release
from onnx2ncnn_opt.ir.shapes import infer_graph
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.param.files import read_net
from onnx2ncnn_opt.runtime.base import Feed, Fetch
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.ort import OrtRunner
from testing.compared import types
from testing.models import parsed

ONE: dict[str, Any] = {"one": np.ones((1, 1), np.float32), "few": np.float32(2**-8)}
SUM = "s = MatMul(x, one)"


def sort(size: int, count: int, scores: str = SUM, options: str = "") -> str:
    """Return the graph of a TopK, whose indices look up the numbers again."""
    return f"""(float[1,{size},1] x) => (float[1,{count},1] v, int64[1,{count},1] i, float[1,{count},1] g)
        <int64[1] k = {{{count}}}> {{
        {scores} v, i = TopK<axis = 1{options}>(s, k) g = GatherElements<axis = 1>(s, i) }}"""


def outputs(graph: str, x: Array, device: NcnnWorker, mode: str, folder: Path) -> tuple[list[Array], list[Array]]:
    """Return what ncnn computes, and what ONNX Runtime computes."""
    source = parsed(graph, **ONE)
    conversion = lower(source, tail="never")
    assert "DetectionOutput" in types(conversion)
    files, manifest = conversion.save(folder / "net"), conversion.manifest()
    (given,) = manifest.inputs
    ends = [Fetch(out.blob, out.batch_axis) for out in manifest.outputs]
    runner = NcnnRunner(files.param, files.bin, mode=mode, worker=device)
    found = runner.run({given.blob: Feed(x, given.batch_axis)}, ends)
    wanted = OrtRunner(source.SerializeToString()).run({"x": x})
    return [found[end.blob].reshape(-1) for end in ends], [array.reshape(-1) for array in wanted.values()]


SIGMOID = "m = MatMul(x, one) n = Mul(m, few) s = Sigmoid(n)"


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize(("scores", "mode"), [(SUM, "fp32"), (SUM, "fp16"), (SIGMOID, "fp32")])
def test_numbers_and_indices(scores: str, mode: str, largest: int, device: NcnnWorker, tmp_path: Path) -> None:
    """fp16 holds these numbers, and not the indices."""
    x = np.random.default_rng(0).permutation(np.arange(-1500, 1500, dtype=np.float32)).reshape(1, -1, 1)
    found, wanted = outputs(sort(3000, 300, scores, f", largest = {largest}"), x, device, mode, tmp_path)
    np.testing.assert_array_equal(found[1], wanted[1])
    for array, right in zip(found[::2], wanted[::2], strict=True):
        np.testing.assert_allclose(array, right, rtol=1e-4 if scores == SIGMOID else 0)


@pytest.mark.parametrize("mode", ["fp32", "fp16"])
@pytest.mark.parametrize("scores", [SUM, SIGMOID])
def test_nan_leaves_all_rows_and_valid_indices(scores: str, mode: str, device: NcnnWorker, tmp_path: Path) -> None:
    x = np.full((1, 50, 1), np.nan, np.float32)
    x[0, 7:9] = [[2], [3]]
    (values, indices, picked), _ = outputs(sort(50, 40, scores), x, device, mode, tmp_path)
    assert values.shape == indices.shape == picked.shape == (40,)
    assert ((indices >= 0) & (indices < 50) & (indices == np.floor(indices))).all()


@pytest.mark.parametrize(
    "scores",
    [
        "s = Identity(x)",
        "m = MatMul(x, one) s = Relu(m)",
        "m = MatMul(x, one) s = Round(m)",
        "m = MatMul(x, one) n = Sigmoid(m) z = Sign(x) s = Mul(n, z)",
        "m = MatMul(x, one) n = Relu(m) p = Sigmoid(m) a, b = Split<axis = 1, num_outputs = 2>(m) "
        "c = Relu(b) s = Concat<axis = 1>(a, c)",
    ],
)
@pytest.mark.parametrize("size", [40, 800])
def test_numbers_that_are_often_equal(scores: str, size: int) -> None:
    """ncnn's order of equal numbers is arbitrary, so the last sort is of counts of larger numbers."""
    graph = lower(parsed(sort(size, 6, scores), **ONE), tail="never").graph
    found = [bool(counting(layer)) for layer in graph if layer.type == "DetectionOutput"]
    assert found == [True] if size == 40 else [False, True]


@pytest.mark.parametrize(
    "pick", ["a, s, b = Split<axis = 1, num_outputs = 3>(j)", "s = Slice(j, start, end, start_axis)"]
)
def test_a_part_of_a_concat_has_the_ties_of_its_operand(pick: str) -> None:
    scores = f"m = MatMul(x, one) z = Round(m) j = Concat<axis = 1>(z, m, z) {pick}"
    places: dict[str, Any] = {"start": np.array([800]), "end": np.array([1600]), "start_axis": np.array([1])}
    assert types(lower(parsed(sort(800, 6, scores), **ONE, **places), tail="never")).count("DetectionOutput") == 1


def topk(shape: str, result: str, count: int, options: str, scores: str = "s = Identity(x)") -> str:
    return f"""(float[{shape}] x) => (float[{result}] v, int64[{result}] i) <int64[1] k = {{{count}}}> {{
        {scores} v, i = TopK<{options}>(s, k) }}"""


SUMS = {"one": np.ones((1, 1), np.float32)}
FORMS = {
    "equal numbers of one row": (topk("1,600", "1,50", 50, "axis = 1"), (1, 600)),
    "the smallest equal numbers": (topk("600", "50", 50, "axis = 0, largest = 0"), (600,)),
    "few rows": (topk("2,3,300,1", "2,3,7,1", 7, "axis = 2", "s = MatMul(x, one)"), (2, 3, 300, 1)),
    "an inner axis": (topk("2,300,3", "2,40,3", 40, "axis = 1"), (2, 300, 3)),
    "many rows": (topk("70,33", "70,4", 4, "axis = -1"), (70, 33)),
    "many long rows": (topk("20,300", "20,9", 9, "axis = 1, largest = 0"), (20, 300)),
    "a whole row": (topk("3,16", "3,16", 16, "axis = 1"), (3, 16)),
    "a dynamic axis": (topk("2,n", "2,30", 30, "axis = 1"), (2, 2500)),
    "dynamic rows": (topk("n,8", "n,2", 2, "axis = 1"), (90, 8)),
}


@pytest.mark.parametrize("mode", ["fp32", "fp16"])
@pytest.mark.parametrize("form", list(FORMS))
def test_forms(form: str, mode: str, device: NcnnWorker, tmp_path: Path) -> None:
    """Quarters from -50 to 50, of which most occur several times; or sums, which differ."""
    graph, shape = FORMS[form]
    rng = np.random.default_rng(0)
    x = rng.integers(-200, 200, shape).astype(np.float32) / 4
    if "MatMul" in graph:
        x = rng.permutation(np.arange(-900, 900, dtype=np.float32)).reshape(shape)
    found, wanted = outputs(graph, x, device, mode, tmp_path)
    for array, right in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(array, right)


def test_fp16_sorts_inputs_as_they_are(device: NcnnWorker, tmp_path: Path) -> None:
    """It would round many of them to equal numbers."""
    for shape in ((3, 700), (9, 30)):
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        graph = topk(",".join(map(str, shape)), f"{shape[0]},20", 20, "axis = 1")
        (_, found), (_, wanted) = outputs(graph, x, device, "fp16", tmp_path)
        np.testing.assert_array_equal(found, wanted)


def test_infinite_numbers(device: NcnnWorker, tmp_path: Path) -> None:
    for shape in ((1, 600), (3, 20)):
        x = np.random.default_rng(0).choice([-np.inf, -3e38, 0, 1e-3, 3e38, np.inf], shape).astype(np.float32)
        size = ",".join(map(str, shape))
        graph = topk(size, f"{shape[0]},20", 20, "axis = 1")
        found, wanted = outputs(graph, x, device, "fp32", tmp_path)
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("shape", "minimum"),
    [
        ("1,n", {"n": 30, "1048576 + -1*n": 0, "16777216 + -31*n": 0}),  # k, the largest index, the largest key
        ("n,60", {"16777216 + -3660*n": 0}),
    ],
)
def test_dynamic_sizes_have_limits(shape: str, minimum: dict[str, int]) -> None:
    """ONNX fails below k, and float32 tells no larger numbers apart."""
    graph = topk(shape, f"{shape.partition(',')[0]},30", 30, "axis = 1")
    assert lower(parsed(graph), tail="never").manifest().minimum == minimum


def test_a_sort_is_in_the_net_unless_a_tail_follows_anyway() -> None:
    """There it keeps ONNX's order of equal numbers."""
    graph = sort(400, 6)
    conversion = convert(parsed(graph, **ONE).SerializeToString())
    assert conversion.report is not None
    assert conversion.report.ok
    assert conversion.tail is None
    assert "DetectionOutput" in types(conversion)
    assert least_release(conversion.graph) == OLDEST
    conversion = lower(
        parsed(graph.replace("] g)", "] g, int64[3,n] z)").replace("i) }", "i) z = NonZero(g) }"), **ONE)
    )
    assert conversion.tail is not None
    assert "TopK" in conversion.tail.operators
    assert "DetectionOutput" not in types(conversion)


@pytest.mark.parametrize(
    ("size", "count", "scores"),
    [(2**20 + 1, 300, SUM), (2**20, 4097, SUM), (2**20, 16, "s = Exp(x)"), (60_000, 300, "s = Relu(x)")],
)
def test_too_many_numbers(size: int, count: int, scores: str) -> None:
    """Indices above 2**20 are not exact, and ncnn compares each row of the result with all before it."""
    with pytest.raises(UnsupportedError, match="too many to compare"):
        lower(parsed(sort(size, count, scores), **ONE), tail="never")


def sorting(**params: Any) -> Layer:
    """Return a DetectionOutput that sorts 9 numbers, except for these parameters of it and of its Padding."""
    pads: dict[str | int, Any] = {name: params.pop(name) for name in ("right", "value", "type") if name in params}
    graph = lower(parsed(sort(9, 4), **ONE), tail="never").graph
    (layer,) = (layer for layer in graph if layer.type == "DetectionOutput")
    padding = layer.inputs[1].producer
    assert padding is not None
    padding.params.update(pads)
    layer.params.update(dict[str | int, Any](params))
    return layer


@pytest.mark.parametrize(
    "params",
    [
        {"right": 3},
        {"value": -3.1e38},
        {"value": 0.0},
        {"nms_threshold": 0.5},
        {"num_class": 2},
        {"nms_top_k": 5},
        {"keep_top_k": 4},
        {"confidence_threshold": 0.5},
        {"variances0": 0.1},
        {"type": Padding.REPLICATE},
    ],
)
def test_the_rows_of_other_layers_are_unknown(params: dict[str, Any]) -> None:
    assert is_sort(sorting())
    assert not is_sort(sorting(**params))


@pytest.mark.parametrize("scores", [SUM, SIGMOID])
def test_a_written_net_has_its_shapes_and_stays(scores: str, tmp_path: Path) -> None:
    files = convert(parsed(sort(3000, 30, scores), **ONE).SerializeToString(), tail="never").save(tmp_path / "net")
    graph = read_net(files.param, files.bin).graph
    infer_graph(graph)
    assert [layer.output.shape for layer in graph if layer.type == "DetectionOutput"] == [(30, 6)]
    assert any(sorted_indices(layer) is not None for layer in graph)
    again = optimize(files.param, files.bin)
    assert not again.masks
    assert [str(layer) for layer in again.graph] == [str(layer) for layer in graph]


def test_the_numbers_before_the_padding_decide() -> None:
    """Beside the padding of -2e38, any difference of scores would be small."""
    graph = lower(parsed(sort(3000, 30, SIGMOID), **ONE), tail="never").graph
    (score,) = before_boxes(graph)
    assert score.shape == (1, 3000)
