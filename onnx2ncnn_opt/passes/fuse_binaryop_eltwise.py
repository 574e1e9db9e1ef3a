from onnx2ncnn_opt.ir.codes import BinaryOp, Eltwise
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.rewrite.pattern import Op, op
from onnx2ncnn_opt.rewrite.rule import require, rewrite


def _times(capture: str, x: str) -> Op:
    return op("BinaryOp", capture, op_type=BinaryOp.MUL, with_scalar=1)(x)


_ADD = op("BinaryOp", "add", op_type=BinaryOp.ADD, with_scalar=0)


@rewrite(
    _ADD(_times("first", "a"), _times("second", "b")),
    _ADD(_times("first", "a"), "b"),
    exact=False,
    purpose="weighted sums; one layer less",
)
def fuse_binaryop_eltwise(a: Blob, b: Blob, add: Layer, first: Layer, second: Layer | None = None) -> Layer:
    """a * c0, b * c1 ── BinaryOp add ──   ⇒   a, b ── Eltwise sum (c0, c1) ──

    One of the factors may be missing. Eltwise does not broadcast, so both blobs must have the same known shape.
    """
    require(a.shape is not None and b.shape is not None, f"the shapes of '{a.name}' and '{b.name}' are not known")
    same = a.shape == b.shape and a.batch == b.batch
    require(same, f"'{a.name}' and '{b.name}' differ in shape, and Eltwise does not broadcast")
    coeffs = (first["b"], second["b"] if second else 1.0)
    return Layer("Eltwise", add.name, [a, b], (), {"op_type": Eltwise.SUM, "coeffs": coeffs})
