"""`replace_convolution3d`: 3-D convolutions, for which ncnn has only a plain loop, become 2-D ones.

One tall image holds all depths, one below the other, with rows of zeros between them if the kernel pads. For a dilated
kernel, each depth may be split into several images without dilation. The pass chooses the cheapest of three forms:

- Inputs: each tap along the depth reads a part of the tall image, some rows further down. The parts become input
  channels of one convolution: 3 taps need 3 times the inputs.
- Outputs: one convolution computes the results of all taps as output channels: 3 times the outputs. The net adds them.
- Weights: the depths become channels. Weights are zero for depths that an output does not read.

Depthwise layers have one convolution for each tap instead, and the net adds their results. A kernel with taps only
along the depth may become a convolution of an image whose rows are the depths.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.codes import Eltwise
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.kernels import cost
from onnx2ncnn_opt.ir.weight import Array, Weight
from onnx2ncnn_opt.ir.windows import groups_of
from onnx2ncnn_opt.passes._chain import Chain, gathered
from onnx2ncnn_opt.passes._fold import require_own_weights
from onnx2ncnn_opt.passes._windows import Window, reordered, weight_of, weight_with_zeros, window_params, windows
from onnx2ncnn_opt.passes.replace_dilated_convolution import LEAST_INPUTS
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import fixed_shape, fixed_size, require, rewrite

# Zeros take space in the file: limits for the new weights, as a number and relative to the old weights.
_FEW_WEIGHTS, _MORE_WEIGHTS = 2**18, 1.5


@rewrite(op(("Convolution3D", "ConvolutionDepthWise3D"), "layer"), exact=False, purpose="video and volumes")
def replace_convolution3d(layer: Layer) -> list[Layer]:
    """x ── Convolution3D ──   ⇒   x ── Padding ── Reshape ── Convolution ── Reshape ── Crops ── Eltwise ──"""
    require_own_weights(layer)
    depth, height, width = windows(layer)
    require(layer["pad_value"] == 0, f"'{layer.name}' does not pad with zeros")
    weight = weight_of(layer).swapaxes(1, 2)
    volume = _Volume(layer, fixed_size(layer.input, 0), groups_of(layer), weight, depth, height, width)
    return min(_forms(volume), key=lambda chain: cost(chain.made)).finish()


class _Kernel(NamedTuple):
    """The weights of a 2-D convolution, which `make` computes if the net gets it, their number, and its outputs."""

    make: Callable[[], Weight]
    size: int
    outputs: int
    bias: Array | None


@dataclass(frozen=True)
class _Volume:
    """A 3-D convolution to replace; the weight is (outputs, taps, inputs of a group, kernel_h, kernel_w)."""

    layer: Layer
    channels: int
    group: int
    weight: Array
    depth: Window
    height: Window
    width: Window

    @property
    def outputs(self) -> int:
        """The number of output channels."""
        return len(self.weight)

    @property
    def bias(self) -> Array | None:
        """The bias; None if the layer has none."""
        return self.layer.weights["bias_data"] if self.layer["bias_term"] else None

    def kernel(self, weight: Array, outputs: int, bias: Array | None) -> _Kernel:
        """Return the kernel with the layer's weights in a new order."""
        make = partial(reordered, self.layer.weights.stored("weight_data"), weight)
        return _Kernel(make, weight.size, outputs, bias)


def _forms(volume: _Volume) -> Iterator[Chain]:
    """Yield the chains of layers that can replace a layer."""
    depth, along_depth = volume.depth, _is_one_tap(volume.height) and _is_one_tap(volume.width)
    if along_depth:
        yield _along_depth(volume)
    for block in (1, volume.height.dilation) if _can_split(volume) else (1,):
        if not along_depth:
            yield _taps_as_inputs(volume, block)
        if depth.kernel > 1 and volume.group == 1:
            if not along_depth and depth.stride == 1:
                yield _taps_as_outputs(volume, block)
            classes = _classes(depth)
            growth = ceil(depth.size / classes) * ceil(depth.outputs / classes) / depth.kernel
            if growth * volume.weight.size <= max(_FEW_WEIGHTS, _MORE_WEIGHTS * volume.weight.size):
                yield _taps_as_weights(volume, block)


def _is_one_tap(window: Window) -> bool:
    """Return True if output i reads only input i: one tap, no stride, no padding."""
    return window.kernel == window.stride == 1 and not window.before and not window.after


def _can_split(volume: _Volume) -> bool:
    """Return True for 3x3 kernels of stride 1 with one dilation in height and width, and pads of that size."""
    depth, height, width, dilation = volume.depth, volume.height, volume.width, volume.height.dilation
    is_3x3 = all((w.kernel, w.dilation, w.before, w.after) == (3, *3 * (dilation,)) for w in (height, width))
    is_plain = depth.stride == height.stride == width.stride == volume.group == 1
    return is_3x3 and is_plain and dilation > 1 and volume.channels * depth.kernel >= LEAST_INPUTS


def _classes(depth: Window) -> int:
    """Return the number of consecutive depths that read disjoint depths: 2 for a dilation of 2."""
    return depth.dilation if depth.stride == 1 and depth.before % depth.dilation == 0 else 1


class _Images:
    """Depths of a volume in one tall image, each of them split into `block` x `block` images."""

    def __init__(self, volume: _Volume, depths: int, block: int) -> None:
        height, width = volume.height, volume.width
        self.chain, self.depths, self.block = Chain(volume.layer), depths, block
        self.sets = block * block
        if block == 1:
            rows, top, self.rows = _rows(height, depths)
            self.columns, self.lines, self.results = width.size, rows.outputs // depths, width.outputs
            self.pads = {"top": top, "bottom": self.rows - top - height.size}
            self.sliding = rows, width
        else:
            # A row of zeros below each image separates it from the next one.
            self.rows, self.columns = ceil(height.size / block) + 1, ceil(width.size / block)
            self.lines, self.results = self.rows * block, self.columns * block
            self.pads = {"bottom": self.lines - height.size, "right": self.results - width.size}
            tall = self.sets * depths * self.rows
            self.sliding = Window("h", 3, 1, 1, 1, 1, tall), Window("w", 3, 1, 1, 1, 1, self.columns)

    def padded(self, front: int, behind: int) -> Blob:
        """Return the layer's input with zeros around it."""
        sides: dict[str, Any] = {**self.pads, "front": front, "behind": behind}
        x = self.chain.layer.input
        return self.chain.add("Padding", "pad", x, **sides) if any(sides.values()) else x

    def entered(self, x: Blob, channels: int, depths: int) -> Blob:
        """Return a padded volume as images without dilation: (channels, sets, rows of all depths, columns)."""
        if self.block == 1:
            return x
        x = self.chain.reshape(x, (channels, depths * self.rows * self.block, self.columns * self.block), "depths")
        x = self.chain.add("Reorg", "parts", x, stride=self.block)
        return self.chain.reshape(x, (channels, self.sets, depths * self.rows, self.columns), "sets")

    def part(self, first: int, count: int, lines: tuple[int, int]) -> dict[int, tuple[int, int]]:
        """Return, by axis, the ranges of `count` depths from `first` on; in a volume, also of `lines` of each depth."""
        if self.block == 1:
            return {1: (first, first + count), 2: lines}
        return {2: (first * self.rows, (first + count) * self.rows)}

    def convolved(
        self, x: Blob, channels: int, kernel: _Kernel, suffix: str = "conv", *, is_part: bool = False
    ) -> Blob:
        """Return the convolution of all images as one."""
        x = self.chain.reshape(x, (channels, self.sets * self.depths * self.rows, self.columns), "tall")
        return _convolution(self.chain, x, self.sliding, kernel, suffix, is_part=is_part)

    def finished(self, x: Blob, depths: int) -> Chain:
        """Return the chain, with the layers that turn x, images of `depths` depths, into the layer's result."""
        outputs, whole = self.chain.layer["num_output"], fixed_shape(self.chain.layer.output)
        if x.shape == whole:
            return self.chain
        if self.block > 1:
            channels = x.known_shape[0]
            x = self.chain.reshape(
                x, (channels * self.sets, outputs * depths // channels * self.rows, self.columns), "results"
            )
            x = self.chain.add("PixelShuffle", "whole", x, upscale_factor=self.block)
        x = self.chain.reshape(x, (outputs, depths, self.lines, self.results), "volume")
        self.chain.crop(x, {axis: (0, size) for axis, size in enumerate(whole)}, "crop")
        return self.chain


def _along_depth(volume: _Volume) -> Chain:
    chain, depth = Chain(volume.layer), volume.depth
    height, width = volume.height.size, volume.width.size
    x = chain.reshape(volume.layer.input, (volume.channels, depth.size, height * width), "rows")
    sliding = replace(depth, axis="h"), Window("w", 1, 1, 1, 0, 0, height * width)
    kernel = volume.kernel(volume.weight.swapaxes(1, 2), volume.outputs, volume.bias)
    x = _convolution(chain, x, sliding, kernel)
    chain.reshape(x, (volume.outputs, depth.outputs, height, width), "volume")
    return chain


def _taps_as_inputs(volume: _Volume, block: int) -> Chain:
    depth, channels, outputs = volume.depth, volume.channels, volume.outputs
    images = _Images(volume, depth.outputs, block)
    # Each step has `stride` depths, and a tap reads one of them.
    steps = ceil(max((depth.outputs - 1) * depth.stride + depth.extent, depth.before + depth.size) / depth.stride)
    x = images.padded(depth.before, steps * depth.stride - depth.before - depth.size)
    x = images.entered(x, channels, steps * depth.stride)
    if depth.stride > 1:
        x = images.chain.reshape(x, (channels, steps, depth.stride * images.rows, images.columns), "steps")
    parts = []
    for tap in range(0, depth.extent, depth.dilation):
        step, within = divmod(tap, depth.stride)
        lines = within * images.rows, (within + 1) * images.rows
        parts.append(images.chain.crop(x, images.part(step, depth.outputs, lines), f"tap{tap}"))
    if len(parts) > 1 and volume.group == channels > 1:
        for k, part in enumerate(parts):
            kernel = volume.kernel(volume.weight[:, k], outputs, None if k else volume.bias)
            parts[k] = images.convolved(part, channels, kernel, f"conv{k}", is_part=True)
        return images.finished(_sum(images.chain, parts), depth.outputs)
    x = gathered(images.chain, parts, volume.group)
    x = images.convolved(x, channels * len(parts), volume.kernel(volume.weight, outputs, volume.bias))
    return images.finished(x, depth.outputs)


def _taps_as_outputs(volume: _Volume, block: int) -> Chain:
    depth, outputs, weight = volume.depth, volume.outputs, volume.weight.swapaxes(0, 1)
    depths, all_outputs = depth.before + depth.size + depth.after, depth.kernel * outputs
    images = _Images(volume, depths, block)
    x = images.entered(images.padded(depth.before, depth.after), volume.channels, depths)
    # The first tap has the bias, because every result contains this tap once.
    bias = None if volume.bias is None else np.pad(volume.bias, (0, all_outputs - outputs))
    x = images.convolved(x, volume.channels, volume.kernel(weight, all_outputs, bias), is_part=True)
    _, lines, results = fixed_shape(x)
    sets = depths if block == 1 else images.sets
    x = images.chain.reshape(x, (all_outputs, sets, lines // sets, results), "taps")
    parts = []
    for k in range(depth.kernel):
        ranges = images.part(k * depth.dilation, depth.outputs, (0, volume.height.outputs))
        parts.append(images.chain.crop(x, {0: (k * outputs, (k + 1) * outputs), **ranges}, f"tap{k}"))
    return images.finished(_sum(images.chain, parts), depth.outputs)


def _taps_as_weights(volume: _Volume, block: int) -> Chain:
    depth, classes, channels = volume.depth, _classes(volume.depth), volume.channels
    in_depths, out_depths = ceil(depth.size / classes), ceil(depth.outputs / classes)
    images = _Images(volume, classes, block)
    x = images.entered(images.padded(0, in_depths * classes - depth.size), channels * in_depths, classes)
    bias = None if volume.bias is None else np.repeat(volume.bias, out_depths)
    make = partial(_dense_weight, volume, in_depths, out_depths)
    size = volume.weight[:, 0].size * in_depths * out_depths
    x = images.convolved(x, channels * in_depths, _Kernel(make, size, volume.outputs * out_depths, bias))
    return images.finished(x, out_depths * classes)


def _dense_weight(volume: _Volume, in_depths: int, out_depths: int) -> Weight:
    """Return the weights from all inputs at `in_depths` depths to all outputs at `out_depths` depths of a class."""
    depth, classes = volume.depth, _classes(volume.depth)
    stored, weight = weight_with_zeros(volume.layer)
    outputs, channels, _, *kernel = weight.shape
    dense = np.zeros((outputs, out_depths, channels, in_depths, *kernel), weight.dtype)
    for out_depth in range(out_depths):
        for tap in range(depth.kernel):
            in_depth = out_depth * depth.stride + (tap * depth.dilation - depth.before) // classes
            if 0 <= in_depth < in_depths:
                dense[:, out_depth, :, in_depth] = weight[:, :, tap]
    return reordered(stored, dense)


def _rows(height: Window, depths: int) -> tuple[Window, int, int]:
    """Return the slide over the tall image, the rows of zeros before each depth, and the pitch of depths in rows.

    Two depths share the zeros between them. The convolution computes pitch / stride rows for each depth. Rows after the
    first `height.outputs` mix two depths, and are cropped.
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


def _sum(chain: Chain, parts: list[Blob]) -> Blob:
    """Return the sum of parts of the result, with the layer's activation."""
    return chain.activate(chain.add("Eltwise", "sum", *parts, op_type=Eltwise.SUM))


def _convolution(
    chain: Chain,
    x: Blob,
    sliding: tuple[Window, Window],
    kernel: _Kernel,
    suffix: str = "conv",
    *,
    is_part: bool = False,
) -> Blob:
    """Return a 2-D convolution, with the layer's activation unless it `is_part` of a sum."""
    layer = chain.layer
    params: dict[str, Any] = {"num_output": kernel.outputs, "weight_data_size": kernel.size}
    weights: dict[str, Array | Callable[[], Weight]] = {"weight_data": kernel.make}
    if "DepthWise" in layer.type:
        params["group"] = layer["group"]
    if kernel.bias is not None:
        params["bias_term"], weights["bias_data"] = 1, kernel.bias
    if not is_part:
        params |= {name: layer[name] for name in ("activation_type", "activation_params")}
    return chain.add(layer.type.removesuffix("3D"), suffix, x, weights=weights, **params, **window_params(sliding))
