"""Arithmetic on tensors that depend only on dynamic sizes, such as `x.shape`, `arange` and `zeros`.

Every operator here treats the cells of a `SymbolicTensor` as elements, and renames the axis indices in them if axes
move. If sizes cannot express a result (an undecided comparison, a fraction of a size), the importers emit layers.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from onnx2ncnn_opt.ir.dim import Shape, product
from onnx2ncnn_opt.onnx.fold.sizes import elementwise, movement
from onnx2ncnn_opt.onnx.fold.sizes.cells import (
    INT,
    MOST_CELLS,
    Attributes,
    Known,
    Operator,
    as_constant,
    as_symbolic,
    or_none,
    vector,
)
from onnx2ncnn_opt.onnx.value import SymbolicTensor

_OPERATORS: Mapping[str, Operator] = {**elementwise.OPERATORS, **movement.OPERATORS}


def shape_of(shape: Shape, start: int = 0, end: int | None = None) -> Known:
    """Return the result of ONNX's Shape (with the `start` and `end` of opset 15)."""
    return as_constant(vector(shape[start:end]))


def size_of(shape: Shape) -> Known:
    """Return the result of ONNX's Size."""
    return as_constant(SymbolicTensor(np.array(product(shape), dtype=object), (), INT))


def evaluate(operator: str, inputs: Sequence[Known | None], attributes: Attributes) -> Known | None:
    """Return the result of an operator; None if sizes cannot express it."""
    function = _OPERATORS.get(operator)
    operands = [as_symbolic(x) for x in inputs if x is not None]
    if function is None or None in inputs[: len(operands)]:
        return None
    result = or_none(function, operands, attributes)
    return None if result is None or result.cells.size > MOST_CELLS else as_constant(result)
