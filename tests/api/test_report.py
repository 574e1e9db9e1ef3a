from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import onnx2ncnn_opt
from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.api.report import make_report, report_conversion, report_optimized
from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.report.record import NetRecord
from onnx2ncnn_opt.verdict.blobs import Reference
from onnx2ncnn_opt.verdict.errors import DEFAULT
from onnx2ncnn_opt.verification.options import Verification
from testing import present
from testing.models import parsed, write_model

# A ReLU that goes into the convolution, and a Swish that is none, because the Sigmoid is used elsewhere.
SMALL = (
    "(float[N, 3, 8, 8] x) => (float[N, 2, 8, 8] y, float[N, 2, 8, 8] z)"
    "<float[2, 3, 1, 1] w = {0.5, -0.25, 0.125, 0.3, 0.2, -0.7}>"
    "{ [conv] c = Conv(x, w) [relu] r = Relu(c) [sigmoid] s = Sigmoid(r) [mul] y = Mul(r, s)"
    " [softmax] z = Softmax<axis = 1>(s) }"
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path, SMALL, "small.onnx")


def set_first_weight(bin: Path, number: float) -> None:
    data = bin.read_bytes()
    bin.write_bytes(data[:4] + np.float32(number).tobytes() + data[8:])


def types(net: NetRecord) -> list[str]:
    return [row.type for row in net.after]


def test_a_conversion(model: Path, tmp_path: Path) -> None:
    report = make_report(model, verification=Verification(shapes={"x": [2, 3, 8, 8]}, modes=("fp32", "fp16")))
    (net,) = report.records
    assert report.verified is not None
    assert (net.verdict, net.modes) == ("ok", ("fp32", "fp16"))
    assert [output.mode for output in net.outputs] == ["fp32", "fp32", "fp16", "fp16"]
    assert (net.outputs[0].rule, net.outputs[2].rule) == ("rounding", "limit")
    assert [row.type for row in net.before] == ["Input", "Convolution", "ReLU", "Sigmoid", "BinaryOp", "Softmax"]
    assert types(net) == ["Input", "Convolution", "Sigmoid", "BinaryOp", "Softmax"]
    assert net.rows == ((0, 0), (1, None), (2, 1), (3, 2), (4, 3), (5, 4))
    (group,) = net.groups
    assert (group.before, group.after, group.passes) == ((1, 2), (1,), ("fuse_activation",))
    convolution = net.after[1]
    assert convolution.origin == ("conv", "relu")
    assert "num_output=2" in convolution.params
    assert convolution.macs == 2 * 6 * 64  # a batch of two
    assert (convolution.weights, convolution.weight_bytes) == (6, 24)
    assert convolution.blob_bytes == 2 * (3 + 2) * 64 * 4
    assert convolution.seconds is not None
    assert convolution.blobs == ("r 2\u00d7[2, 8, 8]",)
    assert net.after[3].reads == (1, 2)
    for row in net.after[1:]:
        assert row.errors["fp32"].status == "right"
        assert present(row.errors["fp32"].max_rel) < 1e-5
    assert convolution.errors["fp32"].value == "r"
    assert net.near_misses[0].pass_name == "fuse_swish"
    assert net.near_misses[0].layers == (2, 3)
    before, after = map(present, net.memory)
    assert max(after.bytes) == 2 * 4 * 64 * (2 + 2 + 2)
    assert (sorted(before.layers), sorted(after.layers)) == ([1, 2, 3, 4, 5], [1, 2, 3, 4])
    assert ("ReLU 'relu'", "layer", "there", "gone", "") in present(net.comparison).rows
    page = report.save(tmp_path / "page.html")
    assert page.read_text(encoding="utf-8") == report.html()


def test_dynamic_sizes_are_those_of_the_run(model: Path) -> None:
    (net,) = make_report(model).records
    assert ("input", "x [N, 3, 8, 8]") in net.facts
    assert all(row.blob_bytes for row in net.after)


def test_a_conversion_that_is_not_verified_is_not_run(model: Path) -> None:
    net = report_conversion(lower(model, shapes={"x": [2, 3, 8, 8]}))
    assert (net.verdict, net.outputs, net.modes, net.timing) == ("unverified", (), (), "")
    assert net.after[1].macs == 2 * 6 * 64
    assert net.after[1].seconds is None
    of_one = report_conversion(lower(model))
    assert of_one.notes == ("N is dynamic: costs and memory are those of one item of the batch",)
    assert of_one.after[1].macs == 6 * 64
    unknown = report_conversion(lower(parsed(SMALL.replace("8, 8]", "H, 8]")), shapes={"x": [1, 3, "H", 8]}))
    assert unknown.memory == (None, None)
    assert (unknown.after[1].blob_bytes, unknown.after[1].macs) == (None, None)


def test_a_net_of_ours_that_is_wrong(model: Path, tmp_path: Path) -> None:
    files = onnx2ncnn_opt.convert(model).save(tmp_path / "net")
    set_first_weight(files.bin, 3)
    (net,) = make_report(model, files.param).records
    assert net.verdict == "wrong"
    assert net.headline == "2 of 2 outputs differ from ONNX Runtime's."
    assert net.after[1].errors["fp32"].status == "wrong"
    assert net.after[1].origin == ("conv", "relu")
    assert [group.passes for group in net.groups] == [("fuse_activation",)]
    (change,) = present(net.comparison).rows
    assert change[:2] == ("Convolution 'conv'", "weight_data")


def test_a_net_of_another_converter_is_beside_the_models_nodes(model: Path, tmp_path: Path) -> None:
    files = onnx2ncnn_opt.convert(model, shapes={"x": [1, 3, 8, 8]}).save(tmp_path / "net")
    files.manifest.unlink()
    text = files.param.read_text()
    for old, new in ((" x", " in0"), (" r", " 7"), (" y", " out0"), (" z", " out1"), ("conv", "conv_0")):
        text = text.replace(old, new)
    files.param.write_text(text)
    (net,) = make_report(model, files.param, verification=Verification(shapes={"x": [1, 3, 8, 8]})).records
    assert net.verdict == "ok"
    assert net.names == ("model", "net")
    assert [row.type for row in net.before] == ["Conv", "Relu", "Sigmoid", "Mul", "Softmax"]
    assert net.before[3].reads == (1, 2)
    assert net.rows == ((0, None), (None, 0), (1, 1), (2, 2), (3, 3), (4, 4))
    assert net.after[1].origin == ("relu",)


def test_a_wrong_layer_is_compared_with_the_nearest_value(model: Path, tmp_path: Path) -> None:
    files = onnx2ncnn_opt.convert(model, shapes={"x": [1, 3, 8, 8]}).save(tmp_path / "net")
    files.manifest.unlink()
    files.param.write_text(files.param.read_text().replace(" r", " 7").replace(" s", " 8"))
    set_first_weight(files.bin, 0.504)  # instead of 0.5
    (net,) = make_report(model, files.param, verification=Verification(shapes={"x": [1, 3, 8, 8]})).records
    error = net.after[1].errors["fp32"]
    assert (net.verdict, error.status, error.value) == ("wrong", "wrong", "r")
    assert 1e-3 < present(error.max_rel) < 2e-2
    assert net.rows[2] == (1, 1)


def test_the_same_numbers_in_another_order() -> None:
    value = np.random.default_rng(0).standard_normal((1, 2, 3, 4, 5)).astype(np.float32)
    moved = np.ascontiguousarray(value.reshape(6, 4, 5).transpose(2, 1, 0).reshape(3, 40)[::-1])  # no order of its axes
    reference = Reference({"v": value})
    found = reference.judge_similar("v", moved, DEFAULT)
    assert (found.status, found.value) == ("reordered", "v")
    other = reference.judge_similar("v", moved + 1, DEFAULT)
    assert (other.status, other.value) == ("wrong", "v")


def test_a_net_that_cannot_be_read(model: Path, tmp_path: Path) -> None:
    files = onnx2ncnn_opt.convert(model).save(tmp_path / "net")
    files.bin.write_bytes(b"")
    (net,) = make_report(model, files.param).records
    assert (net.verdict, net.after) == ("wrong", ())
    assert net.notes[0].startswith("the net cannot be read: ")


def test_an_optimised_net(model: Path, tmp_path: Path) -> None:
    files = onnx2ncnn_opt.convert(model, shapes={"x": [1, 3, 8, 8]}, optimize=False).save(tmp_path / "net")
    result = onnx2ncnn_opt.optimize(files.param, files.bin, shapes={"x": [3, 8, 8]})
    net = report_optimized(result)
    assert net.verdict == "ok"
    assert types(net) == ["Input", "Convolution", "Sigmoid", "BinaryOp", "Softmax"]
    assert net.after[1].errors["fp32"].value == "r"
    assert net.after[1].macs == 6 * 64
    assert [group.passes for group in net.groups] == [("fuse_activation",)]
    unverified = report_optimized(replace(result, report=None))
    assert unverified.verdict == "unverified"
    assert unverified.memory == net.memory


def test_a_page_is_written_whole_or_not_at_all(model: Path, tmp_path: Path) -> None:
    report = make_report(model)
    with pytest.raises(UsageError, match=r"cannot write .*: No such file or directory"):
        report.save(tmp_path / "nowhere" / "page.html")
    (tmp_path / "page.html").mkdir()
    with pytest.raises(UsageError, match="cannot write"):
        report.save(tmp_path / "page.html")
    assert {path.name for path in tmp_path.iterdir()} == {"small.onnx", "page.html"}
