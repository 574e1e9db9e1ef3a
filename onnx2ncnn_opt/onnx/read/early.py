"""Experimental operators that converters from Core ML and Caffe wrote before opset 10, and ONNX Runtime still computes.

Each becomes today's nodes before anything else reads the model.
"""

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

_END = 10  # the opset that ends them
_BOTH = {"alpha": 1.0, "beta": 1.0}
# The nodes of each, from x to y, with attributes as tensors; and its attributes.
_NODES: dict[str, tuple[tuple[tuple[str, str, str], ...], dict[str, Any]]] = {
    "Affine": ((("Mul", "x alpha", "a"), ("Add", "a beta", "y")), {"alpha": 1.0, "beta": 0.0}),
    "ImageScaler": ((("Mul", "x scale", "a"), ("Add", "a bias", "y")), {"scale": 1.0, "bias": [0.0]}),
    "ParametricSoftplus": ((("Mul", "x beta", "a"), ("Softplus", "a", "b"), ("Mul", "b alpha", "y")), _BOTH),
    "ScaledTanh": ((("Mul", "x beta", "a"), ("Tanh", "a", "b"), ("Mul", "b alpha", "y")), _BOTH),
    "Crop": ((("Slice", "x", "y"),), {"border": [0, 0, 0, 0], "scale": []}),
}


def expanded(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model without such operators: a copy if it has any."""
    is_early = any(entry.domain in ("", "ai.onnx") and entry.version < _END for entry in proto.opset_import)
    if not is_early or not any(node.op_type in _NODES and not node.domain for node in proto.graph.node):
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    del copy.graph.node[:]
    for node in proto.graph.node:
        copy.graph.node.extend(_expanded(node) if node.op_type in _NODES and not node.domain else [node])
    return copy


def _expanded(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return the nodes of an operator; the last one has its name."""
    steps, defaults = _NODES[node.op_type]
    attributes = defaults | {each.name: helper.get_attribute_value(each) for each in node.attribute}
    kinds = [{key: type(value) for key, value in each.items()} for each in (attributes, defaults)]
    sizes = [len(attributes[key]) for key in ("border", "scale") if key in attributes and node.op_type == "Crop"]
    if kinds[0] != kinds[1] or sizes not in ([], [4, 0], [4, 2]) or (len(node.input), len(node.output)) != (1, 1):
        return [node]  # which is refused
    names = {"x": node.input[0], "y": node.output[0]}
    nodes: list[onnx.NodeProto] = []
    numbers: dict[str, Any] = {}
    if node.op_type == "Crop":
        (left, top, right, bottom), size = attributes["border"], attributes["scale"]
        ends = [top + size[0], left + size[1]] if size else [-bottom or 2**31 - 1, -right or 2**31 - 1]
        numbers = {"starts": [top, left], "ends": ends, "axes": [2, 3]}
    else:  # as nodes, because a model of old has its initializers among its inputs
        for key, value in attributes.items():
            array = np.array(value, np.float32).reshape((-1, 1, 1) if key == "bias" else ())
            tensor = numpy_helper.from_array(array)
            nodes.append(helper.make_node("Constant", [], [f"{node.output[0]}/{key}"], value=tensor))
    for operator, *keys in steps:
        operands, results = ([names.get(key, f"{node.output[0]}/{key}") for key in each.split()] for each in keys)
        label = node.name if results == [node.output[0]] else results[0]
        nodes.append(helper.make_node(operator, operands, results, label, **numbers))
    return nodes
