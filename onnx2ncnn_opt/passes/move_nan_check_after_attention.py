from onnx2ncnn_opt.ir.codes import BinaryOp, Reduction
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._linear import add, factor
from onnx2ncnn_opt.passes.fuse_sdpa import scaling_of
from onnx2ncnn_opt.rewrite.pattern import Op, Pattern, kept, op
from onnx2ncnn_opt.rewrite.rule import known_shape, require, rewrite

# The importer treats scores below this as masked.
_LEAST = -30000.0
_LARGEST = op("Reduction", "largest", operation=Reduction.MAX, keepdims=1, reduce_all=0)


def _is_product(layer: Layer) -> bool:
    """Return True if a layer computes scores that are not masked yet."""
    while layer.type == "BinaryOp" and layer["with_scalar"] and layer.input.producer is not None:
        layer = layer.input.producer
    return layer.type in ("MatMul", "Gemm")


def _checked(x: Pattern) -> Op:
    """Return Softmax(x), times 0 in fully masked rows."""
    weights = op("Softmax", "softmax")(op("Clip", "", lambda clip: clip["max"] > 1e38, min=_LEAST)(x))
    open_rows = op("Threshold", threshold=_LEAST)(_LARGEST(x))
    return op("BinaryOp", op_type=BinaryOp.MUL, with_scalar=0)(weights, open_rows)


@rewrite(
    op("MatMul", "root")(
        _checked(add(kept(op(("MatMul", "BinaryOp"), "scores", _is_product)), "mask")._replace(capture="sum")), "v"
    ),
    exact=False,
    purpose="torch's attention with a mask of booleans: SDPA and caches, and the check once for all blocks",
)
def move_nan_check_after_attention(
    scores: Layer, mask: Blob, sum: Layer, softmax: Layer, largest: Layer, root: Layer
) -> list[Layer]:
    """(open * Softmax(scores + mask)) @ v   ⇒   open * (Softmax(scores + Clip(mask)) @ v)

    `open` is 0 in fully masked rows, and depends only on the mask. The Clip makes the mask finite. Its lower bound is
    the lowest that stays finite in fp16 after SDPA divides it by the scale.
    """
    shape = known_shape(root.output)
    sizes = known_shape(mask)
    require(len(sizes) == len(shape), f"'{mask.name}' broadcasts along other axes")
    last = len(shape) - 1
    require(softmax["axis"] % len(shape) == last, f"'{softmax.name}' is over another axis")
    require([axis % len(shape) for axis in largest["axes"]] == [last], f"'{largest.name}' looks at another axis")
    floor = _LEAST * min(1.0, _scale(scores))
    finite = Blob(f"{mask.name}_finite", sizes, mask.batch)
    rows = tuple(Blob(f"{mask.name}_{name}", (*sizes[:-1], 1), mask.batch) for name in ("largest", "open"))
    weights = Blob(f"{softmax.name}_masked", sum.output.shape, sum.output.batch)
    plain = Blob(f"{root.output.name}_plain", shape, root.output.batch)
    probabilities = Blob(f"{softmax.name}_weights", sum.output.shape, sum.output.batch)
    return [
        Layer("Clip", finite.name, [mask], [finite], {"min": floor}),
        largest.having(inputs=[finite], outputs=[rows[0]]),
        Layer("Threshold", rows[1].name, [rows[0]], [rows[1]], {"threshold": floor / 2}),
        sum.having(inputs=[finite if blob is mask else blob for blob in sum.inputs], outputs=[weights]),
        softmax.having(inputs=[weights], outputs=[probabilities]),
        root.having(inputs=[probabilities, root.inputs[1]], outputs=[plain]),
        Layer("BinaryOp", f"{root.name}_open", [plain, rows[1]], (), {"op_type": BinaryOp.MUL}),
    ]


def _scale(scores: Layer) -> float:
    """Return the factor of the scores, including the factors of queries and keys that `fuse_sdpa_scale` moves."""
    scale = 1.0
    while scores.type == "BinaryOp" and scores.input.producer is not None:
        scale *= factor(scores)
        scores = scores.input.producer
    for scaling in map(scaling_of, scores.inputs):
        scale *= factor(scaling) if scaling is not None else 1.0
    return abs(scale)
