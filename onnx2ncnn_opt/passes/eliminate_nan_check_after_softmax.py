import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, Eltwise, Reduction
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import known_shape, needed, require, rewrite

# Below this, the importer takes scores for masked.
_LEAST = -30000.0


def _keeps_rows(reduction: Layer) -> bool:
    return bool(reduction["operation"] == Reduction.MAX and reduction["keepdims"] and not reduction["reduce_all"])


_CHANCES = op("Softmax", "softmax")(op("Clip", "", lambda clip: clip["max"] > 1e38, min=_LEAST)("x"))
_OPEN_ROWS = op("Threshold", threshold=_LEAST)(op("Reduction", "largest", _keeps_rows)("x"))


@rewrite(
    op("BinaryOp", op_type=BinaryOp.MUL, with_scalar=0)(_CHANCES, _OPEN_ROWS),
    exact=True,
    purpose="attention with a mask, as torch.export writes it",
)
def eliminate_nan_check_after_softmax(x: Blob, softmax: Layer, largest: Layer) -> Layer:
    """Softmax(x) with 0 in rows that are -infinity   ⇒   x ── Softmax ──

    A Softmax is NaN where all of a row is masked with -infinity. So this is for masks that are constants and leave
    something of every row, and for scores that are not masked.
    """
    require(tuple(largest["axes"]) == (softmax["axis"],), f"'{largest.name}' looks at another axis")
    scores = needed(x.producer, f"'{x.name}' may be -infinity")
    if not _is_product(scores):
        require(_is_sum(scores), f"'{x.name}' may be -infinity")
        makers = [blob.producer for blob in scores.inputs]
        masks = [maker for maker in makers if maker is not None and maker.type == "MemoryData"]
        others = [maker for maker in makers if maker is None or maker.type != "MemoryData"]
        require(len(masks) == len(others) == 1, f"the mask of '{scores.name}' is not a constant")
        require(others[0] is not None and _is_product(others[0]), f"'{scores.name}' masks what may be masked already")
        _require_open_rows(masks[0], x, softmax["axis"])
    return softmax.having(inputs=[x])


def _is_product(layer: Layer) -> bool:
    """Return True if a layer makes scores that nothing has masked."""
    while layer.type == "BinaryOp" and layer["with_scalar"] and layer.input.producer is not None:
        layer = layer.input.producer
    return layer.type in ("MatMul", "Gemm")


def _is_sum(layer: Layer) -> bool:
    if layer.type == "Eltwise":
        return bool(layer["op_type"] == Eltwise.SUM and all(coeff > 0 for coeff in layer["coeffs"]))
    return layer.computes(BinaryOp.ADD, scalar=False)


def _require_open_rows(mask: Layer, x: Blob, axis: int) -> None:
    shape = known_shape(x)
    sizes = known_shape(mask.output)
    require(len(sizes) == len(shape), f"'{mask.name}' broadcasts along other axes")
    data: Array = mask.weights["data"].reshape([int(str(size)) for size in sizes])
    is_open = np.isfinite(data).any(axis=axis).all() and not (np.isnan(data) | np.isposinf(data)).any()
    require(is_open, f"'{mask.name}' leaves nothing of some rows")
