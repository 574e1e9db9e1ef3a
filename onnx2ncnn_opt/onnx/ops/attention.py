"""Attention over heads, and rotary embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnx2ncnn_opt.ir.graph import Blob
from onnx2ncnn_opt.onnx.importer import ImportContext
from onnx2ncnn_opt.onnx.ops.elementwise import ADD, binary
from onnx2ncnn_opt.onnx.ops.gather import gather
from onnx2ncnn_opt.onnx.ops.logic import result_shape, where
from onnx2ncnn_opt.onnx.ops.pad_slice import crop
from onnx2ncnn_opt.onnx.ops.shape import concat
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Tensor, Value

_HEADS = (0, 2, 1, 3)


@onnx_op("Attention", since=23, integers=True)
def attention23(
    im: ImportContext,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Value | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
) -> tuple[Value, ...]:
    """SDPA."""
    if softcap:
        raise im.refuse(f"softcap {softcap:g}: ncnn's attention has none")
    flat = q.rank == 3
    heads = [split_heads(im, x, n) for x, n in ((q, q_num_heads), (k, kv_num_heads), (v, kv_num_heads))]
    past = 0
    if past_key is not None and past_value is not None:
        size = past_key.shape[2]
        if not isinstance(size, int):
            raise im.refuse("a past whose length is not fixed", "bind it with --shape")
        past = size
        heads[1:] = [concat_heads(im, pair) for pair in ((past_key, heads[1]), (past_value, heads[2]))]
    mask = attn_mask
    if is_causal:
        mask = added(im, bias(im, mask), causal(im, heads[0], heads[1], past))
    y = attend(im, heads, mask, scale)
    return merge_heads(im, y) if flat else y, heads[1], heads[2]


@onnx_op("Attention", since=24, integers=True)
def attention24(
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
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
) -> tuple[Value, ...]:
    """SDPA."""
    if nonpad_kv_seqlen is not None:
        raise im.refuse("input nonpad_kv_seqlen: each item's own length")
    return attention23(
        im,
        q,
        k,
        v,
        attn_mask,
        past_key,
        past_value,
        is_causal=is_causal,
        kv_num_heads=kv_num_heads,
        q_num_heads=q_num_heads,
        scale=scale,
        softcap=softcap,
    )


@onnx_op("Attention", since=25, integers=True)
def attention25(
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
    """SDPA."""
    if left_window_size != -1 or right_window_size != -1:
        raise im.refuse("it attends to a window of keys only")
    return attention24(
        im,
        q,
        k,
        v,
        attn_mask,
        past_key,
        past_value,
        nonpad_kv_seqlen,
        is_causal=is_causal,
        kv_num_heads=kv_num_heads,
        q_num_heads=q_num_heads,
        scale=scale,
        softcap=softcap,
    )


def split_heads(im: ImportContext, x: Value, count: int | None) -> Tensor:
    """[batch, length, heads * size] as [batch, heads, length, size]; four axes are so already."""
    x = im.tensor(x)
    if x.rank == 4:
        return x
    width = x.shape[-1]
    if x.rank != 3 or not count or not isinstance(width, int) or width % count:
        raise im.refuse(f"an operand of shape {list(x.shape)} in {count} heads")
    apart = im.tensor(im.reshape(x, (*x.shape[:2], count, width // count)))
    return apart.viewed(apart.view.transpose(_HEADS))


def merge_heads(im: ImportContext, x: Tensor) -> Value:
    """The inverse of `split_heads`."""
    batch, heads, length, size = x.shape
    return im.reshape(x.viewed(x.view.transpose(_HEADS)), (batch, length, heads * size))


def concat_heads(im: ImportContext, parts: Sequence[Tensor]) -> Tensor:
    """Past and present along the length."""
    return im.tensor(concat(im, *parts, axis=2))


def bias(im: ImportContext, mask: Value | None) -> Value | None:
    """A mask as what is added to the scores: 0 and -inf for a bool."""
    if mask is None or mask.dtype != np.bool_:
        return mask
    zero, low = (Constant(np.array(n, np.float32)) for n in (0, -np.inf))
    if isinstance(mask, Constant):
        return Constant(np.where(mask.array, zero.array, low.array))
    return where(im, mask, zero, low)


def added(im: ImportContext, a: Value | None, b: Value) -> Value:
    """The sum of two masks, of which the first may be absent."""
    if a is None:
        return b
    if isinstance(a, Constant) and isinstance(b, Constant):
        return Constant(a.array.astype(np.float32) + b.array)
    return binary(im, ADD, a, b)


def causal(im: ImportContext, q: Tensor, k: Tensor, past: int) -> Constant:
    """-inf above the diagonal of the scores, which begins behind the past."""
    rows, columns = q.shape[2], k.shape[2]
    if not isinstance(rows, int) or not isinstance(columns, int):
        raise im.refuse("a causal mask of a length that is not fixed", "bind it with --shape")
    return Constant(np.triu(np.full((rows, columns), -np.inf, np.float32), past + 1))


def attend(im: ImportContext, heads: Sequence[Tensor], mask: Value | None, scale: float | None) -> Tensor:
    """SDPA of queries, keys and values [batch, heads, length, size]."""
    q, k, v = heads
    if any(x.rank != 4 for x in heads) or q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3]:
        raise im.refuse(f"operands of shapes {', '.join(str(list(x.shape)) for x in heads)}")
    groups = q.shape[1], k.shape[1]
    if not isinstance(groups[0], int) or not isinstance(groups[1], int) or groups[0] % groups[1]:
        raise im.refuse(f"{groups[0]} heads cannot share {groups[1]} of keys")
    if scale == 0:
        raise im.refuse("the scale is 0")
    blobs = [im.mat(x, [[1], [2], [3]], [0]) for x in heads]
    mask = bias(im, mask)
    if mask is not None:
        blobs.append(_mask_blob(im, mask, q, k))
    size = q.shape[3]
    default = isinstance(size, int) and scale is not None and np.isclose(scale, size**-0.5, rtol=1e-7, atol=0)
    blob = im.layer("SDPA", *blobs, attn_mask=int(mask is not None), scale=0.0 if scale is None or default else scale)
    return im.wrap(blob, (*q.shape[:3], v.shape[3]), [[1], [2], [3]], [0], q.dtype)


def _mask_blob(im: ImportContext, mask: Value, q: Tensor, k: Tensor) -> Blob:
    """The mask with its rows and columns in full, for each head and each item where it has them."""
    full = (*q.shape[:3], k.shape[2])
    if result_shape(im, mask, Constant(np.zeros((1, 1, 1, 1), np.float32))) != mask.shape:
        shape = (1,) * (4 - mask.rank) + mask.shape
        mask = im.reshape(mask, shape)
    if mask.rank != 4 or any(n not in (1, m) for n, m in zip(mask.shape, full, strict=True)):
        raise im.refuse(f"a mask of shape {list(mask.shape)} for scores of shape {list(full)}")
    if mask.shape[2:] != full[2:]:
        if not all(isinstance(n, int) for n in full[2:]):
            raise im.refuse("a mask that broadcasts to a length that is not fixed", "bind it with --shape")
        zeros = Constant(np.zeros(tuple(int(n) for n in full[2:] if isinstance(n, int)), np.float32))
        mask = added(im, mask, zeros)
    batch = [] if mask.shape[0] == 1 else [0]
    return im.mat(mask, [[2], [3]] if mask.shape[1] == 1 else [[1], [2], [3]], batch)


@onnx_op("RotaryEmbedding", since=23, integers=True)
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


def rotate(
    im: ImportContext,
    x: Tensor,
    tables: Sequence[Value],
    position_ids: Value | None,
    interleaved: int,
    num_heads: int,
    rotated: int,
) -> Value:
    """RotaryEmbed on the first `rotated` elements of each head (0: all of them)."""
    heads = split_heads(im, x, num_heads)
    size = heads.shape[3]
    if position_ids is not None:
        tables = [gather(im, table, position_ids, axis=0) for table in tables]
    if not isinstance(size, int) or not 0 <= rotated <= size:
        raise im.refuse(f"{rotated} of {size} elements to rotate")
    part = heads if rotated in (0, size) else crop(im, heads, 3, 0, rotated)
    if any(t.rank != 3 or t.shape[1:] != (part.shape[2], (rotated or size) // 2) for t in tables):
        raise im.refuse(f"tables of shapes {', '.join(str(list(t.shape)) for t in tables)}")
    caches = [im.mat(table, [[1], [2]], [] if table.shape[0] == 1 else [0]) for table in tables]
    blob = im.layer("RotaryEmbed", im.mat(part, [[1], [2], [3]], [0]), *caches, interleaved=int(bool(interleaved)))
    turned: Value = im.wrap(blob, part.shape, [[1], [2], [3]], [0], x.dtype)
    if part is not heads:
        turned = concat(im, turned, crop(im, heads, 3, rotated, size), axis=3)
    return merge_heads(im, im.tensor(turned)) if x.rank == 3 else turned
