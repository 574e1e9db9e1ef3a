"""Layers whose output has the shape of their input, and broadcasting."""

from collections.abc import Callable, Mapping
from itertools import zip_longest

from onnx2ncnn_opt.ir.detections import DETECTORS, is_sort
from onnx2ncnn_opt.ir.dim import Dim, Shape, product
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.shapes.registry import (
    Output,
    broadcast,
    data_axis,
    differ,
    equal,
    fail,
    need_rank,
    parts,
    positions,
    shape_of,
)

# The parameters that count one value per slice of the outermost axis, or 1 value for all.
_PER_SLICE = {
    "Dequantize": ("scale_data_size", "bias_data_size"),
    "PReLU": ("num_slope",),
    "Quantize": ("scale_data_size",),
    "Requantize": ("scale_in_data_size", "scale_out_data_size", "bias_data_size"),
}


# Layers whose output has the shape of their input, and a check of it; elementwise layers need no rule.
_CHECKS: Mapping[str, Callable[[Layer, Shape], object]] = {
    **dict.fromkeys(("Cast", "Normalize", "Packing"), lambda layer, x: None),
    # One value per channel, and ncnn uses only the first for 1-D and 2-D blobs.
    "Bias": lambda layer, x: equal(
        layer, layer["bias_data_size"], x[0] if len(x) >= 3 else 1, "bias_data_size and the channels"
    ),
    "LRN": lambda layer, x: need_rank(layer, x, 3),
    # ncnn would leave the blob unchanged for an axis outside it.
    **dict.fromkeys(("Softmax", "CumulativeSum"), lambda layer, x: data_axis(layer, len(x))),
    "Flip": lambda layer, x: positions(layer, layer["axes"], len(x)),
}


@shape_of(*_CHECKS)
def same(layer: Layer, x: Shape) -> Shape:
    """Return the input's shape."""
    _CHECKS[layer.type](layer, x)
    return x


@shape_of("Split")
def split(layer: Layer, x: Shape) -> list[Output]:
    """Return the input's shape for every output."""
    return [x] * len(layer.outputs)


@shape_of("Noop", unknown_inputs=True)
def noop(layer: Layer, *inputs: Shape | None) -> list[Output]:
    """Return the inputs; ncnn crashes on more outputs than inputs."""
    if len(layer.outputs) > len(inputs):
        fail(layer, f"it has {len(inputs)} inputs for {len(layer.outputs)} outputs")
    return list(inputs[: len(layer.outputs)])


@shape_of(*sorted(DETECTORS), unknown_inputs=True)
def unknowable(layer: Layer, *inputs: Shape | None) -> list[Output]:
    """Return None for every output: the shapes depend on the data, except of a sort."""
    scores = inputs[1] if is_sort(layer) else None
    return [None if scores is None else ((scores[-2] - 1) * layer["nms_top_k"], 6)] * len(layer.outputs)


@shape_of(*_PER_SLICE)
def per_slice(layer: Layer, x: Shape) -> Shape:
    """Return the input's shape."""
    for name in _PER_SLICE[layer.type]:
        if layer[name] > 1:
            equal(layer, layer[name], x[0], f"{name} and the outermost size")
    return x


@shape_of("BatchNorm", "InstanceNorm", "GroupNorm")
def channel_norm(layer: Layer, x: Shape) -> Shape:
    """Return the input's shape.

    `channels` is the outermost size, but InstanceNorm takes 1-D and 2-D blobs as one channel.
    """
    if layer.type != "InstanceNorm":
        equal(layer, layer["channels"], x[0], "channels and the outermost size")
    elif layer["affine"]:
        equal(layer, layer["channels"], x[0] if len(x) >= 3 else 1, "channels of the layer and of the blob")
    if layer.type == "GroupNorm":
        parts(layer, x[0], layer["group"], "channels")
    return x


@shape_of("LayerNorm", "RMSNorm")
def layer_norm(layer: Layer, x: Shape) -> Shape:
    """Return the input's shape.

    `affine_size` is a product of innermost sizes, never with the outermost one (unless 1-D).
    """
    inner = [product(x[first:]) for first in range(min(1, len(x) - 1), len(x))]
    if all(differ(layer["affine_size"], size) for size in inner):
        fail(layer, f"affine_size {layer['affine_size']} is none of the inner sizes {', '.join(map(str, inner))}")
    return x


@shape_of("Scale")
def scale(layer: Layer, x: Shape, factors: Shape | None = None) -> Shape:
    """Return the input's shape; one factor per slice of the outermost axis."""
    size = layer["scale_data_size"]
    if size == -233:
        if factors is None:
            fail(layer, "with scale_data_size -233 the factors are a second input")
        size = product(factors)
    equal(layer, size, x[0], "the number of factors and the outermost size")
    return x


@shape_of("Eltwise")
def eltwise(layer: Layer, *inputs: Shape) -> Shape:
    """Return the common shape of at least two inputs; nothing broadcasts."""
    if len(inputs) < 2:
        fail(layer, "it needs 2 inputs")
    result = inputs[0]
    for other in inputs[1:]:
        if len(other) != len(result):
            fail(layer, "the ranks differ, and Eltwise does not broadcast")
        result = tuple(equal(layer, a, b, "sizes of the inputs") for a, b in zip(result, other, strict=True))
    return result


@shape_of("BinaryOp")
def binary_op(layer: Layer, a: Shape, b: Shape | None = None) -> Shape:
    """Return the broadcast shape: numpy's for equal ranks, aligned at the OUTERMOST axes otherwise.

    A 1-D blob is along the outermost axis where it has that size, else along w.
    """
    if layer["with_scalar"]:
        return a
    if b is None:
        fail(layer, "it needs 2 inputs")
    a, b = _aligned(a, b), _aligned(b, a)
    pairs = zip_longest(a, b, fillvalue=1)
    return tuple(broadcast(layer, m, n, "sizes that broadcast (or one of them 1)") for m, n in pairs)


def _aligned(x: Shape, other: Shape) -> Shape:
    missing: tuple[Dim, ...] = (1,) * (len(other) - len(x))
    if not missing:
        return x
    # Symbols are compared like numbers.
    along_w = len(x) == 1 and x[0] != other[0]
    return missing + x if along_w else x + missing
