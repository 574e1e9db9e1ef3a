import json
from pathlib import Path

import onnx
import pytest

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.api.verify import manifest_beside
from onnx2ncnn_opt.ir.cost import multiplications, parameters
from onnx2ncnn_opt.manifest import read_manifest
from onnx2ncnn_opt.param.files import write_net
from testing.command import names, run, run_well
from testing.models import parsed, write_model
from testing.op_cases import fill_weights


def test_a_model(small: Path) -> None:
    ended = run_well(small, "inspect", "model.onnx")
    assert ended.out.splitlines() == [
        "file: model.onnx (opset 18, unknown)",
        "input: x float32[1, 3, 8, 8]",
        "output: y float32[1, 2, 8, 8]",
        "output: z float32[1, 2, 8, 8]",
        *(f"operator: {name.ljust(7)}  1" for name in ("Conv", "Relu", "Sigmoid", "Mul", "Softmax")),
        "parameters: 6",
        "weights: 24 B",
        "layers: 7 in ncnn",
        "multiply-adds: 384",
        "peak memory of blobs: 1.5 kB",
        "ncnn: 20240102 or newer runs it",
    ]
    assert names(small) == {"model.onnx"}


def test_json_of_a_model_and_of_its_net(tmp_path: Path) -> None:
    write_model(tmp_path, "(float[n, 3, h, 8] x) => (float[n, 3, h, 8] y) { y = Relu(x) }")
    data = json.loads(run(tmp_path, "inspect", "model.onnx", "--json").out)
    assert data["format_version"] == 1
    assert data["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["n", 3, "h", 8]}]
    assert (data["dynamic"], data["operators"], data["refused"]) == (["n", "h"], {"Relu": 1}, [])
    assert (data["layers"], data["macs"], data["peak_memory"]) == (2, 0, None)
    bound = json.loads(run(tmp_path, "inspect", "model.onnx", "--json", "--shape", "x:1,3,4,8").out)
    assert (bound["dynamic"], bound["peak_memory"]) == ([], 384)
    assert run(tmp_path, "convert", "model.onnx", "--no-verify", "--shape", "x:1,3,?,8").code == 0
    net = json.loads(run(tmp_path, "inspect", "model.ncnn.param", "--json").out)
    assert net["format"] == "param"
    assert (net["operators"], net["weights"]) == ({"Input": 1, "ReLU": 1}, 0)
    assert (net["inputs"], net["dynamic"]) == ([{"name": "x", "dtype": "float32", "shape": [1, 3, "h", 8]}], ["h"])
    of_mats = ("inspect", "model.ncnn.param", "--json", "--shape", "x:3,4,8")
    assert json.loads(run(tmp_path, *of_mats).out)["inputs"] == [{"name": "x", "dtype": None, "shape": [3, 4, 8]}]
    (tmp_path / "model.ncnn.json").rename(tmp_path / "away.json")
    others = json.loads(run(tmp_path, "inspect", "model.ncnn.param", "--json").out)
    assert others["inputs"] == [{"name": "x", "dtype": None, "shape": None}]
    (tmp_path / "model.ncnn.bin").unlink()
    assert json.loads(run(tmp_path, "inspect", "model.ncnn.param", "--json").out)["weights"] is None
    manifest = read_manifest(tmp_path / "away.json")
    assert manifest.least_ncnn == str(net["least_ncnn"])


def test_refused_nodes(tmp_path: Path) -> None:
    write_model(tmp_path, "(float[1, 4, 4] x) => (float[1] y, float[1, 4, 4] z) { z = Relu(x) y = Det(z) }")
    ended = run_well(tmp_path, "inspect", "model.onnx")
    assert "refused: Det 'y': ncnn has no equivalent of this operator" in ended.out
    assert "hint: convert the 1 of 2 nodes before them with --outputs z" in ended.out
    assert "output: y float32[1]" in ended.out
    data = json.loads(run(tmp_path, "inspect", "model.onnx", "--json").out)
    assert [node["operator"] for node in data["refused"]] == ["Det"]
    assert data["layers"] is None


def test_advice_is_a_hint(tmp_path: Path) -> None:
    model = parsed("(float[2, 3] x, int64[2] s) => (float y, z) { r = Reshape(x, s) y = Celu(r) z = Celu(x) }")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(model, tmp_path / "model.onnx")
    lines = run_well(tmp_path, "inspect", "model.onnx").out.splitlines()
    assert lines[-1] == "hint: Reshape 'r' can follow a net, but Celu 'y' depends on it and needs a net again"
    assert [line for line in lines if line.startswith("output: ")] == [
        "output: y float32 of unknown shape",
        "output: z of unknown shape",
    ]


def test_files_that_are_neither_model_nor_net(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_bytes(b"nothing")
    assert run(tmp_path, "inspect", "a.onnx").code == 1
    (tmp_path / "a.param").write_text("nothing")
    assert run(tmp_path, "inspect", "a.param").code == 1
    assert run(tmp_path, "inspect", "b.onnx").code == 2


@pytest.mark.parametrize(
    ("graph", "macs", "elements"),
    [
        ("(float[1, 4, 9, 9] x) => (float y) <float[8, 4, 3, 3] w> { y = Conv(x, w) }", 8 * 4 * 9 * 49, 288),
        ("(float[1, 4, 9, 9] x) => (float y) <float[4, 1, 3, 3] w> { y = Conv<group = 4>(x, w) }", 4 * 9 * 49, 36),
        ("(float[1, 4, 5, 5] x) => (float y) <float[4, 6, 2, 2] w> { y = ConvTranspose(x, w) }", 4 * 6 * 4 * 25, 96),
        ("(float[1, 6] x) => (float y) <float[6, 5] w> { y = MatMul(x, w) }", 30, 30),
        ("(float[1, 7, 6] x) => (float y) <float[6, 5] w> { y = MatMul(x, w) }", 7 * 30, 30),
        ("(float[2, 3, 4, 5] x, float[2, 3, 5, 6] z) => (float y) { y = MatMul(x, z) }", 6 * 4 * 5 * 6, 0),
        ("(float[1, 4] x) => (float y) { y = Relu(x) }", 0, 0),
        ("(float[1, n, 6] x) => (float y) <float[6, 5] w> { y = MatMul(x, w) }", None, 30),
    ],
)
def test_costs_of_a_net(graph: str, macs: int | None, elements: int) -> None:
    model = parsed(graph, 17)
    fill_weights(model, 7)
    net = lower(model).graph
    assert (multiplications(net), parameters(net)) == (macs, elements)


def test_a_binary_net_with_a_manifest(tmp_path: Path) -> None:
    model = write_model(tmp_path, "(float[1, 3, 4, 8] x) => (float[1, 3, 4, 8] y) { y = Relu(x) }")
    conversion = lower(model)
    names = write_net(conversion.graph, tmp_path / "net.param.bin", tmp_path / "net.bin", binary=True)
    renamed = json.loads(conversion.manifest().to_json())
    renamed["inputs"][0]["blob"], renamed["outputs"][0]["blob"] = (
        names[port.blob] for port in (*conversion.inputs, *conversion.outputs)
    )
    (tmp_path / "net.json").write_text(json.dumps(renamed))
    data = json.loads(run(tmp_path, "inspect", "net.param.bin", "--json").out)
    assert data["inputs"] == [{"name": "x", "dtype": "float32", "shape": [1, 3, 4, 8]}]
    manifest, note = manifest_beside(tmp_path / "net.param.bin", model)
    assert manifest is not None, note
