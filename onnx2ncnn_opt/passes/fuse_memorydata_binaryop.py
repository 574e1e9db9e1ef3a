from __future__ import annotations

from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._constants import finite_float32, is_single, is_uniform, scalar
from onnx2ncnn_opt.rewrite.pattern import const, op
from onnx2ncnn_opt.rewrite.rule import require, rewrite

# op_type with its operands exchanged; what is not here commutes.
_EXCHANGED = {1: 7, 3: 8, 6: 9, 10: 11, 12: 13, 15: 16, 17: 18}
_EXCHANGED |= {b: a for a, b in _EXCHANGED.items()}


@rewrite(
    op("BinaryOp", "binary", with_scalar=0)("x", const("constant", is_uniform)),
    op("BinaryOp", "binary", with_scalar=0, op_type=frozenset(_EXCHANGED))(const("constant", is_uniform), "x"),
    exact=True,
    purpose="numbers that other converters keep as blobs, masks that mask nothing; other passes look for numbers",
)
def fuse_memorydata_binaryop(x: Blob, constant: Layer, binary: Layer) -> Layer:
    """x, MemoryData (one value) ── BinaryOp ──   ⇒   x ── BinaryOp (scalar) ──

    Or many that are the same, where they lie within x.
    """
    shape = binary.output.shape
    within = is_single(constant) or (shape is not None and shape == x.shape)
    require(within, f"'{constant.name}' may be larger than '{x.name}'")
    value = scalar(constant, x)
    require(finite_float32(value), f"'{constant.name}' is not finite")
    kind = binary["op_type"]
    if binary.inputs[0].producer is constant:
        kind = _EXCHANGED.get(kind, kind)
    return binary.having(inputs=[x], op_type=kind, with_scalar=1, b=value)
