"""`replace_dilated_convolution`: dilated 3x3 kernels lose their dilation, because ncnn then uses winograd.

With dilation d an output reads inputs whose rows and columns differ from its own by multiples of d. So the image splits
into d * d independent smaller ones. The pass stacks them in one tall image, with a row of zeros after each, for one
convolution without dilation.
"""

from typing import Any

from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.kernels import has_3x3_taps
from onnx2ncnn_opt.passes._chain import Chain
from onnx2ncnn_opt.passes._fold import require_own_weights
from onnx2ncnn_opt.passes._windows import windows
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import fixed_size, require, rewrite

# With fewer inputs, winograd's matrices are too small for a gain.
LEAST_INPUTS = 48
_PADS = ("pad_left", "pad_right", "pad_top", "pad_bottom")


@rewrite(
    op("Convolution", "conv", lambda conv: has_3x3_taps(conv) and conv["dilation_h"] == conv["dilation_w"] > 1),
    exact=False,
    purpose="segmentation with dilated ResNets (DeepLab, PSPNet, FCN), and MeshNet",
)
def replace_dilated_convolution(conv: Layer) -> list[Layer]:
    """x ── Convolution (3x3, dilated) ──   ⇒   x ── Padding ── Reorg ── Convolution ── PixelShuffle ── Crop ──"""
    require_own_weights(conv)
    name, dilation, outputs = conv.name, int(conv["dilation_w"]), int(conv["num_output"])
    height, width = windows(conv)
    pads = (height.before, height.after, width.before, width.after)
    require(pads == (dilation,) * 4, f"'{name}' does not pad each side by its dilation")
    require(conv["pad_value"] == 0, f"'{name}' does not pad with zeros")
    require(conv.input.batch == 1, f"'{conv.input.name}' may be a batch")
    channels = fixed_size(conv.input, 0)
    require(channels >= LEAST_INPUTS, f"'{name}' has fewer than {LEAST_INPUTS} input channels")
    rows, columns = -(-height.size // dilation) + 1, -(-width.size // dilation)
    chain = Chain(conv)
    bottom, right = rows * dilation - height.size, columns * dilation - width.size
    x = chain.add("Padding", "pad", conv.input, bottom=bottom, right=right)
    x = chain.add("Reorg", "parts", x, stride=dilation)
    x = chain.reshape(x, (channels, dilation * dilation * rows, columns), "tall")
    params: dict[str, Any] = dict.fromkeys(_PADS, 1) | dict.fromkeys(("dilation_w", "dilation_h"))
    x = chain.put(conv.having(inputs=[x], **params).without_defaults(), "conv")
    x = chain.reshape(x, (outputs * dilation * dilation, rows, columns), "results")
    x = chain.add("PixelShuffle", "whole", x, upscale_factor=dilation)
    chain.crop(x, {1: (0, height.size), 2: (0, width.size)}, "crop")
    return chain.finish()
