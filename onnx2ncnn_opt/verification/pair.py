"""Comparison of an optimised net with the original net in ncnn, output by output."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from onnx2ncnn_opt.errors import CrashError, RunError
from onnx2ncnn_opt.inputs.draws import Draw
from onnx2ncnn_opt.inputs.net_draws import draw_runs
from onnx2ncnn_opt.ir.attention import caches
from onnx2ncnn_opt.ir.detections import after_boxes, before_boxes, decisive
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.outputs import OutputReport
from onnx2ncnn_opt.param.files import NetFiles, write_net
from onnx2ncnn_opt.param.splits import list_layers
from onnx2ncnn_opt.param.storage import ROUNDING, Storage
from onnx2ncnn_opt.progress import counted
from onnx2ncnn_opt.runtime.base import Array, Failure
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.targets import check_modes, find_target
from onnx2ncnn_opt.system import temporary_folder
from onnx2ncnn_opt.verdict.errors import ALL_SMALL, DEFAULT, Tolerance, in_mode, with_rounding
from onnx2ncnn_opt.verdict.rules import within
from onnx2ncnn_opt.verification.model_runs import Run
from onnx2ncnn_opt.verification.options import Verification
from onnx2ncnn_opt.verification.report import Judge, VerifyReport, failed, judge_modes, merged, missing

# Both nets run with ncnn's plain kernels, so they differ only by the rounding of folded weights and the order of sums:
# half a unit of the last place for each, 6e-8. The errors grow with the square root of the number of layers, and with
# cancellation. The largest measured on 102 real nets is 4e-7 (docs/measurements.md).
FOLDING = Tolerance(relative=1e-4, absolute=ALL_SMALL)

UNPROVEN_NET = (
    "it is NaN before as well as after, which proves nothing; are weights broken, or do inputs not suit the net? "
    "(try another --seed or --shape, or --no-verify)"
)
NO_BOXES = "no boxes before and after; the inputs of the detection agree"
Results = Mapping[str, Array | Failure]
# The bits of computed NaNs, positive and negative.
_NAN = np.array([0x7FC00000, 0xFFC00000], np.uint32).view(np.int32)


@dataclass(frozen=True)
class NetPair:
    """A net in files, and the graph made from it."""

    source: NetFiles
    graph: Graph
    names: Mapping[str, str]  # in the files, of the graph's inputs and outputs
    shapes: Mapping[str, Sequence[int]]  # of the inputs, by the graph's names
    examples: Mapping[str, str]  # shapes that errors propose for inputs without shapes
    storage: Storage | None  # the weights that get 16 bits
    detectors: Mapping[Layer, tuple[str, ...]]  # the names in the files of the blobs that decide boxes
    is_cut: bool  # the outputs are blobs inside the net

    @property
    def outputs(self) -> list[Blob]:
        """The outputs to compare, without inputs and caches; only ncnn can read caches."""
        opaque = caches(self.graph)
        return [blob for blob in self.graph.outputs if not blob.is_input and blob not in opaque]

    def draws(self, seed: int, wanted: Sequence[Draw] = ()) -> Iterator[tuple[Draw, dict[Blob, Array]]]:
        """Yield the sets of inputs, see `draw_runs`."""
        return draw_runs(self.graph, self.shapes, seed=seed, examples=self.examples, wanted=wanted)


def verify_pair(
    pair: NetPair,
    verification: Verification,
    *,
    files: NetFiles | None = None,
    names: Mapping[Blob, str] | None = None,
    worker: NcnnWorker | None = None,
) -> VerifyReport:
    """Run the original and the new net in ncnn, on inputs drawn from a seed, and compare every output.

    `files` contain the graph, with its blobs' `names`; by default the graph is written to temporary files. The original
    runs on the same device, in fp32.

    Raises VerificationError or RunError if ncnn cannot run the original, and UsageError if an input has no shape.
    """
    target = worker.target if worker else find_target(verification.on)
    modes = check_modes(verification.modes) or target.modes
    with (
        temporary_folder() as folder,
        nullcontext(worker) if worker else NcnnWorker(target) as process,
        NcnnWorker(target) as second,  # keeps the original loaded; starts on first use
    ):
        judge = _NetJudge(pair, verification, process, second)
        if files is None or names is None or judge.boxes:  # a binary .param has no names of inner blobs
            files, names = _written(pair.graph, Path(folder) / "net")
        folded: tuple[OutputReport, ...] = ()
        if pair.storage is not None and pair.storage.count:
            with pair.storage.reverted():
                full = _written(pair.graph, Path(folder) / "full")
            folded = judge_modes(judge.of(*full), ["fp32"])[0]
        rows = judge_modes(judge.of(files, names, rounding=pair.storage), modes)[0]
        checked = process.checked(modes)
    return VerifyReport(
        rows,
        verification.seed,
        checked=checked,
        draws=tuple(draw for draw, _ in judge.drawn),
        against="the original net's",
        folded=folded,
    )


def _written(graph: Graph, prefix: Path) -> tuple[NetFiles, Mapping[Blob, str]]:
    files = NetFiles.at(prefix)
    return files, write_net(graph, files.param, files.bin)


class _NetJudge(Judge):
    """An optimised net and the original; `drawn` are the inputs, `all_runs` have the original's fp32 outputs.

    `boxes` are the outputs that depend on detection layers. The number and order of boxes depend on the last bits of
    scores. So the comparison has two steps: the inputs of detection layers must agree. Then the original runs with the
    new net's inputs of detection layers, and `boxes` must be equal.
    """

    _files: NetFiles
    _names: Mapping[str, str]

    def __init__(self, pair: NetPair, verification: Verification, worker: NcnnWorker, second: NcnnWorker) -> None:
        self.pair, self.options, self._worker, self._second = pair, verification, worker, second
        self.drawn = list(pair.draws(verification.seed))
        after = after_boxes(pair.graph)
        inputs = {b: n for layer, names in pair.detectors.items() for b, n in zip(decisive(layer), names, strict=True)}
        # Names in the original file by names in the graph: of the inputs of detection layers, and of outputs.
        self._detector_inputs = {blob.name: inputs[blob] for blob in before_boxes(pair.graph) if blob in inputs}
        self.boxes = {blob.name: pair.names[blob.name] for blob in pair.outputs if blob in after}
        others = {blob.name: pair.names[blob.name] for blob in pair.outputs if blob not in after}
        self._compared = self._detector_inputs | others
        self._exact, self._usual = True, FOLDING
        try:
            self.all_runs = self._original_runs()
        except RunError:  # some nets run only with ncnn's usual kernels
            self._exact, self._usual = False, DEFAULT
            self.all_runs = self._original_runs()
        self._allowed = self._usual

    def of(self, files: NetFiles, names: Mapping[Blob, str], *, rounding: Storage | None = None) -> "_NetJudge":
        """Return the judge of a net in files, with a larger tolerance if its weights are rounded."""
        judge = copy(self)
        judge._files = files
        judge._names = {blob.name: name for blob, name in {**list_layers(self.pair.graph).inner_names, **names}.items()}
        if rounding is not None and rounding.count:
            judge._allowed = with_rounding(ROUNDING[rounding.encoding], rounding.depth, self._usual)
        return judge

    def _load(
        self, files: NetFiles, *, exact: bool, mode: str = "fp32", worker: NcnnWorker | None = None
    ) -> NcnnRunner:
        worker, timeout = worker or self._worker, self.options.timeout
        return NcnnRunner(files.param, files.bin, worker=worker, exact=exact, mode=mode, timeout=timeout, threads=None)

    def _original_feeds(self, run: Run) -> dict[str, Array]:
        """Return a run's inputs by their names in the original."""
        return {self.pair.names[name]: array for name, array in run.feeds.items()}

    def _original_runs(self) -> list[Run]:
        net = self._load(self.pair.source, exact=self._exact)
        runs = []
        for draw, arrays in counted(self.drawn, "ncnn runs the net as it was", "runs"):
            run = Run({}, draw, {blob.name: array for blob, array in arrays.items()}, {})
            names = list(dict.fromkeys(self._compared.values()))
            results = run_reference(net, self._original_feeds(run), names, one_by_one=self.pair.is_cut)
            runs.append(replace(run, reference={name: results[origin] for name, origin in self._compared.items()}))
        return runs

    def runs(self, mode: str) -> Iterable[Run]:
        """Return all runs, or only runs on ordinary inputs if weights are rounded."""
        self._runner = self._load(self._files, exact=self._exact and mode == "fp32", mode=mode)
        self._tolerance = in_mode(mode, self._allowed)
        if self._tolerance.relative <= self._usual.relative:
            return self.all_runs
        return [run for run in self.all_runs if run.draw is None or not run.draw.is_unusual]

    def compare(self, run: Run, mode: str) -> Sequence[OutputReport]:
        """Run the net; if it is wrong in 16 bits, run the original in the same mode too."""
        tolerance = self.options.allowed(self._tolerance)
        feeds = {self._names[name]: array for name, array in run.feeds.items()}
        names = {name: self._names[name] for name in (*self._compared, *self.boxes)}
        reports, results = compare_outputs(self._runner, feeds, run.reference, names, tolerance)
        if self.boxes:
            reports = self._with_boxes(reports, results, run, tolerance)
        if mode == "fp32" or self.pair.is_cut or all(report.status == "ok" for report in reports):
            return reports
        original = self._load(self.pair.source, exact=False, mode=mode)
        before, _ = compare_outputs(original, self._original_feeds(run), run.reference, self._compared, tolerance)
        texts = {row.name: f" (before it was optimised: {row.message})" for row in before if row.message}
        return [
            row if row.status == "ok" else replace(row, message=row.message + texts.get(row.name, ""))
            for row in reports
        ]

    def _with_boxes(
        self, reports: Sequence[OutputReport], results: Results, run: Run, tolerance: Tolerance
    ) -> tuple[OutputReport, ...]:
        """Return the reports of all outputs, with boxes; `results` are the new net's."""
        names = self._names
        inputs = [report for report in reports if report.name in self._detector_inputs]
        wrong = [replace(r, message=f"'{r.name}', which decides the boxes: {r.message}") for r in inputs if r.message]
        boxes = [replace(row, name=name, blob=names[name]) for row in wrong[:1] for name in self.boxes]
        if not wrong:
            blobs = {origin: results[names[name]] for name, origin in self._detector_inputs.items()}
            arrays = {origin: array for origin, array in blobs.items() if not isinstance(array, Failure)}
            original = self._load(self.pair.source, exact=self._exact, worker=self._second)
            before = original.extract({**self._original_feeds(run), **arrays}, list(self.boxes.values()))
            boxes = [
                _judge(name, names[name], results[names[name]], before[origin], tolerance)
                for name, origin in self.boxes.items()
            ]
        boxes = [replace(merged([report, *inputs]), name=report.name, blob=report.blob) for report in boxes]
        return (*(report for report in reports if report not in inputs), *boxes)


def run_reference(
    runner: NcnnRunner, feeds: Mapping[str, Array], outputs: Sequence[str], *, one_by_one: bool
) -> dict[str, Array]:
    """Return the original net's outputs, or raise RunError; inner blobs need a run for each (`one_by_one`)."""
    try:
        if one_by_one:
            return {name: runner.run(feeds, [name])[name] for name in outputs}
        results = runner.extract(feeds, outputs)
    except CrashError as error:
        raise CrashError(f"the net crashes ncnn before any optimisation: {error}") from error
    except RunError as error:
        raise RunError(f"ncnn cannot run the original net: {error}") from error
    if failures := {name: result for name, result in results.items() if isinstance(result, Failure)}:
        lines = "\n".join(f"  {name}: {reason}" for name, reason in failures.items())
        kind = CrashError if any(failure.crashed for failure in failures.values()) else RunError
        raise kind(f"ncnn cannot compute these outputs of the net as it is, before anything is optimised:\n{lines}")
    return {name: result for name, result in results.items() if not isinstance(result, Failure)}


def compare_outputs(
    runner: NcnnRunner,
    feeds: Mapping[str, Array],
    reference: Mapping[str, Array],
    names: Mapping[str, str],
    tolerance: Tolerance,
) -> tuple[Sequence[OutputReport], Results]:
    """Compare a net's outputs with its reference; return also all its blobs of `names`, by output."""
    try:
        results = runner.extract(feeds, list(names.values()))
    except RunError as error:
        return failed(reference, error), {}
    pairs = ((name, names[name], expected) for name, expected in reference.items())
    return [_judge(name, blob, results[blob], expected, tolerance) for name, blob, expected in pairs], results


def _judge(
    name: str, blob: str, result: Array | Failure, reference: Array | Failure, tolerance: Tolerance
) -> OutputReport:
    if isinstance(reference, Failure):  # only boxes may be missing in the original
        if isinstance(result, Failure) and result.is_empty and reference.is_empty:
            return OutputReport(name, blob, "ok", NO_BOXES, rule="equal")
        return OutputReport(name, blob, "missing", f"the original net does not give it: {reference.reason}")
    if isinstance(result, Failure):
        return missing(name, blob, result)
    if result.shape != reference.shape:
        return OutputReport(name, blob, "shape", f"its shape is {list(result.shape)}, before {list(reference.shape)}")
    if reference.size and np.isin(reference.view(np.int32), _NAN).all() and np.isnan(result).all():
        return OutputReport(name, blob, "unproven", UNPROVEN_NET, rule="unproven")
    if result.tobytes() == reference.tobytes():  # also for integers in the bits of floats
        return OutputReport(name, blob, "ok", "", 0.0, 0.0, 1.0, rule="equal", allowed=0.0)
    return within(tolerance, result, reference).report(name, blob)
