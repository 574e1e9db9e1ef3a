"""Layers with their inputs and parameters, and the shapes or the refusal that come of them: fixtures/ncnn/shapes.tsv.

Sizes are numbers or symbols (``2*h``), an unknown shape is ``?``. A row of several types is a case of each of them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx2ncnn_opt.errors import ShapeError
from onnx2ncnn_opt.ir.dim import Dim, Shape, product, symbol
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.layers import LAYERS
from onnx2ncnn_opt.ir.shapes import infer_shapes
from testing.pass_cases import fill_weights

FILE = Path(__file__).parents[1] / "fixtures" / "ncnn" / "shapes.tsv"


@dataclass(frozen=True)
class Case:
    """A layer of one type, and what is expected: the sizes of its outputs, or ``refused: <reason>``."""

    line: str
    type: str
    inputs: str
    tops: int
    parameters: str
    expected: str

    def __str__(self) -> str:
        return f"{self.type} {self.inputs} {self.parameters}"

    @property
    def runs(self) -> bool:
        """True if ncnn can run the layer: all sizes are numbers."""
        return self.type != "Input" and re.fullmatch(r"[\d, ]*", self.inputs + self.expected) is not None

    def layer(self, symbols: Mapping[int, Dim] | None = None, batches: Sequence[Dim] = ()) -> Layer:
        """Return the layer, with symbols in the place of some sizes, and batches of its inputs."""
        shapes = [_shape(text, symbols or {}) for text in self.inputs.split()]
        return make_layer(self.type, _params(self.type, self.parameters), shapes, self.tops, batches)


def make_layer(
    type: str,
    params: Mapping[str | int, Any],
    shapes: Sequence[Shape | None],
    tops: int = 1,
    batches: Sequence[Dim] = (),
) -> Layer:
    """Return a layer on blobs of these shapes and batches."""
    counts = batches or [1] * len(shapes)
    inputs = [Blob(f"in{i}", shape, n) for i, (shape, n) in enumerate(zip(shapes, counts, strict=True))]
    return Layer(type, "culprit", inputs, [Blob(f"out{i}") for i in range(tops)], dict(params))


def net_of(layer: Layer) -> Graph:
    """Return the layer as a net of its own, with random weights."""
    graph = Graph()
    for blob in layer.inputs:
        graph.add(Layer("Input", blob.name, (), [blob]))
    graph.add(layer)
    graph.outputs = layer.outputs
    fill_weights(graph)
    return graph


def found(layer: Layer) -> str:
    """Return what inference says of a layer, as the table says it."""
    try:
        shapes = [shape for shape, _ in infer_shapes(layer)]
    except ShapeError as error:
        blobs = ", ".join(f"'{b.name}' ({', '.join(map(str, b.shape or ()))})" for b in layer.inputs)
        start = f"{layer.type} 'culprit'{' on ' + blobs if blobs else ''}: "
        return f"refused: {str(error).removeprefix(start)}"
    return " ".join("?" if shape is None else ",".join(map(str, shape)).replace(" ", "") for shape in shapes)


def load_cases() -> list[Case]:
    """Return all cases."""
    rows = [(line, line.split("\t")) for line in FILE.read_text(encoding="utf-8").splitlines()[1:]]
    return [
        Case(line, type, inputs, int(tops), parameters, expected)
        for line, (types, inputs, tops, parameters, expected) in rows
        for type in types.split()
    ]


def _shape(text: str, symbols: Mapping[int, Dim]) -> Shape | None:
    return None if text == "?" else tuple(_size(size, symbols) for size in text.split(","))


def _size(text: str, symbols: Mapping[int, Dim]) -> Dim:
    if text.isdigit():
        return symbols.get(int(text), int(text))
    return product(int(factor) if factor.isdigit() else symbol(factor) for factor in text.split("*"))


def _params(type: str, text: str) -> dict[str | int, Any]:
    params = dict(token.split("=", 1) for token in text.split())
    return {name: _value(LAYERS[type].by_name[name].kind, value) for name, value in params.items()}


def _value(kind: str, text: str) -> Any:
    if kind == "string":
        return text
    if "->" in text or text.isalpha():  # an equation
        return tuple(map(ord, text))
    number = float if "float" in kind else int
    return tuple(map(number, text.split(","))) if kind.endswith("[]") else number(text)
