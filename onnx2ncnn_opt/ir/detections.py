"""Layers that select boxes: the number and order of boxes depend on the data, even on the last bits of scores."""

from collections.abc import Collection, Iterator
from itertools import permutations
from math import isclose
from typing import Any

from onnx2ncnn_opt.ir.codes import Reduction
from onnx2ncnn_opt.ir.cut import computed_from
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.weight import Array

DETECTORS = frozenset({"DetectionOutput", "Proposal", "YoloDetectionOutput", "Yolov3DetectionOutput"})
# A DetectionOutput sorts if its scores end in numbers that pass the threshold, and if no box removes another.
LOWEST = -2e38
SORT: dict[str, Any] = dict.fromkeys((f"variances{i}" for i in range(4)), 0.0)
SORT |= {"num_class": -233, "nms_threshold": 1.5, "confidence_threshold": -3e38}  # -233: the scores say how many


def sorted_rows(layer: Layer) -> int | None:
    """Return the number of rows of a DetectionOutput that sorts numbers; None for layers that select boxes."""
    padding = layer.inputs[1].producer if layer.type == "DetectionOutput" else None
    if padding is None or padding.type != "Padding" or padding["type"] or not layer["keep_top_k"] <= padding["right"]:
        return None
    pairs = [(padding["value"], LOWEST), *((layer[name], number) for name, number in SORT.items())]
    is_sort = layer["nms_top_k"] == layer["keep_top_k"] and all(isclose(*pair, rel_tol=1e-6) for pair in pairs)
    return int(layer["keep_top_k"]) if is_sort else None


def sorts(graph: Graph) -> list[Layer]:
    """Return the layers that sort numbers."""
    return [layer for layer in graph if sorted_rows(layer) is not None]


def decisive(layer: Layer) -> tuple[Blob, ...]:
    """Return the blobs that decide which boxes a layer selects; of a sort the numbers before their padding."""
    padding = layer.inputs[1].producer if sorted_rows(layer) is not None else None
    return layer.inputs if padding is None else padding.inputs


def sorted_indices(layer: Layer) -> Array | None:
    """Return the indices that a sort gives to numbers, for a Crop of its column of indices; else None."""
    sort = layer.inputs[0].producer if layer.type == "Crop" else None
    if sort is None or sorted_rows(sort) is None or (layer["starts"], layer["ends"]) != ((2,), (3,)):
        return None
    boxes = sort.inputs[0].producer
    return boxes.weights["data"].reshape(-1, 4)[:, 0] if boxes is not None and "data" in boxes.weights else None


def after_boxes(graph: Graph, *, but: Collection[Layer] = ()) -> set[Blob]:
    """Return the blobs that depend on boxes which layers select, except those in `but`."""
    detectors = (layer for layer in graph if layer.type in DETECTORS and layer not in but)
    return computed_from(graph, (blob for layer in detectors for blob in layer.outputs))


def before_boxes(graph: Graph, *, but: Collection[Layer] = ()) -> list[Blob]:
    """Return the computed blobs from which boxes are selected and not `after_boxes`, in the order of the graph."""
    after = after_boxes(graph, but=but)
    read = {blob for layer in graph if layer.type in DETECTORS for blob in decisive(layer) if blob not in after}
    return [blob for layer in graph if layer.type != "Input" for blob in layer.outputs if blob in read]


def before_indexes(graph: Graph) -> Iterator[Blob]:
    """Yield the blobs x that the net compares with max(x) or min(x), as ArgMax does."""
    for layer in graph:
        step = layer.input.producer if layer.type == "Threshold" else None
        for blob, extreme in permutations(step.inputs, 2) if step is not None and step.type == "BinaryOp" else ():
            source = extreme.producer
            if source is None or source.type != "Reduction" or blob not in source.inputs:
                continue
            if source["operation"] in (Reduction.MAX, Reduction.MIN):
                yield blob
