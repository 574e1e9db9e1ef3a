"""Infinities that a model tests by IsInf or comparisons.

Reduction and Pooling start from the largest finite number: the maximum of a row of -infinity is -3.4e38. That makes no
difference to sums, Softmax and weights.
"""

from collections.abc import Callable, Sequence

import onnx_ir

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.reached import reached
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.value import Tensor

COMPARISONS = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
_TESTS = COMPARISONS | {"Clip", "IsInf", "IsNaN", "Max", "Min", "Sign"}
# Operators that pass on an infinity.
_CARRYING = frozenset(
    {"Abs", "Concat", "Expand", "Flatten", "Gather", "Identity", "Neg", "Reshape", "Slice", "Split", "Squeeze", "Tile"}
    | {"Transpose", "Unsqueeze", "Where"}
)
_STEPS = 4  # between a divisor and a condition on it: Abs, Greater, Not


def are_infinities_tested(im: ImportContext) -> bool:
    """Return True if the model compares the node's result, or asks whether it is infinite."""
    return any(test.op_type in COMPARISONS or test.op_type == "IsInf" for test in tests_of(im.readers(), None))


def in_quarters(im: ImportContext, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``4 * function(x / 4)``: the largest finite number that the function's layers put in becomes infinite."""
    return im.apply(function(im.apply(x, BinaryOp.MUL, 0.25)), BinaryOp.MUL, 4.0)


def tests_of(readers: Sequence[onnx_ir.Node], divisor: onnx_ir.Value | None) -> list[onnx_ir.Node]:
    """Return the nodes that turn an infinite quotient, moved and selected, into a number or a truth value."""

    def carried(node: onnx_ir.Node) -> Sequence[onnx_ir.Node]:
        # A select whose condition is computed from the divisor is taken for a guard against 0.
        guards = divisor is not None and node.op_type == "Where" and _depends(node.inputs[0], divisor)
        return node.outputs[0].consumers() if node.op_type in _CARRYING and not guards else ()

    return [node for node in reached(readers, carried) if node.op_type in _TESTS]


def _depends(value: onnx_ir.Value | None, on: onnx_ir.Value | None) -> bool:
    """Return True if a condition is computed from a value in a few steps."""
    left = [value]
    for _ in range(_STEPS):
        if on in left:
            return True
        left = [each for v in left if v is not None and (node := v.producer()) is not None for each in node.inputs]
    return False
