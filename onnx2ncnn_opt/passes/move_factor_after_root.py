from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._linear import mul
from onnx2ncnn_opt.rewrite.pattern import Pattern, const, kept, op
from onnx2ncnn_opt.rewrite.rule import known_shape, require, rewrite

_ROOT = kept(op("UnaryOp", "root", op_type=frozenset({UnaryOp.RSQRT, UnaryOp.RECIPROCAL})))


def _product(root: Pattern) -> Pattern:
    return op("BinaryOp", "product", op_type=BinaryOp.MUL, with_scalar=0)(root, const("factor"))


@rewrite(
    mul("x", _product(_ROOT)), mul("x", _product(op("Reshape")(_ROOT))), exact=False, purpose="normalisations of flax"
)
def move_factor_after_root(x: Blob, root: Layer, product: Layer, factor: Layer) -> list[Layer]:
    """x * ((1 / root(y)) * factor)   ⇒   (x * (1 / root(y))) * factor

    For roots of one number for each row: what is left is a normalisation, and its factors.
    """
    shape, rows = known_shape(x), known_shape(root.output)
    require(rows in (shape[:-1], (*shape[:-1], 1)), f"'{root.name}' has not one number for each row of '{x.name}'")
    require(known_shape(factor.output)[-1:] == shape[-1:], f"'{factor.name}' has not one number for each column")
    whole = Blob(f"{product.name}_rows", x.shape, x.batch)
    first = Layer("BinaryOp", product.name, [x, root.output], [whole], {"op_type": BinaryOp.MUL})
    return [first, Layer("BinaryOp", f"{product.name}_factor", [whole, factor.output], (), {"op_type": BinaryOp.MUL})]
