"""A graph before and after the passes: a real conversion of a small block, one row for each layer."""

from collections.abc import Sequence

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.graph import Graph
from scripts.pictures.svg import Box, arrow, picture, text
from testing.models import serialized

# An inverted residual with the arithmetic that exporters write out: a Swish and a hard sigmoid in pieces.
_MODEL = (
    "(float[1, 8, 16, 16] x) => (float[1, 8, 16, 16] y)"
    "<float[8] a = {1, 2, 1, 2, 1, 2, 1, 2}, float[8] b = {0, 1, 0, 1, 0, 1, 0, 1}, float three = {3}, float six = {6},"
    " float zero = {0}, float[8, 8, 1, 1] w = {"
    f"{', '.join(str((7 * i % 11 - 5) / 8) for i in range(64))}}}>"
    "{ c = Conv(x, w) n = BatchNormalization(c, a, b, b, a) s = Sigmoid(n) m = Mul(n, s)"
    " g = GlobalAveragePool(m) e = Conv(g, w) p = Add(e, three) l = Clip(p, zero, six) h = Div(l, six)"
    " k = Mul(m, h) z = Conv(k, w) y = Add(x, z) }"
)
_STEP = 32


def draw() -> dict[str, str]:
    """Return the picture by its file's name."""
    model = serialized(_MODEL)
    before, after = (_rows(lower(model, optimize=optimize).graph) for optimize in (False, True))
    height = 44 + _STEP * max(len(before), len(after)) + 8
    shapes: list[object] = []
    for x, title, rows, fill in ((12, "before", before, "box"), (212, "after", after, "blue")):
        shapes.append(text(x, 24, f"{title}: {len(rows)} layers", weight=600))
        for place, (name, others) in enumerate(rows):
            y = 38 + _STEP * place
            shapes.append(Box(x, y, 148, 24, (name,), fill))
            if place:
                shapes.append(arrow((x + 74, y - 8), (x + 74, y - 1)))
            for other in others:  # an input that is not the layer above
                start = 38 + _STEP * other + 12
                bend = x + 156 + 7 * (place - other) % 24
                shapes.append(arrow((x + 148, start), (bend, start), (bend, y + 12), (x + 150, y + 12)))
    return {"passes.svg": picture("A net before and after the passes, layer by layer.", 400, height, *shapes)}


def _rows(graph: Graph) -> Sequence[tuple[str, Sequence[int]]]:
    """Return the layers: their types, and the places of inputs that are not the layer above."""
    layers = [layer for layer in graph if layer.type not in ("MemoryData", "Split")]
    places = {id(layer): place for place, layer in enumerate(layers)}
    rows = []
    for place, layer in enumerate(layers):
        made = [places.get(id(blob.producer)) for blob in layer.inputs]
        name = f"{layer.type} {BinaryOp(layer['op_type']).name.lower()}" if layer.type == "BinaryOp" else layer.type
        rows.append((name, [other for other in made if other is not None and other != place - 1]))
    return rows
