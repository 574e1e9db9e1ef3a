"""Div, Reciprocal and Mod; quotients are exact if the model rounds them."""

from collections.abc import Sequence

import numpy as np
import onnx_ir

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import binary
from onnx2ncnn_opt.onnx.lower.functional.cast import wrapped_around
from onnx2ncnn_opt.onnx.lower.functional.division import divide_by_whole, divided, mod, quotient, reciprocal, truncated
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Operand, SymbolicTensor, Tensor, Value, is_float

_LARGEST_WHOLE = 2**20

_ROUNDS = ("Ceil", "Floor", "Round")
# Operators between a quotient and its rounding; those of the first row only move numbers.
_BETWEEN = (
    *("Cast", "CastLike", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"),
    *("Abs", "Add", "Clip", "Max", "Min", "Mul", "Neg", "Relu", "Sub"),
)
_FURTHEST = 3


@onnx_op("Div", since=7, integers=True, divisor=1, axes="each", folds=True)
def div(im: ImportContext, a: Operand, b: Operand) -> Value:
    """BinaryOp div or mul; exact if the model rounds the quotient; truncated for integers."""
    if not is_float(a.dtype):
        whole, by = (im.tensor(x) if isinstance(x, SymbolicTensor) else x for x in (a, b))
        return wrapped_around(im, truncated(im, whole, by))
    if isinstance(b, Constant) and isinstance(a, Tensor) and (np.abs(np.frexp(b.array)[0]) == 0.5).all():
        return binary(im, BinaryOp.MUL, a, Constant(1 / b.array))  # exact for powers of two; ncnn's division is not
    if _are_rounding(im.readers()):
        return divided(im, *(im.tensor(x) if isinstance(x, SymbolicTensor) else x for x in (a, b)))
    if isinstance(b, Constant) and isinstance(a, Tensor) and _is_whole(b) and _is_rounding_scale(im):
        return divide_by_whole(im, a, b)
    if a is b:  # 1 or NaN, never infinite
        return binary(im, BinaryOp.DIV, a, b)
    return quotient(im, a, b, lambda by: binary(im, BinaryOp.DIV, a, by), 1)


def _is_whole(b: Constant) -> bool:
    return b.scalar is not None and b.scalar.is_integer() and 0 < abs(b.scalar) < _LARGEST_WHOLE


def _is_rounding_scale(im: ImportContext) -> bool:
    """Return True if the quotient is the divisor of a rounded quotient."""
    return any(
        reader.op_type == "QuantizeLinear" or (reader.op_type == "Div" and _are_rounding(reader.outputs[0].consumers()))
        for reader in im.readers()
    )


onnx_op("Reciprocal", divisor=0, axes="each", folds=True)(reciprocal)
onnx_op("Mod", since=10, integers=True, divisor=1, jumps=True, axes="each", folds=True)(mod)


def _are_rounding(nodes: Sequence[onnx_ir.Node], steps: int = _FURTHEST) -> bool:
    """Return True if one of the nodes, or a node at most `steps` elementwise nodes later, rounds to whole numbers."""
    return any(
        node.op_type in _ROUNDS
        or (node.op_type == "Cast" and onnx_ir.DataType(node.attributes["to"].as_int()).numpy().kind in "iu")
        or (steps > 0 and node.op_type in _BETWEEN and _are_rounding(node.outputs[0].consumers(), steps - 1))
        for node in nodes
    )
