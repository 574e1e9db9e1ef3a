"""Comparisons, logic and Where."""

from functools import partial

from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional import logic
from onnx2ncnn_opt.onnx.lower.functional.binary import binary
from onnx2ncnn_opt.onnx.lower.functional.cast import FLT_MAX, as_float, float_value
from onnx2ncnn_opt.onnx.lower.functional.where import where
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Tensor, Value

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
    return logic.bools(im, binary(im, BinaryOp.MAX, float_value(im, a), float_value(im, b)))


@onnx_op("Xor", since=7, integers=True, axes="each", folds=True)
def xor(im: ImportContext, a: Value, b: Value) -> Tensor:
    """BinaryOp sub and UnaryOp abs."""
    return logic.bools(im, im.apply(binary(im, BinaryOp.SUB, float_value(im, a), float_value(im, b)), UnaryOp.ABS))


@onnx_op("Not", integers=True, axes="each", folds=True)
def not_(im: ImportContext, x: Tensor) -> Tensor:
    """1 - x."""
    return logic.bools(im, logic.one_minus(im, as_float(im, x)))


@onnx_op("IsNaN", since=9, selects=True, axes="each", folds=True)
def is_nan(im: ImportContext, x: Tensor) -> Tensor:
    """1 - Threshold(|x| > -1), which is 1 for NaN only."""
    return logic.bools(im, logic.one_minus(im, logic.threshold(im, im.apply(x, UnaryOp.ABS), -1.0)))


@onnx_op("IsInf", since=10, selects=True, axes="each", folds=True)
def is_inf(im: ImportContext, x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    """Threshold above the largest finite number."""
    if not detect_negative and not detect_positive:
        return logic.bools(im, logic.threshold(im, logic.negative(im, im.apply(x, UnaryOp.ABS)), 0.0))
    if detect_negative:
        x = im.apply(x, UnaryOp.ABS if detect_positive else UnaryOp.NEG)
    return logic.bools(im, logic.threshold(im, x, FLT_MAX))
