from typing import Any

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.passes._constants import constant_array, per_channel, stored
from onnx2ncnn_opt.passes._fold import Affine, linear, require_offsets_fold, slice_affine
from onnx2ncnn_opt.passes._linear import ARITHMETIC, with_constant
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import fixed_shape, fixed_size, known_shape, require, rewrite

_SIZE = {
    **dict.fromkeys(("InstanceNorm", "GroupNorm"), "channels"),
    **dict.fromkeys(("LayerNorm", "RMSNorm"), "affine_size"),
    "Normalize": "scale_data_size",
}
_PER_CHANNEL = frozenset({"InstanceNorm", "GroupNorm", "Normalize"})
_WITHOUT_OFFSETS = frozenset({"RMSNorm", "Normalize"})


def _fold(norm: Layer, affine: Affine) -> Layer:
    """Return the normalisation with ``y * scale + shift`` folded into its factors and offsets."""
    size = _size(norm)
    name, flag = ("scale_data", "channel_shared") if norm.type == "Normalize" else ("gamma_data", "affine")
    gamma = norm.weights[name].astype(np.float64) if name in norm.weights else np.ones(size)
    weights = {name: stored(norm, name, gamma * affine.scale)}
    if norm.type not in _WITHOUT_OFFSETS:
        beta = norm.weights["beta_data"].astype(np.float64) if norm["affine"] else np.zeros(size)
        scaled = beta * affine.scale
        require_offsets_fold(scaled, affine.shift, lambda: np.abs(gamma * affine.scale))
        weights["beta_data"] = stored(norm, "beta_data", scaled + affine.shift)
    else:
        require(not affine.shift.any(), f"'{norm.name}' has no offsets")
    params: dict[str, Any] = {_SIZE[norm.type]: size, flag: 1 if name == "scale_data" and size == 1 else None}
    return norm.having(weights=weights, **params)


def _size(norm: Layer) -> int:
    """Return the number of factors of the normalisation; an InstanceNorm without factors may omit the parameter."""
    if norm.type == "Normalize":
        return fixed_size(norm.output, 0) if len(known_shape(norm.output)) == 3 else 1
    return int(norm[_SIZE[norm.type]]) or fixed_shape(norm.output, 3, 4)[0]


def _per_element(constant: Layer, x: Blob, size: int) -> Array:
    """Return the constant operand of `x` as one number for each element of its rows."""
    data, shape = constant_array(constant), known_shape(x)
    if data.size == 1 and data.ndim <= len(shape):
        return np.full(size, data.reshape(()))
    # If ranks differ, ncnn may align the constant with another axis.
    inner = data.shape[-1] == size == shape[-1] == data.size
    require(inner and (data.ndim == len(shape)), f"'{constant.name}' is not one value for each of {size} columns")
    return data.reshape(size)


@rewrite(
    op("Scale", "scale")(op(_PER_CHANNEL, "norm")),
    *with_constant(op(_SIZE.keys() - _WITHOUT_OFFSETS, "norm"), ARITHMETIC),
    *with_constant(op(_WITHOUT_OFFSETS, "norm"), frozenset({BinaryOp.MUL, BinaryOp.DIV, BinaryOp.RDIV})),
    exact=False,
    purpose="factors and offsets of expanded normalisations",
)
def fuse_norm_affine(
    norm: Layer, scale: Layer | None = None, binary: Layer | None = None, constant: Layer | None = None
) -> Layer:
    """x ── InstanceNorm, LayerNorm, Normalize, ... ── Scale, BinaryOp (constant) ──   ⇒   x ── the same norm ──

    InstanceNorm and GroupNorm have a factor and an offset per channel (the outermost axis), LayerNorm per normalised
    element. RMSNorm and Normalize, which is for channels, have only factors.
    """
    if binary is not None:
        read = per_channel if norm.type in _PER_CHANNEL else _per_element
        return _fold(norm, linear(binary, _size(norm), constant, read))
    assert scale is not None
    return _fold(norm, slice_affine(scale, _size(norm)))
