"""The families of tail operators; importing a family registers its operators."""

from onnx2ncnn_opt.tail.operators import elementwise, indexing, reduction, sampling, selection, shape

__all__ = ["elementwise", "indexing", "reduction", "sampling", "selection", "shape"]
