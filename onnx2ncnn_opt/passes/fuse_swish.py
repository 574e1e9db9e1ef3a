from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._linear import mul
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import rewrite


@rewrite(mul("x", op("Sigmoid", "sigmoid")("x")), exact=False)
def fuse_swish(x: Blob, sigmoid: Layer) -> Layer:
    """x * Sigmoid(x)   ⇒   Swish(x)"""
    return Layer("Swish", sigmoid.name, [x])
