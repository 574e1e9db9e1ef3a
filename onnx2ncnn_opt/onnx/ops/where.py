"""Where."""

from __future__ import annotations

from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.where import where
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Value


@onnx_op("Where", since=9, integers=True, moves=(1, 2), selects=True, axes="same")
def where_op(im: ImportContext, condition: Value, a: Value, b: Value) -> Value:
    """Products with 1 and 0 of ordinary numbers; functions of what is in their domain; else GridSample."""
    return where(im, condition, a, b)
