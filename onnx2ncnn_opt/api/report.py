"""Gathering the facts about a net and its model for the HTML file of `report`."""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from onnx2ncnn_opt import entry_points
from onnx2ncnn_opt.api.diff import diff_graphs
from onnx2ncnn_opt.api.lower import Conversion, lower, reconverted, unoptimised
from onnx2ncnn_opt.api.net_shapes import infer_net
from onnx2ncnn_opt.api.optimize import Optimized
from onnx2ncnn_opt.api.report_rows import LayerRun, bytes_of, layer_rows, memory_course, with_measurements
from onnx2ncnn_opt.api.result import NetResult
from onnx2ncnn_opt.api.verify import verify
from onnx2ncnn_opt.errors import Error, RunError, check_options
from onnx2ncnn_opt.ir.correspondence import corresponding
from onnx2ncnn_opt.ir.graph import Graph, Layer
from onnx2ncnn_opt.ir.memory import blob_bytes
from onnx2ncnn_opt.manifest import Manifest
from onnx2ncnn_opt.onnx.edit.append import converted_model
from onnx2ncnn_opt.onnx.edit.model import read_model
from onnx2ncnn_opt.onnx.read.exported import reference
from onnx2ncnn_opt.onnx.read.load import LoadedModel
from onnx2ncnn_opt.onnx.read.structure import names_of
from onnx2ncnn_opt.outputs import OutputReport
from onnx2ncnn_opt.param.files import PathLike, all_or_nothing, bin_beside, read_net
from onnx2ncnn_opt.param.names import clean_name
from onnx2ncnn_opt.progress import announce
from onnx2ncnn_opt.report.page import page
from onnx2ncnn_opt.report.record import Comparison, LayerRow, NearMissRow, NetRecord
from onnx2ncnn_opt.report.words import change_rows, file_size, layer_text
from onnx2ncnn_opt.rewrite.events import Applied, Event, NearMiss
from onnx2ncnn_opt.rewrite.lineage import groups, side_by_side
from onnx2ncnn_opt.runtime.base import Array, Failure, Feed
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.slots import feeds_of
from onnx2ncnn_opt.runtime.targets import find_target
from onnx2ncnn_opt.verdict.blobs import Match, Reference
from onnx2ncnn_opt.verdict.errors import DEFAULT, Tolerance, in_mode
from onnx2ncnn_opt.verification.inner_values import extract_all, inner_blobs, likeliest_run, model_values
from onnx2ncnn_opt.verification.model_accuracy import tolerance_within
from onnx2ncnn_opt.verification.model_runs import any_feeds, load_converted
from onnx2ncnn_opt.verification.options import Verification
from onnx2ncnn_opt.verification.outputs import input_slots
from onnx2ncnn_opt.verification.report import MODEL, VerifyReport
from onnx2ncnn_opt.version import __version__

InputSizes = tuple[Mapping[str, Sequence[Any]], Mapping[str, int] | None]  # shapes of inputs, and batch counts
# All blobs of a net and all values of its model are in memory at once for the comparison.
_MAX_BYTES = 2**31


@dataclass(frozen=True)
class Report:
    """The facts about one or more nets; `records` are plain data (see `report.record`).

    `verified` is the verification of the report, None if there were none or several.
    """

    records: tuple[NetRecord, ...]
    verified: VerifyReport | None = None

    def __repr__(self) -> str:
        return f"Report({', '.join(record.title for record in self.records)})"

    def html(self) -> str:
        """Return the HTML of the page."""
        title = self.records[0].title if len(self.records) == 1 else f"{len(self.records)} nets"
        return page(self.records, title=title, tool=f"onnx2ncnn-opt {__version__}")

    def save(self, path: PathLike) -> Path:
        """Write the page; UsageError, and no partial file, if it cannot be written."""
        check_options(path=path)
        target = Path(path)
        with all_or_nothing(target) as (staged,):
            staged.write_text(self.html(), "utf-8", "backslashreplace")
        return target


def make_report(
    model: Any,
    param: PathLike | None = None,
    bin: PathLike | None = None,
    verification: Verification = Verification(),
    *,
    manifest: Manifest | PathLike | None = None,
) -> Report:
    """Verify a net, and report on it and its model: the net `param` of any converter, by default a new conversion.

    `model`, `bin` and `manifest` are as for `verify`. A wrong net is no error. Raises the errors of `lower` and
    `verify`.
    """
    if param is None:
        announce("converting the model")
        conversion = lower(model, shapes=verification.shapes, values=verification.values)
        verification = replace(verification, shapes=None, values=None)
        conversion = replace(conversion, report=conversion.verify(verification))
        return Report((report_conversion(conversion, verification),), conversion.report)
    verified = verify(model, param, bin, verification, manifest=manifest)
    return Report((report_net(model, param, bin, verified, verification),), verified)


def report_result(result: NetResult[Any], verification: Verification | None) -> NetRecord:
    """Return the record of a conversion or an optimised net."""
    how = () if verification is None else (verification,)
    if isinstance(result, Conversion):
        return report_conversion(result, *how)
    assert isinstance(result, Optimized)
    return report_optimized(result, *how)


def report_conversion(conversion: Conversion, verification: Verification = Verification()) -> NetRecord:
    """Return the record of a conversion and its report; without a report, nothing runs.

    The model is lowered once more, without passes.
    """
    announce("converting the model without passes")
    before, manifest, model = unoptimised(conversion).graph, conversion.manifest(), conversion.model
    verified, run = conversion.report, LayerRun({})
    with conversion.staged() as files:
        after = read_net(files.param, files.bin, entry_points.layer_types()).graph
        if verified is not None:
            names = {clean_name(blob.name): blob.name for layer in conversion.graph for blob in layer.outputs}
            net = _NetOnDevice(files.param, files.bin, after, verification)
            run = net.against_model(reference(conversion.source), model, manifest, verified, names)
        fixed = [blob for blob in conversion.graph.inputs if blob_bytes(blob.shape) is not None]
        shapes = {blob.name: blob.shape for blob in fixed if blob.shape}
        counts = {blob.name: blob.batch for blob in fixed if isinstance(blob.batch, int)}
        sides = _sides_of(conversion, before, after, run, (shapes, counts))
        sides["comparison"] = _comparison("the net without passes, and with them", before, after)
    notes = [*map(str, conversion.failed)]
    notes += [] if conversion.precision is None else [f"fp16 (estimated): {conversion.precision}"]
    batches = [
        str(size)
        for port in conversion.inputs
        for axis, size in enumerate(port.shape)
        if axis == port.batch_axis and not isinstance(size, int)
    ]
    if batches and not run.feeds:
        notes.append(
            f"{', '.join(dict.fromkeys(batches))} is dynamic: costs and memory are those of one item of the batch"
        )
    facts = [
        ("model", f"opset {model.opsets.get('', 1)}, {model.producer}"),
        *(("input", f"{port.name} [{', '.join(map(str, port.shape))}]") for port in conversion.inputs),
        ("layers with Splits", f"{manifest.layers.before} \u2192 {manifest.layers.after}"),
    ]
    return _record(model.name or "model", verified, run, sides, facts, notes)


def report_optimized(optimized: Optimized, verification: Verification = Verification()) -> NetRecord:
    """Return the record of an optimised net and its report; without a report, nothing runs."""
    source = optimized.source
    before = read_net(source.param, source.bin, optimized.graph.types).graph
    verified, run = optimized.report, LayerRun({})
    with replace(optimized, is_binary=False).staged() as files:
        after = read_net(files.param, files.bin, optimized.graph.types).graph
        if verified is not None:
            run = _NetOnDevice(files.param, files.bin, after, verification).against_net(before, optimized, verified)
        sides = _sides_of(optimized, before, after, run, (optimized.shapes, None))
        sides["comparison"] = _comparison("the net as it was, and as it is", before, after)
    old, new = optimized.layers
    facts, notes = [("layers with Splits", f"{old} \u2192 {new}")], [*map(str, optimized.failed)]
    return _record(source.param.name, verified, run, sides, facts, notes)


def report_net(
    model: Any,
    param: PathLike,
    bin: PathLike | None,
    verified: VerifyReport,
    verification: Verification = Verification(),
) -> NetRecord:
    """Return the record of a net of any converter, and its report; `verify` had the same arguments.

    A net with a manifest of this package is shown next to the net before the passes. Any other net is shown next to the
    model's nodes: each node next to the layer that computes its value.
    """
    name = Path(model).name if isinstance(model, (str, os.PathLike)) else "the model"
    manifest = verified.manifest
    model = converted_model(model, manifest)
    param, bin = Path(param), Path(bin or bin_beside(param))
    title = f"{param.name} of {name}"
    loaded = load_converted(model, manifest, shapes=verification.shapes, values=verification.values)
    facts = [("model", f"opset {loaded.opsets.get('', 1)}, {loaded.producer}"), ("net", os.fspath(param))]
    try:
        after = read_net(param, bin, entry_points.layer_types()).graph
    except Error as error:
        return _record(title, verified, LayerRun({}), {}, facts, [f"the net cannot be read: {error}"])
    net = _NetOnDevice(param, bin, after, verification)
    run = net.against_model(model, loaded, manifest, verified, {})
    announce("converting the model anew")
    fresh = reconverted(model, manifest) if manifest else None
    notes: list[str] = []
    if fresh is not None:
        twins = {layer.name: twin for layer, twin in corresponding(after, fresh.graph).items()}
        masks = {mask.layer: mask.reason for mask in manifest.masks} if manifest else {}
        sides = _sides(unoptimised(fresh).graph, after, run, ({}, None), twins, fresh.events, masks)
    else:
        sides = _beside_model(model, after, run)
        try:
            fresh = lower(model, shapes=verification.shapes, values=verification.values)
        except Error as error:
            notes.append(f"there is no conversion by this tool to compare the net with: {error}")
    if fresh is not None:
        sides["comparison"] = _comparison("a new conversion by this tool, and this net", fresh.graph, after)
    return replace(_record(title, verified, run, sides, facts, notes), int8=None if manifest is None else manifest.int8)


@dataclass(frozen=True)
class _NetOnDevice:
    """The files of a net, its graph as read from them, and the verification with the device."""

    param: Path
    bin: Path
    graph: Graph
    verification: Verification

    def against_model(
        self,
        model: Path | bytes,
        loaded: LoadedModel,
        manifest: Manifest | None,
        verified: VerifyReport,
        names: Mapping[str, str],
    ) -> LayerRun:
        """Compare every blob with the model's value; `names` maps blobs to values with other names.

        The inputs are those on which verification failed, or the first ones of verification.
        """
        try:
            if verified.wrong is not None:
                arrays = verified.wrong[1]
            else:
                how = self.verification
                arrays = any_feeds(model, loaded, manifest, feeds=how.feeds, seed=how.seed)
            slots = input_slots(manifest, arrays, [blob.name for blob in self.graph.inputs])
        except Error as error:
            return LayerRun({}, problem=str(error))
        names = {**names, **{output.blob: output.name for output in verified.outputs if output.blob}}

        def values() -> Mapping[str, Array]:
            announce("ONNX Runtime computes all values of the model")
            return model_values(model, arrays, loaded.values, self.verification.timeout)

        ways = [feeds_of(way, arrays) for way in slots]
        return self.run(ways, values, tolerance_within(loaded), names, verified.outputs)

    def against_net(self, before: Graph, optimized: Optimized, verified: VerifyReport) -> LayerRun:
        """Compare every blob with the blob of the same name in the original net."""
        drawn = next(optimized.pair.draws(self.verification.seed))[1]
        source = optimized.source

        def values() -> Mapping[str, Array]:
            announce("ncnn computes all blobs of the net as it was")
            feeds = {optimized.name_before(blob): Feed(array) for blob, array in drawn.items()}
            with NcnnRunner(source.param, source.bin, timeout=self.verification.timeout, threads=None) as runner:
                blobs = extract_all(runner, before, feeds)
            return {name: array for name, array in blobs.items() if not isinstance(array, Failure)}

        feeds = {clean_name(blob.name): Feed(array) for blob, array in drawn.items()}
        names = {clean_name(blob.name): optimized.name_before(blob) for blob in optimized.graph.outputs}
        return self.run([feeds], values, DEFAULT, names, verified.outputs)

    def run(
        self,
        ways: Sequence[Mapping[str, Feed]],
        values: Callable[[], Mapping[str, Array]],
        tolerance: Tolerance,
        names: Mapping[str, str],
        outputs: Sequence[OutputReport],
    ) -> LayerRun:
        """Run the net in each mode, fed in the way with the most right blobs, and time it in the first mode."""
        infer_net(self.graph, *_sizes(ways[0]))
        total = sum(bytes_of(blob) or 0 for layer in self.graph for blob in layer.outputs)
        if total > _MAX_BYTES:
            return LayerRun(ways[0], problem=f"its blobs have {file_size(total)}, too much to compare at once")
        modes = tuple(dict.fromkeys(output.mode for output in outputs)) or ("fp32",)
        verdicts: dict[str, Mapping[str, Match]] = {}
        net, timeout = (self.param, self.bin), self.verification.timeout
        with NcnnWorker(find_target(self.verification.on)) as worker:
            try:
                expected = Reference(values(), names)
                for mode in modes:
                    announce(f"ncnn computes all blobs of the net in {mode}")
                    runner = NcnnRunner(*net, worker=worker, mode=mode, timeout=timeout, threads=None)
                    verdict = partial(expected.judge_similar, tolerance=in_mode(mode, tolerance))
                    run = likeliest_run(runner, self.graph, [(way, way) for way in ways], verdict)
                    ways, verdicts[mode] = [run.way], run.verdicts
                    matches = {blob: one.value for blob, one in run.verdicts.items() if one.value is not None}
                    expected = replace(expected, names={**matches, **expected.names})
                announce("ncnn computes the net blob by blob, to time it")
                blobs = inner_blobs(self.graph)
                times = NcnnRunner(*net, worker=worker, mode=modes[0], timeout=timeout).time_blobs(ways[0], blobs)
            except RunError as error:
                return LayerRun(ways[0], verdicts, problem=str(error))
            seconds = dict(zip(blobs, times.blobs, strict=True))
            return LayerRun(ways[0], verdicts, seconds, times, worker.checked(modes))


def _sizes(feeds: Mapping[str, Feed]) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """Return the shapes of Mats, and their batch counts."""
    mats = {name: feed.mat for name, feed in feeds.items()}
    return {name: shape for name, (shape, _) in mats.items()}, {name: batch for name, (_, batch) in mats.items()}


def _sides_of(result: NetResult[Any], before: Graph, after: Graph, run: LayerRun, inputs: InputSizes) -> dict[str, Any]:
    """Return a net before and after the passes side by side, see `_sides`."""
    twins = {clean_name(layer.name): layer for layer in result.graph}
    masks = {clean_name(mask.layer): mask.reason for mask in result.masks}
    return _sides(before, after, run, inputs, twins, result.events, masks)


def _sides(
    before: Graph,
    after: Graph,
    run: LayerRun,
    inputs: InputSizes,
    twins: Mapping[str, Layer],
    events: Sequence[Event],
    masks: Mapping[str, str],
) -> dict[str, Any]:
    """Return the two nets side by side, as fields of a NetRecord.

    `inputs` are the sizes for a net that did not run. `twins` maps the names of layers of `after` to the layers of the
    events; `masks` maps them to the reasons for feature masks.
    """
    sizes, counts = _sizes(run.feeds) if run.feeds else inputs
    for graph in (before, after):
        known = {blob.name for blob in graph.inputs}
        infer_net(graph, {name: shape for name, shape in sizes.items() if name in known}, counts)
    names = [twins[layer.name].name if layer.name in twins else "" for layer in after]
    applied = [event for event in events if isinstance(event, Applied)]
    layer_groups = groups([layer.name for layer in before], names, applied)
    first = {layer.name: number for number, layer in enumerate(before)}
    partners = {number: first[name] for number, name in enumerate(names) if name in first}
    for group in layer_groups:
        partners |= dict(zip(reversed(group.after), reversed(group.before), strict=False))
    numbers = {name: number for number, name in enumerate(names)}
    origins = [twins[layer.name].origin if layer.name in twins else () for layer in after]
    return {
        "before": layer_rows(before, [layer.origin for layer in before]),
        "after": with_measurements(after, layer_rows(after, origins), run, masks),
        "rows": side_by_side(len(before), len(after), partners),
        "groups": layer_groups,
        "rewrites": tuple(Counter(event.pass_name for event in applied).items()),
        "near_misses": tuple(_near_miss(event, numbers) for event in events if isinstance(event, NearMiss)),
        "memory": (memory_course(before), memory_course(after)),
    }


def _near_miss(event: NearMiss, numbers: Mapping[str, int]) -> NearMissRow:
    layers = tuple(numbers[ref.name] for ref in event.layers if ref.name in numbers)
    return NearMissRow(event.pass_name, " + ".join(map(str, event.layers)), event.reason, layers)


def _beside_model(model: Path | bytes, after: Graph, run: LayerRun) -> dict[str, Any]:
    """Return the model's nodes and a net side by side, as fields of a NetRecord."""
    infer_net(after, *_sizes(run.feeds))
    model_nodes = list(read_model(model).graph)
    producers = {name: number for number, node in enumerate(model_nodes) for name in names_of(node.outputs) if name}
    nodes = tuple(
        LayerRow(
            type=f"{node.domain}::{node.op_type}" if node.domain else node.op_type,
            name=node.name or next(iter(names_of(node.outputs)), ""),
            params="",
            reads=tuple(dict.fromkeys(producers[name] for name in names_of(node.inputs) if name in producers)),
            blobs=tuple(names_of(node.outputs)),
        )
        for node in model_nodes
    )
    rows = with_measurements(after, layer_rows(after, [()] * len(after)), run, {})
    partners: dict[int, int] = {}
    for number, row in enumerate(rows):
        values = [error.value for error in row.errors.values() if error.value in producers]
        if values:
            partners[number] = producers[values[0]]
            rows[number] = replace(row, origin=(nodes[partners[number]].name,))
    return {
        "names": ("model", "net"),
        "before": nodes,
        "after": tuple(rows),
        "rows": side_by_side(len(nodes), len(rows), partners),
        "memory": (None, memory_course(after)),
    }


def _comparison(about: str, before: Graph, after: Graph) -> Comparison:
    difference = diff_graphs(before, after)
    rows: list[tuple[str, ...]] = [(layer_text(asdict(ref)), "layer", "there", "gone", "") for ref in difference.gone]
    rows += [(layer_text(asdict(ref)), "layer", "not there", "added", "") for ref in difference.added]
    rows += [row for change in difference.changed for row in change_rows(asdict(change))]
    return Comparison(about, tuple(rows))


def _record(
    title: str,
    verified: VerifyReport | None,
    run: LayerRun,
    sides: Mapping[str, Any],
    facts: Sequence[tuple[str, str]],
    notes: Sequence[str],
) -> NetRecord:
    verdict, headline = _verdict(verified)
    return NetRecord(
        title=title,
        verdict=verdict,
        headline=headline,
        facts=(*facts, *([("checked", verified.checked)] if verified and verified.checked else [])),
        notes=(*notes, *(verified.notes if verified else ())),
        outputs=() if verified is None else verified.rows,
        modes=tuple(run.verdicts),
        timing=_timing(run),
        errors=_errors(run, of_model=verified is not None and verified.against == MODEL),
        **sides,
    )


def _verdict(verified: VerifyReport | None) -> tuple[str, str]:
    """Return the verdict on a net, and a sentence."""
    if verified is None:
        return "unverified", "Nothing was run: whether the net computes what it should is not known."
    count, wrong = len(verified.rows), sum(report.status != "ok" for report in verified.rows)
    if wrong:
        return "wrong", f"{wrong} of {count} outputs differ from {verified.against}."
    return "ok", f"{'All outputs agree' if count > 1 else 'The output agrees'} with {verified.against}."


def _errors(run: LayerRun, *, of_model: bool) -> str:
    """Describe the errors of layers."""
    if run.problem:
        return f"Errors and times are not known, or not all: {run.problem}"
    value = "the model's value" if of_model else "the blob of that name in the net as it was"
    largest = f"The largest error of each layer's output, relative to the largest element of {value}."
    return largest if run.verdicts else ""


def _timing(run: LayerRun) -> str:
    """Describe how the times were measured."""
    times = run.times
    if times is None:
        return ""
    return (
        f"The fastest of {times.runs} runs on one thread, after one to warm up; {run.checked}. It is CPU time, or time "
        "on a GPU. ncnn's Python package does not time layers: each layer's output is extracted before the next layer "
        "runs, and the time to copy it is measured and subtracted. All layers together take "
        f"{sum(times.blobs) * 1e3:.3g} ms, a whole run at once {times.whole * 1e3:.3g} ms."
    )
