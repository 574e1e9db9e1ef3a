from math import prod

import numpy as np

from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.shapes import assign_shapes
from onnx2ncnn_opt.ir.view import Regroup
from onnx2ncnn_opt.passes._trace import Sizes, moved
from onnx2ncnn_opt.passes._views import chain_above, end_of, view_layers
from onnx2ncnn_opt.rewrite.edit import require_private
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import Replacement, known_shape, layer_pass, require


@layer_pass(op("Concat", axis=frozenset({1, -1})), exact=True, purpose="rotary tables of several axes (Flux)")
def move_tile_after_concat(concat: Layer) -> Replacement | None:
    """x, y ── repeat each column ── Concat ──   ⇒   x, y ── Concat ── repeat each column ──

    For matrices whose columns are repeated by a Tile between Reshapes.
    """
    chains = [chain_above(blob, "Tile") for blob in concat.inputs]
    have_tile = all([layer.type for layer in chain].count("Tile") == 1 for chain in chains)
    if len(chains) < 2 or not have_tile or len(known_shape(concat.output)) != 2:
        return None
    sources = [chain[0].input for chain in chains]
    layers = tuple(dict.fromkeys((*(layer for chain in chains for layer in chain), concat)))
    require_private(layers, [concat.output])
    sizes = Sizes(blob for layer in layers for blob in (*layer.inputs, layer.output))
    counts = set()
    for source, chain in zip(sources, chains, strict=True):
        shape = sizes.shape(source)
        values = whole = np.arange(prod(shape)).reshape(shape)
        for layer in chain:
            values = moved(layer, layer.output, values, sizes)
        counts.add(values.shape[-1] // shape[-1])
        same = len(shape) == 2 and np.array_equal(values, whole.repeat(max(counts), 1))
        require(same and len(counts) == 1, "the columns are not repeated alike")
    joined = Blob(f"{concat.output.name}_once", None, concat.output.batch)
    made = [concat.having(inputs=sources, outputs=[joined])]
    assign_shapes(made[0])
    made += view_layers(joined, (Regroup((*known_shape(joined), 1)),), like=[concat])
    tiled = Blob(f"{concat.output.name}_tile", None, concat.output.batch)
    made.append(Layer("Tile", concat.name, [made[-1].output], [tiled], {"repeats": (1, 1, counts.pop())}))
    assign_shapes(made[-1])
    made += view_layers(tiled, (Regroup(known_shape(concat.output)),), like=[concat])
    return Replacement(layers, added=[(layer, concat) for layer in made], reads={concat.output: end_of(tiled, made)})
