"""Poolings over windows and over everything."""

from __future__ import annotations

from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.pool import average_pool, global_average_pool, global_pool, max_pool
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Tensor

onnx_op("MaxPool", batch=0, integers=True, moves=(0,))(max_pool)
onnx_op("AveragePool", since=7, batch=0)(average_pool)
onnx_op("GlobalAveragePool", batch=0)(global_average_pool)


@onnx_op("GlobalMaxPool", batch=0, moves=(0,))
def global_max_pool(im: ImportContext, x: Tensor) -> Tensor:
    """Pooling max over everything."""
    return global_pool(im, x, 0)
