"""Experimental operators that converters from Core ML and Caffe wrote before opset 10, and ONNX Runtime still computes.

Each becomes today's nodes before anything else reads the model.
"""

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

_END = 10  # the opset that ends them
# The nodes of each, one after the other, with the attribute that is a second operand; and the attributes.
_NODES: dict[str, tuple[tuple[tuple[str, str], ...], dict[str, Any]]] = {
    "Affine": ((("Mul", "alpha"), ("Add", "beta")), {"alpha": 1.0, "beta": 0.0}),
    "Crop": ((("Slice", ""),), {"border": [0, 0, 0, 0], "scale": []}),
    "ImageScaler": ((("Mul", "scale"), ("Add", "bias")), {"scale": 1.0, "bias": [0.0]}),
    "ParametricSoftplus": ((("Mul", "beta"), ("Softplus", ""), ("Mul", "alpha")), {"alpha": 1.0, "beta": 1.0}),
    "ScaledTanh": ((("Mul", "beta"), ("Tanh", ""), ("Mul", "alpha")), {"alpha": 1.0, "beta": 1.0}),
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
    """Return the nodes of an operator; one whose attributes do not fit stays, and is refused."""
    steps, defaults = _NODES[node.op_type]
    values = defaults | {each.name: helper.get_attribute_value(each) for each in node.attribute}
    types = [{key: type(value) for key, value in each.items()} for each in (values, defaults)]
    if types[0] != types[1] or (len(node.input), len(node.output)) != (1, 1):
        return [node]
    value, result, limits, nodes = node.input[0], node.output[0], dict[str, Any](), list[onnx.NodeProto]()
    if node.op_type == "Crop":
        if len(values["border"]) != 4 or len(values["scale"]) not in (0, 2):
            return [node]
        (left, top, right, bottom), size = values["border"], values["scale"]
        ends = [top + size[0], left + size[1]] if size else [-bottom or 2**31 - 1, -right or 2**31 - 1]
        limits = {"starts": [top, left], "ends": ends, "axes": [2, 3]}
    for number, (operator, key) in enumerate(steps, 1):
        operands, out = [value], result if number == len(steps) else f"{result}/{number}"
        if key:  # as a node, because a model of old has its initializers among its inputs
            operands.append(f"{result}/{key}")
            array = np.array(values[key], np.float32).reshape((-1, 1, 1) if key == "bias" else ())
            nodes.append(helper.make_node("Constant", [], operands[1:], value=numpy_helper.from_array(array)))
        nodes.append(helper.make_node(operator, operands, [out], node.name if out == result else out, **limits))
        value = out
    return nodes
