"""Centring of one-sided inputs of int8 layers: one more bit of precision in the same time.

A ReLU's output x is in 0..2c, so int8 uses only one sign. c - x is in -c..c and uses both. The producer absorbs the
change into its weights, bias and activation; consumers, also float ones, into weights and bias. ncnn pads the integers
with 127, which stands for x = 0. (x - c would need negative padding, which ncnn on x86 writes to only one of eight
channels.) This padding has no shader. So a feature mask keeps these layers, and layers that exchange int8 blobs with
them, on the CPU.
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
    """Centre the inputs of int8 layers where all consumers allow it; skip padding layers if `padded` is False."""
    for layer in graph:
        for blob in layer.outputs:
            if _is_one_sided(blob) and all(_takes_centred(consumer, padded) for consumer in blob.users):
                _centre(layer, list(blob.users))
    groups = [[layer, *layer.output.users] for layer in graph if "top_blob_int8_scales" in layer.weights]
    while mixed := [group for group in groups if len({layer["featmask"] & Feature.NO_VULKAN for layer in group}) > 1]:
        for layer in (layer for group in mixed for layer in group):
            layer.params["featmask"] = layer["featmask"] | Feature.NO_VULKAN


def is_centred(layer: Layer) -> bool:
    """Return True if `centre` has changed the input of an int8 layer."""
    producer = layer.inputs[0].producer
    if producer is None or producer.type not in _LINEAR or producer["activation_type"] != Activation.CLIP:
        return False
    (low, high), scale = producer["activation_params"], float(layer.weights["bottom_blob_int8_scales"][0])
    return bool(low < 0 and np.isclose(high * scale, LEVELS))


def _is_one_sided(blob: Blob) -> bool:
    """Return True if the blob's producer can be negated and clips at 0, and int8 consumers agree on the scale."""
    producer = blob.producer
    if producer is None or not _can_be_negated(producer) or blob.is_output:
        return False
    kind, limits = producer["activation_type"], producer["activation_params"]
    if kind != Activation.RELU and not (kind == Activation.CLIP and limits[0] == 0):
        return False
    return len({float(user.weights["bottom_blob_int8_scales"][0]) for user in blob.users if _is_int8(user)}) == 1


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


def _centre(producer: Layer, consumers: list[Layer]) -> None:
    middle = LEVELS / 2 / next(float(c.weights["bottom_blob_int8_scales"][0]) for c in consumers if _is_int8(c))
    high = producer["activation_params"][1] if producer["activation_type"] == Activation.CLIP else math.inf
    _negate(producer, middle - _bias(producer))
    limits = (max(-middle, middle - high), middle)
    producer.params |= {"activation_type": int(Activation.CLIP), "activation_params": limits}
    if "top_blob_int8_scales" in producer.weights:
        producer.weights["top_blob_int8_scales"] = producer.weights["top_blob_int8_scales"] * np.float32(2)
    for layer in consumers:
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
