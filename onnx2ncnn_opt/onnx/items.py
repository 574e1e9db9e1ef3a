"""Proof that the items of a batch stay apart.

ncnn runs a net over a Mat's batch, item by item. Suppose that item i of the outputs depends only on item i of the
inputs. Then a model with a dynamic batch becomes the net of one item, without additional layers. `Batch` proves this
node by node with rules, which importers register as ``items=``. A rule returns the axis of the items in results.
A tensor is the same for each item, or has items: reshaped to ``[before, batch, after]``, its slice ``[:, i]`` is the
value that the model computes for item i alone. The results of an operator without a rule are unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym, at_least, axis_index, exact_div, product, substituted
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.value import Constant, Item, NodeItems, SymbolicTensor, Tensor, TensorSequence

if TYPE_CHECKING:  # `optimize` imports the registry without onnx_ir
    import onnx_ir


class ItemsMixed(Exception):
    """Raised by a rule: the items may not stay apart."""


def require(is_apart: bool) -> None:
    """Raise ItemsMixed unless a condition for separate items holds."""
    if not is_apart:
        raise ItemsMixed


class Items(NamedTuple):
    """The place of the items in a tensor; `from_inputs`: they depend on the inputs, not only on the number of items."""

    before: Dim
    from_inputs: bool


_UNKNOWN = "unknown"


class Output(NamedTuple):
    """The shape of an output, and its batch axis; None if it is the same for each item."""

    shape: Shape
    axis: int | None


def _shape_of(item: Item | None) -> Shape:
    if item is None or isinstance(item, TensorSequence):
        raise ItemsMixed
    return item.shape


class Indices(NamedTuple):
    """Known integers for each item: `cells` as in a `SymbolicTensor` of `shape`; `number` is the item's index."""

    axis: int
    number: Sym
    shape: Shape
    cells: Array

    def first_item(self, cells: Array, stride: Dim) -> list[Dim]:
        """Return the cells of the first item; raise ItemsMixed unless they grow by `stride` from item to item."""
        first = [cell.subs({str(self.number): 0}) if isinstance(cell, Sym) else int(cell) for cell in cells.flat]
        require(all(cell - start == self.number * stride for cell, start in zip(cells.flat, first, strict=True)))
        return first

    def is_within(self, index: Dim, size: Dim) -> bool:
        """Return True if an index is, at all positions, inside an axis of `size`."""
        last = {f"#{len(self.shape) - 1 - axis}": size - 1 for axis, size in enumerate(self.shape)}
        if isinstance(index, int):
            return index >= 0 and at_least(size - 1 - index, 0)
        is_plain = all(isinstance(factor, str) for factors in index.terms for factor in factors)
        return is_plain and min(index.terms.values()) >= 0 and at_least(size - 1 - index.subs(last), 0)


@dataclass
class NodeView:
    """The argument of a rule: a node, its operands and its results."""

    batch: Batch
    node: onnx_ir.Node
    operands: NodeItems
    results: NodeItems
    outer: set[Dim] = field(default_factory=set)  # outer repetitions of the batch
    is_batch: bool = False  # set by rules of operators that require the axis to be a batch

    def operand(self, index: int) -> Item | None:
        """Return an operand, None if it is absent."""
        return self.operands[index] if index < len(self.operands) else None

    def shape(self, index: int) -> Shape:
        """Return the shape of an operand."""
        return _shape_of(self.operand(index))

    def axis(self, index: int) -> int | None:
        """Return the axis of an operand that has the items; None if it is absent or the same for each item."""
        items = self.batch.items_of(self.operand(index))
        if isinstance(items, str):
            raise ItemsMixed
        if items is None:
            return None
        shape = self.shape(index)
        axis = self.batch.axis_of(shape)
        outer = None if axis is None else exact_div(items.before, product(shape[:axis]))
        if axis is None or outer is None or exact_div(shape[axis], self.batch.size * outer) is None:
            raise ItemsMixed
        self.outer.add(outer)
        return axis

    def only(self, *indices: int) -> None:
        """Raise ItemsMixed if operands other than these have items."""
        require(all(self.axis(i) is None for i in range(len(self.operands)) if i not in indices))

    def indices(self, index: int) -> Indices:
        """Return an operand of known integers for each item; raise ItemsMixed for any other operand."""
        operand = self.operands[index]
        axis = self.batch.axis_of(operand.shape) if isinstance(operand, SymbolicTensor) else None
        if not isinstance(operand, SymbolicTensor) or axis is None or operand.shape[axis] != self.batch.size:
            raise ItemsMixed
        number = axis_index(operand.rank - 1 - axis)
        cells = np.broadcast_to(operand.cells, (1,) * (operand.rank - operand.cells.ndim) + operand.cells.shape)
        require(cells.shape[axis] == 1 and not any(map(self.batch.depends, cells.flat)))
        return Indices(axis, number, operand.shape, cells)

    def inner(self, index: int) -> Dim:
        """Return the number of consecutive elements of the operand's axis that each item has."""
        axis = self.axis(index)
        size = None if axis is None else exact_div(self.shape(index)[axis], self.batch.size)
        if size is None or self.outer != {1}:
            raise ItemsMixed
        return size

    def ints(self, attribute: str, index: int = 0) -> tuple[int, ...] | None:
        """Return the integers of an attribute or, in newer opsets, a constant operand; None if both are absent."""
        if attribute in self.node.attributes:
            value = self.node.attributes[attribute]
            return (value.as_int(),) if value.type.name == "INT" else tuple(value.as_ints())
        operand = self.operand(index) if index else None
        if operand is None:
            return None
        if not isinstance(operand, Constant):
            raise ItemsMixed
        return tuple(map(int, operand.array.reshape(-1)))

    def number(self, attribute: str, default: int) -> int:
        """Return an attribute of one integer."""
        return self.node.attributes.get_int(attribute, default)

    def text(self, attribute: str) -> str:
        """Return a string attribute; empty if there is none."""
        return self.node.attributes.get_string(attribute, "")

    @property
    def result(self) -> Shape:
        """The shape of the first result."""
        return _shape_of(self.results[0])


# Returns the axis of the items in all results, or one axis for each of them (-1: unknown); raises ItemsMixed.
# None: the results have the elements of the first operand in the same order.
ItemRule: TypeAlias = Callable[[NodeView], "Sequence[int | None] | int | None"]


class Batch:
    """The proof for one dynamic batch; the importer passes it the nodes in order."""

    def __init__(self, size: Sym, inputs: Mapping[str, int], *, is_known: bool) -> None:
        """`size` is one symbol, and `inputs` have it as this axis; `is_known`: it certainly is a batch."""
        [self.name] = size.names()
        self.size = size
        self.inputs = inputs
        self.outputs: dict[str, Output] = {}
        self._is_known = is_known
        self._items: dict[Item, Items | str | None] = {}

    def add_input(self, x: Tensor) -> None:
        """Record an input of the model."""
        axis, has_items = self.axis_of(x.shape), any(map(self.depends, x.shape))
        self._items[x] = None if not has_items else _UNKNOWN if axis is None else Items(product(x.shape[:axis]), True)

    def add_node(self, node: onnx_ir.Node, rule: ItemRule | None, operands: NodeItems, results: NodeItems) -> None:
        """Record a node, its operands and its results."""
        new = [result for result in results if isinstance(result, Tensor) and result not in self._items]
        if not new:
            return
        before = [self.items_of(operand) for operand in operands]
        is_plain = not any(a.type.name == "GRAPH" for a in node.attributes.values())
        if is_plain and not any(before) and not any(self.depends(size) for result in new for size in result.shape):
            self._items.update(dict.fromkeys(new))
            return
        if rule is None:
            return
        view = NodeView(self, node, operands, results)
        try:
            axes = rule(view)
        except ItemsMixed:
            return
        self._is_known |= view.is_batch
        from_inputs = any(isinstance(items, Items) and items.from_inputs for items in before)
        if axes is None:
            same = before[0] if isinstance(before[0], Items) else _UNKNOWN
            self._items.update((result, same) for result in results if isinstance(result, Tensor))
            return
        if len(view.outer) > 1:
            return
        (outer,) = view.outer or {1}
        for result, axis in zip(results, [axes] * len(results) if isinstance(axes, int) else axes, strict=False):
            if not isinstance(result, Tensor) or axis is None or self.axis_of(result.shape) != axis:
                continue
            if exact_div(result.shape[axis], self.size * outer) is not None:
                self._items[result] = Items(product(result.shape[:axis]) * outer, from_inputs)

    def is_free(self, outputs: Mapping[str, Item | None], minimum: Collection[Dim], *, is_refused: bool) -> bool:
        """Return True if the model computes each item on its own; then set `self.outputs`.

        A first axis that may be something else, such as a sequence, counts if the model `is_refused` otherwise.
        """
        # Below its `minimum`, a dimension leads to another net, so a batch of one item may be special.
        counts: tuple[Dim, Dim] = 1, axis_index(0) + 1
        limits = ([substituted(size, {self.name: count}) for count in counts] for size in minimum)
        if not (self._is_known or is_refused) or not all(at_least(one - more, 0) for one, more in limits):
            return False
        try:
            self.outputs = {name: self._output(result) for name, result in outputs.items()}
        except ItemsMixed:
            return False
        return any(output.axis is not None for output in self.outputs.values())

    def _output(self, result: Item | None) -> Output:
        shape, items = _shape_of(result), self.items_of(result)
        if items is None:
            return Output(shape, None)
        axis = self.axis_of(shape)
        if isinstance(items, str) or not items.from_inputs or axis is None:
            raise ItemsMixed
        require(shape[axis] == self.size and product(shape[:axis]) == items.before)
        return Output(shape, axis)

    def items_of(self, item: Item | None) -> Items | str | None:
        """Return the place of a value's items; None if the value is the same for each item."""
        if item is None or isinstance(item, Constant):
            return None
        if not isinstance(item, SymbolicTensor):
            return self._items.get(item, _UNKNOWN)
        cells = [cell for cell in item.cells.flat if isinstance(cell, Sym)]
        if not any(map(self.depends, (*cells, *item.shape))):
            return None
        axis = self.axis_of(item.shape)
        if axis is None or any(map(self.depends, cells)) or item.varies(axis - item.rank):
            return _UNKNOWN
        return Items(product(item.shape[:axis]), False)

    def axis_of(self, shape: Shape) -> int | None:
        """Return the axis that has the items; None if there is none, or several depend on the batch."""
        dependent = [axis for axis, size in enumerate(shape) if self.depends(size)]
        if len(dependent) != 1:
            return None
        inner = exact_div(shape[dependent[0]], self.size)
        return None if inner is None or self.depends(inner) else dependent[0]

    def depends(self, size: Dim) -> bool:
        """Return True if a size, or another number, depends on the number of items."""
        return isinstance(size, Sym) and self.name in size.names()


def elementwise(node: NodeView) -> int:
    """Apply the rule of elementwise operators, with broadcasting."""
    axes = {axis - len(node.shape(i)) for i in range(len(node.operands)) if (axis := node.axis(i)) is not None}
    shapes = [node.shape(i) for i, operand in enumerate(node.operands) if operand is not None]
    require(len(axes) == 1)
    [axis] = axes
    require(len({shape[axis] for shape in shapes if len(shape) >= -axis} - {1}) == 1)
    return max(map(len, shapes)) + axis


def batch(*operands: int, axis: int = 0) -> ItemRule:
    """Return the rule of operators whose `operands` and first result have a batch `axis`."""

    def rule(node: NodeView) -> Sequence[int]:
        node.only(*operands)
        require({node.axis(i) for i in operands} <= {axis, None})
        require(node.result[axis] == node.shape(operands[0])[axis])
        node.is_batch = True
        return (axis,)

    return rule


def kept(node: NodeView, mixed: Collection[int], sizes: Collection[int] = ()) -> int:
    """Return the axis of operand 0's items; raise ItemsMixed if it is `mixed`, or others except `sizes` have items."""
    node.only(0, *sizes)
    axis, rank = node.axis(0), len(node.shape(0))
    if axis is None or axis in {at % rank for at in mixed}:
        raise ItemsMixed
    return axis


def along(default: int | tuple[int, ...] | None, attribute: str = "axis", index: int = 0) -> Callable[[NodeView], int]:
    """Return the rule of operators that mix elements along axes: an attribute, an operand, or `default` (None: all)."""

    def rule(node: NodeView) -> int:
        usual = range(len(node.shape(0))) if default is None else (default,) if isinstance(default, int) else default
        return kept(node, node.ints(attribute, index) or usual)

    return rule


def from_axis(default: int) -> ItemRule:
    """Return the rule of operators that combine elements along an axis and all axes after it."""
    return lambda node: kept(node, range(len(node.shape(0)))[node.number("axis", default) :])


def reduced(default: int | None, attribute: str, index: int = 0) -> ItemRule:
    """Return the rule of `along` for operators that drop these axes unless ``keepdims`` is 1."""

    def rule(node: NodeView) -> int:
        axis, rank = along(default, attribute, index)(node), len(node.shape(0))
        if node.number("keepdims", 1):
            return axis
        dropped = {at % rank for at in node.ints(attribute, index) or (default or 0,)}
        return axis - sum(at < axis for at in dropped)

    return rule


def in_order(node: NodeView) -> None:
    """Apply the rule of operators that keep the order of the elements in another shape, such as Reshape."""
    node.axis(0)


def product_of(first: int, second: int) -> ItemRule:
    """Return the rule of numpy.matmul of two operands; the other operands have no items."""

    def rule(node: NodeView) -> int:
        node.only(first, second)
        shapes, axes = (node.shape(first), node.shape(second)), (node.axis(first), node.axis(second))
        rank = max(map(len, shapes))
        a, b = (None if axis is None else axis - len(shape) for axis, shape in zip(axes, shapes, strict=True))
        require(a != -1 and b != -2 and (len(shapes[1]) != 1 or b is None))
        if min(map(len, shapes)) < 2:  # the vector's axis and the other operand's go
            place = axes[1] if axes[0] is None else axes[0]
            if place is None:
                raise ItemsMixed
            return place - (b == -1)
        if a is not None and b is not None:
            require(a == b and a <= -3 and shapes[0][a] == shapes[1][b])
            node.is_batch = True
            return rank + a
        at, other = (a, shapes[1]) if a is not None else (b, shapes[0])
        if at is None or (at < -2 and len(other) >= -at and other[at] != 1):
            raise ItemsMixed
        return rank + at

    return rule
