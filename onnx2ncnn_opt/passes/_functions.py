"""What layers that treat every element alike make of a number, computed in float64 with the range of float32.

The formulas take arrays of numbers and `Enclosure`s alike: NumPy functions of the latter's table, and no conditions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any, TypeAlias

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, Eltwise, UnaryOp
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.passes._enclosure import Enclosure, erf, erfc

_Function: TypeAlias = Callable[..., Any]

_LARGEST = float(np.finfo(np.float32).max)
_BINARY: dict[int, _Function] = {
    BinaryOp.ADD: np.add,
    BinaryOp.SUB: np.subtract,
    BinaryOp.MUL: np.multiply,
    BinaryOp.DIV: np.divide,
    BinaryOp.MAX: np.maximum,
    BinaryOp.MIN: np.minimum,
    BinaryOp.RSUB: lambda a, b: b - a,
    BinaryOp.RDIV: lambda a, b: b / a,
}
_UNARY: dict[int, _Function] = {
    UnaryOp.ABS: np.abs,
    UnaryOp.NEG: np.negative,
    UnaryOp.SQUARE: np.square,
    UnaryOp.SQRT: np.sqrt,
    UnaryOp.RSQRT: lambda x: 1 / np.sqrt(x),
    UnaryOp.EXP: np.exp,
    UnaryOp.LOG: np.log,
    UnaryOp.RECIPROCAL: np.reciprocal,
    UnaryOp.TANH: np.tanh,
    UnaryOp.EXPM1: np.expm1,
}
_LAYERS: dict[str, _Function] = {
    "AbsVal": lambda layer, x: np.abs(x),
    "CELU": lambda layer, x: _exponential(x, layer["alpha"], layer["alpha"]),
    "Clip": lambda layer, x: np.minimum(np.maximum(x, layer["min"]), layer["max"]),
    "ELU": lambda layer, x: _exponential(x, layer["alpha"]),
    "Erf": lambda layer, x: erf(x).astype(np.float64),
    "GELU": lambda layer, x: (
        _fast_gelu(x) if layer["fast_gelu"] else 0.5 * x * erfc(-math.sqrt(0.5) * x).astype(np.float64)
    ),
    "HardSigmoid": lambda layer, x: _hard_sigmoid(layer, x),
    "HardSwish": lambda layer, x: x * _hard_sigmoid(layer, x),
    "Mish": lambda layer, x: x * np.tanh(np.logaddexp(0, x)),
    "ReLU": lambda layer, x: np.maximum(x, 0) + (layer["slope"] * np.minimum(x, 0) if layer["slope"] else 0),
    "SELU": lambda layer, x: layer["lambda"] * _exponential(x, layer["alpha"]),
    "Sigmoid": lambda layer, x: 1 / (1 + np.exp(-x)),
    # In float32 nothing is left of the 1 beside larger numbers; their exponential overflows.
    "Softplus": lambda layer, x: np.log(applied(np.exp, x) + 1),
    "Swish": lambda layer, x: x / (1 + np.exp(-x)),
    "TanH": lambda layer, x: np.tanh(x),
    "Threshold": lambda layer, x: (x > layer["threshold"]).astype(float),
}


def _hard_sigmoid(layer: Layer, x: Array) -> Any:
    return np.minimum(np.maximum(layer["alpha"] * x + layer["beta"], 0), 1)


def _exponential(x: Array, alpha: float, width: float = 1.0) -> Any:
    return np.maximum(x, 0) + alpha * np.expm1(np.minimum(x, 0) / width)


def _fast_gelu(x: Array) -> Any:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def _natural(layer: Layer) -> bool:
    return bool(layer["base"] == -1 and layer["scale"] == 1 and layer["shift"] == 0)


def function_of(layer: Layer) -> _Function | None:
    """What the layer makes of its operands, element by element; None where it is none that treats all alike."""
    kind = layer.type
    if kind in _LAYERS:
        return lambda x: _LAYERS[kind](layer, x)
    if kind == "UnaryOp":
        return _UNARY.get(layer["op_type"])
    if kind in ("Exp", "Log"):
        return (np.exp if kind == "Exp" else np.log) if _natural(layer) else None
    if kind == "BinaryOp":
        function = _BINARY.get(layer["op_type"])
        return (lambda x: function(x, layer["b"])) if function and layer["with_scalar"] else function
    if kind == "Eltwise":
        return _eltwise(layer)
    return None


def _eltwise(layer: Layer) -> _Function | None:
    if layer["op_type"] == Eltwise.PROD:
        return lambda *xs: reduce(np.multiply, xs)
    if layer["op_type"] == Eltwise.SUM:
        factors = layer["coeffs"] or (1.0,) * len(layer.inputs)
        return lambda *xs: sum(factor * x for factor, x in zip(factors, xs, strict=True))
    return None


def applied(function: _Function, *operands: Any) -> Any:
    """The function's values; what float32 cannot hold is infinite. Of enclosures, which know that, an enclosure."""
    values = function(*operands)
    if isinstance(values, Enclosure):
        return values
    values = np.asarray(values, np.float64)
    return np.where(np.abs(values) > _LARGEST, np.copysign(np.inf, values), values)
