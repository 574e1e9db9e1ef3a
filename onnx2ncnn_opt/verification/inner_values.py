"""The values inside a model and the blobs inside a net."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from onnx2ncnn_opt.errors import CrashError, RunError, UsageError
from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.onnx.edit.model import read_model
from onnx2ncnn_opt.runtime.base import Array, Failure, Feed, Fetch
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.verdict.blobs import Match

Feeds = Mapping[str, Feed]
Way = TypeVar("Way")


def model_values(
    model: Path | bytes, feeds: Mapping[str, Array], values: Mapping[str, Array], timeout: float
) -> dict[str, Array]:
    """Return the model's inputs, and ONNX Runtime's outputs of every node; `values` are bound inputs."""
    graph = read_model(model).graph

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

    names = dict.fromkeys(value.name for node in graph for value in node.outputs if value.name)
    return {**feeds, **computed(list(names))}


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
    verdicts: Mapping[str, Match]


def likeliest_run(
    runner: NcnnRunner,
    graph: Graph,
    ways: Iterable[tuple[Way, Feeds]],
    verdict: Callable[[str, Array | Failure], Match],
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
