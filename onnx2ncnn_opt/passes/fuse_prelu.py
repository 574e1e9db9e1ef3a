"""`fuse_prelu`, `fuse_leaky_relu`: a slope for negative numbers, written as sums and maxima."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._constants import per_channel
from onnx2ncnn_opt.passes._fold import require_own_weights
from onnx2ncnn_opt.passes._linear import factor, negated, times
from onnx2ncnn_opt.rewrite.pattern import Op, Pattern, const, op
from onnx2ncnn_opt.rewrite.rule import Rewrite, fixed_size, require, rewrite

_RELU = op("ReLU", slope=0.0)
_SUM = op("BinaryOp", "root", op_type=frozenset({BinaryOp.ADD, BinaryOp.SUB}), with_scalar=0)


def weighted(x: Pattern) -> Iterator[Op]:
    """x times a number, or a constant for each channel."""
    yield times(x, "scale")
    yield op("BinaryOp", "scale", op_type=BinaryOp.MUL, with_scalar=0)(x, const("slopes"))
    yield op("Scale", "scale", bias_term=0)(x)


def sloped(x: Blob, name: str, scale: Layer, slopes: Layer | None, sign: float = 1.0) -> Layer:
    """A leaky ReLU with the slope that `weighted` has found, or a PReLU with one for each channel."""
    if scale.type == "BinaryOp" and slopes is None:
        return Layer("ReLU", name, [x], (), {"slope": sign * factor(scale)})
    channels = fixed_size(x, 0)
    if slopes is not None:
        values = per_channel(slopes, x, channels)
    else:
        require_own_weights(scale)
        values = scale.weights["scale_data"].astype(np.float64)
        require(len(values) == channels, f"'{scale.name}' does not have one factor for each channel")
    weights = {"slope_data": (sign * values).astype(np.float32)}
    return Layer("PReLU", name, [x], (), {"num_slope": channels}, weights)


def _negative_parts() -> Iterator[Op]:
    """What is left of x below 0: -relu(-x) without its sign, or min(x, 0)."""
    for minus in negated("x"):
        yield op("ReLU", "mirrored", slope=0.0)(minus)
    yield op("Clip", "", lambda clip: clip["min"] < -1e38, max=0.0)("x")


@rewrite(
    *(_SUM(_RELU("x"), side) for part in _negative_parts() for side in weighted(part)),
    exact=False,
    purpose="PReLU as Keras exports it, and hand-written",
)
def fuse_prelu(
    x: Blob,
    root: Layer,
    scale: Layer,
    slopes: Layer | None = None,
    mirrored: Layer | None = None,
) -> Layer:
    """ReLU(x) - a * ReLU(-x), ReLU(x) + a * min(x, 0)   ⇒   PReLU(x)

    For one slope, where it is a leaky ReLU, or one for each channel.
    """
    sign = (-1.0 if root["op_type"] == BinaryOp.SUB else 1.0) * (-1.0 if mirrored else 1.0)
    return sloped(x, root.name, scale, slopes, sign)


@rewrite(
    *(op("BinaryOp", "root", op_type=BinaryOp.MAX, with_scalar=0)("x", side) for side in weighted("x")),
    exact=False,
    purpose="leaky ReLU as TensorFlow exports it, and hand-written",
)
def fuse_leaky_relu(x: Blob, root: Layer, scale: Layer, slopes: Layer | None = None) -> Layer:
    """max(x, x * a)   ⇒   ReLU(x) with the slope a

    For a between 0 and 1: a larger slope would win above 0. With a slope for each channel it is a PReLU.
    """
    found = sloped(x, root.name, scale, slopes)
    for slope in [found["slope"]] if found.type == "ReLU" else found.weights["slope_data"]:
        require(0 <= slope <= 1, f"the slope {slope:g} is not between 0 and 1")
    return found


PASSES: tuple[Rewrite, ...] = (fuse_prelu, fuse_leaky_relu)
