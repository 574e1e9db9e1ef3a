from onnx2ncnn_opt.ir.codes import BinaryOp, Reduction, UnaryOp
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._statistics import axes_of, over
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import known_shape, require, rewrite

_MOST = op("Reduction", "most", operation=Reduction.MAX, coeff=1.0)("x")
_EXP = op("UnaryOp", "exp", op_type=UnaryOp.EXP)(op("BinaryOp", op_type=BinaryOp.SUB, with_scalar=0)("x", _MOST))
_TOTAL = op("Reduction", "total", operation=Reduction.SUM, coeff=1.0)(_EXP)


@rewrite(*over(_EXP, _TOTAL), exact=False, purpose="models of jax")
def fuse_softmax(x: Blob, most: Layer, total: Layer, root: Layer) -> Layer:
    """exp(x - max(x)) / sum(exp(x - max(x)))   ⇒   Softmax(x)

    Not without the maximum: the net then overflows for large numbers, and Softmax does not.
    """
    rank = len(known_shape(x))
    axes = axes_of(most, rank)
    require(len(axes) == 1, f"'{most.name}' is over several axes")
    require(axes_of(total, rank) == axes, f"'{total.name}' is over other axes than '{most.name}'")
    return Layer("Softmax", root.name, [x], (), {"axis": axes[0], "fixbug0": 1})
