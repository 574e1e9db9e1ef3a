from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.permute import inverted, order_type
from onnx2ncnn_opt.passes._linear import offset
from onnx2ncnn_opt.passes._statistics import axes_of, mean, over_root, square
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import fixed_size, known_shape, require, rewrite

_CENTRED = op("BinaryOp", "centred", op_type=BinaryOp.SUB, with_scalar=0)("x", mean("x", "mean"))


@rewrite(
    *(root for squares in square(_CENTRED, _CENTRED) for root in over_root(_CENTRED, mean(squares, "variance"))),
    exact=False,
    purpose="exports of LayerNorm before opset 17, and hand-written norms of images (NAFNet, ConvNeXt) and of audio",
)
def fuse_layernorm(x: Blob, mean: Layer, variance: Layer, eps: Layer, root: Layer) -> Layer | list[Layer]:
    """(x - mean(x)) / sqrt(mean((x - mean(x)) ** 2) + eps)   ⇒   LayerNorm(x)

    For means over the innermost axis of blobs of up to three dims. Over the channels of each pixel, or another axis
    except the innermost: a LayerNorm between two Permutes, which takes two thirds of the time (measured on x86, for 16
    x 96 x 128 to 768 x 7 x 7). Over all of several axes: a GroupNorm of one group.
    """
    shape = known_shape(x)
    rank, axes, params = len(shape), axes_of(mean, len(shape)), {"eps": offset(eps), "affine": 0}
    require(axes_of(variance, rank) == axes, f"'{variance.name}' is not over the axes of '{mean.name}'")
    if rank > 1 and axes == tuple(range(rank)):
        return Layer("GroupNorm", root.name, [x], (), {"group": 1, "channels": fixed_size(x, 0), **params})
    require(len(axes) == 1 and rank < 4, f"'{mean.name}' is not over one axis of up to three, nor over all axes")
    params["affine_size"] = fixed_size(x, axes[0])
    if axes == (rank - 1,):
        return Layer("LayerNorm", root.name, [x], (), params)
    perm = (*(axis for axis in range(rank) if axis not in axes), *axes)
    last = Blob(f"{x.name}_last", tuple(shape[axis] for axis in perm), x.batch)
    permute = Layer("Permute", f"{root.name}_last", [x], [last], {"order_type": order_type(perm)})
    normal = Blob(f"{root.output.name}_last", last.shape, x.batch)
    norm = Layer("LayerNorm", root.name, [last], [normal], params)
    back = {"order_type": order_type(inverted(perm))}
    return [permute, norm, Layer("Permute", f"{root.name}_back", [normal], (), back)]
