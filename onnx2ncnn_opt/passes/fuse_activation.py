from collections.abc import Mapping
from typing import Any

from onnx2ncnn_opt.ir.codes import Activation
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.passes._families import WEIGHTED
from onnx2ncnn_opt.passes._fold import require_no_activation, require_static_weights
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import rewrite

# The layer that equals each activation_type, and its parameters in the order of activation_params.
_LAYERS: Mapping[int, tuple[str, tuple[str, ...]]] = {
    Activation.RELU: ("ReLU", ()),
    Activation.LEAKYRELU: ("ReLU", ("slope",)),
    Activation.CLIP: ("Clip", ("min", "max")),
    Activation.SIGMOID: ("Sigmoid", ()),
    Activation.MISH: ("Mish", ()),
    Activation.HARDSWISH: ("HardSwish", ("alpha", "beta")),
}
_KINDS = {type: kind for kind, (type, _) in _LAYERS.items()}  # LEAKYRELU for a ReLU with any slope


def separate_activation(layer: Layer) -> tuple[str, dict[str, Any]] | None:
    """Return type and parameters of an activation layer that equals a layer's activation; None if it has none."""
    if not layer["activation_type"]:
        return None
    type, names = _LAYERS[layer["activation_type"]]
    return type, dict(zip(names, layer["activation_params"], strict=False))


@rewrite(
    op(_KINDS, "activation")(op(WEIGHTED, "layer")),
    exact=False,
    purpose="one layer less",
)
def fuse_activation(layer: Layer, activation: Layer) -> Layer:
    """x ── Convolution ── ReLU, Clip, Sigmoid, Mish or HardSwish ──   ⇒   x ── Convolution ──

    For every layer with an `activation_type` that includes this activation.
    """
    require_static_weights(layer)
    require_no_activation(layer)
    is_relu = activation.type == "ReLU" and activation["slope"] == 0
    kind = Activation.RELU if is_relu else _KINDS[activation.type]
    params = tuple(activation[name] for name in _LAYERS[kind][1])
    return layer.having(activation_type=kind, activation_params=params or None)
