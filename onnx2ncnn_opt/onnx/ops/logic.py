"""Comparisons and logic."""

from __future__ import annotations

from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.onnx.fold import bounds
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import binary
from onnx2ncnn_opt.onnx.lower.functional.cast import FLT_MAX, as_float, float_value
from onnx2ncnn_opt.onnx.lower.functional.logic import (
    and_,
    bools,
    equal,
    greater,
    greater_or_equal,
    negative,
    rest,
    threshold,
)
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Tensor, Value

onnx_op("Greater", since=7, integers=True, selects=True, jumps=True, axes="each", folds=bounds.broadcast)(greater)


@onnx_op("Less", since=7, integers=True, selects=True, jumps=True, axes="each", folds=bounds.broadcast)
def less(im: ImportContext, a: Value, b: Value) -> Tensor:
    """Threshold of the difference."""
    return greater(im, b, a)


onnx_op("GreaterOrEqual", since=12, integers=True, selects=True, jumps=True, axes="each", folds=bounds.broadcast)(
    greater_or_equal
)


@onnx_op("LessOrEqual", since=12, integers=True, selects=True, jumps=True, axes="each", folds=bounds.broadcast)
def less_or_equal(im: ImportContext, a: Value, b: Value) -> Tensor:
    """Threshold of the difference."""
    return greater_or_equal(im, b, a)


onnx_op("Equal", since=7, integers=True, selects=True, jumps=True, axes="each", folds=bounds.broadcast)(equal)
onnx_op("And", since=7, integers=True, axes="each", folds=bounds.broadcast)(and_)


@onnx_op("Or", since=7, integers=True, axes="each", folds=bounds.broadcast)
def or_(im: ImportContext, a: Value, b: Value) -> Tensor:
    """BinaryOp max."""
    return bools(im, binary(im, BinaryOp.MAX, float_value(im, a), float_value(im, b)))


@onnx_op("Xor", since=7, integers=True, axes="each", folds=bounds.broadcast)
def xor(im: ImportContext, a: Value, b: Value) -> Tensor:
    """Compute the distance."""
    return bools(im, im.apply(binary(im, BinaryOp.SUB, float_value(im, a), float_value(im, b)), UnaryOp.ABS))


@onnx_op("Not", integers=True, axes="each", folds=bounds.first)
def not_(im: ImportContext, x: Tensor) -> Tensor:
    """1 - x."""
    return bools(im, rest(im, as_float(im, x)))


@onnx_op("IsNaN", since=9, selects=True, axes="each", folds=bounds.first)
def is_nan(im: ImportContext, x: Tensor) -> Tensor:
    """Not above -1 although positive."""
    return bools(im, rest(im, threshold(im, im.apply(x, UnaryOp.ABS), -1.0)))


@onnx_op("IsInf", since=10, selects=True, axes="each", folds=bounds.first)
def is_inf(im: ImportContext, x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    """Above the largest number."""
    if not detect_negative and not detect_positive:
        return bools(im, threshold(im, negative(im, im.apply(x, UnaryOp.ABS)), 0.0))
    if detect_negative:
        x = im.apply(x, UnaryOp.ABS if detect_positive else UnaryOp.NEG)
    return bools(im, threshold(im, x, FLT_MAX))
