"""The floats that decide integer outputs."""

from collections.abc import Mapping, Sequence

import onnx
from onnx import TensorProto

from onnx2ncnn_opt.ir.reached import reached
from onnx2ncnn_opt.verdict.float64_model import FLOATS, element_types, inferred_values

_SAME_ORDER = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
_MOVES = _SAME_ORDER - {"Cast"} | {"Transpose"}
_SIZES = ("Shape", "Size")


def scores(model: onnx.ModelProto) -> dict[str, set[str]]:
    """Return the floats that decide each integer output, also before nodes that only move them.

    Example: the inputs of an ArgMax and of the Reshape before it. Outputs without such floats are left out. Values of
    unknown types count as floats.
    """
    producers, types = _producers(model), element_types(model, inferred_values(model))

    def is_float(name: str) -> bool:
        return types.get(name, TensorProto.FLOAT) in FLOATS

    def operands(name: str) -> Sequence[str]:
        """Return the computed values that decide a value."""
        node = producers[name]
        if node.op_type in _SIZES or (is_float(name) and node.op_type not in _MOVES):
            return ()
        return [operand for operand in (node.input[:1] if is_float(name) else node.input) if operand in producers]

    result: dict[str, set[str]] = {}
    for value in model.graph.output:
        first = _origin(value.name, producers)
        if first in producers and not is_float(first):
            result[value.name] = set(filter(is_float, reached([first], operands)))
    return {name: floats for name, floats in result.items() if floats}


def _producers(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    return {name: node for node in model.graph.node for name in node.output if name}


def _origin(name: str, producers: Mapping[str, onnx.NodeProto]) -> str:
    """Return the value before all nodes that keep the order of its elements, such as Reshape."""
    while name in producers and producers[name].op_type in _SAME_ORDER:
        name = producers[name].input[0]
    return name
