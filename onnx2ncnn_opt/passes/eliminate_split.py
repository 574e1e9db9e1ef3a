from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import rewrite


def _passes_on(split: Layer) -> bool:
    """Return True if the Split does not give its blob a name that the net's caller knows."""
    return not any(blob.is_output for blob in split.outputs)


@rewrite(op("Split", "split", _passes_on), exact=True, purpose="nets of other converters, and cut by hand")
def eliminate_split(split: Layer) -> tuple[Blob, ...]:
    """x ── Split (one output) ──   ⇒   x ──"""
    return (split.input,) * len(split.outputs)
