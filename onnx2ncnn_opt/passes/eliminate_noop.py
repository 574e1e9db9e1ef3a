from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import require, rewrite


@rewrite(op("Noop", "noop"), exact=True, purpose="nets of other converters")
def eliminate_noop(noop: Layer) -> tuple[Blob, ...]:
    """x, y ── Noop ── a, b   ⇒   x, y"""
    require(len(noop.inputs) == len(noop.outputs), f"Noop '{noop.name}' does not have as many inputs as outputs")
    return noop.inputs
