"""`fuse_layernorm` and others: normalisations written as means, squares and roots."""

from collections.abc import Iterator

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.permute import inverted, order_type
from onnx2ncnn_opt.passes._linear import mul, offset
from onnx2ncnn_opt.passes._statistics import axes_of, mean, over_root, square
from onnx2ncnn_opt.rewrite.pattern import Op, op
from onnx2ncnn_opt.rewrite.rule import fixed_size, known_shape, require, rewrite


def _centred() -> Op:
    return op("BinaryOp", "centred", op_type=BinaryOp.SUB, with_scalar=0)("x", mean("x", "mean"))


def _variance() -> Iterator[Op]:
    for squares in square(_centred(), _centred()):
        yield mean(squares, "variance")
    again = mean("x", "mean")
    for squares in square("x", "x"):  # flax: mean(x ** 2) - mean(x) ** 2, at least 0
        difference = op("BinaryOp", op_type=BinaryOp.SUB, with_scalar=0)(mean(squares, "variance"), mul(again, again))
        yield difference
        yield op("BinaryOp", op_type=BinaryOp.MAX, with_scalar=1, b=0.0)(difference)
        yield op("ReLU", slope=0.0)(difference)


_VARIANTS = [variant for variance in _variance() for variant in over_root(_centred(), variance)]


@rewrite(*_VARIANTS, exact=False, purpose="exports of LayerNorm before opset 17")
def fuse_layernorm(x: Blob, mean: Layer, variance: Layer, eps: Layer, root: Layer) -> Layer:
    """(x - mean(x)) / sqrt(mean((x - mean(x)) ** 2) + eps)   ⇒   LayerNorm(x)

    For means over a vector, or the innermost axis of a 2-D or 3-D blob.
    """
    shape = known_shape(x, 1, 2, 3)
    inner = (len(shape) - 1,)
    for reduction in (mean, variance):
        require(axes_of(reduction, len(shape)) == inner, f"'{reduction.name}' is not over the innermost axis")
    return Layer(
        "LayerNorm", root.name, [x], (), {"affine_size": fixed_size(x, inner[0]), "eps": offset(eps), "affine": 0}
    )


@rewrite(*_VARIANTS, exact=False, purpose="hand-written LayerNorm of images, as in NAFNet and ConvNeXt")
def fuse_channel_layernorm(x: Blob, mean: Layer, variance: Layer, eps: Layer, root: Layer) -> list[Layer]:
    """(x - mean(x)) / sqrt(mean((x - mean(x)) ** 2) + eps)   ⇒   x ── Permute ── LayerNorm ── Permute ──

    For means over the channels of each pixel, or another axis except the innermost. Measured on x86, for 16 x 96 x 128
    to 768 x 7 x 7: two thirds of the time.
    """
    shape = known_shape(x)
    rank = len(shape)
    require(rank in (2, 3), f"'{x.name}' is not an image or a sequence of channels")
    axes = axes_of(mean, rank)
    require(len(axes) == 1 and axes[0] < rank - 1, f"'{mean.name}' is not over one axis before the innermost")
    require(axes_of(variance, rank) == axes, f"'{variance.name}' is not over the axis of '{mean.name}'")
    perm = (*(axis for axis in range(rank) if axis not in axes), *axes)
    last = Blob(f"{x.name}_last", tuple(shape[axis] for axis in perm), x.batch)
    permute = Layer("Permute", f"{root.name}_last", [x], [last], {"order_type": order_type(perm)})
    normal = Blob(f"{root.output.name}_last", last.shape, x.batch)
    params = {"affine_size": fixed_size(x, axes[0]), "eps": offset(eps), "affine": 0}
    norm = Layer("LayerNorm", root.name, [last], [normal], params)
    back = {"order_type": order_type(inverted(perm))}
    return [permute, norm, Layer("Permute", f"{root.name}_back", [normal], (), back)]


@rewrite(*_VARIANTS, exact=False, purpose="hand-written global LayerNorm of audio nets")
def fuse_whole_layernorm(x: Blob, mean: Layer, variance: Layer, eps: Layer, root: Layer) -> Layer:
    """(x - mean(x)) / sqrt(mean((x - mean(x)) ** 2) + eps)   ⇒   GroupNorm(x)

    For means over all axes: a GroupNorm of one group.
    """
    shape = known_shape(x)
    for reduction in (mean, variance):
        is_whole = axes_of(reduction, len(shape)) == tuple(range(len(shape)))
        require(is_whole and len(shape) > 1, f"'{reduction.name}' is not over all of several axes")
    channels = fixed_size(x, 0)
    return Layer("GroupNorm", root.name, [x], (), {"group": 1, "channels": channels, "eps": offset(eps), "affine": 0})
