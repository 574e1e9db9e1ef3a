"""Matrix products."""

from __future__ import annotations

from onnx2ncnn_opt.onnx import items
from onnx2ncnn_opt.onnx.fold import bounds
from onnx2ncnn_opt.onnx.items import ItemsMixed, NodeView
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.matmul import gemm, matmul
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Value


def _rows(seen: NodeView) -> int:
    """Items that are rows of the first matrix."""
    seen.only(0, 2)
    added = seen.axis(2)
    if seen.axis(0) != (1 if seen.number("transA", 0) else 0) or added not in (0, None):
        raise ItemsMixed
    if added is None and len(seen.operands) > 2 and seen.operands[2] is not None:
        shape = seen.shape(2)
        if len(shape) > 1 and shape[-2] != 1:
            raise ItemsMixed
    elif added == 0 and len(seen.shape(2)) != 2:
        raise ItemsMixed
    return 0


onnx_op("Gemm", since=7, items=_rows, folds=bounds.gemm)(gemm)


@onnx_op("MatMul", items=items.product_of(0, 1), folds=bounds.matmul)
def matmul_op(im: ImportContext, a: Value, b: Value) -> Value:
    """MatMul; with a constant matrix on the right InnerProduct or Gemm."""
    return matmul(im, a, b)
