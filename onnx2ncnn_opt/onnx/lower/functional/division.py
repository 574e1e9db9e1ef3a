"""Quotients that the model rounds to whole numbers, or whose divisor may be 0.

ncnn's division may be off in the last bits: 6 / 3 may be less than 2, and its floor 1. So where a model rounds a
quotient, the division is corrected by what it leaves, which is computed without any error. For integers up to 2**20 it
is enough to divide a number beside the one that is meant.
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
from onnx2ncnn_opt.onnx.value import Constant, Operand, Tensor, Value, is_float

_HALF_BITS = 12  # a product of two numbers of so many bits is exact
_BEYOND = 2.0**30  # every float32 from here on is even
# From where on functions give the same in float32, and exp gives 0.
_LIMITS = {"Atan": 1e8, "Tanh": 20.0, "Erf": 10.0, "Sigmoid": 104.0}
_VANISHED = 104.0
_TINY = 1e-3


def by_whole(im: ImportContext, a: Value, b: Constant) -> Value:
    """Compute a / b to the last bit, for a whole number b: a scale's last bit decides ties between two steps."""
    inverse = Constant(1 / im.f32(b.array).astype(np.float64))
    near = binary(im, BinaryOp.MUL, a, inverse)
    return binary(im, BinaryOp.ADD, near, binary(im, BinaryOp.MUL, rest_of(im, a, im.tensor(b), near), inverse))


def quotient(im: ImportContext, a: Operand, b: Operand, divide: Callable[[Operand], Value], at: int) -> Value:
    """Compute a / b with `divide`, a function of the divisor, which is the node's input number `at` or kept from 0."""
    kept = kept_from_zero(im, a, b)
    return infinite_at_zero(im, b, divide, at) if kept is b else divide(kept)


def infinite_at_zero(im: ImportContext, b: Operand, divide: Callable[[Operand], Value], at: int) -> Value:
    """Return a quotient, infinite where the divisor is 0 or -0.0 and NaN for 0 / 0, if the model tests for that."""
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
    # exp(0) is 1, and the square of exp(100) infinite, in 16 bits as well.
    large = im.apply(binary(im, BinaryOp.MUL, zeros, number(_VANISHED)), UnaryOp.EXP)
    return binary(im, BinaryOp.MUL, whole, im.apply(large, UnaryOp.SQUARE))


def _is_any_test(tests: Sequence[onnx_ir.Node]) -> bool:
    """Return True if the model tests for NaN and infinity at once: then it does not matter which a number is."""
    readers = [reader for test in tests for reader in test.outputs[0].consumers()]
    both = sorted(test.op_type for test in tests) == ["IsInf", "IsNaN"] and not any(test.attributes for test in tests)
    return both and len(readers) == 2 and readers[0] is readers[1] and readers[0].op_type == "Or"


def kept_from_zero(im: ImportContext, a: Operand, b: Operand) -> Operand:
    """Return a divisor that is not 0, where all readers of the quotient have reached their limit long before."""
    if not isinstance(b, Tensor) or not isinstance(a, (Constant, Tensor)):
        return b
    # x86 makes NaN of 1 / 0, and of the atan of infinity; -0.0 counts as 0 here. 0 / 0 stays NaN.
    known, low, high = im.range_of(b), *im.range_of(a)[:2]
    is_odd = isinstance(a, Constant) and not (a.array.all() and np.isfinite(a.array).all())
    if not known.has(0) or not is_float(b.dtype) or is_odd:
        return b
    side = 0 if known.low < 0 or low < 0 < high else 1 if low >= 0 else -1
    limits = [_limit(reader, side) for reader in im.readers()]
    largest = max((limit for limit in limits if limit is not None), default=0.0)
    if not largest or None in limits:
        return b
    if isinstance(a, Tensor):
        least: Value = binary(im, BinaryOp.MUL, im.apply(a, UnaryOp.ABS), number(0.5 / largest))
    else:
        least = number(float(np.abs(a.array.astype(np.float64)).min()) / (2 * largest))
    if known.low >= 0:
        return binary(im, BinaryOp.MAX, b, least)
    return binary(im, BinaryOp.ADD, b, binary(im, BinaryOp.MUL, is_zero(im, b), least))


def _limit(node: onnx_ir.Node, side: int) -> float | None:
    """Return the size from which on a node gives the same for all numbers of the sign `side` (0: both), or None."""
    if node.op_type in _LIMITS:
        return _LIMITS[node.op_type]
    if node.op_type == "Exp" and side < 0:
        return _VANISHED
    if node.op_type == "Neg" and side > 0 and node.outputs[0].consumers():
        return _VANISHED if all(reader.op_type == "Exp" for reader in node.outputs[0].consumers()) else None
    if node.op_type in COMPARISONS or (node.op_type == "Min" and side > 0):
        bounds, least = [_scalar(value) for value in node.inputs], 1
    elif node.op_type == "Clip":
        low, high = (_bound(node, name, at) for name, at in (("min", 1), ("max", 2)))
        bounds = [high] if side > 0 else [low] if side < 0 else [low, high]
        least = len(bounds)
    else:
        return None
    found = [abs(bound) for bound in bounds if bound is not None and np.isfinite(bound)]
    return max((*found, _TINY)) if len(found) >= least else None


def _bound(node: onnx_ir.Node, name: str, at: int) -> float | None:
    """Return a constant bound of a Clip, which was an attribute once."""
    if name in node.attributes:
        return node.attributes[name].as_float()
    return _scalar(node.inputs[at]) if len(node.inputs) > at else None


def _scalar(value: onnx_ir.Value | None) -> float | None:
    tensor = value.const_value if value is not None else None
    return float(tensor.numpy().reshape(-1)[0]) if tensor is not None and tensor.size == 1 else None


def applied(im: ImportContext, x: Value, op_type: UnaryOp, function: Callable[[Array], Array]) -> Value:
    """UnaryOp on numbers of any type; of a constant a constant."""
    return Constant(function(x.array)) if isinstance(x, Constant) else im.apply(as_numbers(im, x), op_type)


def divided(im: ImportContext, a: Value, b: Value) -> Value:
    """Compute a / b of floats, rounded correctly near whole numbers and halves: twice the nearest, and the rest."""
    half = Constant(im.f32(b.array) / 2) if isinstance(b, Constant) else binary(im, BinaryOp.MUL, b, number(0.5))
    twice = im.apply(binary(im, BinaryOp.MUL, binary(im, BinaryOp.DIV, a, b), number(2)), UnaryOp.ROUND)
    # Clipped, because the remainder of an infinity is infinite.
    twice = im.unary(twice, "Clip", min=-_BEYOND, max=_BEYOND)
    nearest = binary(im, BinaryOp.MUL, twice, number(0.5))
    return binary(im, BinaryOp.ADD, nearest, binary(im, BinaryOp.DIV, rest_of(im, a, twice, half), b))


def rest_of(im: ImportContext, a: Value, turns: Tensor, b: Value) -> Value:
    """Compute a - turns * b for whole numbers of turns near a / b, without any error up to 2**24 of them."""
    step = number(2.0**_HALF_BITS)
    steps = im.apply(binary(im, BinaryOp.MUL, turns, Constant(1 / step.array)), UnaryOp.TRUNC)
    many = binary(im, BinaryOp.MUL, steps, step)
    few = binary(im, BinaryOp.SUB, turns, many)
    for part in _parts(im, b):
        for digits in (many, few):
            a = binary(im, BinaryOp.SUB, a, binary(im, BinaryOp.MUL, digits, part))
    return a


def _parts(im: ImportContext, x: Value) -> Sequence[Value]:
    """Return one or two numbers of 12 bits, whose sum is x."""
    if isinstance(x, Constant):
        mantissa, exponent = np.frexp(x.array)
        upper = np.ldexp(np.rint(mantissa * 2.0**_HALF_BITS), exponent - _HALF_BITS)
        lower = x.array - upper
        return [Constant(upper), Constant(lower)] if lower.any() else [x]
    wide = binary(im, BinaryOp.MUL, x, number(2.0**_HALF_BITS + 1))
    above = binary(im, BinaryOp.SUB, wide, binary(im, BinaryOp.SUB, wide, x))
    return [above, binary(im, BinaryOp.SUB, x, above)]


def truncated(im: ImportContext, a: Value, b: Value) -> Tensor:
    """Return the whole part of a / b of integers: of a ratio a little too large, which reaches whole numbers."""
    larger = arithmetic(im, BinaryOp.MUL, number_value(im, a), number(1 + 2.0**-21))
    return im.apply(_ratio(im, larger, b), UnaryOp.TRUNC)


def floored(im: ImportContext, a: Value, b: Value) -> Tensor:
    """Return the next whole number below a / b of integers: of a ratio half way between two that it may be."""
    half = arithmetic(im, BinaryOp.MUL, applied(im, b, UnaryOp.SIGN, np.sign), number(0.5))
    return im.apply(_ratio(im, arithmetic(im, BinaryOp.ADD, number_value(im, a), half), b), UnaryOp.FLOOR)


def _ratio(im: ImportContext, a: Value, b: Value) -> Value:
    """Compute a / b; a constant divisor as a factor."""
    if not isinstance(b, Constant):
        return binary(im, BinaryOp.DIV, a, b)
    if not b.array.all():
        raise im.refuse("it divides integers by 0", "divide by another constant")
    return binary(im, BinaryOp.MUL, a, Constant(1 / b.array.astype(np.float64)))


def reciprocal(im: ImportContext, x: Tensor) -> Tensor:
    """UnaryOp reciprocal; infinite or NaN at 0, where nothing that follows limits it."""
    return im.tensor(quotient(im, number(1), x, lambda by: im.apply(im.tensor(by), UnaryOp.RECIPROCAL), 0))


def mod(im: ImportContext, a: Value, b: Value, *, fmod: int = 0) -> Value:
    """Compute a - turns * b for the nearest whole number of turns, and one turn more or less for the sign.

    The sign is that of a with `fmod`, else that of b. Floats have no error up to 2**22 turns.
    """
    if not is_float(a.dtype):
        turns = truncated(im, a, b) if fmod else floored(im, a, b)
        return binary(im, BinaryOp.SUB, a, binary(im, BinaryOp.MUL, turns, b))
    if not fmod and not (isinstance(b, Constant) and (np.isfinite(b.array) & (b.array != 0)).all()):
        reason = "its divisor may be 0 or infinite, where ONNX's remainder differs from ncnn's"
        raise im.refuse(reason, "export torch.remainder(x, y) instead, which divides")
    rest = im.tensor(rest_of(im, a, im.apply(binary(im, BinaryOp.DIV, a, b), UnaryOp.ROUND), b))
    side = applied(im, a if fmod else b, UnaryOp.SIGN, np.sign)
    against = binary(im, BinaryOp.MUL, rest, arithmetic(im, BinaryOp.MUL, side, number(-1)))
    other = im.unary(against, "Threshold", threshold=0.0)
    turn = arithmetic(im, BinaryOp.MUL, applied(im, b, UnaryOp.ABS, np.abs), side)
    return binary(im, BinaryOp.ADD, rest, binary(im, BinaryOp.MUL, other, turn))
