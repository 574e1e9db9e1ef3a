from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.passes._views import (
    VIEWS,
    Steps,
    chain_above,
    chain_below,
    cost,
    end_of,
    private,
    shortest,
    step_of,
    steps_of,
    view_layers,
)
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import Replacement, layer_pass, require

_LAST = op(VIEWS, where=lambda view: step_of(view) is None or not chain_below(view.output))


@layer_pass(_LAST, exact=True, purpose="attention of every exporter, and nets of other converters")
def fold_views(layer: Layer) -> Replacement | None:
    """x ── Reshape, Permute, Squeeze, ExpandDims, Flatten, ... ──   ⇒   x ── the fewest layers that do the same ──

    That may be none, a Reshape, a Permute between Reshapes, or a ShuffleChannel, PixelShuffle or Reorg.
    """
    chain = chain_above(layer.output)
    shorter = _shorter(chain)
    if shorter is not None:
        chain, steps = shorter
        source, end = chain[0].input, chain[-1]
        layers = view_layers(source, steps, like=private(chain))
        reads = {end.output: end_of(source, layers)}
        return Replacement(chain, added=[(layer, end) for layer in layers], reads=reads, may_stay=True)
    if (above := layer.inputs[0].made_by(*VIEWS)) is not None:
        for view in (above, layer):
            require(not view["featmask"], f"{view.type} '{view.name}' has a feature mask")
            require(step_of(view) is not None, f"the effect of {view.type} '{view.name}' on sizes is unknown")
    return None


def _shorter(chain: tuple[Layer, ...]) -> tuple[tuple[Layer, ...], Steps] | None:
    """Return the part at the end of a chain with the largest gain, and its shortest steps; used layers stay."""
    best = None
    for start in reversed(range(len(chain))):
        steps = shortest(chain[start].input.known_shape, steps_of(chain[start:]))
        if steps is None:
            continue
        (count, moves), (old_count, old_moves) = cost(steps), cost(steps_of(private(chain[start:])))
        gain = old_count - count, old_moves - moves
        if gain > (0, 0) and (best is None or gain > best[0]):
            best = gain, chain[start:], steps
    return best[1:] if best else None
