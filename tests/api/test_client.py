"""`--client ultralytics`: the folder that YOLO(...) loads; scripts/clients/ultralytics.py tries it in the package."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnx2ncnn_opt import Net, convert
from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.api.options import ConvertOptions
from onnx2ncnn_opt.api.quantize import quantize
from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.verification.options import Verification
from testing.command import refused, run, run_well
from testing.models import parsed, write_model

RAW = """(float[1, 3, 32, 64] images) => (float[1, 2, 32, 64] output0, float[1, 3, 32, 64] output1)
<float[2, 3, 1, 1] weight = {0.1, 0.2, 0.3, -0.1, -0.2, -0.3}> {
    output1 = Sigmoid(images)
    output0 = Conv(images, weight)
}"""
FREE = RAW.replace("[1, 3, 32, 64]", "[batch, 3, height, width]").replace("1, 2, 32, 64", "batch, 2, height, width")
SORTED = """(float[1, 3, 320, 320] images) => (float[1, 300] output0)
<float[1, 3, 1, 1] weight = {0.1, 0.2, 0.3}, int64[1] k = {300}> {
    scores = Conv(images, weight)
    positive = Relu(scores)
    flat = Flatten(positive)
    output0, places = TopK(flat, k)
}"""
# An end-to-end head with extras, as YOLO26-pose has it: its rows are cheapest with their first axis, of size 1.
END = """(float[1, 3, 32, 64] images) => (float[1, 9, 7] output0)
<float[6, 3, 1, 1] weight = {0.5, 0.1, -1, 2, 0.3, 0.7, 0.2, -0.4, 1, -0.8, 0.9, 0.6, 3, 0.1, 0.4, -0.2, 1.5, 0.8},
int64[3] shape = {1, 6, 1024}, int64[1] k = {9}, int64[1] zero = {0}, int64[1] two = {2},
int64[1] four = {4}, int64[1] six = {6}, int64[3] of_boxes = {1, 9, 4}, int64[3] of_extras = {1, 9, 2}> {
    maps = Conv<strides = [1, 2]>(images, weight) raw = Reshape(maps, shape) rows = Transpose<perm = [0, 2, 1]>(raw)
    boxes = Slice(rows, zero, four, two) extras = Slice(rows, four, six, two) best = ReduceMax(extras, two)
    flat = Flatten(best) scores, places = TopK(flat, k) index = Unsqueeze(places, two) score = Unsqueeze(scores, two)
    box_index = Expand(index, of_boxes) extra_index = Expand(index, of_extras)
    box = GatherElements<axis = 1>(boxes, box_index) extra = GatherElements<axis = 1>(extras, extra_index)
    output0 = Concat<axis = 2>(box, score, extra)
}"""
# As ultralytics 8.4 writes it; names may have any characters.
METADATA = {
    "description": 'Ultralytics "YOLO11n" model: ',
    "stride": "32",
    "task": "pose",
    "batch": "1",
    "imgsz": "[640, 640]",
    "names": """{0: "it's", 1: 'yes # "no"', 2: 'Zoë'}""",
    "args": "{'data': None, 'fraction': 1.0, 'dynamic': True, 'nms': None}",
    "end2end": "False",
    "kpt_shape": "[17, 3]",
}
YAML = """"description": "Ultralytics \\"YOLO11n\\" model: "
"stride": 32
"task": "pose"
"batch": 1
"imgsz": [{sides}]
"names": {{0: "it's", 1: "yes # \\"no\\"", 2: "Zoë"}}
"args": {{"data": null, "fraction": 1.0, "dynamic": {dynamic}, "nms": null}}
"end2end": false
"kpt_shape": [17, 3]
"""
FILES = ["metadata.yaml", "model.ncnn.bin", "model.ncnn.json", "model.ncnn.param"]


def with_metadata(graph: str, **changes: str | None) -> onnx.ModelProto:
    """Return the model of a graph with METADATA, some entries changed or, if None, left out."""
    model = parsed(graph)
    entries = {key: value for key, value in {**METADATA, **changes}.items() if value is not None}
    onnx.helper.set_model_props(model, entries)
    return model


def metadata(folder: Path, graph: str = RAW, changes: dict[str, str | None] | None = None, **options: Any) -> str:
    """Return the text of metadata.yaml."""
    lower(with_metadata(graph, **(changes or {})), client="ultralytics", **options).save(folder / "model")
    return (folder / "metadata.yaml").read_text("utf-8")


def test_the_folder(tmp_path: Path) -> None:
    onnx.save(with_metadata(RAW), tmp_path / "yolo.onnx")
    for _ in range(2):  # a second conversion replaces the files
        run_well(tmp_path, "convert", "yolo.onnx", "--client", "ultralytics", "--effort", "quick")
    folder = tmp_path / "yolo_ncnn_model"
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert (folder / "metadata.yaml").read_text("utf-8") == YAML.format(sides="32, 64", dynamic="false")
    with Net(folder / "model.ncnn.param") as net:
        assert net.manifest
        assert [entry.blob for entry in (*net.manifest.inputs, *net.manifest.outputs)] == ["in0", "out0", "out1"]
    (tmp_path / "nets").mkdir()
    for place in ("nets", "own_ncnn_model/"):
        ended = run_well(tmp_path, "convert", "yolo.onnx", "--client", "ultralytics", "--no-verify", "-o", place)
        assert "metadata.yaml" in ended.lines("wrote")[0][-3]
    assert (tmp_path / "nets" / "yolo_ncnn_model" / "metadata.yaml").exists()
    assert (tmp_path / "own_ncnn_model" / "model.ncnn.param").exists()


def test_outputs_are_mats_without_the_first_axis() -> None:
    model = with_metadata(END)
    assert [lower(model, client=name).manifest().outputs[0].batch_axis for name in (None, "ultralytics")] == [None, 0]
    assert lower(model, client="ultralytics").verify().ok


def test_an_int8_net_has_it_too(tmp_path: Path) -> None:
    data = {"images": np.random.default_rng(0).random((2, 3, 32, 64), np.float32)}
    options = ConvertOptions(client="ultralytics", verification=Verification(effort="quick"))
    quantize(with_metadata(RAW), data, every=True, conversion=options).save(tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    onnx.save(with_metadata(RAW), tmp_path / "yolo.onnx")
    np.savez(tmp_path / "data.npz", images=data["images"])
    words = ("quantize", "yolo.onnx", "--data", "data.npz", "--all", "--client", "ultralytics", "-o")
    for place, folder in ((".", "yolo_ncnn_model"), ("own_ncnn_model", "own_ncnn_model")):
        ended = run_well(tmp_path, *words, place, "--effort", "quick")
        assert f"{folder}/metadata.yaml" in ended.lines("wrote")[0]
        assert sorted(path.name for path in (tmp_path / folder).iterdir()) == FILES
    said = refused(
        tmp_path, "quantize", "model.ncnn.param", "--data", "data.npz", "--client", "ultralytics", "-o", "new"
    )
    assert "client of a conversion: there is none of a net" in said


def test_sizes_are_those_of_the_net(tmp_path: Path) -> None:
    assert metadata(tmp_path, FREE) == YAML.format(sides="640, 640", dynamic="true")
    assert metadata(tmp_path, FREE, shapes={"images": [1, 3, 64, 96]}) == YAML.format(sides="64, 96", dynamic="false")


def test_a_net_with_a_tail_is_refused(tmp_path: Path) -> None:
    assert lower(with_metadata(SORTED)).tail
    onnx.save(with_metadata(SORTED), tmp_path / "yolo.onnx")
    text = refused(tmp_path, "convert", "yolo.onnx", "--client", "ultralytics", code=1)
    assert "TopK" in text
    assert "export detectors without nms and with end2end=False" in text
    assert "--outputs" not in text


@pytest.mark.parametrize(
    "changes",
    [
        dict.fromkeys(METADATA),
        {"task": None},
        {"kpt_shape": None},
        {"names": "[]"},
        {"stride": "[8, 16, 32]"},
        {"stride": "("},
    ],
    ids=str,
)
def test_other_metadata_is_refused(tmp_path: Path, changes: dict[str, str | None]) -> None:
    with pytest.raises(UsageError, match=r"client: the model's metadata lacks .*; take the file that ultralytics"):
        metadata(tmp_path, RAW, changes)


def test_args_may_be_missing(tmp_path: Path) -> None:
    assert '"args": {"dynamic": false}' in metadata(tmp_path, RAW, {"args": None})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([1, 3, "H", 64], "feeds no H x 64; give multiples of 32, or no sizes"),
        ([1, 3, "S", "S"], "feeds no S x S"),
        ([1, 3, "8*h", "8*w"], "feeds no 8*h x 8*w"),
        ([1, 3, 48, 64], "feeds no 48 x 64"),
        ([4, 3, 64, 64], "feeds one picture, [1, channels, height, width]; export it with batch=1"),
    ],
)
def test_sizes_that_ultralytics_would_not_keep_to(tmp_path: Path, sizes: list[int | str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        metadata(tmp_path, FREE, shapes={"images": sizes})
    assert message in str(error.value)


def test_other_inputs_and_outputs_are_refused(tmp_path: Path) -> None:
    two = "(float[1, 3, 32, 32] a, float[1, 3, 32, 32] b) => (float[1, 3, 32, 32] y) { y = Mul(a, b) }"
    row = "(float[1, 32] x) => (float[1, 32] y) { y = Exp(x) }"
    whole = (
        "(float[1, 3, 32, 32] x) => (float[3, 32, 32] y) { axes = Constant<value_ints = [0]>() y = Squeeze(x, axes) }"
    )
    short = "(float[32] x) => (float[32] y) { y = Exp(x) }"
    for graph in (two, row, whole, short):
        with pytest.raises(UsageError, match="feeds one picture"):
            metadata(tmp_path, graph)
    with pytest.raises(UsageError, match="feeds one picture"):
        metadata(tmp_path, RAW, batch_axes={"images": None})


@pytest.mark.parametrize(
    "options", [{"outputs": ["output1"]}, {"append": "nms:output0"}, {"images": {"images": "std=255"}}], ids=str
)
def test_options_that_change_what_ultralytics_knows(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="client: ultralytics knows the model's own inputs"):
        metadata(tmp_path, RAW, **options)


def test_wrong_clients_and_folders(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="client has to be one of None, ultralytics, not 'darknet'"):
        lower(parsed(RAW), client="darknet")
    folder = tmp_path / "yolo_ncnn_model"
    convert(with_metadata(RAW), folder.with_name("other"), verification=None)
    folder.mkdir()
    convert(with_metadata(RAW), folder / "other", verification=None)
    with pytest.raises(UsageError, match=r"takes any net of a folder, and .*other\.ncnn\.param is another; remove it"):
        convert(with_metadata(RAW), folder / "model", client="ultralytics", verification=None)
    assert len([*folder.iterdir()]) == 3
    write_model(tmp_path, RAW)
    ended = run(tmp_path, "convert", "model.onnx", "--client", "ultralytics", "--no-verify", "-o", "nowhere")
    assert ended.code == 2
    assert ended.err.rstrip().endswith("there is no folder nowhere")
