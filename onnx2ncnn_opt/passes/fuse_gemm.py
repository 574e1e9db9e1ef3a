"""`fuse_gemm_mul`, `fuse_gemm_add`, `fuse_mul_gemm`: fold factors and offsets into the weights of a Gemm."""

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.int8 import BLOCKS
from onnx2ncnn_opt.passes._constants import per_channel, per_column
from onnx2ncnn_opt.passes._fold import linear, require_offsets_fold
from onnx2ncnn_opt.passes._gemm import (
    columns_of_b,
    has_c,
    offset_per_column,
    require_constant_b,
    scaled_columns,
    with_c,
)
from onnx2ncnn_opt.passes._linear import factor, times, with_constant
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import Rewrite, require, rewrite


def _fuse(name: str, kinds: frozenset[int]) -> Rewrite:
    @rewrite(
        *with_constant(op("Gemm", "gemm"), kinds),
        exact=False,
        name=f"fuse_gemm_{name}",
        summary=f"x ── Gemm (constant B) ── BinaryOp {name} (constant) ──   ⇒   x ── Gemm (constant B) ──",
        purpose="LayerScale, and factors of linear layers" if name == "mul" else "linear layers of transformers",
    )
    def fuse(gemm: Layer, binary: Layer, constant: Layer | None = None) -> Layer:
        if gemm["quantize_term"] < BLOCKS:
            require_constant_b(gemm)
            require(not gemm["output_N1M"], f"the rows of Gemm '{gemm.name}' are along the channels")
        read = per_channel if gemm["output_transpose"] else per_column
        scale, shift = linear(binary, gemm["constantN"], constant, read)
        if gemm["quantize_term"] >= BLOCKS:
            require((scale == 1).all(), f"Gemm '{gemm.name}' is quantised")
            plain = len(gemm.inputs) == 1 and not has_c(gemm) and gemm["alpha"] == 1
            require(plain, f"Gemm '{gemm.name}' adds C already")
            return with_c(gemm, shift)
        weights = {}
        if (scale != 1).any():
            weights["B_data"] = scaled_columns(gemm, scale)
        require(gemm["alpha"] or not shift.any(), f"Gemm '{gemm.name}' has alpha 0")
        c = offset_per_column(gemm) * scale
        own = gemm["alpha"] * c
        # The largest output of each column for inputs up to 1, without C.
        require_offsets_fold(own, shift, lambda: np.abs(columns_of_b(gemm)).sum(axis=1) * np.abs(gemm["alpha"] * scale))
        return with_c(gemm, c + shift / gemm["alpha"] if shift.any() else c, **weights)

    return fuse


@rewrite(
    op("Gemm", "gemm")(times("x", "scaling")), exact=False, purpose="a factor that an activation leaves (QuickGELU)"
)
def fuse_mul_gemm(gemm: Layer, scaling: Layer) -> Layer:
    """x ── BinaryOp mul (number) ── Gemm (constant B) ──   ⇒   x ── Gemm (constant B) ──"""
    require_constant_b(gemm)
    scale = np.full(gemm["constantN"], factor(scaling))
    return gemm.having(inputs=scaling.inputs, weights={"B_data": scaled_columns(gemm, scale)})


fuse_gemm_mul = _fuse("mul", frozenset({BinaryOp.MUL, BinaryOp.DIV, BinaryOp.RDIV}))
fuse_gemm_add = _fuse("add", frozenset({BinaryOp.ADD, BinaryOp.SUB, BinaryOp.RSUB}))
