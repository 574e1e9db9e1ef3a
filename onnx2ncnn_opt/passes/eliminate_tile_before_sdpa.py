from itertools import dropwhile
from math import prod

import numpy as np

from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._trace import Sizes, moved
from onnx2ncnn_opt.passes._views import Steps, chain_above, end_of, view_layers
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


def _chain(blob: Blob) -> tuple[Layer, ...]:
    """Return the Tiles and views above a blob, from the first Tile on."""
    return tuple(dropwhile(lambda layer: layer.type != "Tile", chain_above(blob, "Tile")))


def _repeat(chain: tuple[Layer, ...]) -> tuple[int, Steps] | None:
    """Return the number of repeats of each head in a chain, and its views without repeats; None for other chains."""
    if not chain:
        return None
    sizes = Sizes([chain[0].input, *(layer.output for layer in chain)])
    source, (heads, *rest) = sizes.shape(chain[0].input), sizes.shape(chain[-1].output)
    groups, left = divmod(prod(source), prod(rest))
    if left or heads % max(groups, 1):
        return None
    elements = np.arange(prod(source), dtype=np.int32).reshape(source)
    for layer in chain:
        elements = moved(layer, layer.output, elements, sizes)
    times = heads // groups
    if not np.array_equal(elements, elements[::times].repeat(times, axis=0)):
        return None
    steps = sizes.views(chain[0].input, elements[::times])
    return None if steps is None else (times, steps)
