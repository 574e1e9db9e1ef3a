"""`quantize` and `convert --quantize`: one mechanism, with the options of both."""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnx2ncnn_opt.manifest import read_manifest
from onnx2ncnn_opt.param.files import read_net
from testing.command import names, net_files, refused, run, shown_nets
from testing.models import parsed
from tests.quantization.test_quantize import cnn, data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model and samples."""
    onnx.save(cnn(), tmp_path / "cnn.onnx")
    np.savez(tmp_path / "data.npz", **data())
    return tmp_path


def test_convert_makes_an_int8_net_with_options_of_both(folder: Path) -> None:
    words = ("--quantize", "--data", "data.npz", "--all", "--budget", "30dB", "--outputs", "s")
    found = json.loads(run(folder, "convert", "cnn.onnx", "-o", "net", *words, "--json", "--report", "page.html").out)
    assert found["results"][0]["quantization"]["decibels"] > 30
    assert names(folder) == {"cnn.onnx", "data.npz", "page.html"} | net_files("net")
    manifest = read_manifest(folder / "net.ncnn.json")
    assert manifest.int8 is not None
    forms = [row.form.removesuffix(", no winograd") for row in manifest.int8.layers]  # the clock decides on winograd
    assert (forms, {row.bits for row in manifest.int8.layers}) == (["a scale for each row"] * 3, {8})
    (shown,) = shown_nets(folder / "page.html")
    assert [row["layer"] for row in shown["int8"]["layers"]] == [row.layer for row in manifest.int8.layers]
    assert [entry.name for entry in manifest.outputs] == ["s"]
    graph = read_net(folder / "net.ncnn.param", folder / "net.ncnn.bin").graph
    assert sum(bool(layer.params.get("int8_scale_term")) for layer in graph) == 3


def test_a_deep_net(tmp_path: Path) -> None:
    """Python's copy of a graph goes as deep as its longest path."""
    steps = " ".join(f"v{i + 1} = Sigmoid(v{i})" for i in range(300))
    model = parsed(
        f"(float[1,3,4,4] x) => (float[1,2,4,4] y) {{ v0 = Conv<kernel_shape = [1,1]>(x, w) {steps} "
        "y = Identity(v300) }"
    )
    model.graph.initializer.append(numpy_helper.from_array(np.ones((2, 3, 1, 1), np.float32), "w"))
    onnx.save(model, tmp_path / "deep.onnx")
    np.savez(tmp_path / "data.npz", **data(10, (3, 4, 4)))
    assert run(tmp_path, "quantize", "deep.onnx", "-o", "net", "--data", "data.npz", "--all").code == 0


def test_a_budget_out_of_reach_is_exit_code_3(folder: Path) -> None:
    words = ("--quantize", "--data", "data.npz", "--all", "--budget", "150dB")
    made = run(folder, "convert", "cnn.onnx", "-o", "net", *words)
    assert made.code == 3
    assert "no layer can be int8 with a budget of 150 dB" in made.err
    assert names(folder) == {"cnn.onnx", "data.npz"}
    made = run(folder, "convert", "cnn.onnx", "-o", "net", *words, "--keep-failed")
    assert (made.code, "missed: net.ncnn.param is " in made.out, "inf" in made.out) == (3, True, False)
    graph = read_net(folder / "net.ncnn.param", folder / "net.ncnn.bin").graph
    assert any(layer.params.get("int8_scale_term") for layer in graph)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data", "data.npz"), "belong to --quantize"),
        (("--budget", "40dB"), "belong to --quantize"),
        (("--quantize",), "needs samples"),
        (("--quantize", "--data", "data.npz", "--no-verify"), "not with --no-verify"),
    ],
)
def test_options_that_do_not_fit(folder: Path, words: tuple[str, ...], message: str) -> None:
    assert message in refused(folder, "convert", "cnn.onnx", *words)


def test_several_models(folder: Path) -> None:
    onnx.save(cnn(), folder / "other.onnx")
    words = ("--quantize", "--data", "data.npz", "--all")
    ended = run(folder, "convert", "cnn.onnx", "other.onnx", "-o", "nets/", *words)
    assert (ended.code, ended.out.count("ok")) == (0, 4)
    assert len(re.findall(r"result: (?:cnn|other).onnx +ok, [\d.]+ dB", ended.out)) == 2
    assert names(folder / "nets") == net_files("cnn") | net_files("other")
