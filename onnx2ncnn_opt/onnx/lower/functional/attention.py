"""Attention over heads, and rotary embeddings."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.dim import Dim, Sym, axis_index, exact_div, product
from onnx2ncnn_opt.ir.graph import Blob
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.activation import softmax
from onnx2ncnn_opt.onnx.lower.functional.binary import arithmetic, binary, number, spread
from onnx2ncnn_opt.onnx.lower.functional.cast import FLT_MAX
from onnx2ncnn_opt.onnx.lower.functional.concat import concat
from onnx2ncnn_opt.onnx.lower.functional.crop import crop
from onnx2ncnn_opt.onnx.lower.functional.gather import gather
from onnx2ncnn_opt.onnx.lower.functional.logic import and_, greater_or_equal
from onnx2ncnn_opt.onnx.lower.functional.matmul import matmul
from onnx2ncnn_opt.onnx.lower.functional.reduce import reduce
from onnx2ncnn_opt.onnx.lower.functional.views import transposed
from onnx2ncnn_opt.onnx.lower.functional.where import where
from onnx2ncnn_opt.onnx.lower.memory_budget import require_room
from onnx2ncnn_opt.onnx.value import Constant, SymbolicTensor, Tensor, Value

_HEADS = (0, 2, 1, 3)
_HEAD_DIMS = ((1,), (2,), (3,))  # a Mat of [heads, length, size], whose batch is axis 0
_HIDDEN = -5e7  # far below any score, and above -99999999, where Vulkan's Softmax begins (softmax_reduce_max.comp)


class KeyWindow(NamedTuple):
    """The window of keys that a query sees: at most `left` before and `right` after it; -1 is no bound."""

    causal: bool = False
    left: int = -1
    right: int = -1

    def bias(self, im: ImportContext, heads: Sequence[Tensor], keys: Dim | Value) -> Value | None:
        """Return 0 for visible keys and -inf for others; None if all are visible.

        `keys` is the number of keys before the first query; or a tensor, the number of keys without padding for each
        item of the batch. The last of these keys are the queries' own.
        """
        if isinstance(keys, int | Sym) and not (self.causal or self.left >= 0 or self.right >= 0):
            return None
        is_open = any(isinstance(size, Sym) for x in heads[:2] for size in x.shape[2:3])
        if isinstance(keys, Sym) or (isinstance(keys, int) and is_open):
            return self._of_dynamic_lengths(im, heads, keys)
        rows, columns = im.fixed([x.shape[2] for x in heads[:2]], "a mask of keys of dynamic length")
        require_room(rows * columns, "a mask")
        distance = np.arange(columns) - np.arange(rows)[:, None]
        # A key is visible if low <= keys before the first query <= high.
        right = min([bound for bound, used in ((0, self.causal), (self.right, self.right >= 0)) if used], default=None)
        low = np.full(distance.shape, -rows) if right is None else distance - right
        high = distance + (self.left if self.left >= 0 else np.inf)
        if isinstance(keys, int):
            count: Value = Constant(np.array(keys))
        else:
            low, high = np.maximum(low, np.arange(columns) - rows + 1) + rows, high + rows
            count = im.reshape(keys, (*keys.shape, 1, 1, 1))
        if isinstance(count, Constant):
            return bias(im, Constant((low <= count.array) & (count.array <= high)))
        bounds = greater_or_equal(im, count, Constant(low.astype(np.float32)))
        if self.left >= 0:
            bounds = and_(im, bounds, greater_or_equal(im, Constant(high.astype(np.float32)), count))
        return bias(im, bounds)

    def _of_dynamic_lengths(self, im: ImportContext, heads: Sequence[Tensor], before: Dim) -> Value:
        """Compare the positions of queries and keys, which layers count at run time."""
        query, key = positions(im, before, heads[0].shape[2], 1), positions(im, 0, heads[1].shape[2], 0)
        bounds = [greater_or_equal(im, query, key)] if self.causal else []
        if self.left >= 0:
            first = binary(im, BinaryOp.SUB, query, number(self.left))
            bounds.append(greater_or_equal(im, key, first))
        if self.right >= 0 and not self.causal:
            last = binary(im, BinaryOp.ADD, query, number(self.right))
            bounds.append(greater_or_equal(im, last, key))
        visible = functools.reduce(functools.partial(and_, im), bounds)
        return where(im, visible, number(0), number(-np.inf))


def positions(im: ImportContext, first: Dim, count: Dim, axes: int) -> Tensor:
    """Return `count` numbers from `first` on along an axis that is followed by `axes` axes of size 1."""
    cells = np.full((1,) * (axes + 1), axis_index(axes) + first, dtype=object)
    return im.tensor(SymbolicTensor(cells, (count, *(1,) * axes), np.dtype(np.int64)))


def with_past(
    im: ImportContext, heads: Sequence[Tensor], past_key: Tensor | None, past_value: Tensor | None
) -> tuple[list[Tensor], Dim]:
    """Return queries, keys and values, with past keys and values prepended, and the length of the past."""
    q, k, v = heads
    if past_key is None or past_value is None:
        return [*heads], 0
    k, v = (im.tensor(concat(im, *pair, axis=2)) for pair in ((past_key, k), (past_value, v)))
    return [q, k, v], past_key.shape[2]


def lengthened(im: ImportContext, mask: Value | None, length: Dim) -> Value | None:
    """Return a mask extended to the length of the keys: it hides the last keys."""
    if mask is None or mask.rank == 0 or not isinstance(length, int) or not isinstance(mask.shape[-1], int):
        return mask
    missing = length - mask.shape[-1]
    if missing <= 0 or mask.shape[-1] == 1:
        return mask
    return concat(im, mask, spread(im, number(-np.inf), (*mask.shape[:-1], missing)), axis=mask.rank - 1)


def split_heads(im: ImportContext, x: Value, count: int | None) -> Tensor:
    """Return [batch, length, heads * size] as [batch, heads, length, size]; keep a tensor of four axes."""
    x = im.tensor(x)
    if x.rank == 4:
        return x
    width = x.shape[-1]
    if x.rank != 3 or not count or not isinstance(width, int) or width % count:
        raise im.invalid(f"an operand of shape {list(x.shape)} in {count} heads")
    return im.tensor(im.reshape(x, (*x.shape[:2], count, width // count))).transpose(_HEADS)


def merge_heads(im: ImportContext, x: Tensor) -> Value:
    """Return the inverse of `split_heads`."""
    batch, heads, length, size = x.shape
    return im.reshape(x.transpose(_HEADS), (batch, length, heads * size))


def bias(im: ImportContext, mask: Value | None) -> Value | None:
    """Return a mask as a bias of the scores; a bool becomes 0 and -inf."""
    if mask is None or mask.dtype != np.bool_:
        return mask
    if isinstance(mask, Constant):
        return Constant(np.where(mask.array, np.float32(0), np.float32(-np.inf)))
    return where(im, mask, number(0), number(-np.inf))


def attend(im: ImportContext, heads: Sequence[Tensor], mask: Value | None, scale: float | None) -> Tensor:
    """SDPA of queries, keys and values [batch, heads, length, size]."""
    q, k, v = heads
    _check_heads(im, heads)
    if scale == 0:
        raise im.refuse("the scale is 0, which is the default scale in ncnn", "export it with another scale")
    blobs = [im.mat(x, _HEAD_DIMS, [0]) for x in heads]
    if mask is not None:
        blobs.append(_mask_blob(im, mask, q, k))
    size = q.shape[3]
    default = isinstance(size, int) and scale is not None and np.isclose(scale, size**-0.5, rtol=1e-7, atol=0)
    blob = im.layer("SDPA", *blobs, attn_mask=int(mask is not None), scale=0.0 if scale is None or default else scale)
    return im.wrap(blob, (*q.shape[:3], v.shape[3]), _HEAD_DIMS, [0], q.dtype)


def capped(
    im: ImportContext, heads: Sequence[Tensor], mask: Value | None, scale: float | None, cap: float, mode: int
) -> tuple[Tensor, Value]:
    """Attention in several layers, and the scores that ONNX's `mode` selects: raw, capped, masked, or probabilities."""
    q, k, v = heads
    _check_heads(im, heads)
    if scale is None:
        [width] = im.fixed(q.shape[3:], "heads of dynamic size")
        scale = float(width) ** -0.5
    rows = exact_div(product(q.shape[1:3]), k.shape[1])  # the heads that share keys are rows of one matrix
    assert rows is not None
    matrices = *k.shape[:2], rows
    products = matmul(im, im.reshape(q, (*matrices, q.shape[3])), transposed(k))
    scores = binary(im, BinaryOp.MUL, im.reshape(products, (*q.shape[:3], k.shape[2])), number(scale))
    steps: list[Value] = [scores]
    if cap:
        tanh = im.unary(binary(im, BinaryOp.MUL, scores, number(1 / cap)), "TanH")
        scores = binary(im, BinaryOp.MUL, tanh, number(cap))
    steps += [scores, scores if mask is None else binary(im, BinaryOp.ADD, scores, mask)]
    if mask is not None:
        scores = binary(im, BinaryOp.ADD, scores, finite(im, mask))
    probabilities = softmax(im, scores, -1)
    if mask is not None:
        probabilities = binary(im, BinaryOp.MUL, probabilities, any_key(im, mask))
    steps.append(probabilities)
    y = matmul(im, im.reshape(probabilities, (*matrices, k.shape[2])), v)
    return im.tensor(im.reshape(y, (*q.shape[:3], v.shape[3]))), steps[mode]


def finite(im: ImportContext, mask: Value) -> Value:
    """Return the mask with `_HIDDEN` instead of -inf: Softmax of a row of -inf, on Vulkan also of -1e8, is NaN."""
    return arithmetic(im, BinaryOp.MAX, mask, number(_HIDDEN))


def any_key(im: ImportContext, mask: Value) -> Value:
    """Return 1 for rows of a mask with a visible key, 0 for others."""
    if isinstance(mask, Constant):
        return Constant((mask.array.max(-1, keepdims=True) > -np.inf).astype(np.float32))
    return im.unary(reduce(im, mask, "ReduceMax", (-1,), 1), "Threshold", threshold=-FLT_MAX)


def _check_heads(im: ImportContext, heads: Sequence[Tensor]) -> None:
    q, k, v = heads
    if any(x.rank != 4 for x in heads) or q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3]:
        reason = f"operands of shapes {', '.join(str(list(x.shape)) for x in heads)}"
        raise im.invalid(reason, zip((*q.shape[3:], *k.shape[:3]), (*k.shape[3:], *v.shape[:3]), strict=False))
    groups = q.shape[1], k.shape[1]
    if not isinstance(groups[0], int) or not isinstance(groups[1], int) or groups[0] % groups[1]:
        raise im.invalid(f"{groups[0]} heads cannot share {groups[1]} of keys")


def _mask_blob(im: ImportContext, mask: Value, q: Tensor, k: Tensor) -> Blob:
    """Return the mask as a Mat with all rows and columns; heads and batch only if the mask differs between them."""
    full = (*q.shape[:3], k.shape[2])
    if mask.rank < 4:
        mask = im.reshape(mask, (1,) * (4 - mask.rank) + mask.shape)
    if mask.rank != 4 or any(n not in (1, m) for n, m in zip(mask.shape, full, strict=True)):
        pairs = [(n, m) for n, m in zip(mask.shape, full, strict=False) if n != 1]
        raise im.invalid(f"a mask of shape {list(mask.shape)} for scores of shape {list(full)}", pairs)
    if mask.shape[2:] != full[2:]:
        sides = [size for size in full[2:] if isinstance(size, int)]
        if len(sides) < 2:
            mask = spread(im, mask, (*mask.shape[:2], *full[2:]))
        else:
            mask = arithmetic(im, BinaryOp.ADD, mask, Constant(np.zeros(sides, np.float32)))
    return im.mat(mask, [[2], [3]] if mask.shape[1] == 1 else _HEAD_DIMS, [] if mask.shape[0] == 1 else [0])


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
        raise im.invalid(f"{rotated} of {size} elements to rotate")
    part = heads if rotated in (0, size) else crop(im, heads, 3, 0, rotated)
    expected = part.shape[2], (rotated or size) // 2
    if any(t.rank != 3 or t.shape[1:] != expected for t in tables):
        pairs = [pair for t in tables for pair in zip(t.shape[1:], expected, strict=False)]
        raise im.invalid(f"tables of shapes {', '.join(str(list(t.shape)) for t in tables)}", pairs)
    caches = [im.mat(table, [[1], [2]], [] if table.shape[0] == 1 else [0]) for table in tables]
    blob = im.layer("RotaryEmbed", im.mat(part, _HEAD_DIMS, [0]), *caches, interleaved=int(bool(interleaved)))
    rotated_part: Value = im.wrap(blob, part.shape, _HEAD_DIMS, [0], x.dtype)
    if part is not heads:
        rotated_part = concat(im, rotated_part, crop(im, heads, 3, rotated, size), axis=3)
    return merge_heads(im, im.tensor(rotated_part)) if x.rank == 3 else rotated_part
