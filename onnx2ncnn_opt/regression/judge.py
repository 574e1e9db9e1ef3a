"""The judgement of one net against its model and its baseline, in a child process: a crash does not stop the others."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import packages_distributions, version
from math import inf, isinf
from pathlib import Path
from typing import Any

import numpy as np

from onnx2ncnn_opt import entry_points
from onnx2ncnn_opt.api.bisect import bisect
from onnx2ncnn_opt.api.diff import diff_graphs
from onnx2ncnn_opt.api.report import make_report
from onnx2ncnn_opt.api.verify import manifest_beside
from onnx2ncnn_opt.errors import Error, UsageError, VerificationError
from onnx2ncnn_opt.ir.dim import texts
from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.manifest import Entry, file_hash, tail_path
from onnx2ncnn_opt.onnx.edit.append import converted_model
from onnx2ncnn_opt.onnx.read.binding import TensorInfo
from onnx2ncnn_opt.outputs import OutputReport
from onnx2ncnn_opt.param.files import read_net
from onnx2ncnn_opt.quantization.data import Samples
from onnx2ncnn_opt.regression.baseline import AGAIN, BaselineFiles, Example, Record
from onnx2ncnn_opt.regression.config import Model
from onnx2ncnn_opt.regression.meter import ATTEMPTS, Meter, Timed
from onnx2ncnn_opt.regression.result import Changes, Measurement, ModelResult
from onnx2ncnn_opt.report.record import NetRecord
from onnx2ncnn_opt.runtime.base import Array, require
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.runtime.targets import find_target
from onnx2ncnn_opt.system import command_line
from onnx2ncnn_opt.verdict.errors import compare, in_mode
from onnx2ncnn_opt.verification.decode import Decoder
from onnx2ncnn_opt.verification.model import net_feeds, verify_net
from onnx2ncnn_opt.verification.model_accuracy import Rounding, tolerance_within
from onnx2ncnn_opt.verification.model_runs import any_feeds, load_converted
from onnx2ncnn_opt.verification.options import Verification
from onnx2ncnn_opt.verification.order import NetOrder
from onnx2ncnn_opt.verification.sqnr import agreement
from onnx2ncnn_opt.version import __version__

_MAX_DECIBELS = 200.0  # more than float32 can have
_ANY_ERROR = 1e30  # relative
MEMORY_MARGIN = 1 << 20  # bytes above the baseline that always pass


@dataclass(frozen=True)
class Request:
    """A model, its net, the converter's version, and the files of the baseline.

    With `record` the baseline is written if the net is right. `next` is the command to study a wrong net.
    """

    model: Model
    param: Path
    bin: Path
    stored: BaselineFiles
    record: bool
    converter: str
    next: tuple[str, ...]


def judge(request: Request) -> ModelResult:
    """Return the result for one net; a net that cannot be judged is a failure with the reason."""
    judgement = _Judgement(request)
    try:
        judgement.judge()
    except Error as error:
        judgement.fail(judgement.step, str(error), error.exit_code)
    finally:
        judgement.worker.close()
    measurements, notes = tuple(judgement.measurements), tuple(dict.fromkeys(judgement.notes))
    return replace(judgement.result, exit_code=judgement.exit_code, measurements=measurements, notes=notes)


def look(request: Request) -> NetRecord:
    """Return the record of a report about the net of a request."""
    model, judgement = request.model, _Judgement(request)
    options = replace(judgement.options, modes=model.modes, **judgement.inputs()[0])
    return make_report(model.path, request.param, request.bin, options).records[0]


class _Judgement:
    """The judgement of one model: its results so far; `step` names the stage in errors."""

    def __init__(self, request: Request) -> None:
        self.request, self.model, self.stored = request, request.model, request.stored
        self.step, self.exit_code = "device", 0
        self.result = ModelResult(self.model.name, 0)  # without exit code, measurements and notes
        self.measurements: list[Measurement] = []
        self.notes: list[str] = []
        self.net = request.param, request.bin
        self.worker = NcnnWorker()
        self.limits = self.model.thresholds
        if request.record:  # a new baseline is not compared with the old one
            self.limits = replace(self.limits, layers=inf, size=inf, latency=inf, memory=inf)
        self.options = Verification(
            shapes=self.model.shapes, values=self.model.values, timeout=self.model.timeout, on=self.model.on
        )

    def fail(self, what: str, message: str, exit_code: int = 3, **numbers: Any) -> None:
        self.measurements.append(Measurement(what, "failed", message=message, **numbers))
        self.exit_code = max(self.exit_code, exit_code)

    def add(self, what: str, wrong: str, **numbers: Any) -> None:
        """Record a measurement; it passes if `wrong` is empty."""
        if wrong:
            self.fail(what, wrong, **numbers)
        else:
            self.measurements.append(Measurement(what, "ok", **numbers))

    def skip(self, reason: str, *what: str) -> None:
        self.measurements += [Measurement(name, "not measured", message=reason) for name in what]

    def judge(self) -> None:
        """Verify and measure the net; write the baseline if the request says so and the net is right."""
        self.start()
        self.step = "baseline"
        before = self.baseline()
        self.step = "model"
        self.load()
        examples = self.examples(before) if before and not self.request.record else []
        self.step = "accuracy"
        accuracy = self.accuracy(examples, before)
        self.step = "net"
        graph = read_net(*self.net, entry_points.layer_types()).graph
        size = sum(path.stat().st_size for path in self.net)
        self.cost("layers", len(graph), before.layers if before else None)
        self.cost("size", size, before.size if before else None)
        is_wrong = any(m.status == "failed" and m.what not in ("layers", "size") for m in self.measurements)
        is_same = before is not None and self.is_same(before)
        if before:
            self.result = replace(self.result, changes=Changes() if is_same else self.compared(graph))
        costs: dict[str, Any] = {}
        if is_wrong:
            self.skip("the model fails already", "latency", "memory")
        elif before is None and not self.request.record:
            self.skip("there is no baseline", "latency", "memory")
        elif is_same and not self.request.record:
            self.skip("the files are those of the baseline", "latency", "memory")
        else:
            costs = self.run(examples, with_baseline=before is not None and not is_same)
        if self.request.record and not is_wrong:
            self.step = "baseline"
            self.write({"layers": len(graph), "size": size, "accuracy": accuracy, **costs}, graph)

    def start(self) -> None:
        """Start ncnn on the device, and note the versions."""
        target = find_target(self.model.on)
        self.worker = NcnnWorker(target)
        self.modes = self.model.modes or target.modes
        greeting = self.worker.start().greeting
        require("onnxruntime")
        self.checked = self.worker.checked(self.modes)
        self.versions = {
            "converter": self.request.converter,
            "onnx2ncnn-opt": __version__,
            "ncnn": greeting["ncnn"],
            "onnxruntime": version(packages_distributions()["onnxruntime"][0]),  # or onnxruntime-gpu
        }
        self.result = replace(self.result, checked=self.checked, versions=self.versions)
        self.meter = Meter(target, self.modes[0], self.model.timeout)

    def load(self) -> None:
        """Load the model as it was converted, by the manifest if there is one."""
        self.manifest, note = manifest_beside(self.request.param, self.model.path)
        self.source = converted_model(self.model.path, self.manifest)
        self.manifest = self.manifest and self.manifest.before_boxes
        self.notes += [note] if note else []
        outputs = [entry.name for entry in self.manifest.model_outputs] if self.manifest and self.manifest.tail else ()
        sizes: dict[str, Any] = {"shapes": self.model.shapes, "values": self.model.values}
        self.loaded = load_converted(self.source, self.manifest, outputs=outputs, **sizes)
        self.cut: dict[str, Any] = {"values": self.loaded.values, "outputs": self.loaded.cut}
        self.tolerance = tolerance_within(self.loaded)

    def baseline(self) -> Record | None:
        try:
            record = self.stored.read()
        except UsageError as error:
            if not self.request.record:
                raise
            self.notes.append(f"replaced: {error}")
            return None
        if record is None:
            if self.stored.folder.is_dir() and not self.request.record:
                self.fail("baseline", f"{self.stored.folder} has none for this model; {AGAIN}", 2)
            return None
        if not self.request.record:
            now, old = {**self.versions, "run on": self.checked}, {**record.versions, "run on": record.checked}
            changed = (what for what in now if old.get(what) != now[what])
            self.notes += [f"{what}: {now[what] or 'unknown'}; the baseline: {old[what]}" for what in changed]
        return record

    def examples(self, before: Record) -> list[Example]:
        """Return the baseline's inputs and outputs; record a failure if today's ONNX Runtime differs."""
        if file_hash(self.model.path) != before.model:
            self.fail("model", f"{self.model.path.name} is not the file of the baseline; {AGAIN}", 2)
            return []
        runner = OrtRunner(self.source, threads=None, timeout=self.model.timeout, **self.cut)
        rounding = Rounding(self.source, **self.cut)
        errors, wrong = [0.0], ""
        examples = self.stored.examples(before)
        for inputs, outputs in examples:
            today, spread = runner.run(inputs), None
            for name, stored in outputs.items():
                if name not in today or today[name].shape != stored.shape:
                    wrong = wrong or f"there is no output '{name}' of shape {list(stored.shape)}"
                    continue
                difference = compare(today[name], stored, self.tolerance)
                if not difference.ok:
                    spread = spread or rounding.spread(inputs, today)
                    difference = compare(today[name], stored, self.tolerance, spread[name])
                errors.append(difference.max_rel or 0.0)
                if not difference.ok:
                    wrong = wrong or f"output '{name}': {difference.problem}"
        hint = f"ONNX Runtime does not compute what the baseline has, so it or the model's weights changed: {wrong}"
        self.add("stored outputs", hint if wrong else "", measured=max(errors), limit=self.tolerance.relative)
        return examples

    def inputs(self) -> list[dict[str, Any]]:
        """Return the inputs of each run, as arguments of `Verification`."""
        return [{"feeds": path} for path in self.model.inputs] or [{"seed": seed} for seed in self.model.seeds]

    def accuracy(self, examples: Sequence[Example], before: Record | None) -> dict[str, float | None]:
        """Verify the net in each mode; return the largest relative error in each."""
        limits = self.limits
        if (limits.sqnr, limits.top1) != (None, None):
            self.agreement()
            if not limits.accuracy:
                self.skip("sqnr and top1 judge the outputs", "accuracy")
                return {}
        by_mode: dict[str, list[OutputReport]] = {mode: [] for mode in self.modes}
        for inputs in (*self.inputs(), *({"feeds": example.inputs} for example in examples)):
            for modes, rtol in self.tolerances():
                options = replace(self.options, **inputs, modes=modes, rtol=rtol)
                report = verify_net(self.source, *self.net, options, manifest=self.manifest, worker=self.worker)
                if any(output.status in ("mismatch", "nan") for output in report.outputs):
                    self.notes += self.locate(options)
                self.notes += report.notes
                for output in report.outputs:
                    by_mode[output.mode].append(output)
        accuracy = {}
        for mode, outputs in by_mode.items():
            wrong = {o.name: f"output '{o.name}': {o.status}: {o.message}" for o in outputs if o.status != "ok"}
            measured = max((output.max_rel for output in outputs if output.max_rel is not None), default=None)
            limit = self.limits.accuracy.get(mode)
            if not wrong and limit is not None and measured is not None and measured > limit:
                wrong = {"": "more than the threshold"}
            numbers = {"measured": measured, "limit": limit, "baseline": before and before.accuracy.get(mode)}
            self.add("accuracy", "; ".join(wrong.values()), mode=mode, **numbers)
            accuracy[mode] = measured
        return accuracy

    def agreement(self) -> None:
        """Compare the net with the model over the data, in each mode."""
        entries = self.manifest.model_inputs if self.manifest else [_entry(info) for info in self.loaded.inputs]
        images = {entry.name: entry.image for entry in entries if entry.image}
        samples: Iterable[Mapping[str, Array]]
        if self.model.data is None:
            samples = [any_feeds(self.source, self.loaded, self.manifest, **inputs) for inputs in self.inputs()]
        else:
            samples = (
                {
                    name: images[name].normalized(array).astype(np.float32) if name in images else array
                    for name, array in sample.items()
                }
                for sample in Samples(self.model.data, entries)
            )
        model = OrtRunner(self.source, threads=None, timeout=self.model.timeout, **self.cut)
        runs = [(arrays, model.run_any(arrays)) for arrays in samples]
        order = NetOrder.of(self.source, self.manifest, self.loaded)
        for mode in self.modes:
            runner = NcnnRunner(*self.net, mode=mode, timeout=self.model.timeout, worker=self.worker)
            result = agreement(runner, runs, self.manifest, order)
            decibels = min(max(result.decibels, -_MAX_DECIBELS), _MAX_DECIBELS)
            for what, measured in (("sqnr", decibels), ("top1", result.top1)):
                limit = getattr(self.limits, what)
                if limit is not None:
                    wrong = "" if measured is not None and measured >= limit else f"over {len(runs)} samples"
                    self.add(what, wrong, measured=measured, limit=limit, mode=mode)

    def locate(self, options: Verification) -> list[str]:
        """Return a note with the first wrong layer of the net, and the next command; empty if there is none."""
        located = bisect(self.model.path, *self.net, options, manifest=self.manifest).located
        if located is None:
            return []
        layer = f"{located.layer.type} '{located.layer.name}'"
        return [f"the first wrong layer is {layer}, in {located.mode}; next: {command_line(*self.request.next)}"]

    def tolerances(self) -> Iterator[tuple[Sequence[str], float | None]]:
        """Yield modes to verify together, and a tolerance if a threshold allows more than `verify` does."""
        limits = self.limits.accuracy
        wider = [mode for mode in self.modes if limits.get(mode, 0.0) > in_mode(mode, self.tolerance).relative]
        if others := [mode for mode in self.modes if mode not in wider]:
            yield others, None
        for mode in wider:
            yield [mode], limits[mode]

    def cost(self, what: str, measured: float, baseline: float | None, margin: float = 0.0) -> None:
        """Record a cost, and compare it with the baseline's."""
        factor, limit = getattr(self.limits, what), self.limit(what, baseline, margin)
        wrong = "" if measured <= limit else f"at most {factor:g} times the baseline's is allowed"
        self.add(what, wrong, measured=measured, limit=None if isinf(limit) else limit, baseline=baseline)

    def limit(self, what: str, baseline: float | None, margin: float = 0.0) -> float:
        """Return the highest cost that the threshold allows, at least `margin` above the baseline's."""
        return inf if baseline is None else max(baseline * getattr(self.limits, what), baseline + margin)

    def is_same(self, before: Record) -> bool:
        """Return True if the net is the baseline's, byte for byte."""
        names = self.stored.net.param.name, self.stored.net.bin.name
        return all(file_hash(path) == before.files.get(name) for path, name in zip(self.net, names, strict=True))

    def compared(self, graph: Graph) -> Changes:
        """Return the changes from the baseline's net."""
        old = self.stored.net
        diff = diff_graphs(read_net(old.param, old.bin, entry_points.layer_types()).graph, graph)
        return Changes(
            files=True,
            gone=dict(Counter(layer.type for layer in diff.gone)),
            added=dict(Counter(layer.type for layer in diff.added)),
            changed=dict(Counter(change.after.type for change in diff.changed)),
        )

    def run(self, examples: Sequence[Example], *, with_baseline: bool) -> dict[str, Any]:
        """Measure latency and memory of this net and the baseline's; return the numbers for a record."""
        if self.worker.target.patience > 1:
            self.skip("an emulator cannot measure it", "latency", "memory")
            return {}
        self.step = "latency"
        net, old = self.timed(*self.net, examples), None
        if with_baseline:
            try:
                old = self.timed(self.stored.net.param, self.stored.net.bin, examples)
            except VerificationError as error:
                if not self.request.record:
                    raise
                self.notes.append(f"latency: not compared with the net of the old baseline: {error}")
        record: dict[str, Any] = {}
        if isinf(self.model.thresholds.latency):
            self.skip("there is no limit", "latency")
        else:
            latency = self.meter.latency(net, old or net, self.limits.latency)
            record = {"milliseconds": latency.net, "ratio": latency.ratio if old else None}
            self.cost("latency", latency.other * latency.ratio, latency.other if old else None)
            if net.prompt is not None:
                prompt = replace(net, feeds=net.prompt)
                record["prefill"] = self.meter.latency(prompt, prompt, self.limits.latency).net
        self.step = "memory"
        memory, other = self.meter.memory(net), self.meter.memory(old) if old else None
        if memory is None or self.worker.target.vulkan:
            self.skip("the system does not report it", "memory")
            return record
        for _ in range(ATTEMPTS - 1):
            if memory <= self.limit("memory", other, MEMORY_MARGIN):
                break
            memory = min(memory, self.meter.memory(net) or memory)
        self.cost("memory", memory, other, MEMORY_MARGIN)
        return {**record, "memory": memory}

    def timed(self, param: Path, bin: Path, examples: Sequence[Example]) -> Timed:
        """Return a net with feeds for the first inputs."""
        inputs = {"feeds": examples[0].inputs} if examples else self.inputs()[0]
        manifest, _ = manifest_beside(param, self.model.path)
        options = replace(self.options, **inputs, rtol=_ANY_ERROR, on=None)  # the net was verified before
        feeds = net_feeds(self.source, param, bin, options, manifest=manifest)
        try:
            if manifest is not None and manifest.caches:
                prompt, token = Decoder(self.loaded, manifest, self.options.seed).steps()
                return Timed(param, bin, token, [entry.blob for entry in manifest.read], prompt)
        except UsageError:  # the model runs single steps only
            pass
        return Timed(param, bin, feeds, self.meter.runner(param, bin, self.worker).output_names())

    def write(self, measured: dict[str, Any], graph: Graph) -> None:
        """Record the net, its costs, and examples of the model's results."""
        runner = OrtRunner(self.source, threads=os.cpu_count() or 1, timeout=self.model.timeout, **self.cut)
        examples = []
        for inputs in self.inputs():
            feeds: dict[str, Array] = dict(any_feeds(self.source, self.loaded, self.manifest, **inputs))
            examples.append(Example(feeds, runner.run(feeds)))
        record = {
            "model": file_hash(self.model.path),
            "converter": self.model.convert,
            "versions": self.versions,
            "checked": self.checked,
            "types": dict(Counter(layer.type for layer in graph).most_common()),
            **measured,
        }
        param = self.request.param
        further = [param.with_suffix(".json"), tail_path(param)] if self.manifest else []
        self.stored.write(record, *self.net, further, examples)
        self.result = replace(self.result, recorded=True)


def _entry(info: TensorInfo) -> Entry:
    """Return a manifest's entry for an input of a model."""
    return Entry(info.name, info.name, texts(info.shape or ()), info.dtype.numpy().name, None)
