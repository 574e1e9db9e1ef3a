"""ONNX Runtime's own operators (com.microsoft), which its optimiser puts into models."""

from onnx2ncnn_opt.onnx.ops.microsoft import attention, fused, quantized

__all__ = ["attention", "fused", "quantized"]
