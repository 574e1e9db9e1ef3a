from collections.abc import Iterator

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._fold import channel_factors
from onnx2ncnn_opt.passes._linear import negated
from onnx2ncnn_opt.rewrite.pattern import Op, Pattern, const, op
from onnx2ncnn_opt.rewrite.rule import rewrite

_RELU = op("ReLU", slope=0.0)
_SUM = op("BinaryOp", "root", op_type=frozenset({BinaryOp.ADD, BinaryOp.SUB}), with_scalar=0)


def _scaled(x: Pattern) -> Iterator[Op]:
    """Yield x times a constant for each channel, or for all."""
    yield op("BinaryOp", "scale", op_type=BinaryOp.MUL, with_scalar=1)(x)
    yield op("BinaryOp", "scale", op_type=BinaryOp.MUL, with_scalar=0)(x, const("slopes"))
    yield op("Scale", "scale", bias_term=0)(x)


def _negative_parts() -> Iterator[Op]:
    """Yield patterns of the negative part of x: relu(-x), which lacks the sign, or min(x, 0)."""
    for minus in negated():
        yield op("ReLU", "mirrored", slope=0.0)(minus)
    yield op("Clip", "", lambda clip: clip["min"] < -1e38, max=0.0)("x")


@rewrite(
    *(_SUM(_RELU("x"), side) for part in _negative_parts() for side in _scaled(part)),
    exact=False,
    purpose="PReLU as Keras exports it, and hand-written",
)
def fuse_prelu(x: Blob, root: Layer, scale: Layer, slopes: Layer | None = None, mirrored: Layer | None = None) -> Layer:
    """ReLU(x) - a * ReLU(-x), ReLU(x) + a * min(x, 0)   ⇒   PReLU(x)

    For one slope a, or one for each channel.
    """
    sign = (-1.0 if root["op_type"] == BinaryOp.SUB else 1.0) * (-1.0 if mirrored else 1.0)
    is_one = scale.type == "BinaryOp" and slopes is None
    values = np.array([scale["b"]]) if is_one else channel_factors(scale, slopes, x)
    weights = {"slope_data": (sign * values).astype(np.float32)}
    return Layer("PReLU", root.name, [x], (), {"num_slope": len(values)}, weights)
