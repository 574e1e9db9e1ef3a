import numpy as np

from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._constants import is_constant
from onnx2ncnn_opt.passes._families import FOLDING, WEIGHTED
from onnx2ncnn_opt.passes._fold import (
    Affine,
    are_columns,
    binaryop_affine,
    channels,
    fold,
    require_no_activation,
    require_outermost_channels,
    require_own_weights,
    slice_affine,
)
from onnx2ncnn_opt.passes._gemm import folded, require_columns
from onnx2ncnn_opt.passes._linear import ARITHMETIC, LINEAR, with_constant
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import Replacement, fixed_size, known_shape, layer_pass, require, rewrite

_LAYER = op(FOLDING, "layer")
_WITH_GEMM = op((*FOLDING, "Gemm"), "layer")


@rewrite(
    op("BatchNorm", "norm")(_LAYER),
    op("Scale", "norm")(_LAYER),
    *with_constant(_WITH_GEMM, ARITHMETIC),
    exact=False,
    purpose="nets that were written as they were trained; learned factors and ranges of outputs",
)
def fuse_affine(
    layer: Layer, norm: Layer | None = None, binary: Layer | None = None, constant: Layer | None = None
) -> Layer:
    """x ── Convolution ── BatchNorm, Scale, BinaryOp (constant) ──   ⇒   x ── Convolution ──

    Folds factors and offsets per channel into a convolution, deconvolution, InnerProduct, Gemm, BatchNorm or Scale.
    """
    _require_foldable(layer)
    if binary is not None:
        return _folded(layer, binaryop_affine(binary, layer, constant))
    assert norm is not None
    require_outermost_channels(layer, layer.output)
    return fold(layer, slice_affine(norm, channels(layer)))


def _require_foldable(layer: Layer) -> None:
    if layer.type == "Gemm":
        require_columns(layer)
        return
    require_own_weights(layer)
    if layer.type not in ("BatchNorm", "Scale"):
        require_no_activation(layer)


def _folded(layer: Layer, affine: Affine) -> Layer:
    return folded(layer, affine) if layer.type == "Gemm" else fold(layer, affine)


@layer_pass(
    op("BinaryOp", op_type=LINEAR), exact=False, purpose="1 + scale of adaptive normalisations, as in DiT, SD3 and Flux"
)
def fuse_affine_after_slice(binary: Layer) -> Replacement | None:
    """x ── Gemm, InnerProduct ── Slice ── BinaryOp (constant) ──   ⇒   x ── Gemm, InnerProduct ── Slice ──

    Folds a factor and an offset for the channels of one part into the layer that computes all parts.
    """
    constants = [blob for blob in binary.inputs if is_constant(blob)]
    parts = [blob for blob in binary.inputs if blob not in constants]
    cut = parts[0].made_by("Slice") if len(parts) == 1 else None
    layer = cut.input.made_by(*WEIGHTED, "Gemm") if cut is not None else None
    if cut is None or layer is None:
        return None
    whole, (part,) = cut.input, parts
    _require_foldable(layer)
    axis = cut["axis"] % len(known_shape(whole))
    require(axis == int(are_columns(layer)), f"'{cut.name}' does not cut the channels of '{whole.name}'")
    start = sum(fixed_size(blob, axis) for blob in cut.outputs[: cut.outputs.index(part)])
    size, count = fixed_size(part, axis), channels(layer)
    affine = Affine(np.ones(count), np.zeros(count))
    own = binaryop_affine(binary, layer, constants[0].producer if constants else None, size)
    affine.scale[start : start + size], affine.shift[start : start + size] = own
    new = _folded(layer, affine)
    # No other blob of the net has these numbers, so the names of the old ones do not fit.
    end = Blob(f"{whole.name.removesuffix('_folded')}_folded", whole.shape, whole.batch)
    blobs = [Blob(blob.name, blob.shape, blob.batch) for blob in cut.outputs]
    new.outputs = (end,)
    reads = dict(zip(cut.outputs, blobs, strict=True))
    reads[binary.output] = reads.pop(part)
    blobs[cut.outputs.index(part)].name = binary.output.name
    return Replacement(
        (layer, cut, binary), added=[(new, layer), (cut.having(inputs=[end], outputs=blobs), cut)], reads=reads
    )
