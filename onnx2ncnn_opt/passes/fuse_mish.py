from onnx2ncnn_opt.ir.codes import UnaryOp
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._linear import mul
from onnx2ncnn_opt.passes.fuse_softplus import limited_softplus
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import rewrite

_TANHS = op("TanH", "tanh"), op("UnaryOp", "tanh", op_type=UnaryOp.TANH)
# From 10 on, TanH(Softplus(x)) is 1 in float32.
_SOFTPLUSES = op("Softplus")("x"), limited_softplus(10.0)


@rewrite(
    *(mul("x", tanh(softplus)) for tanh in _TANHS for softplus in _SOFTPLUSES),
    exact=False,
    purpose="models with the expanded form, such as exports before opset 18",
)
def fuse_mish(x: Blob, tanh: Layer) -> Layer:
    """x * TanH(Softplus(x))   ⇒   Mish(x)"""
    return Layer("Mish", tanh.name, [x])
