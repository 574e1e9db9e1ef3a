"""The context of an operator's importer: the net under construction, and all facts about the node."""

import math
from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir

from onnx2ncnn_opt.ir.dim import Call, Dim, Sym, at_least, calls, symbol
from onnx2ncnn_opt.ir.spec import LayerSpec
from onnx2ncnn_opt.onnx.lower.builder import Builder
from onnx2ncnn_opt.onnx.read.binding import InputInfo
from onnx2ncnn_opt.onnx.read.given import LARGEST_SIZE, parsed_size
from onnx2ncnn_opt.onnx.read.load import LoadedModel
from onnx2ncnn_opt.onnx.value import Constant, Item, Operand, Tensor

MOST_FLAGS = 64  # elements of an input that can be meant as a choice, and not as data


class MissingOperand(Exception):
    """Raised inside an importer: a part of this node was refused already."""


class ImportContext(Builder, ABC):
    """The first parameter of every importer, called `im` there."""

    def __init__(self, model: LoadedModel, types: Mapping[str, LayerSpec]) -> None:
        super().__init__(types, [value.name for value in (*model.inputs, *model.outputs)])
        self.model = model
        self.node: onnx_ir.Node  # the node that is being imported
        self._minimum: dict[Dim, int] = {}
        self._sums: dict[str, Dim] = {}  # what names of sizes are sums of, for proofs of signs

    @property
    def opset(self) -> int:
        """The model's version of ONNX's own operators."""
        return self.model.opsets.get("", 1)

    def axis(self, axis: int, rank: int) -> int:
        """Return an axis counted from the front; refused if a tensor of `rank` has none of that number."""
        if not -rank <= axis < rank:
            raise self.invalid(f"axis {axis} of a tensor of rank {rank}")
        return axis % rank

    def axes(self, axes: Sequence[int], rank: int) -> list[int]:
        """Axes counted from the front, in the given order; refused if one is named twice."""
        result = [self.axis(axis, rank) for axis in axes]
        if len(set(result)) != len(result):
            raise self.invalid(f"axes {list(axes)} of a tensor of rank {rank}")
        return result

    def demand(self, size: Dim, least: int) -> None:
        """Let the net be right only where a dynamic dimension is `least` or more, unless it surely is."""
        size = self._within_limits(size) if isinstance(size, Sym) else size
        if isinstance(size, Sym) and not self.becomes(size, least):
            self._minimum[size] = max(least, self._minimum.get(size, least))

    def _within_limits(self, size: Sym) -> Dim:
        """Return a size without minima whose order is demanded already."""
        least = [demanded for demanded, bound in self._minimum.items() if bound >= 0]
        pairs = [(call, *pair) for call in calls(size) if call.operator == "min" for pair in (call[1:], call[:0:-1])]
        found = {call: b for call, a, b in pairs if any(at_least(a - b - each, 0) for each in least)}
        return size.subs(found) if found else size

    def becomes(self, size: Dim, least: int) -> bool:
        """Return True if a size is `least` or more from some value of its only dimension on, and demand that value."""
        size = size.subs(self._sums) if isinstance(size, Sym) else size
        if isinstance(size, int):
            return size >= least
        if at_least(size.subs({str(dim): dim + (low - 1) for dim, low in self._minimum.items()}), least):
            return True
        name, *others = sorted(size.names())
        if others:
            return False
        # (h - 1)//2 is 2 or more from h = 5 on.
        found = bisect(range(LARGEST_SIZE), False, key=lambda n: at_least(size.subs({name: symbol(name) + n}), least))
        if found < LARGEST_SIZE:
            self._minimum[symbol(name)] = found + 1
        return found < LARGEST_SIZE

    def resolved(self, size: Dim) -> Dim:
        """Return a size without quotients such as 3 // n, which is 0 from n = 4 on: this is demanded."""
        factors = [factor for term in size.terms for factor in term] if isinstance(size, Sym) else []
        found = [call for call in factors if isinstance(call, Call) and call.operator == "//"]
        quotients: dict[Call, Dim] = {
            call: -(call.a < 0)
            for call in found
            if isinstance(call.a, int) and self.becomes(call.b, abs(call.a) + (call.a >= 0))
        }
        return size.subs(quotients) if isinstance(size, Sym) else size

    def is_used(self, output: int) -> bool:
        """Return True if the node has this output, and somebody reads it."""
        value = self.node.outputs[output] if output < len(self.node.outputs) else None
        return value is not None and bool(value.name and (value.uses() or value.is_graph_output()))

    def readers(self) -> Sequence[onnx_ir.Node]:
        """Return the nodes that read the node's first output."""
        return self.node.outputs[0].consumers()

    def empty(self, shape: Sequence[Dim | None], dtype: np.dtype[np.generic]) -> Constant:
        """As in `Builder`; dynamic dimensions are 0 too, where the node is read only by Concats that leave it out."""
        axis, readers = shape.index(0), self.readers()
        if len(self.node.outputs) == 1 and readers and all(_joins(reader, axis, len(shape)) for reader in readers):
            shape = [size if isinstance(size, int) else 0 for size in shape]
        return super().empty(shape, dtype)

    def value_hint(self, operand: int, otherwise: str = "") -> str:
        """Return how to make an operand constant: by values of the few flags and sizes behind it; else `otherwise`."""
        names = self._flags_behind(self.node.inputs[operand])
        options = " ".join(f"--value {name}=..." for name in names)
        return f"bind {'it' if len(names) == 1 else 'them'} with {options}" if names else otherwise

    def _flags_behind(self, value: onnx_ir.Value | None) -> list[str]:
        """Return the inputs that a value is computed from; none if one is not a flag, or if a subgraph intervenes."""
        flags = [info.name for info in self.model.inputs if _is_flag(info)]
        found: set[str | None] = set()
        seen, left = {value}, [value]
        while left:
            current = left.pop()
            if current is None or current.const_value is not None:
                continue
            node = current.producer()
            if node is None:
                if current.name not in flags:
                    return []
                found.add(current.name)
            elif any(attribute.type is onnx_ir.AttributeType.GRAPH for attribute in node.attributes.values()):
                return []
            elif node.op_type not in ("Shape", "Size"):
                left += [operand for operand in node.inputs if operand not in seen]
                seen.update(node.inputs)
        return [name for name in flags if name in found]

    def declared_shape(self, value: onnx_ir.Value) -> tuple[Dim | None, ...] | None:
        """Return the declared shape of a value, each size None unless the inputs tell it; None if there is none."""
        if value.shape is None:
            return None
        sizes: dict[str, Dim] = {}
        for source, info in zip(self.model.graph.inputs, self.model.inputs, strict=True):
            for dim, size in zip(source.shape or (), info.shape, strict=False):
                if not isinstance(dim, int) and dim.value is not None:
                    sizes.setdefault(dim.value, size)
        return tuple(dim if isinstance(dim, int) else parsed_size(dim.value or "", sizes) for dim in value.shape)

    @abstractmethod
    def tensor(self, x: Operand) -> Tensor:
        """As in `Builder`; a symbolic tensor is computed at run time."""

    @abstractmethod
    def inlined(self, graph: onnx_ir.Graph, *operands: Item, iterations: int | None = None) -> tuple[Item, ...]:
        """Return the outputs of a graph in an attribute for these inputs, its nodes imported in the node's place.

        `iterations` is for the message that refuses too long a loop. Raises MissingOperand if nodes were refused.
        """


def _joins(node: onnx_ir.Node, axis: int, rank: int) -> bool:
    return node.op_type == "Concat" and node.attributes.get_int("axis", 0) % rank == axis


def _is_flag(info: InputInfo) -> bool:
    """Return True if an input is probably a flag, a threshold or a size: one number, or a few integers."""
    shape = [size for size in info.shape if isinstance(size, int)]
    most = 1 if info.dtype.is_floating_point() else MOST_FLAGS
    return len(shape) == len(info.shape) and math.prod(shape) <= most
