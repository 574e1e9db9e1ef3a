"""The effect of rounding errors on a model's results.

Two right implementations add up sums in different orders. Their numbers differ in the last bits, and zeros in the sign.
The last bit may decide the result if a model compares numbers, rounds to integers, searches the largest, or subtracts
equal numbers. A wider tolerance would hide faults there. So ONNX Runtime runs the model with inserted errors.

The model in float64 gives the size of ONNX Runtime's own errors. The model with rounded weights gives the errors from
weights in 16 bits.

Right implementations also choose different elements (TopK, ArgMax, ArgMin) where scores are nearly equal. So an index
agrees if its score equals the score of the model's index, up to the error of the scores.
"""

import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from google.protobuf.message import EncodeError  # type: ignore[import-untyped]
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import load_external_data_for_tensor, set_external_data
from onnx.shape_inference import InferenceError

from onnx2ncnn_opt.errors import RunError
from onnx2ncnn_opt.ir.reached import reached
from onnx2ncnn_opt.ir.weight import Encoding
from onnx2ncnn_opt.onnx.ops import traits_of
from onnx2ncnn_opt.onnx.read.load import LoadedModel, load_model
from onnx2ncnn_opt.onnx.read.quantized import float_model, scales_of_products
from onnx2ncnn_opt.onnx.registry import INT8_ACCURACY, Traits
from onnx2ncnn_opt.param.storage import rounded
from onnx2ncnn_opt.progress import counted
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.runtime.ort import OrtRunner, read_model
from onnx2ncnn_opt.system import temporary_folder
from onnx2ncnn_opt.verification.double import FLOATS, InDouble, NodeWriter, element_types, inferred_values, upgraded
from onnx2ncnn_opt.verification.tolerance import (
    DEFAULT,
    INFINITE,
    MOST_BUDGET,
    Tolerance,
    compare,
    parts,
    with_rounding,
)

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
_ERROR_RUNS = (
    *((0.0, 1.0), (0.0, -1.0), (_ALTERNATING, 0.0), (-_ALTERNATING, 0.0)),
    *((float(number), 0.0) for number in range(1, 6)),
)
_SAFETY = 2.0
_FLOAT32 = np.finfo(np.float32)
_TIMEOUT = 120.0  # seconds; float64 takes ten to a hundred times as long as float32
_MANY_WEIGHTS = 2**25

_INTEGER_OPS = re.compile("Integer|^Q[A-Z]|DynamicQuantize")
_ROUNDED_SUMS = re.compile("Q[A-Z]")  # such as QLinearConv: it adds up integers, scales the sum, and rounds it
_WEIGHTS = "weights"  # a file's name
_NO_SLICES = Tolerance(slices=False)
_OWN, _SHARED = "onnx2ncnn_opt.own_errors", "onnx2ncnn_opt.shared_error"  # inputs of the model with errors
_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE)
_INTEGER_RESULTS = ("Ceil", "Constant", "Floor", "Round")  # without errors of their own
_INTEGERS = (TensorProto.INT64, TensorProto.INT32, TensorProto.UINT8, TensorProto.INT8)
_INDICES = {"TopK": (1, -1), "ArgMax": (0, 0), "ArgMin": (0, 0)}  # the output of indices, and the default axis
_SAME_ORDER = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
_MOVES = _SAME_ORDER - {"Cast"} | {"Transpose"}
_SIZES = ("Shape", "Size")


class Choice(NamedTuple):
    """The name of the scores whose elements an output's indices choose, and the axis."""

    scores: str
    axis: int


# The dB that a net with int8 layers may lose against the quantised model, because outputs have few numbers. Coarser
# steps add to the loss: one-sided numbers lose up to one of the 8 bits, 6 dB.
LOSS = 1.0
_STATES = 0.25  # of the noise of a DynamicQuantizeLSTM comes from rounded states at most, which ncnn does not round


def tolerance_of(model: LoadedModel) -> Tolerance:
    """Return the tolerance for a float32 net of the model: a whole step of its coarsest quantisation, if it has any.

    The last bit of a sum decides whether a number halfway between two steps is rounded up or down. `Rounding.spread`
    has the effect of a step on later layers. Nets may lack quantisation whose scales the model computes at run time.
    """
    if any(node.op_type.startswith("DynamicQuantize") for node in model.graph):
        return tolerance_within(model)
    step = max((1 / (2**count - 1) for count in _quantised_bits(model)), default=0.0)
    return replace(DEFAULT, relative=max(DEFAULT.relative, step))


def tolerance_within(model: LoadedModel) -> Tolerance:
    """Return the tolerance for inner blobs, and for nets of 8 or 16 bits, where numbers fall into other steps.

    Example: ONNX Runtime's plain and optimised forms of a quantised U-Net differ by 3.6e-2, as much as ncnn's net
    differs from each.
    """
    bits = _quantised_bits(model)
    return with_rounding(max(0.5 / (2**count - 1) for count in bits), len(bits)) if bits else DEFAULT


def _quantised_bits(model: LoadedModel) -> list[int]:
    """Return the bits of each quantising node of the model: 8, unless a zero point has another type."""
    bits = []
    for node in model.graph:
        level = node.attributes.get_int("accuracy_level", INT8_ACCURACY)
        if traits_of(node.domain, node.op_type, model.opsets.get(node.domain, 1)).quantises and level == INT8_ACCURACY:
            zero = node.inputs[2] if node.op_type == "QuantizeLinear" and len(node.inputs) > 2 else None
            bits.append(zero.dtype.bitwidth if zero and zero.dtype else 8)
    return bits


class Rounding:
    """The rounding errors of a model, computed on first use; the arguments are the same as for `OrtRunner`."""

    def __init__(self, model: Path | bytes, outputs: Collection[str], values: Mapping[str, Array]) -> None:
        self._model, self._outputs, self._values = model, outputs, values
        self._runner: OrtRunner | None = None
        self._double: OrtRunner | None = None
        self._is_large = False  # the float64 model frees its memory between runs
        self._exact: tuple[Mapping[str, Array], Mapping[str, Array]] | None = None
        self.problem = ""  # the error of `exact`, if any
        self.unmoved = ""  # the error of `spread`, if any
        self.overflown: set[str] = set()  # outputs that `resolved` has corrected
        self.lone: dict[str, int] = {}  # of the last `spread`: how many elements of an output a single run moves

    def exact(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the outputs in float64; if that fails, return none, and set `problem`."""
        if self._exact is None or self._exact[0] is not feeds:
            try:
                if self._double is None:
                    double = InDouble(self._model, tuple(self._outputs))
                    self._double, self._is_large = self._rewritten(double.data), double.weights > _MANY_WEIGHTS
                outputs = self._double.run_any(feeds)
                if self._is_large:
                    self._double.close()
            except (RunError, EncodeError, InferenceError) as error:
                outputs, self.problem = {}, str(error)
            self._exact = feeds, outputs
        return self._exact[1]

    def is_as_good(
        self, name: str, feeds: Mapping[str, Array], reference: Array, actual: Array, *, is_int8: bool
    ) -> bool:
        """Return True if an output of a net has no larger error than the model's own quantisation.

        The reference is the model without quantisation. A net without the model's dynamic quantisation must be as near
        to it as the model; an int8 net may lose LOSS and the effect of its coarser steps. Or an int8 net may differ
        from the model by twice `tolerance_within`, because ncnn has no -128, and a net of a DynamicQuantizeLSTM by
        `_STATES` of the model's noise.
        """
        is_quantised = is_int8 or not self._op_types.isdisjoint(("DynamicQuantizeLinear", "DynamicQuantizeLSTM"))
        if not is_quantised or self._floats is None or actual.shape != reference.shape:
            return False
        float_runner, within, coarser = self._floats
        wider = replace(within, relative=2 * within.relative, slices=False)
        try:
            floats = float_runner.run_any(feeds)[name].astype(np.float64)
        except RunError:
            return False
        numbers = reference.astype(np.float64)
        allowed, noise = (float(np.square(array - floats).sum()) for array in (numbers, actual))
        if not is_int8:
            rest = float(np.square(actual - numbers).sum())
            return noise <= allowed or ("DynamicQuantizeLSTM" in self._op_types and rest <= _STATES * allowed)
        return noise <= allowed * coarser**2 * 10 ** (LOSS / 10) or compare(actual, numbers, wider).ok

    @cached_property
    def _floats(self) -> tuple[OrtRunner, Tolerance, float] | None:
        """The model without quantisation, `tolerance_within`, and the factor between steps of int8 layers and model."""
        loaded = load_model(self._model, values=self._values, outputs=tuple(self._outputs))
        within = tolerance_within(loaded)
        try:
            data = float_model(loaded.graph)
            fixed: dict[str, Any] = {"folder": self._folder, "values": self._values, "threads": None, "once": True}
            coarser = max((1.0, *(scales.coarser for scales in scales_of_products(loaded.graph).values())))
            return None if data is None else (OrtRunner(data, **fixed), within, coarser)
        except (RunError, EncodeError):
            return None

    def measured(self, feeds: Mapping[str, Array], reference: Mapping[str, Array]) -> dict[str, float]:
        """Return the error of the reference against float64, relative to an output's largest value, where known."""
        return {name: _relative(reference[name], array) for name, array in self.exact(feeds).items()}

    def resolved(self, name: str, feeds: Mapping[str, Array], reference: Array, actual: Array) -> Array:
        """Return the reference of an output, corrected where ONNX Runtime's float32 overflows or underflows.

        Where the reference is not finite but float64 is, a finite number must agree with float64, and any non-finite
        number passes. Example: ONNX Runtime's log(sigmoid(-20)) is -infinity. Where float64 is outside float32's range,
        0 and non-finite numbers pass too: the order of a product decides between them.
        """
        exact = self.exact(feeds).get(name)
        if exact is None or exact.shape != reference.shape or reference.dtype.kind != "f":
            return reference
        size, is_finite = np.abs(exact), np.abs(actual) < INFINITE
        is_lost = (size < INFINITE) & ~(np.abs(reference) < INFINITE)
        is_outside = (np.isfinite(exact) & (size >= INFINITE)) | ((size > 0) & (size < _FLOAT32.tiny))
        is_any = (is_lost & ~is_finite) | (is_outside & (~is_finite | (actual == 0)))
        if not (is_lost | is_any).any():
            return reference
        self.overflown.add(name)
        return np.where(is_any, actual, np.where(is_lost, exact, reference))

    def chosen(self, name: str, feeds: Mapping[str, Array], reference: Array, actual: Array) -> Array:
        """Return the reference, with the actual indices where their scores are as good (`as_good`)."""
        choice = self._choices.get(name)
        if choice is None or actual.shape != reference.shape or not reference.size:
            return reference
        try:
            results = self.on_scores.run_any(feeds)
        except RunError:
            return reference
        spread = self.of_scores.spread(feeds, results)
        good = as_good(actual, reference, results[choice.scores], spread[choice.scores], choice.axis)
        return np.where(good, actual, reference).astype(reference.dtype)

    @cached_property
    def _choices(self) -> Mapping[str, Choice]:
        return choices(read_model(self._model, self._outputs))

    @cached_property
    def scores(self) -> Mapping[str, Collection[str]]:
        """The floats that decide each integer output, see `scores`; empty if ONNX cannot infer the types."""
        try:
            return scores(read_model(self._model, self._outputs))
        except (EncodeError, InferenceError):
            return {}

    @cached_property
    def on_scores(self) -> OrtRunner:
        """The model cut at all scores, of integer outputs and of choices; RunError if ONNX Runtime refuses it."""
        return OrtRunner(self._model, outputs=self._scores, values=self._values, threads=None)

    @cached_property
    def of_scores(self) -> "Rounding":
        """The rounding errors of `on_scores`."""
        return Rounding(self._model, self._scores, self._values)

    @property
    def _scores(self) -> Sequence[str]:
        return sorted({choice.scores for choice in self._choices.values()}.union(*self.scores.values()))

    def stored(
        self, encoding: Encoding, feeds: Mapping[str, Array], reference: Mapping[str, Array]
    ) -> dict[str, float]:
        """Return the errors of outputs if the model's weights are rounded to an encoding, in units of `measured`."""
        try:
            with temporary_folder() as folder:
                model = with_rounded_weights(self._model, self._outputs, encoding, Path(folder))
                with closing(self._rewritten(model, Path(folder))) as runner:
                    results = runner.run_any(feeds)
        except (RunError, EncodeError):
            return {}
        return {name: _relative(array, reference[name]) for name, array in results.items()}

    @property
    def _folder(self) -> Path | None:
        """The folder of external weights."""
        return self._model.absolute().parent if isinstance(self._model, Path) else None

    @cached_property
    def _op_types(self) -> frozenset[str]:
        """The types of the model's operators."""
        return frozenset(node.op_type for node in read_model(self._model).graph.node)

    def _rewritten(self, model: bytes, folder: Path | None = None) -> OrtRunner:
        """Load a rewritten model; its external weights are in `folder`, or in the model's own."""
        options: dict[str, Any] = {"values": self._values, "threads": None, "timeout": _TIMEOUT, "once": True}
        plain = not any(map(_INTEGER_OPS.search, self._op_types))  # such as QLinearConv and DynamicQuantizeMatMul
        return OrtRunner(model, folder=folder or self._folder, plain=plain, **options)

    def spread(self, feeds: Mapping[str, Array], reference: Mapping[str, Array]) -> dict[str, Array]:
        """Return the effect of errors on each element of the reference; infinite if it becomes infinite or NaN.

        The effect is at least the distance from float64, if that is finite. It is infinite for elements that errors
        decide: integers that change, and floats that move by more than `MOST_BUDGET` of the largest element. If ONNX
        Runtime refuses the model with errors, the effect is 0, and `unmoved` gives the reason.
        """
        distances = {name: _Distances(array) for name, array in reference.items()}
        try:
            if self._runner is None:
                self._runner = self._rewritten(with_errors(self._model, self._outputs))
            unsigned = {name: array + 0 if array.dtype.kind == "f" else array for name, array in feeds.items()}
            for own, shared in counted(_ERROR_RUNS, "ONNX Runtime runs the model with rounding errors", "runs"):
                errors = {_OWN: np.array(own, np.float32), _SHARED: np.array(shared, np.float32)}
                for name, array in self._runner.run_any({**(unsigned if own else feeds), **errors}).items():
                    distances[name].add(_distance(array, reference[name]))
        except (RunError, EncodeError) as error:
            self.unmoved = str(error)
            distances = {name: _Distances(array) for name, array in reference.items()}
        for name, array in self.exact(feeds).items():
            distance = _distance(array, reference[name])
            distances[name].add(np.where(np.isfinite(distance), distance, 0.0))
        self.lone = {name: output.lone for name, output in distances.items()}
        return {name: output.spread for name, output in distances.items()}


class _Distances:
    """The largest distances of an output's elements from the reference, over several runs."""

    def __init__(self, reference: Array) -> None:
        finite = np.abs(reference[np.abs(reference) < INFINITE]) if reference.dtype.kind == "f" else np.zeros(0)
        self._scale = float(finite.max(initial=0.0))
        self._largest, self._second = np.zeros(reference.shape), np.zeros(reference.shape)
        self._run = np.zeros(reference.shape, np.int8)  # the run with the largest distance
        self._runs = 0

    def add(self, distance: Array) -> None:
        """Add a run."""
        self._second = np.maximum(self._second, np.minimum(self._largest, distance))
        self._run[distance > self._largest] = self._runs
        self._largest = np.maximum(self._largest, distance)
        self._runs += 1

    @property
    def spread(self) -> Array:
        """The allowed error of each element."""
        return np.where(self._largest > MOST_BUDGET * self._scale, np.inf, _SAFETY * self._largest)

    @property
    def lone(self) -> int:
        """The largest number of elements that a single run moves and no other run does; a net may do the same."""
        lone = self._largest > _SAFETY * self._second + DEFAULT.relative * self._scale
        return int(np.bincount(self._run[lone], minlength=1).max())


def _distance(a: Array, b: Array) -> Array:
    """Return the distance of numbers; infinite if one is infinite or NaN and the other is different."""
    if a.shape != b.shape:
        return np.full(b.shape, np.inf)
    distance = np.empty(b.shape)
    for part in parts(b.shape):
        x, y = a[part].astype(np.float64), b[part].astype(np.float64)
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        finite = (np.abs(x) < INFINITE) & (np.abs(y) < INFINITE)
        difference = np.abs(np.where(finite, x, 0.0) - np.where(finite, y, 0.0))
        distance[part] = np.where(same, 0.0, np.where(finite, difference, np.inf))
    return distance


def _relative(a: Array, b: Array) -> float:
    """Return the largest distance of finite numbers, relative to the largest of `b`."""
    return (compare(a, b, _NO_SLICES).max_rel or 0.0) if a.shape == b.shape else 0.0


def choices(model: onnx.ModelProto) -> dict[str, Choice]:
    """Return the choice that makes each output of indices, unless the scores are exact, because they are an input."""
    producers = _producers(model)
    result = {}
    for value in model.graph.output:
        name = _origin(value.name, producers)
        node = producers.get(name)
        if node is None or node.domain or node.op_type not in _INDICES:
            continue
        output, axis = _INDICES[node.op_type]
        if node.output[output] == name and node.input[0] in producers:
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), axis)
            result[value.name] = Choice(node.input[0], axis)
    return result


def scores(model: onnx.ModelProto) -> dict[str, set[str]]:
    """Return the floats that decide each integer output, also before nodes that only move them.

    Example: the inputs of an ArgMax and of the Reshape before it. Outputs without such floats are left out. Values of
    unknown types count as floats.
    """
    producers, types = _producers(model), element_types(model, inferred_values(model))

    def is_float(name: str) -> bool:
        return types.get(name, TensorProto.FLOAT) in FLOATS

    def operands(name: str) -> Sequence[str]:
        """Return the computed values that decide a value."""
        node = producers[name]
        if node.op_type in _SIZES or (is_float(name) and node.op_type not in _MOVES):
            return ()
        return [operand for operand in (node.input[:1] if is_float(name) else node.input) if operand in producers]

    result: dict[str, set[str]] = {}
    for value in model.graph.output:
        first = _origin(value.name, producers)
        if first in producers and not is_float(first):
            result[value.name] = set(filter(is_float, reached([first], operands)))
    return {name: floats for name, floats in result.items() if floats}


def _producers(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    return {name: node for node in model.graph.node for name in node.output if name}


def _origin(name: str, producers: Mapping[str, onnx.NodeProto]) -> str:
    """Return the value before all nodes that keep the order of its elements, such as Reshape."""
    while name in producers and producers[name].op_type in _SAME_ORDER:
        name = producers[name].input[0]
    return name


def as_good(indices: Array, reference: Array, scores: Array, spread: Array, axis: int) -> Array:
    """Return a mask of indices whose scores are as good as the reference's, in the reference's shape.

    `spread` is the effect of rounding errors on each score. Indices that occur twice in a row do not pass. Nor do other
    indices among zeros, because models rely on the order of equal zeros, for example behind a ReLU.
    """
    axis %= scores.ndim
    shape = [*scores.shape]
    shape[axis] = -1
    valid = (indices == np.rint(indices)) & (indices >= 0) & (indices < scores.shape[axis])
    actual, expected = (np.where(valid, array, 0).astype(np.int64).reshape(shape) for array in (indices, reference))
    chosen, best = (np.take_along_axis(scores, array, axis).astype(np.float64) for array in (actual, expected))
    finite = np.abs(scores) < INFINITE
    error = DEFAULT.relative * np.abs(scores[finite]).max(initial=0.0)
    error = error + sum(np.take_along_axis(spread, array, axis) for array in (actual, expected))
    unique = (actual.swapaxes(axis, -1)[..., None] == actual.swapaxes(axis, -1)[..., None, :]).sum(-1) == 1
    with np.errstate(invalid="ignore"):
        near = np.abs(chosen - best) <= error
    result = near & unique.swapaxes(axis, -1) & ((chosen != 0) | (best != 0))
    return np.asarray(result.reshape(reference.shape) & valid)


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
    """Return the model with rounding errors, and two more inputs that select the errors of a run (`_ERROR_RUNS`).

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
    proto.graph.input.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, []) for name in (_OWN, _SHARED))
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
        self._perturb_decisions(node, traits)
        if traits.errors in ("input", "gates") and self._types.get(node.input[0]) in _FLOATS:
            node.input[0] = self.perturb(node.input[0], self._types[node.input[0]], _CANCELLED_ERROR)
        self.nodes.append(node)
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

    def _perturb_outputs(self, node: onnx.NodeProto, traits: Traits) -> None:
        """Perturb the numbers that a node computes."""
        addend = {"one": node.input[0], "gates": ""}.get(traits.errors) if node.input else None
        for index, name in enumerate(node.output):
            if name and self._types.get(name) in _FLOATS:
                node.output[index] = self.perturb_output(name, self._types[name], addend)
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
        speed = self.node("Mul", self.node("Cast", _OWN, to=TensorProto.DOUBLE), phase)
        periods = self.node("Mul", self.node("Mul", indexes, indexes), speed)
        shifted = self.node("Add", periods, self.number(len(self.nodes) / math.tau, TensorProto.DOUBLE))
        fraction = self.node("Cast", self.node("Sub", shifted, self.node("Floor", shifted)), to=dtype)
        flat_signs = self.node("Sign", self.node("Sub", self.number(0.5, dtype), fraction))
        signs = self.node("Reshape", flat_signs, self.node("Shape", name))
        scales = [self.node("Cast", scale, to=dtype) for scale in (self.node("Sign", _OWN), _SHARED)]
        return self.node("Add", self.node("Mul", signs, scales[0]), scales[1])

    def perturb_output(self, name: str, dtype: int, addend: str | None = None) -> str:
        """Insert an error after a node, and return its new output name.

        With an `addend` insert also the error of 1 + addend; "" means the output itself.
        """
        inner = f"onnx2ncnn_opt.inner.{name}"
        perturbed = self.perturb(inner, dtype)
        if addend is not None:
            size = self.node("Add", self.node("Abs", addend or inner), self.number(1, dtype))
            error = self.node("Mul", self.errors(inner, dtype), self.number(_ERROR_OF_ONE, dtype))
            perturbed = self.node("Add", perturbed, self.node("Mul", size, error))
        self.nodes.append(helper.make_node("Identity", [perturbed], [name]))
        return inner

    def perturb(self, name: str, dtype: int, error: float = _ERROR) -> str:
        """Add a relative error to each number of a tensor, or flush subnormal numbers to 0; zeros stay."""
        errors = self.errors(name, dtype)
        relative = self.node("Mul", errors, self.number(error, dtype))
        scaled = self.node("Mul", name, self.node("Add", relative, self.number(1, dtype)))
        least = self.node("Mul", errors, self.number(float(_FLOAT32.tiny), dtype))
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
        bound = self.node("Mul", self.decision_error(name, dtype), self.node("Cast", _SHARED, to=dtype))
        is_near = self.node("Less", self.node("Abs", self.node("Sub", name, other)), bound)
        return self.node("Where", is_near, other, name)
