"""Files of torch.export.save: what is data is copied, and what could run code is refused; torch itself is not needed.

What torch makes of the copies is in scripts/try_torch.py, which needs it.
"""

import copy
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import ModelError, UsageError
from onnx2ncnn_opt.onnx.read.pt2 import write_safe_copy

TENSOR = {"dtype": 7, "sizes": [{"as_int": 4}], "device": {"type": "cpu", "index": None}, "layout": 7}
SPEC = [1, {"type": "builtins.tuple", "context": "null", "children_spec": [{"type": None, "context": None}]}]
MODEL: dict[str, Any] = {
    "graph_module": {
        "graph": {
            "inputs": [{"as_tensor": {"name": "x"}}],
            "nodes": [
                {
                    "target": "torch.ops.aten.relu.default",
                    "inputs": [{"name": "self", "arg": {"as_tensor": {"name": "x"}}, "kind": 1}],
                    "metadata": {"stack_trace": 'File "/home/me/model.py", line 6'},
                    "name": "relu",
                }
            ],
            "sym_int_values": {
                "n": {"as_expr": {"expr_str": "Add(Symbol('s77', positive=True, integer=True), Integer(1))"}}
            },
        },
        "module_call_graph": [{"fqn": "", "signature": {"in_spec": json.dumps(SPEC), "out_spec": ""}}],
    },
    "guards_code": ["L['x'].size()[0] == 4"],
    "torch_version": "2.13.0+cpu",
}
WEIGHTS: dict[str, Any] = {"config": {"c.w": {"path_name": "weight_0", "use_pickle": False, "tensor_meta": TENSOR}}}

Change = Callable[[dict[str, Any]], object]


def write(
    folder: Path, model: Any = MODEL, weights: Any = WEIGHTS, more: dict[str, bytes] | None = None, method: int = 0
) -> Path:
    path = folder / "m.pt2"
    files = {
        "m/archive_format": b"pt2",
        "m/models/model.json": json.dumps(model).encode(),
        "m/data/weights/model_weights_config.json": json.dumps(weights).encode(),
        "m/data/weights/weight_0": bytes(16),
        "m/data/sample_inputs/model.pt": b"cposix\nsystem\n",
        "m/extra/notes": b"mine",
        **(more or {}),
    }
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def test_the_copy_has_graph_and_weights(tmp_path: Path) -> None:
    copied = io.BytesIO()
    write_safe_copy(write(tmp_path), copied)
    with zipfile.ZipFile(copied) as archive:
        assert set(archive.namelist()) == {
            "m/archive_format",
            "m/models/model.json",
            "m/data/weights/model_weights_config.json",
            "m/data/weights/weight_0",
            "m/data/sample_inputs/model.pt",
        }
        assert archive.read("m/data/sample_inputs/model.pt") == b""
        model = json.loads(archive.read("m/models/model.json"))
    assert model["guards_code"] == []
    [node] = model["graph_module"]["graph"]["nodes"]
    assert (node["target"], node["metadata"]) == ("torch.ops.aten.relu.default", {})


def node_of(model: dict[str, Any]) -> dict[str, Any]:
    return model["graph_module"]["graph"]["nodes"][0]  # type: ignore[no-any-return]


def size_of(text: str) -> Change:
    def change(model: dict[str, Any]) -> None:
        model["graph_module"]["graph"]["sym_int_values"]["n"]["as_expr"]["expr_str"] = text

    return change


def spec_of(kind: Any, context: Any = "null") -> Change:
    def change(model: dict[str, Any]) -> None:
        spec = [1, {"type": kind, "context": context, "children_spec": []}]
        model["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = json.dumps(spec)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: node_of(m).update(target="torch.serialization.os.system"), "is not one of aten's"),
        (lambda m: node_of(m).update(target="torch.ops.aten.from_file.default"), "is not one of aten's"),
        (lambda m: node_of(m).update(target="torch.ops.aten.relu.default.__class__"), "is not one of aten's"),
        (lambda m: node_of(m).update(target="#triton:kernel"), "is not one of aten's"),
        (lambda m: node_of(m).update(target="_operator.methodcaller"), "is not one of aten's"),
        (lambda m: node_of(m).update(name="x):\n import os\ndef f("), "it holds the text"),
        (lambda m: node_of(m)["inputs"][0].update(arg={"as_custom_obj": {"name": "o"}}), "it holds an object"),
        (lambda m: m["graph_module"]["graph"].update({"a\nb": 1}), "it holds the name"),
        (size_of("__import__('os').system('id')"), "not an expression of sizes"),
        (size_of("Symbol('s77').__class__"), "not an expression of sizes"),
        (size_of("Pow(Integer(9), Pow(Integer(9), Integer(9)))"), "not an expression of sizes"),
        (size_of("Add(" * 400), "not an expression of sizes"),
        (spec_of("collections.namedtuple", "os"), "an input or output is a"),
        (spec_of("builtins.dict", '["a", __import__("os")]'), "has the fields"),
    ],
)
def test_a_graph_that_could_run_code(tmp_path: Path, change: Change, said: str) -> None:
    model = copy.deepcopy(MODEL)
    change(model)
    with pytest.raises(ModelError, match=said) as error:
        write_safe_copy(write(tmp_path, model), io.BytesIO())
    assert "where you trust the file, open it with torch.export.load" in str(error.value)


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        ({"path_name": "weight_0", "use_pickle": True}, "'c.w' is a pickle"),
        ({"path_name": "weight_0"}, "'c.w' is a pickle"),
        ({"path_name": "opaque_obj_0", "use_pickle": False}, "in the file 'opaque_obj_0'"),
        ("weight_0", "'c.w' is a pickle"),
    ],
)
def test_weights_that_are_pickles(tmp_path: Path, payload: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        write_safe_copy(write(tmp_path, weights={"config": {"c.w": payload}}), io.BytesIO())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"m/data/aotinductor/model/a.so": b"ELF"}, "neither a graph nor a weight"),
        ({"m/data/constants/custom_obj_0": b"pickle"}, "neither a graph nor a weight"),
        ({"m/models/other.json": b"{}"}, "it has 2 graphs"),
        ({"m/models/model.json": b"{"}, "is not JSON"),
        ({"m/models/model.json": b"[" * 100_000}, "is not JSON"),
    ],
)
def test_files_that_do_not_belong(tmp_path: Path, more: dict[str, bytes], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        write_safe_copy(write(tmp_path, more=more), io.BytesIO())


def test_files_that_are_no_archive(tmp_path: Path) -> None:
    (tmp_path / "m.pt2").write_bytes(b"no zip")
    with pytest.raises(ModelError, match=r"a \.pt2 file of torch\.export\.save"):
        write_safe_copy(tmp_path / "m.pt2", io.BytesIO())
    with pytest.raises(ModelError, match="is compressed"):
        write_safe_copy(write(tmp_path, method=zipfile.ZIP_DEFLATED), io.BytesIO())


def test_examples_are_for_modules(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="are for an nn"):
        lower(b"", inputs=(1,))
