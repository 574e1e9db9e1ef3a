"""Changes of a model's results by the rounding errors of any implementation.

Two right implementations add up their sums in different orders, so their numbers differ in the last bits, and zeros in
their sign. But a model may compare numbers, round to whole ones, look for the largest, or take the difference of equal
ones: then the last bit may decide. A wider tolerance would hide faults there. So ONNX Runtime runs the model with
errors of that size put into it.

The model in float64 gives the size of ONNX Runtime's own errors. The model with rounded weights gives the part of a
difference that comes from a net's weights in 16 bits.

Right implementations also choose different elements (TopK, ArgMax, ArgMin) where scores are as good as equal. So an
index agrees if its score is that of the model's index, up to the error of the scores.
"""

import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
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
from onnx2ncnn_opt.ir.weight import Encoding
from onnx2ncnn_opt.onnx.ops import traits_of
from onnx2ncnn_opt.onnx.read.load import LoadedModel, load_model
from onnx2ncnn_opt.onnx.read.quantized import float_model, scales_of_products
from onnx2ncnn_opt.onnx.registry import INT8_ACCURACY
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

# The relative error of each number that a node computes: some 16 units of the last place, as sums of many terms have.
_EACH = 2.0**-20
# The same of inputs whose differences are taken: their sums have hundreds of terms, which ncnn adds up one by one.
_CANCELLED = 2.0**-18
# The same for one that adds numbers to 1: two units of its last place.
_BESIDE_ONE = 2.0**-22
# The error of numbers that decide something, in units of the largest one beside them: of a convolution by winograd.
_DECIDING = DEFAULT.relative / 5
_PHASE = math.sqrt(2) / 2  # in turns: no whole number makes it a whole one
# All numbers too large, all too small, signs that alternate, as for x and y of a place, and five times others.
_ALTERNATING = 0.5 / _PHASE
_RUNS = (
    *((0.0, 1.0), (0.0, -1.0), (_ALTERNATING, 0.0), (-_ALTERNATING, 0.0)),
    *((float(number), 0.0) for number in range(1, 6)),
)
_ROOM = 2.0
_FLOAT32 = np.finfo(np.float32)
# For a model in float64, which takes some ten to a hundred times as long as in float32.
_SECONDS = 120.0
_MANY_WEIGHTS = 2**25

_OF_INTEGERS = re.compile("Integer|^Q[A-Z]|DynamicQuantize")
_WEIGHTS = "weights"  # a file's name
_WHOLE = Tolerance(slices=False)
_OWN, _SHARED = "onnx2ncnn_opt.own_errors", "onnx2ncnn_opt.shared_error"
_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE)
_WHOLE_RESULTS = ("Ceil", "Constant", "Floor", "Round")  # exact for their inputs
_INTEGERS = (TensorProto.INT64, TensorProto.INT32, TensorProto.UINT8, TensorProto.INT8)
_INDICES = {"TopK": (1, -1), "ArgMax": (0, 0), "ArgMin": (0, 0)}  # the output of indices, and the default axis
_SAME_ORDER = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
_MOVES = _SAME_ORDER - {"Cast"} | {"Transpose"}
_SIZES = ("Shape", "Size")


class Choice(NamedTuple):
    """The value of the scores that indices choose from, and their axis."""

    scores: str
    axis: int


# dB that a net with int8 layers may be further from the float model than the quantised model is: outputs have few
# numbers. Coarser steps add to that: numbers on one side of 0 lose up to one of the 8 bits, 6 dB.
LOSS = 1.0


def tolerance_of(model: LoadedModel) -> Tolerance:
    """Return the tolerance for a float32 net of the model: a whole step of its coarsest quantisation, if it has any.

    A number near the middle of two steps is rounded up or down by the last bit of a sum, and so by its order. The
    effect of such a step on later layers is that of other errors: see `Rounding.spread`. Nets may lack the roundings
    whose scales the model finds at run time.
    """
    if any(node.op_type.startswith("DynamicQuantize") for node in model.graph):
        return tolerance_within(model)
    step = max((1 / (2**count - 1) for count in _quantised_bits(model)), default=0.0)
    return replace(DEFAULT, relative=max(DEFAULT.relative, step))


def tolerance_within(model: LoadedModel) -> Tolerance:
    """Return the tolerance for inner blobs, and for nets of 8 or 16 bits, in which other steps are decided.

    Example: ONNX Runtime's plain and optimised forms of one quantised U-Net differ from each other by 3.6e-2, as much
    as ncnn's differs from either.
    """
    bits = _quantised_bits(model)
    return with_rounding(max(0.5 / (2**count - 1) for count in bits), len(bits)) if bits else DEFAULT


def _quantised_bits(model: LoadedModel) -> list[int]:
    """Return the bits to which each node of the model quantises: 8, unless a zero point differs."""
    bits = []
    for node in model.graph:
        level = node.attributes.get_int("accuracy_level", INT8_ACCURACY)
        if traits_of(node.domain, node.op_type, model.opsets.get(node.domain, 1)).quantises and level == INT8_ACCURACY:
            zero = node.inputs[2] if node.op_type == "QuantizeLinear" and len(node.inputs) > 2 else None
            bits.append(zero.dtype.bitwidth if zero and zero.dtype else 8)
    return bits


class Rounding:
    """A model with rounding errors, made when it is first needed; arguments are as `OrtRunner` takes them."""

    def __init__(self, model: Path | bytes, outputs: Collection[str], values: Mapping[str, Array]) -> None:
        self._model, self._outputs, self._values = model, outputs, values
        self._runner: OrtRunner | None = None
        self._double: OrtRunner | None = None
        self._is_large = False  # it keeps no memory between two runs
        self._exact: tuple[Mapping[str, Array], Mapping[str, Array]] | None = None
        self.problem = ""  # why there are no outputs in float64, once they were asked for
        self.unmoved = ""  # why no errors move the model, once it was asked how far they do
        self.overflown: set[str] = set()  # outputs that were `resolved`
        self.lone: dict[str, int] = {}  # the most elements of an output that only one run of the last `spread` moves

    def exact(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the outputs in float64; none if that fails, and `problem` gives the reason."""
        if self._exact is None or self._exact[0] is not feeds:
            try:
                if self._double is None:
                    double = InDouble(self._model, tuple(self._outputs))
                    self._double, self._is_large = self._rewritten(double.data), double.weights > _MANY_WEIGHTS
                found = self._double.run_any(feeds)
                if self._is_large:
                    self._double.close()
            except (RunError, EncodeError, InferenceError) as error:
                found, self.problem = {}, str(error)
            self._exact = feeds, found
        return self._exact[1]

    def is_as_good(
        self, name: str, feeds: Mapping[str, Array], reference: Array, actual: Array, *, is_int8: bool
    ) -> bool:
        """Return True if an output of a net errs no more than the model's own quantisation.

        A net without the roundings that the model makes at run time is as near to the model without quantisation as the
        model's own output is; an int8 net is, up to LOSS and to its coarser steps. Or it is as near to the model's as a
        whole step allows where `tolerance_within` has half of one: ncnn has no -128.
        """
        if (
            not (is_int8 or "DynamicQuantizeLinear" in self._op_types)
            or self._floats is None
            or actual.shape != reference.shape
        ):
            return False
        floats, within, coarser = self._floats
        wider = replace(within, relative=2 * within.relative, slices=False)
        try:
            right = floats.run_any(feeds)[name].astype(np.float64)
        except RunError:
            return False
        numbers = reference.astype(np.float64)  # integers count as numbers
        allowed, noise = (float(np.square(array - right).sum()) for array in (numbers, actual))
        if not is_int8:
            return noise <= allowed
        return noise <= allowed * coarser**2 * 10 ** (LOSS / 10) or compare(actual, numbers, wider).ok

    @cached_property
    def _floats(self) -> tuple[OrtRunner, Tolerance, float] | None:
        """The model without quantisation, `tolerance_within`, and how much coarser the steps of int8 layers may be."""
        loaded = load_model(self._model, values=self._values, outputs=tuple(self._outputs))
        within = tolerance_within(loaded)
        try:
            data = float_model(loaded.graph)
            fixed: dict[str, Any] = {"folder": self._folder, "values": self._values, "threads": None, "once": True}
            coarser = max((1.0, *(each.coarser for each in scales_of_products(loaded.graph).values())))
            return None if data is None else (OrtRunner(data, **fixed), within, coarser)
        except (RunError, EncodeError):
            return None

    def measured(self, feeds: Mapping[str, Array], reference: Mapping[str, Array]) -> dict[str, float]:
        """Return the distance of the reference from float64, in units of an output's largest value, if it is known."""
        return {name: _relative(reference[name], array) for name, array in self.exact(feeds).items()}

    def resolved(self, name: str, feeds: Mapping[str, Array], reference: Array, actual: Array) -> Array:
        """Return the reference of an output, corrected where ONNX Runtime's float32 has left its range.

        If it is not finite but float64 is, a finite number has to agree with float64. Example: ONNX Runtime makes
        -infinity of log(sigmoid(-20)), which others need not. Another number that is not finite passes. If the float64
        number is outside float32's range, 0 and numbers that are not finite pass too: the order of a product decides
        which of them comes out.
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
        """Return the reference with an actual output's indices, if their scores are as good (`as_good`)."""
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
        """The values that outputs of integers are decided by, by output; see `scores`. None if ONNX cannot tell."""
        try:
            return scores(read_model(self._model, self._outputs))
        except (EncodeError, InferenceError):
            return {}

    @cached_property
    def on_scores(self) -> OrtRunner:
        """The model up to all of these values, and those of choices; RunError if ONNX Runtime refuses it."""
        return OrtRunner(self._model, outputs=self._scores, values=self._values, threads=None)

    @cached_property
    def of_scores(self) -> "Rounding":
        """The same with rounding errors."""
        return Rounding(self._model, self._scores, self._values)

    @property
    def _scores(self) -> Sequence[str]:
        return sorted({choice.scores for choice in self._choices.values()}.union(*self.scores.values()))

    def stored(
        self, encoding: Encoding, feeds: Mapping[str, Array], reference: Mapping[str, Array]
    ) -> dict[str, float]:
        """Return the distance that outputs move if the model's weights are rounded to an encoding, as `measured`."""
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
        """The folder of the weights that are not in the message."""
        return self._model.absolute().parent if isinstance(self._model, Path) else None

    @cached_property
    def _op_types(self) -> frozenset[str]:
        """The types of the model's operators."""
        return frozenset(node.op_type for node in read_model(self._model).graph.node)

    def _rewritten(self, model: bytes, folder: Path | None = None) -> OrtRunner:
        """Load a rewritten model; its weights are in the model's own folder, or in another."""
        options: dict[str, Any] = {"values": self._values, "threads": None, "timeout": _SECONDS, "once": True}
        plain = not any(map(_OF_INTEGERS.search, self._op_types))  # such as QLinearConv and DynamicQuantizeMatMul
        return OrtRunner(model, folder=folder or self._folder, plain=plain, **options)

    def spread(self, feeds: Mapping[str, Array], reference: Mapping[str, Array]) -> dict[str, Array]:
        """Return the distance that errors move each element of the reference; infinite if it becomes infinite or NaN.

        If its distance from float64 is finite, it moves at least that far. If it moves by more than `MOST_BUDGET` of
        the largest element, or an integer moves at all, errors decide it, and the distance is infinite as well. Errors
        move no model that ONNX Runtime refuses with them; `unmoved` then gives the reason.
        """
        moved = {name: _Moved(array) for name, array in reference.items()}
        try:
            if self._runner is None:
                self._runner = self._rewritten(with_errors(self._model, self._outputs))
            unsigned = {name: array + 0 if array.dtype.kind == "f" else array for name, array in feeds.items()}
            for own, shared in counted(_RUNS, "ONNX Runtime runs the model with rounding errors", "runs"):
                errors = {_OWN: np.array(own, np.float32), _SHARED: np.array(shared, np.float32)}
                for name, array in self._runner.run_any({**(unsigned if own else feeds), **errors}).items():
                    moved[name].add(_distance(array, reference[name]))
        except (RunError, EncodeError) as error:
            self.unmoved = str(error)
            moved = {name: _Moved(array) for name, array in reference.items()}
        for name, array in self.exact(feeds).items():
            distance = _distance(array, reference[name])
            moved[name].add(np.where(np.isfinite(distance), distance, 0.0))
        self.lone = {name: each.lone for name, each in moved.items()}
        return {name: each.spread for name, each in moved.items()}


class _Moved:
    """The largest distances of an output's elements from the reference, over several runs."""

    def __init__(self, reference: Array) -> None:
        finite = np.abs(reference[np.abs(reference) < INFINITE]) if reference.dtype.kind == "f" else np.zeros(0)
        self._largest = float(finite.max(initial=0.0))
        self._most, self._second = np.zeros(reference.shape), np.zeros(reference.shape)
        self._run = np.zeros(reference.shape, np.int8)  # the one that moves an element most
        self._runs = 0

    def add(self, distance: Array) -> None:
        """Take in a run."""
        self._second = np.maximum(self._second, np.minimum(self._most, distance))
        self._run[distance > self._most] = self._runs
        self._most = np.maximum(self._most, distance)
        self._runs += 1

    @property
    def spread(self) -> Array:
        """The error that a right net may have."""
        return np.where(self._most > MOST_BUDGET * self._largest, np.inf, _ROOM * self._most)

    @property
    def lone(self) -> int:
        """The number of elements that one run moves, and all others do not: a net may be another such run."""
        lone = self._most > _ROOM * self._second + DEFAULT.relative * self._largest
        return int(np.bincount(self._run[lone], minlength=1).max())


def _distance(a: Array, b: Array) -> Array:
    """Return the distance of numbers; infinite if one is infinite or NaN and the other is not the same."""
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
    """Return the largest distance of numbers that are finite, in units of the largest of `b`."""
    return (compare(a, b, _WHOLE).max_rel or 0.0) if a.shape == b.shape else 0.0


def choices(model: onnx.ModelProto) -> dict[str, Choice]:
    """Return the choices behind the model's outputs, by output; without those among its inputs, which are exact."""
    producers = _producers(model)
    found = {}
    for value in model.graph.output:
        name = _moved(value.name, producers)
        node = producers.get(name)
        if node is None or node.domain or node.op_type not in _INDICES:
            continue
        output, axis = _INDICES[node.op_type]
        if node.output[output] == name and node.input[0] in producers:
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), axis)
            found[value.name] = Choice(node.input[0], axis)
    return found


def scores(model: onnx.ModelProto) -> dict[str, set[str]]:
    """Return the floats that a model decides its outputs of integers by, with those that it only moves, by output.

    Example: the input of an ArgMax, and what a Reshape made that input of. Outputs without any are left out. Values of
    unknown types count as floats.
    """
    producers, types = _producers(model), element_types(model, inferred_values(model))
    found: dict[str, set[str]] = {}
    for value in model.graph.output:
        first = _moved(value.name, producers)
        names, seen = [] if types.get(first, TensorProto.FLOAT) in FLOATS else [first], {first}
        while names:
            name = names.pop()
            node = producers.get(name)
            if node is None:
                continue
            is_float = types.get(name, TensorProto.FLOAT) in FLOATS
            if is_float:
                found.setdefault(value.name, set()).add(name)
            if node.op_type not in _SIZES and (not is_float or node.op_type in _MOVES):
                read = node.input[:1] if is_float else node.input
                names += [each for each in read if each not in seen]
                seen.update(read)
    return found


def _producers(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    return {name: node for node in model.graph.node for name in node.output if name}


def _moved(name: str, producers: Mapping[str, onnx.NodeProto]) -> str:
    """Return the value whose numbers another one has, in the same order."""
    while name in producers and producers[name].op_type in _SAME_ORDER:
        name = producers[name].input[0]
    return name


def as_good(indices: Array, reference: Array, scores: Array, spread: Array, axis: int) -> Array:
    """Return where indices choose scores that are as good as the reference's, in the reference's shape.

    `spread` is how far each score moves with rounding errors. Indices that a row has twice are not as good, nor are
    others among zeros: these choices are meant, as those behind a ReLU.
    """
    axis %= scores.ndim
    shape = [*scores.shape]
    shape[axis] = -1
    known = (indices == np.rint(indices)) & (indices >= 0) & (indices < scores.shape[axis])
    mine, wanted = (np.where(known, each, 0).astype(np.int64).reshape(shape) for each in (indices, reference))
    chosen, best = (np.take_along_axis(scores, each, axis).astype(np.float64) for each in (mine, wanted))
    finite = np.abs(scores) < INFINITE
    error = DEFAULT.relative * np.abs(scores[finite]).max(initial=0.0)
    error = error + sum(np.take_along_axis(spread, each, axis) for each in (mine, wanted))
    once = (mine.swapaxes(axis, -1)[..., None] == mine.swapaxes(axis, -1)[..., None, :]).sum(-1) == 1
    with np.errstate(invalid="ignore"):
        near = np.abs(chosen - best) <= error
    result = near & once.swapaxes(axis, -1) & ((chosen != 0) | (best != 0))
    return np.asarray(result.reshape(reference.shape) & known)


def with_rounded_weights(model: Path | bytes, outputs: Collection[str], encoding: Encoding, folder: Path) -> bytes:
    """Return the model with its weights of two or more dims rounded as converters store them, in a file of a folder."""
    own = model.absolute().parent if isinstance(model, Path) else Path()
    proto = read_model(model, outputs)
    with (folder / _WEIGHTS).open("wb") as file:
        for tensor in proto.graph.initializer:
            if tensor.data_location == TensorProto.EXTERNAL:
                load_external_data_for_tensor(tensor, os.fspath(own))
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
    """Return each row as multiples of a 127th of its largest number, as ncnn's int8 layers have their weights."""
    rows = array.reshape(len(array), -1)
    steps = np.abs(rows).max(axis=1, keepdims=True, initial=0.0) / np.float32(127)
    whole = np.round(np.divide(rows, steps, out=np.zeros_like(rows), where=steps > 0))
    return np.asarray((whole * steps).reshape(array.shape), array.dtype)


def with_errors(model: Path | bytes, outputs: Collection[str] = ()) -> bytes:
    """Return the model with rounding errors, and two more inputs: the number of a run with own errors, and one for all.

    Every number that a node computes gets an error, except numbers that are only moved, and zeros. Raises EncodeError
    for a model that does not fit into a message.
    """
    proto = upgraded(read_model(model, outputs))
    types = element_types(proto, inferred_values(proto))
    opsets = {entry.domain: entry.version for entry in proto.opset_import}
    exact = {value.name for value in (*proto.graph.input, *proto.graph.initializer)}
    written = _ErrorWriter()
    whole = {value.name for value in proto.graph.initializer}  # constants, and floats that are whole numbers
    # Numbers computed of these alone: their names before the error. A quotient of integers is the same everywhere.
    plain: dict[str, str] = {}
    for node in proto.graph.node:
        traits = traits_of(node.domain, node.op_type, opsets.get(node.domain, 1))
        is_exact = traits.errors == "none" or node.op_type in ("Constant", "ConstantOfShape")
        to_float = node.op_type == "Cast" and types.get(node.output[0], TensorProto.FLOAT) in FLOATS
        level = next((entry.i for entry in node.attribute if entry.name == "accuracy_level"), INT8_ACCURACY)
        for index in _deciding(node, jumps=traits.jumps and not to_float and level == INT8_ACCURACY):
            name = node.input[index]
            node.input[index] = plain.get(name, name)
            if types.get(name) in _FLOATS and not (name in exact or name in whole or name in plain):
                node.input[index] = written.decided(name, types[name])
                if node.op_type == "Equal" and index == 1:
                    node.input[1] = written.near(node.input[1], node.input[0], types[name])
        if traits.errors in ("input", "gates") and types.get(node.input[0]) in _FLOATS:
            node.input[0] = written.inexact(node.input[0], types[node.input[0]], _CANCELLED)
        written.nodes.append(node)
        moved = [name for index, name in enumerate(node.input) if traits.moves_input(index)]
        is_whole = all(name in whole or types.get(name) in _INTEGERS for name in moved)
        if node.op_type in _WHOLE_RESULTS or (moved and is_whole):
            whole.update(node.output)
        if all(name in exact for name in node.input) and (traits.moves != () or is_exact):
            exact.update(node.output)
            continue
        if traits.moves != () or node.op_type in _WHOLE_RESULTS:
            continue
        for index, name in enumerate(node.output):
            if name and types.get(name) in _FLOATS:
                beside = {"one": node.input[0], "gates": ""}.get(traits.errors)
                node.output[index] = written.computed(name, types[name], beside)
                if traits.axes == "each" and whole.issuperset(node.input):
                    plain[name] = node.output[index]
    del proto.graph.node[:]
    proto.graph.node.extend(written.nodes)
    proto.graph.initializer.extend(written.constants.values())
    proto.graph.input.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, []) for name in (_OWN, _SHARED))
    del proto.graph.value_info[:]
    return bytes(proto.SerializeToString())


def _deciding(node: onnx.NodeProto, *, jumps: bool) -> Iterable[int]:
    """Yield the inputs of a node whose last bit may decide its result."""
    if node.op_type == "GridSample":
        mode = next((attribute.s for attribute in node.attribute if attribute.name == "mode"), b"")
        return (1,) if mode == b"nearest" else ()
    return range(len(node.input)) if jumps else ()


class _ErrorWriter(NodeWriter):
    """The nodes of a model with errors."""

    def number(self, value: float, dtype: int = TensorProto.INT64) -> str:
        return self.constant(np.array(value, helper.tensor_dtype_to_np_dtype(dtype)))

    def errors(self, name: str, dtype: int) -> str:
        """Add numbers from -1 to 1, one for each number of a tensor.

        Their signs are those of sin(a * i * i + b) at index i, with each run's own a: opset 22 has no random numbers.
        ONNX Runtime takes five times as long for a sine as for the part of a turn, which has the same sign.
        """
        count = self.node("Cast", self.node("Size", name), to=TensorProto.DOUBLE)
        zero, one, phase = (self.number(each, TensorProto.DOUBLE) for each in (0.0, 1.0, _PHASE))
        indexes = self.node("Range", zero, count, one)
        speed = self.node("Mul", self.node("Cast", _OWN, to=TensorProto.DOUBLE), phase)
        turned = self.node("Mul", self.node("Mul", indexes, indexes), speed)
        shifted = self.node("Add", turned, self.number(len(self.nodes) / math.tau, TensorProto.DOUBLE))
        part = self.node("Cast", self.node("Sub", shifted, self.node("Floor", shifted)), to=dtype)
        sines = self.node("Sign", self.node("Sub", self.number(0.5, dtype), part))
        signs = self.node("Reshape", sines, self.node("Shape", name))
        scales = [self.node("Cast", scale, to=dtype) for scale in (self.node("Sign", _OWN), _SHARED)]
        return self.node("Add", self.node("Mul", signs, scales[0]), scales[1])

    def computed(self, name: str, dtype: int, beside: str | None = None) -> str:
        """Insert an error after a node, and return its new output name.

        With `beside` there is also one relative to 1 and that number; "" is the output itself.
        """
        inner = f"onnx2ncnn_opt.inner.{name}"
        inexact = self.inexact(inner, dtype)
        if beside is not None:
            size = self.node("Add", self.node("Abs", beside or inner), self.number(1, dtype))
            error = self.node("Mul", self.errors(inner, dtype), self.number(_BESIDE_ONE, dtype))
            inexact = self.node("Add", inexact, self.node("Mul", size, error))
        self.nodes.append(helper.make_node("Identity", [inexact], [name]))
        return inner

    def inexact(self, name: str, dtype: int, each: float = _EACH) -> str:
        """Add a relative error to each number of a tensor, or flush subnormal ones to 0; zeros stay."""
        errors = self.errors(name, dtype)
        relative = self.node("Mul", errors, self.number(each, dtype))
        scaled = self.node("Mul", name, self.node("Add", relative, self.number(1, dtype)))
        least = self.node("Mul", errors, self.number(float(_FLOAT32.tiny), dtype))
        return self.node("Add", scaled, self.node("Mul", least, self.node("Abs", self.node("Sign", name))))

    def decided(self, name: str, dtype: int) -> str:
        """Perturb the input of a comparison or rounding; zeros stay exact, because models mostly mean them."""
        error = self.node("Mul", self.errors(name, dtype), self.deciding(name, dtype))
        return self.node("Add", name, self.node("Mul", error, self.node("Abs", self.node("Sign", name))))

    def deciding(self, name: str, dtype: int) -> str:
        """Add the error of a tensor that decides something."""
        size = self.node("Abs", name)
        finite = self.node("Less", size, self.number(INFINITE, dtype))
        largest = self.node("ReduceMax", self.node("Where", finite, size, self.number(0, dtype)), keepdims=0)
        return self.node("Mul", largest, self.number(_DECIDING, dtype))

    def near(self, name: str, other: str, dtype: int) -> str:
        """Add a tensor that, in the run with one error for all, is equal to another where it is nearly so."""
        bound = self.node("Mul", self.deciding(name, dtype), self.node("Cast", _SHARED, to=dtype))
        is_near = self.node("Less", self.node("Abs", self.node("Sub", name, other)), bound)
        return self.node("Where", is_near, other, name)
