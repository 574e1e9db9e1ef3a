from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import require, rewrite


@rewrite(
    op("Dropout", "dropout", scale=1.0)("x"),
    exact=True,
    purpose="nets of Caffe and onnx2ncnn, where Dropout stays; one layer less",
)
def eliminate_dropout(dropout: Layer, x: Blob) -> Blob:
    """x ── Dropout (scale 1) ──   ⇒   x ──"""
    require(not dropout["featmask"], "it brings a blob in 32 bits to layers without fp16 storage")
    return x
