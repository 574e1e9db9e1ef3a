from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import require, rewrite


@rewrite(
    op("PReLU", "prelu")("x"), exact=True, purpose="the layer before can fuse a ReLU as its activation, but no PReLU"
)
def replace_prelu_with_leaky_relu(prelu: Layer, x: Blob) -> Layer:
    """x ── PReLU (one slope) ──   ⇒   x ── ReLU (slope) ──"""
    slopes = prelu.weights["slope_data"]
    require(slopes.size and (slopes == slopes.flat[0]).all(), f"the slopes of '{prelu.name}' differ")
    return Layer("ReLU", prelu.name, [x], (), {"slope": float(slopes.flat[0])})
