"""The effect of rounding errors on a model's results.

Two right implementations add up sums in different orders. Their numbers differ in the last bits, and zeros in the sign.
The last bit may decide the result if a model compares numbers, rounds to integers, searches the largest, or subtracts
equal numbers. A wider tolerance would hide faults there. So ONNX Runtime runs the model with inserted errors.

The model with rounded weights gives the errors from weights in 16 bits.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from google.protobuf.message import EncodeError  # type: ignore[import-untyped]
from onnx.shape_inference import InferenceError

from onnx2ncnn_opt.errors import RunError
from onnx2ncnn_opt.ir.weight import Encoding
from onnx2ncnn_opt.onnx.edit.model import read_model
from onnx2ncnn_opt.onnx.edit.quantized import float_model, scales_of_products
from onnx2ncnn_opt.onnx.edit.widened import computes_in_float16, wide_model
from onnx2ncnn_opt.onnx.ops import traits_of
from onnx2ncnn_opt.onnx.read.load import LoadedModel, load_model
from onnx2ncnn_opt.onnx.read.structure import names_of
from onnx2ncnn_opt.onnx.registry import INT8_ACCURACY
from onnx2ncnn_opt.progress import counted
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.system import temporary_folder
from onnx2ncnn_opt.verdict.deciding import scores
from onnx2ncnn_opt.verdict.errors import DEFAULT, INFINITE, LAST_BIT, Tolerance, compare, with_rounding
from onnx2ncnn_opt.verdict.perturbed_model import ERRORS, error_runs, with_errors, with_rounded_weights
from onnx2ncnn_opt.verdict.rules import MOST_ROUNDING, UNKNOWN_ROUNDING
from onnx2ncnn_opt.verification.inner_values import model_values
from onnx2ncnn_opt.verification.net_facts import NetFacts

T = TypeVar("T")

SAFETY = 4.0
# Errors of few numbers may be small by chance: outputs of so few get several ways to round weights.
_FEW_NUMBERS, _FACTORS = 2**8, (1.0, 1.1, 1.2, 1.3)
_TIMEOUT = 120.0  # seconds for a run

_INTEGER_OPS = re.compile("Integer|^Q[A-Z]|DynamicQuantize")
# ONNX defines what these make of NaN, so models use them as guards.
_NAN_RULES = frozenset(("Gather", "GatherElements", "GatherND", "IsNaN", "Shape", "Size", "Slice", "Split", "Where"))
_ANY = Tolerance(slices=False)  # for errors only
# The dB that a net with int8 layers may lose against the quantised model, because outputs have few numbers. Coarser
# steps add to the loss: one-sided numbers lose up to one of the 8 bits, 6 dB.
LOSS = 1.0


def quantised_step(model: LoadedModel, net: NetFacts) -> float:
    """Return the error that the model's own quantisation, or float16, explains in a net; 0 without these.

    It is a step of the coarsest quantisation, because the last bit of a sum decides whether a number halfway between
    two steps is rounded up or down. Nets without quantisation at run time, or with weights of 16 bits, have other steps
    everywhere (`tolerance_within`); int8 layers have no -128, and scales of their own.
    """
    if not (bits := _quantised_bits(model)):
        return LAST_BIT["float16"] if computes_in_float16(model.graph) else 0.0
    is_at_run_time = any(node.op_type.startswith("DynamicQuantize") for node in model.graph)
    if net.has_integers or net.weights is not None or is_at_run_time:
        return (2.0 if net.has_integers else 1.0) * tolerance_within(model).relative
    return max(DEFAULT.relative, *(1.0 / (2.0**count - 1.0) for count in bits))


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


class Growing(Generic[T]):
    """Results that grow with each run more, made when one is asked for; the last is kept, and each reader's first."""

    def __init__(self, further: Iterator[T]) -> None:
        self._further, self._known = further, list[T]()

    def __iter__(self) -> Iterator[T]:
        yield from self._known
        for result in self._further:
            self._known[:] = [result]
            yield result


class Rounding:
    """The rounding errors of a model, computed on first use; the arguments are the same as for `OrtRunner`."""

    def __init__(self, model: Path | bytes, outputs: Collection[str], values: Mapping[str, Array]) -> None:
        self._model, self._outputs, self._values = model, outputs, values
        self.unmoved = ""  # the error of `spreads`, if any
        self._last: tuple[Mapping[str, Array], Growing[dict[str, Array]]] | None = None  # the last inputs' spreads

    def without_quantisation(
        self, name: str, feeds: Mapping[str, Array], *, is_int8: bool
    ) -> tuple[Array, float] | None:
        """Return an output of the model without quantisation, and how many times the model's noise a net may have.

        Outputs have few numbers, so the noise may be larger by chance (LOSS). The steps of int8 layers are coarser.
        """
        if self._floats is None:
            return None
        runner, coarser = self._floats
        try:
            floats = runner.run_any(feeds)[name]
        except RunError:
            return None
        return floats, (coarser**2 if is_int8 else 1.0) * 10 ** (LOSS / 10)

    @cached_property
    def _floats(self) -> tuple[OrtRunner, float] | None:
        """The model without quantisation, and the factor between the steps of int8 layers and the model's."""
        loaded = load_model(self._model, values=self._values, outputs=tuple(self._outputs))
        try:
            if computes_in_float16(loaded.graph):
                return self._rewritten(wide_model(loaded.graph)), 1.0
            data = float_model(loaded.graph)
            coarser = max((1.0, *(scales.coarser for scales in scales_of_products(loaded.graph).values())))
            return None if data is None else (self._rewritten(data), coarser)
        except (RunError, EncodeError):
            return None

    @cached_property
    def _perturbed(self) -> OrtRunner:
        """The model with rounding errors."""
        return self._rewritten(with_errors(self._model, self._outputs))

    @cached_property
    def runner(self) -> OrtRunner:
        """The model itself; RunError if ONNX Runtime refuses it."""
        return OrtRunner(self._model, outputs=self._outputs, values=self._values, threads=None)

    @cached_property
    def scores(self) -> Mapping[str, Collection[str]]:
        """The floats that decide each integer output, see `scores`; empty if ONNX cannot infer the types."""
        try:
            return scores(read_model(self._model, self._outputs, typed=True).graph)
        except (EncodeError, InferenceError):
            return {}

    @cached_property
    def of_scores(self) -> "Rounding":
        """The rounding errors of the model cut at the scores of integer outputs."""
        return Rounding(self._model, sorted(set().union(*self.scores.values())), self._values)

    def stored(
        self, encoding: Encoding, feeds: Mapping[str, Array], reference: Mapping[str, Array]
    ) -> Iterator[dict[str, float]]:
        """Yield the errors of outputs, relative to the largest value, if the weights are rounded to an encoding.

        For outputs of few numbers, the largest errors of several ways to round follow.
        """
        has_few = min(array.size for array in reference.values()) <= _FEW_NUMBERS
        errors = dict.fromkeys(reference, 0.0)
        for factor in _FACTORS if has_few and encoding is not Encoding.INT8 else _FACTORS[:1]:
            try:
                with temporary_folder() as folder:
                    model = with_rounded_weights(self._model, self._outputs, encoding, Path(folder), factor)
                    with closing(self._rewritten(model, Path(folder))) as runner:
                        results = runner.run_any(feeds)
            except (RunError, EncodeError):
                return
            for name, array in results.items():
                if array.shape == reference[name].shape:
                    errors[name] = max(errors[name], compare(array, reference[name], _ANY).max_rel or 0.0)
            yield errors

    def hidden_nan(self, feeds: Mapping[str, Array]) -> str:
        """Return the first node that makes NaN, if a later one, such as ArgMax, makes numbers of it; else ""."""
        try:
            values = model_values(self._model, feeds, self._values, _TIMEOUT)
        except RunError:
            return ""
        nan = {name for name, array in values.items() if array.dtype.kind == "f" and np.isnan(array).any()}
        nodes = read_model(self._model).graph
        ends = [(n, not nan.isdisjoint(names_of(n.inputs)), not nan.isdisjoint(names_of(n.outputs))) for n in nodes]
        makers = [f"{node.op_type} '{node.name}'" for node, takes, makes in ends if makes and not takes]
        is_hidden = any(takes and not makes and node.op_type not in _NAN_RULES for node, takes, makes in ends)
        return makers[0] if makers and is_hidden else ""

    @property
    def _folder(self) -> Path | None:
        """The folder of external weights."""
        return self._model.absolute().parent if isinstance(self._model, Path) else None

    @cached_property
    def _has_integers(self) -> bool:
        """True if the model has operators such as QLinearConv and DynamicQuantizeMatMul."""
        return any(_INTEGER_OPS.search(node.op_type) for node in read_model(self._model).graph)

    def _rewritten(self, model: bytes, folder: Path | None = None) -> OrtRunner:
        """Load a rewritten model; its external weights are in `folder`, or in the model's own."""
        options: dict[str, Any] = {"values": self._values, "threads": None, "timeout": _TIMEOUT, "once": True}
        return OrtRunner(model, folder=folder or self._folder, plain=not self._has_integers, **options)

    def spread(self, feeds: Mapping[str, Array], reference: Mapping[str, Array]) -> dict[str, Array]:
        """Return the effect of errors on each element of the reference, in all runs."""
        *_, spread = self.spreads(feeds, reference)
        return spread

    def spreads(self, feeds: Mapping[str, Array], reference: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
        """Return the effect of errors on each element of the reference, after each run more; the last ones are kept."""
        if self._last is None or self._last[0] is not feeds:
            self._last = feeds, Growing(self._spreads(feeds, reference))
        return iter(self._last[1])

    def _spreads(self, feeds: Mapping[str, Array], reference: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
        """Yield the effect of errors, which grows from run to run; infinite if an element becomes infinite or NaN.

        The effect is infinite for elements that errors decide: integers that change, and floats that move by more than
        `MOST_ROUNDING` of the largest element. It is `UNKNOWN_ROUNDING` or more for models with branches or loops, and
        if ONNX Runtime refuses the model with errors; `unmoved` gives the reason.
        """
        sizes = {name: max(UNKNOWN_ROUNDING * _largest_finite(x), DEFAULT.absolute) for name, x in reference.items()}
        unknown = {name: np.full(array.shape, sizes[name] / SAFETY) for name, array in reference.items()}
        has_branches = next(iter(read_model(self._model).graph.subgraphs()), None) is not None
        largest = {name: has_branches * array for name, array in unknown.items()}
        decisive = {name: MOST_ROUNDING * _largest_finite(array) for name, array in reference.items()}

        def effect(moves: Mapping[str, Array]) -> dict[str, Array]:
            return {name: np.where(moved > decisive[name], np.inf, SAFETY * moved) for name, moved in moves.items()}

        try:
            unsigned = {name: array + 0 if array.dtype.kind == "f" else array for name, array in feeds.items()}
            for errors in counted(error_runs(), "ONNX Runtime runs the model with rounding errors", "runs"):
                inputs = unsigned if errors.any() else feeds
                for name, array in self._perturbed.run_any({**inputs, ERRORS: errors}).items():
                    largest[name] = np.maximum(largest[name], _distance(array, reference[name]))
                yield effect(largest)
        except (RunError, EncodeError, InferenceError) as error:
            self.unmoved = str(error)
            yield effect(unknown)


def _largest_finite(array: Array) -> float:
    """Return the largest finite number of an array of floats; 0 for other arrays."""
    if array.dtype.kind != "f":
        return 0.0
    return float(np.abs(array).max(initial=0.0, where=np.abs(array) < INFINITE))


def _distance(a: Array, b: Array) -> Array:
    """Return the distance of numbers; infinite if one is infinite or NaN and the other is different."""
    if a.shape != b.shape:
        return np.full(b.shape, np.inf)
    a, b = a.astype(np.float64), b.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    finite = (np.abs(a) < INFINITE) & (np.abs(b) < INFINITE)
    difference = np.abs(np.where(finite, a, 0.0) - np.where(finite, b, 0.0))
    return np.where(same, 0.0, np.where(finite, difference, np.inf))
