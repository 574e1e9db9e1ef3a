"""Nets with int8 layers, as ncnn's ncnn2int8 makes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from onnx2ncnn_opt.ir.weight import Encoding, Weight
from onnx2ncnn_opt.param.files import read_net, write_net
from onnx2ncnn_opt.runtime.base import Array, Failure, Feed
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner
from onnx2ncnn_opt.verification.layers import extract_all


def quantise(param: Path, bin: Path, feeds: Mapping[str, Feed]) -> None:
    """Give the convolutions and InnerProducts of a net int8 weights, and scales for these inputs."""
    graph = read_net(param, bin).graph
    with NcnnRunner(param, bin) as runner:
        found: dict[str, Array | Failure] = extract_all(runner, graph, feeds)
    blobs = found | {name: feed.array for name, feed in feeds.items()}
    for layer in graph:
        if layer.type in ("Convolution", "InnerProduct"):
            before = blobs[layer.inputs[0].name]
            assert isinstance(before, np.ndarray)
            rows = layer.weights["weight_data"].reshape(layer["num_output"], -1)
            scales = (127 / np.abs(rows).max(axis=1)).astype(np.float32)
            layer.params["int8_scale_term"] = 2
            integers = np.round(rows * scales[:, None]).astype(np.int8).reshape(-1)
            layer.weights["weight_data"] = Weight(integers, Encoding.INT8)
            layer.weights["weight_data_int8_scales"] = scales
            layer.weights["bottom_blob_int8_scales"] = np.array([127 / np.abs(before).max()], np.float32)
    write_net(graph, param, bin)
