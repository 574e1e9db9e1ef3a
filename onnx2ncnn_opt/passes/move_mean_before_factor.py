from collections.abc import Iterator

from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._linear import add, mul
from onnx2ncnn_opt.passes._statistics import axes_of, mean
from onnx2ncnn_opt.passes.move_factor_after_root import ROOT, factored
from onnx2ncnn_opt.rewrite.pattern import Op, const, kept, op
from onnx2ncnn_opt.rewrite.rule import known_shape, require, rewrite

_MEAN = kept(mean("x", "mean"))


def _variants() -> Iterator[Op]:
    for root in (ROOT, kept(op("Reshape")(ROOT))):
        factors = kept(factored(root))
        moved = mul(_MEAN, factors)
        for shift in (
            op("BinaryOp", op_type=BinaryOp.SUB, with_scalar=0)(const("offset"), moved),
            op("BinaryOp", op_type=BinaryOp.RSUB, with_scalar=0)(moved, const("offset")),
            add(mul(op("UnaryOp", op_type=UnaryOp.NEG)(_MEAN), factors), const("offset")),
        ):
            yield add(mul("x", factors), shift)._replace(capture="total")


@rewrite(*_variants(), exact=False, purpose="LayerNorm of Keras")
def move_mean_before_factor(x: Blob, mean: Layer, product: Layer, offset: Layer, total: Layer) -> list[Layer]:
    """x * f + (offset - mean(x) * f)   ⇒   (x - mean(x)) * f + offset, for f = (1 / root(y)) * factor

    Keras 3 writes offset + (-mean(x)) * f.

    The result is a normalisation with factors and offsets, which other passes fuse.
    """
    axes_of(mean, len(known_shape(x)))  # its result broadcasts to x
    require(total.output.shape == x.shape, f"'{total.name}' has another shape than '{x.name}'")
    centred, scaled = (Blob(f"{total.name}_{suffix}", x.shape, x.batch) for suffix in ("centred", "scaled"))
    return [
        Layer("BinaryOp", f"{total.name}_centred", [x, mean.output], [centred], {"op_type": BinaryOp.SUB}),
        Layer("BinaryOp", f"{total.name}_scaled", [centred, product.output], [scaled], {"op_type": BinaryOp.MUL}),
        Layer("BinaryOp", total.name, [scaled, offset.output], (), {"op_type": BinaryOp.ADD}),
    ]
