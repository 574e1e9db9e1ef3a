"""Small graphs for the engine's tests."""

from __future__ import annotations

from collections.abc import Iterable

from onnx2ncnn_opt.ir.graph import Blob, Graph
from onnx2ncnn_opt.ir.shapes import infer_graph
from onnx2ncnn_opt.param.text import parse_param


def net(*lines: str) -> Graph:
    """Return the graph of .param lines; every layer comes from an ONNX node of its own name."""
    tops = sum(int(line.split()[3]) for line in lines)
    graph = parse_param("\n".join(["7767517", f"{len(lines)} {tops}", *lines])).graph
    for layer in graph:
        layer.traced = (f"/{layer.name}",)
    infer_graph(graph)
    return graph


def shown(graph: Graph) -> list[str]:
    """Return the layers as ``Type name: inputs -> outputs``."""

    def names(blobs: Iterable[Blob]) -> str:
        return " ".join(blob.name for blob in blobs)

    return [f"{layer.type} {layer.name}: {names(layer.inputs)} -> {names(layer.outputs)}" for layer in graph]
