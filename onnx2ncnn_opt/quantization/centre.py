"""Inputs of int8 layers that are on one side of 0, moved to its middle: one bit more for the same time.

A blob x of 0..2c, as a ReLU makes it, becomes c - x, of which int8 uses both signs. The layer before it takes that
into its weights, bias and activation, readers into weights and bias, float ones as well. ncnn pads the integers: with
127, which is 0 of x. (Not x - c: ncnn's padding on x86 gives only one of eight channels a negative number.) Such
padding has no shader, so a feature mask keeps these layers on the CPU, with those that they share blobs of int8 with.
"""

import math
from dataclasses import replace

import numpy as np

from onnx2ncnn_opt.ir.codes import Activation
from onnx2ncnn_opt.ir.features import Feature
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.int8 import LARGEST_SUM, LEVELS, largest_sum, may_use_winograd, rows_of
from onnx2ncnn_opt.ir.weight import Array, Encoding

_LINEAR = ("Convolution", "ConvolutionDepthWise", "InnerProduct")
_SIGNED = (Encoding.FP32, Encoding.FP32_FLAGGED, Encoding.FP16, Encoding.INT8)
_PADS = ("pad_left", "pad_right", "pad_top", "pad_bottom")


def centre(graph: Graph, *, padded: bool = True) -> None:
    """Centre the inputs of int8 layers where all readers allow it; without `padded` none of them pads."""
    for layer in graph:
        for blob in layer.outputs:
            if _is_one_sided(blob) and all(_takes_centred(reader, padded) for reader in blob.users):
                _centre(layer, list(blob.users))
    joined = [[layer, *layer.output.users] for layer in graph if "top_blob_int8_scales" in layer.weights]
    off_gpu = [each for each in joined if 0 < sum(map(_is_off_gpu, each)) < len(each)]
    while off_gpu:
        for layer in (layer for each in off_gpu for layer in each):
            layer.params["featmask"] = layer["featmask"] | Feature.NO_VULKAN
        off_gpu = [each for each in joined if 0 < sum(map(_is_off_gpu, each)) < len(each)]


def is_centred(layer: Layer) -> bool:
    """Return True if the input of an int8 layer was moved to the middle of its range."""
    before = layer.inputs[0].producer
    if before is None or before.type not in _LINEAR or before["activation_type"] != Activation.CLIP:
        return False
    (low, high), scale = before["activation_params"], float(layer.weights["bottom_blob_int8_scales"][0])
    return bool(low < 0 and np.isclose(high * scale, LEVELS))


def _is_off_gpu(layer: Layer) -> bool:
    return bool(layer["featmask"] & Feature.NO_VULKAN)


def _is_one_sided(blob: Blob) -> bool:
    """Return True if a layer that can be negated makes a blob, and cuts off what is below 0."""
    layer = blob.producer
    if layer is None or not _can_be_negated(layer) or blob.is_output:
        return False
    kind, limits = layer["activation_type"], layer["activation_params"]
    if kind != Activation.RELU and not (kind == Activation.CLIP and limits[0] == 0):
        return False
    return len({float(each.weights["bottom_blob_int8_scales"][0]) for each in blob.users if _is_int8(each)}) == 1


def _can_be_negated(layer: Layer) -> bool:
    is_linear = layer.type in _LINEAR and "weight_data" in layer.weights
    return is_linear and layer.weights.stored("weight_data").encoding in _SIGNED


def _is_int8(layer: Layer) -> bool:
    return layer.type in _LINEAR and "bottom_blob_int8_scales" in layer.weights


def _pads(layer: Layer) -> bool:
    return layer.type != "InnerProduct" and any(layer[name] for name in _PADS)


def _takes_centred(layer: Layer, padded: bool) -> bool:
    if not _can_be_negated(layer) or (_pads(layer) and layer["pad_value"] != 0):
        return False
    if not _is_int8(layer):
        return True
    if _pads(layer) and not padded:
        return False
    is_safe = not may_use_winograd(layer) or bool(layer["featmask"] & Feature.NO_WINOGRAD)
    return is_safe or largest_sum(rows_of(layer)) <= LARGEST_SUM


def _centre(before: Layer, readers: list[Layer]) -> None:
    middle = LEVELS / 2 / next(float(each.weights["bottom_blob_int8_scales"][0]) for each in readers if _is_int8(each))
    high = before["activation_params"][1] if before["activation_type"] == Activation.CLIP else math.inf
    _negate(before, middle - _bias(before))
    limits = (max(-middle, middle - high), middle)
    before.params |= {"activation_type": int(Activation.CLIP), "activation_params": limits}
    if "top_blob_int8_scales" in before.weights:
        before.weights["top_blob_int8_scales"] = before.weights["top_blob_int8_scales"] * np.float32(2)
    for layer in readers:
        sums = rows_of(layer).sum(axis=1, dtype=np.float64)
        if _is_int8(layer):
            scales = layer.weights["weight_data_int8_scales"].astype(np.float64)
            sums /= np.repeat(scales, layer["num_output"] // scales.size)
            layer.weights["bottom_blob_int8_scales"] = layer.weights["bottom_blob_int8_scales"] * np.float32(2)
        _negate(layer, _bias(layer) + middle * sums)
        if _pads(layer) and _is_int8(layer):
            layer.params |= {"pad_value": float(LEVELS), "featmask": layer["featmask"] | Feature.NO_VULKAN}
        elif _pads(layer):
            layer.params["pad_value"] = middle


def _bias(layer: Layer) -> Array:
    return layer.weights["bias_data"] if layer["bias_term"] else np.zeros(layer["num_output"], np.float32)


def _negate(layer: Layer, bias: Array) -> None:
    stored = layer.weights.stored("weight_data")
    layer.weights["weight_data"] = replace(stored, data=-stored.data)
    layer.weights["bias_data"], layer.params["bias_term"] = bias.astype(np.float32), 1
