"""The tables that inputs are indexes into."""

from onnx2ncnn_opt.ir.graph import Blob, Graph
from onnx2ncnn_opt.ir.spec import Trait


def tables(graph: Graph) -> dict[Blob, int]:
    """Return the number of entries of the smallest table that each input is an index into, perhaps moved."""
    found: dict[Blob, int] = {}
    for layer in graph:
        if layer.type == "Embed" and not layer.is_custom:
            blob = layer.inputs[0]
            while blob.producer is not None and not blob.is_input and blob.producer.has(Trait.MOVES):
                blob = blob.producer.inputs[0]
            if blob.is_input:
                found[blob] = min(layer["input_dim"], found.get(blob, layer["input_dim"]))
    return found
