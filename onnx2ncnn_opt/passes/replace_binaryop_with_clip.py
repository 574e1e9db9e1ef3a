from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.ranges import Ranges
from onnx2ncnn_opt.passes.fuse_clip import INFINITE
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import require, rewrite


@rewrite(
    op("BinaryOp", "binary", op_type=frozenset({BinaryOp.MAX, BinaryOp.MIN}), with_scalar=1)("x"),
    exact=True,
    purpose="clamps as torch.export writes them: a convolution can fuse a Clip",
)
def replace_binaryop_with_clip(x: Blob, binary: Layer) -> Layer:
    """x ── BinaryOp max or min (number) ──   ⇒   x ── Clip ──

    For finite numbers: a Clip turns NaN, and an infinity on the unlimited side, into a bound.
    """
    require(Ranges().of(x).is_finite, f"'{x.name}' may be NaN or infinite")
    low, high = (binary["b"], INFINITE) if binary["op_type"] == BinaryOp.MAX else (-INFINITE, binary["b"])
    if binary["op_type"] == BinaryOp.MAX and low == 0:
        return Layer("ReLU", binary.name, [x])
    return Layer("Clip", binary.name, [x], (), {"min": low, "max": high})
