"""Tensors in files beside the model: inside its folder only, mapped, and checked against their dims."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir
import pytest
from onnx import TensorProto, helper

from onnx2ncnn_opt.errors import ModelError
from onnx2ncnn_opt.onnx.read.load import load_model
from tests.onnx.test_load import CALLS, SMALL, WEIGHT, arrays, parse, write


def external(
    location: str, offset: object = None, length: object = None, dims: tuple[int, ...] = WEIGHT.shape
) -> onnx.ModelProto:
    """SMALL with the weight in another file."""
    model = parse(SMALL)
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        if value is not None:
            tensor.external_data.add(key=key, value=str(value))
    model.graph.initializer[0].CopyFrom(tensor)
    return model


@pytest.mark.parametrize("location", ["w.bin", "weights/deep/w.bin", "./w.bin"])
def test_inside_the_folder(location: str, tmp_path: Path) -> None:
    path = tmp_path / location
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * 7 + WEIGHT.tobytes() + b"tail")
    loaded = load_model(write(tmp_path, external(location, 7, 48)))
    np.testing.assert_array_equal(loaded.initializer("w"), WEIGHT)
    assert not loaded.initializer("w").flags.writeable


def test_links_that_stay_inside(tmp_path: Path) -> None:
    """A link to the data, in a folder that is one itself."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "data.bin").write_bytes(WEIGHT.tobytes())
    (tmp_path / "real" / "w.bin").symlink_to("data.bin")
    path = write(tmp_path / "real", external("w.bin"))
    (tmp_path / "link").symlink_to("real")
    for model in (path, tmp_path / "link" / "model.onnx"):
        np.testing.assert_array_equal(load_model(model).initializer("w"), WEIGHT)


@pytest.mark.parametrize(
    "location",
    ["../w.bin", "sub/../../w.bin", "..\\w.bin", "/etc/passwd", "C:\\w.bin", "\\\\host\\w", "", "w\0.bin"],
)
def test_no_path_leads_outside(location: str, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "w.bin").write_bytes(WEIGHT.tobytes())
    with pytest.raises(ModelError, match=r"tensor 'w'.*(inside the model's folder|without a location).*save the model"):
        load_model(write(inner, external(location)))


@pytest.mark.parametrize(("location", "link", "target"), [("w.bin", "w.bin", "data/w.bin"), ("s/w.bin", "s", "data")])
def test_no_link_leads_outside(location: str, link: str, target: str, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "w.bin").write_bytes(WEIGHT.tobytes())
    (tmp_path / "inner" / link).symlink_to(f"../{target}")
    with pytest.raises(ModelError, match=r"outside the model's folder.*put a copy"):
        load_model(write(tmp_path / "inner", external(location)))


def test_no_hard_link(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(WEIGHT.tobytes())
    os.link(tmp_path / "secret", tmp_path / "w.bin")
    with pytest.raises(ModelError, match="several hard links"):
        load_model(write(tmp_path, external("w.bin")))


@pytest.mark.parametrize(
    "make",
    [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("w.bin"), lambda path: None, Path.touch],
    ids=["folder", "pipe", "loop", "missing", "empty"],
)
def test_no_file(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "w.bin")
    with pytest.raises(ModelError, match=r"tensor 'w'.*'w\.bin'"):
        load_model(write(tmp_path, external("w.bin")))


@pytest.mark.parametrize(
    ("offset", "length", "dims", "message"),
    [
        (4, 48, (4, 3, 1, 1), "ends at byte 48"),
        (48, None, (4, 3, 1, 1), "ends at byte 48"),
        (2**63, 48, (4, 3, 1, 1), "ends at byte 48"),
        (-4, 48, (4, 3, 1, 1), r"the offset of external data 'w\.bin' is '-4', not a number"),
        (0, -48, (4, 3, 1, 1), r"the length of external data 'w\.bin' is '-48'"),
        ("many", 48, (4, 3, 1, 1), r"the offset of external data 'w\.bin' is 'many'"),
        (0, 44, (4, 3, 1, 1), "is 44 bytes at offset 0, but dims .* need 48"),
        (0, 48, (4, 3, 2, 1), "is 48 bytes at offset 0, but dims .* need 96"),
        (None, None, (4, 3, 2, 1), "ends at byte 48"),
        (None, None, (2**40, 2**40), "impossible dims"),
        (None, None, (-1, -12), "impossible dims"),
    ],
)
def test_bad_offsets(offset: object, length: object, dims: tuple[int, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(WEIGHT.tobytes())
    with pytest.raises(ModelError, match=message):
        load_model(write(tmp_path, external("w.bin", offset, length, dims)))


def test_a_model_from_memory_has_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "w.bin").write_bytes(WEIGHT.tobytes())
    monkeypatch.chdir(tmp_path)
    model = external("w.bin")
    for source in (model, model.SerializeToString(), onnx_ir.from_proto(model)):
        with pytest.raises(ModelError, match=r"tensor 'w' is in the file 'w\.bin'.*give the path"):
            load_model(source)
    loaded = load_model(onnx_ir.load(write(tmp_path, model)))  # onnx_ir remembers the folder
    np.testing.assert_array_equal(loaded.initializer("w"), WEIGHT)


def test_constants_of_nodes_functions_and_subgraphs(tmp_path: Path) -> None:
    model = parse(CALLS)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "ones.bin").write_bytes(np.ones(2, np.float32).tobytes())
    tensor = external("sub/ones.bin", dims=(2,)).graph.initializer[0]
    model.graph.node[2].attribute[0].t.CopyFrom(tensor)
    model.functions[0].node.insert(0, helper.make_node("Constant", [], ["k"], value=tensor))
    model.functions[0].node[1].input[0] = "k"
    model.graph.node[4].attribute[1].g.node.insert(0, helper.make_node("Constant", [], ["q"], value=tensor))
    model.graph.node[4].attribute[1].g.node[1].input[0] = "q"
    loaded = load_model(write(tmp_path, model))
    found = [array for array in arrays(loaded.graph, *loaded.graph.subgraphs()) if array.shape == (2,)]
    assert [array.tolist() for array in found] == [[1, 1]] * 3


def test_more_tensors_than_file_descriptors(tmp_path: Path) -> None:
    model = parse(SMALL)
    (tmp_path / "w.bin").write_bytes(np.arange(2000, dtype=np.float32).tobytes())
    for i in range(2000):
        tensor = external("w.bin", 4 * i, dims=()).graph.initializer[0]
        tensor.name = f"k{i}"
        model.graph.initializer.append(tensor)
    model.graph.node.append(helper.make_node("Sum", [f"k{i}" for i in range(2000)], ["sum"]))
    model.graph.output.append(helper.make_empty_tensor_value_info("sum"))
    before = len(os.listdir("/proc/self/fd"))
    loaded = load_model(write(tmp_path, model))
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert [float(loaded.initializer(f"k{i}")) for i in (0, 1, 1999)] == [0, 1, 1999]


def test_weights_are_mapped_not_read(tmp_path: Path) -> None:
    size = 200 * 2**20
    with open(tmp_path / "w.bin", "wb") as file:
        for _ in range(200):  # written, not sparse: pages of a hole could be shared
            file.write(b"\1" * 2**20)
    path = write(tmp_path, external("w.bin", dims=(size // 4 // 3, 3, 1, 1), length=size // 12 * 12))
    code = f"""
import resource, time
from onnx2ncnn_opt.onnx.read.load import load_model
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
loaded = load_model({str(path)!r})
w = loaded.initializer("w")
assert w[-1, 0, 0, 0] != 0 and loaded.initializer("w").base is not None
print(peak() - before)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert int(result.stdout) < 16 * 1024  # kB; reading would need 204,800
