"""Random models of decisions behind small nets: orders, places, nearest samples, rounding and comparisons.

Their operands are computed, so that rounding can change a decision, and some numbers tie.
"""

from itertools import islice

import numpy as np

from testing.random_models import Builder, RandomModel, Step, add_input, completed
from testing.random_steps import compare, convolve, largest, matmul, one_hot, reduce, select, softmax, stepped, unary

_NETS: tuple[Step, ...] = (matmul, matmul, convolve, convolve, unary, unary, reduce, softmax)
_FIRST = range(1, 5)


def top(b: Builder) -> None:
    """Add a TopK; its values are read, or elements of another tensor at its indices."""
    x = b.pick("f", _FIRST)
    shape = b.shape(x)
    axis = b.number(0, len(shape) - 1)
    values, places = b.many(
        2, "TopK", x, b.ints(b.number(1, b.least(x)[axis])), axis=axis, largest=b.number(0, 1), sorted=1
    )
    kind = b.choice(("both", "gather", "first", "values"))
    if kind == "gather":
        others = b.named(lambda a: a.shape == shape and a.dtype.kind == "f")
        b.node("GatherElements", b.choice(others), places, axis=axis)
        b.hidden.add(values)
    elif kind == "first":
        b.node("Gather", places, b.scalar(0), axis=axis)
    elif kind == "values":
        b.hidden.add(places)


def place(b: Builder) -> None:
    """Add an ArgMax or ArgMin, as it is, as a number, or as an index into a table."""
    x = b.pick("f", _FIRST)
    axis = b.axis(len(b.shape(x)))
    kind = b.choice(("ArgMax", "ArgMin"))
    index = b.node(kind, x, axis=axis, keepdims=b.number(0, 1), select_last_index=b.number(0, 1))
    use = b.choice(("none", "cast", "table", "half"))
    if use == "table":
        b.node("Gather", b.floats((max(a.shape[axis] for a in b.values[x]), 3)), index, axis=0)
    elif use != "none":
        b.write("Cast(index, to=1) + 0.5" if use == "half" else "Cast(index, to=1)", index=index)


def is_largest(b: Builder) -> None:
    """Add x == max(x), as models find peaks, or a mask of it."""
    x = b.pick("f", _FIRST)
    axis = b.axis(len(b.shape(x)))
    if len(b.shape(x)) == 4 and b.chance(0.5):
        most = b.node("MaxPool", x, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    else:
        most = b.reduce("ReduceMax", x, [axis], keepdims=1)
    b.write("<Equal(x, most)|x * Cast(Equal(x, most), to=1)>", x=x, most=most)


def nearest(b: Builder) -> None:
    """Add a GridSample of the nearest elements, at computed places."""
    x = b.pick("f", (4,))
    shape = b.shape(x)
    grids = b.named(lambda a: a.ndim == 4 and a.shape[::3] == (shape[0], 2))
    size = (shape[0], b.number(1, 5), b.number(1, 5), 2)
    grid = b.choice(grids) if grids and b.chance(0.7) else b.floats(size)
    if b.chance(0.5):
        grid = b.node(b.choice(("Tanh", "Sigmoid")), grid)
    padding = b.choice(("zeros", "border", "reflection"))
    mode = "nearest" if b.chance(0.8) else "bilinear" if b.opset < 20 else "linear"
    b.node("GridSample", x, grid, mode=mode, padding_mode=padding, align_corners=b.number(0, 1))


def count(b: Builder) -> None:
    """Count the numbers that are above others."""
    x = b.pick("f", _FIRST)
    mask = b.write("Cast(Greater(x, y), to=1)", x=x, y=b.operand(b.shape(x)))
    b.reduce("ReduceSum", mask, [b.axis(len(b.shape(x)))], keepdims=b.number(0, 1))


def coarse(b: Builder) -> None:
    """Add numbers of few levels, which tie."""
    b.write("<Round|Floor|Ceil>(x * step) / step", x=b.pick("f", _FIRST), step=b.scalar(b.choice((1.0, 2.0, 4.0))))


DECISIONS: tuple[Step, ...] = (
    *(top, top, place, place, is_largest, nearest, nearest, count, coarse),
    *(largest, stepped, compare, select, one_hot),
)


def random_decisions(seed: int, number: int) -> RandomModel:
    """Return model `number` of a seed: one to three decisions behind a small net; every third has dynamic sizes."""
    rng = np.random.default_rng([seed, number, 2])
    while True:
        b = Builder(rng, int(rng.choice([16, 17, 18, 23])))
        is_open, rank = number % 3 == 0, b.choice((2, 3, 4, 4))
        shape: list[int | str] = [b.number(1, 5) for _ in range(rank)]
        sizes = {f"s{axis}": [int(n) for n in rng.permutation(5)[:3] + 1] for axis in range(rank)}
        if is_open:
            shape = [f"s{axis}" if b.chance(0.6 if axis != 1 else 0.2) else size for axis, size in enumerate(shape)]
        runs = 3 if is_open else 1
        add_input(b, tuple(shape), sizes, runs=runs)
        if rank == 4 and b.chance(0.4):
            add_input(b, (shape[0], b.number(1, 5), b.number(1, 5), 2), sizes, runs=runs)
        for _ in b.steps(_NETS, b.number(0, 6)):
            pass
        most = b.number(1, 3)
        if [*islice(b.steps(DECISIONS, 3 * most), most)]:
            return completed(b)
