"""The outputs of a net against those of its model: how they are paired, and the error that each may have."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

import numpy as np

from onnx2ncnn_opt.errors import RunError, UsageError
from onnx2ncnn_opt.manifest import Entry, Manifest
from onnx2ncnn_opt.outputs import OutputReport, Status
from onnx2ncnn_opt.runtime.base import Array, Failure, Fetch
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner
from onnx2ncnn_opt.runtime.slots import Slot, alike, check_fed, model_feeds
from onnx2ncnn_opt.verification.blobs import in_axes_of
from onnx2ncnn_opt.verification.driver import failed, is_wrong, missing
from onnx2ncnn_opt.verification.rounding import Rounding
from onnx2ncnn_opt.verification.rounding_budget import (
    BITS_MARGIN,
    LEAST_BUDGET,
    float32_budget,
    holds_integers,
    weights_encoding,
)
from onnx2ncnn_opt.verification.tolerance import DEFAULT, MOST_BUDGET, SLICE, Tolerance, compare

_NUMBERED = re.compile(r"(?:in|out)(\d+)")
_FEW = 1000
_GIVE = "give inputs that suit the model with --inputs or --value"
UNPROVEN = f"there is no number in it on either side, which proves nothing; {_GIVE}"


@dataclass(frozen=True)
class OutputComparison:
    """A net and the reference that it has to agree with."""

    runner: NcnnRunner
    feeds: Mapping[str, Array]
    reference: Mapping[str, Array]
    manifest: Manifest | None
    tolerance: Tolerance
    rounding: Rounding
    is_fixed: bool = False  # the tolerance is the user's
    least: float = LEAST_BUDGET  # that needs no run in float64
    behind: Callable[[Mapping[str, Array]], list[OutputReport]] | None = None  # judges the tail on the net's outputs
    few: float = 0.0  # the error that one of `_FEW` elements may have: a step of quantisation, and others that follow
    is_close: bool = False  # the runner has ncnn's plain kernels, which make rounding errors only: `budget` holds

    @cached_property
    def budget(self) -> Mapping[str, float]:
        """The error that each output may have in float32; the model runs in float64 for it."""
        measured = self.rounding.measured(self.feeds, self.reference)
        return {name: float32_budget(measured.get(name), self.least) for name in self.reference}

    def allowed(self, name: str, *, close: bool) -> float:
        """Return the error allowed for an output, in units of its largest value; `close` with ncnn's plain kernels."""
        if self.is_fixed:
            return self.tolerance.relative
        usual = self.budget[name] if close else max(self.tolerance.relative, min(self.budget[name], MOST_BUDGET))
        return max(usual, BITS_MARGIN * self.by_weights.get(name, 0.0))

    def leaves_budget(self, outputs: Sequence[OutputReport]) -> bool:
        """Return True if outputs are right, but less accurate than rounding alone would leave them."""
        if is_wrong(outputs):
            return False
        # A tail's outputs have none: the budget is for the numbers at the cut.
        errors = {output.name: output.max_rel or 0.0 for output in outputs if output.name in self.reference}
        return any(error > self.least and error > self.budget[name] for name, error in errors.items())

    @cached_property
    def spread(self) -> Mapping[str, Array]:
        """The distance that rounding errors move each element of the reference; computed only if a net differs."""
        return self.rounding.spread(self.feeds, self.reference)

    def spread_with_lone(self, name: str, actual: Array, reference: Array) -> Array:
        """Return the spread; without bounds for as many elements as one run may move alone, those that differ most.

        Of the others `few` differ more than the runs show: each run rounds some numbers to another step than a net.
        """
        spread, count = self.spread[name], self.rounding.lone.get(name, 0)
        with np.errstate(invalid="ignore"):
            excess = np.abs(actual.astype(np.float64) - reference) - spread
        excess = np.nan_to_num(excess, nan=0.0, posinf=0.0, neginf=0.0)
        order = np.argsort(excess, axis=None)[::-1]
        spread, most = spread.copy(), order[: 2 * count]
        spread.reshape(-1)[most[excess.reshape(-1)[most] > 0]] = np.inf
        rest = order[2 * count :][: excess.size // _FEW + (excess.size >= SLICE)]
        bound = self.few * float(np.abs(reference[np.isfinite(reference)]).max(initial=0.0))
        spread.reshape(-1)[rest] = np.maximum(spread.reshape(-1)[rest], bound)
        return spread

    @cached_property
    def by_weights(self) -> Mapping[str, float]:
        """The distance that the reference moves if weights are rounded as the net's are."""
        encoding = weights_encoding(self.runner.param, self.runner.bin)
        return {} if encoding is None else self.rounding.stored(encoding, self.feeds, self.reference)

    def best(self) -> tuple[Sequence[Slot], Sequence[OutputReport]]:
        """Return the likeliest way to feed the net that works best, and its reports."""
        try:
            ways, blobs = input_slots(self.manifest, self.feeds, self.runner.input_names()), self.runner.output_names()
        except RunError as error:
            return (), failed(self.reference, error)
        best: tuple[Sequence[Slot], Sequence[OutputReport]] = (), []
        for way in ways:
            try:
                outputs: Sequence[OutputReport] = self.attempt(way, blobs)
            except (RunError, UsageError) as error:  # UsageError: an array that no Mat can hold
                outputs = failed(self.reference, error)
            if not best[1] or _severity(outputs) < _severity(best[1]):
                best = way, outputs
            if all(output.status == "ok" for output in best[1]):
                break
        return best

    def attempt(self, way: Sequence[Slot], blobs: Sequence[str]) -> list[OutputReport]:
        """Feed the net in this way, and judge its outputs; `blobs` are their names in the net."""
        arrays = model_feeds(way, self.feeds)
        if self.manifest is not None:
            slots = manifest_slots("output", list(self.reference), self.manifest.read)
            results = self.runner.extract(arrays, [slot.fetch for slot in slots])
            judged = [self.judge(slot, results[slot.blob]) for slot in slots]
            if self.behind is None or is_wrong(judged):
                return judged
            return judged + self.behind(self._values(slots, results))
        # A name of the model's that is not an output of the net may still be a blob inside it. They are read first:
        # once a consumer has run, a blob is gone.
        inner = [name for name in self.reference if name not in blobs] if len(blobs) < len(self.reference) else []
        results = self.runner.extract(arrays, [Fetch(blob, 0) for blob in (*inner, *blobs)])
        found = [*(blob for blob in inner if not isinstance(results[blob], Failure)), *blobs]
        pairs = pair(list(self.reference), found, lambda name, blob: _alike(results[blob], self.reference[name]))
        nothing = f"the net has no blob for it; its outputs are {', '.join(blobs)}"
        reports = {name: OutputReport(name, None, "missing", nothing) for name in self.reference}
        for name, blob in pairs.items():
            reports[name] = self.judge(Slot(name, blob, 0), results[blob])
        return list(reports.values())

    def with_scores(self, way: Sequence[Slot], outputs: Sequence[OutputReport]) -> Sequence[OutputReport]:
        """Return the reports; integers are wrong if the net decides them by wrong floats, where it has blobs of these.

        A fault that changes scores may change no index on these inputs.
        """
        if is_wrong(outputs) or not any(map(_is_whole, self.reference.values())):
            return outputs
        scores = self.rounding.scores
        if not scores.keys() & self.reference.keys():
            return outputs
        try:
            values = self.rounding.on_scores.run_any(self.feeds)
        except RunError:
            return outputs
        # The numbers that other converters call blobs by are not those of the model.
        names = [Fetch(name, 0) for name in values if self.manifest or not name.isdigit()]
        results = self.runner.extract(model_feeds(way, self.feeds), names)
        inner, wrong = replace(self, reference=values, manifest=None, rounding=self.rounding.of_scores), {}
        for name, result in results.items():
            if not isinstance(result, Failure) and result.size == values[name].size:
                report = inner.judge(Slot(name, name, 0), in_axes_of(values[name], result))
                if is_wrong([report]):
                    wrong[name] = f"'{name}', which decides it, is {report.message}"
        return [
            replace(row, status="mismatch", message=wrong[min(names)]) if names else row
            for row in outputs
            for names in [scores.get(row.name, set()) & wrong.keys()]
        ]

    def _values(self, slots: Sequence[Slot], results: Mapping[str, Array | Failure]) -> dict[str, Array]:
        """Return right results in the types of the model."""
        values = {}
        for slot in slots:
            result, reference = results[slot.blob], self.reference[slot.name]
            array = None if isinstance(result, Failure) else slot.restored(result, reference.shape)
            assert array is not None
            values[slot.name] = (np.rint(array) if reference.dtype.kind in "iu" else array).astype(reference.dtype)
        return values

    def judge(self, slot: Slot, result: Array | Failure) -> OutputReport:
        """Return the report of one output."""
        reference = self.reference[slot.name]
        if isinstance(result, Failure):
            return missing(slot.name, slot.blob, result)
        if self.manifest is not None:
            array = slot.restored(result, reference.shape)
        else:
            array = result.reshape(reference.shape) if _alike(result, reference) else None
        if array is None:
            message = f"its shape is {list(result.shape)}, the model's {list(reference.shape)}"
            return OutputReport(slot.name, slot.blob, "shape", message)
        # A manifest says what the elements are, and is not to be helped where it is wrong.
        result = array.astype(np.float64) if self.manifest and reference.dtype.kind in "iub" else array
        allowed = self.tolerance
        if self.is_close:
            allowed = replace(allowed, relative=self.budget[slot.name], slices=False)
            if slot.name in self.rounding.exact(self.feeds):  # it is known what is left of terms that cancel
                allowed = replace(allowed, absolute=float(np.finfo(np.float32).tiny))
        difference, spread = compare(result, reference, allowed), None
        is_literal = self.is_fixed and self.tolerance.relative < DEFAULT.relative  # rounding is no excuse then
        if not difference.ok and not is_literal:
            reference = self.rounding.resolved(slot.name, self.feeds, reference, result)
            if not self.is_fixed:
                slices = allowed.slices and not self.by_weights
                allowed = replace(allowed, relative=self.allowed(slot.name, close=self.is_close), slices=slices)
            difference = compare(result, reference, allowed)
        # A budget above this is that of decisions: only the spread shows which elements they are.
        if (not difference.ok or (difference.max_rel or 0.0) > MOST_BUDGET) and not is_literal:
            reference = self.rounding.chosen(slot.name, self.feeds, reference, result)
            spread = self.spread_with_lone(slot.name, result, reference)
            difference = compare(result, reference, allowed, spread)
        report = difference.report(slot.name, slot.blob)
        if report.status == "mismatch" and not self.is_fixed and self._is_as_good(slot.name, result):
            return replace(report, status="ok", message="")
        if difference.ok and reference.size and difference.max_abs is None:
            return replace(report, status="unproven", message=UNPROVEN)
        moved = 0 if spread is None else int((np.isinf(spread) & (result != reference)).sum())
        if difference.ok and moved > result.size / 2:
            message = f"rounding errors decide {moved} of {result.size} elements; {_GIVE}"
            return replace(report, status="unproven", message=message)
        return report

    def _is_as_good(self, name: str, result: Array) -> bool:
        is_int8 = holds_integers(self.runner.param, self.runner.bin)
        reference = self.reference[name]
        return self.rounding.is_as_good(name, self.feeds, reference, result, is_int8=is_int8)


def manifest_slots(kind: str, names: Sequence[str], entries: Sequence[Entry]) -> list[Slot]:
    """Return the manifest's inputs or outputs (`kind`) in the model's order; UsageError if it is another model's."""
    known = {entry.name: Slot.of(entry) for entry in entries}
    if set(known) != set(names):
        raise UsageError(
            f"the manifest is that of another model: its {kind}s are {', '.join(known) or 'none'}, "
            f"those of the model {', '.join(names) or 'none'}"
        )
    return [known[name] for name in names]


def input_slots(manifest: Manifest | None, feeds: Mapping[str, Array], blobs: Sequence[str]) -> list[list[Slot]]:
    """Return the ways to feed the arrays to the net with these input blobs, the likeliest first.

    A manifest leaves one, in which empty caches stay unset. Without it blobs are matched by `pair`, and the batch is
    tried in three ways: its axis is 1 and dropped in most nets, kept in a few, and in new ones the Mat's batch.

    Raises UsageError if the manifest is that of another model, and VerificationError if a blob of the net would be left
    without a value, on which ncnn crashes.
    """
    if manifest is not None:
        others = {entry.name for entry in manifest.model_inputs} - {entry.name for entry in manifest.inputs}
        counted = [entry.name for entry in manifest.inputs if entry.length]
        slots = manifest_slots("input", [*(name for name in feeds if name not in others), *counted], manifest.inputs)
        unset = [blob for blob, _ in manifest.caches]
        fed = [slot for slot in slots if slot.blob in blobs and (slot.blob not in unset or feeds[slot.name].size)]
        ways = [fed]
    else:
        pairs = pair(list(feeds), blobs, lambda name, blob: True)
        rules: tuple[Callable[[Array], bool], ...] = (
            lambda array: array.ndim > 4 or (array.ndim > 1 and array.shape[0] == 1),
            lambda array: array.ndim > 4,
            lambda array: array.ndim > 1,
        )
        ways = [
            [Slot(name, blob, 0 if is_batched(feeds[name]) else None) for name, blob in pairs.items()]
            for is_batched in rules
        ]
        ways = [way for number, way in enumerate(ways) if way not in ways[:number]]
        unset = []
    check_fed([*unset, *(slot.blob for slot in ways[0])], blobs, list(feeds))
    return ways


def pair(names: Sequence[str], blobs: Sequence[str], fits: Callable[[str, str], bool]) -> dict[str, str]:
    """Return a blob for every name, while there are enough of them.

    1. Equal names belong together.
    2. The others by number, if the blobs are in0, in1, ... or out0, out1, ... .
    3. The others in order, if they fit so; else as they fit, if there is just one way; else in order all the same.
    """
    pairs = {name: name for name in names if name in blobs}
    left, free = [name for name in names if name not in pairs], [blob for blob in blobs if blob not in pairs]
    numbers = {int(match[1]): blob for blob in free if (match := _NUMBERED.fullmatch(blob))}
    if len(numbers) == len(free):
        return pairs | {name: numbers[i] for i, name in enumerate(names) if name in left and i in numbers}
    in_order = dict(zip(left, free, strict=False))
    choices = {name: [blob for blob in free if fits(name, blob)] for name in left}
    only = {name: found[0] for name, found in choices.items() if len(found) == 1}
    if not all(fits(*both) for both in in_order.items()) and len(set(only.values())) == len(left):
        return pairs | only
    return pairs | in_order


def _is_whole(array: Array) -> bool:
    return array.size > 0 and (array.dtype.kind in "biu" or bool((array == np.rint(array)).all()))


def _alike(result: Array | Failure, reference: Array) -> bool:
    return not isinstance(result, Failure) and alike(result.shape, reference.shape)


def _severity(outputs: Sequence[OutputReport]) -> list[int]:
    """Return the severities of all outputs, the worst first, to compare two attempts."""
    return sorted((get_args(Status).index(output.status) for output in outputs), reverse=True)
