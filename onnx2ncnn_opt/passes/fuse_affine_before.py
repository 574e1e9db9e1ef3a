import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.ir.windows import groups_of, pads_of
from onnx2ncnn_opt.passes._constants import stored
from onnx2ncnn_opt.passes._families import WEIGHTED
from onnx2ncnn_opt.passes._fold import (
    bias_of,
    offsets_of,
    require_outermost_channels,
    require_own_weights,
    slice_affine,
)
from onnx2ncnn_opt.passes._linear import LINEAR
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import fixed_size, require, rewrite

_LAYER = op(WEIGHTED, "layer")
_FACTOR = op("BinaryOp", "affine", op_type=frozenset({BinaryOp.MUL, BinaryOp.DIV}), with_scalar=1)

# Factors and offsets are float32, so equal pad values of channels may differ by a few roundings.
_ROUNDING = 2.0**-21


@rewrite(
    _LAYER(op(("BatchNorm", "Scale"), "affine")),
    _LAYER(op("BinaryOp", "affine", op_type=LINEAR, with_scalar=1)),
    _LAYER(op("ReLU", "relu")(_FACTOR)),
    exact=False,
    purpose="mean and deviation of the input; normalisation before its layer, as in DenseNet",
)
def fuse_affine_before(affine: Layer, layer: Layer, relu: Layer | None = None) -> Layer | list[Layer]:
    """x ── BatchNorm, Scale, BinaryOp (scalar) ── Convolution ──   ⇒   x ── Convolution ──

    Folds factors and offsets per input channel into the weights of the next layer. The pad value of a convolution
    becomes the number that the affine layer maps to it. This number must be the same for all channels, because a
    convolution has one pad value. A positive factor commutes with a ReLU.
    """
    require_own_weights(layer)
    require_outermost_channels(layer, layer.input)
    inputs = fixed_size(layer.input, 0)
    scale, shift = slice_affine(affine, inputs)
    if relu is not None:
        require(scale.min() > 0, f"'{affine.name}' changes signs, or makes numbers 0, before '{relu.name}'")
    if layer.type.startswith("Deconvolution"):
        require(not shift.any(), f"outputs of {layer.type} '{layer.name}' differ in their number of taps")
    pads = layer.type != "InnerProduct" and any(pads_of(layer))
    padded = float(layer.params.get("pad_value", 0.0))
    pad_value = _preimage(padded, scale, shift, layer) if pads and (padded or shift.any()) else None
    weight = layer.weights["weight_data"].astype(np.float64).reshape(layer["num_output"], -1)
    group = groups_of(layer)
    # Axes: group, output channel in the group, input channel in the group, tap.
    size = inputs // group
    by_group = weight.reshape(group, layer["num_output"] // group, size, -1)
    scaled = by_group * scale.reshape(group, 1, size, 1)
    weights = {"weight_data": stored(layer, "weight_data", scaled).reshape(-1)}
    if shift.any():
        bias = bias_of(layer, layer["num_output"])
        added = (by_group * shift.reshape(group, 1, size, 1)).reshape(len(bias), -1)
        offsets = offsets_of(added, bias, lambda: np.abs(scaled).reshape(len(bias), -1).sum(axis=1))
        weights["bias_data"] = stored(layer, "bias_data", offsets)
    bias_term = 1 if shift.any() else layer["bias_term"]
    result = layer.having(inputs=affine.inputs, bias_term=bias_term, weights=weights, pad_value=pad_value)
    if relu is not None:
        unscaled = Blob(f"{relu.output.name}_unscaled", relu.output.shape, relu.output.batch)
        return [relu.having(inputs=affine.inputs, outputs=[unscaled]), result.having(inputs=[unscaled])]
    return result


def _preimage(padded: float, scale: Array, shift: Array, layer: Layer) -> float | None:
    """Return the number that the affine layer maps to the pad value in every channel; refused if channels differ."""
    reason = f"{layer.type} '{layer.name}' pads its input with {f'{padded:g}' if padded else 'zeros'}"
    require(bool(scale.all()) and layer.spec is not None and "pad_value" in layer.spec.by_name, reason)
    source = ((padded - shift) / scale).astype(np.float32)
    require(bool(np.isfinite(source).all()) and np.ptp(source) <= _ROUNDING * np.abs(source).max(), reason)
    return float(np.median(source)) or None
