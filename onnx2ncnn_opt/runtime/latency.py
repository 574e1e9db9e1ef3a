"""Latency of a net relative to another net or ONNX Runtime: both with one thread, alternating."""

import time
from collections.abc import Callable
from statistics import median

from onnx2ncnn_opt.outputs import Latency

_TURN_SECONDS, _MIN_TURNS = 0.05, 3
_CLOCK_STEP = 1e-9  # seconds


def in_turns(net: Callable[[float], list[float]], other: Callable[[float], list[float]], seconds: float) -> Latency:
    """Time two functions, which repeat a run for some seconds and return the seconds of each run.

    Both run once to warm up; then they alternate, and the order changes in every turn. Runs of 0 s do not count,
    because a thread's clock may stand still on a virtual machine.
    """
    runs = (net, other)
    for run in runs:
        run(0.0)
    fastest: tuple[list[float], list[float]] = ([], [])
    end = time.monotonic() + seconds
    while len(fastest[0]) < _MIN_TURNS or time.monotonic() < end:
        for index in (0, 1) if len(fastest[0]) % 2 == 0 else (1, 0):
            fastest[index].append(min(filter(None, runs[index](_TURN_SECONDS)), default=_CLOCK_STEP))
    ratios = [a / b for a, b in zip(*fastest, strict=True)]
    return Latency(min(fastest[0]) * 1e3, min(fastest[1]) * 1e3, median(ratios), len(ratios))
