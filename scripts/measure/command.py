"""The time that a command takes, and the memory of each process that it starts. For Linux.

    python -m scripts.measure.command [--times N] COMMAND...

Seconds are the least of N runs: by the clock, and of the CPU in all processes. Memory excludes mapped files. It is
the most in a run, seen every 20 ms.
"""

import argparse
import resource
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_EVERY = 0.02


def main() -> None:
    """Run the command, and print its time and memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    least = [float("inf")] * 2
    peaks: dict[int, int] = {}
    for _ in range(options.times):
        before, start, peaks, at_once = _cpu(), time.perf_counter(), {}, 0
        with subprocess.Popen(options.command, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None:
                now = {each: _anonymous(each) for each in _tree(process.pid)}
                peaks = {each: max(peaks.get(each, 0), now.get(each, 0)) for each in {**peaks, **now}}
                at_once = max(at_once, sum(now.values()))
                time.sleep(_EVERY)
        least = [min(least[0], time.perf_counter() - start), min(least[1], _cpu() - before)]
        print(f"exit {process.returncode}, {at_once} MB at once, of a process {', '.join(map(str, peaks.values()))} MB")
    print(f"{least[0]:.2f} s by the clock, {least[1]:.2f} s of the CPU")


def _cpu() -> float:
    """Return the seconds of all processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _tree(process: int) -> Iterator[int]:
    yield process
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            for child in path.read_text().split():
                yield from _tree(int(child))


def _anonymous(process: int) -> int:
    """Return MB; 0 for a process that has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024 // 10**6
    return 0


if __name__ == "__main__":
    main()
