from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.windows import pads_of
from onnx2ncnn_opt.passes._fold import require_own_weights
from onnx2ncnn_opt.rewrite.pattern import kept, op
from onnx2ncnn_opt.rewrite.rule import known_shape, require, rewrite

_CONVOLUTION = op("Convolution", "layer")


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


@rewrite(
    _CONVOLUTION(kept(op("Pooling", global_pooling=1))),
    _CONVOLUTION(kept(op("InnerProduct"))),
    exact=False,
    purpose="squeeze-and-excitation in nets of other converters; ncnn deprecates convolutions of vectors",
)
def replace_convolution_with_innerproduct(layer: Layer) -> Layer:
    """x ── Pooling (global), InnerProduct ── Convolution ──   ⇒   x ── Pooling (global) ── InnerProduct ──"""
    require_own_weights(layer)
    known_shape(layer.input, 1)
    return of_vector(layer, layer.input)
