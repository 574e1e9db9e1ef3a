"""The floats that decide integer outputs."""

from collections.abc import Sequence

import onnx_ir

from onnx2ncnn_opt.ir.reached import reached
from onnx2ncnn_opt.onnx.edit.editor import FLOATS
from onnx2ncnn_opt.onnx.read.structure import before

_SAME_ORDER = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
_MOVES = _SAME_ORDER - {"Cast"} | {"Transpose"}
_SIZES = ("Shape", "Size")


def scores(graph: onnx_ir.Graph) -> dict[str, set[str]]:
    """Return the floats that decide each integer output, also before nodes that only move them.

    Example: the inputs of an ArgMax and of the Reshape before it. Outputs without such floats are left out. Values of
    unknown types count as floats.
    """

    def is_float(value: onnx_ir.Value) -> bool:
        return value.dtype is None or value.dtype in FLOATS

    def operands(value: onnx_ir.Value) -> Sequence[onnx_ir.Value]:
        """Return the computed values that decide a value."""
        node = value.producer()
        if node is None or node.op_type in _SIZES or (is_float(value) and node.op_type not in _MOVES):
            return ()
        inputs = node.inputs[:1] if is_float(value) else node.inputs
        return [operand for operand in inputs if operand is not None and operand.producer() is not None]

    result: dict[str, set[str]] = {}
    for value in graph.outputs:
        first = before(value, _SAME_ORDER)
        if first.producer() is not None and not is_float(first):
            result[value.name or ""] = {x.name or "" for x in reached([first], operands) if is_float(x)}
    return {name: floats for name, floats in result.items() if floats}
