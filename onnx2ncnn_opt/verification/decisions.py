"""Decisions of a model: the indices of TopK, ArgMax and ArgMin, judged by the scores of the elements that they choose.

Two right implementations choose different elements where scores are as good as equal. So an index agrees if its score
is that of the model's index, up to the error of the scores. Choices among zeros are meant, as those behind a ReLU.
"""

from typing import NamedTuple

import numpy as np
import onnx
from onnx import helper

from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.verification.tolerance import DEFAULT, INFINITE

_INDICES = {"TopK": (1, -1), "ArgMax": (0, 0), "ArgMin": (0, 0)}  # the output of indices, and the default axis
_SAME_ORDER = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})


class Choice(NamedTuple):
    """The value of the scores that indices choose from, and their axis."""

    scores: str
    axis: int


def choices(model: onnx.ModelProto) -> dict[str, Choice]:
    """Return the choices behind the model's outputs, by output; without those among its inputs, which are exact."""
    producers = {name: node for node in model.graph.node for name in node.output}
    found = {}
    for value in model.graph.output:
        name, node = value.name, producers.get(value.name)
        while node is not None and node.op_type in _SAME_ORDER:
            name, node = node.input[0], producers.get(node.input[0])
        if node is None or node.domain or node.op_type not in _INDICES:
            continue
        output, axis = _INDICES[node.op_type]
        if node.output[output] == name and node.input[0] in producers:
            attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
            found[value.name] = Choice(node.input[0], attributes.get("axis", axis))
    return found


def as_good(indices: Array, reference: Array, scores: Array, spread: Array, axis: int) -> Array:
    """Return where indices choose scores that are as good as the reference's, in the reference's shape.

    `spread` is how far each score moves with rounding errors. Indices that a row has twice are not as good.
    """
    axis %= scores.ndim
    shape = [*scores.shape]
    shape[axis] = -1
    known = (indices == np.rint(indices)) & (indices >= 0) & (indices < scores.shape[axis])
    mine, wanted = (np.where(known, each, 0).astype(np.int64).reshape(shape) for each in (indices, reference))
    chosen, best = (np.take_along_axis(scores, each, axis).astype(np.float64) for each in (mine, wanted))
    finite = np.abs(scores) < INFINITE
    error = DEFAULT.relative * np.abs(scores[finite]).max(initial=0.0)
    error = error + sum(np.take_along_axis(spread, each, axis) for each in (mine, wanted))
    once = (mine.swapaxes(axis, -1)[..., None] == mine.swapaxes(axis, -1)[..., None, :]).sum(-1) == 1
    with np.errstate(invalid="ignore"):
        near = np.abs(chosen - best) <= error
    result = near & once.swapaxes(axis, -1) & ((chosen != 0) | (best != 0))
    return np.asarray(result.reshape(reference.shape) & known)
