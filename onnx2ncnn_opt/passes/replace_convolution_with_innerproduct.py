"""`replace_convolution_with_innerproduct_after_*`: a convolution of a vector."""

from __future__ import annotations

from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.passes._fold import require_own_weights
from onnx2ncnn_opt.rewrite.pattern import Op, kept, op
from onnx2ncnn_opt.rewrite.rule import Rewrite, known_shape, require, rewrite

_PADS = ("pad_left", "pad_right", "pad_top", "pad_bottom")


def _replace(what: str, picture: str, above: Op) -> Rewrite:
    @rewrite(
        op("Convolution", "layer")(kept(above)),
        exact=False,
        name=f"replace_convolution_with_innerproduct_after_{what}",
        summary=f"x ── {picture} ── Convolution ──   ⇒   x ── {picture} ── InnerProduct ──",
        purpose="squeeze-and-excitation in nets of other converters; ncnn gives up convolutions of vectors",
    )
    def replace(layer: Layer) -> Layer:
        name = f"Convolution '{layer.name}'"
        require_own_weights(layer)
        known_shape(layer.input, 1)
        require(layer["kernel_w"] == layer["kernel_h"] == 1, f"{name} has a larger kernel")
        require(not any(layer[pad] for pad in _PADS), f"{name} pads")
        params = {
            "num_output": layer["num_output"],
            "bias_term": layer["bias_term"],
            "weight_data_size": layer["weight_data_size"],
            "activation_type": layer["activation_type"],
        }
        if layer["activation_type"]:
            params["activation_params"] = layer["activation_params"]
        return Layer("InnerProduct", layer.name, layer.inputs, (), params, layer.weights)

    return replace


PASSES = (
    _replace("global_pooling", "Pooling (global)", op("Pooling", global_pooling=1)),
    _replace("innerproduct", "InnerProduct", op("InnerProduct")),
)
