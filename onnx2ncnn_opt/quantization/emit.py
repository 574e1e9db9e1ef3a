"""The int8 forms of float layers, for known scales.

ncnn quantises x to round(x * scale), from -127 to 127. It rounds half away from zero.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.features import Feature
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.int8 import (
    LARGEST_SUM,
    WITH_SCALE,
    crashes_gpus,
    in_int8,
    integers,
    is_garbage_on_x86,
    largest_sum,
    may_use_winograd,
    packed,
    row_scales,
    rows_of,
)
from onnx2ncnn_opt.ir.weight import Array, Encoding, Weight
from onnx2ncnn_opt.param.binary import is_quantised

_BLOCK = 64  # weights of a Gemm's row that share a scale
_BLOCK_TERM = 801  # quantize_term: 8 bits, blocks of 64
_SINGLE_SCALE_TERM = 2


@dataclass(frozen=True)
class Scales:
    """The scale of a layer's input, the input's mean by channel, and the scales of a convolution's rows if known.

    `whole`: store a Gemm's constant B, or attention's projections, without scales of blocks. `winograd`: allow
    winograd for a 3x3 convolution.
    """

    input: float
    means: Array | None = None
    rows: Array | None = None
    whole: bool = False
    winograd: bool = True


def obstacle(layer: Layer) -> str:
    """Return why a layer stays float; empty if it has an int8 form."""
    if layer.type not in _KINDS:
        return "ncnn has no int8 form of it"
    if any(name not in layer.weights for name in _KINDS[layer.type].weights):
        return "the net computes its weights"
    if is_quantised(layer):
        return "it is quantised already"
    if not all(weight.is_float and np.isfinite(weight.array).all() for _, weight in layer.weights.stored_items()):
        return "its weights are no finite floats"
    if layer["featmask"] & Feature.NO_INT8:
        return "its feature mask says no int8"
    return _KINDS[layer.type].obstacle(layer)


def form_of(layer: Layer) -> tuple[str, int]:
    """Return a description of an int8 layer's scales, and the bits of its weights; 0 bits if it has no weights."""
    if layer.type in WITH_SCALE:
        largest = int(np.abs(layer.weights["weight_data"].astype(np.int32)).max(initial=0))
        bits = next(bits for bits in (6, 7, 8) if largest < 2 ** (bits - 1))
        no_winograd = layer.type == "Convolution" and layer["featmask"] & Feature.NO_WINOGRAD
        return "a scale for each row" + ", no winograd" * bool(no_winograd), bits
    if layer.type == "SDPA":
        return "at run time", 0
    if layer.params.get("quantize_term") == _BLOCK_TERM:
        return "blocks of 64", 8
    return "a scale for each row" if layer.type in _RECURRENT else "one scale", 8


def forms_of(graph: Graph) -> dict[str, tuple[bool, bool]]:
    """Return `whole` and `winograd` of the `Scales` of each int8 layer, by name."""
    return {
        layer.name: (layer.get("quantize_term") == _SINGLE_SCALE_TERM, not layer["featmask"] & Feature.NO_WINOGRAD)
        for layer in graph
        if is_quantised(layer)
    }


def quantise(graph: Graph, scales: Mapping[str, Scales]) -> None:
    """Make the layers in `scales` int8; adjacent convolutions pass int8 blobs to each other."""
    chosen = [layer for layer in graph if layer.name in scales]
    for layer in chosen:
        form = int8_form(layer, scales[layer.name])
        layer.params, layer.weights = form.params, form.weights
    for layer in chosen:
        if layer.type in _CONVOLUTIONS and _takes_int8(layer.output, scales):
            layer.params["int8_scale_term"] += 100
            layer.weights["top_blob_int8_scales"] = np.array([scales[layer.output.users[0].name].input], np.float32)


def int8_form(layer: Layer, scales: Scales) -> Layer:
    """Return the int8 form of a float layer, outside any graph."""
    form = _KINDS[layer.type].quantised(layer, scales)
    if crashes_gpus(form):
        form.params["featmask"] = form["featmask"] | Feature.NO_VULKAN
    return form


def _takes_int8(blob: Blob, scales: Mapping[str, Scales]) -> bool:
    consumers = list(blob.users)
    are_int8 = bool(consumers) and all(layer.type in _CONVOLUTIONS and layer.name in scales for layer in consumers)
    return are_int8 and not blob.is_output and len({scales[layer.name].input for layer in consumers}) == 1


def _convolution(layer: Layer, scales: Scales) -> Layer:
    """Store a scale for each row, and a bias that corrects the mean error; without winograd if sums may overflow."""
    rows, outputs = rows_of(layer), layer["num_output"]
    by_row = row_scales(rows) if scales.rows is None else scales.rows.astype(np.float32)
    form = in_int8(layer, by_row, scales.input)
    numbers = form.weights["weight_data"].reshape(rows.shape)
    if may_use_winograd(layer) and (not scales.winograd or largest_sum(numbers) > LARGEST_SUM):
        form.params["featmask"] = form["featmask"] | Feature.NO_WINOGRAD
    if pad := layer.get("pad_value"):  # ncnn pads the integers, for which it has no shader
        form.params["pad_value"] = float(integers(np.array(pad), np.array(scales.input)))
        form.params["featmask"] = form["featmask"] | Feature.NO_VULKAN
    errors = rows - numbers / by_row[:, None].astype(np.float64)
    groups = len(rows) if layer.type == "ConvolutionDepthWise" else 1
    if (correction := _mean_error(errors.reshape(outputs, -1), scales.means, groups)) is not None:
        bias = layer.weights["bias_data"] if layer["bias_term"] else np.zeros(outputs, np.float32)
        form.weights["bias_data"], form.params["bias_term"] = (bias + correction).astype(np.float32), 1
    return form


def _mean_error(errors: Array, means: Array | None, groups: int) -> Array | None:
    """Return the outputs' mean error: weight errors times input means; None if the number of means does not fit."""
    channels = 0 if means is None else means.size // groups
    if means is None or means.size % groups or not channels or errors.shape[1] % channels:
        return None
    by_channel = errors.reshape(groups, errors.shape[0] // groups, channels, -1).sum(axis=3)
    return np.asarray(np.einsum("goc,gc->go", by_channel, means.reshape(groups, channels)).reshape(-1))


def _gemm(layer: Layer, scales: Scales) -> Layer:
    """Store B with scales of blocks where ncnn supports them, else with one scale; A with one scale for each row."""
    rows = rows_of(layer).astype(np.float32)
    if layer["constantA"]:
        by_row = row_scales(rows)
        numbers = integers(rows, by_row[:, None])
        a = _int8(numbers.T if layer["transA"] else numbers)
        return layer.having(weights={"A_data": a, "A_data_int8_scales": by_row}, quantize_term=_SINGLE_SCALE_TERM)
    has_blocks = not any(layer[name] for name in ("transA", "output_N1M", "output_elempack", "output_transpose"))
    if has_blocks and not scales.whole:
        return layer.having(weights=packed("B_data", *_blocks(rows)), quantize_term=_BLOCK_TERM, transB=1)
    by_row = np.repeat(row_scales(rows.reshape(1, -1)), len(rows))
    return in_int8(layer.having(weights={"B_data": rows.reshape(-1)}, transB=1), by_row)


def _blocks(rows: Array) -> tuple[Array, Array]:
    """Return rows as integers, and a scale for each block of 64 of them."""
    padded = np.zeros((len(rows), -(-rows.shape[1] // _BLOCK) * _BLOCK), np.float32)
    padded[:, : rows.shape[1]] = rows
    by_block = row_scales(padded.reshape(-1, _BLOCK))
    numbers = integers(padded.reshape(-1, _BLOCK), by_block[:, None]).reshape(padded.shape)
    return np.ascontiguousarray(numbers[:, : rows.shape[1]]), by_block


def _int8(numbers: Array) -> Weight:
    return Weight(np.ascontiguousarray(numbers).reshape(-1), Encoding.INT8)


def _attention(layer: Layer, scales: Scales) -> Layer:
    """Store four projections with scales of blocks; if `whole`, with a scale for each row, and one for "out"."""
    if scales.whole:
        return _in_parts(layer, scales, "quantize_term")
    weights: dict[str, Array | Weight | None] = {}
    for name in _PROJECTIONS:
        rows = layer.weights[name].reshape((-1, layer["embed_dim"]) if name[0] == "o" else (layer["embed_dim"], -1))
        weights |= packed(name, *_blocks(rows))
    return layer.having(weights=weights, quantize_term=_BLOCK_TERM)


def _in_parts(layer: Layer, scales: Scales, term: str = "int8_scale_term") -> Layer:
    """Store the weights of _STORED_SCALES as integers; ncnn computes the scale of the input at run time."""
    weights: dict[str, Array | Weight | None] = {}
    counts = {weight.name: weight.count for weight in layer.spec.weights} if layer.spec else {}
    for name in _STORED_SCALES.get(layer.type, ()):
        weight = name.removesuffix("s").removesuffix("_int8_scale")
        rows = layer.weights[weight].reshape(counts[name](layer), -1)
        by_row = row_scales(rows)
        weights |= {weight: _int8(integers(rows, by_row[:, None])), name: by_row}
    form = layer.having(weights=weights)
    form.params[term] = _SINGLE_SCALE_TERM
    return form


def _window_obstacle(layer: Layer) -> str:
    if is_garbage_on_x86(layer):
        return "on x86 ncnn computes grouped convolutions of int8 wrong where a group has 8n channels"
    pad = layer["pad_value"]
    return f"it pads with {pad:g}, and ncnn's int8 never with negative numbers" if pad < 0 else ""


def _rows_obstacle(layer: Layer) -> str:
    shape = layer.inputs[0].shape or ()
    return "an InnerProduct of several rows is slow in int8" if len(shape) == 2 and shape[0] != 1 else ""


def _gemm_obstacle(layer: Layer) -> str:
    if layer["constantK"] == 1:
        return "it adds no products, as for indices"
    is_half = bool(layer["constantA"]) != bool(layer["constantB"])
    return "" if is_half else "the net computes both matrices, or neither"


class _Kind(NamedTuple):
    """A layer type with int8 kernels in ncnn, and the weights that must be constants."""

    weights: tuple[str, ...]
    quantised: Callable[[Layer, Scales], Layer]
    obstacle: Callable[[Layer], str] = lambda layer: ""


_CONVOLUTIONS = ("Convolution", "ConvolutionDepthWise")
_PROJECTIONS = tuple(f"{name}_weight_data" for name in ("q", "k", "v", "out"))
_RECURRENT = ("LSTM", "GRU", "RNN")
_STORED_SCALES: Mapping[str, tuple[str, ...]] = {
    "Embed": ("weight_data_int8_scale",),
    "MultiHeadAttention": (*(f"{name}_int8_scales" for name in _PROJECTIONS[:3]), "out_weight_data_int8_scale"),
    **dict.fromkeys(_RECURRENT, ("weight_xc_data_int8_scales", "weight_hc_data_int8_scales")),
}
_KINDS: Mapping[str, _Kind] = {
    **dict.fromkeys(_CONVOLUTIONS, _Kind(("weight_data",), _convolution, _window_obstacle)),
    "InnerProduct": _Kind(("weight_data",), _convolution, _rows_obstacle),
    "Gemm": _Kind((), _gemm, _gemm_obstacle),
    "MultiHeadAttention": _Kind(_PROJECTIONS, _attention),
    "SDPA": _Kind((), _in_parts),
    "Embed": _Kind(("weight_data",), _in_parts),
    **dict.fromkeys(_RECURRENT, _Kind(("weight_xc_data", "weight_hc_data"), _in_parts)),
}
