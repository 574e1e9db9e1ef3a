"""`replace_deconvolution3d`: 3-D deconvolutions, for which ncnn has only a plain loop, become 2-D ones.

One tall image holds all depths, one below the other. Output depths with the same remainder modulo the stride, one
*phase*, use the same taps. So each phase gets output channels of its own, and all depths that a phase reads become
input channels.
"""

from math import ceil
from typing import Any

import numpy as np

from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.permute import order_type
from onnx2ncnn_opt.ir.weight import Array, Weight
from onnx2ncnn_opt.ir.windows import groups_of, pads_of
from onnx2ncnn_opt.passes._chain import Chain, gathered
from onnx2ncnn_opt.passes._fold import require_own_weights
from onnx2ncnn_opt.passes._windows import Window, reordered, weight_with_zeros, windows
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import fixed_shape, fixed_size, require, rewrite

# The parameters that the 2-D layer has with the same values.
_SAME = (
    *(f"{name}_{axis}" for name in ("kernel", "stride", "dilation") for axis in "hw"),
    *("pad_left", "pad_right", "pad_top", "pad_bottom", "output_pad_right", "output_pad_bottom"),
    *("bias_term", "activation_type", "activation_params"),
)


@rewrite(op(("Deconvolution3D", "DeconvolutionDepthWise3D"), "layer"), exact=False, purpose="decoders of volumes")
def replace_deconvolution3d(layer: Layer) -> list[Layer]:
    """x ── Deconvolution3D ──   ⇒   x ── Padding ── Reshape ── Concat ── Deconvolution ── Permute ── Crop ──"""
    require_own_weights(layer)
    require(min(pads_of(layer)) >= 0, f"the padding of '{layer.name}' depends on its input's size")
    depth, height, _ = windows(layer)
    channels = fixed_size(layer.input, 0)
    _, out_depth, out_height, out_width = fixed_shape(layer.output, 4)
    group = groups_of(layer)
    phases, single = depth.stride, group in (1, layer["num_output"])
    require(phases == 1 or single, f"'{layer.name}' has groups of several channels")
    steps, taps = ceil(out_depth / phases), _taps(depth)
    overhang = height.extent - height.stride + int(layer["output_pad_bottom"])  # output rows beyond the last stride
    pitch = height.size if steps == 1 else height.size + max(0, ceil(overhang / height.stride))
    chain = Chain(layer)
    x = _image(chain, depth, steps, list(taps), pitch, channels)
    x = _deconvolution(chain, x, height, _weight(layer, taps), steps)
    lines = out_height if steps == 1 else pitch * height.stride
    x = chain.reshape(x, (phases * layer["num_output"], steps, lines, out_width), "volume")
    x = chain.crop(x, {2: (0, out_height)}, "rows")
    if phases > 1:
        outer, order = ((phases, layer["num_output"]), (1, 2, 0, 3)) if group == 1 else ((group, phases), (0, 2, 1, 3))
        x = chain.reshape(x, (*outer, steps, out_height * out_width), "ways")
        x = chain.add("Permute", "interleaved", x, order_type=order_type(order))
        x = chain.reshape(x, (layer["num_output"], steps * phases, out_height, out_width), "depths")
    chain.crop(x, {1: (0, out_depth)}, "crop")
    return chain.finish()


def _taps(depth: Window) -> dict[int, dict[int, int]]:
    """Return the taps of the output depths of step j: for input depth j + key, the tap of each phase that reads it."""
    taps: dict[int, dict[int, int]] = {}
    for phase in range(depth.stride):
        for tap in range(depth.kernel):
            offset, rest = divmod(phase + depth.before - tap * depth.dilation, depth.stride)
            if not rest:
                taps.setdefault(offset, {})[phase] = tap
    return dict(sorted(taps.items()))


def _image(chain: Chain, depth: Window, steps: int, offsets: list[int], pitch: int, channels: int) -> Blob:
    """Return the tall image of all steps, with rows of zeros between; the channels are the depths that a step reads."""
    layer = chain.layer
    height, width = fixed_shape(layer.input)[2:]
    front = max(0, -offsets[0])
    after = max(0, steps + offsets[-1] - depth.size)
    sides: dict[str, Any] = {"bottom": pitch - height, "front": front, "behind": after}
    x = chain.add("Padding", "pad", layer.input, **sides) if any(sides.values()) else layer.input
    x = chain.reshape(x, (channels, 1, (depth.size + front + after) * pitch, width), "rows")
    parts = [
        chain.crop(x, {2: ((offset + front) * pitch, (offset + front + steps) * pitch)}, f"tap{i}")
        for i, offset in enumerate(offsets)
    ]
    x = gathered(chain, parts, groups_of(layer))
    return chain.reshape(x, (len(offsets) * channels, steps * pitch, width), "taps_rows")


def _weight(layer: Layer, taps: dict[int, dict[int, int]]) -> Weight:
    """Return the taps of all inputs for each group, phase and output; zeros if a phase does not read an offset."""
    group, phases = groups_of(layer), layer["stride_d"]
    block, weight = weight_with_zeros(layer)
    outputs, inputs, _, *kernel = weight.shape
    by_phase = np.zeros((group, phases, outputs // group, len(taps), inputs, *kernel), weight.dtype)
    for i, of_offset in enumerate(taps.values()):
        for phase, tap in of_offset.items():
            by_phase[:, phase, :, i] = weight[:, :, tap].reshape(group, outputs // group, inputs, *kernel)
    return reordered(block, by_phase)


def _deconvolution(chain: Chain, x: Blob, height: Window, weight: Weight, steps: int) -> Blob:
    """Return the 2-D deconvolution, cropped to pitch * stride rows for each depth."""
    layer, phases = chain.layer, chain.layer["stride_d"]
    params: dict[str, Any] = {name: layer[name] for name in _SAME}
    params |= {"num_output": phases * layer["num_output"], "weight_data_size": weight.data.size}
    if steps > 1:
        spare = height.extent - height.stride - height.before
        params |= {"pad_bottom": max(0, spare), "output_pad_bottom": max(0, -spare)}
    if "DepthWise" in layer.type:
        params["group"] = layer["group"]
    weights: dict[str, Array | Weight] = {"weight_data": weight}
    if layer["bias_term"]:
        bias = layer.weights["bias_data"].reshape(params.get("group", 1), 1, -1)
        weights["bias_data"] = np.repeat(bias, phases, axis=1).reshape(-1)
    return chain.add(layer.type.removesuffix("3D"), "deconv", x, weights=weights, **params)
