"""The cost of a net: its parameters, and the multiply-adds of a run."""

import re
from collections.abc import Callable, Mapping

from onnx2ncnn_opt.ir.attention import operand_count
from onnx2ncnn_opt.ir.dim import Dim, Shape, product, sum_of
from onnx2ncnn_opt.ir.graph import Graph, Layer


def parameters(graph: Graph) -> int:
    """Return the number of elements of all weights, by the layers' parameters; undeclared custom layers have none."""
    return sum(
        max(0, weight.count(layer))
        for layer in graph
        if layer.spec is not None
        for weight in layer.spec.weights
        if weight.present(layer)
    )


def multiplications(graph: Graph) -> int | None:
    """Count the multiply-adds of a run, in convolutions, matrix products, attention and recurrent layers.

    None if the count depends on a size that is dynamic or unknown.
    """
    costs = [multiplications_of(layer) for layer in graph]
    total = sum_of(cost for cost in costs if cost is not None)
    return total if isinstance(total, int) and None not in costs else None


def multiplications_of(layer: Layer) -> Dim | None:
    """Return the `multiplications` of one layer; None if the shape of a blob is unknown."""
    kind = re.sub("(DepthWise)?([123]D)?$", "", layer.type)
    if kind not in _KINDS:
        return 0
    if any(blob.shape is None for blob in (*layer.inputs, *layer.outputs)):
        return None
    ins, outs = ([blob.known_shape for blob in blobs] for blobs in (layer.inputs, layer.outputs))
    batch = max((blob.batch for blob in layer.outputs), key=lambda count: isinstance(count, int) and count, default=1)
    return _KINDS[kind](layer, ins, outs) * batch


def _convolution(layer: Layer, ins: list[Shape], outs: list[Shape]) -> Dim:
    """Return the elements of the weight (perhaps the second input) times the positions where it is applied."""
    weight: Dim = product(ins[1]) if layer.params.get("dynamic_weight") else layer["weight_data_size"]
    return weight * product((ins if layer.type.startswith("Deconvolution") else outs)[0][1:])


def _inner_product(layer: Layer, ins: list[Shape], outs: list[Shape]) -> Dim:
    rows = product(outs[0][:-1]) if len(ins[0]) == 2 else 1
    return rows * int(layer["weight_data_size"])


def _gemm(layer: Layer, ins: list[Shape], outs: list[Shape]) -> Dim:
    is_constant = layer["constantK"] and (layer["constantA"] or layer["constantB"])
    return product(outs[0]) * (layer["constantK"] if is_constant else ins[0][0 if layer["transA"] else -1])


def _attention(layer: Layer, ins: list[Shape], outs: list[Shape]) -> Dim:
    query, key, value = ins[:3]
    return product(query) * key[-2] + product(query[:-1]) * key[-2] * value[-1]


def _multi_head(layer: Layer, ins: list[Shape], outs: list[Shape]) -> Dim:
    width, tokens = int(layer["embed_dim"]), ins[0][0]
    keys = ins[1][0] if operand_count(layer) > 1 else tokens
    per_token = int(layer["weight_data_size"]) + width * outs[0][-1]
    per_key = width * (int(layer["kdim"]) + int(layer["vdim"]))
    return tokens * per_token + keys * per_key + tokens * keys * 2 * width


def _recurrent(layer: Layer, ins: list[Shape], outs: list[Shape]) -> Dim:
    assert layer.spec is not None
    weights = [w for w in layer.spec.weights if w.name in ("weight_xc_data", "weight_hc_data", "weight_hr_data")]
    return ins[0][0] * sum(weight.count(layer) for weight in weights if weight.present(layer))


_KINDS: Mapping[str, Callable[[Layer, list[Shape], list[Shape]], Dim]] = {
    "Convolution": _convolution,
    "DeformableConv": _convolution,
    "Deconvolution": _convolution,
    "InnerProduct": _inner_product,
    "Gemm": _gemm,
    "MatMul": lambda layer, ins, outs: product(outs[0]) * ins[0][-1],
    "SDPA": _attention,
    "MultiHeadAttention": _multi_head,
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
}
