from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._linear import mul
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import rewrite

# From this x on, TanH(Softplus(x)) is 1 in float32.
_FLAT = 10.0


def _leaves_small_numbers(limit: Layer) -> bool:
    if limit.type == "Clip":
        return bool(limit["min"] < -1e38 and limit["max"] >= _FLAT)
    return bool(limit["op_type"] == BinaryOp.MIN and limit["with_scalar"] and limit["b"] >= _FLAT)


_TANHS = op("TanH", "tanh"), op("UnaryOp", "tanh", op_type=UnaryOp.TANH)
_SOFTPLUSES = (
    op("Softplus")("x"),
    # The importer's form, because Softplus alone overflows.
    op("BinaryOp", op_type=BinaryOp.MAX, with_scalar=0)(
        "x", op("Softplus")(op(("BinaryOp", "Clip"), "", _leaves_small_numbers)("x"))
    ),
)


@rewrite(
    *(mul("x", tanh(softplus)) for tanh in _TANHS for softplus in _SOFTPLUSES),
    exact=False,
    purpose="models with the expanded form, such as exports before opset 18",
)
def fuse_mish(x: Blob, tanh: Layer) -> Layer:
    """x * TanH(Softplus(x))   ⇒   Mish(x)"""
    return Layer("Mish", tanh.name, [x])
