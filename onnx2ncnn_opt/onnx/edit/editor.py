"""Insertion of nodes and constants into the graph of an ONNX model."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir

from onnx2ncnn_opt.ir.names import NamePool
from onnx2ncnn_opt.ir.weight import Array

Operand: TypeAlias = onnx_ir.Value | list[int] | Array | None
FLOATS = (onnx_ir.DataType.FLOAT, onnx_ir.DataType.DOUBLE, onnx_ir.DataType.FLOAT16, onnx_ir.DataType.BFLOAT16)


class Editor:
    """Inserts nodes before `place`, or at the end of the graph if it is None; nodes and values get new names."""

    suffix = "new"  # of the names of values

    def __init__(self, graph: onnx_ir.Graph) -> None:
        self.graph, self.place = graph, next(iter(graph), None)
        values = [value for node in graph for value in node.outputs]
        self.names = NamePool(item.name or "" for item in (*graph, *graph.inputs, *values))
        self.names.update(graph.initializers)
        self._constants: dict[tuple[object, ...], onnx_ir.Value] = {}

    def initializer(self, array: Array, name: str = "constant") -> onnx_ir.Value:
        """Add an initializer."""
        name = self.names.take(name)
        value = onnx_ir.val(name, const_value=onnx_ir.Tensor(array, name=name))
        self.graph.register_initializer(value)
        return value

    def _value(self, value: Operand) -> onnx_ir.Value | None:
        """Return a value; lists, which become int64, and arrays become initializers without duplicates."""
        if value is None or isinstance(value, onnx_ir.Value):
            return value
        array = np.array(value, np.int64) if isinstance(value, list) else value
        key = array.dtype, array.shape, array.tobytes()
        if key not in self._constants:
            self._constants[key] = self.initializer(array)
        return self._constants[key]

    def node(self, kind: str, *inputs: Operand, **attributes: Any) -> onnx_ir.Value:
        """Insert a node of ONNX's own domain with one output, and return the output."""
        return self.nodes(kind, inputs, attributes)[0]

    def nodes(
        self, kind: str, inputs: Sequence[Operand], attributes: Any = None, count: int = 1, domain: str = ""
    ) -> Sequence[onnx_ir.Value]:
        """Insert a node, and return its outputs. Attributes are a dictionary, or `onnx_ir.Attr`s."""
        base = "end" if self.place is None else self.place.outputs[0].name
        name = self.names.take(f"{(self.place and self.place.name) or base}.{kind}")
        operands = [self._value(value) for value in inputs]
        if isinstance(attributes, dict):
            attributes = onnx_ir.convenience.convert_attributes(attributes)
        node = onnx_ir.Node(domain, kind, operands, attributes or (), num_outputs=count, name=name)
        for output in node.outputs:
            output.name = self.names.take(f"{base}.{self.suffix}")
        if self.place is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self.place, node)
        return node.outputs

    def copy(self, node: onnx_ir.Node, inputs: Sequence[Operand] | None = None) -> Sequence[onnx_ir.Value]:
        """Insert a copy of a node, perhaps with other inputs; return its outputs."""
        operands = node.inputs if inputs is None else inputs
        outputs = self.nodes(node.op_type, operands, list(node.attributes.values()), len(node.outputs), node.domain)
        for new, old in zip(outputs, node.outputs, strict=True):
            new.type, new.shape = old.type, old.shape
            new.name = new.name if old.name else ""
        return outputs

    def replace(self, old: onnx_ir.Value, new: onnx_ir.Value) -> None:
        """Replace all uses of a value by another one, which gets its name if the value is a graph output."""
        if old.is_graph_output():
            new = self.node("Identity", new)
            name, old.name = old.name, self.names.take(f"{old.name}.before")
            new.name, new.shape, new.type = name, old.shape, old.type
        onnx_ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def is_float(value: onnx_ir.Value | None) -> bool:
    """Return True for a value whose type is known to be a float."""
    return value is not None and value.dtype in FLOATS


def forget_types(graph: onnx_ir.Graph) -> None:
    """Delete types and shapes of values within a graph, which inserted nodes may have changed."""
    for node in graph:
        for value in node.outputs:
            if not value.is_graph_output():
                value.type = value.shape = None
