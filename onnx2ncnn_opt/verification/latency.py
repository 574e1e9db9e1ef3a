"""Latency of a net and of another net or ONNX Runtime: both with one thread, alternating."""

import time
from collections.abc import Callable
from statistics import median

from onnx2ncnn_opt.outputs import Latency

# So long runs one before it is the other's turn, if not for a single run, and so many turns there are at least.
_SECONDS_EACH, _LEAST_TURNS = 0.05, 3
_SHORTEST = 1e-9  # seconds that the clock can tell


def in_turns(net: Callable[[float], list[float]], other: Callable[[float], list[float]], seconds: float) -> Latency:
    """Time two functions, which run something for some seconds and return the seconds of each run.

    Each runs once before; whichever is first in a turn is second in the next one. Runs of no time do not count: the
    clock of a thread stands still during a few of them on a virtual machine.
    """
    each = (net, other)
    for run in each:
        run(0.0)
    fastest: tuple[list[float], list[float]] = ([], [])
    end = time.monotonic() + seconds
    while len(fastest[0]) < _LEAST_TURNS or time.monotonic() < end:
        order = (0, 1) if len(fastest[0]) % 2 == 0 else (1, 0)
        for which in order:
            fastest[which].append(min(filter(None, each[which](_SECONDS_EACH)), default=_SHORTEST))
    ratios = [a / b for a, b in zip(*fastest, strict=True)]
    return Latency(min(fastest[0]) * 1e3, min(fastest[1]) * 1e3, median(ratios), len(ratios))
