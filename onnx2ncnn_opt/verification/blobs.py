"""Comparison of a net's blobs with the model's inner values, in any order of axes, and the time of each blob."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Generic, Literal, TypeVar

import numpy as np

from onnx2ncnn_opt.errors import CrashError, RunError, UsageError
from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.progress import announce
from onnx2ncnn_opt.runtime.base import Array, Failure, Feed, Fetch
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker, Times
from onnx2ncnn_opt.runtime.ort import OrtRunner, read_model
from onnx2ncnn_opt.runtime.targets import Target
from onnx2ncnn_opt.verification.tolerance import Difference, Tolerance, compare, in_mode

Feeds = Mapping[str, Feed]
Way = TypeVar("Way")

_SIMILAR = 3e-2  # a wrong blob within this error, relative to a value's largest element, still belongs to the value
_MAX_AXES = 5  # values with more axes are not permuted


@dataclass(frozen=True)
class Verdict:
    """The verdict on a blob; "reordered": it has the value's numbers, in an order that no permutation of axes gives."""

    status: Literal["right", "reordered", "wrong", "unknown"]
    message: str = ""
    value: str | None = None  # the model's name of the blob
    difference: Difference | None = None  # from that value


UNKNOWN = Verdict("unknown", "the model has no such value")


def model_values(
    model: Path | bytes, feeds: Mapping[str, Array], values: Mapping[str, Array], timeout: float
) -> dict[str, Array]:
    """Return the model's inputs, and ONNX Runtime's outputs of every node; `values` are bound inputs."""
    proto = read_model(model)

    def computed(names: Sequence[str]) -> dict[str, Array]:
        """Return the values of these names; skip values that cannot be outputs, such as sequences."""
        try:
            with closing(OrtRunner(model, outputs=names, values=values, timeout=timeout)) as runner:
                return runner.run_any(feeds)
        except CrashError:
            raise
        except RunError:
            if len(names) == 1:
                return {}
            half = len(names) // 2
            return {**computed(names[:half]), **computed(names[half:])}

    names = dict.fromkeys(name for node in proto.graph.node for name in node.output if name)
    return {**feeds, **computed(list(names))}


def by_size(values: Mapping[str, Array]) -> dict[int, list[str]]:
    """Return the names of values by their number of elements."""
    names: dict[int, list[str]] = {}
    for name, array in values.items():
        names.setdefault(array.size, []).append(name)
    return names


def value_name(blob: str, names: Mapping[str, str]) -> str | None:
    """Return the model's name of a blob, from `names` or unchanged; None for an unlisted number such as "12"."""
    name = names.get(blob, blob)
    return name if blob in names or not name.isdigit() else None


def judge(
    result: Array | Failure,
    name: str | None,
    values: Mapping[str, Array],
    sizes: Mapping[int, Sequence[str]],
    tolerance: Tolerance,
) -> Verdict:
    """Compare a blob with the model's value `name`, or with all values if there is none; `sizes` are `by_size`."""
    value = None if name is None else values.get(name)
    if isinstance(result, Failure):
        return Verdict("wrong", result.reason, None if value is None else name)
    if value is not None:
        if value.size != result.size:
            return Verdict("wrong", f"its shape is {list(result.shape[1:])}, the model's {list(value.shape)}", name)
        return as_verdict(aligned(result, value, tolerance)[0], name)
    match = same_numbers(result, values, sizes, tolerance)
    return as_verdict(match[2], match[0]) if match else UNKNOWN


def same_numbers(
    array: Array, values: Mapping[str, Array], sizes: Mapping[int, Sequence[str]], tolerance: Tolerance
) -> tuple[str, tuple[int, ...], Difference] | None:
    """Return the first value with an array's numbers, the order of its axes, and its difference from the array."""
    for name in sizes.get(array.size, ()):
        if same_range(array, values[name], tolerance):
            difference, axes = aligned(array, values[name], tolerance)
            if difference.ok:
                return name, axes, difference
    return None


def as_verdict(difference: Difference, value: str | None) -> Verdict:
    """Return the verdict for a difference from a value of the model."""
    message = difference.special or difference.excess
    return Verdict("right" if difference.ok else "wrong", message, value, difference)


def squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without its sizes of 1."""
    return tuple(size for size in shape if size != 1)


def in_order(value: Array, axes: tuple[int, ...]) -> Array:
    """Permute a value's axes, without sizes of 1, and flatten it; e.g. (1, 0) makes 4x3 of 1x3x4 first."""
    return value.reshape(squeezed(value.shape)).transpose(axes).reshape(-1)


def natural(value: Array) -> tuple[int, ...]:
    """Return the identity permutation of a value's axes, e.g. (0, 1, 2); axes of size 1 do not count."""
    return tuple(range(len(squeezed(value.shape))))


def aligned(result: Array, value: Array, tolerance: Tolerance) -> tuple[Difference, tuple[int, ...]]:
    """Compare a blob with a value of the same size; return the difference, and the order of the value's axes.

    The order is the first within the tolerance (see `in_order`), or the value's own if there is none.
    """
    flat, order = result.reshape(-1), natural(value)
    plain = compare(flat, value.reshape(-1), tolerance)
    if plain.ok or not same_range(flat, value, tolerance):
        return plain, order
    for axes in _others(order):
        if (difference := compare(flat, in_order(value, axes), tolerance)).ok:
            return difference, axes
    return plain, order


def nearest(result: Array, value: Array) -> tuple[int, ...]:
    """Return the order of a value's axes with the smallest difference from a blob of the same size."""
    order = natural(value)

    def distance(axes: tuple[int, ...]) -> float:
        difference = np.abs(result.reshape(-1).astype(np.float64) - in_order(value, axes).astype(np.float64))
        return float(np.nan_to_num(difference, nan=0.0, posinf=0.0).sum())

    return min((order, *_others(order)), key=distance)


def in_axes_of(value: Array, result: Array) -> Array:
    """Return a blob in the shape of a value of the same size, its axes in the order with the smallest difference."""
    axes = nearest(result, value)
    sizes = squeezed(value.shape)
    permuted = result.reshape([sizes[axis] for axis in axes])
    return permuted.transpose(np.argsort(axes)).reshape(value.shape)


def same_range(a: Array, b: Array, tolerance: Tolerance) -> bool:
    """Return True if minima and maxima agree, which no permutation of axes changes."""
    if a.dtype.kind != "f" or b.dtype.kind != "f":
        return True
    ends = [(float(np.nanmin(x)), float(np.nanmax(x))) if not np.isnan(x).all() else (0.0, 0.0) for x in (a, b)]
    allowed = max(tolerance.absolute, tolerance.relative * max(map(abs, ends[1])))
    return all(x == y or abs(x - y) <= allowed for x, y in zip(*ends, strict=True))


def _others(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield all other orders of axes; none if there are more than `_MAX_AXES`."""
    if 1 < len(order) <= _MAX_AXES:
        yield from (axes for axes in permutations(order) if axes != order)


@dataclass(frozen=True)
class LayerRun:
    """Verdicts on a net's blobs by mode and blob name, and seconds by blob name."""

    feeds: Feeds  # of the run
    verdicts: Mapping[str, Mapping[str, Verdict]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    times: Times | None = None  # None if nothing was timed
    checked: str = ""  # ncnn's device and modes
    problem: str = ""  # the error that ended the run, if any


@dataclass(frozen=True)
class Reference:
    """The model's values by name; `names` maps blobs to values with other names."""

    values: Mapping[str, Array]
    tolerance: Tolerance
    names: Mapping[str, str] = field(default_factory=dict)


def inner_blobs(graph: Graph) -> list[str]:
    """Return the blobs that layers compute, in the layers' order, because ncnn frees blobs after their use."""
    inputs = {blob.name for blob in graph.inputs}
    return [blob.name for layer in graph for blob in layer.outputs if blob.name not in inputs]


def extract_all(runner: NcnnRunner, graph: Graph, feeds: Feeds) -> dict[str, Array | Failure]:
    """Return all blobs that layers compute, with the batch as first axis. Raises the errors of `NcnnRunner.extract`."""
    return runner.extract(feeds, [Fetch(name, 0) for name in inner_blobs(graph)])


@dataclass(frozen=True)
class BlobRun(Generic[Way]):
    """The blobs of a run by name, the verdict on each, and the way to feed the net."""

    way: Way
    results: Mapping[str, Array | Failure]
    verdicts: Mapping[str, Verdict]


def likeliest_run(
    runner: NcnnRunner,
    graph: Graph,
    ways: Iterable[tuple[Way, Feeds]],
    verdict: Callable[[str, Array | Failure], Verdict],
) -> BlobRun[Way]:
    """Feed a net in each way, and return the run with the most right blobs; RunError if no way works."""
    best: BlobRun[Way] | None = None
    most = -1
    for way, feeds in ways:
        try:
            results = extract_all(runner, graph, feeds)
        except UsageError:  # an array that no Mat can hold
            continue
        verdicts = {name: verdict(name, result) for name, result in results.items()}
        right = sum(one.status == "right" for one in verdicts.values())
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
    """Run a net in each mode, fed in the way with the most right blobs, and time it in the first mode."""
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
                matches = {name: verdict.value for name, verdict in run.verdicts.items() if verdict.value is not None}
                reference = replace(reference, names={**matches, **reference.names})
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
    """Compare a blob with its value; if the error exceeds the tolerance, compare it with similar values too."""
    name = value_name(blob, reference.names)
    verdict = judge(result, name, reference.values, sizes, tolerance)
    if verdict.status == "right" or isinstance(result, Failure):
        return verdict
    wide = replace(tolerance, relative=max(tolerance.relative, _SIMILAR), slices=False)
    similar = judge(result, name, reference.values, sizes, wide)
    if similar.status == "right" and similar.difference is not None:
        message = verdict.message or f"off by up to {similar.difference.max_abs:.3g}"
        return Verdict("wrong", message, similar.value, similar.difference)
    value = reference.values[verdict.value] if verdict.status == "wrong" and verdict.value is not None else None
    if value is None or value.size != result.size or value.dtype.kind != "f":
        return verdict
    difference = compare(np.sort(result, axis=None), np.sort(value, axis=None), replace(tolerance, slices=False))
    return Verdict("reordered", "", verdict.value, difference) if difference.ok else verdict
