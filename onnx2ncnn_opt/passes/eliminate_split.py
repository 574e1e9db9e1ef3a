from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import rewrite


def _has_no_public_name(split: Layer) -> bool:
    """Return True if no output of the Split is an output of the net."""
    return not any(blob.is_output for blob in split.outputs)


@rewrite(op("Split", "split", _has_no_public_name), exact=True, purpose="nets of other converters, and cut by hand")
def eliminate_split(split: Layer) -> tuple[Blob, ...]:
    """x ── Split (one output) ──   ⇒   x ──"""
    return (split.input,) * len(split.outputs)
