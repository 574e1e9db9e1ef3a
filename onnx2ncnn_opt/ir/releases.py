"""Types, parameters, codes and ranks that older ncnn releases lack, each with the date when ncnn got it.

Dates are those of the commits in ncnn's repository, as YYYYMMDD like its releases. Releases before `OLDEST` differ in
ways that are not in these tables.
"""

from collections.abc import Iterator, Mapping

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.ir.graph import Graph, Layer
from onnx2ncnn_opt.ir.int8 import BLOCKS

OLDEST = 20240102
NEWEST = 20261020

_TYPES: Mapping[str, int] = {
    "RMSNorm": 20240815,
    "Spectrogram": 20241122,
    "InverseSpectrogram": 20241122,
    "Flip": 20250806,
    "SDPA": 20251111,
    "RotaryEmbed": 20251119,
}
# Parameters with another value than the default.
_PARAMS: Mapping[tuple[str, str], int] = {
    ("MultiHeadAttention", "scale"): 20240623,
    **{(kind, "int8_scale_term"): 20240508 for kind in ("LSTM", "GRU", "RNN")},
    ("Embed", "int8_scale_term"): 20240902,
    ("Gemm", "quantize_term"): 20241012,
    ("MultiHeadAttention", "quantize_term"): 20241015,
    ("Reshape", "shape_expr"): 20250310,
    ("Crop", "starts_expr"): 20250414,
    ("Interp", "size_expr"): 20250417,
    ("Reshape", "input_batch_axis"): 20260702,
    ("Reshape", "output_batch_axis"): 20260702,
}
# The first newer code of `op_type`.
_CODES: Mapping[str, tuple[int, int]] = {"BinaryOp": (BinaryOp.FMOD, 20260308), "UnaryOp": (UnaryOp.SIGN, 20260521)}
# Types, each with a rank that it could not process before; Tile ignored the repeats of one dim.
_RANKS: Mapping[tuple[str, int], int] = {("Softmax", 4): 20250318, ("Tile", 4): 20251112}
_BATCH, _BLOCKS = 20260617, 20260713


def check_release(release: int) -> None:
    """Raise UsageError for a release older than `OLDEST` or newer than `NEWEST`."""
    if isinstance(release, bool) or not isinstance(release, int):
        raise UsageError(f"a release is a date like {NEWEST}, not {release!r:.80}")
    if release < OLDEST:
        raise UsageError(f"ncnn {release} is too old: releases from {OLDEST} on can be the target")
    if release > NEWEST:
        raise UsageError(f"ncnn {release} is not known here: the newest release that is known is {NEWEST}")


def least_release(graph: Graph) -> int:
    """Return the oldest ncnn release that understands a net, `OLDEST` at least."""
    return max([OLDEST, *(since for layer in graph for since, _ in _needs(layer))])


def too_new(layer: Layer, release: int) -> str | None:
    """Return a message about the newest feature of a layer that an ncnn release lacks; None if it lacks none."""
    since, feature = max(_needs(layer), default=(release, ""))
    return f"{feature} needs ncnn {since} or newer, not {release}" if since > release else None


def _needs(layer: Layer) -> Iterator[tuple[int, str]]:
    if layer.type in _TYPES:
        yield _TYPES[layer.type], f"layer {layer.type}"
    for (kind, name), since in _PARAMS.items():
        if kind == layer.type and name in layer.params:
            yield since, f"{kind}'s {name}"
    if layer.params.get("quantize_term", 0) >= BLOCKS:
        yield _BLOCKS, f"{layer.type}'s blocks of integers"
    first, since = _CODES.get(layer.type, (0, 0))
    if since and layer["op_type"] >= first:
        yield since, f"{layer.type}'s operation {layer['op_type']}"
    for rank in (len(blob.shape or ()) for blob in layer.inputs):
        if (layer.type, rank) in _RANKS:
            yield _RANKS[layer.type, rank], f"{layer.type} of rank {rank}"
    if any(blob.batch != 1 for blob in layer.outputs):
        yield _BATCH, "a batch"
