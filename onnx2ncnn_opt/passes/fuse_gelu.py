from collections.abc import Iterator
from math import pi, sqrt

from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._linear import add, close, factor, mul, multiplied, negated, plus, times
from onnx2ncnn_opt.rewrite.pattern import Op, op
from onnx2ncnn_opt.rewrite.rule import rewrite


def _gated(gate: Op) -> Iterator[Op]:
    """Yield x * 0.5 * (1 + gate), in every order, with the half inside, and as a sum."""
    whole = plus(gate, "root", 1.0)
    yield from _halved(whole)
    yield mul("x", plus(times(gate, by=0.5), "root", 0.5))
    half = times("x", "root", by=0.5)
    yield add(half, mul(half, gate))


def _halved(gate: Op) -> Iterator[Op]:
    """Yield x * 0.5 * gate, in every order; also with another last factor."""
    yield times(mul("x", gate), "scale")
    yield mul(times("x", by=0.5), gate)
    yield mul("x", times(gate, by=0.5))


def _mirrored() -> Iterator[Op]:
    """Yield x * 0.5 * (1 - Erf(-x / sqrt(2))), in every order: the complementary error function."""
    arguments = (times("x", by=-sqrt(0.5)), *(times(minus, by=sqrt(0.5)) for minus in negated()))
    for argument in arguments:
        yield from _halved(op("BinaryOp", "root", op_type=BinaryOp.RSUB, with_scalar=1, b=1.0)(op("Erf")(argument)))


def _cubes() -> Iterator[Op]:
    """Yield 0.044715 * x * x * x, in every order.

    Without the power operator, because ncnn's is wrong for negative numbers.
    """
    square = (op("UnaryOp", op_type=UnaryOp.SQUARE)("x"), mul("x", "x"))
    yield from (times(mul("x", s), by=0.044715) for s in square)
    yield from (mul("x", times(s, by=0.044715)) for s in square)
    yield from (mul(s, times("x", by=0.044715)) for s in square)
    yield mul("x", mul("x", times("x", by=0.044715)))


def _arguments() -> Iterator[Op]:
    """Yield sqrt(2 / pi) * (x + 0.044715 * x * x * x), also with x factored out, as in Megatron and BLOOM."""
    c = sqrt(2 / pi)
    yield from (times(add("x", cube), by=c) for cube in _cubes())
    for square in (op("UnaryOp", op_type=UnaryOp.SQUARE)("x"), mul("x", "x")):
        yield from _factored(times(square, by=0.044715), c)
    yield from _factored(mul("x", times("x", by=0.044715)), c)


def _factored(square: Op, c: float) -> Iterator[Op]:
    polynomial = plus(square, number=1.0)
    yield mul(times("x", by=c), polynomial)
    yield times(mul("x", polynomial), by=c)


_ERF = (*_gated(op("Erf")(times("x", by=sqrt(0.5)))), *_mirrored())
_TANH_VARIANTS = tuple(
    variant
    for argument in _arguments()
    for tanh in (op("TanH"), op("UnaryOp", op_type=UnaryOp.TANH))
    for variant in _gated(tanh(argument))
)


def _scaled(gelu: Layer, scale: Layer | None) -> Layer | list[Layer]:
    """Return a GELU, times what is left of a factor that is not 0.5: NFNets have one of their own."""
    if scale is None or close(factor(scale), 0.5):
        return gelu
    gelu.outputs = (Blob(f"{scale.output.name}_gelu", scale.output.shape, scale.output.batch),)
    return [gelu, multiplied(gelu.output, 2 * factor(scale), scale.name)]


@rewrite(*_ERF, exact=False)
def fuse_gelu(x: Blob, root: Layer, scale: Layer | None = None) -> Layer | list[Layer]:
    """x * 0.5 * (1 + Erf(x / sqrt(2)))   ⇒   GELU(x)"""
    return _scaled(Layer("GELU", root.name, [x]), scale)


@rewrite(*_TANH_VARIANTS, exact=False, purpose="GPT-2 and other models with the tanh form")
def fuse_fast_gelu(x: Blob, root: Layer, scale: Layer | None = None) -> Layer | list[Layer]:
    """x * 0.5 * (1 + TanH(sqrt(2 / pi) * (x + 0.044715 * x * x * x)))   ⇒   GELU(x, fast)"""
    return _scaled(Layer("GELU", root.name, [x], (), {"fast_gelu": 1}), scale)
