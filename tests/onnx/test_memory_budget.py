"""Models of a few bytes that ask for more memory than there is: refused by name, before anything is made."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import UnsupportedError
from onnx2ncnn_opt.onnx import importer
from onnx2ncnn_opt.onnx.lower.memory_budget import MemoryBudget
from testing.compared import model_of

BILLION = np.int64(10**9)
IMAGE = {"x": np.zeros((1, 1, 3, 3), np.float32)}
ROI = np.zeros(0, np.float32)


def model(operator: str, inputs: dict[str, Any], opset: int = 21, **attributes: Any) -> onnx.ModelProto:
    """The operator on `x` where that is among the inputs, and on constants."""
    given = {name: array for name, array in inputs.items() if name == "x"}
    constants = {name: array for name, array in inputs.items() if name != "x"}
    node = helper.make_node(operator, list(inputs), ["h"], **attributes)
    return model_of([node, helper.make_node("Identity", ["h"], ["y"])], given, constants, opset=opset)


CASES = {
    "OneHot": model("OneHot", {"x": np.zeros(3, np.int64), "depth": BILLION, "values": np.array([0, 1], np.float32)}),
    "OneHot of constants": model(
        "OneHot", {"i": np.zeros(3, np.int64), "depth": BILLION, "v": np.array([0, 1], np.float32)}
    ),
    "ConstantOfShape": model("ConstantOfShape", {"shape": np.array([10**9, 5], np.int64)}),
    "ConstantOfShape, less": model("ConstantOfShape", {"shape": np.array([10**8], np.int64)}),
    "Range": model("Range", {"start": np.int64(0), "limit": BILLION, "delta": np.int64(1)}),
    "Range of floats": model("Range", {"start": np.float32(0), "limit": np.float32(1), "delta": np.float32(1e-9)}),
    "Tile": model("Tile", IMAGE | {"repeats": np.array([1, 1, 10**5, 10**5], np.int64)}),
    "Expand": model("Expand", {"x": np.zeros((3, 1), np.float32), "shape": np.array([3, 10**9], np.int64)}),
    "Pad": model("Pad", IMAGE | {"pads": np.array([0, 0, 10**5, 10**5, 0, 0, 0, 0], np.int64)}),
    "Resize": model("Resize", IMAGE | {"roi": ROI, "scales": np.array([1, 1, 1e5, 1e5], np.float32)}),
    "a matrix of Resize": model(
        "Resize",
        {"x": np.zeros((1, 1, 1, 30000), np.float32), "roi": ROI, "scales": np.array([1, 1, 1, 2.5], np.float32)},
        mode="cubic",
        coordinate_transformation_mode="asymmetric",
    ),
    "Upsample": model("Upsample", IMAGE | {"scales": np.array([1, 1, 1e5, 1e5], np.float32)}, opset=9),
    "EyeLike": model("EyeLike", {"x": np.broadcast_to(np.float32(0), (10**5, 10**5))}),
    "HannWindow": model("HannWindow", {"size": BILLION}),
    "MelWeightMatrix": model(
        "MelWeightMatrix",
        {"b": np.int64(10**5), "l": np.int64(10**6), "r": np.int64(16000), "f": np.float32(0), "t": np.float32(8000)},
    ),
    "DFT": model("DFT", {"x": np.zeros((1, 100, 1), np.float32), "length": BILLION}),
    "STFT": model("STFT", {"x": np.zeros((1, 10**6, 1), np.float32), "s": np.int64(1), "w": np.ones(400, np.float32)}),
    "a mask of Attention": model_of(
        [helper.make_node("Attention", ["x", "x", "x"], ["y"], is_causal=1)],
        {"x": np.zeros((1, 1, 60000, 4), np.float32)},
        opset=23,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_too_large_is_said(name: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        lower(CASES[name])
    (node,) = caught.value.nodes
    assert "too large" in node.reason


BILLION_TIMES = "k = Constant<value_ints=[1,1000000000]>() s = Shape(x) r = Mul(s,k) u = Constant<value_ints=[1]>()"
AT_RUN_TIME = {
    "Pad": ("1,3,h,w", "p = Constant<value_ints=[0,0,1073741824,0,0,0,0,0]>() big = Pad(x,p)"),
    "Pad at the end": ("n,3", 'p = Constant<value_ints=[0,0,0,1073741824]>() big = Pad<mode="edge">(x,p)'),
    "Tile": ("n,3", "r = Constant<value_ints=[1,1073741824]>() big = Tile(x,r)"),
    "Tile by a size": ("n,3", f"{BILLION_TIMES} big = Tile(x,r)"),
    "Expand": ("n,3", "s = Constant<value_ints=[1073741824,1,1]>() big = Expand(x,s)"),
    "Expand to a size": ("n,3", f"{BILLION_TIMES} m = ReduceMax<keepdims=1>(x,u) big = Expand(m,r)"),
    "Resize": ("1,3,h,w", "s = Constant<value_floats=[1.0,1.0,32768.0,32768.0]>() big = Resize(x,,s)"),
    "Concat": ("1,3", " ".join(f"h{i + 1} = Concat<axis=1>(h{i},h{i})" for i in range(40))),
    "Concat of any size": ("n,3", " ".join(f"h{i + 1} = Concat<axis=1>(h{i},h{i})" for i in range(40))),
}


@pytest.mark.parametrize("name", AT_RUN_TIME)
def test_too_large_at_run_time_is_said(name: str) -> None:
    shape, body = AT_RUN_TIME[name]
    last = "big" if "big" in body else "h40"
    nodes = f"h0 = Relu(x) {body} y = Sigmoid({last})".replace(") ", ")\n")
    text = f'<ir_version: 9, opset_import: ["" : 18]> g (float[{shape}] x) => (float[] y) {{\n{nodes}\n}}'
    with pytest.raises(UnsupportedError, match="too large") as caught:
        lower(onnx.parser.parse_model(text))
    assert caught.value.nodes[0].operator == name.split()[0]


def test_large_but_possible_at_run_time() -> None:
    """2**28 elements are the most, and a dynamic dimension counts as 1."""
    nodes = "".join(f"h{i + 1} = Concat<axis=1>(h{i},h{i})\n" for i in range(28))
    text = f'<ir_version: 9, opset_import: ["" : 18]> g (float[n,1] x) => (float[] y) {{\nh0 = Relu(x)\n{nodes}'
    assert lower(onnx.parser.parse_model(f"{text}y = Sigmoid(h28)\n}}")).graph


def test_many_constants_are_too_large_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred of 16 MB each, where 1 GiB is left."""
    monkeypatch.setattr(importer, "MemoryBudget", lambda given: MemoryBudget(given, least=2**30))
    ones = [helper.make_node("ConstantOfShape", ["s"], [f"h{i}"]) for i in range(100)]
    total = helper.make_node("Concat", [f"h{i}" for i in range(100)], ["y"], axis=0)
    with pytest.raises(UnsupportedError, match="too large in all"):
        lower(model_of([*ones, total], {}, {"s": np.array([4 * 2**20], np.int64)}))


def test_no_memory_names_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(importer, "check_size", fails)
    with pytest.raises(UnsupportedError, match="Relu 'r': it takes more memory than there is"):
        lower(model_of([helper.make_node("Relu", ["x"], ["y"], name="r")], IMAGE))
