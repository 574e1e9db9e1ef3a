"""The context of an operator's importer: the net under construction, and all facts about the node."""

import math
from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir

from onnx2ncnn_opt.ir.dim import Call, Dim, Shape, Sym, at_least, calls, names_in, substituted, symbol
from onnx2ncnn_opt.ir.reached import reached
from onnx2ncnn_opt.ir.spec import LayerSpec
from onnx2ncnn_opt.onnx.lower.tensors import TensorBuilder
from onnx2ncnn_opt.onnx.read.binding import InputInfo
from onnx2ncnn_opt.onnx.read.given import LARGEST_SIZE, parsed_size
from onnx2ncnn_opt.onnx.read.load import LoadedModel
from onnx2ncnn_opt.onnx.value import Constant, Item, Operand, Tensor

MOST_FLAGS = 64  # elements of an input that may be an option, not data


class MissingOperand(Exception):
    """Raised inside an importer: a node in its subgraph was refused already."""


class ImportContext(TensorBuilder, ABC):
    """The first argument of every importer, by convention called `im`."""

    def __init__(self, model: LoadedModel, types: Mapping[str, LayerSpec]) -> None:
        super().__init__(types, [value.name for value in (*model.inputs, *model.outputs)])
        self.model = model
        self.node: onnx_ir.Node  # the node that is being imported
        self._minimum: dict[Dim, int] = {}
        self._sums: dict[str, Dim] = {}  # names of sizes as sums of others, to prove signs

    @property
    def opset(self) -> int:
        """The model's version of ONNX's own operators."""
        return self.model.opsets.get("", 1)

    def demand(self, size: Dim, least: int) -> None:
        """Record that the net is right only if a size is `least` or more, unless that is certain."""
        size = self.within_limits(size)
        if isinstance(size, Sym) and not self.try_demand(size, least):
            self._minimum[size] = max(least, self._minimum.get(size, least))

    def within_limits(self, size: Dim) -> Dim:
        """Return a size with b for ``min(a, b)`` and a for ``max(a, b)`` if recorded demands imply ``a >= b``."""
        if isinstance(size, int):
            return size
        choices = [call for call in calls(size) if call.operator in ("min", "max")]
        pairs = [(call, *pair) for call in choices for pair in (call[1:], call[:0:-1])]
        gaps = [0, *(demanded for demanded, bound in self._minimum.items() if bound >= 0)]
        larger = [(call, a, b) for call, a, b in pairs if any(self.is_known(a - b - gap, 0) for gap in gaps)]
        return size.subs({call: b if call.operator == "min" else a for call, a, b in larger}) if larger else size

    def is_known(self, size: Dim, least: int) -> bool:
        """Return True if a size is `least` or more, for all sizes that the recorded demands leave."""
        return at_least(substituted(substituted(size, self._sums), self.left(1)), least)

    def left(self, sign: int) -> Mapping[str, Dim]:
        """Return values of dimensions that count from the minimum that is demanded, as h + 6, or h - 6 to go back."""
        return {str(dim): dim + (low - 1) * sign for dim, low in self._minimum.items()}

    def try_demand(self, size: Dim, least: int) -> bool:
        """Return True if a size is `least` or more once its only dimension is large enough, and demand that minimum."""
        if self.is_known(size, least):
            return True
        size = substituted(size, self._sums)
        if isinstance(size, int) or len(size.names()) > 1:
            return False
        [name] = size.names()
        # (h - 1)//2 is 2 or more from h = 5 on.
        more = bisect(range(LARGEST_SIZE), False, key=lambda n: at_least(size.subs({name: symbol(name) + n}), least))
        if more < LARGEST_SIZE:
            self._minimum[symbol(name)] = more + 1
        return more < LARGEST_SIZE

    def try_demand_place(self, place: Dim, least: int) -> bool:
        """As `try_demand`; a place in a table, as ``64 - n``, that is `least` or more at first is demanded to stay."""
        if self.try_demand(place, least):
            return True
        begin = substituted(place, dict.fromkeys(names_in([place]), 1))
        if not at_least(begin, max(least, 1)):
            return False
        self.demand(place, least)
        return True

    def without_quotients(self, size: Dim) -> Dim:
        """Return a size without quotients such as ``3 // n``, which is 0 for the n >= 4 that is demanded then."""
        factors = [factor for term in size.terms for factor in term] if isinstance(size, Sym) else []
        divisions = [call for call in factors if isinstance(call, Call) and call.operator == "//"]
        quotients: dict[Call, Dim] = {
            call: -(call.a < 0)
            for call in divisions
            if isinstance(call.a, int) and self.try_demand(call.b, abs(call.a) + (call.a >= 0))
        }
        return substituted(size, quotients)

    def is_used(self, output: int) -> bool:
        """Return True if the node has this output, and it is read."""
        value = self.node.outputs[output] if output < len(self.node.outputs) else None
        return value is not None and bool(value.name and (value.uses() or value.is_graph_output()))

    def readers(self) -> Sequence[onnx_ir.Node]:
        """Return the nodes that read the node's first output."""
        return self.node.outputs[0].consumers()

    def empty(self, shape: Shape, dtype: np.dtype[np.generic]) -> Constant:
        """Return a tensor without elements."""
        return Constant(np.zeros(self.fixed(shape, "it is empty, and has a dynamic dimension"), dtype.type))

    def value_hint(self, operand: int, default: str = "") -> str:
        """Return advice for making an operand constant: bind the flags or sizes that decide it; else `default`."""
        names = self._flags_behind(self.node.inputs[operand])
        if not names:
            return default if names is None or not default else "it follows from dynamic sizes; bind them with --shape"
        options = " ".join(f"--value {name}=..." for name in names)
        return f"bind {'it' if len(names) == 1 else 'them'} with {options}"

    def _flags_behind(self, value: onnx_ir.Value | None) -> list[str] | None:
        """Return the inputs that a value is computed from; None if one is not a flag, or a node has a subgraph."""

        def operands(value: onnx_ir.Value | None) -> Sequence[onnx_ir.Value | None]:
            node = None if value is None or value.const_value is not None else value.producer()
            return () if node is None or node.op_type in ("Shape", "Size") else node.inputs

        computed = [x for x in reached([value], operands) if x is not None and x.const_value is None]
        producers = [x.producer() for x in computed]
        kinds = {attribute.type for node in producers if node is not None for attribute in node.attributes.values()}
        sources = {x.name for x, node in zip(computed, producers, strict=True) if node is None}
        flags = [info.name for info in self.model.inputs if _is_flag(info)]
        is_plain = onnx_ir.AttributeType.GRAPH not in kinds and sources <= set(flags)
        return [name for name in flags if name in sources] if is_plain else None

    def declared_shape(self, value: onnx_ir.Value) -> tuple[Dim | None, ...] | None:
        """Return the declared shape of a value, or None. Sizes that do not follow from the inputs' sizes are None."""
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
        """Return the value as a tensor of the net; layers compute a symbolic tensor at run time."""

    @abstractmethod
    def inlined(self, graph: onnx_ir.Graph, *operands: Item, iterations: int | None = None) -> tuple[Item, ...]:
        """Import the nodes of a subgraph in place of the node, and return the subgraph's outputs for these inputs.

        The message that refuses a long loop mentions `iterations`. Raises MissingOperand if nodes were refused.
        """


def _is_flag(info: InputInfo) -> bool:
    """Return True if an input is probably a flag, a threshold or a size: one number, or a few integers."""
    shape = [size for size in info.shape if isinstance(size, int)]
    most = 1 if info.dtype.is_floating_point() else MOST_FLAGS
    return len(shape) == len(info.shape) and math.prod(shape) <= most
