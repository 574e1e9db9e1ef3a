"""1x1 convolutions: one matrix for all pixels, so they commute with weighted sums of pixels."""

import numpy as np

from onnx2ncnn_opt.ir.codes import Interp
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.passes import _windows
from onnx2ncnn_opt.passes._fold import bias_of, require_own_weights
from onnx2ncnn_opt.passes._gemm import Linear


def is_pointwise(layer: Layer) -> bool:
    """Return True if a layer is a 2-D convolution that computes each pixel from that pixel alone."""
    return layer.type == "Convolution" and _windows.is_pointwise(layer)


def is_resize(layer: Layer) -> bool:
    """Return True if a layer is an Interp of one image, to sizes that do not depend on its channels."""
    return (
        layer.type == "Interp"
        and layer["resize_type"] in list(Interp)
        and len(layer.inputs) == 1
        and not layer["size_expr"]
    )


def matrix_of(conv: Layer) -> Linear:
    """Return the matrix from a pixel's inputs, for all taps, to its outputs; refused if it is not constant."""
    require_own_weights(conv)
    outputs = int(conv["num_output"])
    weight = conv.weights["weight_data"].astype(np.float64).reshape(outputs, -1)
    return Linear(weight, bias_of(conv, outputs))
