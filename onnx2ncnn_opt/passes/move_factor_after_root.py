from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._linear import mul
from onnx2ncnn_opt.rewrite.pattern import Op, Pattern, const, kept, op
from onnx2ncnn_opt.rewrite.rule import known_shape, require, rewrite

ROOT = kept(op("UnaryOp", "root", op_type=frozenset({UnaryOp.RSQRT, UnaryOp.RECIPROCAL})))


def factored(root: Pattern) -> Op:
    """Return the "product" of a root and a constant "factor"."""
    return op("BinaryOp", "product", op_type=BinaryOp.MUL, with_scalar=0)(root, const("factor"))


@rewrite(
    mul("x", factored(ROOT)), mul("x", factored(op("Reshape")(ROOT))), exact=False, purpose="normalisations of flax"
)
def move_factor_after_root(x: Blob, root: Layer, product: Layer, factor: Layer) -> list[Layer]:
    """x * ((1 / root(y)) * factor)   ⇒   (x * (1 / root(y))) * factor

    For roots with one number for each row or column, and factors along the other axis. Other passes fuse the result, a
    normalisation and its factors.
    """
    shape, dims = known_shape(x), known_shape(root.output)
    is_part = len(dims) == len(shape) and all(size in (1, whole) for size, whole in zip(dims, shape, strict=True))
    is_per_row = is_part or dims == shape[:-1]
    require(is_per_row, f"'{root.name}' does not have one number for each row or column of '{x.name}'")
    require(dims != shape and product.output.shape == shape, f"'{product.name}' is not of rows times columns")
    whole = Blob(f"{product.name}_rows", x.shape, x.batch)
    first = Layer("BinaryOp", product.name, [x, root.output], [whole], {"op_type": BinaryOp.MUL})
    return [first, Layer("BinaryOp", f"{product.name}_factor", [whole, factor.output], (), {"op_type": BinaryOp.MUL})]
