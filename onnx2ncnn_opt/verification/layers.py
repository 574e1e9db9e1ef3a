"""The errors of all blobs of a net, and the time that each takes: one run shown from inside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from onnx2ncnn_opt.errors import RunError, UsageError
from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.progress import announce
from onnx2ncnn_opt.runtime.base import Array, Failure, Feed, Fetch
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker, Times
from onnx2ncnn_opt.runtime.targets import Target
from onnx2ncnn_opt.verification.blobs import Verdict, by_size, judge, value_name
from onnx2ncnn_opt.verification.tolerance import Tolerance, compare, in_mode

Feeds = Mapping[str, Feed]
Way = TypeVar("Way")

# A blob that is off by no more, relative to a value's largest element, is taken for that value.
_ALIKE = 3e-2


@dataclass(frozen=True)
class LayerRun:
    """Verdicts on a net's blobs by mode and blob name, and seconds by blob name."""

    feeds: Feeds  # that the net took
    verdicts: Mapping[str, Mapping[str, Verdict]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    times: Times | None = None  # None if nothing was timed
    checked: str = ""  # where and how ncnn ran
    problem: str = ""  # the reason if something is missing


@dataclass(frozen=True)
class Reference:
    """Values to hold blobs against, by name; `names` are those of blobs that are called otherwise."""

    values: Mapping[str, Array]
    tolerance: Tolerance
    names: Mapping[str, str] = field(default_factory=dict)


def inner_blobs(graph: Graph) -> list[str]:
    """Return the blobs that layers compute, in an order in which ncnn still has each when it is extracted."""
    inputs = {blob.name for blob in graph.inputs}
    return [blob.name for layer in graph for blob in layer.outputs if blob.name not in inputs]


def extract_all(runner: NcnnRunner, graph: Graph, feeds: Feeds) -> dict[str, Array | Failure]:
    """Return every blob that a layer computes, with its batch in front. Raises the errors of `NcnnRunner.extract`."""
    return runner.extract(feeds, [Fetch(name, 0) for name in inner_blobs(graph)])


@dataclass(frozen=True)
class BlobRun(Generic[Way]):
    """The blobs of a run by name, the verdict on each, and the way in which the net was fed."""

    way: Way
    results: Mapping[str, Array | Failure]
    verdicts: Mapping[str, Verdict]


def likeliest_run(
    runner: NcnnRunner,
    graph: Graph,
    ways: Iterable[tuple[Way, Feeds]],
    verdict: Callable[[str, Array | Failure], Verdict],
) -> BlobRun[Way]:
    """Run a net in each way to feed it, and return the run that leaves the most blobs right.

    Raises RunError if ncnn cannot run the net, or if it takes the inputs in no way.
    """
    best: BlobRun[Way] | None = None
    most = -1
    for way, feeds in ways:
        try:
            results = extract_all(runner, graph, feeds)
        except UsageError:  # an array that no Mat can hold
            continue
        verdicts = {name: verdict(name, result) for name, result in results.items()}
        right = sum(each.status == "right" for each in verdicts.values())
        if right > most:
            best, most = BlobRun(way, results, verdicts), right
    if best is None:
        raise RunError("no Mat can hold the inputs")
    return best


def run_layers(
    param: Path,
    bin: Path,
    graph: Graph,
    ways: Sequence[Feeds],
    reference: Reference,
    *,
    modes: Sequence[str],
    target: Target,
    timeout: float,
) -> LayerRun:
    """Run a net in each mode, and once more to time it in the first; `graph` is the one in the files.

    `ways` are those to feed it; the one that leaves the most blobs right is taken.
    """
    verdicts: dict[str, Mapping[str, Verdict]] = {}
    feeds, sizes = ways[0], by_size(reference.values)
    with NcnnWorker(target) as worker:
        try:
            for mode in modes:
                announce(f"ncnn computes all blobs of the net in {mode}")
                runner = NcnnRunner(param, bin, worker=worker, mode=mode, timeout=timeout, threads=None)
                tolerance = in_mode(mode, reference.tolerance)
                verdict = partial(_verdict, reference=reference, sizes=sizes, tolerance=tolerance)
                run = likeliest_run(runner, graph, [(way, way) for way in ways], verdict)
                feeds, verdicts[mode], ways = run.way, run.verdicts, [run.way]
                known = {name: verdict.value for name, verdict in run.verdicts.items() if verdict.value is not None}
                reference = replace(reference, names={**known, **reference.names})
            announce("ncnn computes the net blob by blob, to time it")
            names = inner_blobs(graph)
            times = NcnnRunner(param, bin, worker=worker, mode=modes[0], timeout=timeout).time_blobs(feeds, names)
        except RunError as error:
            return LayerRun(feeds, verdicts, problem=str(error))
        seconds = dict(zip(names, times.blobs, strict=True))
        return LayerRun(feeds, verdicts, seconds, times, worker.checked(modes))


def _verdict(
    blob: str, result: Array | Failure, reference: Reference, sizes: Mapping[int, Sequence[str]], tolerance: Tolerance
) -> Verdict:
    """Compare a blob with its value, or with the value most like it if that one is off by more than the tolerance."""
    named = value_name(blob, reference.names)
    verdict = judge(result, named, reference.values, sizes, tolerance)
    if verdict.status == "right" or isinstance(result, Failure):
        return verdict
    wide = replace(tolerance, relative=max(tolerance.relative, _ALIKE), slices=False)
    alike = judge(result, named, reference.values, sizes, wide)
    if alike.status == "right" and alike.difference is not None:
        message = verdict.message or f"off by up to {alike.difference.max_abs:.3g}"
        return Verdict("wrong", message, alike.value, alike.difference)
    return _in_any_order(verdict, result, reference.values, tolerance)


def _in_any_order(verdict: Verdict, result: Array, values: Mapping[str, Array], tolerance: Tolerance) -> Verdict:
    """Return the verdict on a blob, "reordered" if it has the value's numbers, but in no order of its axes."""
    if verdict.status != "wrong" or verdict.value is None:
        return verdict
    value = values[verdict.value]
    if value.size != result.size or value.dtype.kind != "f":
        return verdict
    difference = compare(np.sort(result, axis=None), np.sort(value, axis=None), replace(tolerance, slices=False))
    return Verdict("reordered", "", verdict.value, difference) if difference.ok else verdict
