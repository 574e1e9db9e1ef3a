"""Size limits of results: a model of a kilobyte can request a huge tensor, with OneHot of a depth of a billion."""

import math
from collections.abc import Iterable

import onnx_ir

from onnx2ncnn_opt.ir.dim import Shape, at_most
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.fold.evaluate import LIMIT
from onnx2ncnn_opt.onnx.fold.inferred import inferred_types
from onnx2ncnn_opt.onnx.lower.checks import Refusal
from onnx2ncnn_opt.onnx.value import Item, NodeItems, SymbolicTensor, Tensor

MOST_ELEMENTS = 2**28  # of one result: 1 GiB of float32
_LEAST_FOLDED = 2**31
_FOLDED_PER_BYTE = 32  # constants grow when they are folded: from 4 bits to 32, and again in another layout
MOST_STEPS = 64  # unrolled steps of an operator with a state
# The operators for which an attribute or an operand's value determines the size of the result.
_SIZED = frozenset(
    {"AffineGrid", "BlackmanWindow", "CenterCropPad", "Col2Im", "ConstantOfShape", "DFT", "Expand", "EyeLike"}
    | {"HammingWindow", "HannWindow", "MaxUnpool", "MelWeightMatrix", "OneHot", "Pad", "Range", "Resize", "STFT"}
    | {"Tile", "Trilu", "Upsample"}
)
_JOINS = frozenset({"Concat", "ConcatFromSequence"})  # a chain of these can double a tensor in each node
_WIDEST = 8  # bytes of the widest element


def require_room(elements: int, what: str) -> None:
    """Raise Refusal if an importer would create a constant of too many elements."""
    if elements * _WIDEST > LIMIT:
        raise Refusal(f"{what} of {elements} numbers is too large: {LIMIT // _WIDEST} are the most to compute")


class MemoryBudget:
    """The budget of all constants that a model computes."""

    def __init__(self, stored: Iterable[Array], *, least: int = _LEAST_FOLDED) -> None:
        """Start with `least` bytes, and more for the model's `stored` constants."""
        self._left = least + _FOLDED_PER_BYTE * sum(array.nbytes for array in stored)

    def take(self, arrays: Iterable[Array]) -> None:
        """Count computed constants; raise Refusal if all of them together are too large."""
        self._left -= sum(array.nbytes for array in arrays)
        if self._left < 0:
            raise Refusal("the constants that the model computes are too large in all", "export it with fewer of them")


def check_size(node: onnx_ir.Node, opset: int, operands: NodeItems) -> None:
    """Raise Refusal if a result of the node is known to be larger than the budget."""
    if node.op_type in _SIZED and not node.domain:
        for type in inferred_types(onnx_ir.serde.serialize_node(node), opset, operands):
            dims = [] if type is None else type.shape.dim
            if all(dim.HasField("dim_value") for dim in dims):
                _require_small(tuple(dim.dim_value for dim in dims))


def check_results(node: onnx_ir.Node, results: Iterable[Item | None]) -> None:
    """Raise Refusal if a result is larger than the budget at every size of its dynamic dimensions."""
    if (node.op_type in _SIZED or node.op_type in _JOINS) and not node.domain:
        for result in results:
            if isinstance(result, (Tensor, SymbolicTensor)):
                _require_small(result.shape)


def _require_small(shape: Shape) -> None:
    if math.prod(max(1, -(at_most(-size) or 0)) for size in shape) > MOST_ELEMENTS:
        text = " x ".join(map(str, shape))
        limit = f"{MOST_ELEMENTS} are the most that a tensor may have"
        raise Refusal(f"its result of {text} elements is too large: {limit}")
