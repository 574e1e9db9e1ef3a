"""`--append`: the decoding of raw heads in ONNX Runtime equals one written with NumPy."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
import pytest
from numpy.typing import NDArray
from onnx import helper

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import ModelError, UnsupportedError, UsageError
from onnx2ncnn_opt.manifest import LayerCount, Manifest, Source
from onnx2ncnn_opt.onnx.edit.append import append_decoding, converted_model
from onnx2ncnn_opt.runtime.ort import OrtRunner
from testing.exports import ROOT
from testing.models import parsed

HEADS = ROOT / "fixtures" / "heads"
Array = NDArray[Any]


def raw(*shape: int | str, opset: int = 17, **metadata: str) -> onnx.ModelProto:
    """A model whose output is its input."""
    sizes = ", ".join(map(str, shape))
    model = parsed(f"(float[{sizes}] x) => (float[{sizes}] y) {{ y = Identity(x) }}", opset)
    helper.set_model_props(model, metadata)
    return model


def run(model: bytes, feeds: dict[str, Array]) -> Array:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    found: Array = session.run(["detections"], feeds)[0]
    return found


def drawn(images: int, boxes: int, columns: int, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    rows = rng.random((images, boxes, columns), np.float32)
    rows[..., :2] *= 60
    rows[..., 2:4] = rows[..., 2:4] * 30 + 2
    return rows


def decoded(
    rows: Array, classes: int, objectness: bool, conf: float = 0.25, iou: float = 0.45, most: int = 300
) -> list[Array]:
    """Return the detections of each image, greedily and box by box."""
    results = []
    for image in rows:
        scores = image[:, 4 + objectness :][:, :classes] * (image[:, 4:5] if objectness else np.float32(1))
        low, high = image[:, :2] - image[:, 2:4] * np.float32(0.5), image[:, :2] + image[:, 2:4] * np.float32(0.5)
        table = np.concatenate((low, high, scores.max(1)[:, None], scores.argmax(1)[:, None]), 1)
        table = np.concatenate((table, image[:, 4 + objectness + classes :]), 1)
        kept: list[Array] = []
        for row in table[np.argsort(-table[:, 4], kind="stable")]:
            if row[4] > conf and not any(other[5] == row[5] and overlap(other, row) > iou for other in kept):
                kept.append(row)
        results.append(np.array(kept[:most], np.float32).reshape(-1, table.shape[1]))
    return results


def overlap(a: Array, b: Array) -> float:
    sides = np.minimum(a[2:4], b[2:4]) - np.maximum(a[:2], b[:2])
    shared = sides.clip(0).prod()
    return float(shared / ((a[2:4] - a[:2]).prod() + (b[2:4] - b[:2]).prod() - shared))


@pytest.mark.parametrize("opset", [11, 17, 20])
@pytest.mark.parametrize(
    ("columns", "classes", "options", "metadata"),
    [
        (84, 80, "", {}),
        (9, 5, ":classes=5", {}),
        (9, 5, ":conf=0.9:iou=0.2:max=7", {"names": "{0: 'a', 1: 'b', 2: 'c', 3: 'd', 4: 'e'}"}),
        (56, 1, ":classes=1:max=12", {}),  # keypoints
        (15, 3, "", {"names": "['a', 'b', 'c']", "task": "segment"}),
        (9, 5, ":classes=5:conf=1", {}),  # nothing is found
    ],
)
def test_columns(columns: int, classes: int, options: str, metadata: dict[str, str], opset: int) -> None:
    rows = drawn(1, 250, columns)
    made = append_decoding(raw(1, columns, 250, opset=opset, **metadata), f"nms:y{options}")
    [expected] = decoded(rows, classes, False, **limits(options))
    assert len(expected) > 5 or "conf=1" in options
    np.testing.assert_allclose(run(made.model, {"x": rows.transpose(0, 2, 1)}), expected, rtol=1e-6)
    assert f"{columns} columns: 4 of a box (cxcywh), {classes} classes" in made.note


@pytest.mark.parametrize(
    ("columns", "classes", "objectness", "options"),
    [
        (85, 80, True, ""),
        (84, 80, False, ""),
        (10, 5, True, ":classes=5"),
        (9, 5, False, ":classes=5"),
        (13, 5, True, ":classes=5:objectness=yes:conf=0.5"),
        (13, 5, False, ":classes=5:objectness=no:conf=0.5"),
    ],
)
def test_rows(columns: int, classes: int, objectness: bool, options: str) -> None:
    rows = drawn(1, 200, columns)
    made = append_decoding(raw(1, 200, columns), f"nms:y{options}")
    [expected] = decoded(rows, classes, objectness, **limits(options))
    assert len(expected) > 5
    np.testing.assert_allclose(run(made.model, {"x": rows}), expected, rtol=1e-6)


def limits(options: str) -> dict[str, Any]:
    texts = dict(part.split("=") for part in options.split(":") if part)
    kinds = {"conf": ("conf", float), "iou": ("iou", float), "max": ("most", int)}
    return {name: kind(texts[key]) for key, (name, kind) in kinds.items() if key in texts}


def test_corners_and_a_layout_that_sizes_do_not_tell() -> None:
    rows = drawn(1, 12, 9)
    corners = np.concatenate((rows[..., :2] - rows[..., 2:4] / 2, rows[..., :2] + rows[..., 2:4] / 2, rows[..., 4:]), 2)
    made = append_decoding(raw(1, 12, 9), "nms:y:boxes=xyxy:classes=5:layout=rows")
    np.testing.assert_allclose(run(made.model, {"x": corners}), decoded(rows, 5, False)[0], rtol=1e-5, atol=1e-5)


def test_a_batch_has_a_column_and_a_limit_for_each_image() -> None:
    rows = drawn(3, 90, 9)
    rows[1, :, 4:] = 0  # nothing on this picture
    made = append_decoding(raw("n", "boxes", 9), "nms:y:classes=5:max=10")
    expected = [np.insert(each, 0, i, 1) for i, each in enumerate(decoded(rows, 5, False, most=10))]
    assert [len(each) for each in expected] == [10, 0, 10]
    np.testing.assert_allclose(run(made.model, {"x": rows}), np.concatenate(expected), rtol=1e-6)
    single = append_decoding(raw("n", "boxes", 9), "nms:y:classes=5:max=10", {"x": (1, "boxes", 9)})
    np.testing.assert_allclose(run(single.model, {"x": rows[:1]}), expected[0][:, 1:], rtol=1e-6)


def test_fewer_boxes_than_the_limit_and_fp16() -> None:
    rows = drawn(1, 20, 9).astype(np.float16)
    model = parsed("(float16[1, n, 9] x) => (float16[1, n, 9] y) { y = Identity(x) }", 17)
    found = run(append_decoding(model, "nms:y:classes=5").model, {"x": rows})
    np.testing.assert_allclose(found, decoded(rows.astype(np.float32), 5, False)[0], rtol=1e-6)


@pytest.mark.parametrize("exporter", ["ts", "dyn"])
@pytest.mark.parametrize(
    ("name", "objectness"), [("yolov5", True), ("yolov8", False), ("yolo11", False), ("yolox", True)]
)
def test_exported_heads(name: str, objectness: bool, exporter: str) -> None:
    for suffix, size in (("", 1), ("-nhw", 2)):
        path = HEADS / f"{name}{suffix}.{exporter}.onnx"
        images = np.random.default_rng(0).standard_normal((size, 3, 64, 64)).astype(np.float32)
        [rows] = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"images": images})
        rows = rows if name in ("yolov5", "yolox") else rows.transpose(0, 2, 1)
        found = run(append_decoding(path, "nms:output0:classes=5:conf=0.1").model, {"images": images})
        expected = decoded(rows, 5, objectness, conf=0.1)
        if suffix:
            expected = [np.insert(each, 0, i, 1) for i, each in enumerate(expected)]
        assert len(found) > 10
        np.testing.assert_allclose(found, np.concatenate(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("boxes", "scores", "options", "extra"),
    [
        ([1, 90, 4], [1, 90, 5], "", 0),
        ([1, 90, 4], [1, 5, 90], "", 0),
        ([90, 4], [90, 6], ":background=yes", 1),
        ([1, 90, 4], [1, 90, 6], ":objectness=yes", 1),
    ],
)
def test_boxes_and_scores(boxes: list[int], scores: list[int], options: str, extra: int) -> None:
    text = (
        f"(float{boxes} b, float{scores} s) => (float[n] z) {{ boxes = Abs(b) scores = Abs(s) k = NonZero(scores)"
        " z = Cast<to = 1>(k) }"
    )
    model, append = parsed(text, 17), f"nms:boxes,scores{options}"
    rows = drawn(1, 90, 9 + extra)
    feeds = {"b": rows[..., :4], "s": rows[..., 4:] if 90 in scores[:2] else rows[..., 4:].transpose(0, 2, 1)}
    feeds = {name: np.ascontiguousarray(x.reshape(boxes if name == "b" else scores)) for name, x in feeds.items()}
    made = append_decoding(model, append)
    rows = np.delete(rows, 4, 2) if "background" in options else rows
    [expected] = decoded(rows, 5, "objectness" in options)
    assert len(expected) > 5
    np.testing.assert_allclose(run(made.model, feeds), expected, rtol=1e-6)
    conversion = lower(model, append=append)
    assert conversion.tail is None
    assert [entry.name for entry in conversion.manifest().outputs] == ["detections"]
    assert conversion.verify().ok


def test_other_outputs_and_names_stay() -> None:
    text = "(float[1, 9, 40] detections) => (float[1, 9, 40] y, float[1, 9, 40] z) { y = Abs(detections) z = Neg(y) }"
    proto = onnx.load_from_string(append_decoding(parsed(text, 17), "nms:y:classes=5").model)
    assert [value.name for value in proto.graph.output] == ["detections_1", "z"]
    onnx.checker.check_model(proto, full_check=True)


@pytest.mark.parametrize(
    ("model", "text", "said"),
    [
        (raw(1, 84, 99), "soft:y", "append takes nms:OUTPUT"),
        (raw(1, 84, 99), "nms:y:conf=1.5", "'conf=1.5' in 'nms:y:conf=1.5' does not fit"),
        (raw(1, 84, 99), "nms:y:max=1:max=2", "each option once"),
        (raw(1, 84, 99), "nms:z", "the model has no value called z"),
        (raw(1, 84, 999), "nms:x,y", r"'y' is \[1, 84, 999\]: its boxes are \[1, 84, 999\]"),
        (raw(1, 84, 99, opset=10), "nms:y", "opset 10; export it with opset 11"),
        (raw(1, 84, 99, 2), "nms:y", r"'y' is \[1, 84, 99, 2\]: .* three axes"),
        (raw(1, 84, 99), "nms:y", "layout=rows"),
        (raw(1, "h", "w"), "nms:y", "number of columns is not known"),
        (raw(1, "h", "w"), "nms:y:layout=rows", "number of columns is not known"),
        (raw(1, 56, 999), "nms:y", "say how many with classes=N"),
        (raw(1, 999, 57), "nms:y:classes=1", "52 columns are neither box nor class; .* objectness=yes"),
        (raw(1, 85, 999), "nms:y", "1 columns are neither box nor class"),
        (raw(1, 84, 999), "nms:y:classes=90", "more columns"),
        (raw(1, 84, 999), "nms:y:objectness=yes", "more columns"),
        (raw(1, 20, 999, task="obb"), "nms:y", "rotated boxes"),
        (raw(1, 84, 99), "last-row:z", "the model has no value called z"),
        (raw(84), "last-row:y", "'y' has 1 axes, and rows need two"),
    ],
)
def test_refusals(model: onnx.ModelProto, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        append_decoding(model, text)


@pytest.mark.parametrize("text", ["nms:y", "last-row:y", "noise-inputs"])
def test_a_file_that_is_no_model(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"\xff" * 64)
    with pytest.raises(ModelError, match="not an ONNX model"):
        append_decoding(tmp_path / "model.onnx", text)


def test_the_manifest_has_the_option_append(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(raw("n", 84, 999), path)
    source = Source(None, 17, "nms:y")
    manifest = Manifest((), (), source, "", "20260101", LayerCount(1, 1), ())
    assert '"append": "nms:y"' in manifest.to_json()
    assert converted_model(path, manifest) == append_decoding(path, "nms:y").model
    assert converted_model(path, None) == path


def test_the_last_row_of_an_output_that_others_read() -> None:
    text = "(float[1,n,4] x) => (float[1,n,4] y, float[1,n,4] z) { y = Relu(x) z = Neg(y) }"
    made = append_decoding(parsed(text, 17), "last-row:y")
    onnx.checker.check_model(onnx.load_from_string(made.model), full_check=True)
    x = np.random.default_rng(0).standard_normal((1, 3, 4), np.float32)
    found = OrtRunner(made.model).run({"x": x})
    np.testing.assert_array_equal(found["y"], np.maximum(x, 0)[:, -1:])
    np.testing.assert_array_equal(found["z"], -np.maximum(x, 0))


def test_noise_is_an_input() -> None:
    text = (
        "(float[n,4] x) => (float[n,4] y) { a = RandomNormalLike<mean = 2.0>(x) b = RandomUniform<shape = [4]>()"
        " c = Mul(a, x) y = Sub(c, b) }"
    )
    made = append_decoding(parsed(text, 17), "noise-inputs")
    assert made.note == "random numbers are inputs: 'a' (normal, mean 2, deviation 1), 'b' (uniform, 0 to 1)"
    conversion = lower(parsed(text, 17), append="noise-inputs")
    assert [(entry.name, entry.shape) for entry in conversion.manifest().inputs] == [
        ("x", ("n", 4)),
        ("a", ("n", 4)),
        ("b", (4,)),
    ]
    assert conversion.verify().ok
    assert converted_model(parsed(text, 17), conversion.manifest()) == made.model
    fixed = lower(parsed(text, 17), append="noise-inputs", shapes={"a": (3, 4)})
    assert fixed.manifest().inputs[1].shape == (3, 4)
    with pytest.raises(UsageError, match="no node of the model draws random numbers"):
        append_decoding(parsed("(float[4] x) => (float[4] y) { y = Relu(x) }", 17), "noise-inputs")


def test_lowering_sees_the_nodes() -> None:
    with pytest.raises(UnsupportedError, match="NonMaxSuppression"):
        lower(HEADS / "yolov8-nhw.ts.onnx", append="nms:output0:classes=5", tail="never")
