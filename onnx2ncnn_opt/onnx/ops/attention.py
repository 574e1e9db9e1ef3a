"""Attention over heads, and rotary embeddings."""

from __future__ import annotations

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.onnx import items
from onnx2ncnn_opt.onnx.items import ItemsMixed, NodeView
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.attention import (
    Sight,
    added,
    any_key,
    attend,
    bias,
    capped,
    finite,
    lengthened,
    merge_heads,
    rotate,
    split_heads,
    with_past,
)
from onnx2ncnn_opt.onnx.lower.functional.binary import binary
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Tensor, Value


def _attended(seen: NodeView) -> int:
    """Let all operands have items; a mask of fewer axes would have something else in front."""
    if seen.axis(3) is not None and len(seen.shape(3)) != 4:
        raise ItemsMixed
    items.batch(*range(len(seen.operands)))(seen)
    return 0


@onnx_op("Attention", since=23, integers=True, items=_attended)
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
    """SDPA; MatMul, Softmax and MatMul where it caps the scores or gives them."""
    heads = [split_heads(im, x, n) for x, n in ((q, q_num_heads), (k, kv_num_heads), (v, kv_num_heads))]
    heads, past = with_past(im, heads, past_key, past_value)
    sight = Sight(bool(is_causal), left_window_size, right_window_size)
    bias_of_keys = sight.bias(im, heads, past if nonpad_kv_seqlen is None else nonpad_kv_seqlen)
    mask = lengthened(im, bias(im, attn_mask), heads[1].shape[2])
    mask = added(im, mask, bias_of_keys)
    if softcap or im.is_used(3):
        y, scores = capped(im, heads, mask, scale, softcap, qk_matmul_output_mode)
        return merge_heads(im, y) if q.rank == 3 else y, heads[1], heads[2], scores
    hides_all = mask is not None and not (isinstance(mask, Constant) and (mask.array.max(-1) > -np.inf).all())
    y = attend(im, heads, finite(im, mask) if mask is not None and hides_all else mask, scale)
    if mask is not None and hides_all:  # rows that see no key are 0; a Softmax of nothing but -inf is NaN on ARM
        y = im.tensor(binary(im, BinaryOp.MUL, y, any_key(im, mask)))
    return merge_heads(im, y) if q.rank == 3 else y, heads[1], heads[2]


def _rotated(seen: NodeView) -> int:
    """Tables may be those of each item, but as many axes as they have then, they have else too."""
    if {seen.axis(i) for i in range(len(seen.operands))} != {0, None} or seen.axis(0) is None:
        raise ItemsMixed
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
    return rotate(im, x, (cos, sin), position_ids, interleaved, num_heads or 0, rotary_embedding_dim)
