"""Boxes that a net selects itself, by DetectionOutput: any program reads them, and planted faults are found."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
import pytest

from onnx2ncnn_opt.api.lower import Conversion, lower
from onnx2ncnn_opt.api.verify import verify
from onnx2ncnn_opt.ir.graph import Graph, Layer
from onnx2ncnn_opt.onnx.edit.append import append_decoding
from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from onnx2ncnn_opt.runtime.net import Net
from onnx2ncnn_opt.verdict.rows import judge_selection, wrong_selection
from onnx2ncnn_opt.verification.options import Verification
from testing.compared import types
from testing.exports import ROOT
from testing.models import parsed

HEADS = ROOT / "fixtures" / "heads"
NMS = "nms:output0:classes=5:conf=0.1"
# A program that knows nothing but ncnn: without boxes, the code is -100, and the Mat is empty.
PROGRAM = """
import sys, ncnn, numpy as np
net = ncnn.Net()
assert net.load_param(sys.argv[1] + ".ncnn.param") == 0 and net.load_model(sys.argv[1] + ".ncnn.bin") == 0
[name] = net.output_names()
extractor = net.create_extractor()
[array] = np.load(sys.argv[2])
extractor.input(net.input_names()[0], ncnn.Mat(array).clone())
code, mat = extractor.extract(name)
assert code == (0 if mat.dims else -100)
np.save(sys.argv[3], np.array(mat) if mat.dims else np.zeros((0, 6), np.float32))
"""


def net(head: str = "yolov8.ts", append: str = NMS, **options: Any) -> Conversion:
    conversion = lower(HEADS / f"{head}.onnx", append=append, **options)
    assert conversion.tail is None
    assert types(conversion)[-2:] == ["DetectionOutput", "Gemm"]
    return conversion


def images(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((1, 3, 64, 64)).astype(np.float32)


def of_onnx_runtime(head: str, append: str, array: np.ndarray) -> np.ndarray:
    model = append_decoding(HEADS / f"{head}.onnx", append).model
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    rows: np.ndarray = session.run(["detections"], {"images": array})[0]
    return rows


@pytest.mark.parametrize(
    ("head", "append"),
    [
        ("yolo11.dyn", f"{NMS}:iou=0.2:max=7"),
        ("yolox.ts", NMS),
        ("yolov8.ts", "nms:output0:classes=5:conf=1"),  # finds nothing
    ],
)
def test_a_program_that_knows_nothing_but_ncnn(head: str, append: str, tmp_path: Path) -> None:
    net(head, append).save(tmp_path / "net")
    assert not (tmp_path / "net.ncnn.tail.onnx").exists()
    np.save(tmp_path / "x.npy", images())
    files = (str(tmp_path / name) for name in ("net", "x.npy", "rows.npy"))
    subprocess.run([sys.executable, "-c", PROGRAM, *files], check=True)
    rows, expected = np.load(tmp_path / "rows.npy"), of_onnx_runtime(head, append, images())
    assert len(expected) > 6 or append.endswith("=1")
    np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-4)
    for isolated in (True, False):
        with Net(tmp_path / "net", isolated=isolated) as loaded:
            assert str(loaded.outputs[0]) == "detections: float32[?, 6]"
            np.testing.assert_array_equal(loaded.run({"images": images()})["detections"], rows)


def test_verification(device: NcnnWorker) -> None:
    rows = net().verify(Verification(modes=("fp32", "fp16")), worker=device).outputs
    names = ("detections/corners", "detections/scores", "detections")
    assert sorted((row.name, row.status) for row in rows) == sorted((name, "ok") for name in names * 2)


def test_dynamic_sizes_and_saved_nets(tmp_path: Path) -> None:
    conversion = net("yolo11-nhw.dyn", shapes={"images": (1, 3, "h", "w")})
    conversion.save(tmp_path / "net")
    report = verify(HEADS / "yolo11-nhw.dyn.onnx", tmp_path / "net.ncnn.param")
    assert report.ok
    assert len(report.sizes) > 1


@pytest.mark.parametrize(
    ("head", "append"),
    [("yolov8-nhw.ts", NMS), ("yolov8.ts", "nms:output0:classes=3")],  # a batch, and columns behind the classes
)
def test_other_decodings_keep_the_tail(head: str, append: str) -> None:
    conversion = lower(HEADS / f"{head}.onnx", append=append)
    assert conversion.tail is not None
    assert "NonMaxSuppression" in conversion.tail.operators
    assert conversion.verify().ok


def test_a_model_that_needs_a_tail_anyway() -> None:
    text = "(float[1, 9, 40] x) => (float[1, 9, 40] y, int64[3, n] z) { y = Sigmoid(x) z = NonZero(y) }"
    conversion = lower(parsed(text, 17), append="nms:y:classes=5")
    assert conversion.tail is not None
    assert {"NonMaxSuppression", "NonZero"} <= set(conversion.tail.operators)


def detector(graph: Graph) -> Layer:
    return next(layer for layer in graph if layer.type == "DetectionOutput")


def threshold(name: str, number: float) -> Callable[[Graph], None]:
    def change(graph: Graph) -> None:
        detector(graph).params[name] = number

    return change


def wrong_box(graph: Graph) -> None:
    """Move all boxes to the right by a hundredth of a pixel."""
    gemm = detector(graph).output.users[0]
    gemm.weights["C_data"] = np.array([0.01, 0, 0.01, 0, 0, -1], np.float32)


def wrong_class(graph: Graph) -> None:
    """Leave classes as ncnn counts them, from 1."""
    detector(graph).output.users[0].weights["C_data"] = np.zeros(6, np.float32)


def every_class(graph: Graph) -> None:
    """Let a box compete in all its classes: rows come twice."""
    mask = next(layer for layer in graph if layer.type == "Threshold" and layer["threshold"] < 0)
    mask.params["threshold"] = -1e9


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (wrong_box, "no candidate is"),
        (wrong_class, "no candidate is"),
        (every_class, "no candidate is"),
        (threshold("nms_threshold", 0.5), "overlap"),
        (threshold("nms_threshold", 0.4), "is missing, which no better one overlaps"),
        (threshold("confidence_threshold", 0.55), "is missing"),
        (threshold("confidence_threshold", 0.45), "no candidate is"),
        (threshold("keep_top_k", 3), "is missing"),
        (threshold("nms_top_k", 3), "is missing"),
    ],
)
def test_planted_faults(fault: Callable[[Graph], None], message: str, worker: NcnnWorker) -> None:
    conversion = net(append="nms:output0:classes=5:conf=0.5")
    fault(conversion.graph)
    report = conversion.verify(Verification(modes=("fp32", "fp16")), worker=worker)
    rows = [row for row in report.outputs if row.name == "detections"]
    assert [row.status for row in rows] == ["mismatch"] * 2
    assert all(message in row.message for row in rows)


def test_any_row_counts() -> None:
    rng = np.random.default_rng(0)
    low = rng.random((300, 2)) * 500
    boxes = np.concatenate([low, low + 20 + rng.random((300, 2)) * 100], 1).astype(np.float32)
    scores = np.zeros((3, 300), np.float32)
    scores[rng.integers(0, 3, 300), np.arange(300)] = rng.random(300)
    limits = 300, 0.45, 0.25
    model = parsed(
        "(float[1,300,4] b, float[1,3,300] s) => (int64[n,3] y) "
        "<int64[1] k = {300}, float[1] t = {0.45}, float[1] c = {0.25}> { y = NonMaxSuppression(b, s, k, t, c) }",
        17,
    )
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    _, labels, places = session.run(None, {"b": boxes[None], "s": scores[None]})[0].T
    rows = np.concatenate([boxes[places], scores[labels, places][:, None], labels[:, None]], 1).astype(np.float32)
    rows = rows[np.argsort(-rows[:, 4], kind="stable")]
    assert wrong_selection(rows, boxes, scores, *limits) == ""
    assert wrong_selection(rows[:20], boxes, scores, 20, *limits[1:]) == ""
    for i in range(0, len(rows), 7):
        assert "is missing" in wrong_selection(np.delete(rows, i, 0), boxes, scores, *limits)
        assert "no candidate" in wrong_selection(np.insert(rows, i, rows[i], 0), boxes, scores, *limits)
    assert "in order" in wrong_selection(rows[::-1], boxes, scores, *limits)
    assert "no candidate" in wrong_selection(rows + np.array([0, 0, 0, 0, 0, 7], np.float32), boxes, scores, *limits)
    assert judge_selection(rows[:20], boxes, scores, *limits)[0] == "mismatch"
    assert judge_selection(rows[:20], boxes * np.float32(1e17), scores, *limits)[0] == "unproven"


def test_rows_of_a_table_that_are_no_selection() -> None:
    """Rows stand for their candidates; rows of zeros follow."""
    rng = np.random.default_rng(0)
    middle, size, table = rng.random((50, 2)) * 60, rng.random((50, 2)) * 30 + 5, rng.random((50, 7)) + 1
    boxes, scores, kept = np.concatenate([middle - size, middle + size], 1), rng.random((1, 50)), list[int]()
    for i in np.argsort(-scores[0]):
        sides = np.minimum(boxes[i, 2:], boxes[kept, 2:]) - np.maximum(boxes[i, :2], boxes[kept, :2])
        shared, areas = sides.clip(0).prod(1), (2 * size[i]).prod() + (2 * size[kept]).prod(1)
        if scores[0, i] > 0.2 and not (shared / (areas - shared) > 0.4).any():
            kept.append(int(i))
    rows = np.concatenate([table[kept], np.zeros((4, 7))])
    limits = scores, len(rows), 0.4, 0.2, table
    assert judge_selection(rows[None], boxes, *limits) == ("ok", "")
    assert judge_selection(rows[None], boxes[:, [2, 3, 0, 1]], *limits) == ("ok", "")  # corners in any order
    for wrong, reason in (
        (np.delete(rows, 1, 0), "is missing"),
        (np.insert(rows, 1, rows[0], 0), "no candidate"),
        (rows[[1, 0, *range(2, len(rows))]], "in order"),
        (np.insert(rows, 1, 0, 0), "no candidate"),
    ):
        assert reason in judge_selection(wrong, boxes, *limits)[1]
