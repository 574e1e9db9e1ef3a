"""Differences of two nets, on nets of real models with changes made on purpose."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnx2ncnn_opt.api.diff import ParamChange, Renamed, diff, diff_graphs
from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.shapes import infer_graph
from onnx2ncnn_opt.param import files
from onnx2ncnn_opt.rewrite.events import LayerRef
from testing import present
from testing.command import Ended, run
from testing.exports import ROOT, refilled
from testing.faults import ADDED, DELETED, FAULTS, places, plant
from testing.handmade import raw, write_net

MODELS = ("residual.ts", "shuffle.dyn", "attention.ts", "mobilenet_v3_small.tsbn", "detector.ts")


@pytest.fixture(scope="module", params=MODELS)
def net(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The .param of a converted model."""
    model: onnx.ModelProto = refilled(ROOT / "fixtures" / "models" / f"{request.param}.onnx")
    return lower(model).save(tmp_path_factory.mktemp("net") / "net").param


def graph(param: Path) -> Graph:
    found = files.read_net(param, files.bin_beside(param)).graph
    infer_graph(found)
    return found


def test_names_do_not_count(net: Path, tmp_path: Path) -> None:
    renamed = graph(net)
    for number, layer in enumerate(renamed):
        layer.name = f"l{number}"
        for blob in layer.outputs:
            blob.name = f"b{len(renamed) - number}_{blob.name[::-1]}"
    files.write_net(renamed, tmp_path / "other.param", tmp_path / "other.bin", binary=True)
    found = diff(net, tmp_path / "other.param")
    assert found.equal
    assert found.layers == (len(renamed), len(renamed))
    assert [entry.kind for entry in found.renamed].count("output") == len(graph(net).outputs)


def planted(net: Path) -> Iterator[tuple[str, Graph, Layer]]:
    right = graph(net)
    for kind in (*FAULTS, *ADDED, DELETED):
        rng = np.random.default_rng(len(kind))
        found = places(right, kind)
        for index in sorted(rng.choice(found, min(2, len(found)), replace=False)) if found else ():
            wrong = graph(net)
            plant(wrong, kind, int(index), rng)
            yield kind, wrong, right.layers[index]


def test_a_fault_is_the_only_difference(net: Path) -> None:
    count = 0
    for kind, wrong, layer in planted(net):
        found = diff_graphs(graph(net), wrong)
        ref = LayerRef(layer.type, layer.name)
        assert not found.equal, kind
        if kind in FAULTS:
            assert (found.gone, found.added) == ((), ()), kind
            assert [change.before for change in found.changed] == [ref], kind
        elif kind == DELETED:
            assert ref in found.gone or any(change.before == ref for change in found.changed), kind
            assert len(found.gone) == 1, kind
        else:
            assert found.gone == (), kind
            assert all(".planted" in added.name for added in found.added), kind
            assert len(found.added) == len(wrong) - len(graph(net)), kind
        count += 1
    assert count > 10


def test_other_weights_and_two_more_layers(net: Path) -> None:
    """Nothing but the structure is left to go by, from the inputs and from the outputs."""
    other = graph(net)
    rng = np.random.default_rng(3)
    for layer in other:
        for name, weight in layer.weights.stored_items():
            if weight.is_float:
                layer.weights[name] = rng.standard_normal(weight.data.size, np.float32)
    inner = [layer for layer in other if len(layer.outputs) == 1 and layer.output.users and layer.type != "Input"]
    for number in (len(inner) // 3, 2 * len(inner) // 3):
        blob = inner[number].output
        made = Blob(f"new{number}")
        users = blob.users
        other.add(Layer("ReLU", made.name, (blob,), (made,), {"slope": 0.125}), before=users[0])
        for user in users:
            other.set_inputs(user, [made if read is blob else read for read in user.inputs])
    found = diff_graphs(graph(net), other)
    assert found.gone == ()
    assert [added.name[:3] for added in found.added] == ["new", "new"]
    assert not any(change.params for change in found.changed)


def command(folder: Path, *args: str) -> Ended:
    return run(folder, "diff", *args)


LINES = (
    "Input data 0 1 data",
    "Convolution c 1 1 data a 0=1 1=1 6=2 5=1",
    "ReLU r 1 1 a b 0=0.1",
    "Softmax s 1 1 b out",
)
WEIGHTS = bytes(4) + raw([0.5, -2.0], [0.25])


def test_the_command(tmp_path: Path) -> None:
    write_net(tmp_path, *LINES, weights=WEIGHTS, stem="a")
    changed = (LINES[0].replace("data", "x"), LINES[1].replace(" data ", " x ") + " 3=2", *LINES[2:])
    write_net(tmp_path, *changed, weights=bytes(4) + raw([0.5, -1.75], [0.25]), stem="b")
    ended = command(tmp_path, "a.param", "b.param")
    assert (ended.code, ended.err) == (1, "")
    lines = ended.out.splitlines()
    assert lines[0] == "nets: a.param (4 layers), b.param (4 layers)"
    assert lines[1].split() == ["changed:", "Convolution", "'c'", "stride_w", "1", "2"]
    assert lines[2].startswith("changed: Convolution 'c'  weight")
    assert lines[2].endswith("  up to 0.25 of 2")
    assert lines[3:] == ["renamed: input data is x", "different: 0 layers gone, 0 layers added, 1 layers changed"]
    equal = command(tmp_path, "a.param", "a.param", "--bins", "a.bin", "a.bin")
    assert (equal.code, equal.out.splitlines()[-1]) == (0, "equal: names aside, both nets are the same")


def test_json(tmp_path: Path) -> None:
    write_net(tmp_path, *LINES, weights=WEIGHTS, stem="a")
    write_net(tmp_path, *LINES[:2], LINES[3].replace(" b ", " a "), weights=WEIGHTS, stem="b")
    ended = command(tmp_path, "a.param", "b.param", "--json")
    data = json.loads(ended.out)
    assert (ended.code, data["equal"], data["layers"], data["added"]) == (1, False, [4, 3], [])
    assert data["gone"] == [{"type": "ReLU", "name": "r"}]
    (change,) = data["changed"]
    assert (change["before"]["name"], change["inputs"][0]["after"]["name"]) == ("s", "c")


def test_broken_files_have_exit_code_2(tmp_path: Path) -> None:
    write_net(tmp_path, *LINES, weights=WEIGHTS, stem="a")
    write_net(tmp_path, *LINES, weights=WEIGHTS[:8], stem="short")
    (tmp_path / "alone.param").write_text((tmp_path / "a.param").read_text())
    (tmp_path / "none.param").write_text("nothing")
    for other, said in (("short", "short.bin: "), ("alone", "--bins"), ("none", "none.param")):
        ended = command(tmp_path, "a.param", f"{other}.param")
        assert (ended.code, ended.out) == (2, "")
        assert said in ended.err
    with pytest.raises(UsageError, match="no weights at"):
        diff(tmp_path / "a.param", tmp_path / "alone.param")


def test_weights_in_another_encoding_and_nan(tmp_path: Path) -> None:
    a = write_net(tmp_path, *LINES, weights=WEIGHTS, stem="a")
    half = (0x01306B47).to_bytes(4, "little") + np.array([0.5, -2.0], np.float16).tobytes() + raw([np.nan])
    b = write_net(tmp_path, *LINES, weights=half, stem="b")
    found = diff(a[0], b[0])
    weight, bias = found.changed[0].weights
    assert (present(weight.before).encoding, present(weight.after).encoding) == ("fp32", "fp16")
    assert weight.max_abs == 0.0
    assert (bias.max_abs, bias.not_finite) == (None, 1)


def test_default_values_are_no_change(tmp_path: Path) -> None:
    a = write_net(tmp_path, *LINES, weights=WEIGHTS, stem="a")
    stated = LINES[1] + " 2=1 3=1 11=1 13=1"
    b = write_net(tmp_path, LINES[0], stated, *LINES[2:], weights=WEIGHTS, stem="b")
    assert diff(a[0], b[0]).equal
    c = write_net(tmp_path, *LINES[:2], LINES[2].replace("0.1", "0.2"), LINES[3] + "x", weights=WEIGHTS, stem="c")
    found = diff(a[0], c[0])
    assert found.changed[0].params == (ParamChange("slope", float(np.float32(0.1)), float(np.float32(0.2))),)
    assert found.renamed == (Renamed("output", "out", "outx"),)
