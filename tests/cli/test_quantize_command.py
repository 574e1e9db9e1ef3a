"""`quantize`, with the options of `convert`."""

import json
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


def test_an_int8_net_with_options_of_a_conversion(folder: Path) -> None:
    words = ("--data", "data.npz", "--all", "--budget", "30dB", "--outputs", "s")
    found = json.loads(run(folder, "quantize", "cnn.onnx", "-o", "net", *words, "--json", "--report", "page.html").out)
    assert found["decibels"] > 30
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
    words = ("--data", "data.npz", "--all", "--budget", "150dB")
    made = run(folder, "quantize", "cnn.onnx", "-o", "net", *words)
    assert made.code == 3
    assert "no layer can be int8 with a budget of 150 dB" in made.err
    assert names(folder) == {"cnn.onnx", "data.npz"}
    made = run(folder, "quantize", "cnn.onnx", "-o", "net", *words, "--keep-failed")
    assert (made.code, "missed: net.ncnn.param is " in made.out, "inf" in made.out) == (3, True, False)
    graph = read_net(folder / "net.ncnn.param", folder / "net.ncnn.bin").graph
    assert any(layer.params.get("int8_scale_term") for layer in graph)


def test_options_that_do_not_fit(folder: Path) -> None:
    assert "needs samples" in refused(folder, "quantize", "cnn.onnx", "-o", "net")
    assert "onnx2ncnn-opt quantize MODEL" in refused(folder, "convert", "cnn.onnx", "--quantize")
    run(folder, "convert", "cnn.onnx", "-o", "float", "--no-verify")
    words = ("float.ncnn.param", "-o", "net", "--data", "data.npz")
    assert "outputs, tail, verification of a conversion: there is none of a net" in refused(
        folder, "quantize", *words, "--tail", "never", "--outputs", "y", "--rtol", "1e-3"
    )


def test_a_model_that_needs_options(folder: Path) -> None:
    """The error has the command that works, as that of `convert`."""
    model = parsed("(float[1,3,H,W] x) => (float[1,3,1024] y) { y = Reshape(x, s) }")
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, 3, 1024]), "s"))
    onnx.save(model, folder / "fixed.onnx")
    ended = run(folder, "quantize", "fixed.onnx", "-o", "net", "--data", "data.npz")
    assert (ended.code, "this works: onnx2ncnn-opt quantize fixed.onnx" in ended.err) == (2, True), ended.err
