"""The matrices of linear layers; those of a Gemm with constant B in one layout for all flags.

A Gemm computes ``alpha * (A @ B + beta * C)``.
"""

from typing import NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.codes import GemmC
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.int8 import BLOCKS
from onnx2ncnn_opt.ir.weight import Array, Weight
from onnx2ncnn_opt.passes._constants import scaled, stored
from onnx2ncnn_opt.passes._fold import Affine, bias_of, require_offsets_fold, require_own_weights
from onnx2ncnn_opt.rewrite.rule import require

# The last three are tile sizes; a Gemm that has them is tuned for one machine.
_HINTS = ("output_elempack", "output_elemtype", "constant_TILE_M", "constant_TILE_N", "constant_TILE_K")


class Linear(NamedTuple):
    """``x @ weight.T + bias``: weight (outputs, inputs) and bias (outputs) in float64."""

    weight: Array
    bias: Array


def require_constant_b(gemm: Layer) -> None:
    """Refuse a Gemm whose B is not a float constant, or whose C is an input."""
    name = f"Gemm '{gemm.name}'"
    require(gemm["constantB"] and not gemm["constantA"], f"{name} does not multiply a blob by constants")
    require(gemm["quantize_term"] == 0, f"{name} is quantised")
    require(len(gemm.inputs) == 1, f"{name} gets C at run time")
    require(not any(gemm[hint] for hint in _HINTS), f"{name} is tuned for one machine")
    for weight in ("B_data", "C_data") if has_c(gemm) else ("B_data",):
        require(gemm.weights.stored(weight).is_float, f"{name} has no float {weight}")


def has_c(gemm: Layer) -> bool:
    """Return True if a Gemm has a constant C."""
    return bool(gemm["constantC"] and gemm["constant_broadcast_type_C"] != GemmC.NONE)


def offset_per_column(gemm: Layer) -> Array:
    """Return ``beta * C`` as one number for each column, in float64; refused if the rows differ."""
    columns = gemm["constantN"]
    if not has_c(gemm):
        return np.zeros(columns)
    kind = gemm["constant_broadcast_type_C"]
    require(kind in (GemmC.SCALAR, GemmC.N), f"the C of Gemm '{gemm.name}' differs from row to row")
    c = gemm.weights["C_data"].astype(np.float64).reshape(-1)
    return np.asarray(gemm["beta"] * np.broadcast_to(c, columns))


def columns_of_b(gemm: Layer) -> Array:
    """Return B as (columns, K), in float64."""
    n, k = gemm["constantN"], gemm["constantK"]
    data = gemm.weights["B_data"].astype(np.float64)
    return np.asarray(data.reshape(n, k) if gemm["transB"] else data.reshape(k, n).T)


def scaled_b(gemm: Layer, scale: Array, *, rows: bool = False) -> Array:
    """Return B in its stored layout with scaled columns, or with scaled rows; refused if a number would overflow."""
    n, k = gemm["constantN"], gemm["constantK"]
    is_inner = rows == bool(gemm["transB"])
    matrix = gemm.weights["B_data"].reshape((n, k) if gemm["transB"] else (k, n))
    return scaled(gemm, "B_data", matrix, scale[None, :] if is_inner else scale[:, None])


def require_columns(gemm: Layer) -> None:
    """Refuse a Gemm that `folded` does not take."""
    if gemm["quantize_term"] < BLOCKS:
        require_constant_b(gemm)
        require(not gemm["output_N1M"], f"the rows of Gemm '{gemm.name}' are along the channels")


def folded(gemm: Layer, affine: Affine) -> Layer:
    """Return the Gemm with a factor and an offset for each column of ``A @ B`` folded into its constants."""
    scale, shift = affine
    if gemm["quantize_term"] >= BLOCKS:
        require((scale == 1).all(), f"Gemm '{gemm.name}' is quantised")
        plain = len(gemm.inputs) == 1 and not has_c(gemm) and gemm["alpha"] == 1
        require(plain, f"Gemm '{gemm.name}' adds C already")
        return with_c(gemm, shift)
    weights = {}
    if (scale != 1).any():
        weights["B_data"] = scaled_b(gemm, scale)
    require(gemm["alpha"] or not shift.any(), f"Gemm '{gemm.name}' has alpha 0")
    c = offset_per_column(gemm) * scale
    own = gemm["alpha"] * c
    # The largest output of each column for inputs up to 1, without C.
    require_offsets_fold(own, shift, lambda: np.abs(columns_of_b(gemm)).sum(axis=1) * np.abs(gemm["alpha"] * scale))
    return with_c(gemm, c + shift / gemm["alpha"] if shift.any() else c, **weights)


def linear_of(gemm: Layer) -> Linear:
    """Return the effect of a Gemm on each row of its blob; refused if it transposes A or the result."""
    require_constant_b(gemm)
    plain = not any(gemm[flag] for flag in ("transA", "output_transpose", "output_N1M"))
    require(plain, f"Gemm '{gemm.name}' transposes its matrices")
    return Linear(gemm["alpha"] * columns_of_b(gemm), gemm["alpha"] * offset_per_column(gemm))


def matrix_of(conv: Layer) -> Linear:
    """Return the matrix from a pixel's inputs, for all taps, to its outputs; refused if it is not constant."""
    require_own_weights(conv)
    outputs = int(conv["num_output"])
    return Linear(conv.weights["weight_data"].astype(np.float64).reshape(outputs, -1), bias_of(conv, outputs))


def with_c(gemm: Layer, c: Array, **weights: Array) -> Layer:
    """Return the Gemm with other `weights`, and with one offset for each column, which replaces ``beta * C``."""
    if not c.any():
        without_c = {**weights, "C_data": None}
        return gemm.having(weights=without_c, beta=None, constantC=None, constant_broadcast_type_C=None)
    weights["C_data"] = stored(gemm, "C_data", c)
    return gemm.having(weights=weights, beta=None, constantC=1, constant_broadcast_type_C=GemmC.N)


def new_gemm(layer: Layer, x: Blob, n: int, k: int, b: Array | Weight, c: Array | None) -> Layer:
    """Return a Gemm with the name of a layer: rows of x times B, stored as (n, k), plus C for each column."""
    params = {"constantB": 1, "constantN": n, "constantK": k, "transB": 1}
    weights: dict[str, Array | Weight] = {"B_data": b}
    if c is not None:
        params |= {"constantC": 1, "constant_broadcast_type_C": GemmC.N}
        weights["C_data"] = c
    return Layer("Gemm", layer.name, [x], (), params, weights)
