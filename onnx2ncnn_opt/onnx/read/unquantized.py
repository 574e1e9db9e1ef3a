"""Quantised models as float models with the scales beside them: QDQ pairs, QOperators, dequantised weights.

A pair of QuantizeLinear and DequantizeLinear goes. Where its range begins or ends at 0, a Clip to this range stays:
quantisers take a ReLU or Clip out that the range makes as well. Weights become floats of the same value.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

Array = NDArray[Any]
_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
# Operators that compute the same on the integers of a grid as on floats.
_VIEWS = ("Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Gather", "Concat", "MaxPool", "Split")


class Grid(NamedTuple):
    """The numbers that a tensor of 8 bits stands for: (q - zero) * scale."""

    scale: Array
    zero: Array
    low: int
    high: int

    @property
    def range(self) -> tuple[float, float]:
        """The lowest and highest number."""
        scale, zero = float(self.scale.max()), float(self.zero.max())
        return (self.low - zero) * scale, (self.high - zero) * scale


@dataclass
class Unquantised:
    """A float model, and for its products by node name: the range of the input, and the step of each output's weights.

    `floats` names the products that had no such scales, with the reason.
    """

    model: onnx.ModelProto
    inputs: dict[str, float] = field(default_factory=dict)
    steps: dict[str, Array] = field(default_factory=dict)
    floats: dict[str, str] = field(default_factory=dict)


def is_quantised(model: onnx.ModelProto) -> bool:
    """Return True if a model has nodes that `unquantised` replaces."""
    return any(node.op_type in ("QuantizeLinear", *_OPERATORS) for node in model.graph.node)


def unquantised(model: onnx.ModelProto) -> Unquantised:
    """Return the float model of a quantised one. Raises ValueError, which names the node, for what it does not know."""
    return _Reader(model).run()


class _Reader:
    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = onnx.ModelProto()
        self.model.CopyFrom(model)
        graph = self.model.graph
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
                self.constants[node.output[0]] = node.attribute[0].t
        self.grids: dict[str, Grid] = {}  # of tensors of 8 bits, and of the floats that are dequantised from them
        self.floats: dict[str, str] = {}  # the float that stands for a tensor of 8 bits, or for a float that goes
        self.nodes: list[onnx.NodeProto] = []
        self.added: dict[str, Array] = {}
        self.found = Unquantised(self.model)

    def run(self) -> Unquantised:
        graph = self.model.graph
        for number, node in enumerate(graph.node):
            node.name = node.name or f"{node.op_type}_{number}"
            if node.op_type == "QuantizeLinear":
                self.limit(node, self.floats.get(node.input[0], node.input[0]), 1)
            elif node.op_type == "DequantizeLinear":
                self.floats[node.output[0]], self.grids[node.output[0]] = self.operand(node, 0)
            elif node.op_type in _OPERATORS:
                _OPERATORS[node.op_type](self, node)
            else:
                self._other(node)
        outputs = {value.name: value for value in graph.output}
        for name in outputs.keys() & self.floats.keys():
            if self.floats[name] != name:
                self.nodes.append(helper.make_node("Identity", [self.floats[name]], [name], f"{name}_float"))
            outputs[name].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        del graph.node[:], graph.value_info[:]
        graph.node.extend(self.nodes)
        graph.initializer.extend(numpy_helper.from_array(x, name) for name, x in self.added.items())
        used = {name for node in self.nodes for name in node.input} | outputs.keys()
        kept = [tensor for tensor in graph.initializer if tensor.name in used]
        del graph.initializer[:]
        graph.initializer.extend(kept)
        return self.found

    def array(self, node: onnx.NodeProto, index: int) -> Array:
        """Return a constant input. Raises ValueError if it is none."""
        name = node.input[index]
        if name not in self.constants:
            raise ValueError(f"{node.op_type} '{node.name}': the model computes its input {index}")
        return np.asarray(numpy_helper.to_array(self.constants[name]))

    def grid(self, node: onnx.NodeProto, index: int) -> Grid:
        """Return the grid of the scale and zero point at an index."""
        has_zero = len(node.input) > index + 1 and node.input[index + 1]
        zero = self.array(node, index + 1) if has_zero else np.zeros(1, np.uint8)
        scale, ends = self.array(node, index).astype(np.float32), np.iinfo(zero.dtype)
        return Grid(scale, zero.astype(np.float32), int(ends.min), int(ends.max))

    def operand(self, node: onnx.NodeProto, index: int, axis: int | None = None) -> tuple[str, Grid]:
        """Return the floats of an input of 8 bits, whose scale and zero point follow it, and their grid."""
        name, grid = node.input[index], self.grid(node, index + 1)
        if grid.scale.ndim > 1:
            raise ValueError(f"{node.op_type} '{node.name}': it has a scale for each block")
        if axis is None:
            axis = next((each.i for each in node.attribute if each.name == "axis"), 1)
        if name in self.constants:
            numbers = numpy_helper.to_array(self.constants[name])
            shape = [-1 if i == axis % numbers.ndim else 1 for i in range(numbers.ndim)]
            scale, zero = (x.reshape(shape) if x.size > 1 else x.reshape(()) for x in (grid.scale, grid.zero))
            self.added[f"{name}_float"] = ((numbers.astype(np.float32) - zero) * scale).astype(np.float32)
            return f"{name}_float", grid
        if name not in self.floats:  # an input of the model
            self.floats[name] = f"{name}_float"
            self.nodes.append(
                helper.make_node("DequantizeLinear", node.input[index : index + 3], [f"{name}_float"], f"{name}_float")
            )
        return self.floats[name], grid

    def limit(self, node: onnx.NodeProto, name: str, index: int) -> None:
        """Let the floats `name` stand for the result of a node, whose scale and zero point are at an index."""
        grid, [result] = self.grid(node, index), node.output
        self.grids[result], self.floats[result] = grid, name
        low, high = grid.range
        if low == 0 or high == 0:
            clip, ends = f"{result}_float", [f"{result}_low", f"{result}_high"]
            self.added |= {ends[0]: np.array(low, np.float32), ends[1]: np.array(high, np.float32)}
            self.nodes.append(helper.make_node("Clip", [name, *ends], [clip], f"{node.name}_range"))
            self.floats[result] = clip

    def put(self, op: str, node: onnx.NodeProto, inputs: Iterable[str], index: int, **attributes: Any) -> None:
        """Put the float operator in place of a node, whose result's scale and zero point are at an index."""
        name = f"{node.output[0]}_sum"
        made = helper.make_node(op, list(inputs), [name], node.name, **attributes)
        known = onnx.defs.get_schema(op).attributes
        made.attribute.extend(each for each in node.attribute if each.name in known)
        self.nodes.append(made)
        self.limit(node, name, index)

    def keep(self, node: onnx.NodeProto, x: Grid | None, w: Grid | None) -> None:
        """Keep the scales of a product."""
        if x is None or w is None:
            self.found.floats[node.name] = "its input or weight is not quantised"
        elif x.high > 255 or w.high > 255:
            self.found.floats[node.name] = "it is quantised to more than 8 bits"
        elif x.scale.size > 1:
            self.found.floats[node.name] = "its input has several scales"
        elif w.zero.any():
            self.found.floats[node.name] = "its weights have a zero point"
        else:
            self.found.inputs[node.name] = max(map(abs, x.range))
            self.found.steps[node.name] = w.scale.ravel()

    def bias(self, node: onnx.NodeProto, index: int, scale: Array) -> list[str]:
        """Return the name of a bias of integers as floats, if there is one."""
        if len(node.input) <= index or not node.input[index]:
            return []
        name = f"{node.name}_bias"
        self.added[name] = (self.array(node, index).astype(np.float64) * scale).astype(np.float32)
        return [name]

    def _other(self, node: onnx.NodeProto) -> None:
        if node.op_type in _PRODUCTS:
            self.keep(node, *(self.grids.get(name) for name in node.input[:2]))
        elif node.op_type in _VIEWS:
            known = [self.grids[name] for name in node.input if name in self.grids]
            for output in node.output if known else ():
                self.grids[output], self.floats[output] = known[0], output
        changed = onnx.NodeProto()
        changed.CopyFrom(node)
        for i, name in enumerate(node.input):
            changed.input[i] = self.floats.get(name, name)
        self.nodes.append(changed)


def _conv(reader: _Reader, node: onnx.NodeProto) -> None:
    (x, x_grid), (w, w_grid) = reader.operand(node, 0), reader.operand(node, 3, axis=0)
    reader.keep(node, x_grid, w_grid)
    reader.put("Conv", node, [x, w, *reader.bias(node, 8, x_grid.scale * w_grid.scale)], 6)


def _matmul(reader: _Reader, node: onnx.NodeProto) -> None:
    (a, a_grid), (b, b_grid) = reader.operand(node, 0), reader.operand(node, 3, axis=-1)
    reader.keep(node, a_grid, b_grid)
    reader.put("MatMul", node, [a, b], 6)


def _gemm(reader: _Reader, node: onnx.NodeProto) -> None:
    turned = any(each.name == "transB" and each.i for each in node.attribute)
    (a, a_grid), (b, b_grid) = reader.operand(node, 0), reader.operand(node, 3, axis=0 if turned else 1)
    reader.keep(node, a_grid, b_grid)
    alpha = next((each.f for each in node.attribute if each.name == "alpha"), 1.0)
    reader.put("Gemm", node, [a, b, *reader.bias(node, 6, alpha * a_grid.scale * b_grid.scale)], 7)


def _of_two(op: str) -> "_Operator":
    return lambda reader, node: reader.put(op, node, [reader.operand(node, 0)[0], reader.operand(node, 3)[0]], 6)


def _of_one(op: str) -> "_Operator":
    return lambda reader, node: reader.put(op, node, [reader.operand(node, 0)[0]], 3)


def _concat(reader: _Reader, node: onnx.NodeProto) -> None:
    reader.put("Concat", node, [reader.operand(node, i)[0] for i in range(2, len(node.input), 3)], 0)


_Operator = Callable[[_Reader, onnx.NodeProto], None]
_OPERATORS: Mapping[str, _Operator] = {
    "QLinearConv": _conv,
    "QLinearMatMul": _matmul,
    "QGemm": _gemm,
    "QLinearAdd": _of_two("Add"),
    "QLinearMul": _of_two("Mul"),
    "QLinearSigmoid": _of_one("Sigmoid"),
    "QLinearLeakyRelu": _of_one("LeakyRelu"),
    "QLinearSoftmax": _of_one("Softmax"),
    "QLinearAveragePool": _of_one("AveragePool"),
    "QLinearGlobalAveragePool": _of_one("GlobalAveragePool"),
    "QLinearConcat": _concat,
}
