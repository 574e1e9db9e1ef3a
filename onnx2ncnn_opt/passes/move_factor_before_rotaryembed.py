from collections import defaultdict
from collections.abc import Sequence

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.view import Regroup
from onnx2ncnn_opt.passes._views import end_of, view_layers
from onnx2ncnn_opt.rewrite.rule import Edits, Replacement, attempt, graph_pass, known_shape, require

_LEAST = 3  # products, which two products with the tables replace


@graph_pass(exact=False, purpose="rows of padding in language models")
def move_factor_before_rotaryembed(graph: Graph) -> Edits:
    """RotaryEmbed(x, cos, sin) * rows   ⇒   RotaryEmbed(x, cos * rows, sin * rows)

    For one factor for each row, shared by several rotations with the same tables.
    """
    products = defaultdict[tuple[Blob, ...], list[Layer]](list)
    for layer in graph.layers:
        if layer.computes(BinaryOp.MUL, scalar=False):
            for rotated, rows in (layer.inputs, layer.inputs[::-1]):
                rotary = rotated.producer
                if rotary and rotary.type == "RotaryEmbed" and rotated.is_read_only_by([layer]):
                    products[(rows, *rotary.inputs[1:])].append(layer)
    for blobs, layers in products.items():
        if len(layers) >= _LEAST:
            yield from attempt(layers[0], _moved, layers, *blobs)


def _moved(products: Sequence[Layer], rows: Blob, *tables: Blob) -> Replacement:
    rotaries = [layer.inputs[layer.inputs[0] is rows].producer for layer in products]
    length = known_shape(rows)[1] if len(known_shape(rows)) == 3 else 0
    require(rows.shape == (1, length, 1), f"'{rows.name}' does not have one number for each row")
    require(all(known_shape(table)[:-1] == (length,) for table in tables), f"'{rows.name}' has other rows than a table")
    require(not any(layer["featmask"] for layer in products), "the product has a feature mask")
    first = products[0]
    made = view_layers(rows, (Regroup((length, 1)),), like=[first])
    column = end_of(rows, made)
    for table in tables:
        blob, inputs = Blob(f"{table.name}_rows", table.shape, table.batch), (table, column)
        made.append(Layer("BinaryOp", blob.name, inputs, [blob], {"op_type": BinaryOp.MUL}, origin=first.traced))
    ends = [layer.output for layer in made[-2:]]
    pairs = [(layer, rotary) for layer, rotary in zip(products, rotaries, strict=True) if rotary is not None]
    takes = {layer: rotary.having(inputs=[rotary.inputs[0], *ends]) for layer, rotary in pairs}
    removed = [layer for pair in pairs for layer in pair]
    return Replacement(tuple(removed), takes=takes, added=[(layer, first) for layer in made])
