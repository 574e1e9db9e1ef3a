"""What a run of a net takes: milliseconds beside another net's, and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from onnx2ncnn_opt.errors import RunError
from onnx2ncnn_opt.runtime.base import Feed, Fetch
from onnx2ncnn_opt.runtime.ncnn import NcnnWorker, announced, as_feed
from onnx2ncnn_opt.runtime.targets import MODES


@dataclass(frozen=True)
class TimedNet:
    """A net, what it is fed by blob, and the outputs that it computes."""

    param: Path
    bin: Path
    feeds: Mapping[str, Feed]
    outputs: Sequence[Fetch]


class Latency(NamedTuple):
    """Milliseconds of the fastest run of two nets that ran in turns.

    `ratio` is the time of the second, where the first takes 1: of the fastest runs, or the median over the turns,
    whichever is smaller. What disturbs a machine for a while makes either of them larger, seldom both.
    """

    first: float
    second: float
    ratio: float


def compare_latency(
    first: TimedNet, second: TimedNet, worker: NcnnWorker, *, mode: str, seconds: float = 1.0, timeout: float = 300.0
) -> Latency:
    """Run two nets in turns on one thread for so many seconds, or six turns.

    Raises RunError where ncnn does not run one of them, CrashError where it dies on it or takes longer than `timeout`.
    """
    turns = _measured(worker, (first, second), mode, seconds, timeout)["turns"]
    a, b = (min(times) for times in zip(*turns, strict=True))
    return Latency(a, b, min(b / a, median(second / first for first, second in turns)))


def peak_memory(net: TimedNet, worker: NcnnWorker, *, mode: str, timeout: float = 300.0) -> int | None:
    """The bytes that loading and running a net adds to the memory of the worker, which should be new.

    None where the system does not tell. Raises as `compare_latency` does.
    """
    memory: int | None = _measured(worker, (net,), mode, 0.0, timeout)["memory"]
    return memory


def _measured(
    worker: NcnnWorker, nets: Sequence[TimedNet], mode: str, seconds: float, timeout: float
) -> dict[str, Any]:
    names = " and ".join(str(net.param) for net in nets)
    with worker.empty(timeout, names) as child:
        given = [{blob: as_feed(blob, feed) for blob, feed in net.feeds.items()} for net in nets]
        requests = [
            {
                "param": worker.file(net.param),
                "bin": worker.file(net.bin),
                "options": dict[str, int](MODES[mode], num_threads=1),
                "feeds": announced(feeds),
                "outputs": [{"blob": fetch.blob, "batch_axis": fetch.batch_axis} for fetch in net.outputs],
            }
            for net, feeds in zip(nets, given, strict=True)
        ]
        arrays = [feed.array for feeds in given for feed in feeds.values()]
        child.send({"do": "time", "nets": requests, "seconds": seconds}, *arrays)
        answer = child.receive()
        if "error" in answer:
            raise RunError(f"ncnn refuses {names}: {answer['error']}{child.said(answer['mark'])}")
        return answer
