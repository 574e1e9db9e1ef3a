from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.windows import axes_of
from onnx2ncnn_opt.passes._windows import is_pointwise
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import known_shape, rewrite


@rewrite(
    op(("Pooling1D", "Pooling", "Pooling3D"), "pool", where=is_pointwise, global_pooling=0, adaptive_pooling=0)("x"),
    exact=True,
    purpose="nets of other converters and searched architectures",
)
def eliminate_pooling1x1(pool: Layer, x: Blob) -> Blob:
    """x ── Pooling (kernel 1, stride 1, no padding) ──   ⇒   x ──

    Pooling accepts blobs of any rank and returns 3-D blobs, so x must have the layer's own rank.
    """
    known_shape(x, len(axes_of(pool)) + 1)
    return x
