from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.rewrite.pattern import kept, op
from onnx2ncnn_opt.rewrite.rule import rewrite

# Its output is 1-D for any input.
GLOBAL_POOLING = kept(op(("Pooling", "Pooling1D", "Pooling3D"), "pool", global_pooling=1))


@rewrite(
    op("Flatten")(GLOBAL_POOLING),
    exact=True,
    purpose="nets of other converters; the importer knows the shape after ncnn's global pooling",
)
def eliminate_flatten_after_global_pooling(pool: Layer) -> Blob:
    """x ── Pooling (global) ── Flatten ──   ⇒   x ── Pooling (global) ──"""
    return pool.output
