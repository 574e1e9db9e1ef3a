"""Comparisons, logic and Where: bools are 0 and 1, everything else is arithmetic that keeps them so.

A comparison is Threshold (x > t), which is false for NaN as ONNX has it. What is not as ONNX: numbers closer to each
other than the smallest normal float32 are equal, two equal infinities of which none is constant are not. Where picks
between all numbers and infinities as ONNX does, but what it makes of NaN depends on the machine's min and max.
"""

from __future__ import annotations

import numpy as np

from onnx2ncnn_opt.ir.dim import Shape
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.context import ImportContext
from onnx2ncnn_opt.onnx.form import broadcast
from onnx2ncnn_opt.onnx.ops.cast import FLT_MIN, as_float, float_value
from onnx2ncnn_opt.onnx.ops.elementwise import ADD, MAX, MIN, MUL, RSUB, SUB, binary, spread
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import BOOL, Constant, Tensor, Value, held_as_float, is_float

FLT_MAX = float(np.finfo(np.float32).max)
LARGEST_HALF = float(np.finfo(np.float16).max)
_ABS, _NEG = 0, 1


def _threshold(im: ImportContext, x: Value, limit: float) -> Tensor:
    """1 where x > limit, else 0."""
    return im.unary(x, "Threshold", threshold=limit)


def _negative(im: ImportContext, x: Value) -> Tensor:
    return im.unary(x, "UnaryOp", op_type=_NEG)


def _not(im: ImportContext, x: Value) -> Tensor:
    return im.unary(x, "BinaryOp", op_type=RSUB, with_scalar=1, b=1.0)


def _bools(im: ImportContext, x: Value) -> Tensor:
    x = im.tensor(x)
    return Tensor(x.blob, x.view, BOOL)


def _below(limit: float) -> float:
    """The next smaller float32; ncnn takes denormal numbers for 0."""
    below = float(np.nextafter(np.float32(limit), np.float32(-np.inf)))
    return -FLT_MIN if limit == 0 else 0.0 if abs(below) < FLT_MIN else below


def _compare(im: ImportContext, a: Value, b: Value, *, equal: bool) -> Value:
    """Whether a > b, or a >= b with `equal`."""
    shape = result_shape(im, a, b)
    a, b = float_value(im, a), float_value(im, b)
    if isinstance(b, Constant) and b.scalar is not None and np.isfinite(b.scalar) and isinstance(a, Tensor):
        return ranked(_threshold(im, a, _below(b.scalar) if equal else b.scalar), len(shape))
    if isinstance(a, Constant) and a.scalar is not None and np.isfinite(a.scalar) and isinstance(b, Tensor):
        return ranked(_threshold(im, _negative(im, b), _below(-a.scalar) if equal else -a.scalar), len(shape))
    return _threshold(im, binary(im, SUB, a, b), -FLT_MIN if equal else 0.0)


@onnx_op("Greater", since=7, integers=True, selects=True, jumps=True)
def greater(im: ImportContext, a: Value, b: Value) -> Tensor:
    """Threshold of the difference."""
    return _bools(im, _compare(im, a, b, equal=False))


@onnx_op("Less", since=7, integers=True, selects=True, jumps=True)
def less(im: ImportContext, a: Value, b: Value) -> Tensor:
    """Threshold of the difference."""
    return _bools(im, _compare(im, b, a, equal=False))


@onnx_op("GreaterOrEqual", since=12, integers=True, selects=True, jumps=True)
def greater_or_equal(im: ImportContext, a: Value, b: Value) -> Tensor:
    """Threshold of the difference."""
    return _bools(im, _compare(im, a, b, equal=True))


@onnx_op("LessOrEqual", since=12, integers=True, selects=True, jumps=True)
def less_or_equal(im: ImportContext, a: Value, b: Value) -> Tensor:
    """Threshold of the difference."""
    return _bools(im, _compare(im, b, a, equal=True))


@onnx_op("Equal", since=7, integers=True, selects=True, jumps=True)
def equal(im: ImportContext, a: Value, b: Value) -> Tensor:
    """Two Thresholds: not less and not greater."""
    shape = result_shape(im, a, b)
    a, b = float_value(im, a), float_value(im, b)
    if isinstance(a, Constant):
        a, b = b, a
    if isinstance(a, Tensor) and isinstance(b, Constant) and b.scalar is not None:
        if np.isinf(b.scalar):
            # A Reduction starts from the largest finite number, and gives it for rows of nothing but infinities.
            reduced = a.blob.producer is not None and a.blob.producer.type == "Reduction"
            limit = _below(FLT_MAX) if reduced else FLT_MAX
            return _bools(im, ranked(_threshold(im, a if b.scalar > 0 else _negative(im, a), limit), len(shape)))
        if np.isfinite(b.scalar):
            return _bools(im, ranked(_between(im, a, _below(b.scalar), b.scalar), len(shape)))
    return _bools(im, _between(im, im.tensor(binary(im, SUB, a, b)), -FLT_MIN, 0.0))


def _between(im: ImportContext, x: Tensor, low: float, high: float) -> Tensor:
    """1 where low < x <= high, else 0."""
    inside = im.layer("BinaryOp", _threshold(im, x, low).blob, _threshold(im, x, high).blob, op_type=SUB)
    return im.like(x, inside)


@onnx_op("And", since=7, integers=True)
def and_(im: ImportContext, a: Value, b: Value) -> Tensor:
    """BinaryOp mul."""
    return _bools(im, binary(im, MUL, float_value(im, a), float_value(im, b)))


@onnx_op("Or", since=7, integers=True)
def or_(im: ImportContext, a: Value, b: Value) -> Tensor:
    """BinaryOp max."""
    return _bools(im, binary(im, MAX, float_value(im, a), float_value(im, b)))


@onnx_op("Xor", since=7, integers=True)
def xor(im: ImportContext, a: Value, b: Value) -> Tensor:
    """The distance."""
    return _bools(im, im.unary(binary(im, SUB, float_value(im, a), float_value(im, b)), "UnaryOp", op_type=_ABS))


@onnx_op("Not", integers=True)
def not_(im: ImportContext, x: Tensor) -> Tensor:
    """1 - x."""
    return _bools(im, _not(im, as_float(im, x)))


@onnx_op("IsNaN", since=9, selects=True)
def is_nan(im: ImportContext, x: Tensor) -> Tensor:
    """Not above -1 although positive."""
    return _bools(im, _not(im, _threshold(im, im.unary(x, "UnaryOp", op_type=_ABS), -1.0)))


@onnx_op("IsInf", since=10, selects=True)
def is_inf(im: ImportContext, x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    """Above the largest number."""
    if not detect_negative and not detect_positive:
        return _bools(im, _threshold(im, _negative(im, im.unary(x, "UnaryOp", op_type=_ABS)), 0.0))
    if detect_negative:
        x = im.unary(x, "UnaryOp", op_type=_ABS if detect_positive else _NEG)
    return _bools(im, _threshold(im, x, FLT_MAX))


@onnx_op("Where", since=9, integers=True, moves=(1, 2), selects=True)
def where(im: ImportContext, condition: Value, a: Value, b: Value) -> Value:
    """BinaryOp min and max with bounds that are infinite where a number passes, and equal the other where not."""
    shape = result_shape(im, condition, a, b)
    if isinstance(condition, Constant) and (condition.array.all() or not condition.array.any()):
        return _spread(im, a if condition.array.all() else b, shape)
    chosen = im.tensor(_spread(im, _where(im, condition, float_value(im, a), float_value(im, b)), shape))
    return chosen if is_float(a.dtype) else Tensor(chosen.blob, chosen.view, held_as_float(a.dtype))


def _spread(im: ImportContext, x: Value, shape: Shape) -> Value:
    """The operand broadcast to a shape."""
    x = x if isinstance(x, Constant) else ranked(x, len(shape))
    return x if x.shape == shape else spread(im, x, shape)


def _where(im: ImportContext, condition: Value, a: Value, b: Value) -> Value:
    if isinstance(condition, Constant):
        return _where_constant(im, condition.array.astype(bool), a, b)
    mask = as_float(im, condition)
    if isinstance(a, Constant) and isinstance(b, Constant):
        return _constants(im, mask, a, b)
    if isinstance(b, Constant) and isinstance(a, Tensor):
        return _masked(im, _not(im, mask), a, b)
    if isinstance(a, Constant) and isinstance(b, Tensor):
        return _masked(im, mask, b, a)
    return binary(im, ADD, _gated(im, mask, a), _gated(im, _not(im, mask), b))


def _where_constant(im: ImportContext, condition: Array, a: Value, b: Value) -> Value:
    if isinstance(a, Constant):
        return _bounded(im, b, *_bounds(~condition, a.array))
    if isinstance(b, Constant):
        return _bounded(im, a, *_bounds(condition, b.array))
    zero = np.zeros((), np.float32)
    parts = _bounded(im, a, *_bounds(condition, zero)), _bounded(im, b, *_bounds(~condition, zero))
    return binary(im, ADD, *parts)


def _bounds(passes: Array, other: Array) -> tuple[Constant, Constant]:
    """The lower and the upper bound: infinite where a number passes, else the number to take its place."""
    other = other.astype(np.float32)
    infinite = np.float32(np.inf)
    return Constant(np.where(passes, -infinite, other)), Constant(np.where(passes, infinite, other))


def _bounded(im: ImportContext, x: Value, low: Constant, high: Constant) -> Value:
    """The number within its bounds; bounds that are infinite everywhere are left out."""
    if (low.array == -np.inf).all():
        return binary(im, MIN, x, high)
    return binary(im, MAX, x, low) if (high.array == np.inf).all() else _between_bounds(im, im.tensor(x), low, high)


def _between_bounds(im: ImportContext, x: Tensor, low: Value, high: Value) -> Value:
    """min(high, max(x, low)), which stops NaN: x86's max gives its second operand for it, and C++'s min its first.

    Of Mats of unequal shapes ncnn may take either first, and so does `binary` with constants.
    """
    if low.shape != x.shape and result_shape(im, x, low) == x.shape:
        nothing = _threshold(im, _negative(im, im.unary(x, "UnaryOp", op_type=_ABS)), 0.0)
        low, high = (binary(im, ADD, nothing, bound) for bound in (low, high))
    return binary(im, MIN, im.tensor(high), binary(im, MAX, x, im.tensor(low)))


def _constants(im: ImportContext, mask: Tensor, a: Constant, b: Constant) -> Value:
    """Of two constants: products with the mask; an infinity as the logarithm of 0."""
    if not np.isfinite(a.array).all():
        mask, a, b = _not(im, mask), b, a
    if not np.isfinite(a.array).all() or (not np.isfinite(b.array).all() and (b.scalar is None or np.isnan(b.scalar))):
        parts = _gated(im, mask, im.tensor(a)), _gated(im, _not(im, mask), im.tensor(b))
        return binary(im, ADD, *parts)
    if b.scalar is not None and np.isinf(b.scalar):
        drop = im.unary(mask, "Log")
        drop = drop if b.scalar < 0 else _negative(im, drop)
        return drop if a.scalar == 0 else binary(im, ADD, drop, a)
    for chosen, low, other in ((mask, b, a), (None, a, b)):
        if low.scalar is not None and low.scalar < -LARGEST_HALF and other.scalar == 0:
            # In fp16, where the number is -infinity, a product with 0 is NaN, but a maximum is not.
            return binary(im, MAX, im.unary(_not(im, mask) if chosen is None else chosen, "Log"), low)
    if b.scalar == 0:
        return binary(im, MUL, mask, a)
    rest = binary(im, MUL, _not(im, mask), b)
    return rest if a.scalar == 0 else binary(im, ADD, binary(im, MUL, mask, a), rest)


def _masked(im: ImportContext, mask: Tensor, x: Tensor, other: Constant) -> Value:
    """`other` where the mask is 1, x where it is 0."""
    if other.scalar is not None and np.isinf(other.scalar):
        # Half the largest number, with the sign of 0.5 - mask, times 4.
        wall = im.unary(mask, "BinaryOp", op_type=RSUB, with_scalar=1, b=0.5)
        for factor in (FLT_MAX, 4.0 if other.scalar < 0 else -4.0):
            wall = im.unary(wall, "BinaryOp", op_type=MUL, with_scalar=1, b=factor)
        return binary(im, MIN if other.scalar < 0 else MAX, wall, x)
    if not np.isfinite(other.array).all():
        return binary(im, ADD, _gated(im, mask, im.tensor(other)), _gated(im, _not(im, mask), x))
    open_ = im.unary(mask, "Log")
    if other.scalar == -FLT_MAX:  # no finite number is below
        return binary(im, MIN, binary(im, RSUB, open_, other), x)
    low = open_ if not other.array.any() else binary(im, ADD, open_, other)
    high = _negative(im, open_) if not other.array.any() else binary(im, RSUB, open_, other)
    return _between_bounds(im, x, low, high)


def _gated(im: ImportContext, mask: Tensor, x: Value) -> Value:
    """x where the mask is 1, 0 where it is 0, whatever x is there."""
    low = im.unary(_not(im, mask), "Log")
    return _between_bounds(im, im.tensor(x), low, _negative(im, low))


def ranked(x: Tensor, rank: int) -> Tensor:
    """The tensor with leading axes of size 1."""
    return x.viewed(x.view.with_axes(((),) * (rank - x.rank) + x.view.axes))


def result_shape(im: ImportContext, *xs: Value) -> Shape:
    """What shapes broadcast to."""
    shape: Shape = ()
    for x in xs:
        rank = max(len(shape), x.rank)
        padded = [(1,) * (rank - len(s)) + tuple(s) for s in (shape, x.shape)]
        sizes = [broadcast(n, m) for n, m in zip(*padded, strict=True)]
        if any(size is None for size in sizes):
            raise im.refuse(f"shapes {', '.join(str(list(x.shape)) for x in xs)} do not broadcast")
        shape = tuple(size for size in sizes if size is not None)
    return shape
