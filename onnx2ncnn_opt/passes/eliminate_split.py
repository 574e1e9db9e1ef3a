from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import rewrite

_PRIVATE = op("Split", "split", lambda split: not any(blob.is_output for blob in split.outputs))


@rewrite(_PRIVATE, exact=True, purpose="nets of other converters, and cut by hand")
def eliminate_split(split: Layer) -> tuple[Blob, ...]:
    """x ── Split (one output) ──   ⇒   x ──"""
    return (split.input,) * len(split.outputs)
