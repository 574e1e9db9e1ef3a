from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onnx2ncnn_opt.ir.codes import Activation
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.passes._families import WEIGHTED, types_of
from onnx2ncnn_opt.passes._fold import require_no_activation, require_static_weights
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import rewrite

# The activation_type and activation_params of each activation layer.
_FUSED: Mapping[str, Callable[[Layer], tuple[Activation, tuple[float, ...]]]] = {
    "ReLU": lambda act: (Activation.LEAKYRELU, (act["slope"],)) if act["slope"] else (Activation.RELU, ()),
    "Clip": lambda act: (Activation.CLIP, (act["min"], act["max"])),
    "Sigmoid": lambda act: (Activation.SIGMOID, ()),
    "Mish": lambda act: (Activation.MISH, ()),
    "HardSwish": lambda act: (Activation.HARDSWISH, (act["alpha"], act["beta"])),
}
# The inverse: the type and parameters of the layer for each activation_type.
_SEPARATE: Mapping[int, Callable[[Sequence[float]], tuple[str, dict[str, Any]]]] = {
    Activation.RELU: lambda values: ("ReLU", {}),
    Activation.LEAKYRELU: lambda values: ("ReLU", {"slope": values[0]}),
    Activation.CLIP: lambda values: ("Clip", {"min": values[0], "max": values[1]}),
    Activation.SIGMOID: lambda values: ("Sigmoid", {}),
    Activation.MISH: lambda values: ("Mish", {}),
    Activation.HARDSWISH: lambda values: ("HardSwish", {"alpha": values[0], "beta": values[1]}),
}


def separate_activation(layer: Layer) -> tuple[str, dict[str, Any]] | None:
    """Return type and parameters of an activation layer that equals a layer's activation; None if it has none."""
    kind = layer["activation_type"]
    return _SEPARATE[kind](layer["activation_params"]) if kind else None


@rewrite(
    op(_FUSED, "activation")(op(types_of(WEIGHTED), "layer")),
    exact=False,
    covers=[f"fuse_{family.name}_activation" for family in WEIGHTED],
    purpose="one layer less",
)
def fuse_activation(layer: Layer, activation: Layer) -> Layer:
    """x ── Convolution ── ReLU, Clip, Sigmoid, Mish or HardSwish ──   ⇒   x ── Convolution ──

    For every layer with an `activation_type` that includes this activation.
    """
    require_static_weights(layer)
    require_no_activation(layer)
    kind, params = _FUSED[activation.type](activation)
    return layer.having(activation_type=kind, activation_params=params or None)
