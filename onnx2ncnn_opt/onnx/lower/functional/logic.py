"""Comparisons and logic: bools are 0 and 1, everything else is arithmetic that keeps them so.

A comparison is Threshold (x > t), which is false for NaN as ONNX has it. What is not as ONNX: numbers closer to each
other than the smallest normal float32 are equal, two equal infinities of which none is constant are not.
"""

from __future__ import annotations

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import binary, broadcast_shape
from onnx2ncnn_opt.onnx.lower.functional.cast import FLT_MAX, FLT_MIN, float_value
from onnx2ncnn_opt.onnx.value import BOOL, Constant, Tensor, Value


def threshold(im: ImportContext, x: Value, limit: float) -> Tensor:
    """1 where x > limit, else 0; for NaN 0."""
    return im.unary(x, "Threshold", threshold=limit)


def negative(im: ImportContext, x: Value) -> Tensor:
    """-x."""
    return im.apply(x, UnaryOp.NEG)


def rest(im: ImportContext, x: Value) -> Tensor:
    """1 - x."""
    return im.apply(x, BinaryOp.RSUB, 1.0)


def bools(im: ImportContext, x: Value) -> Tensor:
    """Numbers that are 0 and 1 as bools."""
    x = im.tensor(x)
    return Tensor(x.blob, x.view, BOOL)


def _below(limit: float) -> float:
    """The next smaller float32; ncnn takes denormal numbers for 0."""
    below = float(np.nextafter(np.float32(limit), np.float32(-np.inf)))
    return -FLT_MIN if limit == 0 else 0.0 if abs(below) < FLT_MIN else below


def _compare(im: ImportContext, a: Value, b: Value, *, equal: bool) -> Value:
    """Whether a > b, or a >= b with `equal`."""
    shape = broadcast_shape(im, a.shape, b.shape)
    a, b = float_value(im, a), float_value(im, b)
    if isinstance(b, Constant) and b.scalar is not None and np.isfinite(b.scalar) and isinstance(a, Tensor):
        return ranked(threshold(im, a, _below(b.scalar) if equal else b.scalar), len(shape))
    if isinstance(a, Constant) and a.scalar is not None and np.isfinite(a.scalar) and isinstance(b, Tensor):
        return ranked(threshold(im, negative(im, b), _below(-a.scalar) if equal else -a.scalar), len(shape))
    return threshold(im, binary(im, BinaryOp.SUB, a, b), -FLT_MIN if equal else 0.0)


def greater(im: ImportContext, a: Value, b: Value) -> Tensor:
    """Threshold of the difference."""
    return bools(im, _compare(im, a, b, equal=False))


def greater_or_equal(im: ImportContext, a: Value, b: Value) -> Tensor:
    """Threshold of the difference."""
    return bools(im, _compare(im, a, b, equal=True))


def equal(im: ImportContext, a: Value, b: Value) -> Tensor:
    """Two Thresholds: not less and not greater."""
    shape = broadcast_shape(im, a.shape, b.shape)
    a, b = float_value(im, a), float_value(im, b)
    if isinstance(a, Constant):
        a, b = b, a
    if isinstance(a, Tensor) and isinstance(b, Constant) and b.scalar is not None:
        if np.isinf(b.scalar):
            # A Reduction starts from the largest finite number, and gives it for rows of nothing but infinities.
            reduced = a.blob.producer is not None and a.blob.producer.type == "Reduction"
            limit = _below(FLT_MAX) if reduced else FLT_MAX
            return bools(im, ranked(threshold(im, a if b.scalar > 0 else negative(im, a), limit), len(shape)))
        if np.isfinite(b.scalar):
            return bools(im, ranked(_between(im, a, _below(b.scalar), b.scalar), len(shape)))
    return bools(im, _between(im, im.tensor(binary(im, BinaryOp.SUB, a, b)), -FLT_MIN, 0.0))


def _between(im: ImportContext, x: Tensor, low: float, high: float) -> Tensor:
    """1 where low < x <= high, else 0."""
    inside = im.layer("BinaryOp", threshold(im, x, low).blob, threshold(im, x, high).blob, op_type=BinaryOp.SUB)
    return im.like(x, inside)


def and_(im: ImportContext, a: Value, b: Value) -> Tensor:
    """BinaryOp mul."""
    return bools(im, binary(im, BinaryOp.MUL, float_value(im, a), float_value(im, b)))


def ranked(x: Tensor, rank: int) -> Tensor:
    """The tensor with leading axes of size 1."""
    return x.viewed(x.view.with_axes(((),) * (rank - x.rank) + x.view.axes))
