"""`replace_convolution_with_pixelshuffle`: large kernels with few outputs get more outputs at fewer positions.

Such a convolution is a matrix product in ncnn, which copies the inputs of each position, tap by tap. With few outputs
the copy takes most of the time. So one position computes a square of results, with a larger kernel. Its weights are
zero for elements that a result does not read. PixelShuffle arranges the results. In an image of one row, a position
computes several results of the row, and a Permute arranges them.
"""

from math import ceil
from typing import Any

import numpy as np

from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.kernels import cost_of_results
from onnx2ncnn_opt.ir.permute import order_type
from onnx2ncnn_opt.passes._chain import Chain
from onnx2ncnn_opt.passes._fold import require_own_weights
from onnx2ncnn_opt.passes._windows import Window, reordered, weight_with_zeros, window_params, windows
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import fixed_size, require, rewrite

# With fewer inputs, or a 3x3 kernel, ncnn does not compute a convolution as a matrix product.
_LEAST_INPUTS, _LEAST_TAPS = 17, 4
_SIDES, _LENGTHS = (2, 4), (4, 8)
_WORTH = 0.8  # the largest part of the estimated time that is a gain


def _is_large(conv: Layer) -> bool:
    """Return True if a layer has a large kernel, of one row or several, without stride and dilation."""
    steps = [conv[f"{name}_{axis}"] for name in ("stride", "dilation") for axis in "hw"]
    large = conv["kernel_w"] >= _LEAST_TAPS and (conv["kernel_h"] == 1 or conv["kernel_h"] >= _LEAST_TAPS)
    return large and steps == [1, 1, 1, 1]


@rewrite(
    op("Convolution", "conv", _is_large),
    exact=False,
    purpose="last layers of generators: style transfer, CycleGAN, SRGAN, SRCNN",
)
def replace_convolution_with_pixelshuffle(conv: Layer) -> list[Layer]:
    """x ── Convolution ──   ⇒   x ── Convolution (stride 4) ── PixelShuffle ── Crop ──"""
    require_own_weights(conv)
    height, width = windows(conv)
    enough = fixed_size(conv.input, 0) >= _LEAST_INPUTS
    require(enough, f"'{conv.name}' has fewer than {_LEAST_INPUTS} input channels")
    stored, weight = weight_with_zeros(conv)
    outputs, inputs, rows, columns = weight.shape
    sequence = rows == height.size == height.outputs == 1
    require(rows > 1 or sequence, f"'{conv.name}' has one row of taps for an image of several rows")
    shapes = [(1, 1), *(((1, n) for n in _LENGTHS) if sequence else ((n, n) for n in _SIDES))]
    costs = {shape: cost_of_results(shape, outputs, (rows, columns)) for shape in shapes}
    down, across = shape = min(shapes, key=costs.__getitem__)
    require(costs[shape] <= _WORTH * costs[1, 1], f"'{conv.name}' has too many outputs to gain by it")
    few = height.outputs < 2 * down - 1 or width.outputs < 2 * across
    require(not few, f"'{conv.name}' gives too few rows or columns to gain by it")
    shifted = np.zeros((outputs, down, across, inputs, rows + down - 1, columns + across - 1), weight.dtype)
    for i in range(down):
        for j in range(across):
            shifted[:, i, j, :, i : i + rows, j : j + columns] = weight
    weights: dict[str, Any] = {"weight_data": reordered(stored, shifted)}
    if conv["bias_term"]:
        weights["bias_data"] = np.repeat(conv.weights["bias_data"], down * across)
    params = window_params([_in_steps(height, down), _in_steps(width, across)])
    params |= {"num_output": outputs * down * across, "weight_data_size": shifted.size}
    chain = Chain(conv)
    x = chain.put(conv.having(weights=weights, **params).without_defaults(), "squares")
    if sequence:
        length = fixed_size(x, 2)
        x = chain.reshape(x, (outputs, across, length), "rows")
        x = chain.add("Permute", "ordered", x, order_type=order_type((0, 2, 1)))
        x = chain.reshape(x, (outputs, 1, length * across), "row")
    else:
        x = chain.add("PixelShuffle", "pixels", x, upscale_factor=down)
    chain.crop(x, {1: (0, height.outputs), 2: (0, width.outputs)}, "crop")
    return chain.result()


def _in_steps(window: Window, side: int) -> Window:
    """Return the window that computes `side` results per position; the last position may compute unused ones."""
    kernel, steps = window.kernel + side - 1, ceil(window.outputs / side)
    after = (steps - 1) * side + kernel - window.size - window.before
    return Window(window.axis, kernel, side, 1, window.before, after, window.size)
