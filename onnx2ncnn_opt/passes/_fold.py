"""Folding a factor and an offset per channel into the layer before: ``y * scale + shift``, computed in float64."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.passes._constants import per_channel, per_column, scaled, stored
from onnx2ncnn_opt.rewrite.rule import known_shape, require

# Adding an offset in float32 loses at most 2^-24 of the offset. If that is more than 2^-13 of the sum, the offset may
# be a rounding trick: a quantiser's step is not smaller, and weights are not less exact.
_MOST_OFFSET = 2.0**11
# Up to this size float32 holds all integers, so offsets may be exact integers; larger ones are masks, such as -1e9.
_MOST_INTEGER = 2.0**24
_GIVES_INT8 = 100  # a larger int8_scale_term means int8 outputs
# A factor in this range neither overflows nor loses digits before a second factor compensates it.
_LEAST_FACTOR, _MOST_FACTOR = 2.0**-64, 2.0**64


class Affine(NamedTuple):
    """One factor and one offset per channel, in float64."""

    scale: Array
    shift: Array


def fold(layer: Layer, affine: Affine) -> Layer:
    """Return the layer with ``output * scale + shift`` folded into it; changed weights become float32."""
    scale, shift = affine
    is_batchnorm = layer.type == "BatchNorm"
    own = batchnorm_affine(layer).shift if is_batchnorm else bias_of(layer, channels(layer))
    require_offsets_fold(own * scale, shift, partial(_reach, layer, scale))
    if is_batchnorm:
        slope, bias = _blocks(layer, "slope_data", "bias_data")
        weights = {"slope_data": stored(layer, "slope_data", slope * scale)}
        return layer.having(weights=weights | {"bias_data": stored(layer, "bias_data", bias * scale + shift)})
    weights = {}
    if (scale != 1).any():
        # The output channels are the outermost axis for every layer type.
        name = "scale_data" if layer.type == "Scale" else "weight_data"
        weight = layer.weights[name]
        require(weight.size % len(scale) == 0, f"{layer.type} '{layer.name}': {name} does not divide into channels")
        weights[name] = scaled(layer, name, weight.reshape(len(scale), -1), scale[:, None]).reshape(weight.shape)
    bias_term = layer["bias_term"]
    if bias_term or shift.any():
        bias_term, weights["bias_data"] = 1, stored(layer, "bias_data", own * scale + shift if bias_term else shift)
    return layer.having(bias_term=bias_term, weights=weights)


def require_offsets_fold(first: Array, second: Array, reach: Callable[[], Array]) -> None:
    """Refuse to add two offsets, element by element, if one is far larger than the blob and folding changes results.

    ``x * 10 + 12582912 - 12582912`` rounds: float32 drops digits of x in the first sum. ``i + 8388608 + 0.5`` is exact
    for an integer i near -8388608, but 8388608.5 is not a float32. `reach` returns the largest value of the blob for
    inputs of magnitude 1, which are typical in nets. It is called only for large offsets.
    """
    both = np.asarray(first + second)
    largest = np.maximum(np.abs(first), np.abs(second))
    if (largest > _MOST_OFFSET).any():
        is_large = largest > _MOST_OFFSET * np.maximum(1.0, reach())
        rounds = is_large & (largest > _MOST_OFFSET * np.abs(both))
        require(not rounds.any(), "offsets far larger than their sum may be there to round")
        is_exact = (both.astype(np.float32) == both) & (both - first == second) & (both - second == first)
        matters = is_large & (largest <= _MOST_INTEGER)
        require((is_exact | ~matters).all(), "the sum of large offsets is not exact in float32")


def offsets_of(added: Array, own: Array, reach: Callable[[], Array]) -> Array:
    """Return the sums of `own` offsets and of the rows of `added`; refused like `require_offsets_fold`."""
    terms = np.concatenate([added, own[:, None]], axis=1)
    gains, losses = (select(terms, 0).sum(axis=1) for select in (np.maximum, np.minimum))
    require_offsets_fold(gains, losses, reach)
    return np.asarray(terms.sum(axis=1))


def one_factor(first: float, second: float) -> float:
    """Return the product of two factors; refused if one may overflow or flush on purpose: ``x * 1e30 * 1e-30``."""
    both = first * second
    for factor in (abs(first), abs(second)):
        within = _LEAST_FACTOR * min(abs(both), 1.0) <= factor <= _MOST_FACTOR * max(abs(both), 1.0)
        require(within, "factors far from their product may be there to overflow")
    return both


def require_own_weights(layer: Layer) -> None:
    """Refuse layers with quantised weights, or with weights that are inputs."""
    assert layer.spec is not None
    name = f"{layer.type} '{layer.name}'"
    require(not layer.get("int8_scale_term"), f"{name} is quantised to int8")
    require(not layer.get("dynamic_weight"), f"{name} gets its weights at run time")
    require(layer.get("scale_data_size", 1) > 0, f"{name} gets its factors at run time")
    for weight in layer.spec.weights:
        if weight.present(layer):
            plain = weight.name in layer.weights and layer.weights.stored(weight.name).is_float
            require(plain, f"{name} has no float {weight.name}")


def require_static_weights(layer: Layer) -> None:
    """Refuse layers with int8 outputs or weights that are inputs: other int8 layers compute activations in float."""
    name = f"{layer.type} '{layer.name}'"
    require(layer.get("int8_scale_term", 0) <= _GIVES_INT8, f"{name} gives int8")
    require(not layer.get("dynamic_weight"), f"{name} gets its weights at run time")


def require_no_activation(layer: Layer) -> None:
    """Refuse layers that apply an activation to their result already."""
    require(layer["activation_type"] == 0, f"{layer.type} '{layer.name}' has a fused activation already")


def channels(layer: Layer) -> int:
    """Return the number of output channels of a layer that `fold` takes, or of the columns of a Gemm."""
    names = {"BatchNorm": "channels", "Scale": "scale_data_size", "Gemm": "constantN"}
    return int(layer[names.get(layer.type, "num_output")])


def are_columns(layer: Layer) -> bool:
    """Return True if the channels of a layer's output are its columns, not its outermost axis."""
    if layer.type == "Gemm":
        return not layer["output_transpose"]
    return layer.type == "InnerProduct" and len(known_shape(layer.output)) == 2


def require_outermost_channels(layer: Layer, blob: Blob) -> None:
    """Refuse an input or output whose outermost axis is not the channels: an InnerProduct over rows."""
    if layer.type == "InnerProduct":
        is_matrix = len(known_shape(blob)) == 2
        require(not is_matrix, f"'{blob.name}' is a matrix: its outermost axis are the rows, not the channels")


def batchnorm_affine(bn: Layer) -> Affine:
    """Return the effect of a BatchNorm on each slice of the outermost axis."""
    slope, mean, var, bias = _blocks(bn, "slope_data", "mean_data", "var_data", "bias_data")
    # ncnn adds in float32, and replaces a sum of 0 by a small number.
    variance = (var.astype(np.float32) + np.float32(bn["eps"])).astype(np.float64)
    require((variance > 0).all(), f"BatchNorm '{bn.name}' has variances that are not positive")
    scale = slope / np.sqrt(variance)
    return Affine(scale, bias - mean * scale)


def slice_affine(layer: Layer, count: int) -> Affine:
    """Return the effect of a BatchNorm, Scale or scalar on `count` outermost slices; refused for another count."""
    if layer.type == "BinaryOp":
        return linear(layer, count)
    require_own_weights(layer)
    require(channels(layer) == count, "the numbers of channels differ")
    if layer.type == "BatchNorm":
        return batchnorm_affine(layer)
    (scale,) = _blocks(layer, "scale_data")
    return Affine(scale, bias_of(layer, count))


def bias_of(layer: Layer, count: int) -> Array:
    """Return the layer's bias, or `count` zeros, in float64."""
    return layer.weights["bias_data"].astype(np.float64) if layer["bias_term"] else np.zeros(count)


def binaryop_affine(op: Layer, layer: Layer, const: Layer | None, count: int | None = None) -> Affine:
    """Return the effect of a BinaryOp with a constant or its scalar on each (or `count`) output channels of a layer."""
    read = per_column if const is not None and are_columns(layer) else per_channel
    return linear(op, channels(layer) if count is None else count, const, read)


def linear(
    op: Layer, count: int, const: Layer | None = None, read: Callable[[Layer, Blob, int], Array] = per_channel
) -> Affine:
    """Return the effect of an add, sub, mul or div with a scalar, or with `count` numbers that `read` finds in `const`.

    Refused if it divides by the blob.
    """
    if const is None:
        value = np.full(count, op["b"], np.float64)
    else:
        x = next((blob for blob in op.inputs if blob.producer is not const), op.inputs[0])
        value = read(const, x, count)
    kind = BinaryOp(op["op_type"])
    if const is not None and op.inputs[0].producer is const:
        kind = kind.exchanged
    one, zero = np.ones_like(value), np.zeros_like(value)
    if kind == BinaryOp.MUL:
        return Affine(value, zero)
    if kind == BinaryOp.DIV:
        require(value.all(), f"'{op.name}' divides by 0")
        return Affine(one / value, zero)
    require(kind != BinaryOp.RDIV, f"'{op.name}' divides by the blob")
    return Affine(-one if kind == BinaryOp.RSUB else one, -value if kind == BinaryOp.SUB else value)


def _reach(layer: Layer, scale: Array) -> Array:
    """Return each channel's largest output for inputs up to 1, without the bias, times `scale`."""
    if layer.type == "BatchNorm":
        return np.asarray(np.abs(batchnorm_affine(layer).scale * scale))
    weight = layer.weights["scale_data" if layer.type == "Scale" else "weight_data"]
    return np.asarray(np.abs(weight.reshape(len(scale), -1)).sum(axis=1, dtype=np.float64) * np.abs(scale))


def _blocks(layer: Layer, *names: str) -> tuple[Array, ...]:
    return tuple(layer.weights[name].astype(np.float64) for name in names)
