"""Attention over heads and rotary embeddings, of ONNX and of com.microsoft; LinearAttention and CausalConvWithState."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir

from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.ir.dim import Dim, Sym, shape_text
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx import items
from onnx2ncnn_opt.onnx.fold.cells import as_symbolic
from onnx2ncnn_opt.onnx.items import NodeView
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional import attention as sdpa
from onnx2ncnn_opt.onnx.lower.functional.binary import added, binary, number
from onnx2ncnn_opt.onnx.lower.functional.concat import concat
from onnx2ncnn_opt.onnx.lower.functional.conv import conv
from onnx2ncnn_opt.onnx.lower.functional.crop import crop, split
from onnx2ncnn_opt.onnx.lower.functional.gather import fixed, gather
from onnx2ncnn_opt.onnx.lower.functional.logic import greater
from onnx2ncnn_opt.onnx.lower.functional.matmul import linear, matmul
from onnx2ncnn_opt.onnx.lower.functional.pad import pad
from onnx2ncnn_opt.onnx.lower.functional.views import transposed, unsqueeze
from onnx2ncnn_opt.onnx.lower.functional.where import where
from onnx2ncnn_opt.onnx.lower.functional.window import ConvAttributes
from onnx2ncnn_opt.onnx.lower.memory_budget import MOST_STEPS
from onnx2ncnn_opt.onnx.registry import MICROSOFT, onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Ints, Operand, Tensor, Value


def _attended(node: NodeView) -> int:
    """Apply the rule of Attention: all operands may have items, a mask only with four axes."""
    items.require(node.axis(3) is None or len(node.shape(3)) == 4)
    items.batch(*range(len(node.operands)))(node)
    return 0


@onnx_op("Attention", since=23, integers=True, items=_attended, errors="gates")
def attention23(
    im: ImportContext,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Value | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    nonpad_kv_seqlen: Value | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    left_window_size: int = -1,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
) -> tuple[Value, ...]:
    """SDPA; MatMul, Softmax and MatMul if scores are capped or an output."""
    heads = [sdpa.split_heads(im, x, n) for x, n in ((q, q_num_heads), (k, kv_num_heads), (v, kv_num_heads))]
    heads, past = sdpa.with_past(im, heads, past_key, past_value)
    window = sdpa.KeyWindow(bool(is_causal), left_window_size, right_window_size)
    bias_of_keys = window.bias(im, heads, past if nonpad_kv_seqlen is None else nonpad_kv_seqlen)
    mask = added(im, sdpa.lengthened(im, sdpa.bias(im, attn_mask), heads[1].shape[2]), bias_of_keys)
    if softcap or im.is_used(3):
        y, scores = sdpa.capped(im, heads, mask, scale, softcap, qk_matmul_output_mode)
        return sdpa.merge_heads(im, y) if q.rank == 3 else y, heads[1], heads[2], scores
    is_own = heads[1].shape[2] == past + heads[0].shape[2] and attn_mask is None and nonpad_kv_seqlen is None
    if mask is None or is_own or (isinstance(mask, Constant) and (mask.array.max(-1) > -np.inf).all()):
        y = sdpa.attend(im, heads, mask, scale)
    else:  # rows without a visible key are 0; on ARM, Softmax of a row of -inf is NaN
        y = sdpa.attend(im, heads, sdpa.finite(im, mask), scale)
        y = binary(im, BinaryOp.MUL, y, sdpa.any_key(im, mask))
    return sdpa.merge_heads(im, y) if q.rank == 3 else y, heads[1], heads[2]


def _rotated(node: NodeView) -> int:
    """Apply the rule of RotaryEmbedding: the operand has items on axis 0, the tables may have them there."""
    items.require({node.axis(i) for i in range(len(node.operands))} == {0, None} and node.axis(0) == 0)
    return 0


@onnx_op("RotaryEmbedding", since=23, integers=True, items=_rotated)
def rotary_embedding(
    im: ImportContext,
    x: Tensor,
    cos: Value,
    sin: Value,
    position_ids: Value | None = None,
    *,
    interleaved: int = 0,
    num_heads: int | None = None,
    rotary_embedding_dim: int = 0,
) -> Value:
    """RotaryEmbed."""
    return sdpa.rotate(im, x, (cos, sin), position_ids, interleaved, num_heads or 0, rotary_embedding_dim)


@onnx_op("MultiHeadAttention", domain=MICROSOFT, integers=True)
def multi_head_attention(
    im: ImportContext,
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    b: Array | None = None,
    key_padding_mask: Value | None = None,
    attention_bias: Value | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    past_sequence_length: Value | None = None,
    cache_indirection: Value | None = None,
    *,
    mask_filter_value: float = -10000.0,
    num_heads: int,
    scale: float = 0.0,
    unidirectional: int = 0,
) -> tuple[Value, ...]:
    """SDPA of projected queries, keys and values."""
    if past_sequence_length is not None or cache_indirection is not None:
        reason = "past_sequence_length and cache_indirection (a buffer for pasts) are not supported"
        raise im.refuse(reason, "export it with pasts that grow, without a buffer")
    parts = _unpacked(im, query, key, value)
    if b is not None:
        if any(part.rank != 3 for part in parts):
            raise im.refuse("a bias on keys that are split into heads already", "add it before they are split")
        of_query, of_key = fixed(im, (parts[0].shape[2], parts[1].shape[2]))
        biases = np.split(b, [of_query, of_query + of_key])
        parts = [binary(im, BinaryOp.ADD, part, Constant(array)) for part, array in zip(parts, biases, strict=True)]
    heads, before = sdpa.with_past(im, [sdpa.split_heads(im, part, num_heads) for part in parts], past_key, past_value)
    mask = added(im, sdpa.bias(im, attention_bias), _causal(im, unidirectional, heads, before))
    mask = added(im, mask, _padding(im, key_padding_mask, heads[1], mask_filter_value))
    return sdpa.merge_heads(im, sdpa.attend(im, heads, mask, scale or None)), heads[1], heads[2]


def _unpacked(im: ImportContext, query: Tensor, key: Tensor | None, value: Tensor | None) -> list[Value]:
    """Return queries, keys and values; split an operand [batch, length, heads, 2 or 3, size] that packs several."""
    if key is not None and value is not None:
        return [query, key, value]
    packed, count = (query, 3) if key is None else (key, 2)
    if value is not None or packed.rank != 5 or packed.shape[3] != count:
        raise im.invalid(f"{count} operands packed in one of shape {list(packed.shape)}")
    parts = [gather(im, packed, Constant(np.array(i)), axis=3) for i in range(count)]
    heads = [part.transpose((0, 2, 1, 3)) for part in parts]
    return heads if key is None else [query, *heads]


@onnx_op("Attention", domain=MICROSOFT, integers=True)
def microsoft_attention(
    im: ImportContext,
    x: Tensor,
    weights: Array,
    b: Array | None = None,
    mask_index: Value | None = None,
    past: Tensor | None = None,
    attention_bias: Value | None = None,
    past_sequence_length: Value | None = None,
    *,
    do_rotary: int = 0,
    mask_filter_value: float = -10000.0,
    num_heads: int,
    past_present_share_buffer: int = 0,
    qkv_hidden_sizes: Ints = (),
    rotary_embedding_dim: int = 0,
    scale: float = 0.0,
    unidirectional: int = 0,
) -> tuple[Value | None, ...]:
    """One projection to queries, keys and values, and SDPA."""
    if past_sequence_length is not None or past_present_share_buffer or do_rotary:
        reason = "past_sequence_length, past_present_share_buffer and rotary embeddings are not supported"
        raise im.refuse(reason, "export it without them")
    sizes = qkv_hidden_sizes or (weights.shape[-1] // 3,) * 3
    projected = linear(im, x, im.f32(weights).T, None if b is None else im.f32(b))
    parts = split(im, projected, 2, sizes)
    keys = values = None
    if past is not None:
        keys, values = (im.tensor(gather(im, past, Constant(np.array(i)), axis=0)) for i in (0, 1))
    heads, before = sdpa.with_past(im, [sdpa.split_heads(im, part, num_heads) for part in parts], keys, values)
    mask = added(im, sdpa.bias(im, attention_bias), _causal(im, unidirectional, heads, before))
    mask = added(im, mask, _padding(im, mask_index, heads[1], mask_filter_value))
    present = concat(im, *(unsqueeze(im, part, (0,)) for part in heads[1:]), axis=0) if im.is_used(1) else None
    return sdpa.merge_heads(im, sdpa.attend(im, heads, mask, scale or None)), present


def _padding(im: ImportContext, mask: Value | None, keys: Tensor, hidden: float) -> Value | None:
    """Return a bias that is `hidden` for keys that a mask of 0 and 1, or each item's length, hides."""
    if mask is None:
        return None
    items, length = keys.shape[0], keys.shape[2]
    limit: Value = number(0)
    if mask.shape == (items,):
        mask = im.reshape(mask, (items, 1, 1, 1))
        if isinstance(length, int):
            limit = Constant(np.arange(length, dtype=np.float32))
        else:
            limit = sdpa.positions(im, 0, length, 0)
    elif mask.rank in (2, 3) and mask.shape[0] == items:
        if mask.shape[-1] != length:
            reason = f"a mask of shape {shape_text(mask.shape)} for {length} keys"
            raise im.invalid(reason, [(mask.shape[-1], length)])
        mask = im.reshape(mask, (items, 1, *(mask.shape[1:-1] or (1,)), length))
    else:
        raise im.refuse(f"a mask of shape {list(mask.shape)}", "give it a 0 or a 1 for each key")
    if isinstance(mask, Constant) and isinstance(limit, Constant):
        return Constant(np.where(mask.array > limit.array, 0, hidden).astype(np.float32))
    return where(im, greater(im, mask, limit), number(0), number(hidden))


def _causal(im: ImportContext, unidirectional: int, heads: Sequence[Tensor], past: Dim) -> Value | None:
    """Return the causal mask if `unidirectional`: it hides later keys from a query."""
    if unidirectional and heads[0].shape[2] + past != heads[1].shape[2]:
        reason = "it looks backwards at keys that are not those of its queries: ONNX Runtime hides none of the last"
        raise im.refuse(reason, "let the queries be the last of the keys")
    return sdpa.KeyWindow(causal=bool(unidirectional)).bias(im, heads, past)


def _grouped(node: NodeView) -> int:
    """Apply the rule of GroupQueryAttention: queries, keys, values, the past, and the numbers of keys have items."""
    items.batch(*(i for i in range(6) if node.operand(i) is not None))(node)
    return 0


@onnx_op("GroupQueryAttention", domain=MICROSOFT, integers=True, counts=5, items=_grouped, errors="gates")
def group_query_attention(
    im: ImportContext,
    query: Tensor,
    key: Value | None,
    value: Value | None,
    past_key: Tensor | None,
    past_value: Tensor | None,
    seqlens_k: Operand,
    total_sequence_length: Operand,
    cos_cache: Value | None = None,
    sin_cache: Value | None = None,
    position_ids: Value | None = None,
    attention_bias: Value | None = None,
    head_sink: Value | None = None,
    *,
    causal: int = 1,
    do_rotary: int = 0,
    kv_num_heads: int,
    local_window_size: int = -1,
    num_heads: int,
    rotary_interleaved: int = 0,
    scale: float = 0.0,
    sliding_window_cache: int = 0,
    smooth_softmax: int = 0,
    softcap: float = 0.0,
) -> tuple[Value, ...]:
    """SDPA; MatMuls and Softmax if scores are capped. An input mask whose sum counts the keys has to be all 1."""
    if head_sink is not None or smooth_softmax > 0:
        raise im.refuse("sinks (head_sink, smooth_softmax): ncnn's attention has none", "use a model without them")
    if sliding_window_cache:
        hint = "build the model with caches that grow: --extra_options windowed_kv_cache=false"
        raise im.refuse("sliding_window_cache is 1: caches that drop keys", hint)
    if key is None or value is None:
        width = query.shape[-1]
        size = width // (num_heads + 2 * kv_num_heads) if isinstance(width, int) else 0
        query, key, value = (im.tensor(x) for x in split(im, query, 2, (num_heads * size, *(kv_num_heads * size,) * 2)))
    if local_window_size == 0:
        raise im.refuse("a window of no keys", "use a window of one key at least")
    heads = [sdpa.split_heads(im, x, n) for x, n in ((query, num_heads), (key, kv_num_heads), (value, kv_num_heads))]
    before: Dim = 0 if past_key is None else past_key.shape[2]
    _require_all_keys(im, seqlens_k, total_sequence_length, before + heads[1].shape[2])
    if do_rotary:
        if cos_cache is None or sin_cache is None:
            raise im.refuse("rotary embeddings without their tables", "give it cos_cache and sin_cache")
        heads[:2] = _rotated_heads(im, heads[:2], (cos_cache, sin_cache), position_ids, before, rotary_interleaved)
    heads, past = sdpa.with_past(im, heads, past_key, past_value)
    # The window counts the query's own key.
    window = sdpa.KeyWindow(causal=bool(causal), left=local_window_size - 1 if local_window_size > 0 else -1)
    options = heads, added(im, sdpa.bias(im, attention_bias), window.bias(im, heads, past)), scale or None
    y = sdpa.capped(im, *options, softcap, 0)[0] if softcap else sdpa.attend(im, *options)
    return sdpa.merge_heads(im, y), heads[1], heads[2]


def _rotated_heads(
    im: ImportContext, heads: Sequence[Tensor], tables: Sequence[Value], ids: Value | None, past: Dim, interleaved: int
) -> list[Tensor]:
    """Return queries and keys with rotary embeddings; without the positions `ids`, they count from the past on."""
    rows, width = tables[0].shape[0], tables[0].shape[-1]
    [rotated] = im.fixed([2 * width], "tables of dynamic width")
    if ids is None:
        end = past + heads[0].shape[2]
        im.demand(rows - end, 0)  # the table has a row for each position
        tables = [unsqueeze(im, crop(im, im.tensor(x), 0, past, end), (0,)) for x in tables]
    return [im.tensor(sdpa.rotate(im, x, tables, ids, interleaved, 0, rotated)) for x in heads]


def _require_all_keys(im: ImportContext, last: Operand, total: Operand, keys: Dim) -> None:
    """Refuse items with fewer keys than the longest; the sum of an input mask counts as all keys."""
    if isinstance(last, Tensor) and not _is_sum_of_mask(im.node.inputs[5]):
        reason = "the number of keys of each item is known only at run time"
        raise im.refuse(reason, "compute it as the sum of a mask that is an input, less 1")
    for lengths, most in ((last, keys - 1), (total, keys)):
        counts = [] if isinstance(lengths, Tensor) else as_symbolic(lengths).cells.reshape(-1).tolist()
        if any(isinstance(count, Sym) and count != most for count in counts):
            raise im.invalid(f"items of other lengths than {keys}", [(count, most) for count in counts])
        if any(count != most for count in counts):
            reason = f"items of other lengths than {keys}, as many as there are keys"
            raise im.refuse(reason, "pad the items to one length")


def _is_sum_of_mask(value: onnx_ir.Value | None) -> bool:
    """Return True if a number is the sum of an input, perhaps minus 1."""
    is_sum = False
    while value is not None and (node := value.producer()) is not None:
        if node.op_type not in (
            ("Cast",) if is_sum else ("ReduceSum", "Sub", "Cast", "Reshape", "Squeeze", "Unsqueeze")
        ):
            return False
        is_sum = is_sum or node.op_type == "ReduceSum"
        value = node.inputs[0]
    return is_sum and value is not None and value.is_graph_input()


@onnx_op("RotaryEmbedding", domain=MICROSOFT, integers=True)
def microsoft_rotary_embedding(
    im: ImportContext,
    x: Tensor,
    position_ids: Value,
    cos: Value,
    sin: Value,
    *,
    interleaved: int = 0,
    is_packed_batching: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
) -> Value:
    """RotaryEmbed."""
    if is_packed_batching or scale != 1:
        raise im.refuse("is_packed_batching is 1, or scale is not 1", "export it without packing, and with scale 1")
    if position_ids.rank == 1:  # the first position
        length = x.shape[1 if x.rank == 3 else 2]
        if not isinstance(position_ids, Constant) or not isinstance(length, int):
            raise im.refuse("a first position that is computed at run time", "give it the positions of all elements")
        position_ids = Constant(position_ids.array.reshape(1, 1) + np.arange(length))
    if x.rank == 3 and not num_heads:
        reason = "num_heads is missing, and does not follow from the shapes"
        half, width = im.fixed((cos.shape[-1], x.shape[-1]), reason, "set num_heads, or bind sizes with --shape")
        num_heads = width // (2 * half)
    return sdpa.rotate(im, x, (cos, sin), position_ids, interleaved, num_heads, rotary_embedding_dim)


@onnx_op("CausalConvWithState", since=27, batch=0)
def causal_conv_with_state(
    im: ImportContext,
    x: Tensor,
    weight: Value,
    bias: Value | None = None,
    past_state: Value | None = None,
    *,
    activation: str = "none",
) -> tuple[Value | None, ...]:
    """ConvolutionDepthWise1D after a Concat with the past, or Padding."""
    if activation not in ("none", "silu", "swish"):
        raise im.invalid(f"activation {activation} is not known")
    channels, length = x.shape[1], weight.shape[-1]
    if x.rank != 3 or not isinstance(channels, int) or not isinstance(length, int):
        raise im.refuse(f"operands of shapes {list(x.shape)} and {list(weight.shape)}", "bind sizes with --shape")
    if length == 1:
        if im.is_used(1):
            reason = "a state of no elements, and ncnn has no empty tensors"
            raise im.refuse(reason, "use Conv, since a kernel of one element has no state")
        padded: Value = x
    elif past_state is None:
        padded = pad(im, x, pads=(0, 0, length - 1, 0, 0, 0))
    else:
        padded = concat(im, past_state, x, axis=2)
    padded = im.tensor(padded)
    y = conv(im, padded, weight, bias, attrs=ConvAttributes(group=channels))
    state = crop(im, padded, 2, 1 - length, -233) if im.is_used(1) else None
    return y if activation == "none" else im.unary(y, "Swish"), state


@onnx_op("LinearAttention", since=27)
def linear_attention(
    im: ImportContext,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_state: Value | None = None,
    decay: Value | None = None,
    beta: Value | None = None,
    *,
    chunk_size: int = 64,
    kv_num_heads: int,
    q_num_heads: int,
    scale: float = 0.0,
    update_rule: str = "gated_delta",
) -> tuple[Value, ...]:
    """Unrolled steps: MatMuls for a key's part of the state, for the update, and for the query."""
    rules = {"linear": (False, False), "gated": (True, False), "delta": (False, True), "gated_delta": (True, True)}
    if rules.get(update_rule) != (decay is not None, beta is not None):
        raise im.refuse(f"update_rule {update_rule} with these operands", "give decay and beta as the rule needs them")
    batch, *sizes = query.shape
    steps, width = im.fixed(sizes, "a dynamic number of steps")
    if steps > MOST_STEPS:
        reason = f"{steps} steps one after the other, more than {MOST_STEPS}"
        raise im.refuse(reason, "feed the sequence in shorter parts")
    if kv_num_heads < 1 or q_num_heads % kv_num_heads or width % q_num_heads:
        raise im.invalid(f"{q_num_heads} heads of {width} elements, which share {kv_num_heads} of keys")
    shared, size = q_num_heads // kv_num_heads, width // q_num_heads

    def each_step(x: Value | None, rows: int) -> list[Any]:
        """Split [batch, steps, heads * rows * columns] into [batch, heads, rows, columns] for each step."""
        if x is None:
            return [None] * steps
        columns = x.shape[-1]
        heads = 1 if columns == 1 else kv_num_heads
        if x.rank != 3 or not isinstance(columns, int) or columns % (heads * rows):
            raise im.invalid(f"an operand of shape {list(x.shape)} for {kv_num_heads} heads")
        parts = split(im, im.tensor(x), 1, (1,) * steps)
        return [im.reshape(part, (batch, heads, rows, columns // (heads * rows))) for part in parts]

    factor, state, results = scale or size**-0.5, past_state, []
    operands = (each_step(x, rows) for x, rows in ((query, shared), (key, 1), (value, 1), (decay, 1), (beta, 1)))
    for q, k, v, gate, rate in zip(*operands, strict=True):
        if state is not None and gate is not None:
            state = binary(im, BinaryOp.MUL, state, im.apply(transposed(gate), UnaryOp.EXP))
        if state is not None and rate is not None:
            v = binary(im, BinaryOp.SUB, v, matmul(im, k, state))
        if rate is not None:
            v = binary(im, BinaryOp.MUL, v, rate)
        update = matmul(im, transposed(k), v)
        state = update if state is None else binary(im, BinaryOp.ADD, state, update)
        y = matmul(im, q, state)
        results.append(im.reshape(y, (batch, 1, q_num_heads * y.shape[-1])))
    assert state is not None
    return binary(im, BinaryOp.MUL, concat(im, *results, axis=1), number(factor)), state
