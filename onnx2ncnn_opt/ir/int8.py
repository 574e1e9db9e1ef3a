"""Int8 layers: their parameters and weights, and the limits of ncnn's kernels.

ncnn multiplies a number by its scale, 127 / largest, rounds half away from zero and clamps to -127..127.
"""

from __future__ import annotations

import numpy as np

from onnx2ncnn_opt.ir.features import Feature
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.kernels import has_3x3_taps
from onnx2ncnn_opt.ir.weight import Array, Encoding, Weight

LEVELS = 127
# The largest integer sum for which int8 winograd is right on x86 and Vulkan: (2^31 - 1) / 576. ARM has no limit.
LARGEST_SUM = 3_728_270
PRODUCTS = ("Convolution", "ConvolutionDepthWise", "InnerProduct", "Gemm")  # types with an int8 form of stored scales
WITH_SCALE = ("Convolution", "ConvolutionDepthWise", "InnerProduct")  # the scale of their input is stored, too
NO_SCALE = "the model finds the scale of its input at run time; `quantize --data` finds one for ncnn"
CRASH_OF_GPUS = "ncnn crashes on GPUs of phones and laptops: its shader of an int8 Gemm with one scale does not compile"
BLOCKS = 400  # from this quantize_term on, Gemm's B is block-quantised; C stays float, and rows share no scale
_BLOCK, _BLOCKS_OF_8_BITS = 128, 802  # the size of a block that shares a scale, and its quantize_term
_STEP_TOLERANCE = 2e-3  # the distance, in steps, of a quantised weight from a multiple of its step


def rows_of(layer: Layer) -> Array:
    """Return the weights as a matrix with one scale for each row: of a Gemm A, or B transposed."""
    if layer.type != "Gemm":
        rows = layer["group"] if layer.type == "ConvolutionDepthWise" else layer["num_output"]
        return layer.weights["weight_data"].reshape(rows, -1)
    name, size, is_transposed = "B_data", layer["constantN"], not layer["transB"]
    if layer["constantA"]:
        name, size, is_transposed = "A_data", layer["constantM"], layer["transA"]
    matrix = layer.weights[name].reshape((-1, size) if is_transposed else (size, -1))
    return np.ascontiguousarray(matrix.T) if is_transposed else matrix


def largest_sum(rows: Array, *, is_positive: bool = False) -> int:
    """Return the largest sum of products of int8 weights and inputs, which are 0 or more if `is_positive`."""
    whole = rows.reshape(len(rows), -1).astype(np.int64)
    if is_positive:
        return LEVELS * int(max(np.maximum(whole, 0).sum(1).max(), np.maximum(-whole, 0).sum(1).max()))
    return LEVELS * int(np.abs(whole).sum(1).max())


def may_use_winograd(layer: Layer) -> bool:
    """Return True if ncnn may compute a convolution with winograd: a 3x3 kernel, stride 1, no dilation."""
    return layer.type == "Convolution" and has_3x3_taps(layer) and (layer["dilation_w"], layer["dilation_h"]) == (1, 1)


def is_garbage_on_x86(layer: Layer) -> bool:
    """Return True for a grouped int8 convolution with 8n channels per group: x86 reads uninitialised memory."""
    if layer.type != "ConvolutionDepthWise":
        return False
    taps = layer["kernel_w"] * layer["kernel_h"]
    outputs = layer["num_output"] // layer["group"]
    inputs = layer["weight_data_size"] // (layer["num_output"] * taps)
    return bool(max(outputs, inputs) > 1 and (outputs % 8 == 0 or inputs % 8 == 0))


def crashes_gpus(layer: Layer) -> bool:
    """Return True for an int8 Gemm without blocks: its shader does not compile if ncnn uses no shared memory.

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
    """Return True if all weights times their scales are integers from -127 to 127."""
    scaled = rows.astype(np.float64) * scales.astype(np.float64)[:, None]
    return bool((np.abs(scaled - integers(rows, scales[:, None])) < _STEP_TOLERANCE).all())


def imported_int8(layer: Layer, scales: Array, input_scale: float, *, is_positive: bool) -> tuple[Layer | None, str]:
    """Return the int8 form of a float layer whose weights are multiples of 1 / scales; else None, and the reason."""
    if layer.type not in PRODUCTS:
        return None, f"ncnn has no int8 {layer.type}"
    if layer.type in WITH_SCALE and not input_scale:
        return None, NO_SCALE
    if is_garbage_on_x86(layer):
        return None, "ncnn's int8 convolution in groups of 8n channels is wrong on x86"
    rows, outputs = rows_of(layer), layer["constantN" if layer.type == "Gemm" else "num_output"]
    if outputs % len(scales):
        return None, "its weight has no scale for each output"
    of_rows = np.tile(scales, outputs // len(scales)).reshape(len(rows), -1)
    if np.ptp(of_rows, axis=1).any():
        return None, "its weight has several scales in a group"
    scales = of_rows[:, 0]
    if not is_exact(rows, scales):
        return None, "its weights are no multiples of their scales"
    numbers = integers(rows, scales[:, None])
    if layer.type == "Gemm" and (scales != scales[0]).any():
        by_block = np.repeat(scales, -(-layer["constantK"] // _BLOCK))
        return layer.having(weights=packed("B_data", numbers, by_block), quantize_term=_BLOCKS_OF_8_BITS), ""
    form = in_int8(layer, scales, input_scale)
    if may_use_winograd(layer) and largest_sum(numbers, is_positive=is_positive) > LARGEST_SUM:
        form.params["featmask"] = form["featmask"] | Feature.NO_WINOGRAD
    return form, ""


def packed(name: str, numbers: Array, scales: Array) -> dict[str, Array | Weight | None]:
    """Return a block-quantised weight of 8 bits and its scales, in place of the float weight of this name."""
    data = Weight(numbers.reshape(-1).view(np.uint8), Encoding.BYTES)
    return {name: None, f"{name}_packed_bytes": data, f"{name.removesuffix('_weight_data')}_quantize_scales": scales}


def in_int8(layer: Layer, scales: Array, input_scale: float = 0.0) -> Layer:
    """Return a float layer as int8, with a scale for each row of its weight, and one for the input.

    A Gemm has one scale for all rows, and none for its input.
    """
    data = Weight(integers(rows_of(layer), scales[:, None]).reshape(-1), Encoding.INT8)
    if layer.type == "Gemm":
        return layer.having(weights={"B_data": data, "B_data_int8_scale": scales[:1]}, quantize_term=2)
    weights: dict[str, Array | Weight] = {"weight_data": data, "weight_data_int8_scales": scales.astype(np.float32)}
    weights["bottom_blob_int8_scales"] = np.array([input_scale], np.float32)
    return layer.having(weights=weights, int8_scale_term=1 if layer.type == "ConvolutionDepthWise" else 2)
