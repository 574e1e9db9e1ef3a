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
from onnx2ncnn_opt.ir.int8 import LARGEST_SUM, LEVELS, WITH_SCALE, largest_sum, may_use_winograd
from onnx2ncnn_opt.ir.weight import Array, Encoding

_SIGNED = (Encoding.FP32, Encoding.FP32_FLAGGED, Encoding.FP16, Encoding.INT8)
_PADS = ("pad_left", "pad_right", "pad_top", "pad_bottom")
_SCALE, _NEXT_SCALE = "bottom_blob_int8_scales", "top_blob_int8_scales"


def centre(graph: Graph, *, padded: bool = True) -> None:
    """Centre the inputs of int8 layers where all consumers allow it; skip padding layers if `padded` is False."""
    for blob in [blob for layer in graph for blob in layer.outputs]:
        if _is_one_sided(blob) and all(_takes_centred(consumer, padded) for consumer in blob.users):
            _centre(blob)
    groups = [[layer, *layer.output.users] for layer in graph if _NEXT_SCALE in layer.weights]
    while mixed := [group for group in groups if len({layer["featmask"] & Feature.NO_VULKAN for layer in group}) > 1]:
        for layer in (layer for group in mixed for layer in group):
            layer.params["featmask"] = layer["featmask"] | Feature.NO_VULKAN


def _is_one_sided(blob: Blob) -> bool:
    """Return True if the blob's producer can be negated and clips at 0, and int8 consumers agree on the scale."""
    producer = blob.producer
    if producer is None or not _can_be_negated(producer) or blob.is_output:
        return False
    kind, limits = producer["activation_type"], producer["activation_params"]
    is_cut = kind == Activation.RELU or (kind == Activation.CLIP and limits[0] == 0)
    return is_cut and len(_scales(blob)) == 1


def _scales(blob: Blob) -> set[float]:
    """Return the scales by which int8 layers quantise a blob."""
    return {float(layer.weights[_SCALE][0]) for layer in blob.users if _SCALE in layer.weights}


def _can_be_negated(layer: Layer) -> bool:
    is_linear = layer.type in WITH_SCALE and "weight_data" in layer.weights
    return is_linear and layer.weights.stored("weight_data").encoding in _SIGNED


def _pads(layer: Layer) -> bool:
    return layer.type != "InnerProduct" and any(layer[name] for name in _PADS)


def _takes_centred(layer: Layer, padded: bool) -> bool:
    if not _can_be_negated(layer) or (_pads(layer) and layer["pad_value"] != 0):
        return False
    if _SCALE not in layer.weights:
        return True
    may_overflow = may_use_winograd(layer) and not layer["featmask"] & Feature.NO_WINOGRAD
    return (padded or not _pads(layer)) and not (may_overflow and largest_sum(_rows(layer)) > LARGEST_SUM)


def _centre(blob: Blob) -> None:
    producer, middle = blob.producer, LEVELS / 2 / min(_scales(blob))
    assert producer is not None
    high = producer["activation_params"][1] if producer["activation_type"] == Activation.CLIP else math.inf
    _negate(producer, middle - _bias(producer))
    limits = (max(-middle, middle - high), middle)
    producer.params |= {"activation_type": int(Activation.CLIP), "activation_params": limits}
    if _NEXT_SCALE in producer.weights:
        producer.weights[_NEXT_SCALE] = producer.weights[_NEXT_SCALE] * np.float32(2)
    for layer in list(blob.users):
        is_int8, sums = _SCALE in layer.weights, _rows(layer).sum(axis=1, dtype=np.float64)
        if is_int8:
            scales = layer.weights["weight_data_int8_scales"].astype(np.float64)
            sums /= np.repeat(scales, layer["num_output"] // scales.size)
            layer.weights[_SCALE] = layer.weights[_SCALE] * np.float32(2)
        _negate(layer, _bias(layer) + middle * sums)
        if _pads(layer):
            layer.params["pad_value"] = float(LEVELS) if is_int8 else middle
            layer.params |= {"featmask": layer["featmask"] | Feature.NO_VULKAN} if is_int8 else {}


def _rows(layer: Layer) -> Array:
    return layer.weights["weight_data"].reshape(layer["num_output"], -1)


def _bias(layer: Layer) -> Array:
    return layer.weights["bias_data"] if layer["bias_term"] else np.zeros(layer["num_output"], np.float32)


def _negate(layer: Layer, bias: Array) -> None:
    stored = layer.weights.stored("weight_data")
    layer.weights["weight_data"] = replace(stored, data=-stored.data)
    layer.weights["bias_data"], layer.params["bias_term"] = bias.astype(np.float32), 1
