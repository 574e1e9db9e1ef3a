"""`fuse_<norm>_mul`, `_add`, `_scale`: factors and offsets behind a normalisation become its own.

InstanceNorm and GroupNorm have one of each per channel (the outermost axis), LayerNorm and RMSNorm per element of what
they normalise; RMSNorm has no offsets.
"""

from __future__ import annotations

import numpy as np

from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.passes._constants import constant_array, per_channel
from onnx2ncnn_opt.passes._fold import (
    ADD,
    DIV,
    MUL,
    RDIV,
    RSUB,
    SUB,
    Affine,
    linear,
    require_offsets_fold,
    require_own_weights,
    scale_affine,
)
from onnx2ncnn_opt.passes._gemm import stored
from onnx2ncnn_opt.rewrite.pattern import const, op
from onnx2ncnn_opt.rewrite.rule import Rewrite, require, rewrite

_SIZE = {"InstanceNorm": "channels", "GroupNorm": "channels", "LayerNorm": "affine_size", "RMSNorm": "affine_size"}
_PER_CHANNEL = frozenset({"InstanceNorm", "GroupNorm"})


def _fold(norm: Layer, affine: Affine) -> Layer:
    """The normalisation with ``y * scale + shift`` calculated into its factors and offsets."""
    size = norm[_SIZE[norm.type]]
    has = norm["affine"]
    gamma = norm.weights["gamma_data"].astype(np.float64) if has else np.ones(size)
    weights = {"gamma_data": stored(norm, "gamma_data", gamma * affine.scale)}
    if norm.type != "RMSNorm":
        beta = norm.weights["beta_data"].astype(np.float64) if has else np.zeros(size)
        moved = beta * affine.scale
        require_offsets_fold((moved, affine.shift), moved + affine.shift, lambda: np.abs(gamma * affine.scale))
        weights["beta_data"] = stored(norm, "beta_data", moved + affine.shift)
    return norm.having(affine=None, weights=weights)


def _values(norm: Layer, binary: Layer, constant: Layer | None) -> Array:
    """The constant operand as one number for each factor that the normalisation has."""
    size = norm[_SIZE[norm.type]]
    if constant is None:
        return np.full(size, binary["b"], np.float64)
    if norm.type in _PER_CHANNEL:
        return per_channel(constant, norm.output, size)
    data, shape = constant_array(constant), norm.output.shape
    require(shape is not None, f"the shape of '{norm.output.name}' is unknown")
    assert shape is not None
    if data.size == 1 and data.ndim <= len(shape):
        return np.full(size, data.reshape(()))
    # Where ranks differ, ncnn may lay the constant along another axis.
    inner = data.shape[-1] == size == shape[-1] == data.size
    require(inner and (data.ndim == len(shape)), f"'{constant.name}' is not one value for each of {size} columns")
    return data.reshape(size)


def _fuse_binaryop(type: str, name: str, kinds: frozenset[int]) -> Rewrite:
    norm = op(type, "norm")
    sided = kinds - {MUL, ADD}

    @rewrite(
        op("BinaryOp", "binary", op_type=kinds, with_scalar=1)(norm),
        op("BinaryOp", "binary", op_type=kinds, with_scalar=0)(norm, const("constant")),
        op("BinaryOp", "binary", op_type=sided, with_scalar=0)(const("constant"), norm),
        exact=False,
        name=f"fuse_{type.lower()}_{name}",
        summary=f"x ── {type} ── BinaryOp {name} (constant) ──   ⇒   x ── {type} ──",
        kept="what remains of a normalisation that was written out",
    )
    def fuse(norm: Layer, binary: Layer, constant: Layer | None = None) -> Layer:
        first = constant is not None and binary.inputs[0].producer is constant
        return _fold(norm, linear(binary, _values(norm, binary, constant), first))

    return fuse


def _fuse_scale(type: str) -> Rewrite:
    @rewrite(
        op("Scale", "scale")(op(type, "norm")),
        exact=False,
        name=f"fuse_{type.lower()}_scale",
        summary=f"x ── {type} ── Scale ──   ⇒   x ── {type} ──",
        kept="what remains of a normalisation that was written out",
    )
    def fuse(norm: Layer, scale: Layer) -> Layer:
        require_own_weights(scale)
        require(scale["scale_data_size"] == norm["channels"], "the numbers of channels differ")
        return _fold(norm, scale_affine(scale))

    return fuse


_MULS, _ADDS = frozenset({MUL, DIV, RDIV}), frozenset({ADD, SUB, RSUB})

PASSES = (
    *(_fuse_scale(type) for type in sorted(_PER_CHANNEL)),
    *(_fuse_binaryop(type, "mul", _MULS) for type in _SIZE),
    *(_fuse_binaryop(type, "add", _ADDS) for type in _SIZE if type != "RMSNorm"),
)
