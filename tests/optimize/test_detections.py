"""Nets that choose boxes: how many there are, and in which order, hangs on the last bits of scores."""

from pathlib import Path

import numpy as np
import pytest

from onnx2ncnn_opt.ir.detections import after_boxes, before_boxes
from onnx2ncnn_opt.param.files import NetFiles, read_graph, write_net
from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from onnx2ncnn_opt.verification.options import Verification
from onnx2ncnn_opt.verification.pair import NO_BOXES
from testing.command import run
from testing.optimized import apply_passes
from testing.param_text import net as graph_of
from testing.pass_cases import fill_weights

# A convolution whose normalisation folds into it, so that the last bits of the scores change.
TRUNK = (
    "Input x 0 1 x 0=22 1=22 2=8",
    "Convolution trunk 1 1 x c 0=8 1=3 4=1 5=1 6=576",
    "BatchNorm norm 1 1 c t 0=8",
)
HEADS = {
    "Yolov3DetectionOutput": (
        "Convolution head 1 1 t h 0=75 1=1 5=1 6=600",
        "Yolov3DetectionOutput d 1 1 h y 0=20 1=3 2=THRESHOLD 3=0.45 -23304=6,20.,37.,49.,94.,73.,201. "
        "-23305=3,0,1065353216,1073741824 -23306=1,32.",
    ),
    "YoloDetectionOutput": (
        "Convolution head 1 1 t h 0=125 1=1 5=1 6=1000",
        "YoloDetectionOutput d 1 1 h y 0=20 1=5 2=THRESHOLD 3=0.45 "
        "-23304=10,1.08,1.19,3.42,4.41,6.63,11.38,9.42,5.11,16.62,10.52",
    ),
    "DetectionOutput": (
        "Convolution location 1 1 t l 0=8 1=1 5=1 6=64",
        "Permute lp 1 1 l lq 0=3",
        "Flatten lf 1 1 lq lr",
        "Convolution head 1 1 t h 0=42 1=1 5=1 6=336",
        "Permute hp 1 1 h hq 0=3",
        "Reshape hr 1 1 hq hs 0=21 1=-1",
        "Softmax soft 1 1 hs ht 0=1 1=1",
        "Flatten hf 1 1 ht hu",
        "PriorBox prior 2 1 t x p -23300=1,60. -23301=1,120. 9=-233 10=-233 13=0.5",
        "DetectionOutput d 3 1 lr hu p y 0=21 1=0.45 2=400 3=200 4=THRESHOLD",
    ),
    "Proposal": (
        "Input info 0 1 info 0=3",
        "Convolution head 1 1 t h 0=18 1=1 5=1 6=144",
        "Reshape hr 1 1 h hs 0=22 1=-1 2=2",
        "Softmax soft 1 1 hs ht 0=0 1=1",
        "Reshape hu 1 1 ht hv 0=22 1=22 2=18",
        "Convolution location 1 1 t l 0=36 1=1 5=1 6=288",
        "Proposal d 3 1 hv l info r 0=16 1=16 2=600 3=30 4=0.7 5=16",
        "Split rs 1 2 r r0 y",
        "ROIPooling pool 2 1 t r0 pooled 0=3 1=3 2=0.0625",
        "InnerProduct last 1 1 pooled z 0=5 1=1 2=360",
    ),
}
SCALES = {"trunk": 0.125, "location": 0.5}  # of weights


def net(folder: Path, kind: str, threshold: float = 0.3) -> NetFiles:
    graph = graph_of(*(line.replace("THRESHOLD", f"{threshold:g}") for line in (*TRUNK, *HEADS[kind])))
    fill_weights(graph)
    for layer in graph:
        if layer.name in SCALES:
            layer.weights["weight_data"] = layer.weights["weight_data"] * np.float32(SCALES[layer.name])
    files = NetFiles(folder / "net.param", folder / "net.bin")
    write_net(graph, files.param, files.bin)
    return files


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", list(HEADS))
def test_boxes_are_those_of_the_same_scores(kind: str, mode: str, tmp_path: Path, worker: NcnnWorker) -> None:
    files = net(tmp_path, kind)
    result = apply_passes(files.param, files.bin)
    assert "BatchNorm" not in {layer.type for layer in result.graph}
    report = result.verify(worker=worker, verification=Verification(modes=[mode]))
    assert {row.status for row in report.outputs} == {"ok"}
    assert all(not row.message or row.message.endswith(NO_BOXES) for row in report.outputs)  # flat inputs may have none
    assert {row.name for row in report.outputs} == {blob.name for blob in result.graph.outputs}
    assert all(row.max_abs is not None and row.max_abs > 0 for row in report.outputs)
    assert {row.rule for row in report.outputs} == {"limit"}  # also if some inputs have no boxes
    precision = result.estimated().precision
    assert precision is not None
    assert precision.error < 1


@pytest.mark.parametrize("kind", ["Yolov3DetectionOutput", "DetectionOutput"])  # others give something else
def test_no_boxes_are_agreement(kind: str, tmp_path: Path, worker: NcnnWorker) -> None:
    files = net(tmp_path, kind, threshold=1.5)
    report = apply_passes(files.param, files.bin).verify(worker=worker)
    [row] = report.outputs
    assert row.status == "ok"
    assert row.message.endswith(NO_BOXES)
    assert row.max_abs is not None


@pytest.mark.parametrize("binary", [False, True])
def test_the_command_notes_that_there_are_no_boxes(binary: bool, tmp_path: Path) -> None:
    files = net(tmp_path, "DetectionOutput", threshold=1.5)
    ended = run(tmp_path, "optimize", files.param, files.bin, "-o", "out", "--binary" if binary else "--text")
    assert ended.code == 0
    assert NO_BOXES in ended.out


@pytest.mark.parametrize("kind", list(HEADS))
def test_other_scores_are_found(kind: str, tmp_path: Path, worker: NcnnWorker) -> None:
    files = net(tmp_path, kind)
    result = apply_passes(files.param, files.bin)
    for layer in result.graph:
        if layer.name == "head":
            layer.weights["weight_data"] = layer.weights["weight_data"] * np.float32(1.1)
    statuses = {row.name: row.status for row in result.verify(worker=worker).outputs}
    assert statuses["y"] == "mismatch"


def test_other_boxes_of_the_same_scores_are_found(tmp_path: Path, worker: NcnnWorker) -> None:
    for threshold in (0.9, 1.5):
        files = net(tmp_path, "Yolov3DetectionOutput")
        result = apply_passes(files.param, files.bin)
        (detector,) = (layer for layer in result.graph if layer.name == "d")
        detector.params["confidence_threshold"] = threshold
        [row] = result.verify(worker=worker).outputs
        assert row.status in ("shape", "missing")


def test_layers_that_depend_on_boxes(tmp_path: Path) -> None:
    graph = read_graph(net(tmp_path, "Proposal").param)
    assert [blob.name for blob in before_boxes(graph)] == ["hv", "l"]
    assert {blob.name for blob in after_boxes(graph)} == {"y", "pooled", "z"}
