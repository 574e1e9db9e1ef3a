from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.passes._families import FOLDING, types_of
from onnx2ncnn_opt.passes._fold import (
    binaryop_affine,
    channels,
    fold,
    require_no_activation,
    require_outermost_channels,
    require_own_weights,
    slice_affine,
)
from onnx2ncnn_opt.passes._linear import ARITHMETIC, with_constant
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import rewrite

_LAYER = op(types_of(FOLDING), "layer")


@rewrite(
    op("BatchNorm", "norm")(_LAYER),
    op("Scale", "norm")(_LAYER),
    *with_constant(_LAYER, ARITHMETIC),
    exact=False,
    covers=[f"fuse_{family}_{kind}" for family in FOLDING for kind in ("batchnorm", "scale", "mul", "add")],
    purpose="nets that were written as they were trained; learned factors and ranges of outputs",
)
def fuse_affine(
    layer: Layer, norm: Layer | None = None, binary: Layer | None = None, constant: Layer | None = None
) -> Layer:
    """x ── Convolution ── BatchNorm, Scale, BinaryOp (constant) ──   ⇒   x ── Convolution ──

    Folds factors and offsets per channel into a convolution, deconvolution, InnerProduct, BatchNorm or Scale.
    """
    require_own_weights(layer)
    if layer.type not in ("BatchNorm", "Scale"):
        require_no_activation(layer)
    if binary is not None:
        return fold(layer, binaryop_affine(binary, layer, constant))
    assert norm is not None
    require_outermost_channels(layer, layer.output)
    return fold(layer, slice_affine(norm, channels(layer)))
