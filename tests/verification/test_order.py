"""Rows that a net sorts: another order is right where scores are equal within rounding, and only there."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from onnx2ncnn_opt.api.lower import Conversion, lower
from onnx2ncnn_opt.ir.detections import counting
from onnx2ncnn_opt.ir.graph import Graph, Layer
from onnx2ncnn_opt.outputs import OutputReport
from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from onnx2ncnn_opt.verification.options import Verification
from testing.compared import types
from testing.models import parsed

RNG = np.random.default_rng(0)
WEIGHTS: dict[str, Any] = {
    "to_score": RNG.standard_normal((8, 1)).astype(np.float32),
    "to_box": RNG.standard_normal((8, 4)).astype(np.float32),
    "bias": RNG.standard_normal((64, 1)).astype(np.float32),
    "few": np.float32(2.0**-20),
    "low": np.float32(0.5),
}
MODEL = """(float[ROWS,64,8] x) => (float[ROWS,16,1] v, float[ROWS,16,4] y)
    <int64[1] k = {16}, int64[3] sizes = {ROWS, 16, 4}> {
    logit = MatMul(x, to_score) SCORE v, i = TopK<axis = 1>(s, k)
    box = MatMul(x, to_box) wide = Expand(i, sizes) y = GatherElements<axis = 1>(box, wide) }"""
APART, NEAR = "s = Add(logit, bias)", "small = Mul(logit, few) s = Sigmoid(small)"
TIES = "apart = Add(logit, bias) s = Min(apart, low)"


def net(score: str, rows: int = 1) -> Conversion:
    conversion = lower(parsed(MODEL.replace("SCORE", score).replace("ROWS", str(rows)), **WEIGHTS), tail="never")
    assert "DetectionOutput" in types(conversion)
    return conversion


def reports(conversion: Conversion, worker: NcnnWorker, mode: str = "fp32") -> list[OutputReport]:
    return list(conversion.verify(Verification(modes=(mode,)), worker=worker).outputs)


@pytest.mark.parametrize("mode", ["fp32", "fp16"])
@pytest.mark.parametrize(("score", "count", "is_moved"), [(APART, 1, False), (NEAR, 1, True), (NEAR, 3, True)])
def test_rows_of_equal_scores_may_have_other_places(
    score: str, count: int, is_moved: bool, mode: str, device: NcnnWorker
) -> None:
    rows = reports(net(score, count), device, mode)
    assert [row.status for row in rows] == ["ok", "ok"]
    assert "decided" not in {row.rule for row in rows}
    if is_moved:
        assert all("rows have other places in the order of 'i'" in row.message for row in rows)


def test_a_sort_of_unknown_rank(worker: NcnnWorker) -> None:
    """ONNX does not infer how many axes the scores have; exporters write such sizes."""
    body = """logit = MatMul(x, to_score) sizes = Shape(logit) known = Equal(sizes, sizes)
        same = Where(known, sizes, sizes) wide = Reshape(logit, same) s = Squeeze(wide) y, i = TopK<axis = -1>(s, k)"""
    model = parsed(
        f"(float[64,8] x) => (float[16] y, int64[16] i) <int64[1] k = {{16}}> {{ {body} }}",
        to_score=WEIGHTS["to_score"],
    )
    conversion = lower(model, tail="never")
    assert conversion.manifest().sorts
    assert conversion.verify(Verification(), worker=worker).ok


def test_indices_above_2048_beside_weights_in_16_bits(worker: NcnnWorker) -> None:
    text = (
        "(float[3000] x) => (float[9] v, int64[9] i) <int64[1] k = {9}> { y = Mul(x, x) v, i = TopK<axis = -1>(y, k) }"
    )
    assert lower(parsed(text), tail="never", storage="fp16").verify(Verification(), worker=worker).ok


def test_names_of_blobs_that_masks_change(worker: NcnnWorker) -> None:
    """ONNX Runtime's runs begin before masks add casts, which shift the numbers that are names of inner blobs."""
    conversion = net(APART)
    runs = conversion.begin_runs(Verification())
    model, (sort,) = runs.result(), conversion.manifest().sorts
    model.manifest = replace(conversion.manifest(), sorts=(replace(sort, blob="logit"),))
    assert conversion.verify(Verification(), worker=worker, runs=runs).ok


def layer_of(graph: Graph, kind: str) -> Layer:
    return next(layer for layer in graph if layer.type == kind)


def boxes_of(graph: Graph) -> np.ndarray:
    boxes = layer_of(graph, "DetectionOutput").inputs[0].producer
    assert boxes is not None
    return boxes.weights["data"].reshape(-1, 4)


def wrong_boxes(graph: Graph) -> None:
    """Exchange the indices of some candidates: they get the boxes of other scores."""
    boxes = boxes_of(graph)
    boxes[:32] = boxes[31::-1].copy()


def twice(graph: Graph) -> None:
    """Give a candidate the index of the one before."""
    boxes = boxes_of(graph)
    boxes[1:64:2] = boxes[0:64:2]


def changed(layer: Layer, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    layer.weights[name] = change(np.asarray(layer.weights[name])).astype(np.float32)


def missing_row(graph: Graph) -> None:
    """Lower some scores, so that other rows are in their places."""
    changed(layer_of(graph, "Scale"), "bias_data", lambda bias: bias - (np.arange(64) % 5 == 0))


def smallest(graph: Graph) -> None:
    """Sort the other way round."""
    changed(layer_of(graph, "Scale"), "scale_data", np.negative)
    changed(layer_of(graph, "Scale"), "bias_data", np.negative)


def fewer(graph: Graph) -> None:
    """Leave out candidates, as a threshold does."""
    boxes_of(graph)[16:] = boxes_of(graph)[15]


def next_row(graph: Graph) -> None:
    """Pick the rows of other indices than the sort gives."""
    grid = layer_of(graph, "GridSample").inputs[1].producer
    assert grid is not None
    grid.params["beta"] += 1


@pytest.mark.parametrize(
    ("fault", "message", "mode"),
    [
        (wrong_boxes, "the order of 'i' is wrong", "fp32"),
        (wrong_boxes, "the order of 'i' is wrong", "fp16"),
        (twice, "the order of 'i'", "fp32"),
        (missing_row, "the order of 'i' is wrong", "fp32"),
        (smallest, "the order of 'i' is wrong", "fp16"),
        (fewer, "the order of 'i'", "fp32"),
        (next_row, "off by", "fp32"),
    ],
)
def test_a_wrong_order_is_refused(fault: Callable[[Graph], None], message: str, mode: str, worker: NcnnWorker) -> None:
    conversion = net(APART)
    fault(conversion.graph)
    rows = reports(conversion, worker, mode)
    assert "mismatch" in {row.status for row in rows}
    assert any(message in row.message for row in rows), [row.message for row in rows]


def exchanged_rows(graph: Graph) -> None:
    """Give the first row the order of the second."""
    joined = next(layer for layer in graph if layer.type == "Concat" and layer.inputs[0].producer is not None)
    joined.inputs = (joined.inputs[1], joined.inputs[0], *joined.inputs[2:])


def without_offset(graph: Graph) -> None:
    """Sort the numbers of all rows together."""
    changed(counted(graph), "bias_data", np.zeros_like)


def last_of_equal(graph: Graph) -> None:
    """Put equal numbers in the opposite order."""
    changed(counted(graph), "bias_data", np.negative)


def without_count(graph: Graph) -> None:
    """Sort the numbers by their indices alone."""
    changed(counted(graph), "scale_data", np.zeros_like)


def counted(graph: Graph) -> Layer:
    """Return the last layer that makes a number of an element's row, its index, and the count of larger elements."""
    steps = (counting(layer) for layer in graph if layer.type == "DetectionOutput")
    return next(step for steps_of in steps for step in steps_of if step.type == "Scale")


@pytest.mark.parametrize(
    ("fault", "score", "rows", "message"),
    [
        (exchanged_rows, APART, 3, "the order of 'i' is wrong"),
        (wrong_boxes, APART, 3, "the order of 'i' is wrong"),
        (twice, APART, 3, "the order of 'i'"),
        (without_offset, TIES, 3, "off by"),
        (last_of_equal, TIES, 1, "off by"),
        (without_count, TIES, 1, "off by"),
        (twice, TIES, 1, "off by"),
    ],
)
def test_a_wrong_order_of_several_or_equal_rows_is_refused(
    fault: Callable[[Graph], None], score: str, rows: int, message: str, worker: NcnnWorker
) -> None:
    conversion = net(score, rows)
    fault(conversion.graph)
    found = reports(conversion, worker)
    assert any(message in row.message for row in found if row.status == "mismatch"), found


@pytest.mark.parametrize("mode", ["fp32", "fp16"])
@pytest.mark.parametrize("rows", [1, 3])
def test_often_equal_numbers_are_in_the_order_of_the_model(rows: int, mode: str, device: NcnnWorker) -> None:
    conversion = net(TIES, rows)
    assert not conversion.manifest().sorts
    assert [row.status for row in reports(conversion, device, mode)] == ["ok", "ok"]
