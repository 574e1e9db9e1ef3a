from __future__ import annotations

from collections.abc import Iterator

from onnx2ncnn_opt.ir.dim import Shape
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.view import Regroup, Reorder, Step
from onnx2ncnn_opt.passes._views import (
    Steps,
    chain_above,
    cost,
    end_of,
    shape_after,
    shortest,
    step_of,
    steps_of,
    view_layers,
)
from onnx2ncnn_opt.rewrite.rule import Miss, Replacement, attempt, graph_pass, require


@graph_pass(exact=True, purpose="heads of queries, keys and values that are one Gemm")
def move_views_before_slice(graph: Graph) -> Iterator[Replacement | Miss]:
    """x ── Slice ── the same views after every part ──   ⇒   x ── views ── Slice ──

    For equal parts: the number of the part becomes the outermost axis, and the views happen once for all of them,
    together with those before the Slice. So the pairs of ShuffleNetV2 become ShuffleChannel and Slice.
    """
    for layer in graph.layers:
        if layer.graph is graph and layer.type == "Slice":
            yield from attempt(layer, _move, layer)


def _chain_below(layer: Layer, at: int) -> tuple[Layer, ...]:
    """The views after an output, as long as nothing else reads what they make."""
    chain: list[Layer] = []
    blob = layer.outputs[at]
    while blob.uses == 1 and blob.users and step_of(blob.users[0]) is not None:
        chain.append(blob.users[0])
        blob = chain[-1].output
    return tuple(chain)


def _chain_above(blob: Blob) -> tuple[Layer, ...]:
    """The views above the Slice that nothing else reads."""
    chain = chain_above(blob)
    shared = [at for at, layer in enumerate(chain) if layer.output.uses != 1]
    return chain[shared[-1] + 1 :] if shared else chain


def _move(layer: Layer) -> Replacement | None:
    x, parts = layer.input, len(layer.outputs)
    chains = [_chain_below(layer, at) for at in range(parts)]
    if parts < 2 or not any(chains):
        return None
    require(all(chains), "a part is needed as it is")
    part = layer.outputs[0].shape
    assert part is not None
    require(all(blob.shape == part for blob in layer.outputs), "the parts have different sizes")
    ways = {shortest(part, steps_of(chain)) for chain in chains}
    (way, *different) = ways
    require(not different, "the parts take different views")
    if not way:
        return None
    axis = layer["axis"] % len(x.known_shape)
    steps = _with_parts(parts, axis, part, way)
    result = shape_after(part, way)
    above = _chain_above(x)
    source = above[0].input if above else x
    short = shortest(source.known_shape, (*steps_of(above), *steps)) if steps else None
    old = [cost(steps_of(chain)) for chain in (above, *chains)]
    fewer = short is not None and cost(short) < (sum(count for count, _ in old), sum(moves for _, moves in old))
    require(fewer, "all parts at once need as many views")
    assert short is not None
    views = view_layers(source, short, like=above or chains[0])
    sizes = (result[0],) * parts if isinstance(result[0], int) else (-233,) * parts
    new = layer.having(inputs=[end_of(source, views)], axis=0, slices=sizes, indices=None)
    new.outputs = tuple(Blob(blob.name, result, blob.batch) for blob in layer.outputs)
    reads = {chain[-1].output: blob for chain, blob in zip(chains, new.outputs, strict=True)}
    removed = (*above, layer, *(view for chain in chains for view in chain))
    return Replacement(removed, added=[(made, layer) for made in (*views, new)], reads=reads)


def _with_parts(parts: int, axis: int, part: Shape, way: Steps) -> Steps:
    """The steps for all parts at once: their number is an axis that comes first, and joins the next one at the end."""
    rank = len(part)
    steps: list[Step] = [
        Regroup((*part[:axis], parts, *part[axis:])),
        Reorder((axis, *(i for i in range(rank + 1) if i != axis))),
    ]
    for step in way:
        if isinstance(step, Reorder):
            steps.append(Reorder((0, *(p + 1 for p in step.perm))))
        elif isinstance(step, Regroup):
            steps.append(Regroup((parts, *step.dims)))
        else:
            return ()
    first, *rest = shape_after(part, way)
    return (*steps, Regroup((first * parts, *rest)))
