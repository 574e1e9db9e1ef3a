"""The blobs of a net against the values inside its model, in any order of axes, and the time that each takes."""

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

# A blob that is off by no more, relative to a value's largest element, is taken for that value.
_ALIKE = 3e-2
_MOST_AXES = 5  # values with more axes are not permuted


@dataclass(frozen=True)
class Verdict:
    """The verdict on a blob; "reordered" is one of the value's numbers that no permutation of its axes gives."""

    status: Literal["right", "reordered", "wrong", "unknown"]
    message: str = ""
    value: str | None = None  # the model's name of the blob
    difference: Difference | None = None  # from that value


UNKNOWN = Verdict("unknown", "the model has no such value")


def model_values(
    model: Path | bytes, feeds: Mapping[str, Array], values: Mapping[str, Array], timeout: float
) -> dict[str, Array]:
    """Return ONNX Runtime's value of every node of the model's graph, and its inputs; `values` are bound inputs."""
    proto = read_model(model)

    def computed(names: Sequence[str]) -> dict[str, Array]:
        """Return the values of these names, without values that cannot be an output, such as a sequence."""
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
    found: dict[int, list[str]] = {}
    for name, array in values.items():
        found.setdefault(array.size, []).append(name)
    return found


def value_name(blob: str, names: Mapping[str, str]) -> str | None:
    """Return the model's name of a blob, from `names` or the same; None for a number, which is no name in a model."""
    name = names.get(blob, blob)
    return name if blob in names or not name.isdigit() else None


def judge(
    result: Array | Failure,
    named: str | None,
    values: Mapping[str, Array],
    sizes: Mapping[int, Sequence[str]],
    tolerance: Tolerance,
) -> Verdict:
    """Compare a blob with the model's value of that name, or else with any of its numbers; `sizes` are `by_size`."""
    value = None if named is None else values.get(named)
    if isinstance(result, Failure):
        return Verdict("wrong", result.reason, None if value is None else named)
    if value is not None:
        if value.size != result.size:
            return Verdict("wrong", f"its shape is {list(result.shape[1:])}, the model's {list(value.shape)}", named)
        return as_verdict(aligned(result, value, tolerance)[0], named)
    found = same_numbers(result, values, sizes, tolerance)
    return as_verdict(found[2], found[0]) if found else UNKNOWN


def same_numbers(
    array: Array, values: Mapping[str, Array], sizes: Mapping[int, Sequence[str]], tolerance: Tolerance
) -> tuple[str, tuple[int, ...], Difference] | None:
    """Return the first value with an array's numbers, the order of its axes, and its distance from the array."""
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
    """Return the elements of a value as a flat array, without axes of size 1, the others permuted."""
    return value.reshape(squeezed(value.shape)).transpose(axes).reshape(-1)


def natural(value: Array) -> tuple[int, ...]:
    """Return the order of a value's axes without a permutation, e.g. (0, 1, 2); axes of size 1 do not count."""
    return tuple(range(len(squeezed(value.shape))))


def aligned(result: Array, value: Array, tolerance: Tolerance) -> tuple[Difference, tuple[int, ...]]:
    """Compare a blob with a value of as many elements; return the difference, and the order of the value's axes.

    It is the first order that is within the tolerance (see `in_order`). If none is, it is the value's own order.
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
    """Return the order of a value's axes with the smallest difference from a blob with as many elements."""
    order = natural(value)

    def distance(axes: tuple[int, ...]) -> float:
        difference = np.abs(result.reshape(-1).astype(np.float64) - in_order(value, axes).astype(np.float64))
        return float(np.nan_to_num(difference, nan=0.0, posinf=0.0).sum())

    return min((order, *_others(order)), key=distance)


def in_axes_of(value: Array, result: Array) -> Array:
    """Return a blob with as many elements as a value, its axes in the order that is nearest to the value's."""
    axes = nearest(result, value)
    sizes = squeezed(value.shape)
    permuted = result.reshape([sizes[axis] for axis in axes])
    return permuted.transpose(np.argsort(axes)).reshape(value.shape)


def same_range(a: Array, b: Array, tolerance: Tolerance) -> bool:
    """Return True if the smallest and largest numbers agree; no permutation of axes changes them."""
    if a.dtype.kind != "f" or b.dtype.kind != "f":
        return True
    ends = [(float(np.nanmin(x)), float(np.nanmax(x))) if not np.isnan(x).all() else (0.0, 0.0) for x in (a, b)]
    allowed = max(tolerance.absolute, tolerance.relative * max(map(abs, ends[1])))
    return all(x == y or abs(x - y) <= allowed for x, y in zip(*ends, strict=True))


def _others(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield all other orders of axes; none if there are more than `_MOST_AXES`."""
    if 1 < len(order) <= _MOST_AXES:
        yield from (axes for axes in permutations(order) if axes != order)


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
    """Feed a net in each way, and return the run that leaves the most blobs right; RunError if there is none."""
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
    """Run a net in each mode, fed in the way that leaves the most blobs right, and time it in the first mode."""
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
    value = reference.values[verdict.value] if verdict.status == "wrong" and verdict.value is not None else None
    if value is None or value.size != result.size or value.dtype.kind != "f":
        return verdict
    difference = compare(np.sort(result, axis=None), np.sort(value, axis=None), replace(tolerance, slices=False))
    return Verdict("reordered", "", verdict.value, difference) if difference.ok else verdict
