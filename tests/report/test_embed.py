"""Nets as C++ headers: the arrays hold the files, and ncnn computes the same from them."""

import re
from collections.abc import Callable
from pathlib import Path

import ncnn  # type: ignore[import-untyped]
import numpy as np
import pytest

from onnx2ncnn_opt import Net
from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.manifest import read_manifest
from onnx2ncnn_opt.param.param_bin import parse_param_bin
from onnx2ncnn_opt.report.embed import EmbeddedNet, embed
from onnx2ncnn_opt.report.example import example
from testing.command import refused, run_well
from testing.exports import ROOT
from testing.models import parsed


def array(net: EmbeddedNet, name: str) -> bytes:
    """Return what a compiler reads."""
    match = re.search(rf"static const int {name}_size = (\d+);\nalignas\(4\).*? {name}\[\] = {{(.*?)}};", net.mem, re.S)
    assert match
    data = bytes(map(int, match[2].split(",")))[: int(match[1])]
    assert len(data) == int(match[1])
    return data


def ids(net: EmbeddedNet) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"const int (\w+) = (\d+);", net.ids)}


def test_ncnn_computes_the_same_from_the_arrays(tmp_path: Path) -> None:
    files = lower(ROOT / "fixtures" / "models" / "detector.tsbn.onnx").save(tmp_path / "my net")
    manifest = read_manifest(files.manifest)
    net = embed(files.param, files.bin)
    assert net.name == "my_net"
    assert array(net, "my_net_bin") == files.bin.read_bytes()
    (tmp_path / "mem.param.bin").write_bytes(array(net, "my_net_param_bin"))
    (tmp_path / "mem.bin").write_bytes(array(net, "my_net_bin"))
    loaded, numbers = ncnn.Net(), ids(net)
    for option in ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic"):
        setattr(loaded.opt, option, False)
    assert loaded.load_param_bin(str(tmp_path / "mem.param.bin")) == 0
    assert loaded.load_model(str(tmp_path / "mem.bin")) == 0
    x = np.random.default_rng(0).standard_normal((1, 3, 64, 64), np.float32)
    extractor = loaded.create_extractor()
    extractor.input(numbers[net.blobs[manifest.inputs[0].blob].split("::")[1]], ncnn.Mat(x[0]).clone())
    with Net(tmp_path / "my net") as reference:
        results = reference.run({manifest.inputs[0].name: x})
    for entry in manifest.outputs:
        code, mat = extractor.extract(numbers[net.blobs[entry.blob].split("::")[1]])
        assert code == 0
        np.testing.assert_array_equal(np.array(mat)[None], results[entry.name])
    assert numbers["LAYER_in0"] == 0
    assert len(numbers) == len({*numbers}) > 40


def test_custom_layers_and_feature_masks_stay(tmp_path: Path) -> None:
    text = """(float[1, 8] x) => (float[1, 8] y) <float[1, 8] a, float[1, 8] b>
        { a = made.up.Op<k = 3>(x) b = made.up.Two(a) c = Exp(b) y = made.up.Op<k = 4>(c) }"""
    made = lower(parsed(text, 17), custom=["made.up::Op=My.Layer", "made.up::Two=Other"])
    next(layer for layer in made.graph if layer.type == "UnaryOp").params["featmask"] = 7
    files = made.save(tmp_path / "3net")
    net = embed(files.param, files.bin)
    assert (net.name, net.custom) == ("net3net", ("My_Layer", "Other"))
    assert array(net, "net3net_bin") == b""
    numbers = ids(net)
    assert (numbers["TYPE_My_Layer"], numbers["TYPE_Other"]) == (256, 257)
    graph = parse_param_bin(array(net, "net3net_param_bin")).graph
    found = [(layer.type, dict(layer.params)) for layer in graph]
    assert found[1:] == [
        ("#256", {0: 3}),
        ("#257", {}),
        ("UnaryOp", {"op_type": 7, "featmask": 7}),
        ("#256", {0: 4}),
    ]
    program = example(made.manifest(), files.param, files.bin, language="cpp", embedded=net)
    assert "net.register_custom_layer(net3net_id::TYPE_My_Layer, My_Layer_layer_creator);" in program


def test_names_that_are_no_identifiers_stay_apart(tmp_path: Path) -> None:
    files = lower(parsed('(float[1, 8] "a/b") => (float[1, 8] "a.b") { "a.b" = Abs("a/b") }', 17)).save(tmp_path / "n")
    net = embed(files.param, files.bin)
    assert sorted(net.blobs.items()) == [("a.b", "n_id::BLOB_a_b_1"), ("a/b", "n_id::BLOB_a_b")]


def with_a_custom_layer(folder: Path) -> None:
    text = "(float[1, 8] x) => (float[1, 8] y) { a = Abs(x) y = made.up.Op(a) }"
    lower(parsed(text, 17), custom=["made.up::Op=My.Layer"]).save(folder / "net")


def test_the_command_writes_three_files(tmp_path: Path) -> None:
    with_a_custom_layer(tmp_path)
    (tmp_path / "app").mkdir()
    ended = run_well(tmp_path, "example", "net", "--cpp", "--embed", "-o", "app/main.cpp")
    assert ended.out.split() == ["wrote:", "app/main.cpp", "wrote:", "app/net.mem.h", "wrote:", "app/net.id.h"]
    program = (tmp_path / "app" / "main.cpp").read_text()
    assert "net.load_param(net_param_bin) != net_param_bin_size || net.load_model(net_bin) != net_bin_size" in program
    assert "ex.input(net_id::BLOB_x, in0)" in program


def test_the_program_of_three_files_is_compiled(tmp_path: Path, compiles: Callable[[Path], None]) -> None:
    with_a_custom_layer(tmp_path)
    run_well(tmp_path, "example", "net", "--cpp", "--embed", "-o", "main.cpp")
    compiles(tmp_path / "main.cpp")


@pytest.mark.parametrize("options", [["--cpp"], ["--python", "-o", "main.py"]])
def test_wrong_usage(tmp_path: Path, options: list[str]) -> None:
    assert "give --cpp and -o FOLDER/main.cpp" in refused(tmp_path, "example", "net", "--embed", *options)
