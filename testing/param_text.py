"""Small graphs from .param lines."""

from __future__ import annotations

from collections.abc import Iterable

from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.shapes import infer_graph
from onnx2ncnn_opt.param.text import parse_param


def bare(*lines: str) -> Graph:
    """Return the graph of .param lines, without shapes."""
    tops = sum(int(line.split()[3]) for line in lines)
    return parse_param("\n".join(["7767517", f"{len(lines)} {tops}", *lines])).graph


def net(*lines: str) -> Graph:
    """Return the graph of .param lines; every layer comes from an ONNX node of its own name."""
    graph = bare(*lines)
    for each in graph:
        each.traced = (f"/{each.name}",)
    infer_graph(graph)
    return graph


def layer(graph: Graph, name: str) -> Layer:
    """Return the layer of a name."""
    (found,) = (each for each in graph if each.name == name)
    return found


def shown(graph: Graph) -> list[str]:
    """Return the layers as ``Type name: inputs -> outputs``."""

    def names(blobs: Iterable[Blob]) -> str:
        return " ".join(blob.name for blob in blobs)

    return [f"{layer.type} {layer.name}: {names(layer.inputs)} -> {names(layer.outputs)}" for layer in graph]
