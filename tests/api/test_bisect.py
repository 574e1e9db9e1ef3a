"""The first wrong layer: faults planted in nets of real models, and rewrites that break one."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from onnx2ncnn_opt import entry_points
from onnx2ncnn_opt.api.bisect import Bisection, bisect, bisect_passes
from onnx2ncnn_opt.api.bisection.pair import Pair
from onnx2ncnn_opt.api.bisection.search import Located
from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.api.verify import manifest_beside
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.shapes import infer_graph
from onnx2ncnn_opt.manifest import read_manifest
from onnx2ncnn_opt.param import files
from onnx2ncnn_opt.rewrite.events import LayerRef
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import require, rewrite
from onnx2ncnn_opt.verification.model import verify_net
from onnx2ncnn_opt.verification.options import Verification
from onnx2ncnn_opt.verification.report import VerifyReport
from testing import present
from testing.command import SINE, SINE_AT, SMALL, run, run_well
from testing.exports import ROOT, save_refilled
from testing.faults import FAULTS, places, plant
from testing.handmade import write_net
from testing.models import write_model


def planted(folder: Path, model: str, kind: str) -> tuple[Path, LayerRef]:
    """MODEL converted to net.ncnn.*, with a fault in wrong.*; the model's path, and the layer."""
    folder.mkdir(exist_ok=True)
    path = save_refilled(model, folder)
    right = lower(path).save(folder / "net")
    graph = files.read_net(right.param, right.bin).graph
    infer_graph(graph)
    found = places(graph, kind)
    index = found[len(found) // 2]
    layer = graph.layers[index]
    plant(graph, kind, index, np.random.default_rng(5))
    files.write_net(graph, folder / "wrong.param", folder / "wrong.bin")
    return path, LayerRef(layer.type, layer.name)


def bisected(folder: Path, model: Path, *, with_manifest: bool) -> Bisection:
    manifest = read_manifest(folder / "net.ncnn.json") if with_manifest else None
    return bisect(model, folder / "wrong.param", folder / "wrong.bin", manifest=manifest, write=folder / "pair")


def bisected_lines(folder: Path, graph: str, *lines: str) -> tuple[Bisection, Located]:
    """Bisect the net of these lines after an Input of x."""
    found = bisect(write_model(folder, graph), *write_net(folder, "Input in 0 1 x", *lines), write=folder / "pair")
    return found, present(found.located)


def again(pair: Pair) -> VerifyReport:
    """Return the report of `verify` on the files of a pair."""
    files = pair.files
    manifest, _ = manifest_beside(files.param, files.model)
    how = Verification(feeds=files.inputs)
    return verify_net(files.model, files.param, files.bin, manifest=present(manifest), verification=how)


FAULTY = [
    ("residual.ts", "one weight"),
    ("residual.ts", "another operation"),
    ("shuffle.dyn", "moved padding"),
    ("superres-hw.dyn", "moved padding"),
    ("attention.ts", "another permutation"),
    ("residual.ts", "missing activation"),
    ("attention.ts", "eps"),
    ("detector.ts", "slice off by one"),
]


@pytest.mark.parametrize(("model", "kind"), FAULTY)
def test_the_layer_is_found_by_the_manifest_and_by_the_values_of_the_model(
    tmp_path: Path, model: str, kind: str
) -> None:
    assert kind in FAULTS
    path, layer = planted(tmp_path, model, kind)
    found = bisected(tmp_path, path, with_manifest=True)
    assert not found.report.ok
    located = present(found.located)
    assert (located.layer, located.suspects) == (layer, (layer,))
    assert {read.status for read in located.inputs} == {"right"}
    assert located.arrays.keys() == {read.blob for read in located.inputs}
    assert located.origin
    assert [change.after for change in present(found.difference).changed] == [layer]
    pair = present(found.pair)
    assert pair.layers == 1
    assert pair.nodes <= 2  # a Conv and its activation
    status = "shape" if "shape" in located.message else "mismatch"
    assert [output.status for output in again(pair).outputs] == [status]

    found = bisected(tmp_path, path, with_manifest=False)
    assert found.difference is None
    assert layer in present(found.located).suspects
    assert present(found.pair).layers <= len(present(found.located).suspects)
    assert not again(present(found.pair)).ok


@pytest.mark.parametrize("kind", ["deleted layer", "another rounding"])
def test_a_layer_that_is_left_out_and_one_too_many(tmp_path: Path, kind: str) -> None:
    path, layer = planted(tmp_path, "residual.ts", kind)
    located = present(bisected(tmp_path, path, with_manifest=True).located)
    assert located.suspects[0].name.startswith(layer.name)


def test_a_net_of_pnnx(tmp_path: Path) -> None:
    folder = ROOT / "tests" / "verification" / "pnnx"
    graph = files.read_net(folder / "tiny.ncnn.param", folder / "tiny.ncnn.bin").graph
    *_, wrong = (layer for layer in graph if layer.type == "Convolution")
    wrong.weights["weight_data"] = wrong.weights["weight_data"] * np.float32(1.25)
    files.write_net(graph, tmp_path / "wrong.param", tmp_path / "wrong.bin")
    found = bisected(tmp_path, folder / "tiny.onnx", with_manifest=False)
    assert present(found.located).layer == LayerRef("Convolution", wrong.name)
    right = bisect(folder / "tiny.onnx", folder / "tiny.ncnn.param", folder / "tiny.ncnn.bin")
    assert right.report.ok
    assert right.located is None


def test_a_layer_that_kills_ncnn(tmp_path: Path) -> None:
    """The blob x has two readers and no Split, which no part of the net shows: one is written with Splits."""
    graph = "(float[1, 2, 3] x) => (float[1, 2, 3] y, float[1, 2, 3] z) { y = Relu(x) z = Neg(x) }"
    found, located = bisected_lines(tmp_path, graph, "ReLU r 1 1 x y", "UnaryOp n 1 1 x z 0=1")
    assert located.layer == LayerRef("UnaryOp", "n")
    assert located.message == "it reads 'x', which 'r' reads as well, and there is no Split between"
    assert found.pair is None
    assert not (tmp_path / "pair").exists()


def test_layers_between_two_values_of_the_model(tmp_path: Path) -> None:
    graph = "(float[1, 2, 3] x) => (float[1, 2, 3] y) { a = Relu(x) y = Softplus(a) }"
    lines = ("ReLU r 1 1 x 1", "UnaryOp e 1 1 1 2 0=7", "UnaryOp l 1 1 2 y 0=8")
    found, located = bisected_lines(tmp_path, graph, *lines)
    pair = present(found.pair)
    assert (pair.nodes, pair.layers) == (1, 2)
    assert not again(pair).ok
    assert (located.layer.name, located.blob, located.value) == ("e", "2", None)
    assert located.message.startswith("the model has no such value; 'y' after it is ")
    assert [ref.name for ref in located.suspects] == ["e", "l"]
    assert [(read.blob, read.status, read.value) for read in located.inputs] == [("1", "right", "a")]


def test_an_output_in_another_order_of_axes(tmp_path: Path) -> None:
    graph = "(float[1, 2, 3] x) => (float[1, 3, 2] y) { a = Relu(x) y = Transpose<perm=[0,2,1]>(a) }"
    found, located = bisected_lines(tmp_path, graph, "ReLU r 1 1 x a", "Permute p 1 1 a y 0=0")
    assert (located.layer.name, located.suspects) == ("p", (located.layer,))
    assert "shape" in located.message
    assert [output.status for output in again(present(found.pair)).outputs] == ["shape"]


def test_a_pair_begins_in_the_layout_of_the_net(tmp_path: Path) -> None:
    """The net has the model's rows as columns, and its integers as floats."""
    graph = (
        "(float[2, 3, 4] x) => (float[2, 3, 4] y) <float k = {3}> "
        "{ a = Relu(x) c = Cast<to = 7>(a) d = Mul(c, c) e = Cast<to = 1>(d) y = Mul(e, k) }"
    )
    lines = (
        "ReLU r 1 1 x a",
        "Permute p 1 1 a t 0=1",
        "UnaryOp f 1 1 t u 0=2",
        "Split s 1 2 u u0 u1",
        "BinaryOp m 2 1 u0 u1 v 0=0",
        "Permute q 1 1 v w 0=1",
        "BinaryOp n 1 1 w y 0=2 1=1 2=3",
    )
    found, located = bisected_lines(tmp_path, graph, *lines)
    assert located.layer.name == "m"
    pair = present(found.pair)
    assert (pair.nodes, pair.layers) == (3, 3)
    with np.load(pair.files.inputs) as inputs:
        assert {name: (a.shape, a.dtype) for name, a in inputs.items()} == {"c.in": ((1, 2, 4, 3), np.float32)}
    assert not again(pair).ok


def test_a_missing_activation_of_a_layer_whose_own_numbers_are_right(tmp_path: Path) -> None:
    """Without its ReLU the layer gives a value of the model, but not the one that the next layer is to read."""
    graph = (
        "(float[1, 6, 4] x) => (float[1, 6, 1] y) <int64[1] axes = {2}> { a = Neg(x) r = Relu(a) "
        "y = ReduceSum<keepdims = 1>(r, axes) }"
    )
    lines = ("UnaryOp n 1 1 x 1 0=1", "Reduction s 1 1 1 y 0=0 1=0 -23303=1,-1 4=1 5=1")
    found, located = bisected_lines(tmp_path, graph, *lines)
    assert [ref.name for ref in located.suspects] == ["n", "s"]
    assert located.layer.name == "n"
    assert located.message.startswith("it is 'a' of the model, and no blob is 'r', which follows from that")
    assert (present(found.pair).nodes, present(found.pair).layers) == (3, 2)


NAMED = "(float[1, 3, 4] x) => (float[1, 3, 4] y, float[1, 3, 4] z) { y = Relu(x) z = Neg(y) }"


@pytest.mark.parametrize(("old", "layer"), [("y", "ReLU"), ("x", "Input")])
def test_an_input_or_output_of_another_name(tmp_path: Path, old: str, layer: str) -> None:
    model = write_model(tmp_path, NAMED)
    right = lower(model).save(tmp_path / "net")
    text = right.param.read_text()
    renamed = tmp_path / "wrong.param"
    renamed.write_text(re.sub(rf"(?<= ){old}(?=[ \n])", "other", text))
    assert renamed.read_text() != text
    found = bisect(model, renamed, right.bin, manifest=read_manifest(right.manifest), write=tmp_path / "pair")
    assert not found.report.ok
    located = present(found.located)
    assert (located.layer.type, located.blob) == (layer, "other")
    assert old in located.message
    assert found.pair is None


def test_an_output_that_is_gone(tmp_path: Path) -> None:
    model = write_model(tmp_path, NAMED)
    right = lower(model).save(tmp_path / "net")
    graph = files.read_net(right.param, right.bin).graph
    graph.outputs = [blob for blob in graph.outputs if blob.name != "z"]
    graph.remove(graph.layers[-1])
    files.write_net(graph, tmp_path / "wrong.param", right.bin)
    found = bisect(model, tmp_path / "wrong.param", right.bin, manifest=read_manifest(right.manifest))
    located = present(found.located)
    assert located.layer.type == "UnaryOp"
    assert located.message == "the net has no blob 'z': it lacks this layer"
    assert [read.blob for read in located.inputs] == ["y"]


def test_an_output_that_is_not_one_without_a_manifest(tmp_path: Path) -> None:
    _, located = bisected_lines(tmp_path, NAMED, "ReLU r 1 1 x 1", "UnaryOp n 1 1 1 z 0=1")
    assert (located.layer.name, located.blob, located.value) == ("r", "1", "y")


@rewrite(op("Sigmoid", "sigmoid"), exact=False, purpose="a fault")
def break_sigmoid(sigmoid: Layer) -> Layer:
    """x ── Sigmoid ──   ⇒   x ── TanH ──"""
    require(sigmoid.type == "Sigmoid", "it is another layer")
    return sigmoid.having(type="TanH")


def test_the_rewrite_that_breaks_a_net_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path, SMALL)
    right = bisect_passes(model)
    assert right.report.ok
    assert (right.number, right.event) == (None, None)
    assert right.rewrites > 0
    monkeypatch.setattr(entry_points, "installed_passes", lambda: (break_sigmoid,))
    found = bisect_passes(model)
    assert not found.report.ok
    assert present(found.event).pass_name == "break_sigmoid"
    assert found.rewrites > 1
    assert bisect_passes(model, skip=["break_sigmoid"]).report.ok


def test_a_net_that_is_wrong_without_rewrites(tmp_path: Path) -> None:
    feeds = {"x": np.asarray(SINE_AT, np.float32)}
    found = bisect_passes(write_model(tmp_path, SINE), verification=Verification(feeds=feeds))
    assert (found.number, found.event, found.report.ok) == (0, None, False)


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with a wrong net and its manifest, and the name of the layer."""
    folder = tmp_path_factory.mktemp("wrong")
    _, layer = planted(folder, "residual.ts", "slope")
    (folder / "wrong.json").write_bytes((folder / "net.ncnn.json").read_bytes())
    return folder, layer.name


def test_the_command(wrong: tuple[Path, str]) -> None:
    folder, name = wrong
    ended = run(folder, "bisect", "model.onnx", "wrong.param", "wrong.bin", "--modes", "fp16", "--write", "pair")
    assert ended.code == 3
    lines = ended.out.splitlines()
    assert "pair: pair/part.onnx (1 nodes) and pair/part.param (1 layers) are as wrong" in lines
    words = next(line for line in lines if line.startswith("try: ")).split()[2:]
    assert run(folder, *words).code == 3
    at = next(number for number, line in enumerate(lines) if line.startswith("first wrong layer: "))
    assert lines[at] == f"first wrong layer: ReLU '{name}', its output '{name}_output_0' in fp16"
    assert lines[at + 1].startswith("reason: off by up to ")
    assert lines[at + 3] == f"made from: {name}"
    assert lines[-1] == "different: 0 layers gone, 0 layers added, 1 layers changed"


def test_json(wrong: tuple[Path, str]) -> None:
    folder, name = wrong
    ended = run(folder, "bisect", "model.onnx", "wrong.param", "wrong.bin", "--json")
    data = json.loads(ended.out)
    assert (ended.code, data["ok"], data["located"]["layer"]["name"]) == (3, False, name)
    assert [read["status"] for read in data["located"]["inputs"]] == ["right"]


def test_a_right_net(wrong: tuple[Path, str]) -> None:
    right = run(wrong[0], "bisect", "model.onnx", "net.ncnn.param", "net.ncnn.bin")
    assert (right.code, right.err) == (0, "")


def test_the_command_with_passes(tmp_path: Path) -> None:
    write_model(tmp_path, SMALL)
    ended = run_well(tmp_path, "bisect", "--passes", "model.onnx")
    assert ended.out.splitlines()[-1].startswith("right: the net is right with all ")


@pytest.mark.parametrize("words", [["model.onnx"], ["--passes", "model.onnx", "model.onnx", "model.onnx"]])
def test_wrong_usage(tmp_path: Path, words: list[str]) -> None:
    write_model(tmp_path, SMALL)
    assert run(tmp_path, "bisect", *words).code == 2
