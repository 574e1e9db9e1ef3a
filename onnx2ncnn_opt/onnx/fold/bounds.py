"""Upper bounds of the number of elements in operators' results, by constant inputs (None if left out) and attributes.

An operator whose `@onnx_op` names one of these as `folds` is deterministic, has no subgraphs, and onnx.reference
computes it as ONNX Runtime does, which the tests check at every version.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

Inputs: TypeAlias = Sequence[Any]
Attributes: TypeAlias = Mapping[str, Any]
Bound: TypeAlias = Callable[[Inputs, Attributes], int]


def first(inputs: Inputs, _: Attributes) -> Any:
    """Return as many elements as the first input."""
    return inputs[0].size


def total(inputs: Inputs, _: Attributes) -> Any:
    """Return as many as all inputs have."""
    return sum(x.size for x in inputs)


def broadcast(inputs: Inputs, _: Attributes) -> Any:
    """Return the inputs, broadcast."""
    return _broadcast_size(*(x.shape for x in inputs if x is not None))


def _broadcast_size(*shapes: Sequence[int]) -> int:
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return math.prod(max(sizes) for sizes in zip(*padded, strict=True))


def sizes(inputs: Inputs, _: Attributes) -> Any:
    """Return the product of the first input's numbers."""
    return math.prod(inputs[0].tolist())


def expand(inputs: Inputs, _: Attributes) -> Any:
    """Return the first input, broadcast to the second one's numbers."""
    return _broadcast_size(inputs[0].shape, inputs[1].tolist())


def tile(inputs: Inputs, _: Attributes) -> Any:
    """Return the first input, times the second one's numbers."""
    return inputs[0].size * math.prod(inputs[1].tolist())


def arange(inputs: Inputs, _: Attributes) -> Any:
    """From start to stop."""
    start, stop, step = (x.item() for x in inputs)
    return max(0, math.ceil((stop - start) / step))


def pad(inputs: Inputs, attributes: Attributes) -> Any:
    """Return the first input and its padding."""
    pads = list(attributes["pads"]) if "pads" in attributes else inputs[1].tolist()
    data = inputs[0]
    axes = inputs[3].tolist() if len(inputs) > 3 and inputs[3] is not None else range(data.ndim)
    sizes = list(data.shape)
    for i, axis in enumerate(axes):
        sizes[axis] += max(0, pads[i]) + max(0, pads[i + len(pads) // 2])
    return math.prod(sizes)


def gather(inputs: Inputs, attributes: Attributes) -> Any:
    """Return a slice for each index."""
    data, indices = inputs
    return indices.size * (data.size // max(1, data.shape[attributes["axis"]]))


def gather_nd(inputs: Inputs, attributes: Attributes) -> Any:
    """Return a slice for each row of indices."""
    data, indices = inputs
    picked = indices.shape[-1] + attributes.get("batch_dims", 0)
    return (indices.size // max(1, indices.shape[-1])) * math.prod(data.shape[picked:])


def second(inputs: Inputs, _: Attributes) -> Any:
    """Return as many elements as the second input."""
    return inputs[1].size


def one_hot(inputs: Inputs, _: Attributes) -> Any:
    """Depth times the indices."""
    return inputs[0].size * inputs[1].item()


def matmul(inputs: Inputs, _: Attributes) -> Any:
    """Return the product's shape."""
    a, b = inputs
    return (
        _broadcast_size(a.shape[:-2], b.shape[:-2]) * math.prod(a.shape[-2:-1]) * math.prod(b.shape[-1:][b.ndim < 2 :])
    )


def gemm(inputs: Inputs, attributes: Attributes) -> Any:
    """Rows times columns."""
    a, b = inputs[:2]
    return a.shape[1 if attributes["transA"] else 0] * b.shape[0 if attributes["transB"] else 1]


def twice(inputs: Inputs, _: Attributes) -> Any:
    """Two results like the first input."""
    return 2 * inputs[0].size


# Operators that fold, and have no importer.
FOLDED_ONLY: Mapping[str, Bound] = {
    "Constant": lambda *_: 1,  # it is in the model already, however large
    "NonZero": lambda inputs, _: inputs[0].size * max(1, inputs[0].ndim),
    "Shape": lambda inputs, _: inputs[0].ndim,
    "Size": lambda *_: 1,
}
