"""Which axis of each graph input is the batch: solved once, backwards from the operators that have one.

An importer registered with ``batch=k`` says that axis k of its first input is a batch. From there the axis is followed
up through operators that keep axes apart, to the graph inputs. What comes out only decides how inputs are handed over
(dims or batch count of the Mat); whatever else the graph does with the axis stays right, since every tensor's view
knows where its axes are.
"""

from __future__ import annotations

import onnx_ir

from onnx2ncnn_opt.onnx.load import LoadedModel
from onnx2ncnn_opt.onnx.registry import find

# Operators whose output axes are their inputs' axes, for operands of one rank.
_SAME_AXES = frozenset(
    {
        *("Abs", "Add", "Cast", "Ceil", "Clip", "Concat", "Div", "Dropout", "Elu", "Erf", "Exp", "Floor", "Gelu"),
        *("HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Log", "LogSoftmax", "Max", "Mean", "Min", "Mish"),
        *("Mul", "Neg", "PRelu", "Pad", "Pow", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Slice"),
        *("Softmax", "Softplus", "Split", "Sqrt", "Sub", "Sum", "Tanh"),
    }
)


def batch_axes(model: LoadedModel) -> dict[str, int]:
    """The batch axis of each graph input of which the operators tell it."""
    inputs = {info.name: len(info.shape) for info in model.inputs}
    found: dict[str, int] = {}
    for node in model.graph:
        op = find(node.domain, node.op_type, model.opsets.get(node.domain, 1))
        if op is not None and op.batch is not None and node.inputs:
            _follow(node.inputs[0], op.batch, inputs, found)
    return found


def _follow(value: onnx_ir.Value | None, axis: int, inputs: dict[str, int], found: dict[str, int]) -> None:
    pending = [(value, axis)]
    seen: set[tuple[onnx_ir.Value, int]] = set()
    while pending:
        value, axis = pending.pop()
        if value is None or (value, axis) in seen:
            continue
        seen.add((value, axis))
        node = value.producer()
        if node is None:
            if value.name in inputs and axis < inputs[value.name] > 1:
                found.setdefault(value.name, axis)
        elif node.op_type in _SAME_AXES:
            pending.extend((operand, axis) for operand in node.inputs if operand is not None)
        elif node.op_type == "Transpose" and "perm" in node.attributes:
            pending.append((node.inputs[0], node.attributes["perm"].as_ints()[axis]))
