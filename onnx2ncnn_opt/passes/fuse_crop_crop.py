from __future__ import annotations

from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.passes._crops import cropped, ranges
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import require, rewrite


@rewrite(op("Crop", "outer")(op("Crop", "inner")("x")), exact=True, purpose="slices of slices, and assignments to them")
def fuse_crop_crop(outer: Layer, inner: Layer) -> Layer:
    """x ── Crop ── Crop ──   ⇒   x ── Crop ──

    Of one axis the ranges add up, others stand side by side.
    """
    kept, parts = ranges(inner), ranges(outer)
    require(kept is not None and parts is not None, "what a Crop keeps is not known")
    assert kept is not None
    assert parts is not None
    both = dict(kept)
    for axis, (start, end) in parts.items():
        before = both[axis][0] if axis in both else 0
        both[axis] = before + start, before + end
    return cropped(outer, inner.input, both)
