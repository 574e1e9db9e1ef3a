from math import prod

from onnx2ncnn_opt.ir.codes import Interp, PadMode, Pooling
from onnx2ncnn_opt.ir.dim import is_fixed
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.windows import pads_of
from onnx2ncnn_opt.passes._chain import Chain
from onnx2ncnn_opt.passes._fold import require_own_weights
from onnx2ncnn_opt.passes._windows import is_pointwise
from onnx2ncnn_opt.passes.replace_convolution_with_innerproduct import of_vector
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import known_shape, require, rewrite

# One matrix for all pixels: it commutes with weighted sums of pixels.
POINTWISE = op("Convolution", "conv", is_pointwise)
# An Interp of one image, to sizes that do not depend on its channels.
RESIZE = op("Interp", "smaller", lambda layer: len(layer.inputs) == 1, resize_type=frozenset(Interp), size_expr="")
_CONV = POINTWISE._replace(params={"activation_type": 0})


def _shrinks(layer: Layer) -> bool:
    """Return True if a layer is an Interp that is proven to shrink an image."""
    before, after = layer.inputs[0].shape or (), layer.output.shape or ()
    return RESIZE.fits(layer) and is_fixed(before) and is_fixed(after) and prod(after) < prod(before)


@rewrite(
    op("Pooling", "smaller", pooling_type=Pooling.AVG)(_CONV),
    op("Interp", "smaller", _shrinks)(_CONV),
    exact=False,
    purpose="the transitions of DenseNets",
)
def move_convolution_after_pooling(conv: Layer, smaller: Layer) -> list[Layer]:
    """x ── Convolution 1x1 ── Pooling (average) ──   ⇒   x ── Pooling (average) ── Convolution 1x1 ──

    A mean or an Interp has the same weights in every channel, and a 1x1 convolution has the same in every pixel. So
    they commute, and the convolution is faster on the smaller image.
    """
    require_own_weights(conv)
    known_shape(conv.input, 3)
    require(not conv["bias_term"] or not _counts_zeros(smaller), f"'{smaller.name}' would pad without the bias")
    chain = Chain(conv)
    x = chain.put(smaller.having(inputs=[conv.input]), "smaller")
    chain.put(of_vector(conv, x).without_defaults() if len(x.known_shape) == 1 else conv.having(inputs=[x]), "mixed")
    return chain.finish(smaller)


def _counts_zeros(smaller: Layer) -> bool:
    """Return True if a Pooling includes zeros around the image in its means."""
    if smaller.type != "Pooling" or smaller["global_pooling"] or smaller["adaptive_pooling"]:
        return False
    pads = smaller["pad_mode"] != PadMode.VALID or any(pads_of(smaller))
    return bool(smaller["avgpool_count_include_pad"] and pads)
