from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.rewrite.pattern import Op, op
from onnx2ncnn_opt.rewrite.rule import rewrite

INFINITE = 3.402823466e38


def _clip(capture: str, x: Op | str) -> Op:
    return op(("Clip", "ReLU"), capture, lambda layer: layer.type == "Clip" or layer["slope"] == 0)(x)


def _bounds(layer: Layer) -> tuple[float, float]:
    return (0.0, INFINITE) if layer.type == "ReLU" else (layer["min"], layer["max"])


@rewrite(
    _clip("outer", _clip("inner", "x")),
    exact=True,
    purpose="quantised models: int8 layers whose inputs have one sign gain a bit",
)
def fuse_clip(x: Blob, outer: Layer, inner: Layer) -> Layer:
    """x ── Clip or ReLU ── Clip or ReLU ──   ⇒   x ── Clip or ReLU ──"""
    low, high = _bounds(outer)
    least, most = (min(max(bound, low), high) for bound in _bounds(inner))
    if (least, most) == (0.0, INFINITE) and "ReLU" in (outer.type, inner.type):
        return Layer("ReLU", outer.name, [x])
    return Layer("Clip", outer.name, [x], (), {"min": least, "max": most})
