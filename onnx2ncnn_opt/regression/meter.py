"""The latency and the memory of nets on a device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from onnx2ncnn_opt.outputs import Latency
from onnx2ncnn_opt.runtime.base import Feed, Step
from onnx2ncnn_opt.runtime.latency import in_turns
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.targets import Target

ATTEMPTS = 3  # to measure latency or memory below the limit: the machine may be busy
_SECONDS = 1.0  # of each measurement


@dataclass(frozen=True)
class Timed:
    """A net, its inputs by blob, and its outputs; a decoder's `feeds` are a step of one token."""

    param: Path
    bin: Path
    feeds: Mapping[str, Feed]
    outputs: Sequence[str]
    prompt: Step | None = None  # a decoder's step before `feeds`


@dataclass(frozen=True)
class Meter:
    """A device and a mode in which nets are measured; `timeout` is in seconds for each run."""

    target: Target
    mode: str
    timeout: float

    def runner(self, param: Path, bin: Path, worker: NcnnWorker) -> NcnnRunner:
        """Return a runner of a net for measurements."""
        return NcnnRunner(param, bin, mode=self.mode, timeout=self.timeout, worker=worker)

    def latency(self, net: Timed, old: Timed, enough: float) -> Latency:
        """Measure up to three times until the ratio is `enough` or less; return the best measurement.

        The better of two ratios counts, that of the fastest runs and the median over turns: load on the machine seldom
        disturbs both.
        """
        best: Latency | None = None
        with NcnnWorker(self.target) as first, NcnnWorker(self.target) as second:
            time, time_old = (
                partial(self.runner(timed.param, timed.bin, worker).time, timed.feeds, timed.outputs)
                for timed, worker in ((net, first), (old, second))
            )
            for _ in range(ATTEMPTS):
                latency = in_turns(time, time_old, _SECONDS)
                ratio = min(latency.ratio, latency.net / latency.other)
                if best is None or ratio < best.ratio:
                    best = replace(latency, ratio=ratio)
                if best.ratio <= enough:
                    break
        assert best is not None
        return best

    def memory(self, net: Timed) -> int | None:
        """Return the bytes that a new process needs to load the net and to run it once."""
        with NcnnWorker(self.target) as worker:
            before = worker.memory(restart=True)
            self.runner(net.param, net.bin, worker).time(net.feeds, net.outputs, 0.0)
            after = worker.memory()
        return None if before is None or after is None else after - before
