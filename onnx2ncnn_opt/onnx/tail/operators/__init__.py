"""The families of tail operators; each registers its own when it is imported."""

from onnx2ncnn_opt.onnx.tail.operators import elementwise, indexing, reduction, sampling, selection, shape

__all__ = ["elementwise", "indexing", "reduction", "sampling", "selection", "shape"]
