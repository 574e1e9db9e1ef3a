from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes.eliminate_flatten_after_global_pooling import GLOBAL_POOLING
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import require, rewrite

_UNSET, _NO_BATCH = -233, 233
_INFERRED, _SAME = -1, 0


@rewrite(
    op("Reshape", "reshape", h=_UNSET, d=_UNSET, c=_UNSET, shape_expr="")(GLOBAL_POOLING),
    exact=True,
    purpose="nets of other converters; the importer knows the shape after ncnn's global pooling",
)
def eliminate_reshape_after_global_pooling(reshape: Layer, pool: Layer) -> Blob:
    """x ── Pooling (global) ── Reshape (1-D) ──   ⇒   x ── Pooling (global) ──"""
    moves_batch = any(reshape[name] != _NO_BATCH for name in ("input_batch_axis", "output_batch_axis"))
    require(not moves_batch, f"'{reshape.name}' moves the batch axis")
    same = reshape["w"] in (_INFERRED, _SAME) or pool.output.shape == (reshape["w"],)
    require(same, f"'{pool.output.name}' is not known to have {reshape['w']} elements")
    return pool.output
