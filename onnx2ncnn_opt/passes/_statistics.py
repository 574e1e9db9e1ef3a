"""Patterns for parts of expanded normalisations: means, squares, and quotients by their roots.

The patterns do not match the power operator, because ncnn's is wrong for numbers that are not positive.
"""

from collections.abc import Iterator

from onnx2ncnn_opt.ir.codes import BinaryOp, Pooling, Reduction, UnaryOp
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.passes._linear import mul, plus
from onnx2ncnn_opt.rewrite.pattern import Op, Pattern, op
from onnx2ncnn_opt.rewrite.rule import require

# The rank of the operand of a Pooling.
_POOLINGS = {"Pooling1D": 2, "Pooling": 3, "Pooling3D": 4}


def mean(x: Pattern, capture: str) -> Op:
    """Return the mean over some axes; a global Pooling is one."""
    return op(("Reduction", *_POOLINGS), capture, _is_mean)(x)


def _is_mean(layer: Layer) -> bool:
    if layer.type in _POOLINGS:
        return bool(layer["pooling_type"] == Pooling.AVG and layer["global_pooling"])
    return bool(layer["operation"] == Reduction.MEAN and layer["coeff"] == 1)


def sum_of_squares() -> Iterator[Op]:
    """Yield a "norm": the sum of x * x over some axes, times a positive coeff."""
    norm = op("Reduction", "norm", lambda reduction: reduction["coeff"] > 0)
    yield norm._replace(params={"operation": Reduction.SUMSQ})("x")
    yield from (norm._replace(params={"operation": Reduction.SUM})(squares) for squares in square("x", "x"))


def square(x: Op | str, again: Pattern) -> Iterator[Op]:
    """Yield the spellings of x * x; `again` is the pattern of the second factor."""
    yield op("UnaryOp", op_type=UnaryOp.SQUARE)(x)
    yield mul(x, again)


def over_root(x: Pattern, squares: Op) -> Iterator[Op]:
    """Yield the spellings of x / sqrt(squares + eps)."""
    total = plus(squares, "eps")
    yield from over(x, sqrt(total))
    yield _times_root(x, op("UnaryOp", op_type=UnaryOp.RSQRT)(total))


def sqrt(x: Pattern) -> Op:
    """Return the root of x."""
    return op("UnaryOp", op_type=UnaryOp.SQRT)(x)


def over(x: Pattern, root: Op) -> Iterator[Op]:
    """Yield x divided by a root, or multiplied by its reciprocal."""
    yield op("BinaryOp", "root", op_type=BinaryOp.DIV, with_scalar=0)(x, root)
    yield _times_root(x, op("UnaryOp", op_type=UnaryOp.RECIPROCAL)(root))
    yield _times_root(x, op("BinaryOp", op_type=BinaryOp.RDIV, with_scalar=1, b=1.0)(root))


def _times_root(x: Pattern, factor: Op) -> Op:
    return op("BinaryOp", "root", op_type=BinaryOp.MUL, with_scalar=0)(x, factor)


def axes_of(reduction: Layer, rank: int) -> tuple[int, ...]:
    """Return the axes of a Reduction or global Pooling, counted from 0; refused if its result does not broadcast."""
    if reduction.type in _POOLINGS:
        require(rank == _POOLINGS[reduction.type], f"'{reduction.name}' pools no blob of rank {rank}")
        return tuple(range(1, rank))
    axes = tuple(sorted(range(rank) if reduction["reduce_all"] else (axis % rank for axis in reduction["axes"])))
    # Without keepdims ncnn aligns the result with the outer axes: right only if the inner axes are reduced.
    aligned = reduction["keepdims"] or axes == tuple(range(rank - len(axes), rank))
    require(aligned, f"Reduction '{reduction.name}' is not aligned with the remaining axes")
    return axes
