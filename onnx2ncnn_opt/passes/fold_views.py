from __future__ import annotations

from collections.abc import Iterator

from onnx2ncnn_opt.ir.graph import Graph, Layer
from onnx2ncnn_opt.passes._views import (
    VIEWS,
    Steps,
    chain_above,
    cost,
    end_of,
    shortest,
    step_of,
    steps_of,
    view_layers,
)
from onnx2ncnn_opt.rewrite.rule import Miss, Replacement, attempt, graph_pass, require


@graph_pass(exact=True, purpose="attention of every exporter, and nets of other converters")
def fold_views(graph: Graph) -> Iterator[Replacement | Miss]:
    """x ── Reshape, Permute, Squeeze, ExpandDims, Flatten, ... ──   ⇒   x ── the fewest layers that do the same ──

    That may be none, a Reshape, a Permute between Reshapes, or a ShuffleChannel, PixelShuffle or Reorg.
    """
    for layer in graph.layers:
        if layer.graph is not graph or layer.type not in VIEWS:
            continue
        if step_of(layer) is None or not _goes_on(layer):
            yield from attempt(layer, _fold, layer)


def _fold(layer: Layer) -> Replacement | None:
    chain = chain_above(layer.output)
    found = _better(chain)
    if found is not None:
        return _replaced(chain, *found)
    above = layer.inputs[0].producer
    if above is not None and above.type in VIEWS:
        for view in (above, layer):
            require(not view["featmask"], f"{view.type} '{view.name}' has a feature mask")
            require(step_of(view) is not None, f"what {view.type} '{view.name}' does to its sizes is not known")
    return None


def _goes_on(layer: Layer) -> bool:
    """Return True if one more view is the only reader of a layer's output."""
    users = layer.output.users
    return layer.output.uses == 1 and len(users) == 1 and step_of(users[0]) is not None


def _better(chain: tuple[Layer, ...]) -> tuple[int, Steps] | None:
    """From where on a chain has a shorter form, and the form; the layers that others need count on both sides."""
    best = None
    for start in reversed(range(len(chain))):
        steps = shortest(chain[start].input.known_shape, steps_of(chain[start:]))
        if steps is None:
            continue
        (count, moves), (old_count, old_moves) = cost(steps), cost(steps_of(_private(chain, start)))
        gain = old_count - count, old_moves - moves
        if gain > (0, 0) and (best is None or gain > best[0]):
            best = gain, start, steps
    return best[1:] if best else None


def _private(chain: tuple[Layer, ...], start: int) -> tuple[Layer, ...]:
    """Return the layers of a chain, from `start` on, that are needed for its end alone."""
    first = len(chain) - 1
    while first > start and chain[first - 1].output.uses == 1:
        first -= 1
    return chain[first:]


def _replaced(chain: tuple[Layer, ...], start: int, steps: Steps) -> Replacement:
    source, end = chain[start].input, chain[-1]
    layers = view_layers(source, steps, like=_private(chain, start))
    reads = {end.output: end_of(source, layers)}
    return Replacement(chain[start:], added=[(layer, end) for layer in layers], reads=reads, may_stay=True)
