from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._constants import element_count, finite_float32, is_uniform, scalar
from onnx2ncnn_opt.rewrite.pattern import const, op
from onnx2ncnn_opt.rewrite.rule import require, rewrite

_ORDERED = frozenset(code for code in BinaryOp if not code.commutes)


@rewrite(
    op("BinaryOp", "binary", with_scalar=0)("x", const("constant", is_uniform)),
    op("BinaryOp", "binary", with_scalar=0, op_type=_ORDERED)(const("constant", is_uniform), "x"),
    exact=False,  # ncnn rounds a quotient by a scalar in another way than one by a blob
    purpose="numbers that other converters keep as blobs, masks that mask nothing; other passes match numbers",
)
def fuse_memorydata_binaryop(x: Blob, constant: Layer, binary: Layer) -> Layer:
    """x, MemoryData (one value) ── BinaryOp ──   ⇒   x ── BinaryOp (scalar) ──

    Also for many equal values, if they do not extend the shape of x.
    """
    shape = binary.output.shape
    within = element_count(constant) == 1 or (shape is not None and shape == x.shape)
    require(within, f"'{constant.name}' may be larger than '{x.name}'")
    value = scalar(constant, x)
    require(finite_float32(value), f"'{constant.name}' is not finite")
    kind = BinaryOp(binary["op_type"])
    if binary.inputs[0].producer is constant:
        kind = kind.exchanged
    return binary.having(inputs=[x], op_type=kind, with_scalar=1, b=value)
