"""Inputs that are indices into tables."""

from onnx2ncnn_opt.ir.graph import Blob, Graph
from onnx2ncnn_opt.ir.spec import Trait


def tables(graph: Graph) -> dict[Blob, int]:
    """Return the inputs that Embed layers use as indices, directly or moved, with the size of the smallest table."""
    sizes: dict[Blob, int] = {}
    for layer in graph:
        if layer.type == "Embed" and not layer.is_custom:
            blob = layer.inputs[0]
            while blob.producer is not None and not blob.is_input and blob.producer.has(Trait.MOVES):
                blob = blob.producer.inputs[0]
            if blob.is_input:
                sizes[blob] = min(layer["input_dim"], sizes.get(blob, layer["input_dim"]))
    return sizes
