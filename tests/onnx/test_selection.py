"""An exported NonMaxSuppression whose rows fill a table: the net has ONNX Runtime's rows, and no tail."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from onnx2ncnn_opt import Net
from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import UnsupportedError
from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.verification.options import Verification
from testing.compared import types
from testing.exports import ROOT
from testing.models import parsed

COUNT, MOST = 2500, 20  # candidates, more than fp16 tells apart, and rows
MODEL = f"""(float[1,6,{COUNT}] x) => (float[{MOST},6] y) <
    int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] two = {{2}}, int64[1] four = {{4}}, int64[1] five = {{5}},
    int64[1] six = {{6}}, int64[2] ends = {{0, 1}}, int64[2] column = {{-1, 1}}, int64[1] all = {{{COUNT}}},
    int64[1] most = {{{MOST}}}, float[1] iou = {{0.5}}, float conf = {{0.3}}, float far = {{1000.0}},
    float half = {{0.5}}
> {{
    positive = Relu(x) flat = Squeeze(positive, zero) turned = Transpose(flat)
    box = Slice(turned, zero, four, one) score_column = Slice(turned, four, five, one)
    score = Squeeze(score_column, one) class_column = Slice(turned, five, six, one) class = Squeeze(class_column, one)
    mask = Greater(score, conf) found = NonZero(mask) at = Transpose(found)
    boxes = GatherND(box, at) scores = GatherND(score, at) classes = GatherND(class, at)
    wide = Reshape(classes, column) offset = Mul(wide, far) moved = Add(boxes, offset)
    nms_boxes = Unsqueeze(moved, zero) nms_scores = Unsqueeze(scores, ends)
    chosen = NonMaxSuppression(nms_boxes, nms_scores, all, iou) third = Gather<axis = 1>(chosen, two)
    index = Squeeze(third, one) top = Slice(index, zero, most, zero)
    row_boxes = Gather(boxes, top) row_scores = Gather(scores, top) row_classes = Gather(classes, top)
    a = Reshape(row_scores, column) b = Reshape(row_classes, column) rows = Concat<axis = 1>(row_boxes, a, b)
    sizes = Shape(rows) count = Gather(sizes, zero) missing = Sub(most, count)
    pads = Concat<axis = 0>(zero, zero, missing, zero) y = Pad(rows, pads)
}}"""


def drawn(kind: str) -> NDArray[np.float32]:
    rng = np.random.default_rng(0)
    middle, size = rng.random((COUNT, 2)) * 300, rng.random((COUNT, 2)) * 40 + 2
    if kind == "flat":  # boxes without an area overlap nothing
        size[::3] = 0
    low, high = (middle + size / 2, middle - size / 2) if kind == "turned" else (middle - size / 2, middle + size / 2)
    scores = rng.permutation(COUNT) / COUNT * (0.301 if kind == "few" else 0.1 if kind == "none" else 1)
    columns = [low, high, scores[:, None], rng.integers(0, 5, (COUNT, 1))]
    return np.ascontiguousarray(np.concatenate(columns, 1).T[None], np.float32)


def test_rows_are_those_of_onnx_runtime(tmp_path: Path) -> None:
    model = parsed(MODEL)
    conversion, runner = lower(model), OrtRunner(model.SerializeToString())
    assert conversion.tail is None
    assert types(conversion).count("DetectionOutput") == 2
    conversion.save(tmp_path / "net")
    with Net(tmp_path / "net", isolated=False) as net:
        for kind in ("usual", "flat", "turned", "few", "none"):
            feeds = {"x": drawn(kind)}
            [expected] = runner.run(feeds).values()
            assert expected.any() == (kind != "none")
            np.testing.assert_array_equal(net.run(feeds)["y"], expected)


def test_ranks_and_boxes_of_classes_have_32_bits(device: NcnnWorker) -> None:
    assert lower(parsed(MODEL)).verify(Verification(modes=("fp16",)), worker=device).ok


def test_a_wrong_threshold_is_found_if_no_score_passes(worker: NcnnWorker) -> None:
    """The net selects from other candidates, too, which pass."""
    text = MODEL.replace("] x) =>", f"] x, float[{COUNT}] s) =>").replace("conf = {0.3}", "conf = {0.9}")
    text = text.replace("score = Squeeze(score_column, one)", "low = Mul(s, tiny) score = Sigmoid(low)")
    conversion = lower(parsed(text.replace("far = {1000.0}", "far = {0.0}, float tiny = {0.001}")))
    assert conversion.verify(Verification(modes=("fp32",)), worker=worker).ok
    *_, selection = (layer for layer in conversion.graph if layer.type == "DetectionOutput")
    selection.params["nms_threshold"] = 0.55
    report = conversion.verify(Verification(modes=("fp32",)), worker=worker)
    assert [row.name for row in report.outputs if row.status == "mismatch"] == ["y"]


@pytest.mark.parametrize("name", ["detect_nms.ts", "pose_nms.dyn"])
def test_both_exporters(name: str) -> None:
    """The candidates are no outputs of the net."""
    path = ROOT / "fixtures" / "heads" / f"{name}.onnx"
    conversion = lower(path)
    assert conversion.tail is None
    assert [port.name for port in conversion.outputs] == [value.name for value in onnx.load(path).graph.output]
    assert all(port.dtype == np.float32 for port in conversion.candidates)
    assert conversion.verify().ok


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("nms_scores = Unsqueeze(scores, ends)", "s = Mul(scores, half) nms_scores = Unsqueeze(s, ends)"),
        ("Slice(index, zero, most, zero)", "Slice(index, one, most, zero)"),  # not the best one
        ("y = Pad(rows, pads)", "y = Pad(rows, pads, half)"),
        ("missing = Sub(most, count)", "less = Sub(most, count) missing = Add(less, one)"),
        (
            "a = Reshape(row_scores, column)",
            "c = Shape(row_scores) n = Cast<to = 1>(c) s = Mul(row_scores, n) a = Reshape(s, column)",
        ),
        ("moved = Add(boxes, offset)", "top_box = ReduceMax(boxes, zero) moved = Add(boxes, top_box)"),
        ("moved = Add(boxes, offset)", "half_way = Add(boxes, offset) moved = CumSum(half_way, first)"),
        ("(nms_boxes, nms_scores, all, iou)", "<center_point_box = 1>(nms_boxes, nms_scores, all, iou)"),
        ("(nms_boxes, nms_scores, all, iou)", "(nms_boxes, nms_scores, two, iou)"),
        ("mask = Greater(score, conf)", "mask = GreaterOrEqual(score, conf)"),
        (
            "classes = GatherND(class, at)",
            "other = NonZero(class) at2 = Transpose(other) classes = GatherND(class, at2)",
        ),
        (f"most = {{{MOST}}}", f"most = {{{2**40}}}"),  # more than memory holds
        (f"float[1,6,{COUNT}] x", f"float[1,6,{2**30}] x"),
    ],
)
def test_other_rows_keep_their_tail(old: str, new: str) -> None:
    text = MODEL.replace(old, new).replace("float half", "int64 first = {0}, float half")
    assert old in MODEL
    try:
        conversion = lower(parsed(text, 18))
    except UnsupportedError:
        return
    assert conversion.tail is not None
    assert not conversion.candidates
