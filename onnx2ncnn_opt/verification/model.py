"""Comparison of a net in ncnn with its model in ONNX Runtime, output by output."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from onnx2ncnn_opt import entry_points
from onnx2ncnn_opt.errors import BinError, GraphError, ParamError, RunError, UnprovenError, UsageError
from onnx2ncnn_opt.inputs.draws import Draw, draw_inputs, dynamic_sizes
from onnx2ncnn_opt.inputs.given import given_inputs
from onnx2ncnn_opt.ir.dim import Sym
from onnx2ncnn_opt.ir.graph import Blob
from onnx2ncnn_opt.ir.weight import Encoding
from onnx2ncnn_opt.manifest import Manifest
from onnx2ncnn_opt.outputs import OutputReport
from onnx2ncnn_opt.param.files import read_net
from onnx2ncnn_opt.precision.masks import open_like_data
from onnx2ncnn_opt.precision.search import EFFORTS
from onnx2ncnn_opt.progress import announce
from onnx2ncnn_opt.runtime.ahead import begin
from onnx2ncnn_opt.runtime.base import Feed
from onnx2ncnn_opt.runtime.compiled_tail import compiled
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.runtime.slots import Slot, model_feeds, too_small
from onnx2ncnn_opt.runtime.tail import TailRunner, tail_of
from onnx2ncnn_opt.runtime.targets import LOCAL, check_modes, find_target
from onnx2ncnn_opt.verdict.errors import Tolerance, in_mode
from onnx2ncnn_opt.verdict.rules import ADVICE
from onnx2ncnn_opt.verification.decode import DECODER_RUNS, Decoder
from onnx2ncnn_opt.verification.model_accuracy import Rounding, quantised_step, tolerance_within
from onnx2ncnn_opt.verification.model_runs import DrawnRuns, Run, load_converted, small_runs
from onnx2ncnn_opt.verification.net_facts import NetFacts
from onnx2ncnn_opt.verification.notes import model_notes
from onnx2ncnn_opt.verification.options import Verification
from onnx2ncnn_opt.verification.order import NetOrder
from onnx2ncnn_opt.verification.outputs import Attempt, OutputComparison
from onnx2ncnn_opt.verification.report import VerifyReport, check_outputs, is_wrong, judge_modes, merged
from onnx2ncnn_opt.verification.tail import TailJudge, boxes_of, judge_boxes, other_values

_MIN_RUNS = 2  # on ordinary and large inputs
_RUNS_LIKE_DATA = 2


def verify_net(
    model: Path | bytes,
    param: Path,
    bin: Path,
    verification: Verification = Verification(),
    *,
    manifest: Manifest | None = None,
    tail: bytes | None = None,
    worker: NcnnWorker | None = None,
    runs: "ModelRuns | None" = None,
) -> VerifyReport:
    """Run the original model and the net on the same inputs and compare every output.

    If the manifest has a tail, the net is compared at the cut in each mode, and in fp32 also behind the tail. `tail` is
    the content of the tail's file, by default the file next to the net.

    With a manifest arrays must have exactly the model's shapes. Without a manifest sizes of 1 do not count, because
    other converters drop them freely. Faults of the net are reported, not raised. `worker` is a running process to use,
    and `runs` are the model's runs, if they have begun before.

    If weights have 16 or 8 bits, the allowed error is `rules.WEIGHTS_MARGIN` times the error of the model with
    rounded weights.

    Raises ModelError or UsageError if the model, the inputs or the manifest are broken or do not fit together, or `on`
    has no ncnn; VerificationError if the net has inputs that the model does not have; and RunError if ONNX Runtime
    refuses the model or the inputs.
    """
    target = find_target(verification.on)
    target.require()
    modes = check_modes(verification.modes) or target.modes
    runner = tail_of(param, manifest, tail)
    program = runner.program if runner and "fp32" in modes else None
    with nullcontext(worker) if worker else NcnnWorker(target) as process, compiled(program) as in_cpp:
        judge = _ModelJudge(runs or ModelRuns(model, verification, manifest), (param, bin), runner, process)
        rows, wrong = judge_modes(judge, modes)
        if judge.tail is not None:
            problem, notes = judge.tail.in_cpp(in_cpp)
            judge.notes += notes
            if problem and not is_wrong(rows):
                problem = f"the tail's C++ header is wrong: {problem}"
                names = judge.tail.names
                rows = tuple(
                    replace(row, status="mismatch", message=problem) if row.name in names else row for row in rows
                )
        checked = process.checked(modes)
    is_drawn, done = verification.feeds is None, judge.done
    runs_by_size = {tuple(run.sizes.items()): run for run in done if not run.label}.values()
    dynamic = [info.name for info in judge.model.inputs if any(isinstance(size, Sym) for size in info.shape)]
    return VerifyReport(
        outputs=rows,
        seed=verification.seed if is_drawn else None,
        sizes=tuple(run.sizes for run in runs_by_size) or ({},),
        shapes=tuple({name: run.feeds[name].shape for name in dynamic} for run in runs_by_size) or ({},),
        checked=checked,
        draws=tuple(run.draw for run in (*done, *judge.like_data) if run.draw is not None),
        notes=tuple(_notes(judge, rows, is_vulkan=target.vulkan)),
        wrong=wrong,
        manifest=manifest,
    )


class ModelRuns:
    """The runs of a model in ONNX Runtime; a thread computes each run ahead of its use.

    `notes` are for users. Raises the errors of `verify_net` that concern the model.
    """

    def __init__(self, source: Path | bytes, verification: Verification, manifest: Manifest | None) -> None:
        manifest = manifest and manifest.before_boxes
        self.source, self.options, self.manifest, self.start = source, verification, manifest, time.monotonic()
        compared, cut = (manifest.compared, manifest.cut) if manifest is not None else ((), ())  # none without a tail
        shapes, values, outputs = verification.shapes, verification.values, compared or verification.outputs
        self.model = load_converted(source, manifest, shapes=shapes, values=values, outputs=outputs)
        self.cut, outputs = cut or self.model.cut, compared or self.model.cut
        announce("ONNX Runtime loads the model")
        values, timeout = self.model.values, verification.timeout
        runner = OrtRunner(source, outputs=outputs, values=values, threads=None, timeout=timeout)
        self._drawn = DrawnRuns(self.model, runner, manifest)
        self.notes: list[str] = []
        self.decoder: Decoder | None = None
        if manifest is not None and manifest.caches and verification.feeds is None:
            try:
                self.decoder = Decoder(self.model, manifest, verification.seed, runner)
            except UsageError as error:
                self.notes.append(f"no tokens were decoded, only single steps run: {error}")
        self._inputs = self._all_runs()
        self._next = begin(next, self._inputs)

    def runs(self) -> Iterator[Run]:
        """Yield the runs, each with inputs and the model's outputs."""
        while True:
            if not self._next.done():
                announce("ONNX Runtime runs the model")
            try:
                run = self._next.result()
            except StopIteration:
                return
            self._next = begin(next, self._inputs)
            yield run

    def run(self, sizes: Mapping[str, int], draw: Draw) -> Run:
        """Return a run besides those of `runs`."""
        return self._drawn.run(sizes, draw)

    def _all_runs(self) -> Iterator[Run]:
        options, drawn = self.options, self._drawn
        if self.decoder is not None:
            yield from self.decoder.runs()
        elif options.wanted is not None and options.feeds is None:
            yield from drawn.wanted(options.seed, options.wanted)
        elif options.feeds is None:
            yield from drawn.usual(options.seed, self.notes)
        else:
            feeds = given_inputs(options.feeds, self.model, self.manifest)
            if small := too_small(self.manifest, feeds):
                raise UsageError(small)
            yield Run({}, None, feeds, drawn.runner.run(feeds))


class _ModelJudge:
    """A net and its model in ONNX Runtime; `done` are the runs so far, `notes` are for users.

    In 16 bits, a net does not run on unusual inputs, which may need 32, but also on inputs like data (`like_data`).
    """

    def __init__(self, model: ModelRuns, net: tuple[Path, Path], runner: TailRunner | None, worker: NcnnWorker) -> None:
        self.options, self.manifest, self.model = model.options, model.manifest, model.model
        self.notes, self._runs, self._net, self._worker = model.notes, model, net, worker
        self.tail = TailJudge(runner) if runner is not None else None
        self._boxes = boxes_of(self.manifest, model.model)
        self.done: list[Run] = []
        self.like_data: list[Run] = []
        self._decoder = model.decoder
        self.rounding = Rounding(model.source, model.cut or _computed_outputs(self.manifest), self.model.values)
        self._order = NetOrder.of(model.source, self.manifest, self.model)
        self._within = tolerance_within(self.model)
        self.net = NetFacts.of(*net)
        self._step = quantised_step(self.model, self.net)
        self.way: Sequence[Slot] = ()  # to feed the net, in the last run

    def runs(self, mode: str) -> Iterator[Run]:
        """Yield the runs of a mode; those of the first mode are kept for the others."""
        self._runner = self._load(mode, plain=self.options.exact)
        for run in self.done or self._first_runs():
            if mode == "fp32" or run.draw is None or not run.draw.is_unusual:
                yield run
        is_drawn = self.options.feeds is None and self.options.wanted is None
        if mode != "fp32" and is_drawn and self._decoder is None:
            self.like_data = self.like_data or list(self._runs_like_data())
            yield from self.like_data

    def _first_runs(self) -> Iterator[Run]:
        end = self._runs.start + EFFORTS[self.options.effort][0]
        # Dynamic sizes add a run at other sizes.
        least = DECODER_RUNS if self._decoder else _MIN_RUNS + bool(dynamic_sizes(self.model))
        for run in self._runs.runs():
            if self.options.wanted is None and len(self.done) >= least and time.monotonic() > end:
                skipped = "less useful inputs were left out; --effort thorough runs them"
                self.notes.append(f"the net ran on {len(self.done)} sets of inputs; {skipped}")
                break
            self.done.append(run)
            yield run

    def _runs_like_data(self) -> Iterator[Run]:
        """Yield runs on inputs like data, of a scale that suits the net, as far as both runtimes take them."""
        first = self.done[0]

        def feeds_of(draw: Draw) -> dict[Blob, Feed]:
            feeds = model_feeds(self.way, draw_inputs(self.model, first.sizes, draw=draw))
            return {blob: feeds[blob.name] for blob in graph.inputs if blob.name in feeds}

        worker = self._worker if self._worker.target == LOCAL else None
        try:
            graph = read_net(*self._net, entry_points.layer_types()).graph
            with open_like_data(graph, feeds_of, self.options.seed, worker=worker) as (draw, _):
                pass
            for number in range(_RUNS_LIKE_DATA):
                yield self._runs.run(first.sizes, draw._replace(seed=draw.seed + number))
        except (ParamError, BinError, GraphError, UsageError, RunError):
            return  # ONNX Runtime may refuse other inputs, as in `DrawnRuns.usual`

    def compare(self, run: Run, mode: str) -> Sequence[OutputReport]:
        """Run the net, in fp32 also with ncnn's plain kernels; judge its outputs, and those that follow from them."""
        comparison = self._comparison(run, mode)
        attempt = comparison.best()
        self.way, rows = attempt.way, attempt.rows
        if mode == "fp32":
            rows = attempt.comparison.with_scores(self.way, self._with_plain(rows, comparison))
        is_usual = run.draw is None or run.draw.plain
        is_doubtful = is_wrong(rows) or (is_usual and any(row.status != "ok" for row in rows))
        if is_doubtful and (maker := self.rounding.hidden_nan(run.feeds)):
            where = f"at {run}" if str(run) else "on these inputs"
            raise UnprovenError(f"{maker} gives NaN {where}, and a later node hides it; {ADVICE}")
        return [*rows, *self._further(attempt, rows, run, mode)]

    def _further(self, attempt: Attempt, rows: Sequence[OutputReport], run: Run, mode: str) -> Sequence[OutputReport]:
        """Return the reports on the tail, or on boxes that the net selects, of right numbers."""
        tail, boxes = self.tail if mode == "fp32" else None, self._boxes
        if is_wrong(rows):
            names = tail.names if tail else [port.name for port in boxes.program.outputs] if boxes else []
            reason = "the numbers before it are wrong already"
            return [OutputReport(name, None, "unproven", reason, rule="unproven") for name in names]
        if tail:
            return tail.judge(run.feeds, run.reference)
        if not boxes:
            return []
        values, manifest = attempt.comparison.values(attempt.found.outputs), self.manifest
        reports = judge_boxes(boxes, values, attempt.found.boxes)
        if manifest is None or not boxes.shape or run is not self.done[0] or mode != "fp32":
            return reports
        values, slots = other_values(values), [Slot.of(entry) for entry in manifest.model_outputs if entry.boxes]
        feeds = model_feeds([*attempt.way, *map(Slot.of, manifest.candidates)], {**run.feeds, **values})
        found = self._runner.extract(feeds, [slot.fetch for slot in slots])
        others = judge_boxes(boxes, values, {slot.name: found[slot.blob] for slot in slots})
        return [merged(rows) for rows in zip(reports, others, strict=True)]

    def _with_plain(self, rows: Sequence[OutputReport], comparison: OutputComparison) -> Sequence[OutputReport]:
        """Return the reports with ncnn's plain kernels, which have rounding errors only, if these are wrong."""
        needs_plain = comparison.limit is None and any(row.rule in ("kernels", "decided") for row in rows)
        if self._step or is_wrong(rows) or not needs_plain:
            return rows
        plain = replace(comparison, runner=self._load("fp32", plain=True), is_plain=True).best().rows
        return plain if is_wrong(plain) else rows

    def _limit(self, mode: str) -> Tolerance | None:
        """Return the tolerance of a mode of 16 bits, or the user's; None for the model's own in fp32."""
        is_usual = mode == "fp32" and not self.options.is_user_tolerance
        return None if is_usual else self.options.allowed(in_mode(mode, self._within))

    def _comparison(self, run: Run, mode: str) -> OutputComparison:
        """Return the comparison of the net with a run of the model."""
        return OutputComparison(
            self._runner,
            run.feeds,
            {name: run.reference[name] for name in _computed_outputs(self.manifest) or run.reference},
            self.manifest,
            self.net,
            self.rounding,
            limit=self._limit(mode),
            least=self.net.least_rounding(vulkan=self._worker.target.vulkan),
            step=self._step if mode == "fp32" else 0.0,
            order=self._order,
        )

    def _load(self, mode: str, *, plain: bool) -> NcnnRunner:
        timeout, worker = self.options.timeout, self._worker
        return NcnnRunner(*self._net, mode=mode, plain=plain, timeout=timeout, threads=None, worker=worker)


def _computed_outputs(manifest: Manifest | None) -> Sequence[str]:
    """Return the model's outputs to compare with the net's: not caches, and only up to the cut; none means all."""
    return [entry.name for entry in manifest.read] if manifest and (manifest.tail or manifest.caches) else ()


def net_feeds(
    model: Path | bytes, param: Path, bin: Path, verification: Verification, *, manifest: Manifest | None = None
) -> dict[str, Feed]:
    """Return feeds by blob with which the net is right in fp32 on this machine; raises the errors of `verify_net`."""
    with NcnnWorker() as worker:
        judge = _ModelJudge(ModelRuns(model, verification, manifest), (param, bin), None, worker)
        run = next(iter(judge.runs("fp32")))
        check_outputs(judge.compare(run, "fp32"), "from ONNX Runtime's in fp32 already; masks cannot change that")
    return model_feeds(judge.way, run.feeds)


def _notes(judge: _ModelJudge, rows: Sequence[OutputReport], *, is_vulkan: bool) -> Iterator[str]:
    """Yield notes on the verification of a net."""
    options, model, runs = judge.options, judge.model, judge.done
    is_drawn = options.feeds is None
    yield from model_notes(model, runs, judge.rounding)
    if is_drawn and is_wrong(rows) and judge.net.weights is Encoding.INT8:
        yield "the scales of int8 layers come from calibration data: verify with such data, by --inputs"
    if is_vulkan and is_wrong([row for row in rows if row.mode == "fp32"]) and judge.net.has_inexact_gelu:
        yield "GELU on Vulkan is off by up to 5e-4 (docs/devices.md): with 31=16 in its line it is exact"
    yield from judge.notes
    if is_drawn and options.wanted is None and (small := small_runs(model, judge.manifest, runs)):
        yield small
