from math import prod

import numpy as np

from onnx2ncnn_opt.ir.dim import is_fixed, known, product
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.view import Regroup
from onnx2ncnn_opt.passes._views import Steps, end_of, moved, shortest, step_of, steps_to, view_layers
from onnx2ncnn_opt.passes.fuse_sdpa import SDPA
from onnx2ncnn_opt.rewrite.rule import Replacement, layer_pass


@layer_pass(SDPA, exact=True, purpose="language models whose heads share keys and values")
def eliminate_tile_before_sdpa(sdpa: Layer) -> Replacement | None:
    """q, k ── Tile, v ── Tile ── SDPA ──   ⇒   q, k, v ── SDPA ──

    If each head of keys and values is repeated for several heads of queries: SDPA repeats them itself.
    """
    q, keys, values, *rest = sdpa.inputs
    chains = [_chain(keys), _chain(values)]
    repeats = [repeat for chain in chains if (repeat := _repeat(chain)) is not None]
    if len(repeats) != 2 or repeats[0][0] != repeats[1][0]:
        return None
    added: list[tuple[Layer, Layer | None]] = []
    blobs: list[Blob] = []
    for chain, (_, steps) in zip(chains, repeats, strict=True):
        layers = view_layers(chain[0].input, steps, like=[chain[-1]])
        added += ((layer, sdpa) for layer in layers)
        blobs.append(end_of(chain[0].input, layers))
    new = sdpa.having(inputs=[q, *blobs, *rest])
    layers = list(dict.fromkeys((*chains[0], *chains[1], sdpa)))
    return Replacement(tuple(layers), takes={sdpa: new}, added=added, may_stay=True)


def _of_any_length(tile: Layer, *views: Layer) -> tuple[int, Steps] | None:
    """Return the `_repeat` of heads (G, 1, ...) to (G, n, ...) and (G * n, ...), for any length; None for others."""
    source, repeated = tile.input.shape, tile.output.shape
    if source is not None and repeated is not None and not views and source[0] == 1 and source[1:] == repeated[1:]:
        return (repeated[0], ()) if isinstance(repeated[0], int) and len(source) == 3 else None
    if source is None or repeated is None or not views or len(source) != len(repeated) or len(source) < 3:
        return None
    heads, times = repeated[:2]
    if source[0] != heads or source[1] != 1 or source[2:] != repeated[2:] or not isinstance(times, int):
        return None
    for view in views:
        shape, step = view.output.shape, step_of(view)
        if not isinstance(step, Regroup) or shape is None or product(shape) != product(repeated):
            return None
    if views[-1].output.shape != (heads * times, *source[2:]):
        return None
    return times, (Regroup((heads, *source[2:])),)


def _chain(blob: Blob) -> tuple[Layer, ...]:
    """Return the Tiles and views above a blob, from the first Tile on."""
    chain: list[Layer] = []
    layer = blob.producer
    while layer is not None and (layer.type == "Tile" or step_of(layer) is not None):
        chain.insert(0, layer)
        layer = layer.input.producer
    while chain and chain[0].type != "Tile":
        chain.pop(0)
    return tuple(chain)


def _repeat(chain: tuple[Layer, ...]) -> tuple[int, Steps] | None:
    """Return the number of repeats of each head in a chain, and its views without repeats; None for other chains."""
    blobs = [layer.output for layer in chain]
    if chain and (repeat := _of_any_length(*chain)) is not None:
        return repeat
    if not chain or not all(is_fixed(blob.shape) for blob in (chain[0].input, *blobs)):
        return None
    source, (heads, *sizes) = known(chain[0].input.known_shape), known(blobs[-1].known_shape)
    size = prod(sizes)
    groups, rest = divmod(prod(source), size)
    if rest or heads % max(groups, 1):
        return None
    elements = np.arange(prod(source), dtype=np.int32).reshape(source)
    for layer in chain:
        elements = moved(layer, layer.output, elements)
    times = heads // groups
    if not np.array_equal(elements, elements[::times].repeat(times, axis=0)):
        return None
    steps = steps_to(elements[::times], source)
    short = shortest(source, steps) if steps is not None else None
    return None if short is None else (times, short)
