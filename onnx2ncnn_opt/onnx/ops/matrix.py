"""Matrix products."""

from __future__ import annotations

from onnx2ncnn_opt.onnx.fold import bounds
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.matmul import gemm, matmul
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Value

onnx_op("Gemm", since=7, folds=bounds.gemm)(gemm)


@onnx_op("MatMul", folds=bounds.matmul)
def matmul_op(im: ImportContext, a: Value, b: Value) -> Value:
    """MatMul; with a constant matrix on the right InnerProduct or Gemm."""
    return matmul(im, a, b)
