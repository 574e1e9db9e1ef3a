from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.rewrite.pattern import Op, op
from onnx2ncnn_opt.rewrite.rule import rewrite


def limited_softplus(least: float, capture: str = "") -> Op:
    """Return max(x, Softplus(min(x, limit))), for any limit from `least` on."""

    def fits(limit: Layer) -> bool:
        if limit.type == "Clip":
            return bool(limit["min"] < -1e38 and limit["max"] >= least)
        return bool(limit["op_type"] == BinaryOp.MIN and limit["with_scalar"] and limit["b"] >= least)

    softplus = op("Softplus", capture)(op(("BinaryOp", "Clip"), "", fits)("x"))
    return op("BinaryOp", op_type=BinaryOp.MAX, with_scalar=0)("x", softplus)


# From 17 on, x and Softplus(x) are equal in float32.
@rewrite(limited_softplus(17.0, "softplus"), exact=False, purpose="Mamba; the importer's form, as Softplus overflows")
def fuse_softplus(x: Blob, softplus: Layer) -> Layer:
    """max(x, Softplus(min(x, 40)))   ⇒   log(exp(x) + exp(0)), a BinaryOp that does not overflow"""
    return Layer("BinaryOp", softplus.name, [x], (), {"op_type": BinaryOp.LOGADDEXP, "with_scalar": 1, "b": 0.0})
