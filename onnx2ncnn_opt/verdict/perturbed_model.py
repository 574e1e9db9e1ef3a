"""Models with rounding errors: inserted into every number that a node computes, or in rounded weights."""

import math
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import load_external_data_for_tensor, set_external_data

from onnx2ncnn_opt.ir.weight import Encoding
from onnx2ncnn_opt.onnx.ops import traits_of
from onnx2ncnn_opt.onnx.registry import INT8_ACCURACY, Traits
from onnx2ncnn_opt.param.storage import rounded
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.runtime.ort import read_model
from onnx2ncnn_opt.verdict.errors import DEFAULT, INFINITE
from onnx2ncnn_opt.verdict.float64_model import FLOATS, NodeWriter, element_types, inferred_values, upgraded

# The relative error of each number that a node computes: 16 units of the last place, as in sums of many terms.
_ERROR = 2.0**-20
# The relative error of inputs that a node subtracts: sums of hundreds of terms, which ncnn adds up one by one.
_CANCELLED_ERROR = 2.0**-18
# The relative error of a node that adds numbers to 1: two units of the last place.
_ERROR_OF_ONE = 2.0**-22
# The error of numbers that decide something, relative to the tensor's largest: the error of convolution by winograd.
_DECISION_ERROR = DEFAULT.relative / 5
_PHASE = math.sqrt(2) / 2  # of a period; irrational, so that the signs of errors do not repeat
# Each run has a number for own errors, and an error that all elements share: all numbers too large, all too small,
# alternating signs (for pairs of x and y), and five other patterns of signs.
_ALTERNATING = 0.5 / _PHASE
ERROR_RUNS = (
    *((0.0, 1.0), (0.0, -1.0), (_ALTERNATING, 0.0), (-_ALTERNATING, 0.0)),
    *((float(number), 0.0) for number in range(1, 6)),
)
_ROUNDED_SUMS = re.compile("Q[A-Z]")  # such as QLinearConv: it adds up integers, scales the sum, and rounds it
_WEIGHTS = "weights"  # a file's name
OWN, SHARED = "onnx2ncnn_opt.own_errors", "onnx2ncnn_opt.shared_error"  # inputs of the model with errors
_TINY = float(np.finfo(np.float32).tiny)
_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE)
_ABSORBING = ("Add", "Mul", "Sub")  # a result may be an operand, as a mask that absorbs scores
_INTEGER_RESULTS = ("Ceil", "Constant", "Floor", "Round")  # without errors of their own
_INTEGERS = (TensorProto.INT64, TensorProto.INT32, TensorProto.UINT8, TensorProto.INT8)


def with_rounded_weights(model: Path | bytes, outputs: Collection[str], encoding: Encoding, folder: Path) -> bytes:
    """Return the model with rounded weights of two or more dimensions, stored in a file of a folder."""
    source = model.absolute().parent if isinstance(model, Path) else Path()
    proto = read_model(model, outputs)
    with (folder / _WEIGHTS).open("wb") as file:
        for tensor in proto.graph.initializer:
            if tensor.data_location == TensorProto.EXTERNAL:
                load_external_data_for_tensor(tensor, os.fspath(source))
                tensor.data_location = TensorProto.DEFAULT
            if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) > 1:
                array = numpy_helper.to_array(tensor)
                array = _in_8_bits(array) if encoding is Encoding.INT8 else rounded(array, encoding)
                tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
                set_external_data(tensor, _WEIGHTS, file.tell(), array.nbytes)
                file.write(tensor.raw_data)
                tensor.ClearField("raw_data")
    return bytes(proto.SerializeToString())


def _in_8_bits(array: Array) -> Array:
    """Return each row rounded to 127ths of its largest number, like weights of ncnn's int8 layers."""
    rows = array.reshape(len(array), -1)
    steps = np.abs(rows).max(axis=1, keepdims=True, initial=0.0) / np.float32(127)
    integers = np.round(np.divide(rows, steps, out=np.zeros_like(rows), where=steps > 0))
    return np.asarray((integers * steps).reshape(array.shape), array.dtype)


def with_errors(model: Path | bytes, outputs: Collection[str] = ()) -> bytes:
    """Return the model with rounding errors, and two more inputs that select the errors of a run (`ERROR_RUNS`).

    Every number that a node computes gets an error, except moved numbers and zeros. Raises EncodeError for a model that
    does not fit into a message.
    """
    proto = upgraded(read_model(model, outputs))
    writer = _ErrorWriter(proto)
    for node in proto.graph.node:
        writer.add(node)
    del proto.graph.node[:]
    proto.graph.node.extend(writer.nodes)
    proto.graph.initializer.extend(writer.constants.values())
    proto.graph.input.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, []) for name in (OWN, SHARED))
    del proto.graph.value_info[:]
    return bytes(proto.SerializeToString())


class _ErrorWriter(NodeWriter):
    """A writer of a model's nodes, and of nodes that add errors to their tensors."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        super().__init__()
        self._types = element_types(proto, inferred_values(proto))
        self._opsets = {entry.domain: entry.version for entry in proto.opset_import}
        self._exact = {value.name for value in (*proto.graph.input, *proto.graph.initializer)}
        self._integral = {value.name for value in proto.graph.initializer}  # constants, and floats with integer values
        # Names before the error of numbers computed from these alone: a quotient of integers is the same everywhere.
        self._unperturbed: dict[str, str] = {}

    def add(self, node: onnx.NodeProto) -> None:
        """Add a node of the model, with errors of its inputs and outputs."""
        traits = traits_of(node.domain, node.op_type, self._opsets.get(node.domain, 1))
        is_cast = node.op_type == "Cast" and self._types.get(node.output[0]) in _INTEGERS
        dtype = self._types.get(node.input[0]) if is_cast else None
        self._perturb_decisions(node, traits)
        if traits.errors in ("input", "gates") and self._types.get(node.input[0]) in _FLOATS:
            node.input[0] = self.perturb(node.input[0], self._types[node.input[0]], _CANCELLED_ERROR)
        self.nodes.append(node if dtype not in _FLOATS else self._defined(node, dtype))
        moved = [name for index, name in enumerate(node.input) if traits.moves_input(index)]
        is_integral = all(name in self._integral or self._types.get(name) in _INTEGERS for name in moved)
        if node.op_type in _INTEGER_RESULTS or (moved and is_integral):
            self._integral.update(node.output)
        is_exact = traits.errors == "none" or node.op_type in ("Constant", "ConstantOfShape")
        if self._exact.issuperset(node.input) and (traits.moves != () or is_exact):
            self._exact.update(node.output)
        elif traits.moves == () and node.op_type not in _INTEGER_RESULTS:
            self._perturb_outputs(node, traits)

    def _perturb_decisions(self, node: onnx.NodeProto, traits: Traits) -> None:
        """Perturb the inputs of a node whose last bit may decide its result."""
        to_float = node.op_type == "Cast" and self._types.get(node.output[0], TensorProto.FLOAT) in FLOATS
        attributes = {attribute.name: attribute for attribute in node.attribute}
        level = attributes["accuracy_level"].i if "accuracy_level" in attributes else INT8_ACCURACY
        indexes = range(len(node.input)) if traits.jumps and not to_float and level == INT8_ACCURACY else range(0)
        if node.op_type == "GridSample":
            indexes = range(1, 2) if "mode" in attributes and attributes["mode"].s == b"nearest" else range(0)
        is_inside = bool(_ROUNDED_SUMS.match(node.op_type))
        floats = [index for index in indexes if self._types.get(node.input[index]) in _FLOATS]
        for index in floats[:1] if is_inside else indexes:  # the error of one scale is the error of the sum
            name = node.input[index]
            node.input[index] = self._unperturbed.get(name, name)
            is_right = not is_inside and (name in self._exact or name in self._integral or name in self._unperturbed)
            if self._types.get(name) in _FLOATS and not is_right:
                node.input[index] = self.perturb_decision(name, self._types[name])
                if node.op_type == "Equal" and index == 1:
                    node.input[1] = self.equal_if_near(node.input[1], node.input[0], self._types[name])

    def _defined(self, node: onnx.NodeProto, dtype: int) -> onnx.NodeProto:
        """Return a Cast of errors in place of numbers that its integers do not hold, as ONNX does not define that."""
        cast, limits = onnx.NodeProto(), np.iinfo(helper.tensor_dtype_to_np_dtype(self._types[node.output[0]]))
        ends = self.number(limits.min - 1.0, dtype), self.number(limits.max + 1.0, dtype)
        inside = [self.node(kind, node.input[0], end) for kind, end in zip(("Greater", "Less"), ends, strict=True)]
        cast.CopyFrom(node)
        cast.input[0] = self.node("Where", self.node("And", *inside), node.input[0], self.errors(node.input[0], dtype))
        return cast

    def _perturb_outputs(self, node: onnx.NodeProto, traits: Traits) -> None:
        """Perturb the numbers that a node computes."""
        addend = {"one": node.input[0], "gates": ""}.get(traits.errors) if node.input else None
        for index, name in enumerate(node.output):
            if name and self._types.get(name) in _FLOATS:
                terms = node.input if node.op_type in _ABSORBING else ()
                node.output[index] = self.perturb_output(name, self._types[name], addend, terms)
                if traits.axes == "each" and self._integral.issuperset(node.input):
                    self._unperturbed[name] = node.output[index]

    def number(self, value: float, dtype: int = TensorProto.INT64) -> str:
        return self.constant(np.array(value, helper.tensor_dtype_to_np_dtype(dtype)))

    def errors(self, name: str, dtype: int) -> str:
        """Add numbers from -1 to 1, one for each element of a tensor.

        Element i has the sign of sin(a * i * i + b), and a depends on the run: opset 22 has no random numbers. The sign
        of 0.5 minus the fraction of the period is the same, and five times as fast in ONNX Runtime.
        """
        count = self.node("Cast", self.node("Size", name), to=TensorProto.DOUBLE)
        zero, one, phase = (self.number(value, TensorProto.DOUBLE) for value in (0.0, 1.0, _PHASE))
        indexes = self.node("Range", zero, count, one)
        speed = self.node("Mul", self.node("Cast", OWN, to=TensorProto.DOUBLE), phase)
        periods = self.node("Mul", self.node("Mul", indexes, indexes), speed)
        shifted = self.node("Add", periods, self.number(len(self.nodes) / math.tau, TensorProto.DOUBLE))
        fraction = self.node("Cast", self.node("Sub", shifted, self.node("Floor", shifted)), to=dtype)
        flat_signs = self.node("Sign", self.node("Sub", self.number(0.5, dtype), fraction))
        signs = self.node("Reshape", flat_signs, self.node("Shape", name))
        scales = [self.node("Cast", scale, to=dtype) for scale in (self.node("Sign", OWN), SHARED)]
        return self.node("Add", self.node("Mul", signs, scales[0]), scales[1])

    def perturb_output(self, name: str, dtype: int, addend: str | None = None, terms: Sequence[str] = ()) -> str:
        """Insert an error after a node, and return its new output name.

        With an `addend` insert also the error of 1 + addend; "" means the output itself. Elements equal to one of the
        `terms` are exact.
        """
        inner = f"onnx2ncnn_opt.inner.{name}"
        perturbed = self.perturb(inner, dtype)
        if addend is not None:
            size = self.node("Add", self.node("Abs", addend or inner), self.number(1, dtype))
            error = self.node("Mul", self.errors(inner, dtype), self.number(_ERROR_OF_ONE, dtype))
            perturbed = self.node("Add", perturbed, self.node("Mul", size, error))
        for term in terms:
            perturbed = self.node("Where", self.node("Equal", inner, term), inner, perturbed)
        self.nodes.append(helper.make_node("Identity", [perturbed], [name]))
        return inner

    def perturb(self, name: str, dtype: int, error: float = _ERROR) -> str:
        """Add a relative error to each number of a tensor, or flush subnormal numbers to 0; zeros stay."""
        errors = self.errors(name, dtype)
        relative = self.node("Mul", errors, self.number(error, dtype))
        scaled = self.node("Mul", name, self.node("Add", relative, self.number(1, dtype)))
        least = self.node("Mul", errors, self.number(_TINY, dtype))
        return self.node("Add", scaled, self.node("Mul", least, self.node("Abs", self.node("Sign", name))))

    def perturb_decision(self, name: str, dtype: int) -> str:
        """Perturb the input of a comparison or rounding; zeros stay exact, because models mostly mean them."""
        error = self.node("Mul", self.errors(name, dtype), self.decision_error(name, dtype))
        return self.node("Add", name, self.node("Mul", error, self.node("Abs", self.node("Sign", name))))

    def decision_error(self, name: str, dtype: int) -> str:
        """Add the size of the error of a tensor that decides something."""
        size = self.node("Abs", name)
        finite = self.node("Less", size, self.number(float(INFINITE), dtype))
        largest = self.node("ReduceMax", self.node("Where", finite, size, self.number(0, dtype)), keepdims=0)
        return self.node("Mul", largest, self.number(_DECISION_ERROR, dtype))

    def equal_if_near(self, name: str, other: str, dtype: int) -> str:
        """Replace nearly equal elements by those of `other`, in the run with a positive shared error."""
        bound = self.node("Mul", self.decision_error(name, dtype), self.node("Cast", SHARED, to=dtype))
        is_near = self.node("Less", self.node("Abs", self.node("Sub", name, other)), bound)
        return self.node("Where", is_near, other, name)
