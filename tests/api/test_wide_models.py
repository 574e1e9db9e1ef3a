"""Models of shapes for which something once took the square of their size."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnx2ncnn_opt.api.lower import lower


def joined(count: int, *, is_dynamic: bool = False) -> onnx.GraphProto:
    """A Concat of so many inputs, each of which is the layout of all, and perhaps of a size of its own."""
    sizes = [f"n{i}" if is_dynamic else 4 for i in range(count)]
    inputs = [helper.make_tensor_value_info(f"x{i}", 1, [1, size, 5]) for i, size in enumerate(sizes)]
    node = helper.make_node("Concat", [value.name for value in inputs], ["y"], axis=1)
    return helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", 1, None)])


def cut(count: int) -> onnx.GraphProto:
    """A tensor in so many slices, each with readers of its own, as a gate may have, and outputs of their own."""
    names = [f"s{i}" for i in range(count)]
    nodes = [helper.make_node("Split", ["x"], names, axis=1)]
    nodes += [helper.make_node("Tanh", [name], [f"t{name}"]) for name in names]
    nodes += [helper.make_node("Mul", [f"t{name}", f"t{name}"], [f"y{name}"]) for name in names]
    outputs = [helper.make_tensor_value_info(f"y{name}", 1, None) for name in names]
    return helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", 1, [1, 2 * count, 5])], outputs)


def scrambled(count: int) -> onnx.GraphProto:
    """Views in a row of which no two are one."""
    nodes, last = [], "x"
    for i in range(count):
        nodes.append(helper.make_node("Transpose", [last], [f"t{i}"], perm=[0, 2, 1]))
        last = f"r{i}"
        nodes.append(helper.make_node("Reshape", [f"t{i}", "shape"], [last]))
    nodes.append(helper.make_node("Relu", [last], ["y"]))
    inputs, outputs = [helper.make_tensor_value_info("x", 1, [1, 6, 8])], [helper.make_tensor_value_info("y", 1, None)]
    return helper.make_graph(nodes, "g", inputs, outputs, [numpy_helper.from_array(np.array([1, 6, 8]), "shape")])


def calls(graph: onnx.GraphProto, layers: int) -> int:
    """Return how many functions lowering calls, which no other load of the machine changes."""
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event.endswith("call")

    old = sys.getprofile()
    sys.setprofile(profile)
    try:
        conversion = lower(model)
    finally:
        sys.setprofile(old)
    assert len(conversion.graph) == layers
    return count


@pytest.mark.parametrize(
    ("graph", "layers"),
    [
        (joined, lambda n: n + 1),
        (partial(joined, is_dynamic=True), lambda n: n + 1),
        (cut, lambda n: 2 * n + 2),
        (scrambled, lambda n: 2 * n + 2),
    ],
    ids=["joined", "joined, dynamic", "cut", "scrambled"],
)
def test_work_is_linear(graph: Callable[[int], onnx.GraphProto], layers: Callable[[int], int]) -> None:
    once, twice = (calls(graph(count), layers(count)) for count in (100, 200))
    assert twice < 2.3 * once
