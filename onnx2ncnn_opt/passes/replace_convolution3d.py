"""`replace_convolution3d`: convolutions of volumes, for which ncnn has a plain loop alone, as 2-D ones.

All depths are below each other in one tall image, with rows of zeros between them where the kernel pads. What the taps
along the depth read are parts of that image, each some rows further down. They become channels of one convolution with
as many times the input channels; single channels have one convolution for each tap instead, whose results are added. A
kernel that has taps along the depth alone is a convolution of an image whose rows are the depths. With dilation each
depth becomes several images without it, if that is faster.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

from onnx2ncnn_opt.ir.codes import Eltwise
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.kernels import cost
from onnx2ncnn_opt.ir.weight import Array, Weight
from onnx2ncnn_opt.passes._chain import Chain, gathered
from onnx2ncnn_opt.passes._fold import require_own_weights
from onnx2ncnn_opt.passes._windows import Window, reordered, weight_of, window_params, windows
from onnx2ncnn_opt.passes.fuse_activation import separate_activation
from onnx2ncnn_opt.passes.replace_dilated_convolution import LEAST_INPUTS
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import fixed_size, require, rewrite


@rewrite(op(("Convolution3D", "ConvolutionDepthWise3D"), "layer"), exact=False, purpose="video and volumes")
def replace_convolution3d(layer: Layer) -> list[Layer]:
    """x ── Convolution3D ──   ⇒   x ── Padding ── Reshape ── Crops ── Concat ── Convolution ── Reshape ── Crop ──"""
    require_own_weights(layer)
    depth, height, width = windows(layer)
    require(layer["pad_value"] == 0, f"'{layer.name}' does not pad with zeros")
    channels = fixed_size(layer.input, 0)
    chain = Chain(layer)
    if _is_one_tap(height) and _is_one_tap(width):
        _along_depth(chain, channels, depth, height, width)
        return chain.finish()
    _tall(chain, channels, depth, height, width)
    if layer.type == "Convolution3D" and channels * depth.kernel >= LEAST_INPUTS and _are_apart(depth, height, width):
        other = Chain(layer)
        _apart(other, channels, depth, height, width)
        chain = min(chain, other, key=lambda each: cost(each.made))
    return chain.finish()


def _is_one_tap(window: Window) -> bool:
    """Whether output positions are input positions."""
    return window.kernel == window.stride == 1 and not window.before and not window.after


def _are_apart(depth: Window, height: Window, width: Window) -> bool:
    """Whether there is a result for each element, of 3x3 taps as far apart in height as in width."""
    apart = height.dilation
    same = all((w.kernel, w.dilation, w.before, w.after) == (3, apart, apart, apart) for w in (height, width))
    return same and apart > 1 and depth.stride == height.stride == width.stride == 1


def _along_depth(chain: Chain, channels: int, depth: Window, height: Window, width: Window) -> None:
    layer, area = chain.layer, height.size * width.size
    image = chain.reshape(layer.input, (channels, depth.size, area), "rows")
    sliding = replace(depth, axis="h"), Window("w", 1, 1, 1, 0, 0, area)
    found = _convolution(chain, image, sliding, weight_of(layer), "conv")
    chain.reshape(found, (layer["num_output"], depth.outputs, height.size, width.size), "volume")


def _tall(chain: Chain, channels: int, depth: Window, height: Window, width: Window) -> None:
    layer = chain.layer
    group = layer["group"] if "DepthWise" in layer.type else 1
    rows, top, pitch = _rows(height, depth.outputs)
    # The depths in steps of the stride: a tap reads one of each step.
    steps = ceil(max((depth.outputs - 1) * depth.stride + depth.extent, depth.before + depth.size) / depth.stride)
    after = steps * depth.stride - depth.before - depth.size
    sides: dict[str, Any] = {"top": top, "bottom": pitch - top - height.size, "front": depth.before, "behind": after}
    x = chain.add("Padding", "pad", layer.input, **sides) if any(sides.values()) else layer.input
    x = chain.reshape(x, (channels, steps, depth.stride * pitch, width.size), "steps")
    parts = [_tap(chain, x, depth, k * depth.dilation, pitch) for k in range(depth.kernel)]
    image = channels, depth.outputs * pitch, width.size
    weight = weight_of(layer).swapaxes(1, 2)  # (outputs, taps, inputs of a group, kernel_h, kernel_w)
    if len(parts) > 1 and group == channels > 1:
        parts = [chain.reshape(part, image, f"tap{k}_rows") for k, part in enumerate(parts)]
        found = _summed(chain, parts, (rows, width), weight)
    else:
        x = gathered(chain, parts, group)
        x = chain.reshape(x, (len(parts) * channels, *image[1:]), "taps_rows")
        found = _convolution(chain, x, (rows, width), weight, "conv")
    lines = rows.outputs // depth.outputs
    volume = chain.reshape(found, (layer["num_output"], depth.outputs, lines, width.outputs), "volume")
    chain.crop(volume, {2: (0, height.outputs)}, "crop")


def _apart(chain: Chain, channels: int, depth: Window, height: Window, width: Window) -> None:
    """As `_tall`, of the images that dilation makes of each depth (see `replace_dilated_convolution`)."""
    layer, apart = chain.layer, height.dilation
    rows, columns = ceil(height.size / apart) + 1, ceil(width.size / apart)
    whole = rows * apart, columns * apart
    behind = max(depth.outputs + depth.extent - 1 - depth.before - depth.size, 0)
    bottom, right = whole[0] - height.size, whole[1] - width.size
    x = layer.input
    x = chain.add("Padding", "pad", x, bottom=bottom, right=right, front=depth.before, behind=behind)
    x = chain.reshape(x, (channels * x.known_shape[1], *whole), "depths")
    x = chain.add("Reorg", "parts", x, stride=apart)
    pitch = apart * apart * rows
    x = chain.reshape(x, (channels, x.known_shape[0] // channels * rows, columns), "tall")
    parts = [
        chain.crop(x, {1: (tap * pitch, (tap + depth.outputs) * pitch)}, f"tap{tap}")
        for tap in range(0, depth.extent, depth.dilation)
    ]
    sliding = Window("h", 3, 1, 1, 1, 1, depth.outputs * pitch), Window("w", 3, 1, 1, 1, 1, columns)
    x = _convolution(chain, gathered(chain, parts, 1), sliding, weight_of(layer).swapaxes(1, 2), "conv")
    outputs = layer["num_output"] * depth.outputs
    x = chain.reshape(x, (outputs * apart * apart, rows, columns), "results")
    x = chain.add("PixelShuffle", "whole", x, upscale_factor=apart)
    x = chain.reshape(x, (layer["num_output"], depth.outputs, *whole), "volume")
    chain.crop(x, {2: (0, height.size), 3: (0, width.size)}, "crop")


def _rows(height: Window, depths: int) -> tuple[Window, int, int]:
    """How the tall image is gone through, the rows of zeros before each depth, and the rows from depth to depth.

    The zeros between two depths serve both. The convolution gives as many rows for each depth as there are steps in the
    pitch; those after the first `height.outputs` mix two depths.
    """
    if depths == 1:
        return height, 0, height.size
    shares = height.before <= height.extent - height.stride
    top = 0 if shares else height.before
    zeros = max(height.before, height.after) if shares else height.before + height.after
    pitch = ceil((height.size + zeros) / height.stride) * height.stride
    before = height.before if shares else 0
    after = max(0, height.extent - height.stride - before)
    return replace(height, size=depths * pitch, before=before, after=after), top, pitch


def _tap(chain: Chain, x: Blob, depth: Window, offset: int, pitch: int) -> Blob:
    """What the tap `offset` depths further on reads, for every depth of the output."""
    step, within = divmod(offset, depth.stride)
    ranges = {1: (step, step + depth.outputs), 2: (within * pitch, (within + 1) * pitch)}
    return chain.crop(x, ranges, f"tap{offset}")


def _summed(chain: Chain, parts: list[Blob], sliding: tuple[Window, Window], weight: Array) -> Blob:
    """A convolution of each tap, added; the first has the bias, and the activation comes after the sum."""
    found = [
        _convolution(chain, part, sliding, weight[:, k], f"conv{k}", has_bias=k == 0, is_whole=False)
        for k, part in enumerate(parts)
    ]
    total = chain.add("Eltwise", "sum", *found, op_type=Eltwise.SUM)
    activation = separate_activation(chain.layer)
    return chain.add(activation[0], "activation", total, **activation[1]) if activation else total


def _convolution(
    chain: Chain,
    x: Blob,
    sliding: tuple[Window, Window],
    weight: Array,
    what: str,
    has_bias: bool = True,
    is_whole: bool = True,
) -> Blob:
    """The 2-D convolution with some of the stored weights, and with the layer's activation if it `is_whole`."""
    layer = chain.layer
    params: dict[str, Any] = {"num_output": layer["num_output"], "weight_data_size": weight.size}
    weights: dict[str, Array | Weight] = {"weight_data": reordered(layer.weights.stored("weight_data"), weight)}
    if "DepthWise" in layer.type:
        params["group"] = layer["group"]
    if layer["bias_term"] and has_bias:
        params["bias_term"], weights["bias_data"] = 1, layer.weights.stored("bias_data")
    if is_whole:
        params |= {name: layer[name] for name in ("activation_type", "activation_params")}
    return chain.add(layer.type.removesuffix("3D"), what, x, weights=weights, **params, **window_params(sliding))
