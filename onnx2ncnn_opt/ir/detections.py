"""Layers that select boxes: the number and order of boxes depend on the data, even on the last bits of scores."""

from collections.abc import Iterator
from itertools import permutations

from onnx2ncnn_opt.ir.codes import Reduction
from onnx2ncnn_opt.ir.cut import computed_from
from onnx2ncnn_opt.ir.graph import Blob, Graph

DETECTORS = frozenset({"DetectionOutput", "Proposal", "YoloDetectionOutput", "Yolov3DetectionOutput"})


def after_boxes(graph: Graph) -> set[Blob]:
    """Return the blobs that depend on selected boxes."""
    return computed_from(graph, (blob for layer in graph if layer.type in DETECTORS for blob in layer.outputs))


def before_boxes(graph: Graph) -> list[Blob]:
    """Return the computed blobs from which boxes are selected, in the order of the graph."""
    after = after_boxes(graph)
    read = {blob for layer in graph if layer.type in DETECTORS for blob in layer.inputs if blob not in after}
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
