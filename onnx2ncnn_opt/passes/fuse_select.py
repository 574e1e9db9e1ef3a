"""`fuse_where_*`: activations that are written with a condition, as the importer lays the choice out.

What is not chosen may be infinite or NaN. So each side is limited from both sides: by infinities where it is chosen,
and by 0 where it is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._fold import RSUB
from onnx2ncnn_opt.passes._linear import add, factor, negated, plus, times
from onnx2ncnn_opt.passes.fuse_prelu import sloped, weighted
from onnx2ncnn_opt.rewrite.pattern import Op, Pattern, kept, op
from onnx2ncnn_opt.rewrite.rule import Rewrite, require, rewrite

_MAX, _MIN, _EXP, _EXPM1 = 4, 5, 7, 21
# From here on, x and Softplus(x) are the same in float32.
_STRAIGHT = 16.0


def _not(x: Op, capture: str) -> Op:
    return op("BinaryOp", capture, op_type=RSUB, with_scalar=1, b=1.0)(x)


def _gated(x: Pattern, other: Op, limit: str) -> Iterator[Op]:
    """x where `other` is 0, and 0 where it is 1."""
    low = op("Log", limit)(other)
    for high in negated(low):
        yield op("BinaryOp", op_type=_MIN, with_scalar=0)(high, op("BinaryOp", op_type=_MAX, with_scalar=0)(x, low))


def _choices(otherwise: Iterable[Op]) -> Iterator[Op]:
    """x where it is above a threshold, and something else where it is not."""
    below = _not(op("Threshold", "above")("x"), "below")
    for other in otherwise:
        for first in _gated("x", below, "first"):
            for second in _gated(other, _not(below, "again"), "second"):
                yield add(first, second)


@rewrite(*_choices(weighted("x")), exact=False, kept="leaky ReLU and PReLU as torch.where")
def fuse_where_prelu(x: Blob, above: Layer, scale: Layer, slopes: Layer | None = None) -> Layer:
    """where(x > 0, x, x * a)   ⇒   PReLU(x)

    For one slope, where it is a leaky ReLU, or one for each channel.
    """
    require(above["threshold"] == 0, f"'{above.name}' does not compare with 0")
    return sloped(x, above.name, scale, slopes)


def _exponential() -> Iterator[Op]:
    for exp in (plus(op("UnaryOp", op_type=_EXP)("x"), number=-1.0), op("UnaryOp", op_type=_EXPM1)("x")):
        yield exp
        yield times(exp, "scale")


@rewrite(*_choices(_exponential()), exact=False, kept="ELU as torch.where")
def fuse_where_elu(x: Blob, above: Layer, scale: Layer | None = None) -> Layer:
    """where(x > 0, x, a * (exp(x) - 1))   ⇒   ELU(x)"""
    require(above["threshold"] == 0, f"'{above.name}' does not compare with 0")
    return Layer("ELU", above.name, [x], (), {"alpha": factor(scale) if scale else 1.0})


def _softplus() -> Iterator[Op]:
    limited = op("BinaryOp", "", lambda low: low["b"] >= _STRAIGHT, op_type=_MIN, with_scalar=1)("x")
    clipped = op("Clip", "", lambda clip: clip["min"] < -1e38 and clip["max"] >= _STRAIGHT)("x")
    for inner in (limited, clipped):
        yield kept(op("BinaryOp", "straight", op_type=_MAX, with_scalar=0)("x", kept(op("Softplus")(kept(inner)))))


@rewrite(*_choices(_softplus()), exact=False, kept="Softplus and Mish as torch.export writes them")
def eliminate_where_after_softplus(straight: Layer, above: Layer) -> Blob:
    """where(x > 20, x, Softplus(x))   ⇒   Softplus(x)

    The importer lays Softplus out so that large numbers are themselves.
    """
    require(above["threshold"] >= _STRAIGHT, f"'{above.name}' chooses x where Softplus is another number")
    return straight.output


PASSES: tuple[Rewrite, ...] = (fuse_where_prelu, fuse_where_elu, eliminate_where_after_softplus)
