"""Pieces of expanded normalisations: means, squares, and what is divided by their roots.

The power operator is left out: ncnn's is wrong for numbers that are not positive, so a net with it computes something
else.
"""

from __future__ import annotations

from collections.abc import Iterator

from onnx2ncnn_opt.ir.dim import Shape
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._fold import DIV, MUL, RDIV
from onnx2ncnn_opt.passes._linear import mul, plus
from onnx2ncnn_opt.rewrite.pattern import Op, Pattern, op
from onnx2ncnn_opt.rewrite.rule import require

_MEAN = 3
_SQUARE, _SQRT, _RSQRT, _RECIPROCAL = 4, 5, 6, 15


def mean(x: Pattern, capture: str) -> Op:
    """The mean over some axes."""
    return op("Reduction", capture, operation=_MEAN, reduce_all=0, coeff=1.0)(x)


def square(x: Op | str, again: Pattern) -> Iterator[Op]:
    """x * x, however it is written; `again` is the same x, where it is a layer that was captured."""
    yield op("UnaryOp", op_type=_SQUARE)(x)
    yield mul(x, again)


def over_root(x: Pattern, squares: Op, eps: str = "eps") -> Iterator[Op]:
    """x divided by the root of ``squares + eps``, however it is written."""
    total = plus(squares, eps)
    root = op("UnaryOp", op_type=_SQRT)(total)
    yield op("BinaryOp", "root", op_type=DIV, with_scalar=0)(x, root)
    yield _times_root(x, op("UnaryOp", op_type=_RECIPROCAL)(root))
    yield _times_root(x, op("BinaryOp", op_type=RDIV, with_scalar=1, b=1.0)(root))
    yield _times_root(x, op("UnaryOp", op_type=_RSQRT)(total))


def _times_root(x: Pattern, factor: Op) -> Op:
    return op("BinaryOp", "root", op_type=MUL, with_scalar=0)(x, factor)


def known_shape(x: Blob) -> Shape:
    """The shape of a blob; refused where it is unknown."""
    require(x.shape is not None, f"the shape of '{x.name}' is unknown")
    assert x.shape is not None
    return x.shape


def axes_of(reduction: Layer, rank: int) -> tuple[int, ...]:
    """The axes of a Reduction, counted from 0; refused where its result would not be laid along the others."""
    axes = tuple(sorted(axis % rank for axis in reduction["axes"]))
    # Without keepdims ncnn aligns what is left at the outer side: right only if the inner axes went.
    aligned = reduction["keepdims"] or axes == tuple(range(rank - len(axes), rank))
    require(aligned and len(axes) < rank, f"Reduction '{reduction.name}' is not laid along the remaining axes")
    return axes
