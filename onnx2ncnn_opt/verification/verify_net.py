"""A net in ncnn against its model in ONNX Runtime, output by output."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.dim import Sym
from onnx2ncnn_opt.ir.weight import Encoding
from onnx2ncnn_opt.manifest import Manifest
from onnx2ncnn_opt.onnx.read.load import LoadedModel
from onnx2ncnn_opt.outputs import OutputReport
from onnx2ncnn_opt.progress import announce
from onnx2ncnn_opt.runtime.ahead import begin
from onnx2ncnn_opt.runtime.base import Array, Feed
from onnx2ncnn_opt.runtime.compiled_tail import compiled
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.runtime.slots import Slot, model_feeds, too_small
from onnx2ncnn_opt.runtime.tail import TailRunner, tail_of
from onnx2ncnn_opt.runtime.targets import check_modes, find_target
from onnx2ncnn_opt.verification.decode import LEAST_RUNS as DECODER_RUNS
from onnx2ncnn_opt.verification.decode import ROW as TOKEN_ROW
from onnx2ncnn_opt.verification.decode import Decoder, judge_token
from onnx2ncnn_opt.verification.driver import VerifyReport, check_outputs, is_wrong, judge_modes
from onnx2ncnn_opt.verification.given_inputs import given_inputs
from onnx2ncnn_opt.verification.inputs import dynamic_sizes
from onnx2ncnn_opt.verification.net_outputs import OutputComparison
from onnx2ncnn_opt.verification.options import EFFORTS, Verification
from onnx2ncnn_opt.verification.rounding import Rounding, tolerance_of, tolerance_within
from onnx2ncnn_opt.verification.rounding_budget import (
    cause_of,
    estimated,
    holds_integers,
    least_budget,
    weights_encoding,
)
from onnx2ncnn_opt.verification.runs import Run, any_feeds, drawn_runs, load_converted, small_runs, wanted_runs
from onnx2ncnn_opt.verification.tail import TailJudge
from onnx2ncnn_opt.verification.tolerance import DEFAULT, UNKNOWN_ROUNDING, in_mode

_LONGEST_PROBLEM = 100  # characters of a note
_LEAST_RUNS = 2  # on ordinary and large inputs


def verify_net(
    model: Path | bytes,
    param: Path,
    bin: Path,
    verification: Verification = Verification(),
    *,
    manifest: Manifest | None = None,
    tail: bytes | None = None,
    worker: NcnnWorker | None = None,
    runs: ModelRuns | None = None,
) -> VerifyReport:
    """Run the original model and the net on the same inputs and compare every output.

    The net of a manifest with a tail is compared at the cut, in each mode, and in fp32 with its tail at the outputs.
    `tail` is the content of the tail's file, which is next to the net by default.

    With a manifest arrays must have exactly the model's shapes; without one sizes of 1 do not count, because other
    converters drop them freely. Faults of the net are reported, not raised. `worker` is a process to use again, and
    `runs` those of the model, if they were begun before.

    A net whose weights have 16 or 8 bits may be off by `rounding_budget.BITS_MARGIN` times the error of rounding the
    model's own weights.

    Raises ModelError or UsageError if the model, the inputs or the manifest are broken or do not belong together, or
    there is no ncnn to run `on`; VerificationError if the net has inputs that the model does not have; and RunError if
    ONNX Runtime does not take the model or the inputs.
    """
    target = find_target(verification.on)
    target.require()
    modes = check_modes(verification.modes) or target.modes
    runner = tail_of(param, manifest, tail)
    program = runner.program if runner and "fp32" in modes else None
    with nullcontext(worker) if worker else NcnnWorker(target) as process, compiled(program) as in_cpp:
        runs = runs or ModelRuns(model, verification, manifest, has_tail=runner is not None)
        judge = _ModelJudge(runs, (param, bin), runner, process)
        rows, wrong = judge_modes(judge, modes)
        if judge.tail is not None and program is not None:
            problem, notes = judge.tail.in_cpp(in_cpp)
            judge.notes += notes
            if problem and not is_wrong(rows):
                problem = f"the tail's C++ header is wrong: {problem}"
                names = judge.tail.names
                rows = tuple(
                    replace(row, status="mismatch", message=problem) if row.name in names else row for row in rows
                )
        checked = process.checked(modes)
    loaded, done = judge.model, judge.done
    of_sizes = {tuple(run.sizes.items()): run for run in done if not run.label}.values()
    is_drawn = verification.feeds is None
    small = small_runs(loaded, manifest, done) if is_drawn and verification.wanted is None else ""
    dynamic = [info.name for info in loaded.inputs if any(isinstance(size, Sym) for size in info.shape)]
    remarks = [*_notes(loaded, done, judge.rounding, is_fixed=verification.is_user_tolerance)]
    if is_drawn and is_wrong(rows) and weights_encoding(param, bin) is Encoding.INT8:
        remarks.append("the scales of int8 layers are those of the data that gave them: verify with yours, by --inputs")
    return VerifyReport(
        outputs=rows,
        seed=verification.seed if is_drawn else None,
        sizes=tuple(run.sizes for run in of_sizes) or ({},),
        shapes=tuple({name: run.feeds[name].shape for name in dynamic} for run in of_sizes) or ({},),
        checked=checked,
        draws=tuple(run.draw for run in done if run.draw is not None),
        notes=(*remarks, *judge.notes, *([small] if small else [])),
        wrong=wrong,
        manifest=manifest,
    )


class ModelRuns:
    """A model in ONNX Runtime, and the runs to compare a net with; a thread computes each ahead of its use.

    `notes` are facts for the reader. Raises the errors of `verify_net` that concern the model.
    """

    def __init__(
        self, source: Path | bytes, verification: Verification, manifest: Manifest | None, *, has_tail: bool
    ) -> None:
        self.source, self.how, self.manifest, self.start = source, verification, manifest, time.monotonic()
        values, outputs, self.cut = verification.values, verification.outputs, verification.outputs
        if manifest is not None and has_tail:
            outputs, self.cut = manifest.compared, manifest.cut
        self.model = load_converted(source, manifest, shapes=verification.shapes, values=values, outputs=outputs)
        announce("ONNX Runtime loads the model")
        values, timeout = self.model.values, verification.timeout
        self._runner = OrtRunner(source, outputs=outputs, values=values, threads=None, timeout=timeout)
        self.notes: list[str] = []
        self.decoder: Decoder | None = None
        if manifest is not None and manifest.caches and verification.feeds is None:
            try:
                self.decoder = Decoder(self.model, manifest, verification.seed, self._runner)
            except UsageError as error:
                self.notes.append(f"no tokens were decoded, only single steps run: {error}")
        self._inputs = self._drawn()
        self._next = begin(next, self._inputs)

    def runs(self) -> Iterator[Run]:
        """Yield the inputs, with the model's outputs."""
        while True:
            if not self._next.done():
                announce("ONNX Runtime runs the model")
            try:
                run = self._next.result()
            except StopIteration:
                return
            self._next = begin(next, self._inputs)
            yield run

    def _drawn(self) -> Iterator[Run]:
        how, fixed = self.how, (self.model, self._runner, self.manifest, self.how.seed)
        if self.decoder is not None:
            yield from self.decoder.runs()
        elif how.feeds is None:
            yield from wanted_runs(*fixed, how.wanted) if how.wanted else drawn_runs(*fixed)
        else:
            given = given_inputs(how.feeds, self.model)
            if small := too_small(self.manifest, given):
                raise UsageError(small)
            yield Run({}, None, given, self._runner.run(given))


class _ModelJudge:
    """A net and its model in ONNX Runtime; `done` are the runs so far, `notes` facts for the reader."""

    def __init__(self, model: ModelRuns, net: tuple[Path, Path], runner: TailRunner | None, worker: NcnnWorker) -> None:
        self.how, self.manifest, self.model = model.how, model.manifest, model.model
        self.notes, self._runs, self._net, self._worker = model.notes, model, net, worker
        self.tail = TailJudge(runner) if self.manifest is not None and runner is not None else None
        self.done: list[Run] = []
        self._decoder = model.decoder
        self.rounding = Rounding(model.source, model.cut or _arrays(self.manifest), self.model.values)
        self._tolerance = self.how.tolerance or tolerance_within(self.model)
        is_usual = self.how.tolerance is None and not self.how.is_user_tolerance
        self._is_default = is_usual and self._tolerance == DEFAULT
        # Rounding to 16 or 8 bits decides more steps of a quantised model than rounding to float32.
        self._in_fp32, self._few = self._tolerance, 0.0
        is_quantised = self.how.tolerance is None and self._tolerance != DEFAULT
        if is_quantised and weights_encoding(*net) is None and not holds_integers(*net):
            self._in_fp32, self._few = tolerance_of(self.model), self._tolerance.relative
        # By Vulkan, int8 convolutions without packing are wrong.
        self._has_plain = self._is_default and not (worker.target.vulkan and holds_integers(*net))
        self._least = least_budget(*net, vulkan=worker.target.vulkan)
        self._worst: tuple[float, OutputComparison, Sequence[Slot]] | None = None

    def runs(self, mode: str) -> Iterator[Run]:
        """Yield the runs of the first mode again for every other mode."""
        self._worst = None
        self._runner = self._started(mode, exact=self.how.exact)
        if self.done:
            yield from self.done
            return
        end = self._runs.start + EFFORTS[self.how.effort][0]
        least = _LEAST_RUNS + bool(dynamic_sizes(self.model))  # which get a second choice of sizes
        least = DECODER_RUNS if self._decoder else least
        for run in self._runs.runs():
            if self.how.wanted is None and len(self.done) >= least and time.monotonic() > end:
                left = "inputs that tell less than these were left out; --effort thorough runs them"
                self.notes.append(f"the net ran on {len(self.done)} sets of inputs; {left}")
                break
            self.done.append(run)
            yield run

    def compare(self, run: Run, mode: str) -> Sequence[OutputReport]:
        """Run the net, with ncnn's plain kernels as well if its outputs leave the rounding budget in fp32."""
        usual = self._in_fp32 if mode == "fp32" else self._tolerance
        how, tolerance = self.how, self.how.allowed(in_mode(mode, usual))
        fixed = self.manifest, tolerance, self.rounding, how.is_user_tolerance, self._least
        tail, reference = self.tail if mode == "fp32" else None, run.reference
        if self.manifest is not None:  # ncnn chooses the layout of a cache
            opaque = {entry.name for entry in self.manifest.outputs if entry.cache}
            reference = {name: array for name, array in reference.items() if name not in opaque}
        if self.tail is not None:
            reference = {name: array for name, array in reference.items() if name not in self.tail.names}
        behind = None if tail is None else partial(tail.judge, run.feeds, run.reference)
        token = self._decoder.tokens if self._decoder and tail is None else None
        if token is not None:
            behind = partial(judge_token, token, run.reference, self.notes, f"{run} in {mode}", tolerance.relative)
        few = self._few if mode == "fp32" else 0.0
        comparison = OutputComparison(self._runner, run.feeds, reference, *fixed, few=few, behind=behind)
        way, found = comparison.best()
        error = max((output.max_rel or 0.0 for output in found), default=0.0)
        if self._worst is None or error > self._worst[0]:
            self._worst = error, comparison, way
        is_undecided = tail is not None and any(row.name in tail.names and row.message for row in found)
        if self._has_plain and mode == "fp32" and (is_undecided or comparison.leaves_budget(found)):
            _, found = replace(comparison, runner=self._started("fp32", exact=True), is_close=True).best()
        if mode == "fp32":
            found = comparison.with_scores(way, found)
        if is_wrong(found):
            self._worst = math.inf, comparison, way
        if tail is not None and not {row.name for row in found}.issuperset(tail.names):
            why = "the net is wrong at the cut already"
            found = [*found, *(OutputReport(name, None, "unproven", why) for name in tail.names)]
        if token is not None and found[-1].name != TOKEN_ROW:
            found = [*found, OutputReport(TOKEN_ROW, None, "unproven", "the scores are wrong already")]
        return found

    def _started(self, mode: str, *, exact: bool) -> NcnnRunner:
        how = self.how
        return NcnnRunner(*self._net, mode=mode, exact=exact, timeout=how.timeout, threads=None, worker=self._worker)

    def explain(self, rows: list[OutputReport], mode: str) -> list[OutputReport]:
        """Find the causes of errors, on the inputs on which the net is wrong, or on those of the largest error."""
        if self._worst is None:
            return rows
        _, comparison, way = self._worst
        if self.how.explain:
            announce("ONNX Runtime runs the model in float64")
            rows, problem = _explained(rows, comparison, way, mode, is_close=self._is_default)
            self.notes += [f"what {mode} explains is not known: {problem}"] if problem else []
        if mode != "fp32" and is_wrong(rows):
            runner, tolerance = self._started("fp32", exact=self.how.exact), in_mode("fp32", self._tolerance)
            rows = _blamed(rows, replace(comparison, runner=runner, tolerance=self.how.allowed(tolerance)), mode)
        return rows


def _arrays(manifest: Manifest | None) -> Sequence[str]:
    """Return the outputs to compute if a model has others as well: those of the net that are no caches."""
    return [entry.name for entry in manifest.read] if manifest and (manifest.tail or manifest.caches) else ()


def _explained(
    rows: Sequence[OutputReport], comparison: OutputComparison, way: Sequence[Slot], mode: str, *, is_close: bool
) -> tuple[list[OutputReport], str]:
    """Return the reports with the causes of their errors, and why the effect of 16 or 8 bits is unknown, if it is."""
    net = comparison.runner.param, comparison.runner.bin
    measured = comparison.rounding.measured(comparison.feeds, comparison.reference)
    encoding, by_weights = weights_encoding(*net), comparison.by_weights
    by_bits: Mapping[str, float] = {}
    kind = problem = ""
    if mode != "fp32" or encoding is Encoding.INT8:
        blobs = {row.name: row.blob for row in rows}
        kind, (by_bits, problem) = mode, estimated(comparison.runner, comparison.feeds, way, blobs, mode)
    if mode == "fp32" and encoding is Encoding.INT8:
        kind, by_bits = "int8", {name: by_bits[name] + by_weights[name] for name in by_bits if name in by_weights}
    elif mode == "fp32" and encoding is not None:
        kind, by_bits = f"weights in {encoding.value}", by_weights

    def explained(row: OutputReport) -> OutputReport:
        if row.name not in comparison.reference:  # the tail makes it
            return row
        rounding, bits = measured.get(row.name), by_bits.get(row.name)
        # A wide tolerance of the user does not explain an error.
        is_lax = comparison.is_fixed and (row.max_rel or 0.0) > DEFAULT.relative
        ok = row.status in ("ok", "unproven") and not is_lax
        cause = cause_of(row.max_rel, mode, ok=ok, rounding=rounding, bits=bits, kind=kind)
        if cause == "kernels" and (row.max_abs or 0.0) <= comparison.spread[row.name].max(initial=0.0):
            cause = "rounding"  # within the model's rounding spread
        allowed = comparison.allowed(row.name, close=is_close and mode == "fp32")
        finite_bits = bits if bits is None or math.isfinite(bits) else None
        return replace(row, rounding=rounding, bits=finite_bits, allowed=allowed, cause=cause)

    return [explained(row) for row in rows], problem


def _blamed(rows: Sequence[OutputReport], in_fp32: OutputComparison, mode: str) -> list[OutputReport]:
    """Return the reports; errors that the net does not have in fp32 on the same inputs get the mode as their cause."""
    wrong = {row.name for row in rows if row.status in ("mismatch", "nan")}
    blamed = {row.name for row in in_fp32.best()[1] if row.status == "ok"} & wrong if wrong else set()
    text = f"; the net is right in fp32, so the cause is {mode}"
    return [replace(row, cause=mode, message=row.message + text) if row.name in blamed else row for row in rows]


def net_feeds(
    model: Path | bytes, param: Path, bin: Path, verification: Verification, *, manifest: Manifest | None = None
) -> dict[str, Feed]:
    """Return feeds by blob with which the net is right in fp32 on this machine; raises the errors of `verify_net`."""
    how = verification
    wanted = manifest.compared if manifest else ()
    loaded = load_converted(model, manifest, shapes=how.shapes, values=how.values, outputs=wanted)
    given = any_feeds(model, loaded, manifest, feeds=how.feeds, seed=how.seed)
    fixed: dict[str, Any] = {"values": loaded.values, "outputs": _arrays(manifest)}
    reference = OrtRunner(model, threads=None, timeout=how.timeout, **fixed).run_any(given)
    rounding = Rounding(model, **fixed)
    with NcnnWorker() as worker:
        runner = NcnnRunner(param, bin, timeout=how.timeout, threads=None, worker=worker)
        tolerance = how.tolerance or tolerance_within(loaded)
        way, outputs = OutputComparison(runner, given, reference, manifest, tolerance, rounding).best()
    check_outputs(outputs, "from ONNX Runtime's in fp32 already, which masks do not change")
    return model_feeds(way, given)


def _notes(model: LoadedModel, runs: Sequence[Run], rounding: Rounding, is_fixed: bool) -> Iterator[str]:
    """Yield notes on outputs that are not all numbers, or no float64; `is_fixed`: the user chose the tolerance."""
    if rounding.problem and not is_fixed:
        problem = shorten(rounding.problem, _LONGEST_PROBLEM, placeholder=" ...")
        yield f"errors up to {UNKNOWN_ROUNDING:g} count as rounding, as the model does not run in float64: {problem}"
    if rounding.unmoved:
        problem = shorten(rounding.unmoved, _LONGEST_PROBLEM, placeholder=" ...")
        yield f"how far rounding errors move the model is not known: {problem}"
    if rounding.overflown:
        names = ", ".join(sorted(rounding.overflown))
        yield f"ONNX Runtime's float32 overflows or underflows on the way to {names}; float64 was asked there"
    for value in model.graph.initializers.values():
        tensor = value.const_value
        # One number is what a mask fills in.
        if tensor is not None and tensor.dtype.is_floating_point() and tensor.size > 1:
            array = np.asarray(tensor.numpy())
            if not np.isfinite(array.astype(np.float32) if array.dtype.kind == "V" else array).all():
                yield f"the model's weight '{value.name}' is not finite: {_special_counts(array)}"
    for name in runs[0].reference:
        arrays = [run.reference[name] for run in runs]
        if len(runs) > 1 and all(array.dtype.kind == "f" and array.size for array in arrays):
            numbers = {float(extreme(array)) for array in arrays for extreme in (np.min, np.max)}
            if len(numbers) == 1:
                yield f"'{name}' is {numbers.pop() + 0:g} for all inputs tried, which proves little (weights of 0?)"
        for run in runs:
            array = run.reference[name]
            if array.dtype.kind == "f" and np.isnan(array).any():
                yield f"the model itself gives NaN for '{name}' ({run}): {_special_counts(array)}"
                break


def _special_counts(array: Array) -> str:
    """Return the numbers of NaN and of infinities in an array, in words."""
    numbers = array.astype(np.float64)
    counts = {"NaN": np.isnan(numbers).sum(), "+inf": np.isposinf(numbers).sum(), "-inf": np.isneginf(numbers).sum()}
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) + f" of {array.size}"
