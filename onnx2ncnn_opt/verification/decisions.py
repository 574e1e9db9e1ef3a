"""The floats that decide integer outputs, and other choices that are as good.

Right implementations choose different elements (TopK, ArgMax, ArgMin) where scores are nearly equal. So an index agrees
if its score equals the score of the model's index, up to the error of the scores.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx
from onnx import TensorProto

from onnx2ncnn_opt.ir.reached import reached
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.verification.double import FLOATS, element_types, inferred_values
from onnx2ncnn_opt.verification.tolerance import DEFAULT, INFINITE

_INDICES = {"TopK": (1, -1), "ArgMax": (0, 0), "ArgMin": (0, 0)}  # the output of indices, and the default axis
_SAME_ORDER = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
_MOVES = _SAME_ORDER - {"Cast"} | {"Transpose"}
_SIZES = ("Shape", "Size")


class Choice(NamedTuple):
    """The name of the scores whose elements an output's indices choose, and the axis."""

    scores: str
    axis: int


def choices(model: onnx.ModelProto) -> dict[str, Choice]:
    """Return the choice that makes each output of indices, unless the scores are exact, because they are an input."""
    producers = _producers(model)
    result = {}
    for value in model.graph.output:
        name = _origin(value.name, producers)
        node = producers.get(name)
        if node is None or node.domain or node.op_type not in _INDICES:
            continue
        output, axis = _INDICES[node.op_type]
        if node.output[output] == name and node.input[0] in producers:
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), axis)
            result[value.name] = Choice(node.input[0], axis)
    return result


def scores(model: onnx.ModelProto) -> dict[str, set[str]]:
    """Return the floats that decide each integer output, also before nodes that only move them.

    Example: the inputs of an ArgMax and of the Reshape before it. Outputs without such floats are left out. Values of
    unknown types count as floats.
    """
    producers, types = _producers(model), element_types(model, inferred_values(model))

    def is_float(name: str) -> bool:
        return types.get(name, TensorProto.FLOAT) in FLOATS

    def operands(name: str) -> Sequence[str]:
        """Return the computed values that decide a value."""
        node = producers[name]
        if node.op_type in _SIZES or (is_float(name) and node.op_type not in _MOVES):
            return ()
        return [operand for operand in (node.input[:1] if is_float(name) else node.input) if operand in producers]

    result: dict[str, set[str]] = {}
    for value in model.graph.output:
        first = _origin(value.name, producers)
        if first in producers and not is_float(first):
            result[value.name] = set(filter(is_float, reached([first], operands)))
    return {name: floats for name, floats in result.items() if floats}


def _producers(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    return {name: node for node in model.graph.node for name in node.output if name}


def _origin(name: str, producers: Mapping[str, onnx.NodeProto]) -> str:
    """Return the value before all nodes that keep the order of its elements, such as Reshape."""
    while name in producers and producers[name].op_type in _SAME_ORDER:
        name = producers[name].input[0]
    return name


def as_good(indices: Array, reference: Array, scores: Array, spread: Array, axis: int) -> Array:
    """Return a mask of indices whose scores are as good as the reference's, in the reference's shape.

    `spread` is the effect of rounding errors on each score. Indices that occur twice in a row do not pass. Nor do other
    indices among zeros, because models rely on the order of equal zeros, for example behind a ReLU.
    """
    axis %= scores.ndim
    shape = [*scores.shape]
    shape[axis] = -1
    valid = (indices == np.rint(indices)) & (indices >= 0) & (indices < scores.shape[axis])
    actual, expected = (np.where(valid, array, 0).astype(np.int64).reshape(shape) for array in (indices, reference))
    chosen, best = (np.take_along_axis(scores, array, axis).astype(np.float64) for array in (actual, expected))
    finite = np.abs(scores) < INFINITE
    error = DEFAULT.relative * np.abs(scores[finite]).max(initial=0.0)
    error = error + sum(np.take_along_axis(spread, array, axis) for array in (actual, expected))
    unique = (actual.swapaxes(axis, -1)[..., None] == actual.swapaxes(axis, -1)[..., None, :]).sum(-1) == 1
    with np.errstate(invalid="ignore"):
        near = np.abs(chosen - best) <= error
    result = near & unique.swapaxes(axis, -1) & ((chosen != 0) | (best != 0))
    return np.asarray(result.reshape(reference.shape) & valid)
