from dataclasses import replace

from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.passes._crops import ends_cut
from onnx2ncnn_opt.passes._families import CONVOLUTIONS
from onnx2ncnn_opt.passes._windows import slides, window_params
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import known_shape, needed, require, rewrite


@rewrite(
    op("Crop", "crop")(op(CONVOLUTIONS, "conv")),
    exact=False,
    purpose="causal convolutions, which pad both ends and cut off one (Chomp1d); one layer less",
)
def fuse_convolution_crop(crop: Layer, conv: Layer) -> Layer:
    """x ── Convolution ── Crop ──   ⇒   x ── Convolution ── (less padding)"""
    ends = dict(needed(ends_cut(crop), "the range of the Crop is unknown"))
    old = slides(conv)
    known_shape(conv.output, len(old) + 1)
    smaller = []
    for axis, slide in enumerate(old, 1):
        first, last = ends.pop(axis, (0, 0))
        before, after = slide.before - first * slide.stride, slide.after - last * slide.stride
        require(before >= 0 and after >= 0, f"'{crop.name}' cuts off more than the padding of '{conv.name}' makes")
        smaller.append(replace(slide, before=before, after=after))
    require(not ends, f"'{crop.name}' cuts off channels")
    return conv.having(**window_params(smaller))
