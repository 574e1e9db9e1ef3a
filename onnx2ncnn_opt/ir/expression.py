"""The size expressions of Reshape, Crop and Interp, computed with sizes that may be symbols.

An expression is a list of prefix calls, ``"//(0w,2),*(0h,2),0c"``: `0w` is the width of input 0. ncnn names the axes of
a blob w, h, d and c, and its batch count n. ncnn splits at parentheses and commas, and evaluates from right to left on
a stack. So does `evaluate`.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from onnx2ncnn_opt.errors import ShapeError
from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym, by_axis, larger, smaller

Number: TypeAlias = "Dim | float"

_SIZE = re.compile(r"([0-9])([whdcn])")
_LITERAL = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)", re.ASCII)


class _UnknownError(Exception):
    """The result depends on symbols in a way that a `Dim` cannot express."""


def _floordiv(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return a // b if a * b >= 0 else -(abs(a) // abs(b))
    if isinstance(a, int) and a < 0:  # ncnn rounds towards 0
        raise _UnknownError
    return a // b


_ARITHMETIC: Mapping[str, Callable[[Any, Any], Any]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
# int, int -> int; if an operand is a float, `_FLOATS_2` has the same operators.
_SIZES: Mapping[str, Callable[[Dim, Dim], Dim]] = {**_ARITHMETIC, "//": _floordiv, "max": larger, "min": smaller}
_BITS: Mapping[str, Callable[[int, int], int]] = {
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    **{name: getattr(operator, name) for name in ("lshift", "rshift")},
}
_FLOATS_2: Mapping[str, Callable[[float, float], float]] = {
    **_ARITHMETIC,
    "//": lambda a, b: math.floor(a / b),
    "max": max,
    "min": min,
    "/": operator.truediv,
    **{name: getattr(math, name) for name in ("atan2", "fmod", "pow")},
    "remainder": lambda a, b: math.fmod(a, b) + (b if a * b < 0 else 0),
    "logaddexp": lambda a, b: math.log(math.exp(a) + math.exp(b)),
}
_SAME_KIND: Mapping[str, Callable[[float], float]] = {
    "abs": abs,
    "neg": lambda a: -a,
    "sign": lambda a: (a > 0) - (a < 0),
    "square": lambda a: a * a,
}
_ROUNDING: Mapping[str, Callable[[float], int]] = {
    "trunc": math.trunc,
    "ceil": math.ceil,
    "floor": math.floor,
    "round": lambda a: math.floor(abs(a) + 0.5) * (1 if a > 0 else -1),
}
_FLOATS_1: Mapping[str, Callable[[float], float]] = {
    **{name: getattr(math, name) for name in ("acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf")},
    **{name: getattr(math, name) for name in ("exp", "log", "log10", "sin", "sinh", "sqrt", "tan", "tanh")},
    "reciprocal": lambda a: 1 / a,
    "rsqrt": lambda a: 1 / math.sqrt(a),
}


def evaluate(text: str, blobs: Sequence[tuple[Shape | None, Dim]]) -> list[Dim] | None:
    """Return the sizes that an expression lists, for input blobs given as (shape, batch).

    None if it needs an unknown shape, or applies an operator other than + - * // max and min to a symbol. Raises
    ShapeError for expressions that ncnn refuses or crashes on: unknown words, inputs that the layer does not have,
    missing operands, division by zero.
    """
    stack: list[Number] = []
    for token in reversed([t for t in re.split(r"[(),]", text) if t]):
        try:
            stack.append(_size_of(token, blobs) if _SIZE.fullmatch(token) else _apply(token, stack))
        except _UnknownError:
            return None
        except (IndexError, ArithmeticError, ValueError) as error:
            raise ShapeError(f"expression '{text}': '{token}' has no result ({error})") from None
    if not stack or not all(isinstance(v, Sym) or math.isfinite(v) for v in stack):
        raise ShapeError(f"expression '{text}' has no result")
    return [int(v) if isinstance(v, float) else v for v in reversed(stack)]


def _size_of(token: str, blobs: Sequence[tuple[Shape | None, Dim]]) -> Dim:
    index, axis = int(token[0]), token[1]
    if index >= len(blobs):
        raise ValueError(f"the layer has {len(blobs)} inputs")
    shape, batch = blobs[index]
    if axis == "n":
        return batch
    if shape is None:
        raise _UnknownError
    return by_axis(shape).get(axis, 1)


def _apply(token: str, stack: list[Number]) -> Number:
    if token in _SIZES or token in _FLOATS_2 or token in _BITS:
        a, b = stack.pop(), stack.pop()
        if token in _BITS:
            return _BITS[token](*map(_as_int, (a, b)))
        if token in _SIZES and not isinstance(a, float) and not isinstance(b, float):
            return _SIZES[token](a, b)
        return _float32(_FLOATS_2[token](float(_as_number(a)), float(_as_number(b))))
    if token in _SAME_KIND:
        a = stack.pop()
        if isinstance(a, Sym):
            return {"abs": a, "neg": -a, "sign": 1, "square": a * a}[token]  # sizes are positive
        return _SAME_KIND[token](a)
    if token in _ROUNDING:
        a = stack.pop()
        return _ROUNDING[token](a) if isinstance(a, float) else a
    if token in _FLOATS_1:
        return _float32(_FLOATS_1[token](float(_as_number(stack.pop()))))
    return _literal(token)


def _literal(token: str) -> int | float:
    """Return the number that a token begins with, as C's sscanf reads it."""
    match = _LITERAL.match(token)
    if match is None:
        raise ValueError("it is not a number")
    if match[1].lstrip("+-") == "0" and token[match.end() :].startswith(("x", "X")):  # hexadecimal
        raise _UnknownError
    value = float(match[1])
    return int(value) if value.is_integer() and re.match(r"[-+]?\d+(\.0*)?$", match[1]) else _float32(value)


def _float32(value: float) -> float:
    return float(np.float32(value))


def _as_number(value: Number) -> int | float:
    if isinstance(value, Sym):
        raise _UnknownError
    return value


def _as_int(value: Number) -> int:
    if isinstance(number := _as_number(value), float):
        raise ValueError(f"the bits of {value}")
    return number
