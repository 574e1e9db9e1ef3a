"""Small graphs from .param lines."""

from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.shapes import infer_graph
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.param.binary import write_weights
from onnx2ncnn_opt.param.connect import ParsedNet
from onnx2ncnn_opt.param.text import parse_param
from testing.handmade import write_net
from testing.pass_cases import fill_weights


def parsed(*lines: str) -> ParsedNet:
    """Return the net of .param lines, read as a file of them."""
    tops = sum(int(line.split()[3]) for line in lines)
    return parse_param("\n".join(["7767517", f"{len(lines)} {tops}", *lines]))


def bare(*lines: str) -> Graph:
    """Return the graph of .param lines, without shapes."""
    return parsed(*lines).graph


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


def write_filled(folder: Path, *lines: str, given: str = "") -> tuple[Path, Path]:
    """Write these .param lines as they are, and a .bin of random weights, or the given ones (see `fill_weights`)."""
    graph, weights = parsed(*lines).graph, BytesIO()
    fill_weights(graph, given)
    write_weights(graph, weights)
    return write_net(folder, *lines, weights=weights.getvalue())


def one_layer(type: str, params: Mapping[str | int, Any], weights: Mapping[str, Array] | None = None) -> Graph:
    """Return a net of an Input ``x`` and a layer ``l`` with the output ``y``."""
    graph = Graph()
    graph.add(Layer("Input", "in", (), [Blob("x")]))
    graph.add(Layer(type, "l", graph.inputs, [Blob("y")], dict(params), weights))
    return graph
