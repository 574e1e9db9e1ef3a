"""`replace_dilated_convolution`: 3x3 taps that lie apart as taps side by side, for which ncnn has winograd.

With dilation d an output reads inputs whose rows and columns differ from its own by multiples of d. So an image is as
good as d * d smaller ones. They are put below each other in one tall image, with a row of zeros after each, which one
convolution without dilation goes through.
"""

from typing import Any

from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.kernels import has_3x3_taps
from onnx2ncnn_opt.passes._chain import Chain
from onnx2ncnn_opt.passes._fold import require_own_weights
from onnx2ncnn_opt.passes._windows import windows
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import fixed_size, require, rewrite

# With fewer the matrices of winograd are too small to gain.
LEAST_INPUTS = 48
_KEPT = (
    *("num_output", "kernel_w", "kernel_h", "bias_term", "weight_data_size"),
    *("activation_type", "activation_params"),
)
_PADS = ("pad_left", "pad_right", "pad_top", "pad_bottom")


def _is_dilated(conv: Layer) -> bool:
    """Return True if a layer has 3x3 taps as far apart in height as in width, and a result for each pixel."""
    return has_3x3_taps(conv) and conv["dilation_h"] == conv["dilation_w"] > 1


@rewrite(
    op("Convolution", "conv", _is_dilated),
    exact=False,
    purpose="segmentation with dilated ResNets (DeepLab, PSPNet, FCN), and MeshNet",
)
def replace_dilated_convolution(conv: Layer) -> list[Layer]:
    """x ── Convolution (3x3, dilated) ──   ⇒   x ── Padding ── Reorg ── Convolution ── PixelShuffle ── Crop ──"""
    require_own_weights(conv)
    name, apart, outputs = conv.name, int(conv["dilation_w"]), int(conv["num_output"])
    height, width = windows(conv)
    pads = (height.before, height.after, width.before, width.after)
    require(pads == (apart,) * 4, f"'{name}' does not pad each side by its dilation")
    require(conv["pad_value"] == 0, f"'{name}' does not pad with zeros")
    require(conv.input.batch == 1, f"'{conv.input.name}' may be a batch")
    channels = fixed_size(conv.input, 0)
    require(channels >= LEAST_INPUTS, f"'{name}' has fewer than {LEAST_INPUTS} input channels")
    rows, columns = -(-height.size // apart) + 1, -(-width.size // apart)
    chain = Chain(conv)
    bottom, right = rows * apart - height.size, columns * apart - width.size
    x = chain.add("Padding", "pad", conv.input, bottom=bottom, right=right)
    x = chain.add("Reorg", "parts", x, stride=apart)
    x = chain.reshape(x, (channels, apart * apart * rows, columns), "tall")
    params: dict[str, Any] = {name: conv[name] for name in _KEPT} | dict.fromkeys(_PADS, 1)
    x = chain.add(conv.type, "conv", x, weights=dict(conv.weights.stored_items()), **params)
    x = chain.reshape(x, (outputs * apart * apart, rows, columns), "results")
    x = chain.add("PixelShuffle", "whole", x, upscale_factor=apart)
    chain.crop(x, {1: (0, height.size), 2: (0, width.size)}, "crop")
    return chain.finish()
