"""Models with rounding errors: inserted into every number that a node computes, or in rounded weights."""

import re
from collections.abc import Collection, Sequence
from functools import cache
from itertools import count
from pathlib import Path

import numpy as np
import onnx_ir
from onnx_ir import DataType

from onnx2ncnn_opt.ir.weight import Encoding
from onnx2ncnn_opt.onnx.edit.editor import Editor, Operand, forget_types, is_float
from onnx2ncnn_opt.onnx.edit.model import read_model, to_bytes
from onnx2ncnn_opt.onnx.ops import traits_of
from onnx2ncnn_opt.onnx.read.structure import lift_constants
from onnx2ncnn_opt.onnx.registry import INT8_ACCURACY, Traits
from onnx2ncnn_opt.param.storage import rounded
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.verdict.errors import DEFAULT, INFINITE, LAST_BIT

# The relative error of each number that a node computes: 16 units of the last place, as in sums of many terms.
_ERROR = 2.0**-20
# The relative error of inputs that a node subtracts: sums of hundreds of terms, which ncnn adds up one by one.
_CANCELLED_ERROR = 2.0**-18
# The relative error of a node that adds numbers to 1: two units of the last place.
_ERROR_OF_ONE = 2.0**-22
# The error of numbers that decide something, relative to the tensor's largest: the error of convolution by winograd.
_DECISION_ERROR = DEFAULT.relative / 5
_STEPS = 2.0**30  # of numbers that are sorted, in this error: other numbers are in other steps
# Errors of a run; larger tensors repeat them. Each tensor starts at another one, so far apart.
_COUNT, _STRIDE = 2**16 + 1, 7919
_ROUNDED_SUMS = re.compile("Q[A-Z]")  # such as QLinearConv: it adds up integers, scales the sum, and rounds it
_WEIGHTS = "weights"  # a file's name
_SIZED = ("Resize", "Upsample")  # whose vectors are factors of sizes, which a net does not store
ERRORS = "onnx2ncnn_opt.errors"  # the input of the model with errors
_TINY = float(np.finfo(np.float32).tiny)
_FLOATS = (DataType.FLOAT, DataType.DOUBLE)
_ABSORBING = ("Add", "Mul", "Sub")  # a result may be an operand, as a mask that absorbs scores
_ORDERING = ("ArgMax", "ArgMin", "TopK")
_INTEGER_RESULTS = ("Ceil", "Constant", "Floor", "Round")  # without errors of their own
_INTEGERS = (DataType.INT64, DataType.INT32, DataType.UINT8, DataType.INT8)


def with_rounded_weights(
    model: Path | bytes, outputs: Collection[str], encoding: Encoding, folder: Path, factor: float = 1.0
) -> bytes:
    """Return the model with rounded weights and tables, such as coordinates, stored in a file of a folder.

    Weights of 16 bits are rounded `factor` times as large: each factor gives other errors.
    """
    read = read_model(model, outputs)
    lift_constants(read)
    factors = {value for node in read.graph.all_nodes() if node.op_type in _SIZED for value in node.inputs[1:]}
    for value in read.graph.initializers.values():
        if value.const_value is not None:
            array = value.const_value.numpy()
            if array.dtype == np.float32 and (array.ndim > 1 or array.size > 1) and value not in factors:
                array = _in_8_bits(array) if encoding is Encoding.INT8 else rounded(array * factor, encoding) / factor
            value.const_value = onnx_ir.tensor(array, value.dtype, name=value.name)
    # ONNX Runtime does not read external shapes and axes.
    onnx_ir.external_data.unload_from_model(read, folder, _WEIGHTS, size_threshold_bytes=1024)
    return to_bytes(read)


def _in_8_bits(array: Array) -> Array:
    """Return each row rounded to 127ths of its largest number, like weights of ncnn's int8 layers."""
    rows = array.reshape(len(array), -1)
    steps = np.abs(rows).max(axis=1, keepdims=True, initial=0.0) / np.float32(127)
    integers = np.round(np.divide(rows, steps, out=np.zeros_like(rows), where=steps > 0))
    return np.asarray((integers * steps).reshape(array.shape), array.dtype)


@cache
def error_runs() -> list[Array]:
    """Return the errors of each run, in the units of a tensor's error.

    They are five patterns of signs, alternating signs (for pairs of x and y), all numbers too large, all too small, and
    no errors (but a right Sigmoid, see `_sigmoid`).
    """
    signs = [np.random.default_rng(number).choice((-1, 1), _COUNT) for number in range(5)]
    same = [np.resize(pattern, _COUNT) for pattern in ((1, -1), (-1, 1), 1, -1, 0)]
    return [np.asarray(errors, np.float32) for errors in (*signs, *same)]


def with_errors(model: Path | bytes, outputs: Collection[str] = ()) -> bytes:
    """Return the model with rounding errors, and one more input, the errors of a run (see `error_runs`).

    Every number that a node computes gets an error, except moved numbers, zeros, and numbers in branches and loops.
    Raises EncodeError for a model that does not fit into a message.
    """
    changed = read_model(model, outputs, typed=True, upgraded=True)
    nodes, writer = list(changed.graph), _ErrorWriter(changed)
    for node in nodes:
        writer.add(node)
    changed.graph.inputs.append(writer.errors)
    forget_types(changed.graph)
    return to_bytes(changed)


class _ErrorWriter(Editor):
    """Replaces each node of a model by a copy, and by nodes that add errors to its tensors."""

    def __init__(self, model: onnx_ir.Model) -> None:
        super().__init__(model.graph)
        self.errors = onnx_ir.val(ERRORS, DataType.FLOAT, [_COUNT])
        # The error that all elements share: 1 in the run with all numbers too large, else 0 or -1.
        self._shared = self.node("ReduceMin", self.errors, keepdims=0)
        self._opsets = model.opset_imports
        self._exact: set[onnx_ir.Value | None] = {*self.graph.inputs, *self.graph.initializers.values()}
        # Constants, and floats with integer values.
        self._integral: set[onnx_ir.Value | None] = {*self.graph.initializers.values()}
        # Values before the error of numbers computed from these alone: a quotient of integers is the same everywhere.
        self._unperturbed: dict[onnx_ir.Value, onnx_ir.Value] = {}
        self._places = count(0, _STRIDE)

    def add(self, node: onnx_ir.Node) -> None:
        """Replace a node of the model, with errors of its inputs and outputs."""
        self.place = node
        traits = traits_of(node.domain, node.op_type, self._opsets.get(node.domain, 1))
        inputs = self._perturb_decisions(node, traits)
        first, dtype = (node.inputs[0], node.inputs[0].dtype) if node.inputs and node.inputs[0] else (None, None)
        if first is not None and dtype in _FLOATS and traits.errors in ("input", "gates") and inputs[0] is first:
            inputs[0] = self._perturb(first, dtype, _CANCELLED_ERROR)
        grid = inputs[1] if node.op_type == "GridSample" else None
        if grid is not None and grid is node.inputs[1] and dtype in _FLOATS:
            inputs[1] = self._perturb(grid, dtype)  # the coordinates in pixels are rounded, too
        operands, dtype_out = inputs, node.outputs[0].dtype
        if node.op_type == "Cast" and dtype in _FLOATS and dtype_out in _INTEGERS:
            operands = [self._defined(inputs[0], dtype, dtype_out)]
        outputs = self.copy(node, operands)
        if node.op_type == "Sigmoid" and dtype in _FLOATS:
            outputs = [self._sigmoid(operands[0], outputs[0])]
        results = self._results(node, traits, inputs, outputs)
        for old, new in zip(node.outputs, results, strict=True):
            new.type = old.type
            self.replace(old, new)
        self.graph.remove(node, safe=True)

    def _results(
        self,
        node: onnx_ir.Node,
        traits: Traits,
        inputs: Sequence[onnx_ir.Value | None],
        outputs: Sequence[onnx_ir.Value],
    ) -> list[onnx_ir.Value]:
        """Return the outputs of a node, perturbed unless it moves its inputs."""
        results = [*outputs]
        if node.op_type == "Cast" or (traits.moves == () and node.op_type != "Constant"):
            # A net in 32 bits rounds nothing to 16.
            is_half = {x: x.name and x.dtype == DataType.FLOAT16 for x in outputs}
            results = [self._perturb(x, DataType.FLOAT16, LAST_BIT["float16"]) if is_half[x] else x for x in outputs]
        moved = [value for index, value in enumerate(inputs) if traits.moves_input(index)]
        is_integral = all(value in self._integral or (value and value.dtype in _INTEGERS) for value in moved)
        if node.op_type in _INTEGER_RESULTS or (moved and is_integral):
            self._integral.update(outputs)
        is_exact = traits.errors == "none" or node.op_type in ("Constant", "ConstantOfShape")
        if self._exact.issuperset(inputs) and (traits.moves != () or is_exact):
            self._exact.update(outputs)
        elif traits.moves == () and traits.errors != "none" and node.op_type not in _INTEGER_RESULTS:
            for index, x in enumerate(outputs):
                if x.name and x.dtype in _FLOATS:
                    addend = {"one": inputs[0], "gates": x}.get(traits.errors) if inputs else None
                    results[index] = self._perturb_output(x, x.dtype, addend)
                    if node.op_type == "GridSample":  # the weights of its pixels are sums that cancel
                        largest = self.node("ReduceMax", self.node("Abs", inputs[0]), keepdims=0)
                        error = self.node("Mul", self._errors(x, x.dtype), _number(_ERROR_OF_ONE, x.dtype))
                        results[index] = self.node("Add", results[index], self.node("Mul", largest, error))
                    if node.op_type in _ABSORBING:
                        results[index] = self._unless_absorbed(results[index], x, x.dtype, inputs, node.op_type)
                    if traits.axes == "each" and self._integral.issuperset(inputs):
                        self._unperturbed[results[index]] = x
        return results

    def _perturb_decisions(self, node: onnx_ir.Node, traits: Traits) -> list[onnx_ir.Value | None]:
        """Return the inputs of a node, perturbed where the last bit may decide its result."""
        inputs = list(node.inputs)
        to_float = node.op_type == "Cast" and (node.outputs[0].dtype is None or is_float(node.outputs[0]))
        level = node.attributes.get_int("accuracy_level", INT8_ACCURACY)
        indexes = range(len(inputs)) if traits.jumps and not to_float and level == INT8_ACCURACY else range(0)
        if node.op_type == "GridSample":
            indexes = range(1, 2) if node.attributes.get_string("mode", "") == "nearest" else range(0)
        is_inside = bool(_ROUNDED_SUMS.match(node.op_type))
        floats = [index for index in indexes if (value := inputs[index]) is not None and value.dtype in _FLOATS]
        for index in floats[:1] if is_inside else floats:  # the error of one scale is the error of the sum
            value = node.inputs[index]
            assert value is not None
            assert value.dtype is not None
            inputs[index] = self._unperturbed.get(value, value)
            if is_inside or not (value in self._exact or value in self._integral or value in self._unperturbed):
                perturb = self._perturb_order if node.op_type in _ORDERING else self._perturb_decision
                inputs[index] = perturb(value, value.dtype)
                if node.op_type == "Equal" and index == 1:
                    inputs[1] = self._equal_if_near(inputs[1], inputs[0], value.dtype)
        return inputs

    def _defined(self, x: Operand, dtype: DataType, integers: DataType) -> onnx_ir.Value:
        """Return the operand of a Cast, with errors in place of numbers that its integers do not hold.

        ONNX does not define their results.
        """
        limits = np.iinfo(integers.numpy())
        ends = _number(limits.min - 1.0, dtype), _number(limits.max + 1.0, dtype)
        inside = [self.node(kind, x, end) for kind, end in zip(("Greater", "Less"), ends, strict=True)]
        return self.node("Where", self.node("And", *inside), x, self._errors(x, dtype))

    def _sigmoid(self, x: Operand, rounded: onnx_ir.Value) -> onnx_ir.Value:
        """Return a sigmoid in place of ONNX Runtime's `rounded` one, which cancels digits near 1, and is 0 for -18.

        In the run with a positive shared error it is never 0: ncnn's may be positive, and a Ceil makes 1 of that.
        """
        least = self.node("Mul", self.node("Cast", self._shared, to=DataType.DOUBLE), np.array(_TINY))
        power = self.node("Exp", self.node("Neg", self.node("Cast", x, to=DataType.DOUBLE)))
        quotient = self.node("Reciprocal", self.node("Add", power, np.array(1.0)))
        result = self.node("Cast", self.node("Max", quotient, least), to=rounded.dtype)
        result.type, result.shape = rounded.type, rounded.shape
        return result

    def _errors(self, x: Operand, dtype: DataType) -> onnx_ir.Value:
        """Add errors of a run, one for each element of a tensor."""
        places = self.node("Range", _number(0, DataType.INT64), self.node("Size", x), _number(1, DataType.INT64))
        return self.node("Reshape", self._errors_at(places, dtype), self.node("Shape", x))

    def _errors_at(self, places: onnx_ir.Value, dtype: DataType) -> onnx_ir.Value:
        """Add the errors of a run at any places, which count from another one for each tensor."""
        places = self.node("Add", places, _number(next(self._places) % _COUNT, DataType.INT64))
        errors = self.node("Gather", self.errors, self.node("Mod", places, _number(_COUNT, DataType.INT64)))
        return errors if dtype == DataType.FLOAT else self.node("Cast", errors, to=dtype)

    def _perturb_output(self, x: onnx_ir.Value, dtype: DataType, addend: Operand) -> onnx_ir.Value:
        """Add an error to a node's output; with an `addend` also the error of 1 + addend."""
        perturbed = self._perturb(x, dtype)
        if addend is not None:
            size = self.node("Add", self.node("Abs", addend), _number(1, dtype))
            error = self.node("Mul", self._errors(x, dtype), _number(_ERROR_OF_ONE, dtype))
            perturbed = self.node("Add", perturbed, self.node("Mul", size, error))
        return perturbed

    def _unless_absorbed(
        self, perturbed: onnx_ir.Value, x: onnx_ir.Value, dtype: DataType, operands: Sequence[Operand], kind: str
    ) -> onnx_ir.Value:
        """Keep elements that equal an operand, as those of a mask that absorbs scores.

        In a sum the other operand has to be less than half a step: steps near -1e9 are 64, so a score of 40 counts.
        """
        for term, other in zip(operands, operands[::-1], strict=True):
            is_exact = self.node("Equal", x, term)
            if kind != "Mul":
                step = self.node("Mul", self.node("Abs", x), _number(float(np.finfo(dtype.numpy()).eps) / 4, dtype))
                is_exact = self.node("And", is_exact, self.node("Less", self.node("Abs", other), step))
            perturbed = self.node("Where", is_exact, x, perturbed)
        return perturbed

    def _perturb(self, x: onnx_ir.Value, dtype: DataType, error: float = _ERROR) -> onnx_ir.Value:
        """Add a relative error to each number of a tensor, or flush subnormal numbers to 0; zeros stay."""
        least = self.node("Mul", self.node("Sign", x), _number(_TINY, dtype))
        size = self.node("Add", self.node("Mul", x, _number(error, dtype)), least)
        return self.node("Add", x, self.node("Mul", self._errors(x, dtype), size))

    def _perturb_decision(self, x: onnx_ir.Value, dtype: DataType) -> onnx_ir.Value:
        """Perturb the input of a comparison or rounding; zeros stay exact, because models mostly mean them."""
        error = self.node("Mul", self._errors(x, dtype), self._decision_error(x, dtype))
        return self.node("Add", x, self.node("Mul", error, self.node("Abs", self.node("Sign", x))))

    def _decision_error(self, x: Operand, dtype: DataType) -> onnx_ir.Value:
        """Add the size of the error of a tensor that decides something."""
        size = self.node("Abs", x)
        finite = self.node("Less", size, _number(float(INFINITE), dtype))
        largest = self.node("ReduceMax", self.node("Where", finite, size, _number(0, dtype)), keepdims=0)
        return self.node("Mul", largest, _number(_DECISION_ERROR, dtype))

    def _equal_if_near(self, x: Operand, other: Operand, dtype: DataType) -> onnx_ir.Value:
        """Replace nearly equal elements by those of `other`, in the run with a positive shared error."""
        bound = self.node("Mul", self._decision_error(x, dtype), self.node("Cast", self._shared, to=dtype))
        is_near = self.node("Less", self.node("Abs", self.node("Sub", x, other)), bound)
        return self.node("Where", is_near, other, x)

    def _perturb_order(self, x: onnx_ir.Value, dtype: DataType) -> onnx_ir.Value:
        """Perturb numbers whose order counts.

        Equal ones stay equal: they are exact, such as the ends of a Clip, or other nodes have perturbed them. In the
        run with a positive shared error, which changes no order, nearly equal ones become equal.
        """
        step = self.node("Add", self._decision_error(x, dtype), _number(_TINY, dtype))
        steps = self.node("Div", x, step)
        places = self.node("Cast", self.node("Mul", steps, _number(_STEPS, dtype)), to=DataType.INT64)
        perturbed = self.node("Add", x, self.node("Mul", self._errors_at(places, dtype), step))
        tied = self.node("Mul", self.node("Round", steps), step)
        return self.node("Where", self.node("Greater", self._shared, _number(0, DataType.FLOAT)), tied, perturbed)


def _number(value: float, dtype: DataType) -> Array:
    return np.array(value, dtype.numpy())
