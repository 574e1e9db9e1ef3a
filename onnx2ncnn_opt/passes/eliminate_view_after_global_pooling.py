from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.rewrite.pattern import kept, op
from onnx2ncnn_opt.rewrite.rule import require, rewrite

_UNSET, _NO_BATCH = -233, 233
_INFERRED, _SAME = -1, 0
# Its output is 1-D for any input.
_POOLING = kept(op(("Pooling", "Pooling1D", "Pooling3D"), "pool", global_pooling=1))


@rewrite(
    op("Flatten", "view")(_POOLING),
    op("Reshape", "view", h=_UNSET, d=_UNSET, c=_UNSET, shape_expr="")(_POOLING),
    exact=True,
    purpose="nets of other converters whose sizes are unknown",
)
def eliminate_view_after_global_pooling(view: Layer, pool: Layer) -> Blob:
    """x ── Pooling (global) ── Flatten, Reshape (1-D) ──   ⇒   x ── Pooling (global) ──"""
    if view.type == "Reshape":
        moves_batch = any(view[name] != _NO_BATCH for name in ("input_batch_axis", "output_batch_axis"))
        require(not moves_batch, f"'{view.name}' moves the batch axis")
        same = view["w"] in (_INFERRED, _SAME) or pool.output.shape == (view["w"],)
        require(same, f"'{pool.output.name}' is not known to have {view['w']} elements")
    return pool.output
