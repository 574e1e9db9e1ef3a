"""Float layers as layers of int8, with given scales.

ncnn rounds half away from zero and has no -128: x becomes round(x * scale), from -127 to 127.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx2ncnn_opt.ir.features import Feature
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.weight import Encoding, Weight

Array = NDArray[Any]
HIGHEST = 127
# x86 and Vulkan compute 3x3 convolutions of int8 by winograd: right while every sum of products is at most this.
LARGEST_SUM = (2**31 - 1) // 576
_MARGIN = 4  # a sum may be so many times as large as the largest that data gave
_BLOCK = 64  # numbers of a Gemm's row that have a scale of their own
_OF_BLOCKS = 801  # Gemm's quantize_term: 8 bits, blocks of 64


@dataclass(frozen=True)
class Scales:
    """What a layer needs: the scale of its input, the input's mean by channel, and perhaps the scales of its rows.

    `largest_sum` is the largest sum of products of integers that data gave, None if nobody looked.
    """

    input: float
    means: Array | None = None
    rows: Array | None = None
    largest_sum: float | None = None


def obstacle(layer: Layer) -> str:
    """Return why a layer stays float; empty if it has an int8 form."""
    if layer.type not in _KINDS:
        return "ncnn has no int8 form of it"
    if len(layer.inputs) != 1 or any(name not in layer.weights for name in _KINDS[layer.type].weights):
        return "the net computes its weights"
    if not all(layer.weights.stored(name).is_float for name in layer.weights):
        return "it is quantised already"
    if layer["featmask"] & Feature.NO_INT8:
        return "its feature mask says no int8"
    return _KINDS[layer.type].obstacle(layer)


def rows_of(layer: Layer) -> Array:
    """Return the weights that share a scale, row by row."""
    kind = _KINDS[layer.type]
    return layer.weights[kind.weights[0]].reshape(kind.rows(layer), -1)


def row_scales(rows: Array, bits: int = 8) -> Array:
    """Return a scale for each row of weights; 1 for a row of zeros."""
    largest = np.abs(rows).max(axis=1, initial=0.0)
    return np.where(largest > 0, (2 ** (bits - 1) - 1) / np.where(largest > 0, largest, 1), 1.0).astype(np.float32)


def integers(numbers: Array, scales: Array) -> Array:
    """Return numbers as ncnn rounds them."""
    scaled = numbers.astype(np.float64) * scales
    return np.clip(np.trunc(scaled + np.copysign(0.5, scaled)), -HIGHEST, HIGHEST).astype(np.int8)


def quantise(graph: Graph, scales: Mapping[str, Scales], *, joins: bool = True) -> None:
    """Make layers int8, by name. With `joins` convolutions hand int8 to each other where they can."""
    chosen = [layer for layer in graph if layer.name in scales]
    for layer in chosen:
        _KINDS[layer.type].quantise(layer, scales[layer.name])
    for layer in chosen if joins else ():
        if layer.type in _CONVOLUTIONS and _takes_int8(layer.output, scales):
            layer.params["int8_scale_term"] += 100
            layer.weights["top_blob_int8_scales"] = np.array([scales[layer.output.users[0].name].input], np.float32)


def _takes_int8(blob: Blob, scales: Mapping[str, Scales]) -> bool:
    readers = list(blob.users)
    is_read = bool(readers) and all(each.type in _CONVOLUTIONS and each.name in scales for each in readers)
    return is_read and not blob.is_output and len({scales[each.name].input for each in readers}) == 1


def _convolution(layer: Layer, scales: Scales) -> None:
    rows = rows_of(layer)
    by_row = row_scales(rows) if scales.rows is None else scales.rows.astype(np.float32)
    if _is_winograd(layer):
        largest = np.abs(integers(rows, by_row[:, None]).astype(np.int64)).sum(axis=1).max() * HIGHEST
        seen = math.inf if scales.largest_sum is None else _MARGIN * scales.largest_sum
        if min(largest, seen) > LARGEST_SUM:
            bits = next((bits for bits in (7, 6) if largest * 2.0 ** (bits - 8) <= LARGEST_SUM), 6)
            if scales.rows is None:
                by_row = row_scales(rows, bits)
            if scales.rows is not None or largest * 2.0 ** (bits - 8) > LARGEST_SUM:
                layer.params["featmask"] = layer["featmask"] | Feature.NO_WINOGRAD
    _store(layer, rows, by_row, scales)
    depthwise = layer.type == "ConvolutionDepthWise"
    layer.params["int8_scale_term"] = 1 if depthwise else 2
    layer.weights["weight_data_int8_scales"] = by_row
    layer.weights["bottom_blob_int8_scales"] = np.array([scales.input], np.float32)


def _innerproduct(layer: Layer, scales: Scales) -> None:
    rows = rows_of(layer)
    by_row = row_scales(rows) if scales.rows is None else scales.rows.astype(np.float32)
    _store(layer, rows, by_row, scales)
    layer.params["int8_scale_term"] = 2
    layer.weights["weight_data_int8_scales"] = by_row
    layer.weights["bottom_blob_int8_scales"] = np.array([scales.input], np.float32)


def _store(layer: Layer, rows: Array, by_row: Array, scales: Scales) -> None:
    """Store rows of weights as integers, and add to the bias what their rounding takes from the mean."""
    numbers = integers(rows, by_row[:, None])
    if scales.means is not None and layer["bias_term"]:
        lost = rows - numbers / by_row[:, None].astype(np.float64)
        means = (
            np.repeat(scales.means, rows.shape[1] // scales.means.size) if rows.shape[1] >= scales.means.size else None
        )
        if layer.type == "ConvolutionDepthWise":
            taps = lost.sum(axis=1) * scales.means if scales.means.size == len(rows) else np.zeros(len(rows))
        else:
            taps = lost @ means if means is not None else np.zeros(len(rows))
        layer.weights["bias_data"] = (layer.weights["bias_data"] + taps).astype(np.float32)
    layer.weights["weight_data"] = Weight(numbers.reshape(-1), Encoding.INT8)


def _gemm(layer: Layer, scales: Scales) -> None:
    rows = rows_of(layer).astype(np.float32)
    blocks = -(-rows.shape[1] // _BLOCK)
    padded = np.zeros((len(rows), blocks * _BLOCK), np.float32)
    padded[:, : rows.shape[1]] = rows
    by_block = row_scales(padded.reshape(-1, _BLOCK))
    numbers = integers(padded.reshape(-1, _BLOCK), by_block[:, None]).reshape(padded.shape)[:, : rows.shape[1]]
    del layer.weights["B_data"]
    bias = dict(layer.weights.stored_items())
    for name in bias:
        del layer.weights[name]
    layer.weights["B_data_packed_bytes"] = Weight(
        np.ascontiguousarray(numbers).reshape(-1).view(np.uint8), Encoding.BYTES
    )
    for name, block in bias.items():
        layer.weights[name] = block
    layer.weights["B_data_quantize_scales"] = by_block
    layer.params["quantize_term"] = _OF_BLOCKS


def _is_winograd(layer: Layer) -> bool:
    names = ("kernel_w", "kernel_h", "stride_w", "stride_h", "dilation_w", "dilation_h")
    return layer.type == "Convolution" and [layer[name] for name in names] == [3, 3, 1, 1, 1, 1]


def _no_group(layer: Layer) -> str:
    channels, group = layer["num_output"], layer["group"]
    if channels != group or rows_of(layer).size // group != layer["kernel_w"] * layer["kernel_h"]:
        return "on x86 ncnn computes grouped convolutions of int8 wrong (the memory is not initialised)"
    return ""


def _plain_gemm(layer: Layer) -> str:
    wanted = {"transA": 0, "transB": 1, "constantA": 0, "constantB": 1, "alpha": 1.0}
    others = ("output_N1M", "output_elempack", "output_transpose")
    if any(layer[name] != value for name, value in wanted.items()) or any(layer[name] for name in others):
        return "ncnn has blocks only for x * B^T with a constant B"
    return ""


@dataclass(frozen=True)
class _Kind:
    weights: tuple[str, ...]
    rows: Callable[[Layer], int]
    quantise: Callable[[Layer, Scales], None]
    obstacle: Callable[[Layer], str] = lambda layer: ""


_CONVOLUTIONS = ("Convolution", "ConvolutionDepthWise")
_KINDS: Mapping[str, _Kind] = {
    "Convolution": _Kind(("weight_data",), lambda layer: layer["num_output"], _convolution),
    "ConvolutionDepthWise": _Kind(("weight_data",), lambda layer: layer["num_output"], _convolution, _no_group),
    "InnerProduct": _Kind(("weight_data",), lambda layer: layer["num_output"], _innerproduct),
    "Gemm": _Kind(("B_data",), lambda layer: layer["constantN"], _gemm, _plain_gemm),
}
