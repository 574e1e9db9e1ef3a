"""The operator families; importing this package registers all of them."""

from onnx2ncnn_opt.onnx.ops import (
    activation,
    convolution,
    elementwise,
    matrix,
    normalization,
    pad_slice,
    pooling,
    recurrent,
    reduction,
    resize,
    shape,
)

__all__ = [
    "activation",
    "convolution",
    "elementwise",
    "matrix",
    "normalization",
    "pad_slice",
    "pooling",
    "recurrent",
    "reduction",
    "resize",
    "shape",
]
