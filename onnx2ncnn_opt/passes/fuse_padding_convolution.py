from onnx2ncnn_opt.ir.codes import Padding
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.windows import SIDES, axes_of, pads_of
from onnx2ncnn_opt.passes._families import CONVOLUTIONS
from onnx2ncnn_opt.passes._fold import require_own_weights
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import known_shape, require, rewrite

_PADDING = op("Padding", "padding", type=Padding.CONSTANT, per_channel_pad_data_size=0)


@rewrite(
    op(CONVOLUTIONS, "layer")(_PADDING("x")),
    exact=True,
    purpose="models of TensorFlow, and causal convolutions; one layer less",
)
def fuse_padding_convolution(x: Blob, layer: Layer, padding: Layer) -> Layer:
    """x ── Padding (constant) ── Convolution ──   ⇒   x ── Convolution ──"""
    require_own_weights(layer)
    axes = axes_of(layer)
    known_shape(x, len(axes) + 1)
    sizes = {side: padding[side] for axis in "hwd" for side in SIDES[axis]}
    require(min(sizes.values()) >= 0, f"'{padding.name}' crops")
    sides = [side for axis in axes for side in SIDES[axis]]
    require(not any(size for side, size in sizes.items() if side not in sides), f"'{padding.name}' pads the channels")
    own = {side: layer[f"pad_{side}"] for side in sides}
    require(min(own.values()) >= 0, f"the padding of '{layer.name}' depends on its input's size")
    same = not any(pads_of(layer)) or layer["pad_value"] == padding["value"]
    require(same, f"'{layer.name}' pads with another value")
    pads = {f"pad_{side}": own[side] + sizes[side] for side in sides}
    return layer.having(inputs=[x], pad_value=padding["value"] or None, **pads)
