"""Formulas such as `x * Sigmoid(x)`, written out as nodes of a model or layers of a net."""

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.ir.graph import Blob

_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Pow")
_ROWS = {"reduce_all": 0, "axes": (-1,), "keepdims": 1, "fixbug0": 1}
_OVER_ROWS = {"RowNorm": 8, "RowMax": 4}


def evaluate(text: str, names: Mapping[str, Any], number: Callable[[float], Any], make: Callable[..., Any]) -> Any:
    """Return the value of the last of the statements in `text`, each an assignment or an expression.

    `number` makes an operand of a number. `make` gets the name of an operator, its operands, and its attributes.
    """
    known, result = dict(names), None

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Name(id=name):
                return known[name]
            case ast.Constant() | ast.UnaryOp():
                return number(float(ast.literal_eval(node)))
            case ast.BinOp(left=left, op=operator, right=right):
                return make(type(operator).__name__.replace("Mult", "Mul"), value(left), value(right))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
                attributes = {str(each.arg): ast.literal_eval(each.value) for each in keywords}
                return make(name, *map(value, args), **attributes)
        raise TypeError(ast.dump(node))

    for statement in ast.parse(text).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=expression):
                known[name] = value(expression)
            case ast.Expr(value=expression):
                result = value(expression)
    return result


def drawn(text: str, choice: Callable[[list[str]], str]) -> str:
    """Return a formula with one of the alternatives for each `<first|second>`, the innermost ones first."""
    while found := re.search(r"<([^<>]*)>", text):
        text = text[: found.start()] + choice(found[1].split("|")) + text[found.end() :]
    return text


def layer_of(operator: str, *operands: Blob | float, **params: Any) -> tuple[str, list[Blob], dict[str, Any]]:
    """Return type, inputs and parameters of the layer for an operator: `SQRT` is UnaryOp's, `TanH` a type of layer."""
    blobs = [operand for operand in operands if isinstance(operand, Blob)]
    code = operator.upper() if operator in _ARITHMETIC else operator
    if code in BinaryOp.__members__:
        operation = BinaryOp[code]
        if len(blobs) == 2:
            return "BinaryOp", blobs, {"op_type": int(operation)}
        (number,) = (operand for operand in operands if not isinstance(operand, Blob))
        operation = operation.exchanged if operands[0] is number else operation
        return "BinaryOp", blobs, {"op_type": int(operation), "with_scalar": 1, "b": number}
    if code in UnaryOp.__members__:
        return "UnaryOp", blobs, {"op_type": int(UnaryOp[code])}
    if operator in _OVER_ROWS:
        return "Reduction", blobs, {"operation": _OVER_ROWS[operator], **_ROWS}
    return operator, blobs, params
