"""Operators whose results fold if they are known up to dynamic dimensions, and are refused otherwise."""

from __future__ import annotations

from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.fold import bounds
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Value


@onnx_op("Range", since=11, integers=True, folds=bounds.arange)
def range_(im: ImportContext, start: Value, limit: Value, delta: Value, *, stash_type: int = 1) -> Value:
    """Sum ones, in sizes only."""
    raise im.refuse(
        "its length depends on values that are computed at run time, or on a step that is not an integer",
        "make it depend on the shapes of inputs only, with an integer step",
    )


@onnx_op("ConstantOfShape", since=9, integers=True, folds=bounds.sizes)
def constant_of_shape(im: ImportContext, shape: Value, *, value: Array | None = None) -> Value:
    """Ones of dynamic sizes, times a constant."""
    raise im.refuse("its shape is computed at run time", "make it depend on the shapes of inputs only")
