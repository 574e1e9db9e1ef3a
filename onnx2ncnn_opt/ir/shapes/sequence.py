"""Recurrent layers, attention, embeddings, and spectra."""

from collections.abc import Sequence

from onnx2ncnn_opt.ir.attention import mask_slot, operand_count
from onnx2ncnn_opt.ir.codes import Direction, Padding
from onnx2ncnn_opt.ir.dim import Dim, Shape, product
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.shapes.registry import Output, broadcast, equal, fail, need_rank, shape_of

_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


@shape_of(*_GATES)
def recurrent(layer: Layer, x: Shape, *states: Shape) -> list[Output]:
    """Return (T, num_output * directions), then the last states, shaped like the first ones or (directions, size)."""
    need_rank(layer, x, 2)
    directions = 2 if layer["direction"] == Direction.BIDIRECTIONAL else 1
    outputs = layer["num_output"]
    sizes = [outputs, layer["hidden_size"]] if layer.type == "LSTM" else [outputs]
    rows = directions * _GATES[layer.type] * sizes[-1]
    if rows < 1 or layer["weight_data_size"] % rows:
        fail(layer, f"weight_data_size {layer['weight_data_size']} is not a multiple of {rows} rows")
    equal(layer, layer["weight_data_size"] // rows, x[1], "the inputs of the weights and the width of the blob")
    if states and len(states) != len(sizes):
        fail(layer, f"it takes {len(sizes)} states, not {len(states)}")
    if len(layer.outputs) not in (1, 1 + len(sizes)):
        fail(layer, f"it has {len(sizes)} states for {len(layer.outputs) - 1} outputs")
    for state, size in zip(states, sizes, strict=False):
        equal(layer, product(state), directions * size, "the elements of a state")
        if directions == 2:
            need_rank(layer, state, 2)
    last = states or tuple((directions, size) for size in sizes)
    result: list[Output] = [(x[0], outputs * directions), *last]
    return result[: len(layer.outputs)]


@shape_of("Embed")
def embed(layer: Layer, x: Shape) -> Shape:
    """Return (number of indices, num_output)."""
    need_rank(layer, x, 1)
    return x[0], layer["num_output"]


@shape_of("SDPA", unknown_inputs=True)
def sdpa(layer: Layer, *inputs: Shape | None) -> list[Output]:
    """Return (heads, queries, value size), and with kv_cache two opaque blobs."""
    count = operand_count(layer)
    if count != 3:
        fail(layer, f"it needs {len(inputs) - count + 3} inputs with these parameters")
    unknown: list[Output] = [None] * len(layer.outputs)
    q, k, v = inputs[:3]
    if q is None or k is None or v is None:
        return unknown
    for blob in (q, k, v):
        need_rank(layer, blob, 3)
    equal(layer, q[2], k[2], "the widths of queries and keys")
    equal(layer, k[1], v[1], "the numbers of keys and values")
    groups = equal(layer, k[0], v[0], "the heads of keys and values")
    if isinstance(q[0], int) and isinstance(groups, int) and q[0] % groups:
        fail(layer, f"{q[0]} heads cannot share {groups} groups of keys")
    _check_mask(layer, inputs, q[0], q[1], k[1])
    return [(q[0], q[1], v[2]), *unknown[1:]]


@shape_of("MultiHeadAttention", unknown_inputs=True)
def multi_head_attention(layer: Layer, *inputs: Shape | None) -> list[Output]:
    """Return (queries, qdim), and with kv_cache two opaque blobs."""
    count = operand_count(layer)
    if not 1 <= count <= 3:
        fail(layer, f"{len(inputs)} inputs are not 1 to 3 and {len(inputs) - count} for mask and cache")
    embed_dim, heads = layer["embed_dim"], layer["num_heads"]
    if embed_dim < 1 or heads < 1 or embed_dim % heads or layer["weight_data_size"] % embed_dim:
        fail(layer, f"embed_dim {embed_dim} with {heads} heads and weight_data_size {layer['weight_data_size']}")
    unknown: list[Output] = [None] * len(layer.outputs)
    q, k, v = inputs[0], inputs[min(1, count - 1)], inputs[min(2, count - 1)]
    if q is None or k is None or v is None:
        return unknown
    query_size = layer["weight_data_size"] // embed_dim
    for blob, size, name in ((q, query_size, "queries"), (k, layer["kdim"], "keys"), (v, layer["vdim"], "values")):
        need_rank(layer, blob, 2)
        equal(layer, blob[1], size, f"the width of the {name} and of their weights")
    equal(layer, k[0], v[0], "the numbers of keys and values")
    _check_mask(layer, inputs, heads, q[0], k[0])
    return [(q[0], query_size), *unknown[1:]]


def _check_mask(layer: Layer, inputs: Sequence[Shape | None], heads: Dim, queries: Dim, keys: Dim) -> None:
    slot = mask_slot(layer)
    mask = None if slot is None else inputs[slot]
    if mask is None:
        return
    need_rank(layer, mask, 2, 3)
    if len(mask) == 3:
        broadcast(layer, mask[0], heads, "the heads of the mask and of the queries")
    equal(layer, mask[-2], queries, "the rows of the mask and the queries")
    if not layer["kv_cache"]:  # caches add keys
        equal(layer, mask[-1], keys, "the columns of the mask and the keys")


@shape_of("RotaryEmbed")
def rotary_embed(layer: Layer, x: Shape, cos: Shape, sin: Shape) -> Shape:
    """Return the input's shape, (heads, length, size) or (length, size); cos and sin are (length, size / 2 or more)."""
    need_rank(layer, x, 2, 3)
    for table in (cos, sin):
        need_rank(layer, table, 2, 3)
        if len(table) == 3:
            equal(layer, table[0], 1, "the channels of a table and 1:")
        equal(layer, table[-2], x[-2], "the lengths of tables and blob")
        width, size = table[-1], x[-1]
        if isinstance(width, int) and isinstance(size, int) and width < size // 2:
            fail(layer, f"tables of width {width} are too narrow to rotate {size} columns")
    return x


@shape_of("Spectrogram")
def spectrogram(layer: Layer, x: Shape) -> Shape:
    """Return (frequencies, frames, 2) for power 0, else (frequencies, frames)."""
    need_rank(layer, x, 1)
    size, length = x[0], layer["n_fft"]
    if layer["center"]:
        border = length // 2
        if layer["pad_type"] == Padding.REFLECT and isinstance(size, int) and border >= size:
            fail(layer, f"a reflection of {border} needs more than {size} elements")
        size = size + 2 * border
    room = size - length
    if length < 1 or layer["hoplen"] < 1 or (isinstance(room, int) and room < 0):
        fail(layer, f"n_fft {length} and hoplen {layer['hoplen']} for {size} elements")
    frames = room // layer["hoplen"] + 1
    frequencies = length // 2 + 1 if layer["onesided"] else length
    return (frequencies, frames) if layer["power"] else (frequencies, frames, 2)


@shape_of("InverseSpectrogram")
def inverse_spectrogram(layer: Layer, x: Shape) -> Shape:
    """Return (samples, 2), or (samples) if only the real or the imaginary part is returned."""
    need_rank(layer, x, 3)
    equal(layer, x[2], 2, "the width of the spectrum and 2:")
    length = layer["n_fft"]
    if x[0] != length:
        equal(layer, x[0], length // 2 + 1, "the frequencies of the spectrum and of n_fft")
    samples = (x[1] - 1) * layer["hoplen"] + (length % 2 if layer["center"] else length)
    return (samples,) if layer["returns"] else (samples, 2)


@shape_of("StatisticsPooling")
def statistics_pooling(layer: Layer, x: Shape) -> Shape:
    """Return (c) means, followed by (c) deviations with include_stddev."""
    need_rank(layer, x, 3, 4)
    return (x[0] * (2 if layer["include_stddev"] else 1),)
