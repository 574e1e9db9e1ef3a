import numpy as np

from onnx2ncnn_opt.ir.dim import is_fixed
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.view import Regroup, Reorder
from onnx2ncnn_opt.passes._constants import stored
from onnx2ncnn_opt.passes._gemm import with_c
from onnx2ncnn_opt.passes._trace import Sizes
from onnx2ncnn_opt.passes._views import chain_below, end_of, view_layers
from onnx2ncnn_opt.passes.fuse_multiheadattention import Chain, selected
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import Replacement, fixed_size, layer_pass, require

_GEMM = op("Gemm", where=lambda gemm: len(gemm.inputs) == 1)


@layer_pass(_GEMM, exact=False, purpose="queries, keys and values that MultiHeadAttention does not compute")
def fuse_parallel_gemms(gemm: Layer) -> Replacement | None:
    """x ── Gemms, Slices, and views to heads ──   ⇒   x ── Gemm ── views to heads ── Slice ──

    For several Gemms of one blob, and for parts of a Gemm that have different numbers of heads.
    """
    chains = [chain for user in dict.fromkeys(gemm.input.users) if _GEMM.fits(user) for chain in _branches(user)]
    ends = [chain.end for chain in chains]
    removed = tuple(dict.fromkeys(each for chain in chains for each in (chain.source.known_producer, *chain.layers)))
    if len(chains) < 2 or removed[0] is not gemm or len(removed) <= 4:
        return None
    (length, size), *others = (end.known_shape[1:] for end in ends)
    fits = is_fixed((size,)) and all(other == (length, size) for other in others)
    require(fits, f"the heads from '{gemm.input.name}' differ in size")
    heads = [fixed_size(end, 0) for end in ends]
    sizes = Sizes(blob for chain in chains for blob in chain.blobs)
    weights, biases = zip(*(selected(chain, sizes) for chain in chains), strict=True)
    weight = stored(gemm, "B_data", np.concatenate(weights))
    columns = gemm.having(transB=1, alpha=None, constantN=len(weight), output_transpose=None)
    new = with_c(columns, np.concatenate(biases), B_data=weight.reshape(-1))
    new.outputs = (Blob(f"{gemm.output.name}_heads", (length, len(weight)), gemm.output.batch),)
    views = view_layers(new.output, (Regroup((length, sum(heads), size)), Reorder((1, 0, 2))), like=[gemm])
    parts = [Blob(end.name, end.shape, end.batch) for end in ends]
    cut = Layer("Slice", f"{gemm.name}_heads", [end_of(new.output, views)], parts, {"slices": tuple(heads)})
    reads = dict(zip(ends, parts, strict=True))
    return Replacement(removed, added=[(layer, gemm) for layer in (new, *views, cut)], reads=reads)


def _branches(gemm: Layer) -> list[Chain]:
    """Return the chains from a Gemm's result to heads, one for each part of a Slice; empty if a part has no heads."""
    views = chain_below(gemm.output)
    whole = end_of(gemm.output, views)
    cut = next((user for user in whole.users if user.type == "Slice" and whole.uses == 1), None)
    parts, above = (cut.outputs, (*views, cut)) if cut is not None else ((gemm.output,), ())
    ends = [(part, chain_below(part)) for part in parts]
    chains = [Chain(gemm.output, end_of(part, below), (*above, *below), None) for part, below in ends]
    return chains if all(chain.layers and len(chain.end.shape or ()) == 3 for chain in chains) else []
