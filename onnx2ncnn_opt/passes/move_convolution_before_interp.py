"""`move_convolution_before_interp`: 1x1 convolutions of the small image instead of the enlarged one.

An Interp computes means of pixels with the same weights in every channel. A 1x1 convolution has the same weights in
every pixel. So they commute. A Concat of channels between them becomes a sum after them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, Eltwise
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.kernels import cost
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.passes._chain import Chain
from onnx2ncnn_opt.passes._constants import stored
from onnx2ncnn_opt.passes._gemm import matrix_of
from onnx2ncnn_opt.passes.move_convolution_after_pooling import POINTWISE, RESIZE
from onnx2ncnn_opt.passes.replace_convolution_with_innerproduct import of_vector
from onnx2ncnn_opt.rewrite.rule import Edits, Replacement, attempt, fixed_size, graph_pass, known_shape, require

# The gain must outweigh the additional layers, up to four for each convolution. The small images in YOLO's necks have a
# ratio of 0.7, which does not make the nets faster.
_MOST_OF_COST = 0.6


@graph_pass(exact=False, purpose="heads of segmentation (SegFormer, LR-ASPP, HRNet), which enlarge maps and mix them")
def move_convolution_before_interp(graph: Graph) -> Edits:
    """x ── Interp ── Convolution 1x1 ──   ⇒   x ── Convolution 1x1 ── Interp ──

    Also if a Concat joins the enlarged image with others. Then each gets a convolution with its part of the weights,
    and the net adds the results.
    """
    for layer in graph.layers:
        if layer.graph is graph and (layer.type == "Concat" or RESIZE.fits(layer)):
            convs = layer.output.users
            if convs and all(map(POINTWISE.fits, convs)) and (RESIZE.fits(layer) or any(map(_source, layer.inputs))):
                yield from attempt(convs[0], _moved, layer, convs)


def _source(blob: Blob) -> Layer | None:
    """Return the Interp that computes a blob for a single consumer; None for other blobs."""
    layer = blob.producer
    return layer if layer is not None and RESIZE.fits(layer) and blob.uses == 1 and not blob.is_output else None


def _moved(source: Layer, convs: Sequence[Layer]) -> Replacement:
    """Return the edit that replaces an Interp, or a Concat of some, and all convolutions that read it."""
    parts = source.inputs if source.type == "Concat" else source.outputs
    known_shape(source.output, 3)
    require(source.type == "Interp" or source["axis"] % 3 == 0, f"'{source.name}' does not join channels")
    interps = [interp for blob in parts if (interp := source if source.type == "Interp" else _source(blob))]
    replaced = dict.fromkeys([*interps, source, *convs])
    first = Chain(convs[0])
    plain = [blob for blob in parts if blob not in [interp.output for interp in interps]]
    rest = first.add("Concat", "rest", *plain) if len(plain) > 1 else plain[0] if plain else None
    chains = [_mixed(Chain(conv), parts, interps, rest) for conv in convs]
    made = [layer for chain in (first, *chains) for layer in chain.made]
    gains = cost(made) < _MOST_OF_COST * cost(replaced)
    require(gains, f"'{source.name}' is too small, or enlarges too little, to gain by it")
    takes = {chain.layer: chain.result()[-1] for chain in chains}
    added = [(layer, source) for layer in made if layer not in takes.values()]
    return Replacement(tuple(replaced), takes=takes, added=added)


def _mixed(chain: Chain, parts: Sequence[Blob], interps: Sequence[Layer], rest: Blob | None) -> Chain:
    """Return the layers for one convolution of all `parts`: some come from `interps`, `rest` are the others."""
    conv = chain.layer
    weight, bias = matrix_of(conv)
    ends = np.cumsum([fixed_size(blob, 0) for blob in parts])
    require(ends[-1] == weight.shape[1], f"'{conv.name}' has weights for {weight.shape[1]} channels, not {ends[-1]}")
    columns = dict(zip(parts, np.split(weight, ends[:-1], axis=1), strict=True))
    require(len(columns) == len(parts), "a part occurs twice")
    enlarged = {interp.output: interp for interp in interps}
    results = []
    if rest is not None:
        weight = np.hstack([columns[blob] for blob in parts if blob not in enlarged])
        results.append(_convolution(chain, "rest", rest, weight, bias))
    for k, (blob, interp) in enumerate(enlarged.items()):
        suffix = f"part{k}" if len(parts) > 1 else "small"
        small = _convolution(chain, suffix, interp.input, columns[blob], bias if not results else np.zeros_like(bias))
        results.append(chain.put(interp.having(inputs=[small]), f"{suffix}_enlarged"))
    if len(results) > 2:
        results = [chain.add("Eltwise", "sum", *results, op_type=Eltwise.SUM)]
    elif len(results) == 2:
        results = [chain.add("BinaryOp", "sum", *results, op_type=BinaryOp.ADD)]
    chain.activate(results[0])
    return chain


def _convolution(chain: Chain, suffix: str, x: Blob, weight: Array, bias: Array) -> Blob:
    params: dict[str, Any] = {"num_output": len(weight), "kernel_w": 1, "weight_data_size": weight.size}
    weights = {"weight_data": stored(chain.layer, "weight_data", weight).reshape(-1)}
    if bias.any():
        params["bias_term"], weights["bias_data"] = 1, stored(chain.layer, "bias_data", bias)
    new = Layer("Convolution", "", [x], (), params, weights)
    return chain.put(of_vector(new, x).without_defaults() if len(known_shape(x)) == 1 else new, suffix)
