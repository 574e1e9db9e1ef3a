"""Quotients that the model rounds to whole numbers, or whose divisor may be 0.

ncnn's division may be off in the last bits: 6 / 3 may be less than 2, and its floor 1. So if a model rounds a quotient,
layers compute the exact residual a - q * b, and correct q by it. For integers up to 2**20 a shifted dividend is enough.
"""

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir

from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import arithmetic, binary, number
from onnx2ncnn_opt.onnx.lower.functional.cast import as_numbers, is_zero, number_value
from onnx2ncnn_opt.onnx.lower.functional.infinity import COMPARISONS, tests_of
from onnx2ncnn_opt.onnx.read.constants import single_number
from onnx2ncnn_opt.onnx.value import Constant, Operand, Tensor, Value, is_float

_HALF_BITS = 12  # a product of two numbers of 12 bits is exact
_ALL_EVEN = 2.0**30  # every float32 from here on is even
# Inputs from which on functions are constant in float32, and exp(-x) is 0.
_LIMITS = {"Atan": 1e8, "Tanh": 20.0, "Erf": 10.0, "Sigmoid": 104.0}
_EXP_LIMIT = 104.0
_TINY = 1e-3


def divide_by_whole(im: ImportContext, a: Value, b: Constant) -> Value:
    """Compute a / b exactly rounded, for a whole number b: a scale's last bit decides ties between two steps."""
    inverse = Constant(1 / im.f32(b.array).astype(np.float64))
    near = binary(im, BinaryOp.MUL, a, inverse)
    return binary(im, BinaryOp.ADD, near, binary(im, BinaryOp.MUL, residual(im, a, im.tensor(b), near), inverse))


def quotient(im: ImportContext, a: Operand, b: Operand, divide: Callable[[Operand], Value], at: int) -> Value:
    """Compute a / b with `divide`, a function of the divisor: the node's input `at`, or a nonzero replacement."""
    divisor = nonzero_divisor(im, a, b)
    return infinite_at_zero(im, b, divide, at) if divisor is b else divide(divisor)


def infinite_at_zero(im: ImportContext, b: Operand, divide: Callable[[Operand], Value], at: int) -> Value:
    """Compute a quotient; if the model tests it, return infinity for x / 0 and x / -0.0, and NaN for 0 / 0."""
    may_vanish = not b.array.all() if isinstance(b, Constant) else not isinstance(b, Tensor) or im.range_of(b).has(0)
    tests = tests_of(im.readers(), im.node.inputs[at]) if may_vanish else []
    if not tests or _is_any_test(tests):
        return divide(b)
    if isinstance(b, Constant):
        reason = "a quotient by a constant 0 is tested, which is infinite in ONNX and NaN in ncnn on some CPUs"
        raise im.refuse(reason, "replace the divisor where it is 0, as in x / torch.where(y == 0, 1, y)")
    divisor = im.tensor(b)
    zeros = is_zero(im, divisor)
    whole = divide(binary(im, BinaryOp.ADD, divisor, zeros))
    # exp(0) is 1, and the square of exp(104) is infinite, also in 16 bits.
    large = im.apply(binary(im, BinaryOp.MUL, zeros, number(_EXP_LIMIT)), UnaryOp.EXP)
    return binary(im, BinaryOp.MUL, whole, im.apply(large, UnaryOp.SQUARE))


def _is_any_test(tests: Sequence[onnx_ir.Node]) -> bool:
    """Return True if one condition tests for NaN or infinity: then x / 0 may be either."""
    readers = [reader for test in tests for reader in test.outputs[0].consumers()]
    both = sorted(test.op_type for test in tests) == ["IsInf", "IsNaN"] and not any(test.attributes for test in tests)
    return both and len(readers) == 2 and readers[0] is readers[1] and readers[0].op_type == "Or"


def nonzero_divisor(im: ImportContext, a: Operand, b: Operand) -> Operand:
    """Replace 0 in a divisor by a tiny number if all readers of the quotient are constant for large numbers.

    On x86, 1 / 0 and the atan of infinity are NaN. But atan is constant from `_LIMITS` = 1e8 on. So ``atan(a / b)``
    becomes ``atan(a / max(b, |a| / 2e8))`` if b is never negative. -0.0 counts as 0 here, and 0 / 0 stays NaN.
    """
    if not isinstance(b, Tensor) or not isinstance(a, (Constant, Tensor)) or not is_float(b.dtype):
        return b
    if isinstance(a, Constant) and not (a.array.all() and np.isfinite(a.array).all()):
        return b
    dividend, divisor = im.range_of(a), im.range_of(b)
    if not divisor.has(0):
        return b
    may_be_both = divisor.low < 0 or dividend.low < 0 < dividend.high
    sign = 0 if may_be_both else 1 if dividend.low >= 0 else -1
    limits = [_limit(reader, sign) for reader in im.readers()]
    largest = max((limit for limit in limits if limit is not None), default=None)
    if largest is None or None in limits:
        return b
    # The quotient by this divisor is twice the limit.
    if isinstance(a, Tensor):
        least: Value = binary(im, BinaryOp.MUL, im.apply(a, UnaryOp.ABS), number(0.5 / largest))
    else:
        least = number(float(np.abs(a.array.astype(np.float64)).min()) / (2 * largest))
    if divisor.low >= 0:
        return binary(im, BinaryOp.MAX, b, least)
    return binary(im, BinaryOp.ADD, b, binary(im, BinaryOp.MUL, is_zero(im, b), least))


def _limit(node: onnx_ir.Node, sign: int) -> float | None:
    """Return the magnitude from which on a node's result is constant for inputs of a sign (0: both), or None."""
    if node.op_type in _LIMITS:
        return _LIMITS[node.op_type]
    if node.op_type == "Exp" and sign < 0:
        return _EXP_LIMIT
    if node.op_type == "Neg" and sign > 0 and node.outputs[0].consumers():
        return _EXP_LIMIT if all(reader.op_type == "Exp" for reader in node.outputs[0].consumers()) else None
    if node.op_type in COMPARISONS or (node.op_type == "Min" and sign > 0):
        bounds, least = [single_number(value) for value in node.inputs], 1
    elif node.op_type == "Clip":
        low, high = (_bound(node, name, at) for name, at in (("min", 1), ("max", 2)))
        bounds = [high] if sign > 0 else [low] if sign < 0 else [low, high]
        least = len(bounds)
    else:
        return None
    limits = [abs(bound) for bound in bounds if bound is not None and np.isfinite(bound)]
    return max((*limits, _TINY)) if len(limits) >= least else None


def _bound(node: onnx_ir.Node, name: str, at: int) -> float | None:
    """Return a constant bound of a Clip: an attribute before opset 11, else an input."""
    if name in node.attributes:
        return node.attributes[name].as_float()
    return single_number(node.inputs[at]) if len(node.inputs) > at else None


def applied(im: ImportContext, x: Value, op_type: UnaryOp, function: Callable[[Array], Array]) -> Value:
    """Apply a UnaryOp to numbers of any type; return a constant for a constant."""
    return Constant(function(x.array)) if isinstance(x, Constant) else im.apply(as_numbers(im, x), op_type)


def divided(im: ImportContext, a: Value, b: Value) -> Value:
    """Compute a / b of floats, correctly rounded near whole numbers and halves: q + (a - q * b) / b, 2 * q whole."""
    half = Constant(im.f32(b.array) / 2) if isinstance(b, Constant) else binary(im, BinaryOp.MUL, b, number(0.5))
    twice = im.apply(binary(im, BinaryOp.MUL, binary(im, BinaryOp.DIV, a, b), number(2)), UnaryOp.ROUND)
    # Clipped, because the residual of an infinity is infinite.
    twice = im.unary(twice, "Clip", min=-_ALL_EVEN, max=_ALL_EVEN)
    nearest = binary(im, BinaryOp.MUL, twice, number(0.5))
    return binary(im, BinaryOp.ADD, nearest, binary(im, BinaryOp.DIV, residual(im, a, twice, half), b))


def residual(im: ImportContext, a: Value, q: Tensor, b: Value) -> Value:
    """Compute a - q * b exactly, for a whole number q near a / b, up to 2**24."""
    step = number(2.0**_HALF_BITS)
    steps = im.apply(binary(im, BinaryOp.MUL, q, Constant(1 / step.array)), UnaryOp.TRUNC)
    upper = binary(im, BinaryOp.MUL, steps, step)
    lower = binary(im, BinaryOp.SUB, q, upper)
    for part in _parts(im, b):
        for digits in (upper, lower):
            a = binary(im, BinaryOp.SUB, a, binary(im, BinaryOp.MUL, digits, part))
    return a


def _parts(im: ImportContext, x: Value) -> Sequence[Value]:
    """Return x as the sum of one or two numbers of 12 bits."""
    if isinstance(x, Constant):
        mantissa, exponent = np.frexp(x.array)
        upper = np.ldexp(np.rint(mantissa * 2.0**_HALF_BITS), exponent - _HALF_BITS)
        lower = x.array - upper
        return [Constant(upper), Constant(lower)] if lower.any() else [x]
    wide = binary(im, BinaryOp.MUL, x, number(2.0**_HALF_BITS + 1))
    upper = binary(im, BinaryOp.SUB, wide, binary(im, BinaryOp.SUB, wide, x))
    return [upper, binary(im, BinaryOp.SUB, x, upper)]


def truncated(im: ImportContext, a: Value, b: Value) -> Tensor:
    """Compute a / b of integers, rounded towards 0; the dividend is increased so that rounding errors do not matter."""
    larger = arithmetic(im, BinaryOp.MUL, number_value(im, a), number(1 + 2.0**-21))
    return im.apply(_ratio(im, larger, b), UnaryOp.TRUNC)


def floored(im: ImportContext, a: Value, b: Value) -> Tensor:
    """Compute floor(a / b) of integers as floor((a + b's sign / 2) / b), so that rounding errors do not matter."""
    half = arithmetic(im, BinaryOp.MUL, applied(im, b, UnaryOp.SIGN, np.sign), number(0.5))
    return im.apply(_ratio(im, arithmetic(im, BinaryOp.ADD, number_value(im, a), half), b), UnaryOp.FLOOR)


def _ratio(im: ImportContext, a: Value, b: Value) -> Value:
    """Compute a / b; multiply by the inverse of a constant divisor."""
    if not isinstance(b, Constant):
        return binary(im, BinaryOp.DIV, a, b)
    if not b.array.all():
        raise im.refuse("it divides integers by 0", "divide by another constant")
    return binary(im, BinaryOp.MUL, a, Constant(1 / b.array.astype(np.float64)))


def reciprocal(im: ImportContext, x: Tensor) -> Tensor:
    """UnaryOp reciprocal; infinite or NaN at 0, unless later operators limit it."""
    return im.tensor(quotient(im, number(1), x, lambda by: im.apply(im.tensor(by), UnaryOp.RECIPROCAL), 0))


def mod(im: ImportContext, a: Value, b: Value, *, fmod: int = 0) -> Value:
    """Compute a - q * b for the whole number q nearest to a / b, and add or subtract b to correct the sign.

    The result has the sign of a with `fmod`, else of b. It is exact for floats if q is at most 2**22.
    """
    if not is_float(a.dtype):
        q = truncated(im, a, b) if fmod else floored(im, a, b)
        return binary(im, BinaryOp.SUB, a, binary(im, BinaryOp.MUL, q, b))
    if not fmod and not (isinstance(b, Constant) and (np.isfinite(b.array) & (b.array != 0)).all()):
        reason = "its divisor may be 0 or infinite, where ONNX's remainder differs from ncnn's"
        raise im.refuse(reason, "export torch.remainder(x, y) instead, which divides")
    rest = im.tensor(residual(im, a, im.apply(binary(im, BinaryOp.DIV, a, b), UnaryOp.ROUND), b))
    sign = applied(im, a if fmod else b, UnaryOp.SIGN, np.sign)
    opposite = binary(im, BinaryOp.MUL, rest, arithmetic(im, BinaryOp.MUL, sign, number(-1)))
    has_other_sign = im.unary(opposite, "Threshold", threshold=0.0)
    correction = arithmetic(im, BinaryOp.MUL, applied(im, b, UnaryOp.ABS, np.abs), sign)
    return binary(im, BinaryOp.ADD, rest, binary(im, BinaryOp.MUL, has_other_sign, correction))
