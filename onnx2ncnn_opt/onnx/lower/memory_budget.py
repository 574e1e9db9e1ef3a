"""The size limit of tensors that a model requests with a number: OneHot with a depth of a billion takes a kilobyte."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir
from onnx.shape_inference import infer_node_outputs

from onnx2ncnn_opt.ir.dim import Shape, at_most
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.fold.evaluate import LIMIT
from onnx2ncnn_opt.onnx.lower.builder import Refusal
from onnx2ncnn_opt.onnx.value import Constant, Item, SymbolicTensor, Tensor

MOST_ELEMENTS = 2**28  # of one result: 1 GiB as ncnn holds it
_LEAST_FOLDED = 2**31
_FOLDED_PER_BYTE = 32  # constants grow when they are folded: from 4 bits to 32, and again in another layout
MOST_STEPS = 64  # of an operator with a state, written out one after the other
# The operators whose results are as large as an attribute or an operand says.
_SIZED = frozenset(
    {"AffineGrid", "BlackmanWindow", "CenterCropPad", "Col2Im", "ConstantOfShape", "DFT", "Expand", "EyeLike"}
    | {"HammingWindow", "HannWindow", "MaxUnpool", "MelWeightMatrix", "OneHot", "Pad", "Range", "Resize", "STFT"}
    | {"Tile", "Trilu", "Upsample"}
)
_JOINS = frozenset({"Concat", "ConcatFromSequence"})  # which double a tensor in each of many nodes
_WIDEST = 8  # bytes of the widest element
_LONGEST_SIZES = 64  # elements of an operand that says sizes


def require_room(elements: int, what: str) -> None:
    """Refuse a constant that an importer would make, where it has too many elements."""
    if elements * _WIDEST > LIMIT:
        raise Refusal(f"{what} of {elements} numbers is too large: {LIMIT // _WIDEST} are the most to compute")


class MemoryBudget:
    """The budget of all constants that a model computes."""

    def __init__(self, given: Iterable[Array], *, least: int = _LEAST_FOLDED) -> None:
        """`given` are the constants that the model holds; at least `least` bytes may be computed."""
        self._left = least + _FOLDED_PER_BYTE * sum(array.nbytes for array in given)

    def take(self, arrays: Iterable[Array]) -> None:
        """Count constants that were computed; raises Refusal where all of them together are too large."""
        self._left -= sum(array.nbytes for array in arrays)
        if self._left < 0:
            raise Refusal("the constants that the model computes are too large in all", "export it with fewer of them")


def check_size(node: onnx_ir.Node, opset: int, operands: Sequence[Item | None]) -> None:
    """Raise Refusal if a result of the node is known to be larger than the budget."""
    if node.op_type in _SIZED and not node.domain:
        largest: tuple[int, ...] = max(_shapes(node, opset, operands), key=math.prod, default=())
        _require_small(largest)


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


def _shapes(node: onnx_ir.Node, opset: int, operands: Sequence[Item | None]) -> list[tuple[int, ...]]:
    """Return the shapes of the node's results, those that ONNX can tell."""
    types: dict[str, onnx.TypeProto] = {}
    data: dict[str, onnx.TensorProto] = {}
    for value, operand in zip(node.inputs, operands, strict=True):
        if value is None or not value.name or not isinstance(operand, (Tensor, Constant)):
            continue
        dims = [size if isinstance(size, int) else None for size in operand.shape]
        try:
            elements = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(operand.dtype.type))
        except KeyError:
            return []
        types[value.name] = onnx.helper.make_tensor_type_proto(elements, dims)
        if isinstance(operand, Constant) and operand.array.size <= _LONGEST_SIZES:
            data[value.name] = onnx.numpy_helper.from_array(operand.array, value.name)
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
        proto = onnx_ir.serde.serialize_node(node)
        found: Mapping[str, onnx.TypeProto] = infer_node_outputs(
            schema, proto, types, data, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=10
        )
    except (onnx.defs.SchemaError, onnx.shape_inference.InferenceError, KeyError, ValueError, TypeError):
        return []  # the importer says what is wrong
    shapes = [type.tensor_type.shape.dim for type in found.values() if type.tensor_type.HasField("shape")]
    fixed = [shape for shape in shapes if all(dim.HasField("dim_value") for dim in shape)]
    return [tuple(dim.dim_value for dim in shape) for shape in fixed]
