"""`replace_convolution_with_innerproduct_after_*`: a convolution of a vector."""

from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.windows import pads_of
from onnx2ncnn_opt.passes._fold import require_own_weights
from onnx2ncnn_opt.rewrite.pattern import Op, kept, op
from onnx2ncnn_opt.rewrite.rule import Rewrite, known_shape, require, rewrite


def of_vector(conv: Layer, x: Blob) -> Layer:
    """Return the InnerProduct of a vector that equals a convolution of one pixel; refused for several pixels."""
    name = f"Convolution '{conv.name}'"
    require(conv["kernel_w"] == conv["kernel_h"] == 1, f"{name} has a larger kernel")
    require(not any(pads_of(conv)), f"{name} pads")
    kept = ("num_output", "bias_term", "weight_data_size", "activation_type")
    params = {name: conv[name] for name in kept}
    if conv["activation_type"]:
        params["activation_params"] = conv["activation_params"]
    return Layer("InnerProduct", conv.name, [x], (), params, conv.weights)


def _replace(source: str, picture: str, above: Op) -> Rewrite:
    @rewrite(
        op("Convolution", "layer")(kept(above)),
        exact=False,
        name=f"replace_convolution_with_innerproduct_after_{source}",
        summary=f"x ── {picture} ── Convolution ──   ⇒   x ── {picture} ── InnerProduct ──",
        purpose="squeeze-and-excitation in nets of other converters; ncnn deprecates convolutions of vectors",
    )
    def replace(layer: Layer) -> Layer:
        require_own_weights(layer)
        known_shape(layer.input, 1)
        return of_vector(layer, layer.input)

    return replace


_after_global_pooling = _replace("global_pooling", "Pooling (global)", op("Pooling", global_pooling=1))
_after_innerproduct = _replace("innerproduct", "InnerProduct", op("InnerProduct"))
