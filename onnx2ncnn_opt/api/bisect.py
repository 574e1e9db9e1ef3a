"""Where a net goes wrong: the first layer whose output leaves the budget, or the rewrite that broke it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from onnx2ncnn_opt import entry_points
from onnx2ncnn_opt.api.convert import Files, convert, reconverted
from onnx2ncnn_opt.api.diff import NetDiff, diff_graphs
from onnx2ncnn_opt.api.minimal_pair import Counterpart, Pair, PairFiles, Part, write_pair
from onnx2ncnn_opt.api.verify import PathLike, manifest_for
from onnx2ncnn_opt.errors import ModelError, RunError, UsageError, VerificationError, check_options
from onnx2ncnn_opt.ir.correspondence import corresponding
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.weight import Encoding
from onnx2ncnn_opt.manifest import Manifest
from onnx2ncnn_opt.onnx.read.exported import exported, reference
from onnx2ncnn_opt.onnx.read.given import GivenShapes
from onnx2ncnn_opt.onnx.read.load import LoadedModel
from onnx2ncnn_opt.outputs import OutputReport, Status
from onnx2ncnn_opt.param.files import bin_beside, read_net
from onnx2ncnn_opt.param.names import clean_name
from onnx2ncnn_opt.param.storage import ROUNDING
from onnx2ncnn_opt.rewrite.events import Applied, LayerRef, refs
from onnx2ncnn_opt.runtime.base import Array, Failure, Fetch
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.runtime.slots import Slot, model_feeds
from onnx2ncnn_opt.runtime.targets import find_target
from onnx2ncnn_opt.verification.alignment import aligned, natural, nearest, squeezed
from onnx2ncnn_opt.verification.blobs import UNKNOWN, Verdict, as_verdict, by_size, judge, model_values, same_numbers
from onnx2ncnn_opt.verification.compare import UNKNOWN_ROUNDING, Tolerance, compare, in_mode, with_rounding
from onnx2ncnn_opt.verification.comparison import tolerance_of
from onnx2ncnn_opt.verification.inputs import Feeds, Wanted
from onnx2ncnn_opt.verification.match import input_slots
from onnx2ncnn_opt.verification.runs import load_converted
from onnx2ncnn_opt.verification.verify import VerifyReport, verify_net

# Equal layers give equal bits in ncnn's plain kernels; this is for weights that another version folded otherwise.
_SAME_KERNELS = Tolerance(relative=1e-5, absolute=1e-7)


# What converters fuse into the layer before it, and the layers that it becomes where they do not.
_ACTIVATIONS = frozenset(
    ("Clip", "Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "Relu", "Sigmoid", "Tanh")
)
_FUNCTIONS = frozenset(("Clip", "ELU", "GELU", "HardSigmoid", "HardSwish", "Mish", "ReLU", "Sigmoid", "Swish", "TanH"))


@dataclass(frozen=True)
class Read:
    """An input of a layer: the blob, the layer that gives it, its shape as ncnn has it, and whether it is right.

    `status` is "right", "wrong", or "unknown" where the model has no such value; `value` is the model's name for it.
    """

    blob: str
    layer: LayerRef
    shape: tuple[int, ...]
    status: str
    value: str | None


@dataclass(frozen=True)
class Located:
    """The first layer whose output leaves the budget, on the inputs and in the mode in which the net was found wrong.

    `blob` is that output, and `message` says what is wrong about it. `origin` are the ONNX nodes that the layer comes
    from, as far as that is known, `value` is what the model calls the output. `suspects` are the layers that may be to
    blame, in the order of the net: one, or several where the model has no value to hold against what is between them.
    `arrays` are the layer's inputs, by blob.
    """

    layer: LayerRef
    blob: str
    message: str
    mode: str
    value: str | None
    origin: tuple[str, ...]
    inputs: tuple[Read, ...]
    suspects: tuple[LayerRef, ...]
    arrays: Mapping[str, Array] = field(repr=False, compare=False)


@dataclass(frozen=True)
class Bisection:
    """What became of a net: `report` is that of `verify`, `located` the layer, None where the net is right.

    It is None as well where a wrong net has no first wrong layer, because it does not load. `difference` says how the
    net differs from what this version of the package makes of the model, if it was made by this package. `pair` are the
    files that were asked for, None where there is no layer, or no part of the net is wrong alone.
    """

    report: VerifyReport
    located: Located | None
    difference: NetDiff | None
    pair: Pair | None = None


def bisect(
    model: Any,
    param: PathLike,
    bin: PathLike | None = None,
    *,
    manifest: Manifest | PathLike | None = None,
    feeds: Feeds | None = None,
    shapes: GivenShapes | None = None,
    values: Mapping[str, Any] | None = None,
    seed: int = 0,
    wanted: Wanted | None = None,
    timeout: float = 300.0,
    on: str | None = None,
    modes: Sequence[str] = (),
    write: Path | None = None,
    step: Callable[[str], None] = lambda text: None,
) -> Bisection:
    """Verify a net as `verify` does, and find the first layer that is wrong where it is; arguments are the same.

    1. A net of this package, which its manifest tells, is held against a new conversion with the same options, layer by
       layer; if that is right itself.
    2. Any other is held against the values inside the model: those of the blobs' names, or those with the same numbers,
       whatever the order of their axes.

    The first wrong layer is the first one from which a way of wrong blobs leads to a wrong output. `write` is a folder
    for the smallest part of the model and the net around it that is wrong as well, see `minimal_pair`.
    """
    check_options(param=param, bin=bin, step=step)
    source, param, bin = reference(exported(model)), Path(param), Path(bin or bin_beside(param))
    known, note = manifest_for(model, param, manifest)
    try:
        report = verify_net(
            source,
            param,
            bin,
            manifest=known,
            feeds=feeds,
            shapes=shapes,
            values=values,
            seed=seed,
            wanted=wanted,
            timeout=timeout,
            on=on,
            modes=modes,
            step=step,
        )
    except VerificationError as error:
        report, unfed = _not_fed(str(error), known, param, bin)
        return Bisection(report, unfed, None)
    if note:
        report = replace(report, notes=(note, *report.notes))
    if report.ok:
        return Bisection(report, None, None)
    net = read_net(param, bin, entry_points.layer_types())
    graph = net.graph
    with tempfile.TemporaryDirectory(prefix="onnx2ncnn-opt-") as folder:
        step("converting the model anew")
        fresh = _converted(source, known, Path(folder)) if known else None
        difference = None
        if fresh:
            for mine, theirs in corresponding(graph, fresh.graph).items():  # masks follow from a run, not from passes
                theirs.params["featmask"] = mine["featmask"]
            difference = diff_graphs(fresh.graph, graph, names=("a new conversion", os.fspath(param)))
        if report.wrong is None:
            return Bisection(report, None, difference)
        loaded = load_converted(source, known, shapes=shapes, values=values)
        with NcnnWorker(find_target(on)) as worker, NcnnWorker() as here:
            search = _Search(source, loaded, param, bin, graph, known, report, timeout, worker, here, step)
            located = search.unsplit(net.unsplit)
            found = None if located else search.found(fresh)
            if located is None:
                located = found.located if found else search.missing(fresh)
            pair = search.pair(found, write, on) if found and write else None
    if located is not None and difference is not None:
        changed = {*difference.added, *(change.after for change in difference.changed)}
        suspects = tuple(ref for ref in located.suspects if ref in changed)
        located = replace(located, suspects=suspects or located.suspects)
    return Bisection(report, located, difference, pair)


def _not_fed(message: str, manifest: Manifest | None, param: Path, bin: Path) -> tuple[VerifyReport, Located | None]:
    """The report of a net with an input that nothing is known for, and its Input layer."""
    graph = read_net(param, bin, entry_points.layer_types()).graph
    known = {entry.blob for entry in manifest.inputs} if manifest else set()
    names = [entry.name for entry in manifest.outputs] if manifest else [blob.name for blob in graph.outputs]
    report = VerifyReport(tuple(OutputReport(name, None, "refused", message) for name in names), None)
    unknown = next((blob for blob in graph.inputs if blob.name not in known), None)
    if unknown is None or unknown.producer is None:
        return report, None
    layer = refs((unknown.producer,))[0]
    return report, Located(layer, unknown.name, message, "fp32", None, (), (), (layer,), {})


@dataclass(frozen=True)
class _Fresh:
    """The model converted anew: the files, their graph, and the ONNX nodes that its layers come from."""

    files: Files
    graph: Graph
    manifest: Manifest
    origins: Mapping[str, tuple[str, ...]]


def _converted(model: Path | bytes, manifest: Manifest, folder: Path) -> _Fresh | None:
    """A new conversion with the passes that the manifest names; None where it would not be the same net."""
    conversion = reconverted(model, manifest)
    if conversion is None:
        return None
    files = conversion.save(folder / "fresh")
    origins = {clean_name(layer.name): layer.origin for layer in conversion.graph}
    graph = read_net(files.param, files.bin, entry_points.layer_types()).graph
    return _Fresh(files, graph, conversion.manifest(), origins)


_RIGHT = Verdict("right")
_Results = Mapping[str, Array | Failure]


@dataclass(frozen=True)
class _Found:
    """What was located, and how: `end` is the first blob that is known to be wrong, or what leads to it.

    `expected` is what a new conversion has for blobs.
    """

    located: Located
    end: Blob
    leading: Sequence[Layer]
    verdicts: Mapping[Blob, Verdict]
    results: _Results
    way: Sequence[Slot]
    expected: Mapping[Blob, Array]


@dataclass
class _Search:
    model: Path | bytes
    loaded: LoadedModel
    param: Path
    bin: Path
    graph: Graph
    manifest: Manifest | None
    report: VerifyReport
    timeout: float
    worker: NcnnWorker
    here: NcnnWorker
    step: Callable[[str], None]

    def __post_init__(self) -> None:
        assert self.report.wrong is not None
        self.mode, self.feeds = self.report.wrong
        wrong = [o for o in self.report.outputs if o.mode == self.mode and o.status not in ("ok", "unproven")]
        self.wrong = {output.blob: output.message for output in wrong if output.blob}
        self.names = {output.blob: output.name for output in self.report.outputs if output.blob}
        # In 16 bits blobs may be off by more than outputs may be; that is not where an infinite one comes from.
        self.is_special = self.mode != "fp32" and all(output.status == "nan" for output in wrong)
        # A net that dies as a whole has no output that is to blame.
        if any(output.blob is None and output.status != "missing" for output in wrong):
            self.wrong = {blob.name: "" for blob in self.graph.outputs} | self.wrong

    def found(self, fresh: _Fresh | None) -> _Found | None:
        """The layer, found in the first way that finds one."""
        for exact in (True, False) if self.mode == "fp32" else (False,):
            if fresh is not None and (found := self.against_fresh(fresh, exact=exact)):
                return found
        for exact in (True, False) if self.mode == "fp32" else (False,):
            if found := self.against_values(exact=exact):
                return found
        return None

    def unsplit(self, blobs: Sequence[Blob]) -> Located | None:
        """The layer that finds a blob gone, because another one has read it; where outputs are missing."""
        failed = any(output.status in ("missing", "crashed", "refused") for output in self.report.outputs)
        blob = next((b for b in blobs if b.producer and b.producer.type != "MemoryData"), None)  # which runs again
        if blob is None or not failed:
            return None
        first, last = blob.users[0], blob.users[-1]
        message = f"it reads '{blob.name}', which '{first.name}' reads as well, and there is no Split between"
        return self.unread(last.outputs[0], message, None)

    def missing(self, fresh: _Fresh | None) -> Located | None:
        """The layer that should give an output which the net has not."""
        blobs = {blob.name: blob for layer in self.graph for blob in layer.outputs}
        lacking = next((o for o in self.report.outputs if o.status == "missing" and o.blob not in blobs), None)
        if lacking is None:
            return None
        if fresh is not None:
            return self.missing_in(fresh, lacking)
        tolerance = self.tolerance(exact=False)
        computed = [pair for _, results in self.ways(exact=False) for pair in results.items()]
        for name in self.before(lacking.name):
            if name not in self.values:
                continue
            value = self.values[name]
            for blob, result in computed:
                if isinstance(result, Failure) or result.size != value.size:
                    continue
                if aligned(result, value, tolerance)[0].ok:
                    what = "but its numbers here" if name == lacking.name else f"which the model makes of '{name}'"
                    return self.unread(blobs[blob], f"the net has no output '{lacking.name}', {what}", name)
        return None

    def before(self, name: str) -> Iterator[str]:
        """A value of the model, and those that it is made of, the nearest first."""
        makers = {value.name: node for node in self.loaded.graph for value in node.outputs}
        names = [name]
        for found in names:
            yield found
            reads = makers[found].inputs if found in makers else ()
            names += [v.name for v in reads if v is not None and v.name and v.name not in names]

    def missing_in(self, fresh: _Fresh, output: OutputReport) -> Located | None:
        """The layer of an output that a new conversion has."""
        blob = next((blob for blob in fresh.graph.outputs if blob.name == output.blob), None)
        if blob is None or blob.producer is None:
            return None
        twins = {theirs: mine for mine, theirs in corresponding(self.graph, fresh.graph).items()}
        origin = fresh.origins.get(blob.producer.name, ())
        twin = twins.get(blob.producer)
        if twin is not None:
            mine = twin.outputs[blob.producer.outputs.index(blob)]
            return self.unread(mine, f"the net has no blob '{blob.name}', which this should be", output.name, origin)
        return self.unread(blob, f"the net has no blob '{blob.name}': it lacks this layer", output.name, origin)

    def unread(self, blob: Blob, message: str, value: str | None, origin: tuple[str, ...] = ()) -> Located:
        """The layer of a blob, of which no numbers are known."""
        assert blob.producer is not None
        layer = refs((blob.producer,))[0]
        reads = tuple(
            Read(b.name, refs((b.producer,))[0], (), "right" if b.is_input else "unknown", None)
            for b in blob.producer.inputs
            if b.producer is not None
        )
        return Located(layer, blob.name, message, self.mode, value, origin, reads, (layer,), {})

    def against_fresh(self, fresh: _Fresh, *, exact: bool) -> _Found | None:
        """The first blob that is not that of the new conversion, in plain fp32 on this machine's CPU."""
        self.step("ncnn computes all blobs of the net, and of a new conversion")
        options: dict[str, Any] = {"timeout": self.timeout, "threads": None}
        right = NcnnRunner(fresh.files.param, fresh.files.bin, worker=self.here, exact=exact, **options)
        expected = self.blobs(right, fresh.graph, input_slots(fresh.manifest, self.feeds, right.input_names())[0])
        if not self.is_right(fresh, expected):
            return None
        way, results = next(self.ways(exact=exact), ((), None))
        if results is None:
            return None
        allowed = self.stored(_SAME_KERNELS if exact else tolerance_of(self.loaded))
        tolerance = in_mode(self.mode, allowed)
        pairs = corresponding(self.graph, fresh.graph)
        verdicts: dict[Blob, Verdict] = {}
        known_right: dict[Blob, Array] = {}
        for layer in self.graph:
            twin = pairs.get(layer)
            known = dict(zip(layer.outputs, twin.outputs, strict=False)) if twin else {}
            for blob in layer.outputs:
                other = known.get(blob)
                right_one = None if other is None else expected.get(other.name)
                if isinstance(right_one, np.ndarray):
                    known_right[blob] = right_one
                verdicts[blob] = _verdict(results.get(blob.name), right_one, tolerance, other.name if other else None)
        origins = {layer: fresh.origins.get(twin.name, ()) for layer, twin in pairs.items()}
        return self.first_wrong(verdicts, way, results, origins, known_right)

    def is_right(self, fresh: _Fresh, results: _Results) -> bool:
        """Whether the new conversion gives what the model gives, on these inputs."""
        runner = OrtRunner(self.model, values=self.loaded.values, timeout=self.timeout)
        expected = runner.run(self.feeds)
        for entry in fresh.manifest.outputs:
            result = results.get(entry.blob)
            if not isinstance(result, np.ndarray) or result.size != expected[entry.name].size:
                return False
            array = expected[entry.name]
            if entry.batch_axis:
                array = np.moveaxis(array, entry.batch_axis, 0)
            if not compare(result.reshape(array.shape), array, tolerance_of(self.loaded)).ok:
                return False
        return True

    def against_values(self, *, exact: bool) -> _Found | None:
        """The first blob that has no value of the model."""
        tolerance = self.tolerance(exact=exact)
        found: tuple[int, Mapping[Blob, Verdict], Sequence[Slot], _Results] | None = None
        for way, results in self.ways(exact=exact):
            verdicts = {
                blob: self.judged(blob, results.get(blob.name), tolerance)
                for layer in self.graph
                for blob in layer.outputs
            }
            right = sum(verdict.status == "right" for verdict in verdicts.values())
            if found is None or right > found[0]:
                found = right, verdicts, way, results
        if found is None:
            return None
        return self.first_wrong(*found[1:], {}, {})

    def tolerance(self, *, exact: bool) -> Tolerance:
        """What a blob may differ by from the model's value; `exact` kernels have no errors but those of rounding."""
        usual = tolerance_of(self.loaded)
        closer = replace(usual, relative=min(usual.relative, UNKNOWN_ROUNDING), slices=False) if exact else usual
        return in_mode(self.mode, self.stored(closer))

    def judged(self, blob: Blob, result: Array | Failure | None, tolerance: Tolerance) -> Verdict:
        """A blob against the value of its name, or else against those of as many elements."""
        if result is None:  # an input
            return _RIGHT
        name = self.names.get(blob.name, blob.name)
        # Two converters' numbers have nothing to do with each other.
        named = name if blob.name in self.names or not name.isdigit() else None
        verdict = judge(result, named, self.values, self.sizes, tolerance)
        if verdict.status == "right" and verdict.value == named and blob.name in self.wrong:
            return Verdict("wrong", self.wrong[blob.name], name)  # an output has to have the model's order of axes
        return verdict

    def pair(self, found: _Found, folder: Path, on: str | None) -> Pair | None:
        """The smallest part of the net that is wrong alone, written to a folder; None where there is none."""
        self.step("looking for the smallest part that is wrong")
        tolerance = replace(self.tolerance(exact=False), slices=False)
        ends = (blob for layer in (found.end.producer, *found.leading) if layer for blob in layer.outputs)
        order = {layer: number for number, layer in enumerate(self.graph)}
        for end in ends:
            if found.verdicts[end].status == "right" or end.producer is None or found.end.producer is None:
                continue
            counterpart = self.counterpart(end, found, tolerance)
            if counterpart is None or order[end.producer] < order[found.end.producer]:
                continue
            for is_whole in (False, True):
                starts = self.starts(end, found, tolerance, is_whole=is_whole)
                pair = self.written(folder, Part(starts, end.name, counterpart), on, found)
                if pair is not None:
                    return pair
            return None
        return None

    def starts(self, end: Blob, found: _Found, tolerance: Tolerance, *, is_whole: bool) -> dict[str, Counterpart]:
        """The blobs that a part begins with: the nearest right ones, or the net's inputs if it is to be `whole`."""
        starts: dict[str, Counterpart] = {}
        left, seen = [end], {end}
        while left:
            blob = left.pop()
            is_start = blob.is_input or (blob is not end and not is_whole and found.verdicts[blob].status == "right")
            if is_start and (counterpart := self.counterpart(blob, found, tolerance)):
                starts[blob.name] = counterpart
            elif blob.producer is not None:
                left += [before for before in blob.producer.inputs if before not in seen]
                seen.update(blob.producer.inputs)
        return starts

    def counterpart(self, blob: Blob, found: _Found, tolerance: Tolerance) -> Counterpart | None:
        """Where the model has the numbers that a blob should have; None where that is not known."""
        if blob.is_input:
            slot = next((slot for slot in found.way if slot.blob == blob.name), None)
            return None if slot is None else _fed_counterpart(slot, self.feeds[slot.name])
        verdict, result = found.verdicts[blob], found.results.get(blob.name)
        right = result if verdict.status == "right" else found.expected.get(blob)
        name = self.names.get(blob.name, verdict.value or blob.name)
        value = self.values.get(name)
        if blob.is_output and blob.name in self.names and value is not None and value.size:
            return self.output_counterpart(blob, value, result)
        if isinstance(right, np.ndarray):
            if right.dtype not in (np.float32, np.int32):
                return None
            numbers = _integers(right)
            if value is not None and value.size == right.size:
                difference, axes = aligned(numbers, value, tolerance)
                if difference.ok:
                    return Counterpart(name, axes, right.shape, numbers.dtype == np.int32)
            known = same_numbers(numbers, self.values, self.sizes, tolerance)
            return Counterpart(known[0], known[1], right.shape, numbers.dtype == np.int32) if known else None
        if value is None or not value.size:
            return None
        if isinstance(result, np.ndarray) and result.size == value.size:
            return Counterpart(name, nearest(result, value), result.shape, _integers(result).dtype == np.int32)
        return Counterpart(name, natural(value), _unbatched(value), False)

    def output_counterpart(self, blob: Blob, value: Array, result: Array | Failure | None) -> Counterpart:
        """Where the numbers of an output of the net are in the model's, which is to have the same order of axes."""
        entry = next((e for e in self.manifest.outputs if e.blob == blob.name), None) if self.manifest else None
        if entry is not None:
            counterpart = _fed_counterpart(Slot.of(entry), value)
            return replace(counterpart, integer=entry.element == "int32")
        name = self.names[blob.name]
        if isinstance(result, np.ndarray) and squeezed(result.shape) == squeezed(value.shape):
            return Counterpart(name, natural(value), result.shape, _integers(result).dtype == np.int32)
        return Counterpart(name, natural(value), _unbatched(value), False)

    def written(self, folder: Path, part: Part, on: str | None, found: _Found) -> Pair | None:
        """The files of a part, if it is wrong in the way in which the net is."""
        with tempfile.TemporaryDirectory(prefix="onnx2ncnn-opt-") as name:
            staged = PairFiles.at(Path(name))
            try:
                manifest, inputs, _, _ = write_pair(staged, self.model, self.param, self.bin, part, self.values)
                report = verify_net(
                    staged.model,
                    staged.param,
                    staged.bin,
                    manifest=manifest,
                    feeds=inputs,
                    on=on,
                    modes=(self.mode,),
                    timeout=self.timeout,
                    worker=self.worker,
                )
            except (ModelError, RunError, UsageError, VerificationError):
                return None
        result = found.results.get(part.end)
        kinds: tuple[Status, ...] = ("mismatch", "nan") if isinstance(result, np.ndarray) else ("missing", "crashed")
        if isinstance(result, np.ndarray) and result.shape != part.counterpart.shape:
            kinds = ("shape",)
        if report.outputs[0].status not in kinds:
            return None
        files = PairFiles.at(folder)
        _, _, nodes, layers = write_pair(files, self.model, self.param, self.bin, part, self.values)
        return Pair(files, nodes, layers, report)

    def ways(self, *, exact: bool) -> Iterator[tuple[Sequence[Slot], _Results]]:
        """All blobs of the net, for each way to feed it that it takes."""
        runner = NcnnRunner(
            self.param,
            self.bin,
            worker=self.worker,
            mode=self.mode,
            exact=exact,
            timeout=self.timeout,
            threads=None,
        )
        try:
            for way in input_slots(self.manifest, self.feeds, runner.input_names()):
                try:
                    yield way, self.blobs(runner, self.graph, way)
                except UsageError:  # an array that no Mat can hold
                    continue
        except RunError:
            return

    def blobs(self, runner: NcnnRunner, graph: Graph, way: Sequence[Slot]) -> _Results:
        """Every blob that a layer makes, with its batch in front; asked for in order, so that none is gone already."""
        fed = model_feeds(way, self.feeds)
        inputs = {blob.name for blob in graph.inputs}
        wanted = [blob.name for layer in graph for blob in layer.outputs if blob.name not in inputs]
        return runner.extract(fed, [Fetch(name, 0) for name in wanted])

    @cached_property
    def values(self) -> dict[str, Array]:
        """What ONNX Runtime computes for every node of the model's graph, and its inputs."""
        self.step("ONNX Runtime computes all values of the model")
        return model_values(self.model, self.feeds, self.loaded.values, self.timeout)

    @cached_property
    def sizes(self) -> dict[int, list[str]]:
        """The names of the model's values by their number of elements."""
        return by_size(self.values)

    def stored(self, tolerance: Tolerance) -> Tolerance:
        """The tolerance for a net with weights in 16 or 8 bits."""
        weights = [{w.encoding for _, w in layer.weights.stored_items()} for layer in self.graph if layer.weights]
        for encoding in (Encoding.INT8, Encoding.BF16, Encoding.FP16):
            if count := sum(encoding in found for found in weights):
                return with_rounding(ROUNDING.get(encoding, 0.5 / 127), count, tolerance)
        return tolerance

    def first_wrong(
        self,
        verdicts: Mapping[Blob, Verdict],
        way: Sequence[Slot],
        results: _Results,
        origins: Mapping[Layer, tuple[str, ...]],
        expected: Mapping[Blob, Array],
    ) -> _Found | None:
        """The first layer from which a way of blobs that are not right leads to a wrong output."""
        if self.is_special:
            verdicts = {blob: _only_special(verdict) for blob, verdict in verdicts.items()}
        leading: set[Layer] = set()
        for layer in reversed(self.graph):
            for blob in layer.outputs:
                ends = blob.is_output and blob.name in self.wrong
                if verdicts[blob].status != "right" and (ends or any(user in leading for user in blob.users)):
                    leading.add(layer)
        order = [layer for layer in self.graph if layer in leading and layer.type != "Input"]
        if not order:
            return None
        first = order[0]
        if not expected and (before := self.without_function(first, verdicts)):
            maker, message = before
            order.insert(0, maker)
            first = maker
            verdicts = {
                **verdicts,
                maker.outputs[0]: replace(verdicts[maker.outputs[0]], status="unknown", message=message),
            }
        # Without a twin, a blob in another order of axes is as right as its value.
        suspects = [] if expected else [b.producer for b in first.inputs if b.producer and b.producer.type == "Permute"]
        for layer in order:
            if layer is first or _depends(layer, suspects):
                suspects.append(layer)
            if layer in suspects and any(verdicts[blob].status == "wrong" for blob in layer.outputs):
                break
        blob, end = (
            next(blob for blob in layer.outputs if verdicts[blob].status != "right") for layer in (first, suspects[-1])
        )
        message = verdicts[blob].message
        if end is not blob and verdicts[end].status == "wrong":
            message += f"; '{end.name}' after it is {verdicts[end].message}"
        arrays = {b.name: a for b in first.inputs if isinstance(a := self.array(b, way, results), np.ndarray)}
        located = Located(
            layer=refs((first,))[0],
            blob=blob.name,
            message=message,
            mode=self.mode,
            value=verdicts[blob].value,
            origin=origins.get(first, ()),
            inputs=tuple(
                Read(
                    b.name,
                    refs((b.producer,))[0],
                    tuple(arrays[b.name].shape) if b.name in arrays else (),
                    "right" if b.is_input else verdicts[b].status,
                    b.name if b.is_input else verdicts[b].value,
                )
                for b in first.inputs
                if b.producer is not None
            ),
            suspects=refs(tuple(suspects)),
            arrays=arrays,
        )
        return _Found(located, end, order, verdicts, results, way, expected)

    def without_function(self, layer: Layer, verdicts: Mapping[Blob, Verdict]) -> tuple[Layer, str] | None:
        """What gives a layer the argument of a function instead of its result, as without a fused activation.

        The argument is a value of the model, and so a right one; but nothing in the net is the result. A layer of one
        input may be the function itself, and is to blame first.
        """
        known = {verdict.value for verdict in verdicts.values() if verdict.status == "right"}
        for blob in layer.inputs:
            value = verdicts[blob].value
            if (
                verdicts[blob].status != "right"
                or blob.producer is None
                or blob.is_input
                or len(blob.producer.outputs) > 1
            ):
                continue
            results = self.functions.get(value or "", [])
            if results and layer.type not in _FUNCTIONS and known.isdisjoint(results):
                return (
                    blob.producer,
                    f"it is '{value}' of the model, and nothing is '{results[0]}', which is made of that",
                )
        return None

    @cached_property
    def functions(self) -> dict[str, list[str]]:
        """The results of the functions of one value that read a value, where nothing else reads it."""
        found: dict[str, list[str]] = {}
        others: set[str] = set()
        for node in self.loaded.graph:
            names = [
                value.name for value in node.inputs if value is not None and value.const_value is None and value.name
            ]
            for name in names:
                if len(names) == 1 and len(node.outputs) == 1 and node.op_type in _ACTIVATIONS:
                    found.setdefault(name, []).append(node.outputs[0].name or "")
                else:
                    others.add(name)
        return {name: results for name, results in found.items() if name not in others}

    def array(self, blob: Blob, way: Sequence[Slot], results: _Results) -> Array | Failure | None:
        """What a blob held."""
        if not blob.is_input:
            return results.get(blob.name)
        return next((self.feeds[slot.name] for slot in way if slot.blob == blob.name), None)


def _depends(layer: Layer, suspects: Collection[Layer]) -> bool:
    return any(blob.producer in suspects for blob in layer.inputs)


def _verdict(
    result: Array | Failure | None, expected: Array | Failure | None, tolerance: Tolerance, value: str | None
) -> Verdict:
    if result is None:  # an input
        return _RIGHT
    if isinstance(result, Failure):
        return Verdict("wrong", result.reason, value)
    if not isinstance(expected, np.ndarray):
        return UNKNOWN
    if result.shape != expected.shape:
        return Verdict("wrong", f"its shape is {list(result.shape[1:])}, not {list(expected.shape[1:])}", value)
    if result.tobytes() == expected.tobytes():
        return Verdict("right", "", value)
    return as_verdict(compare(result, _integers(expected), tolerance), value)


def _only_special(verdict: Verdict) -> Verdict:
    """The verdict of a blob that only NaN and infinity make wrong."""
    is_finite = verdict.difference is not None and not verdict.difference.special
    return replace(verdict, status="right") if verdict.status == "wrong" and is_finite else verdict


def _unbatched(value: Array) -> tuple[int, ...]:
    """The shape of a blob of a value's numbers, with a batch of one in front."""
    return (1, *(squeezed(value.shape) or (1,)))


def _fed_counterpart(slot: Slot, array: Array) -> Counterpart:
    """Where the numbers of an input or output of the net are in the model's."""
    order = list(range(array.ndim))
    if slot.batch_axis is not None:
        order.insert(0, order.pop(slot.batch_axis))
    shape = (*(() if slot.batch_axis is not None else (1,)), *(array.shape[axis] for axis in order)) or (1, 1)
    kept = [axis for axis in order if array.shape[axis] != 1]
    return Counterpart(slot.name, tuple(sorted(kept).index(axis) for axis in kept), shape, array.dtype.kind in "iub")


def _integers(array: Array) -> Array:
    """An array of int32 in the bits of float32 as such: as floats they are all subnormal, zero or NaN."""
    if array.dtype == np.float32 and array.any() and (~(np.abs(array) >= np.finfo(np.float32).tiny)).all():
        return array.view(np.int32)
    return array


@dataclass(frozen=True)
class PassBisection:
    """What became of the rewrites of a conversion.

    `rewrites` is how many there are. `number` counts to the one that breaks the net, None where the net is right with
    all of them; 0 says that it is wrong without any. `event` is that rewrite, and `report` the verification of the net
    after it (or of the whole one, where that is right).
    """

    rewrites: int
    number: int | None
    event: Applied | None
    report: VerifyReport


def bisect_passes(
    model: Any,
    *,
    shapes: GivenShapes | None = None,
    values: Mapping[str, Any] | None = None,
    skip: Collection[str] = (),
    step: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> PassBisection:
    """Convert a model, and find the rewrite that breaks the net; `options` are those of `verify_net`.

    Raises what `convert` and `verify_net` raise.
    """
    check_options(step=step)
    source = exported(model)
    if not isinstance(source, (str, os.PathLike)):
        source = reference(source)

    failed: set[str] = set()

    def verified(limit: int | None) -> tuple[tuple[Applied, ...], VerifyReport]:
        conversion = convert(source, shapes=shapes, values=values, skip={*skip, *failed}, limit=limit)
        failed.update(event.pass_name for event in conversion.failed)
        return conversion.applied, conversion.verify(**options)

    step("verifying the net with all rewrites")
    applied, report = verified(None)
    if report.ok:
        return PassBisection(len(applied), None, None, report)
    step("verifying the net without rewrites")
    before = verified(0)[1] if applied else report
    if not before.ok:
        return PassBisection(len(applied), 0, None, before)
    right, wrong = 0, len(applied)
    while wrong - right > 1:
        middle = (right + wrong) // 2
        step(f"verifying the net after {middle} of {len(applied)} rewrites")
        _, found = verified(middle)
        if found.ok:
            right = middle
        else:
            wrong, report = middle, found
    return PassBisection(len(applied), wrong, applied[wrong - 1], report)
