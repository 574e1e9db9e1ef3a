import numpy as np

from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._trace import Sizes, trace
from onnx2ncnn_opt.passes._views import chain_above, chain_below, cost, end_of, private, steps_of, view_layers
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import Replacement, known_shape, layer_pass, needed, require


@layer_pass(op("Slice"), exact=True, purpose="heads of queries, keys and values from one Gemm")
def move_views_before_slice(layer: Layer) -> Replacement | None:
    """x ── Slice ── views after every part ──   ⇒   x ── views ── Slice ──

    One chain of views replaces those of all parts, and those before the Slice. The pass traces the elements of the
    parts, and joins them along the axis in which they differ, or else the outermost one. So the pairs of ShuffleNetV2
    become ShuffleChannel and Slice.
    """
    x, parts = layer.input, len(layer.outputs)
    chains = [*map(chain_below, layer.outputs)]
    if parts < 2 or not any(chains):
        return None
    require(all(chains), "a part is needed as it is")
    above = private(chain_above(x)) if x.uses == 1 else ()
    source = above[0].input if above else x
    ends = [chain[-1].output for chain in chains]
    shapes = [known_shape(end) for end in ends]
    differ = [axis for axis, sizes in enumerate(zip(*shapes, strict=False)) if len(set(sizes)) > 1]
    require(len(set(map(len, shapes))) == 1 and len(differ) <= 1, "the parts do not fit together")
    views = [view for chain in chains for view in chain]
    numbers = Sizes([source, *(blob for each in (*above, layer, *views) for blob in each.outputs)])
    pieces = [
        trace(source, end, (*above, layer, *chain), numbers)[0].elements
        for end, chain in zip(ends, chains, strict=True)
    ]
    axis = differ[0] if differ else 0
    no_fewer = "all parts at once need as many views"
    steps = needed(numbers.views(source, np.concatenate(pieces, axis)), no_fewer)
    require(cost(steps) < cost(*map(steps_of, (above, *chains))), no_fewer)
    made = view_layers(source, steps, like=above or chains[0])
    sizes = tuple(size if isinstance(size := shape[axis], int) else -233 for shape in shapes)
    blobs = [Blob(old.name, shape, old.batch) for old, shape in zip(layer.outputs, shapes, strict=True)]
    new = layer.having(inputs=[end_of(source, made)], outputs=blobs, axis=axis, slices=sizes, indices=None)
    reads = dict(zip(ends, blobs, strict=True))
    return Replacement((*above, layer, *views), added=[(each, layer) for each in (*made, new)], reads=reads)
