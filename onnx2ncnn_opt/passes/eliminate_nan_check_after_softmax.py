from __future__ import annotations

import numpy as np

from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.passes._fold import ADD, RSUB
from onnx2ncnn_opt.passes._linear import negated
from onnx2ncnn_opt.passes._statistics import known_shape
from onnx2ncnn_opt.rewrite.pattern import kept, op
from onnx2ncnn_opt.rewrite.rule import require, rewrite

_MAX, _MIN, _ABS, _LOG = 4, 5, 0, 8
_SUM = 1  # of Eltwise

_SOFTMAX = kept(op("Softmax", "softmax"))
_IS_NUMBER = op("Threshold", "", lambda layer: layer["threshold"] < 0)(op("UnaryOp", op_type=_ABS)(_SOFTMAX))
_IS_NAN = op("BinaryOp", op_type=RSUB, with_scalar=1, b=1.0)(_IS_NUMBER)
# -infinity for numbers, 0 for NaN.
_LIMITS = op("Log", "limit")(_IS_NAN), op("UnaryOp", "limit", op_type=_LOG)(_IS_NAN)


@rewrite(
    *(
        op("BinaryOp", op_type=_MIN, with_scalar=0)(upper, op("BinaryOp", op_type=_MAX, with_scalar=0)(_SOFTMAX, limit))
        for limit in _LIMITS
        for upper in negated(limit)
    ),
    exact=True,
    kept="attention with a mask, as torch.export writes it",
)
def eliminate_nan_check_after_softmax(softmax: Layer) -> Blob:
    """x ── Softmax ── 0 instead of NaN ──   ⇒   x ── Softmax ──

    A Softmax is NaN where all of a row is masked with -infinity. So this is for masks that are constants and leave
    something of every row, and for scores that are not masked.
    """
    scores = softmax.input.producer
    assert scores is not None
    if not _is_product(scores):
        require(_is_sum(scores), f"'{softmax.input.name}' may be -infinity")
        makers = [blob.producer for blob in scores.inputs]
        masks = [maker for maker in makers if maker is not None and maker.type == "MemoryData"]
        others = [maker for maker in makers if maker is None or maker.type != "MemoryData"]
        require(len(masks) == len(others) == 1, f"the mask of '{scores.name}' is no constant")
        require(others[0] is not None and _is_product(others[0]), f"'{scores.name}' masks what may be masked already")
        _require_open_rows(masks[0], softmax)
    return softmax.output


def _is_product(layer: Layer) -> bool:
    """Whether a layer makes scores that nothing has masked."""
    while layer.type == "BinaryOp" and layer["with_scalar"] and layer.input.producer is not None:
        layer = layer.input.producer
    return layer.type in ("MatMul", "Gemm")


def _is_sum(layer: Layer) -> bool:
    if layer.type == "Eltwise":
        return bool(layer["op_type"] == _SUM and all(coeff > 0 for coeff in layer["coeffs"]))
    return layer.type == "BinaryOp" and bool(layer["op_type"] == ADD and not layer["with_scalar"])


def _require_open_rows(mask: Layer, softmax: Layer) -> None:
    shape = known_shape(softmax.input)
    sizes = known_shape(mask.output)
    require(len(sizes) == len(shape), f"'{mask.name}' is laid along other axes")
    data: Array = mask.weights["data"].reshape([int(str(size)) for size in sizes])
    is_open = np.isfinite(data).any(axis=softmax["axis"]).all() and not (np.isnan(data) | np.isposinf(data)).any()
    require(is_open, f"'{mask.name}' leaves nothing of some rows")
