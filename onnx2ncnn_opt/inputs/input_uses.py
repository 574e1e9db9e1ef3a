"""The uses of an input's values in the model, which decide the values to draw."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir

from onnx2ncnn_opt.ir.reached import reached
from onnx2ncnn_opt.onnx.ops import traits_of
from onnx2ncnn_opt.onnx.read.constants import single_number
from onnx2ncnn_opt.onnx.read.load import LoadedModel
from onnx2ncnn_opt.onnx.read.structure import before
from onnx2ncnn_opt.onnx.registry import Traits

_HIDING = -1e4  # added to a score: its exp is 0
# Factor and summand with which a node makes its result of the input at an index, and of a number as the other input.
_AFFINE: Mapping[tuple[str, int], Callable[[float], tuple[float, float]]] = {
    **dict.fromkeys([("Add", 0), ("Add", 1)], lambda number: (1.0, number)),
    **dict.fromkeys([("Mul", 0), ("Mul", 1)], lambda number: (number, 0.0)),
    ("Sub", 0): lambda number: (1.0, -number),
    ("Sub", 1): lambda number: (-1.0, number),
    ("Div", 0): lambda number: (1.0 / number, 0.0),
}
_COMPARISONS = frozenset(("Less", "LessOrEqual", "Greater", "GreaterOrEqual"))
_MOVES = frozenset(("Cast", "Expand", "Identity", "Reshape", "Squeeze", "Unsqueeze"))
_ARITHMETIC = _MOVES | {"Add", "Ceil", "Div", "Floor", "Max", "Min", "Mul", "Sub"}


@dataclass(frozen=True)
class Uses:
    """The uses of an input's values in the model, also after nodes that only move them."""

    table: int | None  # the size of the smallest table that they index
    domain: tuple[float, float] | None  # the common domain of the functions that take them
    divides: bool  # they are divisors, or a divisor is 0 if they are
    is_guarded: bool  # they are compared or selected
    is_mask: bool = False  # they become bools; or they, or 1 minus them, multiply a number that hides scores
    is_counted: bool = False  # they are a mask whose sum must be its length
    are_lengths: bool = False  # numbers computed from them are compared with positions, or index a dynamic axis

    @classmethod
    def of(cls, value: onnx_ir.Value, model: LoadedModel) -> "Uses":
        """Return the uses of an input."""
        uses = [(node, index, _traits(node, model)) for node, index in _uses(value, model)]
        divisions = [node for node, index in _uses(value, model, zeros=True) if _divisor_of(node, model) == index]
        quotients = [node for by in divisions for node, _ in _uses(by.outputs[0], model)]
        inverses = [node.outputs[0] for node, index, _ in uses if node.op_type == "Sub" and index == 1]
        return cls(
            table=min((size for node, index, _ in uses if (size := _size_of_table(node, index, model))), default=None),
            domain=_common(_domains(value, model)),
            divides=bool(divisions),
            is_guarded=any(_traits(node, model).selects for node in (*quotients, *(node for node, _, _ in uses))),
            is_mask=any(_becomes_bool(node) for node, _, _ in uses)
            or any(_hides(node) for mask in (value, *inverses) for node, _ in _uses(mask, model)),
            is_counted=any(_traits(user, model).counts == index for user, index in _uses_of_sums(uses, model)),
            are_lengths=len(value.shape or ()) < 2 and _are_lengths(value, model),
        )


def _traits(node: onnx_ir.Node, model: LoadedModel) -> Traits:
    return traits_of(node.domain, node.op_type, model.opsets.get(node.domain, 1))


def _divisor_of(node: onnx_ir.Node, model: LoadedModel) -> int | None:
    """Return the index of a divisor: `Traits.divisor`, and the base of a negative power."""
    exponent = single_number(node.inputs[1]) if node.op_type == "Pow" else None
    return 0 if exponent is not None and exponent < 0 else _traits(node, model).divisor


def _uses(value: onnx_ir.Value, model: LoadedModel, *, zeros: bool = False) -> Iterator[tuple[onnx_ir.Node, int]]:
    """Yield every node that takes the elements of `value`, moved, resized or not, and the index of that input.

    With `zeros` yield also nodes that take values which are 0 if these are, such as multiples, and sums of floats.
    """
    has_sums = zeros and value.dtype is not None and value.dtype.is_floating_point()
    means = ("Resize", "ReduceSum", "ReduceMean") if has_sums else ("Resize",)

    def copies(value: onnx_ir.Value) -> Iterator[onnx_ir.Value]:
        for node, index in value.uses():
            traits = _traits(node, model)
            if traits.moves_input(index) or (zeros and traits.keeps_zeros) or (not index and node.op_type in means):
                yield from node.outputs

    yield from (use for copy in reached([value], copies) for use in copy.uses())


def _domains(value: onnx_ir.Value, model: LoadedModel) -> Iterator[tuple[float, float]]:
    """Yield the domains of functions that take `value`, or a multiple of it plus a number: log(250 * x + 0.05)."""

    def results(known: tuple[onnx_ir.Value, float, float]) -> Iterator[tuple[onnx_ir.Value, float, float]]:
        for node, index in _uses(known[0], model):
            affine = _AFFINE.get((node.op_type, index))
            if affine is not None and (number := single_number(node.inputs[1 - index])):
                factor, summand = affine(number)
                yield node.outputs[0], known[1] * factor, known[2] * factor + summand

    for result, factor, summand in reached([(value, 1.0, 0.0)], results):
        for node, index in _uses(result, model):
            if (ends := (_traits(node, model).domains or {}).get(index)) and factor:
                low, high = sorted((end - summand) / factor for end in ends)
                yield low, high


def _common(domains: Iterable[tuple[float, float]]) -> tuple[float, float] | None:
    """Return the numbers of all domains, without those that would leave none; None without domains."""
    low, high = -math.inf, math.inf
    for other in sorted(domains, reverse=True):
        if max(low, other[0]) < min(high, other[1]):
            low, high = max(low, other[0]), min(high, other[1])
    return (low, high) if low < high < math.inf else None


def _uses_of_sums(
    uses: Iterable[tuple[onnx_ir.Node, int, Traits]], model: LoadedModel
) -> Iterator[tuple[onnx_ir.Node, int]]:
    """Yield the uses of sums, and of sums minus a constant."""
    for total in (node.outputs[0] for node, _, _ in uses if node.op_type == "ReduceSum"):
        for node, index in _uses(total, model):
            yield node, index
            if node.op_type == "Sub":
                yield from _uses(node.outputs[0], model)


def _are_lengths(value: onnx_ir.Value, model: LoadedModel) -> bool:
    """Return True if numbers computed from a value are compared with 0, 1, ..., index a dynamic axis, or end steps."""
    results = reached(
        [value], lambda item: (out for node, _ in item.uses() if node.op_type in _ARITHMETIC for out in node.outputs)
    )
    for result in results:
        for node, index in result.uses():
            if node.op_type in _COMPARISONS and any(map(_are_positions, filter(None, node.inputs))):
                return True
            if node.op_type in ("GRU", "LSTM", "RNN") and index == 4:
                return True
            if result is not value and _size_of_table(node, index, model) == 1:
                return True
    return False


def _are_positions(value: onnx_ir.Value) -> bool:
    value = before(value, _MOVES)
    if (node := value.producer()) is not None:
        return node.op_type == "Range"
    tensor = value.const_value
    return tensor is not None and tensor.size > 1 and bool((tensor.numpy().ravel() == np.arange(tensor.size)).all())


def _hides(node: onnx_ir.Node) -> bool:
    """Return True if a node multiplies a mask by a number such as -1e4, which hides scores."""
    numbers = map(single_number, node.inputs) if node.op_type == "Mul" else ()
    return any(number is not None and number <= _HIDING for number in numbers)


def _becomes_bool(node: onnx_ir.Node) -> bool:
    return node.op_type == "Cast" and node.attributes.get_int("to", 0) == onnx_ir.DataType.BOOL


def _size_of_table(node: onnx_ir.Node, index: int, model: LoadedModel) -> int | None:
    """Return the number of entries of the table that an input indexes; 1 if unknown, None if it indexes none."""
    tables = _traits(node, model).indexes or {}
    if index not in tables:
        return None
    table, axis = node.inputs[tables[index]], node.attributes.get_int("axis", node.attributes.get_int("gather_axis", 0))
    # Exporters leave out the shapes between a quantised table and its Gather.
    if table is not None and table.shape is None:
        table = before(table, ("Cast", "DequantizeLinear", "Identity"))
    shape = (table.shape if table is not None else None) or ()
    size = shape[axis] if -len(shape) <= axis < len(shape) else 1
    return size if isinstance(size, int) and size > 0 else 1
