"""Int8 layers: their parameters and weights, and where ncnn's kernels are right.

ncnn rounds half away from zero and clamps to -127..127; a scale is what a number is multiplied by, 127 / largest.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onnx2ncnn_opt.ir.features import Feature
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.weight import Array, Encoding, Weight

LEVELS = 127
# On x86 and Vulkan, winograd of int8 is right up to this size of an integer sum: (2^31 - 1) / 576. ARM has no limit.
LARGEST_SUM = 3_728_270
PRODUCTS = ("Convolution", "ConvolutionDepthWise", "InnerProduct", "Gemm")  # that int8 layers of known scales exist of
_STATIC = ("Convolution", "ConvolutionDepthWise", "InnerProduct")  # their input has a scale of its own
NO_SCALE = "the model finds the scale of its input at run time; `quantize --data` finds one for ncnn"
CRASH_OF_GPUS = "ncnn crashes on GPUs of phones and laptops: its shader of an int8 Gemm with one scale does not compile"
BLOCKS = 400  # from this quantize_term on, a Gemm's B has blocks of integers; C stays float, and rows are not mixed
_BLOCK, _BLOCKS_OF_8_BITS = 128, 802  # numbers that share a scale, and Gemm's quantize_term of such blocks
# Each row of a weight is as near to multiples of a step as this, in steps, if it was quantised with that step.
_NEAR = 2e-3


def rows_of(layer: Layer) -> Array:
    """Return the weight of a layer with a row for each output channel; of a Gemm with B transposed, B."""
    name, count = ("B_data", "constantN") if layer.type == "Gemm" else ("weight_data", "num_output")
    return layer.weights[name].reshape(layer[count], -1)


def largest_sum(rows: Array, *, is_positive: bool = False) -> int:
    """Return the largest integer sum that int8 weights can give, of inputs that may be `is_positive` only."""
    whole = rows.reshape(len(rows), -1).astype(np.int64)
    if is_positive:
        return LEVELS * int(max(np.maximum(whole, 0).sum(1).max(), np.maximum(-whole, 0).sum(1).max()))
    return LEVELS * int(np.abs(whole).sum(1).max())


def may_use_winograd(layer: Layer) -> bool:
    """Return True if ncnn computes a convolution by winograd: 3x3 taps side by side, one result for each pixel."""
    if layer.type != "Convolution":
        return False
    return [layer[f"{name}_{axis}"] for name in ("kernel", "stride", "dilation") for axis in "wh"] == [3, 3, 1, 1, 1, 1]


def is_garbage_on_x86(layer: Layer) -> bool:
    """Return True for a grouped int8 convolution of 8n channels a group: x86 reads memory that nothing has written."""
    if layer.type != "ConvolutionDepthWise":
        return False
    taps = layer["kernel_w"] * layer["kernel_h"]
    made = layer["num_output"] // layer["group"]
    read = layer["weight_data_size"] // (layer["num_output"] * taps)
    return bool(max(made, read) > 1 and (made % 8 == 0 or read % 8 == 0))


def crashes_gpus(layer: Layer) -> bool:
    """Return True for an int8 Gemm without blocks: where ncnn uses no shared memory, its shader does not compile.

    gemm_int8.comp declares gx4 twice there, and net.cpp uses shared memory on discrete GPUs only.
    """
    return layer.type == "Gemm" and 0 < layer["quantize_term"] < BLOCKS


def row_scales(rows: Array, bits: int = 8) -> Array:
    """Return a scale for each row of weights; 1 for a row of zeros."""
    largest = np.abs(rows).max(axis=1, initial=0.0)
    has_scale = largest > 2.0**-100  # the scale of smaller ones overflows
    return np.where(has_scale, (2 ** (bits - 1) - 1) / np.where(has_scale, largest, 1), 1.0).astype(np.float32)


def integers(numbers: Array, scales: Array) -> Array:
    """Return numbers as ncnn rounds them."""
    scaled = numbers.astype(np.float64) * scales
    return np.clip(np.trunc(scaled + np.copysign(0.5, scaled)), -LEVELS, LEVELS).astype(np.int8)


def is_exact(rows: Array, scales: Array) -> bool:
    """Return True if scales make whole numbers from -127 to 127 of all weights."""
    scaled = rows.astype(np.float64) * scales.astype(np.float64)[:, None]
    return bool((np.abs(scaled - integers(rows, scales[:, None])) < _NEAR).all())


def imported_int8(layer: Layer, scales: Array, input_scale: float, *, is_positive: bool) -> tuple[Layer | None, str]:
    """Return a float layer as int8 whose weights are multiples of steps, 1 / scales; else None, and the reason."""
    if layer.type not in PRODUCTS:
        return None, f"ncnn has no int8 {layer.type}"
    if layer.type in _STATIC and not input_scale:
        return None, NO_SCALE
    if is_garbage_on_x86(layer):
        return None, "ncnn's int8 convolution in groups of 8n channels is wrong on x86"
    rows = rows_of(layer)
    if len(rows) % len(scales):
        return None, "its weight has no scale for each output"
    scales = np.tile(scales, len(rows) // len(scales))
    if not is_exact(rows, scales):
        return None, "its weights are no multiples of their scales"
    if layer.type == "ConvolutionDepthWise" and np.ptp(scales.reshape(layer["group"], -1), axis=1).any():
        return None, "its weight has several scales in a group"
    if layer.type == "Gemm" and (scales != scales[0]).any():
        return in_blocks(layer, scales), ""
    return in_int8(layer, scales, input_scale, is_positive=is_positive), ""


def in_blocks(layer: Layer, scales: Array) -> Layer:
    """Return a Gemm of a float B, transposed, as 8-bit blocks, with a scale for each row."""
    numbers, blocks = integers(rows_of(layer), scales[:, None]), -(-layer["constantK"] // _BLOCK)
    weights: dict[str, Array | Weight | None] = {"B_data": None}
    weights["B_data_packed_bytes"] = Weight(numbers.reshape(-1).view(np.uint8), Encoding.BYTES)
    weights["B_data_quantize_scales"] = np.repeat(scales, blocks)
    return layer.having(weights=weights, quantize_term=_BLOCKS_OF_8_BITS)


def in_int8(layer: Layer, scales: Array, input_scale: float | None = None, *, is_positive: bool = False) -> Layer:
    """Return a float layer as int8, with a scale for each row of its weight, and one for the input.

    A Gemm has no scale for its input, and one for all rows. A convolution whose sums may be too large for winograd does
    without it; `is_positive` inputs have smaller ones.
    """
    numbers = integers(rows_of(layer), scales[:, None])
    data = Weight(numbers.reshape(-1), Encoding.INT8)
    if layer.type == "Gemm":
        return layer.having(weights={"B_data": data, "B_data_int8_scale": scales[:1]}, quantize_term=2)
    assert layer.type in _STATIC
    assert input_scale is not None
    params: dict[str, Any] = {"int8_scale_term": 2}
    if layer.type == "ConvolutionDepthWise":
        params["int8_scale_term"] = 1
        scales = scales.reshape(layer["group"], -1)[:, 0]
    if may_use_winograd(layer) and largest_sum(numbers, is_positive=is_positive) > LARGEST_SUM:
        params["featmask"] = layer["featmask"] | Feature.NO_WINOGRAD
    weights: dict[str, Array | Weight] = {"weight_data": data, "weight_data_int8_scales": scales.astype(np.float32)}
    weights["bottom_blob_int8_scales"] = np.array([input_scale], np.float32)
    return layer.having(weights=weights, **params)
