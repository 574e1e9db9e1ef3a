"""Times of two nets in ncnn, run alternately in a child process, so that other work on the machine slows both alike."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

NetPaths = tuple[Path, Path]
_LEAST_RUNS = 6


class Latency(NamedTuple):
    """Milliseconds of CPU time of the fastest run of each net, and the median of second / first in one turn."""

    first: float
    second: float
    median: float

    @property
    def ratio(self) -> float:
        """Time of the second net, where the first takes 1."""
        return self.second / self.first

    def __str__(self) -> str:
        return f"{self.ratio:.2f} (median {self.median:.2f}) of {self.first:.3g} ms"


def compare(first: NetPaths, second: NetPaths, shapes: Mapping[str, Sequence[int]], seconds: float) -> Latency | None:
    """Time two nets: one thread, inputs of these shapes, as many runs as fit; None if ncnn does not run a net."""
    request = json.dumps([[*map(str, first)], [*map(str, second)], dict(shapes), seconds])
    done = subprocess.run([sys.executable, __file__, request], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    return Latency(*json.loads(lines[-1])) if done.returncode == 0 and lines else None


def _run(request: str) -> None:
    """Run in the child process: print a `Latency` as JSON."""
    import ncnn  # type: ignore[import-untyped]

    *files, shapes, seconds = json.loads(request)
    nets = []
    for param, bin in files:
        net = ncnn.Net()
        net.opt.num_threads = 1
        assert net.load_param(param) == net.load_model(bin) == 0
        nets.append(net)
    rng = np.random.default_rng(0)
    # A vector may be indexes, of which 0 is always one.
    feeds = {
        name: np.zeros(shape, np.int32) if len(shape) == 1 else rng.standard_normal(shape, np.float32)
        for name, shape in shapes.items()
    }

    def once(net: ncnn.Net) -> float:
        extractor = net.create_extractor()
        for name, array in feeds.items():
            extractor.input(name, ncnn.Mat(array).clone())
        start = time.thread_time()
        for name in net.output_names():
            assert extractor.extract(name)[0] == 0
        return time.thread_time() - start

    for net in nets:
        once(net)
    pairs: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(pairs) < _LEAST_RUNS:
        # Each is the first of a turn once: the second one finds what both need in the cache.
        a, b = once(nets[0]), once(nets[1])
        d, c = once(nets[1]), once(nets[0])
        pairs += [(a, b), (c, d)]
    least = [min(times) * 1e3 for times in zip(*pairs, strict=True)]
    print(json.dumps([*least, median(b / a for a, b in pairs)]))


if __name__ == "__main__":
    _run(sys.argv[1])
