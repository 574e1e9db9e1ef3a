"""Comparison of a net's outputs with its model's: pairing, and the allowed error of each output."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, get_args

import numpy as np

from onnx2ncnn_opt.errors import RunError, UsageError
from onnx2ncnn_opt.manifest import Entry, Manifest
from onnx2ncnn_opt.outputs import OutputReport, Status
from onnx2ncnn_opt.runtime.base import Array, Failure, Fetch
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner
from onnx2ncnn_opt.runtime.slots import Slot, alike, check_fed, model_feeds
from onnx2ncnn_opt.verdict.blobs import in_axes_of
from onnx2ncnn_opt.verdict.errors import Tolerance
from onnx2ncnn_opt.verdict.ordered_model import BEST, FOUND
from onnx2ncnn_opt.verdict.rules import LEAST_ROUNDING, Case, judge
from onnx2ncnn_opt.verification.model_accuracy import Growing, Rounding
from onnx2ncnn_opt.verification.net_facts import NetFacts
from onnx2ncnn_opt.verification.order import NetOrder, explained
from onnx2ncnn_opt.verification.report import failed, is_wrong, merged, missing

_NUMBERED = re.compile(r"(?:in|out)(\d+)")


@dataclass(frozen=True)
class OutputComparison:
    """A net and its reference."""

    runner: NcnnRunner
    feeds: Mapping[str, Array]
    reference: Mapping[str, Array]
    manifest: Manifest | None
    net: NetFacts
    rounding: Rounding
    limit: Tolerance | None = None  # of 16 bits, or of the user
    least: float = LEAST_ROUNDING  # smaller errors need no further runs of the model
    step: float = 0.0  # the error that the model's quantisation explains
    is_plain: bool = False  # the runner uses ncnn's plain kernels
    order: NetOrder | None = None  # of a net that sorts

    @cached_property
    def weight_errors(self) -> Iterable[Mapping[str, float]]:
        """The errors of the model's outputs if its weights are rounded like the net's."""
        encoding = self.net.weights
        return () if encoding is None else Growing(self.rounding.stored(encoding, self.feeds, self.reference))

    def best(self) -> Attempt:
        """Feed the net in all likely ways; return the best attempt."""
        try:
            ways, blobs = input_slots(self.manifest, self.feeds, self.runner.input_names()), self.runner.output_names()
        except RunError as error:
            return Attempt(failed(self.reference, error), self)
        attempts: list[Attempt] = []
        for way in ways:
            try:
                attempts.append(self.attempt(way, blobs))
            except (RunError, UsageError) as error:  # UsageError: an array that no Mat can hold
                attempts.append(Attempt(failed(self.reference, error), self, way))
            if all(row.status == "ok" for row in attempts[-1].rows):
                break
        return min(attempts, key=lambda attempt: _severity(attempt.rows))

    def attempt(self, way: Sequence[Slot], blobs: Sequence[str]) -> Attempt:
        """Feed the net in this way, and judge its outputs; `blobs` are their names in the net."""
        found = read_outputs(self.runner, way, self.feeds, self.reference, self.manifest, blobs)
        judged, orders = self._in_order(found.sorts)
        missing_blob = f"the net has no blob for it; its outputs are {', '.join(blobs)}"
        by_name = {name: OutputReport(name, None, "missing", missing_blob) for name in self.reference}
        by_name |= {slot.name: judged.judge(slot, result) for slot, result in found.outputs}
        rows = [
            row if row.status == "unproven" else replace(merged([row, *orders]), name=row.name, blob=row.blob)
            for row in by_name.values()
        ]
        return Attempt(rows, judged, way, found)

    def _in_order(self, rows: Mapping[str, Array | Failure]) -> tuple[OutputComparison, list[OutputReport]]:
        """Return the comparison with the model in the net's order, and reports on the order of each sort's rows.

        The order is right if the model's scores in this order are those that the model finds itself, within rounding.
        """
        if self.order is None:
            return self, []
        arrays = {sort: array for sort, array in rows.items() if not isinstance(array, Failure)}
        if len(arrays) < len(rows):
            return self, [missing(sort, "", array) for sort, array in rows.items() if isinstance(array, Failure)]
        feeds, whole = self.order.run(self.feeds, arrays)
        judged = replace(self, feeds=feeds, reference=whole, rounding=self.order.rounding, order=None)
        scores = {sort: judged.judge(Slot(BEST + sort, sort, 0), whole[FOUND + sort]) for sort in rows}
        return judged, [explained(report, sort, arrays[sort], whole) for sort, report in scores.items()]

    def with_scores(self, way: Sequence[Slot], outputs: Sequence[OutputReport]) -> Sequence[OutputReport]:
        """Mark integer outputs as wrong if the floats that decide them are wrong, and the net has blobs for the floats.

        For example wrong scores may leave the index of the largest unchanged on these inputs.
        """
        if is_wrong(outputs) or not any(map(_is_whole, self.reference.values())):
            return outputs
        scores = self.rounding.scores
        if not scores.keys() & self.reference.keys():
            return outputs
        try:
            values = self.rounding.of_scores.runner.run_any(self.feeds)
        except RunError:
            return outputs
        # Other converters number their blobs, so a name such as "12" is another value.
        fetches = [Fetch(name, 0) for name in values if self.manifest or not name.isdigit()]
        results = self.runner.extract(model_feeds(way, self.feeds), fetches)
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

    def values(self, results: Sequence[tuple[Slot, Array | Failure]]) -> dict[str, Array]:
        """Return right results in the model's types, with the model's NaN, which is not compared."""
        values = {}
        for slot, result in results:
            reference, array = self.reference[slot.name], self._restored(slot, result)
            assert array is not None
            array = np.where(np.isnan(reference), reference, array)
            values[slot.name] = (np.rint(array) if reference.dtype.kind in "iu" else array).astype(reference.dtype)
        return values

    def _restored(self, slot: Slot, result: Array | Failure) -> Array | None:
        return in_shape_of(self.reference[slot.name], slot, result, is_exact=self.manifest is not None)

    def judge(self, slot: Slot, result: Array | Failure) -> OutputReport:
        """Return the report of one output."""
        name, reference = slot.name, self.reference[slot.name]
        if isinstance(result, Failure):
            return missing(name, slot.blob, result)
        array = self._restored(slot, result)
        if array is None:
            message = f"its shape is {list(result.shape)}, the model's {list(reference.shape)}"
            return OutputReport(name, slot.blob, "shape", message)
        if self.manifest and reference.dtype.kind in "iub":
            array = array.astype(np.float64)  # the manifest states the type, so `compare` must not try another
        case = Case(
            array,
            reference,
            spreads=lambda: (each[name] for each in self.rounding.spreads(self.feeds, self.reference)),
            weights=lambda: (errors[name] for errors in self.weight_errors),
            floats=lambda: self.rounding.without_quantisation(name, self.feeds, is_int8=self.net.has_integers),
            least=self.least,
            step=self.step,
            limit=self.limit,
            is_plain=self.is_plain,
        )
        return judge(case).report(name, slot.blob)


class NetOutputs(NamedTuple):
    """The blobs of a run: for the model's outputs, for sorts, by their indices, and of selected boxes."""

    outputs: Sequence[tuple[Slot, Array | Failure]] = ()
    sorts: Mapping[str, Array | Failure] = {}
    boxes: Mapping[str, Array | Failure] = {}


class Attempt(NamedTuple):
    """A run of a net, fed in one `way`: the reports, the comparison in the net's order, and what the net gave."""

    rows: Sequence[OutputReport]
    comparison: OutputComparison
    way: Sequence[Slot] = ()
    found: NetOutputs = NetOutputs()


def read_outputs(
    runner: NcnnRunner,
    way: Sequence[Slot],
    feeds: Mapping[str, Array],
    reference: Mapping[str, Array],
    manifest: Manifest | None,
    blobs: Sequence[str],
) -> NetOutputs:
    """Feed a net in this way; return its blob for each output of the reference, as far as it has one.

    `blobs` are the net's outputs. Without a manifest an output of the model may also be a blob inside the net.
    """
    arrays = model_feeds(way, feeds)
    if manifest is not None:
        slots = manifest_slots("output", list(reference), manifest.read)
        boxes = [Slot.of(entry) for entry in manifest.model_outputs if entry.boxes]
        # Inner blobs are extracted first, because ncnn frees them after their consumers.
        sorts = [Fetch(sort.blob, 0) for sort in manifest.sorts]
        results = runner.extract(arrays, [*sorts, *(slot.fetch for slot in (*slots, *boxes))])
        by_indices = {sort.indices: results[sort.blob] for sort in manifest.sorts}
        found = [(slot, results[slot.blob]) for slot in slots]
        return NetOutputs(found, by_indices, {slot.name: results[slot.blob] for slot in boxes})
    inner = [name for name in reference if name not in blobs] if len(blobs) < len(reference) else []
    results = runner.extract(arrays, [Fetch(blob, 0) for blob in (*inner, *blobs)])
    extracted = [*(blob for blob in inner if not isinstance(results[blob], Failure)), *blobs]
    pairs = pair(list(reference), extracted, lambda name, blob: _alike(results[blob], reference[name]))
    return NetOutputs([(Slot(name, blob, 0), results[blob]) for name, blob in pairs.items()])


def in_shape_of(reference: Array, slot: Slot, result: Array | Failure, *, is_exact: bool) -> Array | None:
    """Return a result in the model's shape, None if it does not fit; unless `is_exact`, sizes of 1 do not count."""
    if isinstance(result, Failure):
        return None
    if is_exact:
        return slot.restored(result, reference.shape)
    return result.reshape(reference.shape) if _alike(result, reference) else None


def manifest_slots(kind: str, names: Sequence[str], entries: Sequence[Entry]) -> list[Slot]:
    """Return the manifest's inputs or outputs (`kind`) in the model's order; UsageError if names differ."""
    slots = {entry.name: Slot.of(entry) for entry in entries}
    if set(slots) != set(names):
        raise UsageError(
            f"the manifest belongs to another model: its {kind}s are {', '.join(slots) or 'none'}, "
            f"those of the model {', '.join(names) or 'none'}"
        )
    return [slots[name] for name in names]


def input_slots(manifest: Manifest | None, feeds: Mapping[str, Array], blobs: Sequence[str]) -> list[list[Slot]]:
    """Return the ways to feed the arrays to the net with these input blobs, the likeliest first.

    With a manifest there is one way; empty caches stay unset. Without a manifest, `pair` finds the blobs, and there are
    three ways for the batch axis: most nets drop a batch of 1, a few keep it, and new nets have it as the Mat's batch.

    Raises UsageError if the manifest is another model's. Raises VerificationError if an input blob would get no array;
    ncnn crashes then.
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
    """Return a blob for each name, as long as blobs are left, e.g. {"image": "in0", "mask": "in1"}.

    1. Equal names are a pair.
    2. Other names are paired by number if the blobs are in0, in1, ... or out0, out1, ... .
    3. Else they are paired in order, unless that does not fit and there is exactly one other way that fits.
    """
    pairs = {name: name for name in names if name in blobs}
    left, free = [name for name in names if name not in pairs], [blob for blob in blobs if blob not in pairs]
    numbers = {int(match[1]): blob for blob in free if (match := _NUMBERED.fullmatch(blob))}
    if len(numbers) == len(free):
        return pairs | {name: numbers[i] for i, name in enumerate(names) if name in left and i in numbers}
    in_order = dict(zip(left, free, strict=False))
    choices = {name: [blob for blob in free if fits(name, blob)] for name in left}
    unique = {name: fitting[0] for name, fitting in choices.items() if len(fitting) == 1}
    if not all(fits(*names) for names in in_order.items()) and len(set(unique.values())) == len(left):
        return pairs | unique
    return pairs | in_order


def _is_whole(array: Array) -> bool:
    return array.size > 0 and (array.dtype.kind in "biu" or bool((array == np.rint(array)).all()))


def _alike(result: Array | Failure, reference: Array) -> bool:
    return not isinstance(result, Failure) and alike(result.shape, reference.shape)


def _severity(outputs: Sequence[OutputReport]) -> list[int]:
    """Return the severities of all outputs, worst first, to compare two attempts."""
    return sorted((get_args(Status).index(output.status) for output in outputs), reverse=True)
