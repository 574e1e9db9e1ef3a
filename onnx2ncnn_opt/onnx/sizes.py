"""Arithmetic on sizes of which some are symbolic: the Shape-Gather-Concat chains of exporters for dynamic axes.

Arrays of dtype object hold `Dim`s. What an operator does to them is what numpy does, so that the table is short;
anything else is left to the importers, which refuse it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from onnx2ncnn_opt.ir.dim import Shape, Sym
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.value import Constant

Attributes = Mapping[str, Any]


def shape_of(shape: Shape, start: int = 0, end: int | None = None) -> Constant:
    """ONNX Shape (with the `start` and `end` of opset 15) as a constant."""
    return Constant(_array(list(shape[start:end])))


def evaluate(operator: str, inputs: Sequence[Array | None], attributes: Attributes) -> Array | None:
    """The result of an operator on symbolic sizes; None where it is not one of size arithmetic."""
    function = _OPERATORS.get(operator)
    if function is None:
        return None
    result = function([x for x in inputs if x is not None], attributes)
    return None if result is None else _array(np.asarray(result, dtype=object))


def _array(values: Any) -> Array:
    """int64 where every size is known, else an array of `Dim`s."""
    array = np.asarray(values, dtype=object)
    if any(isinstance(size, Sym) for size in array.flat):
        return array
    return array.astype(np.int64)


def _axes(x: Sequence[Array], attributes: Attributes) -> Any:
    if len(x) > 1:
        return tuple(int(a) for a in x[1].reshape(-1))
    return attributes.get("axes")


def _unsqueeze(x: Sequence[Array], attributes: Attributes) -> Array:
    return np.expand_dims(x[0], _axes(x, attributes))


def _squeeze(x: Sequence[Array], attributes: Attributes) -> Array:
    return np.squeeze(x[0], axis=_axes(x, attributes))


def _slice(x: Sequence[Array], attributes: Attributes) -> Array | None:
    if len(x) == 1:  # opset 1: attributes
        starts, ends = attributes["starts"], attributes["ends"]
        axes = attributes.get("axes", range(len(starts)))
        steps: Sequence[int] = [1] * len(starts)
    else:
        starts, ends = x[1], x[2]
        axes = x[3] if len(x) > 3 else range(len(starts))
        steps = list(map(int, x[4])) if len(x) > 4 else [1] * len(starts)
    index: list[slice] = [slice(None)] * x[0].ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if isinstance(start, Sym) or isinstance(end, Sym):
            return None  # of a symbolic length
        index[int(axis)] = slice(int(start), int(end), int(step))
    return x[0][tuple(index)]


def _cast(x: Sequence[Array], attributes: Attributes) -> Array | None:
    return x[0] if attributes["to"] in (6, 7) else None  # int32, int64; a size as float is no size any more


def _reshape(x: Sequence[Array], _: Attributes) -> Array:
    return x[0].reshape([int(n) for n in x[1]])


def _gather(x: Sequence[Array], attributes: Attributes) -> Any:
    return np.take(x[0], x[1].astype(np.int64), axis=attributes.get("axis", 0))


def _reduce_prod(x: Sequence[Array], attributes: Attributes) -> Any:
    keepdims = bool(attributes.get("keepdims", 1))
    return np.prod(x[0], axis=_axes(x, attributes), keepdims=keepdims)


def _floor_div(x: Sequence[Array], _: Attributes) -> Any:
    return x[0] // x[1]


_OPERATORS: Mapping[str, Callable[[Sequence[Array], Attributes], Any]] = {
    "Add": lambda x, _: x[0] + x[1],
    "Sub": lambda x, _: x[0] - x[1],
    "Mul": lambda x, _: x[0] * x[1],
    "Div": _floor_div,  # sizes are not negative, so ONNX's truncation is floor
    "Identity": lambda x, _: x[0],
    "Concat": lambda x, a: np.concatenate(x, axis=a["axis"]),
    "Gather": _gather,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Reshape": _reshape,
    "ReduceProd": _reduce_prod,
    "Cast": _cast,
}
