from onnx2ncnn_opt.ir.codes import Pooling, Reduction
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._statistics import axes_of
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import known_shape, require, rewrite


@rewrite(
    op("Reduction", "last", operation=Reduction.MEAN, reduce_all=0, keepdims=0, coeff=1.0)(
        op("Reduction", "first", operation=Reduction.MEAN, reduce_all=0, keepdims=0, coeff=1.0)("x")
    ),
    op("Reduction", "last", operation=Reduction.MEAN, reduce_all=0, keepdims=0, coeff=1.0)("x"),
    exact=False,
)
def replace_reduction_with_global_pooling(x: Blob, last: Layer, first: Layer | None = None) -> Layer:
    """x ── Reduction (mean over an image) ──   ⇒   x ── Pooling (global average) ──

    Also for a mean over the columns and then over the rows. On CPUs it costs some microseconds (measured). The pass is
    for GPUs, because ncnn has no Vulkan shader for Reduction.
    """
    known_shape(x, 3)
    if first is None:
        require(axes_of(last, 3) == (1, 2), f"'{last.name}' is not over rows and columns")
    else:
        steps = axes_of(first, 3) == (2,) and tuple(axis % 2 for axis in last["axes"]) == (1,)
        require(steps, f"'{first.name}' and '{last.name}' are not over columns and rows")
    return Layer("Pooling", last.name, [x], (), {"pooling_type": Pooling.AVG, "global_pooling": 1})
