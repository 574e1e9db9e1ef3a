from collections.abc import Iterator
from typing import cast

from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.passes._crops import cropped
from onnx2ncnn_opt.rewrite.rule import Miss, Replacement, attempt, graph_pass, require


@graph_pass(exact=True, purpose="recurrent layers with one used step, the last")
def replace_slice_with_crop(graph: Graph) -> Iterator[Replacement | Miss]:
    """x ── Slice ── a, b, c (only b is read)   ⇒   x ── Crop ── b

    A Slice copies all of its parts, and ncnn treats parts that no layer reads as outputs.
    """
    for layer in graph.layers:
        if layer.type == "Slice" and sum(blob.uses > 0 for blob in layer.outputs) == 1 and len(layer.outputs) > 1:
            yield from attempt(layer, _replace, layer)


def _replace(layer: Layer) -> Replacement:
    """Return the edit to a Crop of the only used part."""
    (part,) = (blob for blob in layer.outputs if blob.uses)
    before = layer.outputs[: layer.outputs.index(part)]
    shapes = [blob.shape for blob in (*before, part)]
    require(None not in shapes, f"the sizes of the parts of '{layer.input.name}' are unknown")
    axis = layer["axis"] % len(shapes[0] or ())
    *others, size = (shape[axis] for shape in shapes if shape is not None)
    fixed = all(isinstance(n, int) for n in (*others, size))
    require(fixed, f"the sizes of the parts of '{layer.input.name}' are known only at run time")
    start = sum(cast(list[int], others))
    crop = cropped(layer, layer.input, {axis: (start, start + cast(int, size))})
    crop.outputs = (Blob(part.name, part.shape, part.batch),)
    return Replacement((layer,), added=[(crop, layer)], reads={part: crop.output})
