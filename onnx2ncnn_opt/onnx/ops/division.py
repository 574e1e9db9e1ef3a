"""Div, Reciprocal, Mod and Pow; quotients are exact if the model rounds them."""

from collections.abc import Sequence

import numpy as np
import onnx_ir

from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import arithmetic, binary, number
from onnx2ncnn_opt.onnx.lower.functional.cast import as_numbers, float_value, wrapped_around
from onnx2ncnn_opt.onnx.lower.functional.division import (
    applied,
    divide_by_whole,
    divided,
    infinite_at_zero,
    mod,
    quotient,
    reciprocal,
    truncated,
)
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
_LARGEST_LOG = 104.0  # bound of the logarithms of float32 numbers; exp(-104) is 0
_INFINITE_LOG = 30000.0  # replaces the infinite logarithm of 0 and of infinity; fits into fp16
# Exponents with an exact UnaryOp.
_POWERS = {2.0: UnaryOp.SQUARE, 0.5: UnaryOp.SQRT, -0.5: UnaryOp.RSQRT}
_LARGEST_PRODUCT = 4


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


@onnx_op("Pow", since=7, integers=True, axes="each", folds=True)
def pow_(im: ImportContext, a: Value, b: Value) -> Value:
    """UnaryOp for squares and roots, products for small whole exponents, else Power; BinaryOp for a positive base.

    ncnn's vectorised pow is exp(b * log(a)), which is wrong for a <= 0. The layer Power is slow, but exact. For two
    tensors, the sign is computed separately, and multiplied with |a| ** b.
    """
    exponent = b.scalar if isinstance(b, Constant) and b.rank <= a.rank else None
    if not is_float(a.dtype):
        is_small = exponent in range(1, _LARGEST_PRODUCT + 1)
        if isinstance(a, Constant) or exponent is None or not is_small or a.dtype.itemsize < 4:
            reason = f"a power of {a.dtype} other than a constant whole one from 1 to {_LARGEST_PRODUCT}"
            raise im.refuse(reason, "cast the base to float before")
        return _whole_power(im, as_numbers(im, a), int(exponent))
    b = float_value(im, b)
    if isinstance(a, Tensor) and exponent is not None:
        return _scalar_power(im, a, exponent)
    if im.range_of(a).low <= 0:
        return _signed_power(im, float_value(im, a), b)
    return binary(im, BinaryOp.POW, a, Constant(np.asarray(b.array, np.float32)) if isinstance(b, Constant) else b)


def _signed_power(im: ImportContext, a: Value, b: Value) -> Value:
    """Compute a ** b for any base. For a negative base it is negative for odd exponents, NaN for fractional ones."""
    power: Value = im.unary(_logarithm(im, a, b), "Exp")
    is_negative = _is_positive(im, applied(im, a, UnaryOp.NEG, np.negative))
    half = applied(im, arithmetic(im, BinaryOp.MUL, b, number(0.5)), UnaryOp.FLOOR, np.floor)
    odd = arithmetic(im, BinaryOp.SUB, b, arithmetic(im, BinaryOp.MUL, half, number(2)))
    if not isinstance(odd, Constant) or odd.array.any():
        power = binary(im, BinaryOp.MUL, power, _sign(im, arithmetic(im, BinaryOp.MUL, odd, is_negative)))
    fraction = arithmetic(im, BinaryOp.SUB, b, applied(im, b, UnaryOp.FLOOR, np.floor))
    if isinstance(fraction, Constant) and not fraction.array.any():
        return power
    invalid = _sign(im, arithmetic(im, BinaryOp.MUL, _is_positive(im, fraction), is_negative))
    return binary(im, BinaryOp.ADD, power, im.unary(invalid, "Log"))  # log(-1) is NaN


def _logarithm(im: ImportContext, a: Value, b: Value) -> Value:
    """Compute b * log(abs(a)): 0 if b is 0; else, for a base of 0 or infinity, large enough for exp to saturate."""
    if isinstance(a, Constant) and a.array.all() and np.isfinite(a.array).all():
        return binary(im, BinaryOp.MUL, Constant(np.log(np.abs(a.array.astype(np.float64)))), b)
    log = im.unary(im.apply(im.tensor(a), UnaryOp.ABS), "Log")
    least = _LARGEST_LOG / _INFINITE_LOG  # smaller exponents do not saturate exp
    if isinstance(b, Constant) and not (np.abs(b.array[b.array != 0]) < least).any():
        return binary(im, BinaryOp.MUL, im.unary(log, "Clip", min=-_INFINITE_LOG, max=_INFINITE_LOG), b)
    finite = im.unary(log, "Clip", min=-_LARGEST_LOG, max=_LARGEST_LOG)
    side = im.apply(binary(im, BinaryOp.SUB, log, finite), UnaryOp.SIGN)
    sign = applied(im, b, UnaryOp.SIGN, np.sign)
    infinite = binary(im, BinaryOp.MUL, side, arithmetic(im, BinaryOp.MUL, sign, number(_INFINITE_LOG)))
    return binary(im, BinaryOp.ADD, binary(im, BinaryOp.MUL, finite, b), infinite)


def _sign(im: ImportContext, x: Value) -> Value:
    """Return 1 for 0, -1 for 1."""
    return arithmetic(im, BinaryOp.SUB, number(1), arithmetic(im, BinaryOp.MUL, x, number(2)))


def _is_positive(im: ImportContext, x: Value) -> Value:
    """Return 1 for positive numbers, else 0."""
    if isinstance(x, Constant):
        return Constant((x.array > 0).astype(np.float32))
    return im.unary(x, "Threshold", threshold=0.0)


def _scalar_power(im: ImportContext, x: Tensor, exponent: float) -> Tensor:
    if exponent == -1:
        return reciprocal(im, x)
    if exponent < 0:
        return im.tensor(infinite_at_zero(im, x, lambda by: _power(im, im.tensor(by), exponent), 0))
    return x if exponent == 1 else _power(im, x, exponent)


def _power(im: ImportContext, x: Tensor, exponent: float) -> Tensor:
    if exponent in _POWERS:
        return im.apply(x, _POWERS[exponent])
    if exponent in range(2, _LARGEST_PRODUCT + 1):
        return _whole_power(im, x, int(exponent))
    if not np.isfinite(np.float32(exponent)):
        raise im.refuse(f"the exponent is {exponent}", "use a finite exponent")
    return im.unary(x, "Power", power=exponent)


def _whole_power(im: ImportContext, x: Tensor, exponent: int) -> Tensor:
    """Compute x to a whole power by squaring."""
    if exponent == 1:
        return x
    square = im.apply(_whole_power(im, x, exponent // 2), UnaryOp.SQUARE)
    return square if exponent % 2 == 0 else im.like(x, im.layer("BinaryOp", square.blob, x.blob, op_type=BinaryOp.MUL))
