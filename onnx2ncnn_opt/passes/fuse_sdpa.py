"""`fuse_sdpa`, `fuse_sdpa_scale`: attention written as matrix products, and factors before it."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, Eltwise, Interp
from onnx2ncnn_opt.ir.dim import Dim, Shape, fitting, is_fixed, known, left_of_table, smaller
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.half import INFINITE
from onnx2ncnn_opt.ir.permute import order_type
from onnx2ncnn_opt.ir.ranges import Ranges
from onnx2ncnn_opt.ir.weight import Encoding
from onnx2ncnn_opt.passes._constants import is_constant, with_data
from onnx2ncnn_opt.passes._fold import one_factor
from onnx2ncnn_opt.passes._linear import add, factor, mul, times
from onnx2ncnn_opt.passes._views import step_of
from onnx2ncnn_opt.rewrite.pattern import Op, op
from onnx2ncnn_opt.rewrite.rule import (
    Edits,
    Refused,
    Replacement,
    attempt,
    graph_pass,
    known_shape,
    needed,
    require,
    rewrite,
)

SDPA = op("SDPA", kv_cache=0, int8_scale_term=0)
_SCALING = times("x")
# The largest width of queries, in keys: measured, SDPA is faster at 4 and equal at 8.
_WIDEST = 4
_LAST_TWO = order_type((0, 2, 1))


def _softmax(logits: Op, axis: int) -> Op:
    """Return the softmax over an axis, counted from the end."""

    def fits(softmax: Layer) -> bool:
        shape = softmax.input.shape
        return shape is not None and softmax["axis"] in (axis, len(shape) + axis)

    return op("Softmax", "", fits)(logits)


def attention() -> Iterator[Op]:
    """Yield Softmax(q @ k * scale + mask) @ v, with and without factor and mask."""
    product = op("MatMul", "product")("q", "k")
    scores = product, times(product, "scale"), op("Scale", "scale", _is_by_head, bias_term=0)(product)
    capped = [times(op("TanH", "cap")(score)) for score in scores]
    capped += [add(score, "mask") for cap in capped for score in (cap, mul(cap, "rows"))]
    for logits in (*scores, *(add(score, "mask") for score in scores), *_weighted(product), *capped):
        yield op("MatMul", "root")(_softmax(logits, -1), "v")


def _is_by_head(scale: Layer) -> bool:
    """Return True if a Scale has its own factors, one for each matrix of scores."""
    return bool(scale["scale_data_size"] > 0) and len(scale.input.shape or ()) == 3


def transposed_attention() -> Iterator[Op]:
    """Yield v @ Softmax(...).T: the same with columns instead of rows, as after convolutions."""
    for pattern in attention():
        weights, v = pattern.inputs or ()
        yield pattern._replace(params={"transB": 1})(v, weights)


def turned_attention() -> Iterator[Op]:
    """Yield Softmax(k @ q * scale + mask).T @ v, with the softmax over the rows, as Keras writes it."""
    product = op("MatMul", "product")("k", "q")
    scores = product, times(product, "scale")
    for logits in (*scores, *(add(score, "mask") for score in scores)):
        yield op("MatMul", "root")(op("Permute", "turned", order_type=_LAST_TWO)(_softmax(logits, -2)), "v")


def _weighted(scores: Op) -> Iterator[Op]:
    """Yield the scores times a number, plus the mask, in one layer."""
    yield op("Eltwise", "scale", lambda sum: [*sum["coeffs"][1:]] == [1], op_type=Eltwise.SUM)(scores, "mask")
    yield op("Eltwise", "scale", lambda sum: [*sum["coeffs"][:-1]] == [1], op_type=Eltwise.SUM)("mask", scores)


def _factor(product: Layer, scale: Layer | None) -> float:
    """Return the common factor of the scores."""
    if scale is None or scale.type == "Scale":
        return 1.0
    return float(scale["coeffs"][scale.inputs.index(product.output)]) if scale.type == "Eltwise" else factor(scale)


def _scale_param(scale: float) -> float:
    """Return SDPA's parameter `scale`; refuse 0 in float32, which means ncnn's default."""
    require(np.float32(scale), "a scale of 0 is the default scale in ncnn")
    return scale


@rewrite(*attention(), *transposed_attention(), *turned_attention(), exact=False)
def fuse_sdpa(
    q: Blob,
    k: Blob,
    v: Blob,
    product: Layer,
    root: Layer,
    scale: Layer | None = None,
    mask: Blob | None = None,
    cap: Layer | None = None,
    turned: Layer | None = None,
) -> list[Layer]:
    """Softmax(q @ k * scale + mask) @ v   ⇒   SDPA(q, k, v, mask)

    Heads may share keys and values, if all heads share the same. Constant masks are broadcast to their full size, and
    masks with one value for each key get a row for each query. A separate factor for each head moves to the queries.
    """
    if cap is not None:
        raise Refused(f"TanH '{cap.name}' caps the scores, and SDPA cannot")
    heads = root.output.shape[0] if root.output.shape else None
    require(known_shape(q, 3)[0] == heads, f"'{q.name}' is shared by several heads")
    require(known_shape(k, 3)[0] == known_shape(v, 3)[0], f"'{k.name}' and '{v.name}' are shared in different ways")
    before, is_transposed = list[Layer](), root.inputs[0] is v

    def put(layer: Layer) -> Blob:
        before.append(layer)
        return layer.output

    if scale is not None and scale.type == "Scale":
        q = put(_by_head(q, scale, product))
    if not product["transB"]:
        q, k = (q, put(_swapped(k, root))) if turned is None else (put(_swapped(q, root)), k)
    if root["transB"]:
        v = put(_swapped(v, root))
    sdpa = Layer("SDPA", root.name, [q, k, v], (), {"scale": _scale_param(_factor(product, scale))})
    if mask is not None:
        require(not _is_divided(mask), f"'{mask.name}' is too low for SDPA, which divides it by its scale on ARM")
        scores = product.output if turned is None else turned.output
        mask = mask if turned is None else put(_swapped(mask, root))
        sdpa = sdpa.having(inputs=[q, k, v, _mask(mask, q, scores, put)], attn_mask=1)
    if not is_transposed:
        return [*before, sdpa]
    sdpa.outputs = (Blob(f"{root.output.name}_t", None, root.output.batch),)
    return [*before, sdpa, Layer("Permute", f"{root.name}_t", sdpa.outputs, (), {"order_type": _LAST_TWO})]


def _is_divided(mask: Blob) -> bool:
    """Return True for a product with the lowest float32 that `limit_mask_fill` keeps: its factor may be negative."""
    product = mask.computed_by(BinaryOp.MUL, scalar=True)
    if product is None or product["b"] > -INFINITE:
        return False
    factor = Ranges().of(product.input)
    return not factor.is_integer and factor.low < 0


def _by_head(q: Blob, scale: Layer, product: Layer) -> Layer:
    """Return the Scale of the scores, applied to the queries; refused if these are far larger than the scores."""
    width, keys = q.known_shape[-1], product.output.known_shape[-1]
    pays = isinstance(width, int) and isinstance(keys, int) and width <= _WIDEST * keys
    require(pays, f"'{scale.name}' would multiply far more numbers before the product")
    return scale.having(inputs=[q], outputs=[Blob(f"{q.name}_scaled", q.shape, q.batch)])


def _swapped(blob: Blob, root: Layer) -> Layer:
    """Return a Permute that exchanges rows and columns of each head."""
    shape = None if blob.shape is None else (blob.shape[0], *blob.shape[:0:-1])
    transposed = Blob(f"{blob.name}_t", shape, blob.batch)
    return Layer("Permute", f"{root.name}_{blob.name}", [blob], [transposed], {"order_type": _LAST_TWO})


def _mask(mask: Blob, q: Blob, scores: Blob, put: Callable[[Layer], Blob]) -> Blob:
    """Return the mask in SDPA's shape: (queries, keys) for all heads, or (heads, queries, keys)."""
    # A mask with fewer dims would broadcast along the heads.
    heads, *matrix = known_shape(mask, 3)
    full = scores.known_shape
    if mask.shape == full:
        return mask
    constant, out = mask.producer, Blob(f"{mask.name}_mask", None, mask.batch)
    if constant is None or not is_constant(mask) or not is_fixed(full):
        is_row = matrix[0] == 1 and fitting(matrix[1], full[2]) == full[2] and heads in (1, full[0])
        fits = is_row or (heads == 1 and _fits(tuple(matrix), full[1:]))
        require(fits, f"'{mask.name}' is not one value for each score")
        rows = put(_rows(mask, q, *full[1:])) if is_row and full[1] != 1 else mask
        return put(Layer("Squeeze", rows.name, [rows], [out], {"axes": (0,)})) if heads == 1 else rows
    block = constant.weights.stored("data")
    require(block.encoding is Encoding.FP32, f"'{constant.name}' is stored in another encoding")
    old = known(mask.known_shape)
    data = np.broadcast_to(block.data.reshape(old), (old[0], *full[1:]))
    return put(with_data(constant, data[0] if heads == 1 else data).having(outputs=[out]))


def _rows(mask: Blob, q: Blob, queries: Dim, keys: Dim) -> Layer:
    """Return a layer that repeats a row for each query."""
    rows = Blob(f"{mask.name}_rows", (mask.known_shape[0], queries, keys), mask.batch)
    params: dict[str, Any] = {"resize_type": Interp.NEAREST}
    if is_fixed((queries, keys)):
        return Layer("Interp", rows.name, [mask], [rows], {**params, "output_height": queries, "output_width": keys})
    if queries == keys:  # no other input, so that all attentions share the layer
        return Layer("Interp", rows.name, [mask], [rows], {**params, "size_expr": "0w,0w"})
    return Layer("Interp", rows.name, [mask, _first_rows(q, queries)], [rows], {**params, "size_expr": "0w,1h"})


def _first_rows(q: Blob, queries: Dim) -> Blob:
    """Return the first blob on the way to the queries that has their rows, because fusions may remove the others."""
    blob = first = q
    while blob.producer is not None and len(blob.producer.inputs) == 1:
        blob = blob.producer.input
        first = blob if (blob.shape or ())[-2:-1] == (queries,) and blob.batch == q.batch else first
    return first


def _fits(mask: Shape, scores: Shape) -> bool:
    """Return True if a mask has the size of the scores whenever they can be added."""
    (rows, columns), (queries, keys) = mask, scores
    if fitting(columns, keys) != keys:
        return False
    # Rows that are cut at the same end as the columns are whole wherever the columns are.
    left = left_of_table(rows, queries)
    return fitting(rows, queries) == queries or (left is not None and smaller(left + keys, keys) == columns)


@graph_pass(exact=False, purpose="one pass less over the queries; the scale costs SDPA nothing")
def fuse_sdpa_scale(graph: Graph) -> Edits:
    """SDPA(q * c, k, v)   ⇒   SDPA(q, k, v) with another scale

    The same for a factor of the keys, and with views between.
    """
    for layer in graph.layers:
        sdpa = layer
        for i in (0, 1) if SDPA.fits(sdpa) else ():
            sdpa = yield from attempt(sdpa, _without_factor, sdpa, i)


def _without_factor(sdpa: Layer, position: int) -> Replacement | None:
    """Return the SDPA with the factor of an input folded into its scale; None without a factor."""
    blob = sdpa.inputs[position]
    scaling = scaling_of(blob)
    if scaling is None:
        return None
    width = blob.shape[-1] if blob.shape else None
    scale = sdpa["scale"] or (width**-0.5 if isinstance(width, int) else None)
    scale = needed(scale, f"the scale depends on the width of '{blob.name}', which is dynamic")
    inputs = [scaling.input if b is scaling.output else b for b in sdpa.inputs]
    new = sdpa.having(inputs=inputs, scale=_scale_param(one_factor(scale, factor(scaling))))
    return Replacement((scaling, sdpa), takes={sdpa: new}, reads={scaling.output: scaling.input})


def scaling_of(blob: Blob) -> Layer | None:
    """Return the product with a number that computes a blob, before views, if nothing else reads it; else None."""
    while blob.uses == 1 and blob.producer is not None:
        layer = blob.producer
        if _SCALING.fits(layer):
            return layer
        if step_of(layer) is None:
            return None
        blob = layer.input
    return None
