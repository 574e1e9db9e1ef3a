from onnx2ncnn_opt.ir.codes import Pooling, Reduction
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._statistics import axes_of
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import known_shape, require, rewrite


@rewrite(
    op("Reduction", "mean", operation=Reduction.MEAN, reduce_all=0, keepdims=0, coeff=1.0)("x"),
    exact=False,
)
def replace_reduction_with_global_pooling(x: Blob, mean: Layer) -> Layer:
    """x ── Reduction (mean over an image) ──   ⇒   x ── Pooling (global average) ──

    On CPUs it costs some microseconds (measured). The pass is for GPUs, because ncnn has no Vulkan shader for
    Reduction.
    """
    known_shape(x, 3)
    require(axes_of(mean, 3) == (1, 2), f"'{mean.name}' is not over rows and columns")
    return Layer("Pooling", mean.name, [x], (), {"pooling_type": Pooling.AVG, "global_pooling": 1})
