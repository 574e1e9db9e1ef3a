"""Comparisons and logic: bools are 0 and 1, and logic is arithmetic on these.

A comparison is Threshold (x > t), which is false for NaN, as in ONNX. The difference of two infinities is NaN. So for
operands that may be infinite, equality is 1 - Threshold(distance). One difference to ONNX: numbers closer to each other
than the smallest normal float32 are equal.
"""

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import binary, broadcast_shape
from onnx2ncnn_opt.onnx.lower.functional.cast import FLT_MAX, FLT_MIN, float_value
from onnx2ncnn_opt.onnx.lower.functional.views import with_rank
from onnx2ncnn_opt.onnx.value import BOOL, Constant, Tensor, Value


def threshold(im: ImportContext, x: Value, limit: float) -> Tensor:
    """Return 1 where x > limit, else 0, also for NaN."""
    return im.unary(x, "Threshold", threshold=limit)


def one_minus(im: ImportContext, x: Value) -> Tensor:
    """1 - x."""
    return im.apply(x, BinaryOp.RSUB, 1.0)


def below(limit: float) -> float:
    """Return the next smaller float32 that is not denormal: ncnn flushes these to 0."""
    below = float(np.nextafter(np.float32(limit), np.float32(-np.inf)))
    return -FLT_MIN if limit == 0 else 0.0 if abs(below) < FLT_MIN else below


def _compare(im: ImportContext, a: Value, b: Value, *, equal: bool) -> Tensor:
    """Return a > b, or a >= b with `equal`."""
    shape = broadcast_shape(im, a.shape, b.shape)
    a, b = float_value(im, a), float_value(im, b)
    if isinstance(b, Constant) and b.scalar is not None and np.isfinite(b.scalar) and isinstance(a, Tensor):
        return with_rank(threshold(im, a, below(b.scalar) if equal else b.scalar), len(shape))
    if isinstance(a, Constant) and a.scalar is not None and np.isfinite(a.scalar) and isinstance(b, Tensor):
        return with_rank(threshold(im, im.apply(b, UnaryOp.NEG), below(-a.scalar) if equal else -a.scalar), len(shape))
    if equal and im.range_of(a).may_be_inf and im.range_of(b).may_be_inf:  # their difference may be NaN
        return _not(im, threshold(im, binary(im, BinaryOp.SUB, b, a), 0.0), a, b)
    return threshold(im, binary(im, BinaryOp.SUB, a, b), -FLT_MIN if equal else 0.0)


def _not(im: ImportContext, differs: Tensor, *operands: Value) -> Tensor:
    """Return ``1 - differs``, but 0 where an operand is NaN: the Threshold `differs` is 0 there, too."""
    magnitudes = [im.apply(im.tensor(x), UnaryOp.ABS) for x in operands if im.range_of(x).may_be_nan]
    if not magnitudes:
        return one_minus(im, differs)
    magnitude = magnitudes[0] if len(magnitudes) == 1 else binary(im, BinaryOp.ADD, *magnitudes)
    return binary(im, BinaryOp.SUB, threshold(im, magnitude, -1.0), differs)


def greater(im: ImportContext, a: Value, b: Value) -> Tensor:
    """Threshold of the difference."""
    return _compare(im, a, b, equal=False).of_type(BOOL)


def greater_or_equal(im: ImportContext, a: Value, b: Value) -> Tensor:
    """Threshold of the difference."""
    return _compare(im, a, b, equal=True).of_type(BOOL)


def equal(im: ImportContext, a: Value, b: Value) -> Tensor:
    """Two Thresholds: not less and not greater; one Threshold of the distance if both operands may be infinite."""
    shape = broadcast_shape(im, a.shape, b.shape)
    a, b = float_value(im, a), float_value(im, b)
    if isinstance(a, Constant):
        a, b = b, a
    if isinstance(a, Tensor) and isinstance(b, Constant) and b.scalar is not None:
        if np.isinf(b.scalar):
            side = a if b.scalar > 0 else im.apply(a, UnaryOp.NEG)
            return with_rank(threshold(im, side, FLT_MAX), len(shape)).of_type(BOOL)
        if np.isfinite(b.scalar):
            return with_rank(between(im, a, below(b.scalar), b.scalar), len(shape)).of_type(BOOL)
    distance = binary(im, BinaryOp.SUB, a, b)
    if im.range_of(a).may_be_inf and im.range_of(b).may_be_inf:
        return _not(im, threshold(im, im.apply(distance, UnaryOp.ABS), 0.0), a, b).of_type(BOOL)
    return between(im, distance, -FLT_MIN, 0.0).of_type(BOOL)


def between(im: ImportContext, x: Tensor, low: float, high: float) -> Tensor:
    """Return 1 where low < x <= high, else 0."""
    inside = im.layer("BinaryOp", threshold(im, x, low).blob, threshold(im, x, high).blob, op_type=BinaryOp.SUB)
    return im.like(x, inside)


def equals(im: ImportContext, x: Tensor, numbers: Value) -> Tensor:
    """Return 1 where the distance of x to finite numbers is 0, else 0."""
    return between(im, binary(im, BinaryOp.SUB, x, numbers), -FLT_MIN, 0.0)


def and_(im: ImportContext, a: Value, b: Value) -> Tensor:
    """BinaryOp mul."""
    return binary(im, BinaryOp.MUL, float_value(im, a), float_value(im, b)).of_type(BOOL)
