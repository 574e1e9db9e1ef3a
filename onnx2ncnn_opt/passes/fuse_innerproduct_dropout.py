import numpy as np

from onnx2ncnn_opt.ir.codes import Activation
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.passes._fold import Affine, channels, fold, require_own_weights
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import require, rewrite


@rewrite(
    op("Dropout", "dropout")(op("InnerProduct", "ip")), exact=False, purpose="nets of Caffe, where Dropout has a scale"
)
def fuse_innerproduct_dropout(ip: Layer, dropout: Layer) -> Layer:
    """x ── InnerProduct ── Dropout (scale) ──   ⇒   x ── InnerProduct ──

    The InnerProduct may have a fused ReLU or LeakyReLU, which commutes with a factor of 0 or more.
    """
    require_own_weights(ip)
    scale, activation = dropout["scale"], ip["activation_type"]
    commutes = activation == Activation.NONE or (activation in (Activation.RELU, Activation.LEAKYRELU) and scale >= 0)
    require(commutes, f"the fused activation of '{ip.name}' does not commute with the factor {scale}")
    count = channels(ip)
    return fold(ip, Affine(np.full(count, scale, np.float64), np.zeros(count)))
