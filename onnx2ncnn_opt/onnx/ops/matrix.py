"""Matrix products."""

from __future__ import annotations

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import binary
from onnx2ncnn_opt.onnx.lower.functional.matmul import linear, matmul
from onnx2ncnn_opt.onnx.lower.functional.views import transposed
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Tensor, Value


@onnx_op("Gemm", since=7)
def gemm(
    im: ImportContext,
    a: Value,
    b: Value,
    c: Value | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Value:
    """InnerProduct or Gemm for a constant B, else MatMul and what is left of alpha, beta and C."""
    if a.rank != 2 or b.rank != 2:
        raise im.refuse(f"its operands have ranks {a.rank} and {b.rank}, not 2")
    a, b = transposed(a) if transA else a, transposed(b) if transB else b
    if isinstance(a, Tensor) and isinstance(b, Constant):
        weight = im.f32(b.array).T
        if alpha != 1:  # a copy of what may be most of the model
            weight = weight * np.float32(alpha)
        bias = _row_bias(im, c, weight.shape[0], beta)
        product: Value = linear(im, a, weight, bias)
        if bias is not None or c is None:
            return product
    else:
        product = matmul(im, a, b)
        if alpha != 1:
            product = binary(im, BinaryOp.MUL, product, Constant(np.array(alpha, np.float32)))
    if c is None:
        return product
    scaled = c if beta == 1 else binary(im, BinaryOp.MUL, c, Constant(np.array(beta, np.float32)))
    return binary(im, BinaryOp.ADD, product, scaled)


def _row_bias(im: ImportContext, c: Value | None, size: int, beta: float) -> Array | None:
    """C as one number per column; None where it is not constant, or differs from row to row."""
    if not isinstance(c, Constant) or (c.rank > 1 and c.array.shape[-2] != 1):
        return None
    return im.spread(im.f32(c.array).reshape(-1) * np.float32(beta), (size,))


@onnx_op("MatMul")
def matmul_op(im: ImportContext, a: Value, b: Value) -> Value:
    """MatMul; with a constant matrix on the right InnerProduct or Gemm."""
    return matmul(im, a, b)
