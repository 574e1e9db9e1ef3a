"""Factors and offsets per channel, calculated into the layer before: one pass for each pair of a table.

`fuse_<family>_batchnorm`, `_scale`, `_mul` and `_add` take a BatchNorm, a Scale, a constant factor (or divisor) and a
constant offset into a convolution, deconvolution, InnerProduct, BatchNorm or Scale. The constants are a MemoryData on
either side, or the scalar of a BinaryOp.
"""

from __future__ import annotations

from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.passes._families import FOLDING, Family
from onnx2ncnn_opt.passes._fold import (
    ADD,
    DIV,
    MUL,
    RDIV,
    RSUB,
    SUB,
    Affine,
    batchnorm_affine,
    binaryop_affine,
    channels,
    fold,
    require_foldable,
    require_outermost_channels,
    require_own_weights,
    scale_affine,
)
from onnx2ncnn_opt.rewrite.pattern import const, op
from onnx2ncnn_opt.rewrite.rule import Rewrite, require, rewrite

_KEPT = {
    "BatchNorm": "nets that were written as they were trained",
    "Scale": "nets of Caffe and older converters",
    "mul": "learned factors and ranges of outputs",
    "add": "offsets that stand apart, as in nets of other converters",
}


def _fuse_norm(family: Family, other: str) -> Rewrite:
    @rewrite(
        op(other, "norm")(op(family.types, "layer")),
        exact=False,
        name=f"fuse_{family.name}_{other.lower()}",
        summary=f"x ── {family.type} ── {other} ──   ⇒   x ── {family.type} ──",
        kept=_KEPT[other],
    )
    def fuse(layer: Layer, norm: Layer) -> Layer:
        require_foldable(layer)
        require_own_weights(norm)
        require_outermost_channels(layer)
        require(channels(norm) == channels(layer), "the numbers of channels differ")
        return fold(layer, batchnorm_affine(norm) if other == "BatchNorm" else scale_affine(norm))

    return fuse


def _fuse_binaryop(family: Family, name: str, kinds: frozenset[int], one_sided: frozenset[int]) -> Rewrite:
    layer = op(family.types, "layer")

    @rewrite(
        op("BinaryOp", "binary", op_type=kinds, with_scalar=1)(layer),
        op("BinaryOp", "binary", op_type=kinds, with_scalar=0)(layer, const("constant")),
        op("BinaryOp", "binary", op_type=one_sided, with_scalar=0)(const("constant"), layer),
        exact=False,
        name=f"fuse_{family.name}_{name}",
        summary=f"x ── {family.type} ── BinaryOp {name} (constant) ──   ⇒   x ── {family.type} ──",
        kept=_KEPT[name],
    )
    def fuse(layer: Layer, binary: Layer, constant: Layer | None = None) -> Layer:
        require_foldable(layer)
        affine: Affine = binaryop_affine(binary, layer, constant)
        return fold(layer, affine)

    return fuse


_MULS, _ADDS = frozenset({MUL, DIV, RDIV}), frozenset({ADD, SUB, RSUB})
# What matches with the constant on the left only by a pattern of its own: the operators that do not commute.
_ONE_SIDED = frozenset({SUB, DIV, RSUB, RDIV})

PASSES = tuple(
    fuse
    for family in FOLDING
    for fuse in (
        _fuse_norm(family, "BatchNorm"),
        _fuse_norm(family, "Scale"),
        _fuse_binaryop(family, "mul", _MULS, _MULS & _ONE_SIDED),
        _fuse_binaryop(family, "add", _ADDS, _ADDS & _ONE_SIDED),
    )
)
