from __future__ import annotations

from onnx2ncnn_opt.ir.graph import Blob
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import rewrite


@rewrite(
    op("Dropout", scale=1.0)("x"),
    exact=True,
    purpose="nets of Caffe and onnx2ncnn, where Dropout stays; one layer less",
)
def eliminate_dropout(x: Blob) -> Blob:
    """x ── Dropout (scale 1) ──   ⇒   x ──"""
    return x
