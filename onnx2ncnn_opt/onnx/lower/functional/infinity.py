"""Infinities that a model tests with IsInf or comparisons.

ncnn's Reduction and Pooling start from the largest finite number: the maximum of a row of -infinity is -3.4e38. For
sums, Softmax and weights both are the same.
"""

from collections.abc import Callable, Sequence

import onnx_ir

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.reached import reached
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.value import Tensor

COMPARISONS = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
_TESTS = COMPARISONS | {"Clip", "IsInf", "IsNaN", "Max", "Min", "Sign"}
# Operators whose results contain the infinities of their inputs.
_CARRYING = frozenset(
    {"Abs", "Concat", "Expand", "Flatten", "Gather", "Identity", "Neg", "Reshape", "Slice", "Split", "Squeeze", "Tile"}
    | {"Transpose", "Unsqueeze", "Where"}
)
_STEPS = 4  # between a divisor and a condition on it: Abs, Greater, Not


def are_infinities_tested(im: ImportContext) -> bool:
    """Return True if the model compares the node's result, or tests it with IsInf."""
    return any(test.op_type in COMPARISONS or test.op_type == "IsInf" for test in tests_of(im.readers(), None))


def at_quarter_scale(im: ImportContext, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``4 * function(x / 4)``: the largest finite number, where the function inserts it, becomes infinite."""
    return im.apply(function(im.apply(x, BinaryOp.MUL, 0.25)), BinaryOp.MUL, 4.0)


def tests_of(readers: Sequence[onnx_ir.Node], divisor: onnx_ir.Value | None) -> list[onnx_ir.Node]:
    """Return the nodes that convert an infinite quotient, perhaps moved or selected, to a number or a bool."""

    def carried(node: onnx_ir.Node) -> Sequence[onnx_ir.Node]:
        # A Where whose condition depends on the divisor probably guards against 0.
        guards = divisor is not None and node.op_type == "Where" and _depends(node.inputs[0], divisor)
        return node.outputs[0].consumers() if node.op_type in _CARRYING and not guards else ()

    return [node for node in reached(readers, carried) if node.op_type in _TESTS]


def _depends(value: onnx_ir.Value | None, on: onnx_ir.Value | None) -> bool:
    """Return True if a condition is computed from a value in at most `_STEPS` nodes."""
    values = [value]
    for _ in range(_STEPS):
        if on in values:
            return True
        producers = [node for v in values if v is not None and (node := v.producer()) is not None]
        values = [operand for node in producers for operand in node.inputs]
    return False
