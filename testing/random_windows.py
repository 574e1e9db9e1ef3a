"""Random models of windows, slices and rolls of dynamic sizes, also run at sizes below their windows.

There a model has empty tensors, or ONNX Runtime refuses it: its net has to say that it is for larger sizes.
"""

from dataclasses import replace

import numpy as np

from testing.random_models import Array, Builder, NoFit, RandomModel, Step, add_input, completed, evaluate
from testing.random_steps import END, convolve, deconvolve, gather, pad, pool, slice_, unary

_SMALL_RUNS = 3


def roll(b: Builder) -> None:
    """Rotate an axis: the elements from one on, then those before it; by constant bounds, by Mod, or by indices."""
    x = b.pick("f", range(1, 5))
    axis, at = b.number(0, len(b.shape(x)) - 1), b.choice((-2, -1, 1, 2, 3))
    first = len(b.values)
    kind = b.choice(("constant", "modulo", "indices"))
    size = b.node("Shape", x, start=axis, end=axis + 1)
    if kind == "indices":
        row = b.node("Range", b.scalar(0), b.node("Squeeze", size), b.scalar(1))
        indices = b.node("Mod", b.node("Add", row, b.ints(at)), size)
        result = b.node("Gather", x, indices, axis=axis)
    else:
        bound = b.ints(at) if kind == "constant" else b.node("Mod", b.ints(at), size)
        end = size if kind == "modulo" else b.ints(END)
        parts = [b.node("Slice", x, *cut, b.ints(axis)) for cut in ((bound, end), (b.ints(0), bound))]
        result = b.node("Concat", *parts, axis=axis)
    b.hidden.update(name for name in list(b.values)[first:] if name != result)


def dilated(b: Builder) -> None:
    """Add a MaxPool whose windows have gaps."""
    x = b.pick("f", (3, 4, 5))
    rank = len(b.shape(x)) - 2
    b.node("MaxPool", x, kernel_shape=[b.number(1, 3)] * rank, dilations=[b.number(1, 2) for _ in range(rank)])


WINDOWS: tuple[Step, ...] = (
    *(convolve, convolve, deconvolve, pool, pool, pool, dilated, roll, roll, roll, slice_, slice_, gather, pad, unary),
)


def random_windows(seed: int, number: int) -> RandomModel:
    """Return model `number` of a seed: one to four windows, slices or rolls over sizes and batches of 1 to 5."""
    rng = np.random.default_rng([seed, number, 3])
    while True:
        b = Builder(rng, int(rng.choice([18, 20, 23])))
        rank = b.choice((3, 3, 4, 4, 5))
        shape = [f"s{axis}" if b.chance(0.2 if axis == 1 else 0.7) else b.number(1, 5) for axis in range(rank)]
        sizes = {f"s{axis}": (rng.permutation(3)[:2] + 3).tolist() for axis in range(rank)}
        add_input(b, tuple(shape), sizes, runs=2)
        most = b.number(1, 4)
        for _ in b.steps(WINDOWS, 3 * most):
            if len(b.nodes) >= most:
                break
        if b.nodes:
            model = completed(b)
            for _ in range(_SMALL_RUNS):
                model = _also_at(b, model)
            return model


def _also_at(b: Builder, model: RandomModel) -> RandomModel:
    """Return the model at further sizes of 1 to 5; outputs that ONNX Runtime refuses are empty."""
    sizes = {size: b.number(1, 5) for shape in model.inputs.values() for size in shape if isinstance(size, str)}
    known: dict[str, Array] = dict(model.constants)
    for name, shape in model.inputs.items():
        fixed = [sizes[size] if isinstance(size, str) else size for size in shape]
        known[name] = b.rng.standard_normal(fixed).astype(np.float32)
    try:
        for node in model.nodes:
            known.update(zip(node.output, evaluate(node, model.opset, known), strict=True))
    except NoFit:
        known = {name: np.zeros(0, np.float32) for name in model.values} | known
    grown = {name: [*arrays, known[name]] for name, arrays in model.values.items() if name in known}
    return replace(model, values=grown)
