"""Names and order of inputs and outputs, as programs that know nothing but ncnn see them.

The order in fixtures/models and fixtures/heads: test_convert.py and test_heads.py, which save these nets anyway.
"""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnx2ncnn_opt import Net
from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.api.optimize import optimize
from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.manifest import read_manifest
from onnx2ncnn_opt.param.splits import list_layers
from onnx2ncnn_opt.param.text import format_param
from testing.command import run_well
from testing.exports import ROOT
from testing.models import write_model
from testing.op_cases import load_cases
from testing.worker import listed
from tests.quantization.test_quantize import cnn, data

# The layers have another order than the outputs.
THREE = """(float[1, 4, 5] x) => (float[1, 4, 5] first, float[1, 4, 5] second, float[1, 4, 5] third) {
    t = Relu(x)
    third = Neg(t)
    second = Exp(x)
    first = Sigmoid(t)
}"""
CHAIN = "(float[4, 5] x) => (float[4, 5] y, float[4, 5] z) { z = Relu(x) y = Sigmoid(z) }"


def test_layers_move_for_the_order(tmp_path: Path) -> None:
    lower(write_model(tmp_path, THREE)).save(tmp_path / "net")
    assert listed(tmp_path / "net.ncnn.param") == (["x"], ["first", "second", "third"])
    optimized = optimize(tmp_path / "net.ncnn.param", verification=None)
    assert format_param(optimized.graph) == (tmp_path / "net.ncnn.param").read_text()


@pytest.mark.parametrize("file", ["lists", "recurrent", "topk"])
def test_the_order_of_ncnn_is_known(tmp_path: Path, file: str) -> None:
    """The summary compares this list with the model's; a layer's output that nothing reads is in ncnn's list too."""
    lengths = []
    for case in load_cases():
        if case.file != file or case.result.startswith("refused"):
            continue
        model = case.model()
        if len(model.graph.output) > 1:
            conversion = lower(model)
            conversion.save(tmp_path / "net")
            outputs = list_layers(conversion.graph).outputs
            assert listed(tmp_path / "net.ncnn.param")[1] == [*outputs], case.title
            lengths.append(len(outputs) - len(model.graph.output))
    assert lengths
    assert min(lengths) == 0


def test_another_order_is_said(tmp_path: Path) -> None:
    write_model(tmp_path, CHAIN)
    assert "note: ncnn lists the outputs as z, y: take them by name" in run_well(tmp_path, "convert", "model.onnx").out
    write_model(tmp_path, THREE)
    assert "ncnn lists" not in run_well(tmp_path, "convert", "model.onnx").out


def test_names_of_pnnx(tmp_path: Path) -> None:
    write_model(tmp_path, THREE)
    run_well(tmp_path, "convert", "model.onnx", "-o", "net", "--blob-names", "pnnx")
    assert listed(tmp_path / "net.ncnn.param") == (["in0"], ["out0", "out1", "out2"])
    tops = [line.split()[-1] for line in (tmp_path / "net.ncnn.param").read_text().splitlines() if "Split" in line]
    assert all(top.replace("_", "").isdecimal() or top.startswith("in0_") for top in tops)
    entries = json.loads((tmp_path / "net.ncnn.json").read_text())["outputs"]
    assert [(entry["name"], entry["blob"]) for entry in entries] == [
        ("first", "out0"),
        ("second", "out1"),
        ("third", "out2"),
    ]
    x = np.linspace(-2, 2, 20, dtype=np.float32).reshape(1, 4, 5)
    with Net(tmp_path / "net.ncnn.param") as net:
        np.testing.assert_allclose(net.run({"x": x})["second"], np.exp(x), rtol=1e-6)
    for command in ("verify", "bisect"):
        run_well(tmp_path, command, "model.onnx", "net.ncnn.param", "net.ncnn.bin")
    with pytest.raises(UsageError, match="blob_names has to be one of onnx, pnnx, not 'ncnn'"):
        lower(tmp_path / "model.onnx", blob_names="ncnn")


def test_names_of_pnnx_for_a_net_that_exists(tmp_path: Path) -> None:
    lower(write_model(tmp_path, THREE)).save(tmp_path / "net")
    ended = run_well(tmp_path, "optimize", "net.ncnn.param", "-o", "new", "--blob-names", "pnnx")
    names = {"x": "in0", "first": "out0", "second": "out1", "third": "out2"}
    assert ended.lines("blob") == [[blob, "is", name] for blob, name in names.items()]
    assert listed(tmp_path / "new.param") == (["in0"], ["out0", "out1", "out2"])


def test_names_of_pnnx_in_an_int8_net(tmp_path: Path) -> None:
    onnx.save(cnn(), tmp_path / "cnn.onnx")
    np.savez(tmp_path / "data.npz", **data())
    run_well(tmp_path, "quantize", "cnn.onnx", "-o", "net", "--data", "data.npz", "--all", "--blob-names", "pnnx")
    assert "8=" in (tmp_path / "net.ncnn.param").read_text()
    inputs, outputs = listed(tmp_path / "net.ncnn.param")
    assert inputs == ["in0"]
    assert outputs == [f"out{i}" for i in range(len(outputs))]


def test_inner_values_before_a_tail_are_no_outputs_of_the_model(tmp_path: Path) -> None:
    """The summary names the blobs that other programs see; output1 is in the net."""
    path = ROOT / "fixtures" / "heads" / "segment_nms-hw.dyn.onnx"
    ended = run_well(tmp_path, "convert", path, "-o", "net", "--no-verify", "--blob-names", "pnnx")
    assert [entry.blob for entry in read_manifest(tmp_path / "net.ncnn.json").outputs] == ["tail0", "out1"]
    assert "load the .param alone get tail0 in place of output0: values before the tail" in ended.out
