"""Patterns for parts of expanded activations: products and sums with a number, in every spelling."""

import math
from collections.abc import Iterator, Sequence

from onnx2ncnn_opt.ir.codes import BinaryOp, Eltwise, UnaryOp
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.rewrite.pattern import Op, Pattern, const, op

# Operators that are linear in a blob if the other operand is constant; a quotient is linear in its dividend only.
LINEAR = frozenset({BinaryOp.ADD, BinaryOp.SUB, BinaryOp.RSUB, BinaryOp.MUL, BinaryOp.DIV})
ARITHMETIC = LINEAR | {BinaryOp.RDIV}

# The factors of the two operands of a sum or difference.
SIGNS = {BinaryOp.ADD: (1.0, 1.0), BinaryOp.SUB: (1.0, -1.0), BinaryOp.RSUB: (-1.0, 1.0)}

# Models write constants like sqrt(2 / pi) with at least six digits.
_TOLERANCE = 1e-5


def with_constant(x: Pattern, kinds: frozenset[int]) -> Iterator[Op]:
    """Yield patterns "binary" of x with a scalar, or with a "constant" on either side."""
    commuting = frozenset(kind for kind in kinds if BinaryOp(kind).commutes)
    yield op("BinaryOp", "binary", op_type=kinds, with_scalar=1)(x)
    yield op("BinaryOp", "binary", op_type=kinds, with_scalar=0)(x, const("constant"))
    yield op("BinaryOp", "binary", op_type=kinds - commuting, with_scalar=0)(const("constant"), x)


def factor(layer: Layer) -> float:
    """Return the factor of a BinaryOp that multiplies or divides by its scalar."""
    return 1 / layer["b"] if layer["op_type"] == BinaryOp.DIV else float(layer["b"])


def offset(layer: Layer) -> float:
    """Return the offset of a BinaryOp that adds or subtracts its scalar."""
    return float(-layer["b"] if layer["op_type"] == BinaryOp.SUB else layer["b"])


def close(a: float, b: float) -> bool:
    """Return True if two numbers agree up to the digits that models write."""
    return math.isclose(a, b, rel_tol=_TOLERANCE)


def times(x: Pattern, capture: str = "", by: float | None = None) -> Op:
    """Return the product (or quotient) of x and the number `by`, or any number other than 0."""

    def fits(layer: Layer) -> bool:
        return bool(layer["b"]) and (by is None or close(factor(layer), by))

    return op("BinaryOp", capture, fits, op_type=frozenset({BinaryOp.MUL, BinaryOp.DIV}), with_scalar=1)(x)


def plus(x: Pattern, capture: str = "", number: float | None = None) -> Op:
    """Return the sum (or difference) of x and `number`, or any number."""

    def fits(layer: Layer) -> bool:
        return number is None or close(offset(layer), number)

    return op("BinaryOp", capture, fits, op_type=frozenset({BinaryOp.ADD, BinaryOp.SUB}), with_scalar=1)(x)


def negated() -> Iterator[Op]:
    """Yield the spellings of -x."""
    yield op("UnaryOp", op_type=UnaryOp.NEG)("x")
    yield times("x", by=-1.0)


def mul(a: Pattern, b: Pattern) -> Op:
    """Return the product of two blobs."""

    def fits(layer: Layer) -> bool:
        return layer.computes(Eltwise.PROD) or layer.computes(BinaryOp.MUL, scalar=False)

    return op(("BinaryOp", "Eltwise"), where=fits)(a, b)


def multiplied(x: Blob, number: float, name: str, outputs: Sequence[Blob] = ()) -> Layer:
    """Return a BinaryOp that multiplies a blob by a number."""
    return Layer("BinaryOp", name, [x], outputs, {"op_type": BinaryOp.MUL, "with_scalar": 1, "b": number})


def add(a: Pattern, b: Pattern) -> Op:
    """Return the sum of two blobs."""
    return op("BinaryOp", op_type=BinaryOp.ADD, with_scalar=0)(a, b)
