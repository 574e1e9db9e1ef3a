"""Options from Python that are of another type than they have to be; what objects look like when they are printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import pytest

import onnx2ncnn_opt
from onnx2ncnn_opt import convert
from onnx2ncnn_opt.api.optimize import optimize
from onnx2ncnn_opt.errors import ModelError, UsageError


def model() -> onnx.ModelProto:
    return onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }'
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"outputs": "linear"}, r"outputs has to be a list, not 'linear'; did you mean \['linear'\]\?"),
        ({"skip": "fuse_swish"}, "skip has to be a list"),
        ({"custom": "a::b"}, "custom has to be a list"),
        ({"outputs": 3}, "outputs has to be a list, not 3"),
        ({"shapes": [1, 4]}, "shapes has to be a dict by the names of inputs"),
        ({"shapes": {"x": "1,4"}}, r"shapes\['x'\] has to be a list"),
        ({"shapes": {"x": 4}}, r"shapes\['x'\] has to be a list"),
        ({"values": 3}, "values has to be a dict"),
        ({"batch_axes": "x"}, "batch_axes has to be a dict"),
        ({"limit": -1}, "limit has to be a whole number"),
        ({"limit": True}, "limit has to be a whole number"),
        ({"release": "20250503"}, "a release is a date like"),
        ({"release": 20990101}, "20990101 is not known here"),
    ],
)
def test_types(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        convert(model(), **options)


def test_types_of_optimize() -> None:
    with pytest.raises(UsageError, match="only has to be a list"):
        optimize("a.param", "a.bin", only="fuse_swish")


def test_printed_in_one_line(tmp_path: Path) -> None:
    conversion = convert(model())
    assert repr(conversion) == "Conversion(g: 2 -> 2 layers, x [n, 4]; y [n, 4])"
    assert repr(conversion.model) == "LoadedModel(g: 1 nodes, x: float[n, 4])"
    files = convert(model(), shapes={"x": (1, 4)}).save(tmp_path / "net")
    assert repr(optimize(files.param, files.bin)) == "Optimized(2 -> 2 layers, 0 rewrites)"


def test_the_version() -> None:
    assert onnx2ncnn_opt.__version__ in convert(model()).manifest().tool


def test_the_format_of_onnx_runtime() -> None:
    with pytest.raises(ModelError, match="it is in ONNX Runtime's own format"):
        convert(b"\x10\x00\x00\x00ORTM" + bytes(100))
