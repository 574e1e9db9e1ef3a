"""Quantise a float net as ncnn2table (kl) and ncnn2int8 of ncnn 20260722 do, for comparison.

    python -m scripts.quantization.ncnn2int8 IN.param IN.bin DATA.npz -o PREFIX

DATA.npz has a key for each input, and samples along its first axis; the net gets one sample at a time, its batch axis
dropped. `quantised` does the same for Python. Written anew; the behaviour of the two tools, 6-bit weights of 3x3
convolutions included, is theirs. Weights that they would store in fp16 stay in 32 bits here.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from onnx2ncnn_opt.ir.graph import Graph, Layer
from onnx2ncnn_opt.ir.int8 import LEVELS, in_int8, may_use_winograd, rows_of
from onnx2ncnn_opt.param.files import read_net, write_net
from onnx2ncnn_opt.runtime.base import Array, Feed, Fetch, all_there
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner

_STATIC = ("Convolution", "ConvolutionDepthWise", "InnerProduct")
_BINS, _TARGET, _EPSILON, _LEVELS_OF_3X3 = 2048, 128, 1e-4, 31


def quantised(param: Path, bin: Path, data: Mapping[str, Array]) -> Graph:
    """Return an int8 net of a float net, calibrated on samples."""
    graph = read_net(param, bin).graph
    layers = [layer for layer in graph if layer.type in _STATIC]
    scales = _input_scales(param, bin, data, list(dict.fromkeys(layer.inputs[0].name for layer in layers)))
    for layer in layers:
        _become(layer, in_int8(layer, _weight_scales(layer), scales[layer.inputs[0].name]))
        layer.params.pop("featmask", None)
    for layer in graph:
        if layer.type == "SDPA":
            layer.params["int8_scale_term"] = 2
        if layer.type == "Gemm" and layer["constantB"]:
            if not layer["transB"]:
                columns = layer.weights["B_data"].reshape(layer["constantK"], layer["constantN"])
                layer.weights["B_data"] = np.ascontiguousarray(columns.T)
                layer.params["transB"] = 1
            rows = rows_of(layer)
            scale = LEVELS / (np.abs(rows).max() or LEVELS)
            _become(layer, in_int8(layer, np.full(len(rows), scale, np.float32)))
    for layer in layers:
        users = layer.outputs[0].users
        if layer.type == "InnerProduct" or not users or layer.outputs[0].is_output:
            continue
        if all(user.type in _STATIC[:2] for user in users):
            layer.params["int8_scale_term"] += 100
            layer.weights["top_blob_int8_scales"] = users[0].weights["bottom_blob_int8_scales"]
    return graph


def _become(layer: Layer, other: Layer) -> None:
    layer.params, layer.weights = other.params, other.weights


def _weight_scales(layer: Layer) -> Array:
    """Return a scale for each row; a group of several rows shares one. A row of zeros has infinity in ncnn2table."""
    rows = rows_of(layer)
    largest = np.abs(rows).max(1)
    if layer.type == "ConvolutionDepthWise":
        largest = np.repeat(largest.reshape(layer["group"], -1).max(1), len(rows) // layer["group"])
    levels = _LEVELS_OF_3X3 if may_use_winograd(layer) else LEVELS
    return np.where(largest > 0, levels / np.where(largest > 0, largest, 1), 1).astype(np.float32)


def _input_scales(param: Path, bin: Path, data: Mapping[str, Array], blobs: list[str]) -> dict[str, float]:
    """Return the scale of each blob, from its histogram over all samples."""
    runner = NcnnRunner(param, bin, threads=1)
    count = len(next(iter(data.values())))

    def runs() -> list[dict[str, Array]]:
        feeds = ({name: Feed(array[i]) for name, array in data.items()} for i in range(count))
        return [all_there(runner.extract(feed, [Fetch(blob) for blob in blobs]), param) for feed in feeds]

    sizes = [{blob: np.abs(array) for blob, array in run.items()} for run in runs()]
    scales = {}
    for blob in blobs:
        largest = max(float(run[blob].max()) for run in sizes)
        histogram = np.zeros(_BINS)
        for run in sizes:
            numbers = run[blob][run[blob] > 0]
            bins = np.minimum((numbers / largest * _BINS).astype(int), _BINS - 1)
            histogram += np.bincount(bins, minlength=_BINS)
        scales[blob] = LEVELS / ((_threshold(histogram / histogram.sum()) + 0.5) * largest / _BINS)
    return scales


def _threshold(shares: Array) -> int:
    """Return the number of bins whose distribution in 128 levels differs least from the clipped one."""
    best, least = _TARGET, np.inf
    edges = np.concatenate([[0], np.cumsum(shares)])
    for threshold in range(_TARGET, _BINS):
        clipped = shares[:threshold].copy()
        clipped[-1] += shares[threshold:].sum()
        clipped += _EPSILON
        ends = np.arange(_TARGET + 1) * (threshold / _TARGET)
        sums = np.diff(np.interp(ends, np.arange(_BINS + 1), edges))
        levels = np.concatenate([[0], np.cumsum(sums / (threshold / _TARGET))]) * (threshold / _TARGET)
        expanded = np.diff(np.interp(np.arange(threshold + 1), ends, levels)) + _EPSILON
        divergence = float((clipped * np.log(clipped / expanded)).sum())
        if divergence < least:
            best, least = threshold, divergence
    return best


def main() -> None:
    """Quantise a net."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("param", type=Path)
    parser.add_argument("bin", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("-o", dest="prefix", required=True)
    arguments = parser.parse_args()
    graph = quantised(arguments.param, arguments.bin, np.load(arguments.data))
    write_net(graph, f"{arguments.prefix}.param", f"{arguments.prefix}.bin")


if __name__ == "__main__":
    main()
