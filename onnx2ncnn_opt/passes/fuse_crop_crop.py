from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.passes._crops import cropped, ranges
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import needed, rewrite


@rewrite(op("Crop", "outer")(op("Crop", "inner")("x")), exact=True, purpose="slices of slices, and assignments to them")
def fuse_crop_crop(outer: Layer, inner: Layer) -> Layer:
    """x ── Crop ── Crop ──   ⇒   x ── Crop ──

    Ranges of the same axis are combined; ranges of different axes are joined.
    """
    reason = "the range of a Crop is unknown"
    both = dict(needed(ranges(inner), reason))
    for axis, (start, end) in needed(ranges(outer), reason).items():
        before = both[axis][0] if axis in both else 0
        both[axis] = before + start, before + end
    return cropped(outer, inner.input, both)
