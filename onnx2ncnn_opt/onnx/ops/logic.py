"""Comparisons, logic, Where, Trilu, OneHot, and bitwise operators as arithmetic.

A shift is a factor, a bit the difference of two floors: floor(5/2) - 2*floor(5/4). The floors of negative numbers have
the bits of the two's complement.
"""

from functools import partial, reduce
from itertools import zip_longest

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.ir.dim import axis_index, is_fixed
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx import items
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional import logic
from onnx2ncnn_opt.onnx.lower.functional.binary import binary, number
from onnx2ncnn_opt.onnx.lower.functional.cast import FLT_MAX, as_float, float_value, number_value, wrapped_around
from onnx2ncnn_opt.onnx.lower.functional.gather import numbers_of
from onnx2ncnn_opt.onnx.lower.functional.symbolic_tensor import arange
from onnx2ncnn_opt.onnx.lower.functional.views import unsqueeze
from onnx2ncnn_opt.onnx.lower.functional.where import where
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import BOOL, Constant, Sizes, SymbolicTensor, Tensor, Value, held_as_float, is_float

_MOST_BITS = 16  # if both operands are tensors; each bit costs seven layers
_EXACT_BITS = 24

_comparison = partial(onnx_op, integers=True, selects=True, jumps=True, axes="each", folds=True)
_comparison("Greater", since=7)(logic.greater)
_comparison("GreaterOrEqual", since=12)(logic.greater_or_equal)
_comparison("Equal", since=7)(logic.equal)
onnx_op("And", since=7, integers=True, axes="each", folds=True)(logic.and_)
onnx_op("Where", since=9, integers=True, moves=(1, 2), selects=True, axes="each", folds=True)(where)


@_comparison("Less", since=7)
def less(im: ImportContext, a: Value, b: Value) -> Tensor:
    """Threshold of the difference."""
    return logic.greater(im, b, a)


@_comparison("LessOrEqual", since=12)
def less_or_equal(im: ImportContext, a: Value, b: Value) -> Tensor:
    """Threshold of the difference."""
    return logic.greater_or_equal(im, b, a)


@onnx_op("Or", since=7, integers=True, axes="each", folds=True)
def or_(im: ImportContext, a: Value, b: Value) -> Tensor:
    """BinaryOp max."""
    return binary(im, BinaryOp.MAX, float_value(im, a), float_value(im, b)).of_type(BOOL)


@onnx_op("Xor", since=7, integers=True, axes="each", folds=True)
def xor(im: ImportContext, a: Value, b: Value) -> Tensor:
    """BinaryOp sub and UnaryOp abs."""
    return im.apply(binary(im, BinaryOp.SUB, float_value(im, a), float_value(im, b)), UnaryOp.ABS).of_type(BOOL)


@onnx_op("Not", integers=True, axes="each", folds=True)
def not_(im: ImportContext, x: Tensor) -> Tensor:
    """1 - x."""
    return logic.one_minus(im, as_float(im, x)).of_type(BOOL)


@onnx_op("IsNaN", since=9, selects=True, axes="each", folds=True)
def is_nan(im: ImportContext, x: Tensor) -> Tensor:
    """1 - Threshold(|x| > -1), which is 1 for NaN only."""
    return logic.one_minus(im, logic.threshold(im, im.apply(x, UnaryOp.ABS), -1.0)).of_type(BOOL)


@onnx_op("IsInf", since=10, selects=True, axes="each", folds=True)
def is_inf(im: ImportContext, x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    """Threshold above the largest finite number."""
    if not detect_negative and not detect_positive:
        return logic.threshold(im, im.apply(im.apply(x, UnaryOp.ABS), UnaryOp.NEG), 0.0).of_type(BOOL)
    if detect_negative:
        x = im.apply(x, UnaryOp.ABS if detect_positive else UnaryOp.NEG)
    return logic.threshold(im, x, FLT_MAX).of_type(BOOL)


@onnx_op("Trilu", since=14, integers=True, axes="same", items=items.along((-2, -1)), folds=True)
def trilu(im: ImportContext, x: Tensor, k: Sizes | None = None, *, upper: int = 1) -> Value:
    """Where with a mask of the triangle, which drops any number outside."""
    shape, offset = x.shape[-2:], k[0] if k else 0
    if len(shape) < 2:
        raise im.invalid(f"a triangle of a tensor of rank {x.rank}")
    if is_fixed(shape) and isinstance(offset, int):
        ones = np.ones(shape, bool)
        inside: Value = Constant(np.triu(ones, offset) if upper else np.tril(ones, offset))
    else:
        to_the_right = axis_index(0) - axis_index(1)
        beyond = to_the_right - offset if upper else offset - to_the_right
        distance = im.tensor(SymbolicTensor(np.full((1, 1), beyond, dtype=object), shape, np.dtype(np.float32)))
        inside = im.unary(distance, "Threshold", threshold=-0.5)
    return where(im, inside, x, Constant(np.zeros((), x.dtype)))


@onnx_op("OneHot", since=9, integers=True, folds=True)
def one_hot(im: ImportContext, indices: Tensor, depth: Sizes, values: Array, *, axis: int = -1) -> Value:
    """Thresholds of the distance to each class; fractions are truncated first.

    ONNX Runtime truncates from 1.32 on; before, a fraction matched no class.
    """
    if indices.dtype == np.bool_:
        raise im.invalid("indices of type bool")
    count, rank = depth[0], indices.rank + 1
    if isinstance(count, int) and count < 1:
        raise im.refuse(f"depth {count}: ncnn has no empty tensors", "keep one element at least")
    axis = im.axis(axis, rank)
    numbers = as_float(im, indices)
    if is_float(indices.dtype):
        numbers = im.apply(numbers, UnaryOp.TRUNC)
    if not np.issubdtype(indices.dtype, np.unsignedinteger):
        # float32 rounds large sums as ONNX Runtime does.
        is_negative = im.unary(im.apply(numbers, UnaryOp.NEG), "Threshold", threshold=0.0)
        numbers = binary(im, BinaryOp.ADD, numbers, binary(im, BinaryOp.MUL, is_negative, numbers_of(im, count)))
    hot = logic.equals(im, unsqueeze(im, numbers, (axis,)), arange(im, count, axis, rank))
    off, on = (float(value) for value in values.astype(np.float64))
    scaled = hot if on - off == 1 else binary(im, BinaryOp.MUL, hot, number(on - off))
    return scaled if off == 0 else binary(im, BinaryOp.ADD, scaled, number(off))


@onnx_op("BitShift", since=11, integers=True, axes="each")
def bit_shift(im: ImportContext, x: Value, y: Array, *, direction: str) -> Value:
    """BinaryOp mul by a power of two; UnaryOp floor for shifts to the right."""
    if direction not in ("LEFT", "RIGHT"):
        raise im.invalid(f"direction {direction} is not known")
    width = 8 * x.dtype.itemsize
    within = (y >= 0) & (y < width)
    bits = np.where(within, y, width).astype(np.float64)
    moved = number_value(im, x)
    if direction == "LEFT" and width > _MOST_BITS and (y[within] > _EXACT_BITS).any():
        raise im.refuse(f"a shift of {x.dtype} beyond the {_EXACT_BITS} bits that float32 holds", "shift by fewer bits")
    if direction == "LEFT":
        return _of_type(im, binary(im, BinaryOp.MUL, moved, Constant(np.where(within, 2.0**bits, 0))), x)
    return _of_type(im, im.apply(binary(im, BinaryOp.MUL, moved, Constant(2.0**-bits)), UnaryOp.FLOOR), x)


@onnx_op("BitwiseAnd", since=18, integers=True, axes="each", folds=True)
def bitwise_and(im: ImportContext, a: Value, b: Value) -> Value:
    """Floors of quotients by powers of two."""
    return _of_type(im, _common(im, a, b), a)


@onnx_op("BitwiseOr", since=18, integers=True, axes="each", folds=True)
def bitwise_or(im: ImportContext, a: Value, b: Value) -> Value:
    """Compute a + b - (a & b)."""
    return _of_type(im, binary(im, BinaryOp.SUB, binary(im, BinaryOp.ADD, a, b), _common(im, a, b)), a)


@onnx_op("BitwiseXor", since=18, integers=True, axes="each", folds=True)
def bitwise_xor(im: ImportContext, a: Value, b: Value) -> Value:
    """Compute a + b - 2 * (a & b)."""
    total = binary(im, BinaryOp.ADD, a, b)
    return _of_type(im, binary(im, BinaryOp.SUB, total, binary(im, BinaryOp.MUL, _common(im, a, b), number(2))), a)


@onnx_op("BitwiseNot", since=18, integers=True, axes="each", folds=True)
def bitwise_not(im: ImportContext, x: Tensor) -> Value:
    """-1 - x; for unsigned integers the largest number minus x."""
    if x.dtype != np.int64 and x.dtype.itemsize > 2:
        raise im.refuse(f"the bits of {x.dtype}: float32 holds 24 of them", "cast to int64 before, if 24 are enough")
    largest = -1 if x.dtype.kind == "i" else 2 ** (8 * x.dtype.itemsize) - 1
    return _of_type(im, binary(im, BinaryOp.SUB, number(largest), x), x)


def _of_type(im: ImportContext, x: Value, like: Value) -> Tensor:
    return wrapped_around(im, im.tensor(x).of_type(held_as_float(like.dtype)))


def _common(im: ImportContext, a: Value, b: Value) -> Value:
    """Compute a & b."""
    dtype = a.dtype
    if isinstance(a, Constant):
        a, b = b, a
    if isinstance(b, Constant) and b.scalar is not None:
        return _masked(im, number_value(im, a), int(b.array.reshape(-1)[0]))
    width = 8 * dtype.itemsize
    if width > _MOST_BITS:
        reason = f"bits of {dtype} if the other operand is not one constant"
        raise im.refuse(reason, f"cast to integers of at most {_MOST_BITS} bits before")
    signed = dtype.kind == "i"
    of_a, of_b = (_bits(im, number_value(im, x), width, signed=signed) for x in (a, b))
    weights = [2.0**bit for bit in range(width)]
    if signed:
        weights[-1] *= -1
    parts = [
        binary(im, BinaryOp.MUL, binary(im, BinaryOp.MUL, p, q), number(weight))
        for p, q, weight in zip(of_a, of_b, weights, strict=True)
    ]
    return reduce(lambda total, part: binary(im, BinaryOp.ADD, total, part), parts)


def _bits(im: ImportContext, x: Value, width: int, *, signed: bool) -> list[Value]:
    """Return the bits of a number, the lowest first; a set sign bit is -1."""
    bits: list[Value] = []
    while len(bits) < width - signed:
        half = im.apply(binary(im, BinaryOp.MUL, x, number(0.5)), UnaryOp.FLOOR)
        bits.append(binary(im, BinaryOp.SUB, x, binary(im, BinaryOp.MUL, half, number(2))))
        x = half
    return [*bits, x] if signed else bits


def _masked(im: ImportContext, x: Value, mask: int) -> Value:
    """Return x & mask: for each run of ones in the mask, add the bits of x in the run."""
    total: Value | None = None
    changes = mask ^ (mask << 1)  # begins and ends of runs; the last run of a negative mask has no end
    edges = [bit for bit in range(changes.bit_length()) if changes >> bit & 1]
    for begin, end in zip_longest(edges[::2], edges[1::2]):
        part = _cleared(im, x, begin)
        if end is not None:
            part = binary(im, BinaryOp.SUB, part, _cleared(im, x, end))
        total = part if total is None else binary(im, BinaryOp.ADD, total, part)
    return binary(im, BinaryOp.MUL, x, number(0)) if total is None else total


def _cleared(im: ImportContext, x: Value, bits: int) -> Value:
    """Return the number with its lowest bits cleared."""
    if not bits:
        return x
    quotient = im.apply(binary(im, BinaryOp.MUL, x, number(2.0**-bits)), UnaryOp.FLOOR)
    return binary(im, BinaryOp.MUL, quotient, number(2.0**bits))
