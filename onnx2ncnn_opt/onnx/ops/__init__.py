"""The operator families; importing this package registers all of them."""

from onnx2ncnn_opt.onnx.ops import (
    activation,
    cast,
    convolution,
    elementwise,
    gather,
    logic,
    matrix,
    normalization,
    pad_slice,
    pooling,
    recurrent,
    reduction,
    resize,
    sampling,
    shape,
    statistics,
)

__all__ = [
    "activation",
    "cast",
    "convolution",
    "elementwise",
    "gather",
    "logic",
    "matrix",
    "normalization",
    "pad_slice",
    "pooling",
    "recurrent",
    "reduction",
    "resize",
    "sampling",
    "shape",
    "statistics",
]
