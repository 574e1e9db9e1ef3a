from collections.abc import Mapping

from onnx2ncnn_opt.ir.dim import product
from onnx2ncnn_opt.ir.graph import Graph, Layer
from onnx2ncnn_opt.ir.kernels import cost
from onnx2ncnn_opt.passes._trace import Sizes, find_region, trace
from onnx2ncnn_opt.passes._views import end_of, view_layers
from onnx2ncnn_opt.rewrite.rule import Edits, Replacement, attempt, graph_pass, known_shape


@graph_pass(exact=True, purpose="patch merging of Swin transformers")
def replace_concat_with_views(graph: Graph) -> Edits:
    """x ── Crops, Poolings with a stride ── Concat ──   ⇒   x ── Reshape ── Permute ── Reshape ──

    If the Concat joins all elements of x, each once. Views may be between the layers.
    """
    order = {layer: i for i, layer in enumerate(graph)}
    for root in reversed(graph.layers):
        if root.graph is graph and root.type == "Concat":
            yield from attempt(root, _replaced, root, order)


def _replaced(root: Layer, order: Mapping[Layer, int]) -> Replacement | None:
    region = find_region(root, order)
    if region is None or product(known_shape(region.source)) != product(known_shape(root.output)):
        return None
    sizes = Sizes(region.blobs)
    term, *others = trace(region.source, root.output, region.layers, sizes)
    steps = None if others or (term.factors != 1).any() else sizes.views(region.source, term.elements)
    if steps is None:
        return None
    made = view_layers(region.source, steps, like=[root])
    if cost(made) >= cost(region.layers):
        return None
    reads = {root.output: end_of(region.source, made)}
    return Replacement(region.layers, added=[(layer, root) for layer in made], reads=reads)
