"""`--raw-head`: decoded like ncnn's examples do, it is the model's own output; scripts/clients runs the examples."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
import pytest
from numpy.typing import NDArray

from onnx2ncnn_opt import Net
from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.manifest import read_manifest
from onnx2ncnn_opt.onnx.edit.append import append_decoding
from testing.command import refused, run_well
from testing.exports import ROOT
from testing.models import parsed

HEADS = ROOT / "fixtures" / "heads"
CLASSES, HIGH, WIDE, STRIDES = 3, 64, 96, (16, 32)
EXTRAS = {"detect": 0, "segment": 8, "pose": 6, "obb": 1}
BOXES = """sides = Reshape(box, box_view) by_bin = Transpose<perm = [0, 2, 1, 3]>(sides)
    shares = Softmax<axis = 1>(by_bin) integral = Conv(shares, bins) distances = Reshape(integral, box_flat)
    low, high = Split<axis = 1>(distances, halves) from = Sub(centres, low) to = Add(centres, high)
    sum = Add(from, to) middle = Mul(sum, half) size = Sub(to, from) ends = Concat<axis = 1>(middle, size)
    boxes = Mul(ends, strides) scores = Sigmoid(class)"""
# How the columns behind the classes are computed.
DECODINGS = {
    "segment": "decoded = Concat<axis = -1>(extra0, extra1) output1 = Relu(images)",
    "pose": """points = Reshape(extra, point_view)
    xy = Slice(points, zero, two, two) twice = Mul(xy, double) moved = Add(twice, cells) places = Mul(moved, strides)
    z = Slice(points, two, three, two) seen = Sigmoid(z) joined = Concat<axis = 2>(places, seen)
    decoded = Reshape(joined, point_flat)""",
    "obb": "unit = Sigmoid(extra) turned = Sub(unit, quarter) decoded = Mul(turned, pi)",
}
Array = NDArray[Any]


def grid() -> tuple[Array, Array]:
    """Return the cells' x and y [2, boxes], and their strides [1, boxes]."""
    levels = [np.mgrid[: HIGH // s, : WIDE // s][::-1].reshape(2, -1) for s in STRIDES]
    sizes = [np.full((1, level.shape[1]), s) for level, s in zip(levels, STRIDES, strict=True)]
    return np.concatenate(levels, 1).astype(np.float32), np.concatenate(sizes, 1).astype(np.float32)


def yolo(task: str = "detect", *, is_old: bool = False, bins: int = 16, before: str = "", after: str = "") -> bytes:
    """Return a model with the head that ultralytics exports; old versions join boxes and classes in each level.

    A part of its text may be replaced.
    """
    rng, lines, weights = np.random.default_rng(0), list[str](), dict[str, Any]()
    groups = {"both": 4 * bins + CLASSES} if is_old else {"box": 4 * bins, "class": CLASSES}
    for name, width in {**groups, "extra": EXTRAS[task]}.items():
        if not width:
            continue
        weights[f"{name}_shape"] = np.array([1, width, -1])
        for i, s in enumerate(STRIDES):
            weights[f"{name}_w{i}"] = (rng.standard_normal((width, 3, s, s)) / s).astype(np.float32)
            lines.append(f"{name}_map{i} = Conv<strides = [{s}, {s}]>(images, {name}_w{i})")
            lines.append(f"{name}{i} = Reshape({name}_map{i}, {name}_shape)")
        lines.append(f"{name} = Concat<axis = 2>({name}0, {name}1)")
    lines += ["box, class = Split<axis = 1>(both, parts)"] if is_old else []
    lines += [BOXES, DECODINGS.get(task, ""), "first = Concat<axis = 1>(boxes, scores)"]
    lines += [f"output0 = {'Concat<axis = 1>(first, decoded)' if task in DECODINGS else 'Identity(first)'}"]
    cells, strides = grid()
    weights |= {
        "bins": np.arange(bins, dtype=np.float32).reshape(1, bins, 1, 1),
        "centres": cells + np.float32(0.5),
        "cells": cells,
        "strides": strides,
        "double": np.float32(2),
        "half": np.float32(0.5),
        "quarter": np.float32(0.25),
        "pi": np.float32(np.pi),
        "zero": [0],
        "two": [2],
        "three": [3],
        "halves": [2, 2],
        "parts": [4 * bins, CLASSES],
        "box_view": [1, 4, bins, -1],
        "box_flat": [1, 4, -1],
        "point_view": [1, 2, 3, -1],
        "point_flat": [1, 6, -1],
    }
    text = "\n".join(lines).replace("Identity(first)", "Concat<axis = 1>(boxes, scores)").replace(before, after)
    protos = ", float[1, 3, h, w] output1" if task == "segment" else ""
    model = parsed(f"(float[1, 3, {HIGH}, {WIDE}] images) => (float[1, c, n] output0{protos}) {{ {text} }}", **weights)
    return bytes(model.SerializeToString())


def run(model: bytes | Path) -> list[Array]:
    image = np.random.default_rng(1).random((1, 3, HIGH, WIDE), np.float32)
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    results: list[Array] = session.run(None, {"images": image})
    return results


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def decoded(task: str, raw: Array, extras: Array | None) -> Array:
    """Return the rows that ncnn's examples compute: centre, size, scores, and the numbers behind them."""
    cells, strides = (values.T for values in grid())
    shares = np.exp(raw[:, :64].reshape(-1, 4, 16))
    distances = (shares / shares.sum(2, keepdims=True)) @ np.arange(16)
    low, high = cells + 0.5 - distances[:, :2], cells + 0.5 + distances[:, 2:]
    parts = [(low + high) / 2 * strides, (high - low) * strides, sigmoid(raw[:, 64:])]
    if extras is not None and task == "pose":
        points = extras.reshape(len(raw), -1, 3)
        places = (cells[:, None] + points[..., :2] * 2) * strides[:, None]
        extras = np.concatenate((places, sigmoid(points[..., 2:])), 2).reshape(len(raw), -1)
    elif extras is not None and task == "obb":
        extras = (sigmoid(extras) - 0.25) * np.pi
    return np.concatenate([*parts, *([] if extras is None else [extras])], 1)


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("task", EXTRAS)
def test_it_is_what_the_examples_decode(task: str, is_old: bool) -> None:
    model = yolo(task, is_old=is_old)
    [expected, *others] = run(model)
    made = append_decoding(model, "raw-head")
    assert "raw has a row for each box: 64 numbers of its sides, and logits of its classes" in made.note
    [raw, *rest] = run(made.model)
    assert raw.shape == (1, 30, 64 + CLASSES)
    extras = rest.pop(0)[0] if EXTRAS[task] else None
    np.testing.assert_allclose(decoded(task, raw[0], extras), expected[0].T, rtol=1e-4, atol=1e-4)
    assert [array.shape for array in rest] == [array.shape for array in others]
    assert "bins" not in {weight.name for weight in onnx.ModelProto.FromString(made.model).graph.initializer}


@pytest.mark.parametrize("exporter", ["ts", "dyn"])
def test_levels_of_anchors(exporter: str) -> None:
    for suffix in ("", "-nhw"):
        made = append_decoding(HEADS / f"yolov5{suffix}.{exporter}.onnx", "raw-head")
        outputs = onnx.ModelProto.FromString(made.model).graph.output
        assert [value.type.tensor_type.shape.dim[1].dim_value for value in outputs] == [30, 30]
        assert "2 levels before their decoding; the program has to know the anchors" in made.note


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (yolo(bins=8), "0 nodes compute boxes from 16 bins, not one; ncnn's examples read"),
        (yolo(before="Softmax<axis = 1>", after="Softmax<axis = 2>"), "0 nodes compute boxes"),
        (
            yolo(before="Sigmoid(class)", after="Tanh(class)"),
            "no output joins boxes with the sigmoid of classes; export",
        ),
        (yolo("pose", before="Sigmoid(z)", after="Relu(z)"), "is no mask coefficients"),
        (
            yolo("obb", before="Sigmoid(extra)", after="Tanh(extra)"),
            "is no mask coefficients",
        ),
        (HEADS / "yolo26.ts.onnx", "0 nodes compute boxes"),
        (HEADS / "yolox.dyn.onnx", "0 nodes compute boxes"),
    ],
)
def test_other_heads_are_refused(model: bytes | Path, reason: str) -> None:
    with pytest.raises(UsageError, match=f"^raw head: .*{reason}"):
        append_decoding(model, "raw-head")


def test_the_net_has_the_names_of_the_examples(tmp_path: Path) -> None:
    (tmp_path / "yolo.onnx").write_bytes(yolo("segment"))
    run_well(tmp_path, "convert", "yolo.onnx", "--raw-head", "--effort", "quick")
    manifest = read_manifest(tmp_path / "yolo.ncnn.json")
    assert [entry.blob for entry in (*manifest.inputs, *manifest.outputs)] == ["in0", "out0", "out1", "out2"]
    assert [entry.name for entry in manifest.outputs] == ["raw", "extras", "output1"]
    run_well(tmp_path, "verify", "yolo.onnx", "yolo.ncnn.param", "yolo.ncnn.bin")
    with Net(tmp_path / "yolo") as net:
        assert net.run({"images": np.zeros((1, 3, HIGH, WIDE), np.float32)})["raw"].shape == (1, 30, 67)
    said = refused(tmp_path, "convert", "yolo.onnx", "--raw-head", "--last-row", "output0")
    assert "--append, --last-row, --noise-inputs and --raw-head change the model: give one of them" in said
