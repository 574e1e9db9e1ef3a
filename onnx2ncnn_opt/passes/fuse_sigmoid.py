from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._linear import negated, plus
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import rewrite

# 1 + exp(-x)
_ONE_AND_EXP = tuple(plus(op("UnaryOp", op_type=UnaryOp.EXP)(minus), "sum", 1.0) for minus in negated())


@rewrite(
    *(op("UnaryOp", op_type=UnaryOp.RECIPROCAL)(sum) for sum in _ONE_AND_EXP),
    *(op("BinaryOp", op_type=BinaryOp.RDIV, with_scalar=1, b=1.0)(sum) for sum in _ONE_AND_EXP),
    exact=False,
    purpose="hand-written sigmoids",
)
def fuse_sigmoid(x: Blob, sum: Layer) -> Layer:
    """1 / (1 + exp(-x))   ⇒   Sigmoid(x)"""
    return Layer("Sigmoid", sum.name, [x])


@rewrite(
    *(op("BinaryOp", op_type=BinaryOp.DIV, with_scalar=0)("x", sum) for sum in _ONE_AND_EXP),
    exact=False,
    purpose="hand-written Swish",
)
def fuse_swish_of_exp(x: Blob, sum: Layer) -> Layer:
    """x / (1 + exp(-x))   ⇒   Swish(x)"""
    return Layer("Swish", sum.name, [x])
