from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.half import INFINITE
from onnx2ncnn_opt.passes._linear import add, times
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import known_shape, require, rewrite

# The first sum is as large as the second.
_WHOLE = add("x", "a")._replace(
    where=lambda sum: all(user.output.shape == sum.output.shape for user in sum.output.users)
)
_SCALED = times("x")


def _is_lowest(layer: Layer) -> bool:
    """Return True for a limit of masked scores that absorbs any scores, as the lowest float32 does."""
    is_limit = layer.computes(BinaryOp.MAX, scalar=True) or (layer.type == "Clip" and layer["max"] >= INFINITE)
    is_masked = {user.type for user in layer.output.users} == {"Softmax"}
    return is_masked and is_limit and bool(layer["min" if layer.type == "Clip" else "b"] <= -INFINITE)


_LIMIT = op(("BinaryOp", "Clip"), "softmax", _is_lowest)


@rewrite(
    op("Softmax", "softmax")(add(_WHOLE, "b")),
    _LIMIT(add(_WHOLE, "b")),
    exact=False,
    purpose="attention with two masks: their sum is computed once for all layers and heads",
)
def fuse_masks(x: Blob, a: Blob, b: Blob, softmax: Layer) -> list[Layer]:
    """Softmax(scores + mask + mask)   ⇒   Softmax(scores + (mask + mask))

    For masks that all heads share; in attention also for others, such as ALiBi's, because SDPA takes one mask.
    """
    scores, *masks = sorted((x, a, b), key=lambda blob: (blob.shape != softmax.input.shape, not _is_product(blob)))
    require(scores is not b, "the last addend is as large as the scores")
    whole = known_shape(scores)
    for mask in masks:
        require(len(known_shape(mask)) == len(whole), f"'{mask.name}' has another rank")
        require(mask.batch == scores.batch, f"'{mask.name}' has another batch")
    # A mask broadcasts to the scores, so each of its sizes is 1 or that of the scores.
    sizes = zip(whole, *(mask.known_shape for mask in masks), strict=True)
    shape = tuple(1 if set(of_masks) == {1} else size for size, *of_masks in sizes)
    is_attention = _is_product(scores) and {user.type for user in softmax.output.users} == {"MatMul"}
    is_fused = (is_attention and len(whole) <= 3) or softmax.type != "Softmax"
    require(is_fused or shape != whole, "the masks together are as large as the scores")
    both = Layer("BinaryOp", f"{softmax.name}_mask", masks, [Blob(f"{softmax.name}_mask", shape, scores.batch)])
    masked = Blob(f"{softmax.input.name}_masked", softmax.input.shape, scores.batch)
    added = Layer("BinaryOp", f"{softmax.name}_add", [scores, both.output], [masked], {"op_type": BinaryOp.ADD})
    return [both, added, softmax.having(inputs=[masked])]


@rewrite(
    op("Softmax", "softmax")(_LIMIT._replace(capture="limit")(add("scores", "mask"))),
    exact=False,
    purpose="masks on phones: in fully masked rows, fp16 loses scores, and limit_mask_fill needs the mask alone",
)
def move_limit_before_scores(scores: Blob, mask: Blob, softmax: Layer, limit: Layer) -> list[Layer]:
    """Softmax(max(scores + mask, lowest))   ⇒   Softmax(scores + max(mask, lowest))"""
    require(_is_product(scores), f"'{scores.name}' is no product of queries and keys")
    lowest = Blob(f"{mask.name}_limited", mask.shape, mask.batch)
    masked = Blob(f"{mask.name}_masked", limit.output.shape, scores.batch)
    added = Layer("BinaryOp", f"{softmax.name}_add", [scores, lowest], [masked], {"op_type": BinaryOp.ADD})
    return [Layer(limit.type, limit.name, [mask], [lowest], limit.params), added, softmax.having(inputs=[masked])]


def _is_product(blob: Blob) -> bool:
    """Return True for the product of queries and keys, also times a number."""
    layer = blob.producer
    scores = layer.input if layer is not None and _SCALED.fits(layer) else blob
    return scores.made_by("MatMul") is not None
