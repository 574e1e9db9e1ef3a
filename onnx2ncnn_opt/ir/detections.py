"""Layers that select boxes: the number and order of boxes depend on the data, even on the last bits of scores."""

from collections.abc import Collection, Iterator
from itertools import permutations
from math import isclose
from typing import Any

from onnx2ncnn_opt.ir.codes import BinaryOp, Reduction
from onnx2ncnn_opt.ir.cut import computed_from
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer

DETECTORS = frozenset({"DetectionOutput", "Proposal", "YoloDetectionOutput", "Yolov3DetectionOutput"})
_COUNTING = frozenset({"BinaryOp", "DeepCopy", "Dropout", "Reduction", "Reshape", "Scale", "Threshold"})
# A DetectionOutput sorts if its scores end in numbers that pass the threshold, and if no box removes another.
LOWEST = -2e38
ALL = 2**31 - 1
BY_RANK = -0.5  # the least score if scores are ranks
# The scores say how many classes there are, and the prior boxes are taken as they are.
OF_BOXES: dict[str, Any] = {"num_class": -233, **dict.fromkeys((f"variances{i}" for i in range(4)), 0.0)}
SORT = {**OF_BOXES, "nms_threshold": 1.5, "confidence_threshold": -3e38}
SORT["keep_top_k"] = ALL  # that nms_top_k leaves of each row


def _before_sort(layer: Layer) -> Layer | None:
    """Return the Padding of the numbers that a DetectionOutput sorts; None for layers that select boxes."""
    padding = layer.inputs[1].producer if layer.type == "DetectionOutput" else None
    if padding is not None and padding.type == "Slice" and padding["axis"] == 0:
        padding = padding.input.producer
    if padding is None or padding.type != "Padding" or padding["type"] or padding["right"] < layer["nms_top_k"]:
        return None
    pairs = [(padding["value"], LOWEST), *((layer[name], number) for name, number in SORT.items())]
    return padding if all(isclose(*pair, rel_tol=1e-6) for pair in pairs) else None


def is_sort(layer: Layer) -> bool:
    """Return whether a layer is a DetectionOutput that sorts numbers, nms_top_k of each row of scores but the first."""
    return _before_sort(layer) is not None


def sorts(graph: Graph) -> list[Layer]:
    """Return the layers that sort numbers."""
    return [layer for layer in graph if is_sort(layer)]


def counting(sort: Layer) -> list[Layer]:
    """Return the layers that count larger numbers for a sort, last first; none if it sorts other numbers."""
    steps = [padding] if (padding := _before_sort(sort)) is not None else []
    while steps:
        step, after = steps[-1].inputs[0].producer, steps[-1].type
        if step is None or step.type not in _COUNTING or (step.type == "Threshold") != (after == "Reduction"):
            return []
        steps.append(step)
        if step.type == "BinaryOp" and any(each.type == "Threshold" for each in steps):
            return steps[1:]
    return []


def selection(output: Blob) -> Layer | None:
    """Return the DetectionOutput whose boxes are an output, with columns in ONNX's order; None for other outputs."""
    gemm = output.made_by("Gemm")
    layer = gemm.inputs[0].made_by("DetectionOutput") if gemm is not None else None
    return layer if layer is not None and len(decisive(layer)) == 2 else None


def decisive(layer: Layer) -> tuple[Blob, ...]:
    """Return the blobs that decide which boxes a layer selects; of our own layers, the scores before their padding."""
    if (sorting := _before_sort(layer)) is not None:
        steps = counting(layer)
        return steps[-1].inputs if steps else sorting.inputs
    padding = layer.inputs[1].made_by("Padding") if layer.type == "DetectionOutput" else None
    if padding is None or layer["num_class"] != OF_BOXES["num_class"] or padding["top"] != 1:
        return layer.inputs
    product = padding.input.producer  # of the scores with 1 or 0 for the best class
    is_marked = product and product.computes(BinaryOp.MUL) and product.inputs[-1].producer
    return (layer.inputs[0], *(product.inputs[:1] if product and is_marked else padding.inputs))


def sorted_indices(layer: Layer) -> Blob | None:
    """Return the boxes of a sort, each of which begins at its index, for a Crop of its column of indices; else None."""
    if layer.type != "Crop" or (layer["starts"], layer["ends"]) != ((2,), (3,)):
        return None
    joined = layer.inputs[0].made_by("Concat")  # of rows that are sorted one by one
    sort = (joined or layer).inputs[0].producer
    return sort.inputs[0] if sort is not None and is_sort(sort) else None


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
        step = layer.input.made_by("BinaryOp") if layer.type == "Threshold" else None
        for blob, extreme in permutations(step.inputs, 2) if step is not None else ():
            source = extreme.made_by("Reduction")
            if source is not None and blob in source.inputs and source["operation"] in (Reduction.MAX, Reduction.MIN):
                yield blob
