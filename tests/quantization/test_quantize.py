"""Nets of int8 on real ncnn: what they cost in accuracy, what stays float, and data that does not fit."""

import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnx2ncnn_opt import ConvertOptions, Verification, convert, quantize, verify
from onnx2ncnn_opt.errors import PluginError, UsageError, VerificationError
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.int8 import LARGEST_SUM, integers, row_scales
from onnx2ncnn_opt.manifest import Entry
from onnx2ncnn_opt.param.files import read_graph, read_net, write_net
from onnx2ncnn_opt.quantization.data import Samples
from onnx2ncnn_opt.quantization.emit import obstacle, quantise
from onnx2ncnn_opt.quantization.observe import THRESHOLDS, Observed
from onnx2ncnn_opt.quantization.quantize import Budget
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, Times
from onnx2ncnn_opt.runtime.net import Net
from onnx2ncnn_opt.verification.sqnr import Agreement, decibels
from testing import present
from testing.command import names, net_files
from testing.models import parsed

CNN = """(float[1,3,16,16] x) => (float[1,10] y)
   { a = Conv<kernel_shape = [3,3], pads = [1,1,1,1]>(x, w1, b1) ar = Relu(a)
     b = Conv<kernel_shape = [3,3], pads = [1,1,1,1]>(ar, w2, b2) br = Relu(b)
     d = Conv<kernel_shape = [3,3], pads = [1,1,1,1], group = 16>(br, w3, b3) s = Add(d, ar)
     g = GlobalAveragePool(s) f = Flatten(g) y = Gemm<transB = 1>(f, w4, b4) }"""
SHAPES = {"w1": (16, 3, 3, 3), "w2": (16, 16, 3, 3), "w3": (16, 1, 3, 3), "w4": (10, 16)}
MATRIX = "(float[1,12,128] x) => (float[1,12,96] y) { m = MatMul(x, w) y = Add(m, b) }"


def with_weights(text: str, shapes: dict[str, tuple[int, ...]], seed: int = 0) -> onnx.ModelProto:
    """Return a model with random weights of these shapes, and biases b1 for w1."""
    model, random = parsed(text), np.random.default_rng(seed)
    for name, shape in shapes.items():
        weight = random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
        model.graph.initializer.append(numpy_helper.from_array(weight.astype(np.float32), name))
        bias = numpy_helper.from_array(random.standard_normal(shape[0]).astype(np.float32), name.replace("w", "b"))
        model.graph.initializer.append(bias)
    return model


def cnn() -> onnx.ModelProto:
    return with_weights(CNN, SHAPES)


def data(count: int = 20, shape: tuple[int, ...] = (3, 16, 16)) -> dict[str, Any]:
    return {"x": np.random.default_rng(1).standard_normal((count, *shape)).astype(np.float32)}


@pytest.fixture(scope="module")
def param(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The float net."""
    folder = tmp_path_factory.mktemp("float")
    convert(cnn().SerializeToString(), folder / "net", verification=None)
    return folder / "net.ncnn.param"


def test_every_layer_in_int8(tmp_path: Path, param: Path) -> None:
    made = quantize(cnn().SerializeToString(), data(), every=True)
    assert {row.type for row in made.layers if row.is_int8} == {"Convolution", "ConvolutionDepthWise", "InnerProduct"}
    assert made.result.decibels > 30
    assert abs(made.result.decibels - decibels(sum(row.noise or 0.0 for row in made.layers))) < 3
    (tmp_path / "net.ncnn.tail.onnx").write_bytes(b"of an earlier net")
    files = made.save(tmp_path / "net")
    assert names(tmp_path) == net_files("net")
    with Net(tmp_path / "net") as net:
        found = net.run({"x": data()["x"][:1]})["y"]
    with Net(param) as net:
        expected = net.run({"x": data()["x"][:1]})["y"]
    assert 0 < np.abs(found - expected).max() < 0.1 * np.abs(expected).max()
    assert files.bin.stat().st_size < 0.5 * param.with_suffix(".bin").stat().st_size


def sorting() -> onnx.ModelProto:
    """Return a model that sorts boxes by their scores."""
    text = """(float[1,3,16,16] x) => (float[1,200,4] y)
        <int64[1] k = {200}, int64[3] row = {1,256,1}, int64[3] rows = {1,4,256}, int64[3] sizes = {1,200,4}> {
        scores = Conv<pads = [1, 1, 1, 1]>(x, w1, b1) s = Reshape(scores, row) v, i = TopK<axis = 1>(s, k)
        boxes = Conv<pads = [1, 1, 1, 1]>(x, w2, b2) b = Reshape(boxes, rows) t = Transpose<perm = [0, 2, 1]>(b)
        wide = Expand(i, sizes) y = GatherElements<axis = 1>(t, wide) }"""
    return with_weights(text, {"w1": (1, 3, 3, 3), "w2": (4, 3, 3, 3)})


def test_rows_in_another_order_are_no_noise() -> None:
    """8 bits exchange rows of similar scores: the net goes on with the float net's rows, and scores are compared."""
    made = quantize(sorting().SerializeToString(), data(), every=True)
    assert "DetectionOutput" in {layer.type for layer in made.result.graph}
    assert [row.type for row in made.layers if not row.is_int8] == ["Gemm"]  # it computes with indices
    assert made.result.decibels > 30


def test_verification_on_the_data_and_beyond_it(tmp_path: Path) -> None:
    """Inputs eight times as large as the data are cut off."""
    onnx.save(cnn(), tmp_path / "model.onnx")
    files = quantize(tmp_path / "model.onnx", data(), every=True).save(tmp_path / "net")
    beyond = verify(tmp_path / "model.onnx", files.param)
    assert not beyond.ok
    assert any("verify with such data, by --inputs" in note for note in beyond.notes)
    how = Verification(feeds={"x": data()["x"][:1]})
    report = verify(tmp_path / "model.onnx", files.param, verification=how)
    assert report.ok
    assert not any("--inputs" in note for note in report.notes)


@pytest.mark.needs("Vulkan")
def test_a_net_for_a_gpu_is_right_there(tmp_path: Path) -> None:
    onnx.save(cnn(), tmp_path / "model.onnx")
    made = quantize(tmp_path / "model.onnx", data(), every=True, on="vulkan")
    assert made.result.decibels > 30
    how = Verification(feeds={"x": data()["x"][:1]}, on="vulkan")
    assert verify(tmp_path / "model.onnx", made.save(tmp_path / "net").param, verification=how).ok


@pytest.mark.parametrize("weights", [None, "int8", "block8"])
def test_a_matrix_product_has_blocks(weights: str | None) -> None:
    model = with_weights(MATRIX, {"w": (128, 96)})
    del model.graph.initializer[1]
    model.graph.initializer.append(numpy_helper.from_array(np.ones(96, np.float32), "b"))
    made = quantize(model.SerializeToString(), data(shape=(12, 128)), every=True, weights=weights)
    [row] = made.layers
    assert (row.type, row.is_int8) == ("Gemm", True)
    assert not weights or row.form == {"int8": "one scale", "block8": "blocks of 64"}[weights]
    assert made.result.decibels > 40 - 4 * (weights != "block8")


def test_forms_of_older_releases() -> None:
    """A Gemm has blocks in the newest ncnn only, one scale before, and no int8 form in an old one."""
    model = with_weights(MATRIX, {"w": (96, 128)})
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.eye(128, 96, dtype=np.float32), "w"))
    how: dict[str, Any] = {"data": data(shape=(12, 128)), "every": True}
    made = quantize(model.SerializeToString(), **how, conversion=ConvertOptions(release=20250503))
    assert [row.form for row in made.layers] == ["one scale"]
    assert present(made.manifest).least_ncnn == "20241012"
    with pytest.raises(UsageError, match="blocks of integers needs ncnn 20260713 or newer"):
        quantize(model.SerializeToString(), **how, conversion=ConvertOptions(release=20250503), weights="block8")
    with pytest.raises(UsageError, match="quantize_term needs ncnn 20241012 or newer"):
        quantize(model.SerializeToString(), **how, conversion=ConvertOptions(release=20240301))


def test_weights_without_a_fast_kernel_are_refused(param: Path) -> None:
    with pytest.raises(UsageError, match="weights are int8 or block8"):
        quantize(param, data(), weights="block4")


def test_the_better_threshold_is_taken(param: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = quantize(param, data(), every=True).result.decibels
    assert best > 22
    for threshold in THRESHOLDS:
        monkeypatch.setattr("onnx2ncnn_opt.quantization.quantize.THRESHOLDS", (threshold,))
        assert quantize(param, data(), every=True).result.decibels <= best


def test_a_budget_is_kept(param: Path) -> None:
    free = quantize(param, data(), every=True).result.decibels
    made = quantize(param, data(), every=True, budget=f"{free + 4}dB")
    assert made.result.decibels >= free + 4
    assert 0 < sum(row.is_int8 for row in made.layers) < len(made.layers)
    assert any("the budget has no room" in row.reason for row in made.layers)
    assert made.result.at_least + 1 >= free + 4
    assert "20 samples are few; give 50 or more, as different as in use" in made.result.notes


def test_a_budget_that_one_layer_keeps_by_a_little(param: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnx2ncnn_opt.quantization.quantize.THRESHOLDS", THRESHOLDS[:1])  # whatever the others do
    layers = {row.layer: row.noise or 0.0 for row in quantize(param, data(), every=True).layers}
    quietest = min(layers, key=layers.__getitem__)
    alone = quantize(param, data(), every=True, keep=layers.keys() - {quietest}).result
    made = quantize(param, data(), every=True, budget=f"{alone.kept(Budget()) - 0.01}dB")
    assert not made.result.missed
    assert [row.layer for row in made.layers if row.is_int8] == [quietest]


def test_a_budget_out_of_reach_writes_nothing(tmp_path: Path, param: Path) -> None:
    made = quantize(param, data(), every=True, budget="200dB")
    with pytest.raises(VerificationError, match="200 dB"):
        made.save(tmp_path / "net")
    assert not list(tmp_path.iterdir())


def test_convolutions_hand_int8_to_each_other(tmp_path: Path) -> None:
    text = """(float[1,3,16,16] x) => (float[1,16,16,16] y)
       { a = Conv<kernel_shape = [3,3], pads = [1,1,1,1]>(x, w1, b1) ar = Relu(a)
         p = Conv<kernel_shape = [3,3], pads = [1,1,1,1]>(ar, w2, b2) q = Conv<kernel_shape = [1,1]>(ar, w5, b5)
         y = Mul(p, q) }"""
    shapes: dict[str, tuple[int, ...]] = {**SHAPES, "w5": (16, 16, 1, 1)}
    for name in ("w3", "w4"):
        del shapes[name]
    made = quantize(with_weights(text, shapes).SerializeToString(), data(), every=True)
    terms = {layer.name: layer["int8_scale_term"] for layer in made.graph if layer.type == "Convolution"}
    assert sorted(terms.values()) == [2, 2, 102]  # through the Split
    assert made.result.decibels > 30


def test_a_row_of_zeros_and_negative_numbers() -> None:
    rows = np.array([[0.0, 0.0], [-2.0, 1.0]], np.float32)
    np.testing.assert_allclose(row_scales(rows), [1, 63.5])
    np.testing.assert_array_equal(integers(np.array([-2.0, 0.5, 1.49, 300.0]), np.ones(4)), [-2, 1, 1, 127])
    np.testing.assert_array_equal(integers(np.array([-0.5, -300.0]), np.ones(2)), [-1, -127])


def test_large_sums_leave_winograd(tmp_path: Path) -> None:
    """In 3x3 convolutions of int8 winograd's sums overflow above (2^31 - 1) / 576."""
    weight = np.ones((64, 512, 3, 3), np.float32)
    text = "(float[1,512,8,8] x) => (float[1,64,8,8] y) { y = Conv<kernel_shape = [3,3], pads = [1,1,1,1]>(x, w, b) }"
    model = parsed(text)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(64, np.float32), "b"))
    assert LARGEST_SUM < 512 * 9 * 127 * 127
    x = {"x": np.ones((16, 512, 8, 8), np.float32) + np.random.default_rng(0).uniform(0, 0.1, (16, 512, 8, 8))}
    made = quantize(model.SerializeToString(), x, every=True)
    assert made.result.decibels > 25


def test_grouped_convolutions_stay_float(tmp_path: Path) -> None:
    text = "(float[1,16,8,8] x) => (float[1,16,8,8] y) { y = Conv<kernel_shape = [1,1], group = 2>(x, w1, b1) }"
    model = with_weights(text, {"w1": (16, 8, 1, 1)})
    with pytest.raises(UsageError, match="grouped convolutions of int8 wrong"):
        quantize(model.SerializeToString(), data(shape=(16, 8, 8)), every=True)


def test_an_int8_net_is_quantised_already(tmp_path: Path, param: Path) -> None:
    files = quantize(param, data(), every=True).save(tmp_path / "net")
    with pytest.raises(UsageError, match="quantised already"):
        quantize(files.param, {"x": data()["x"]}, every=True)


def test_a_net_with_and_without_a_manifest(tmp_path: Path, param: Path) -> None:
    first = quantize(param, data(), every=True)
    for ending in (".param", ".bin"):
        (tmp_path / f"net{ending}").write_bytes(param.with_suffix(ending).read_bytes())
    blob = read_net(param, param.with_suffix(".bin")).graph.inputs[0].name
    second = quantize(tmp_path / "net.param", {blob: data()["x"]}, every=True)
    assert first.result.decibels == second.result.decibels


def test_the_order_of_samples_changes_no_bit() -> None:
    random = np.random.default_rng(0)
    parts = [random.standard_normal((4, 3, 3)).astype(np.float32) * scale for scale in (1, 0, 100, 0.01)]
    first, second = Observed(), Observed()
    for part in parts:
        first.add(part)
    for part in parts[::-1]:
        second.add(part)
    np.testing.assert_array_equal(first.counts, second.counts)
    assert (first.top, first.low, first.high) == (second.top, second.low, second.high)
    assert first.means is not None
    np.testing.assert_array_equal(first.means, present(second.means))


ENTRY = Entry("x", "x", (1, 3, 4, 4), "float32", 0)
GOOD = np.ones((10, 3, 4, 4), np.float32)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            {"x": np.where(np.arange(480).reshape(10, 3, 4, 4) == 100, np.nan, GOOD)},
            "sample 2: 'x' is nan at .0, 0, 1, 0.",
        ),
        ({"x": GOOD[:0]}, "has 0 items|no samples"),
        ({"y": GOOD}, "'y' is not an input"),
        ({}, "'x' is missing"),
        ({"x": GOOD.transpose(0, 2, 3, 1)}, "not an array of shape"),
        ({"x": GOOD.astype(complex)}, "not an array of complex"),
        ({"x": np.ones((3, 4), np.float32)}, "not arrays of shape"),
        ("nothing.npz", "neither a file nor a folder"),
        ("testing.nothing:samples", "testing.nothing"),
        ("gc:garbage", "not a function that yields"),
        ("gc:enable", "not a function that yields"),
        ([GOOD[:1], (GOOD[:1], GOOD[:1])], "2 arrays for 1 inputs"),
    ],
)
def test_data_that_does_not_fit(source: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        list(Samples(source, [ENTRY]))


def test_a_function_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_data.py").write_text("def samples():\n    yield 1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match="the data failing_data:samples failed: ZeroDivisionError"):
        Samples("failing_data:samples", [ENTRY])


def test_folders_of_samples(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no [.]npz"):
        Samples(tmp_path, [ENTRY])
    np.save(tmp_path / "a.npy", GOOD[:1])
    np.savez(tmp_path / "b.npz", x=GOOD[:1])
    assert len(list(Samples(tmp_path, [ENTRY]))) == 2
    np.save(tmp_path / "c.npy", GOOD[0])
    assert [sample["x"].shape for sample in Samples(tmp_path, [ENTRY])] == [(1, 3, 4, 4)] * 3
    for entry in (replace(ENTRY, shape=("n", 3, None, 4)), replace(ENTRY, shape=(3, 4, 1, 4), batch_axis=2)):
        [sample] = Samples([{"x": np.ones((3, 4, 4), np.float32)}], [entry])
        assert sample["x"].size == 48
    for entry in (replace(ENTRY, shape=(2, 3, 4, 4)), replace(ENTRY, shape=("t", 3, 4, 4), batch_axis=None)):
        with pytest.raises(UsageError, match=r"not an array of shape \[3, 4, 4\]"):
            list(Samples([{"x": GOOD[0]}], [entry]))
    (tmp_path / "text.npz").write_bytes(b"no arrays")
    with pytest.raises(UsageError, match=r"text[.]npz: no inputs can be read from it"):
        Samples(tmp_path / "text.npz", [ENTRY])
    np.savez(tmp_path / "b.npz", a=GOOD[:1], b=GOOD[:1])
    with pytest.raises(UsageError, match="npz: 'a' is not an input"):
        Samples(tmp_path / "b.npz", [ENTRY, replace(ENTRY, name="z")])
    np.savez(tmp_path / "b.npz", x=GOOD[:1])
    (tmp_path / "d.png").write_bytes(b"no picture")
    with pytest.raises(UsageError, match="say what the model does to pixels"):
        list(Samples(tmp_path, [ENTRY]))


def test_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample stays in memory as long as there is room."""
    for room, is_kept in ((2**20, True), (10, False)):
        monkeypatch.setattr("onnx2ncnn_opt.quantization.data._MOST_KEPT", room)
        np.save(tmp_path / "a.npy", GOOD[:1])
        samples = Samples(tmp_path, [ENTRY])
        first = samples[0]["x"]
        (tmp_path / "a.npy").unlink()
        if is_kept:
            np.testing.assert_array_equal(samples[0]["x"], first)
        else:
            with pytest.raises(UsageError, match="no inputs can be read"):
                samples[0]


def test_few_equal_and_constant_samples(param: Path) -> None:
    notes = quantize(param, {"x": np.ones((3, 3, 16, 16), np.float32)}, every=True).result.notes
    assert [any(text in note for note in notes) for text in ("samples are few", "all samples are equal")] == [True] * 2
    assert any("only the number 1" in note for note in notes)


def test_a_budget_for_these_samples_alone(param: Path) -> None:
    found = replace(quantize(param, data(), every=True).result, decibels=40.2, at_least=38.0)
    assert "38.0 dB or more on other data" in found.misses(Budget(decibels=40))
    assert not found.misses(Budget(decibels=40, other_data=False))


def test_rows_that_agree_on_other_data() -> None:
    def least(same: int, samples: int) -> float | None:
        return Agreement(samples=samples, rows=2 * samples, same=2 * same).least_top1

    assert least(64, 64) == pytest.approx(0.05 ** (1 / 64))  # as Clopper and Pearson have it
    assert least(95, 100) == pytest.approx(0.8785, abs=1e-4)  # Clopper and Pearson: 0.8977
    assert least(0, 10) == 0
    assert Agreement().least_top1 is None


@pytest.mark.parametrize(
    "text", ["40", "dB", "nandB", "infdB", "-5dB", "0dB", "top1=2", "top1=0", "top1=nan", "top5=0.9"]
)
def test_budgets_in_another_form(text: str) -> None:
    with pytest.raises(UsageError, match="a budget is 40dB"):
        Budget.parse(text)


def test_masks_of_no_int8(param: Path) -> None:
    graph = read_net(param, param.with_suffix(".bin")).graph
    layer = next(layer for layer in graph if layer.type == "Convolution")
    assert obstacle(layer) == ""
    layer.params["featmask"] = 8
    assert "no int8" in obstacle(layer)
    quantise(graph, {})
    assert not any(layer.params.get("int8_scale_term") for layer in graph)


def test_a_quiet_moment_of_one_net_decides_nothing(param: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: Counter[str] = Counter()

    def time_blobs(self: NcnnRunner, feeds: Any, blobs: Sequence[str], **_: Any) -> Times:
        turns[self.param.name] += 1
        turn, is_int8 = turns[self.param.name], self.param.name.startswith("timed")
        seconds = 0.3 if turn == 2 and not is_int8 else (1 + turn % 3) * (0.8 if is_int8 else 1.0)
        return Times((seconds,) * len(blobs), seconds, 1)

    monkeypatch.setattr(NcnnRunner, "time_blobs", time_blobs)
    monkeypatch.setattr(NcnnRunner, "time", lambda self, *_: [0.8 if "int8" in self.param.name else 1.0])
    found = quantize(param, data()).result
    assert all(row.is_int8 for row in found.layers)
    assert found.layers[0].seconds == pytest.approx((0.3, 0.24))
    assert found.seconds == pytest.approx((1.0, 0.8))


def test_layers_that_are_faster_alone_only(param: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def time_blobs(self: NcnnRunner, feeds: Any, blobs: Sequence[str], **_: Any) -> Times:
        return Times((0.8 if self.param.name.startswith("timed") else 1.0,) * len(blobs), 1.0, 1)

    monkeypatch.setattr(NcnnRunner, "time_blobs", time_blobs)
    monkeypatch.setattr(NcnnRunner, "time", lambda self, *_: [1.1 if "int8" in self.param.name else 1.0])
    found = quantize(param, data()).result
    assert any("the net is no faster in int8" in note for note in found.notes)


def test_equal_layers_for_any_times(tmp_path: Path, param: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)

    def time_blobs(self: NcnnRunner, feeds: Any, blobs: Sequence[str], **_: Any) -> Times:
        first = 0.1 if self.param.stem == "timed1" else 1.0  # which has no winograd
        return Times((first, *random.uniform(0.5, 2, len(blobs) - 1)), 1.0, 1)

    monkeypatch.setattr(NcnnRunner, "time_blobs", time_blobs)
    kept = next(layer.name for layer in read_graph(param) if layer.type == "ConvolutionDepthWise")
    first = quantize(param, data(), every=True, keep=[kept])
    files = first.save(tmp_path / "first")
    assert "a scale for each row, no winograd" in {row.form for row in first.layers}
    for budget in ("20dB", f"{first.result.at_least}dB"):
        again = quantize(param, data(), like=files.param, budget=budget)
        other = again.save(tmp_path / "again", keep_failed=True)
        assert (other.param.read_bytes(), other.bin.read_bytes()) == (files.param.read_bytes(), files.bin.read_bytes())
    assert [row.reason for row in again.layers if not row.is_int8] == ["it is float in the earlier net"]


def test_times_of_another_machine(param: Path) -> None:
    found = quantize(param, data(), every=True, on=sys.executable).result
    assert sys.executable in found.times
    assert all(present(row.seconds)[1] > 0 for row in found.layers)


@pytest.mark.needs("other x86 CPUs")
def test_an_emulated_machine_has_no_times(param: Path) -> None:
    with pytest.raises(UsageError, match=r"has no times: make all layers int8 \(--all\)"):
        quantize(param, data(), on="qemu-x86_64:Haswell")
    found = quantize(param, data(), every=True, on="qemu-x86_64:Haswell").result
    assert math.isnan(found.seconds[1])
    assert any(row.is_int8 and row.seconds is None for row in found.layers)


def test_pixels_for_a_model_of_normalised_numbers(param: Path) -> None:
    pixels = {"x": np.random.default_rng(0).integers(0, 256, (10, 3, 16, 16)).astype(np.float32)}
    notes = quantize(param, pixels, every=True).result.notes
    assert any("looks like pixels of 0..255" in note for note in notes)
    made = quantize(
        cnn().SerializeToString(), pixels, every=True, conversion=ConvertOptions(images={"x": "mean=128:std=64"})
    )
    assert not any("looks like pixels" in note for note in made.result.notes)


def test_pixels_that_a_clip_cuts_off() -> None:
    model = cnn().SerializeToString().replace(b"Relu", b"Clip")  # without limits
    limits = [numpy_helper.from_array(np.array(limit, np.float32), name) for name, limit in (("low", 0), ("high", 6))]
    proto = onnx.ModelProto.FromString(model)
    proto.graph.initializer.extend(limits)
    for node in proto.graph.node:
        node.input.extend(["low", "high"] if node.op_type == "Clip" else [])
    x = np.random.default_rng(0).integers(0, 256, (10, 3, 16, 16)).astype(np.float32)
    for samples, is_named in ((x, True), ((x - 128) / 64, False)):
        notes = quantize(proto.SerializeToString(), {"x": samples}, every=True).result.notes
        assert any("looks like pixels" in note for note in notes) == is_named


def test_a_layer_that_alone_spoils_an_output_stays_float(tmp_path: Path) -> None:
    """A row of large weights in one scale for the whole matrix leaves nothing of the others, which alone count."""
    graph = Graph()
    blob = graph.add(Layer("Input", "in", (), [Blob("x")])).output
    params = {"transB": 1, "constantB": 1, "constantC": 1, "constantN": 64, "constantK": 64}
    weights = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    weights[0] *= 3000
    layer = Layer("Gemm", "spoils", (blob,), [Blob("g")], {**params, "constant_broadcast_type_C": -1})
    layer.weights["B_data"] = weights.reshape(-1)
    graph.add(layer)
    graph.add(Layer("Crop", "crop", [layer.output], [Blob("y")], {"starts": (1,), "ends": (64,), "axes": (1,)}))
    graph.outputs = tuple(list(graph)[-1].outputs)
    write_net(graph, tmp_path / "net.param", tmp_path / "net.bin")
    made = quantize(tmp_path / "net.param", data(shape=(5, 64)), every=True, weights="int8")
    assert "it alone spoils an output" in made.layers[0].reason
    assert "spoils" in made.result.missed
    assert quantize(tmp_path / "net.param", data(shape=(5, 64)), every=True).result.decibels > 35
