import numpy as np

from onnx2ncnn_opt.ir.dim import is_fixed
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.passes._constants import stored
from onnx2ncnn_opt.passes._gemm import linear_of, with_c
from onnx2ncnn_opt.passes._trace import Sizes
from onnx2ncnn_opt.passes._views import chain_below, end_of, view_layers
from onnx2ncnn_opt.passes.fuse_multiheadattention import Chain
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import Replacement, layer_pass, needed, require

_GEMM = op("Gemm", where=lambda gemm: len(gemm.inputs) == 1)


@layer_pass(_GEMM, exact=False, purpose="queries, keys and values that MultiHeadAttention does not compute")
def fuse_parallel_gemms(gemm: Layer) -> Replacement | None:
    """x ── Gemms, Slices, and views to heads ──   ⇒   x ── Gemm ── views to heads ── Slice ──

    The rows may be those of several windows, each with heads of its own. Parts of one Gemm need another order of its
    columns, as in GPT-NeoX, or else move_views_before_slice has the same result.
    """
    chains = [chain for user in dict.fromkeys(gemm.input.users) if _GEMM.fits(user) for chain in _branches(user)]
    ends = [chain.end for chain in chains]
    removed = tuple(dict.fromkeys(each for chain in chains for each in (chain.source.known_producer, *chain.layers)))
    if removed[:1] != (gemm,) or len(chains) < 2:
        return None
    heads, lengths, widths = zip(*(end.known_shape for end in ends), strict=True)
    fits = is_fixed(widths[:1]) and len({*zip(lengths, widths, strict=True)}) == 1
    require(fits, f"the heads from '{gemm.input.name}' differ in size")
    require(is_fixed(heads) or len({*heads}) == 1, f"the heads from '{gemm.input.name}' differ in number")
    sizes = Sizes(blob for chain in chains for blob in chain.blobs)
    rows, columns, used, weights, biases = zip(*(_traced(chain, sizes) for chain in chains), strict=True)
    if chains[0].source is chains[-1].source and (np.diff(np.concatenate(used)) == 1).all():
        return None  # move_views_before_slice does it
    source, starts = chains[0].source, np.cumsum([0, *map(len, biases)])
    whole = Blob(f"{source.name}_heads", (source.known_shape[gemm["output_transpose"]], int(starts[-1])), source.batch)
    elements = [row * starts[-1] + start + column for row, column, start in zip(rows, columns, starts, strict=False)]
    steps = needed(sizes.views(whole, np.concatenate(elements)), "all heads at once are not a view of the columns")
    if len(steps) + 2 >= len(removed):
        return None
    weight = stored(gemm, "B_data", np.concatenate(weights))
    plain = gemm.having(transB=1, alpha=None, constantN=len(weight), output_transpose=None)
    new = with_c(plain, np.concatenate(biases), B_data=weight.reshape(-1))
    new.outputs = (whole,)
    views = view_layers(whole, steps, like=[gemm])
    parts = [Blob(end.name, end.shape, end.batch) for end in ends]
    slices = tuple(count if isinstance(count, int) else -233 for count in heads)
    cut = Layer("Slice", f"{gemm.name}_heads", [end_of(whole, views)], parts, {"slices": slices})
    reads = dict(zip(ends, parts, strict=True))
    return Replacement(removed, added=[(layer, gemm) for layer in (new, *views, cut)], reads=reads)


def _traced(chain: Chain, sizes: Sizes) -> tuple[Array, Array, Array, Array, Array]:
    """Return the row and the place of the column of each element, and the columns, their weights and bias, by use."""
    gemm = chain.source.known_producer
    index = np.divmod(chain.elements(sizes), sizes.shape(chain.source)[1])
    rows, columns = index[::-1] if gemm["output_transpose"] else index
    weight, bias = linear_of(gemm.having(output_transpose=None))
    last_first = columns.reshape(-1)[::-1]
    use = np.full(len(bias), last_first.size)
    use[last_first] = np.arange(last_first.size)[::-1]  # the first use of a column is written last
    order = np.argsort(use)
    used = order[: np.count_nonzero(use < last_first.size)]
    return rows, np.argsort(order)[columns], used, weight[used], bias[used]


def _branches(gemm: Layer) -> list[Chain]:
    """Return the chains from a Gemm's result to heads, one for each part of a Slice; empty if a part has no heads."""
    views = chain_below(gemm.output)
    whole = end_of(gemm.output, views)
    cut = next((user for user in whole.users if user.type == "Slice" and whole.uses == 1), None)
    parts, above = (cut.outputs, (*views, cut)) if cut is not None else ((gemm.output,), ())
    ends = [(part, chain_below(part)) for part in parts]
    chains = [Chain(gemm.output, end_of(part, below), (*above, *below), None) for part, below in ends]
    return chains if all(chain.layers and len(chain.end.shape or ()) == 3 for chain in chains) else []
