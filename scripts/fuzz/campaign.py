"""Runs of random cases, in this process or in others, and what the scripts beside print of their outcomes."""

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from onnx2ncnn_opt.errors import Error
from testing.conformance import Outcome

ROOT = Path(__file__).parents[2]
BATCH = 100

Judged: TypeAlias = Iterator[tuple[int, Outcome, float]]
"""The number of each case, its outcome, and the seconds that it took."""


def arguments(text: str | None, count: int) -> argparse.ArgumentParser:
    """Return the options that all campaigns have."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case, as after a stop")
    parser.add_argument("--child", type=int, nargs=2, help=argparse.SUPPRESS)
    return parser


def numbers(given: argparse.Namespace) -> range:
    """Return the numbers of the cases that were asked for."""
    return range(given.first, given.first + given.count)


def judged(given: argparse.Namespace, trial: Callable[[int], str]) -> Judged:
    """Try the cases. A trial returns an outcome, with a first word in capitals if it is never allowed."""
    for number in numbers(given):
        start = time.monotonic()
        try:
            end = trial(number)
        except Error as error:
            end = f"ERROR {type(error).__name__}: {error}"
        kind, _, reason = end.partition(" ")
        outcome = Outcome(kind.rstrip(":"), reason) if kind.rstrip(":").isupper() else Outcome(end)
        yield number, outcome, time.monotonic() - start


def answer(given: argparse.Namespace, judge: Callable[[int], Outcome]) -> None:
    """Judge the cases of a child of `in_children`, and tell it."""
    first, count = given.child
    for number in range(first, first + count):
        print(f"{number}\tbegin", flush=True)
        start = time.monotonic()
        outcome = judge(number)
        reason = " ".join(outcome.reason.split())
        print(f"{number}\t{outcome.kind}\t{time.monotonic() - start:.2f}\t{reason}", flush=True)


def in_children(module: str, cases: range, options: Sequence[str]) -> Judged:
    """Judge cases in child processes of a module, which may crash."""
    number, environment = cases.start, {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    while number < cases.stop:
        batch = min(BATCH, cases.stop - number)
        command = [sys.executable, "-m", module, "--child", str(number), str(batch), *options]
        process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
        for line in process.stdout.splitlines():
            at, kind, *rest = line.split("\t")
            number = int(at)
            if rest:
                yield number, Outcome(kind, rest[1]), float(rest[0])
        if process.returncode:
            yield number, Outcome("CRASH", f"the process ended: {process.stderr[-300:]}"), 0.0
        number += 1


def report(outcomes: Judged, *, reasons: bool = False) -> int:
    """Print the outcomes that are never allowed, and the count of each outcome; return 1 if there are any."""
    counts: Counter[str] = Counter()
    refusals: dict[str, list[int]] = {}
    slowest = 0.0
    for number, outcome, seconds in outcomes:
        counts[outcome.kind] += 1
        slowest = max(slowest, seconds)
        if counts.total() % BATCH == 0:
            print(f"up to {number}: {dict(counts.most_common())}", file=sys.stderr, flush=True)
        if outcome.is_bad:
            print(f"{number}: {outcome.kind} {outcome.reason}", flush=True)
        elif outcome.kind == "refused":
            for reason in re.sub(r"-?\d+(\.\d+)?", "#", outcome.reason).split(" & "):
                refusals.setdefault(reason, []).append(number)
    if reasons:
        for reason, cases in sorted(refusals.items(), key=lambda item: -len(item[1])):
            print(f"{len(cases):5} {reason} (first {cases[0]})")
    summary = ", ".join(f"{n} {kind}" for kind, n in counts.most_common())
    print(f"{counts.total()} cases: {summary}; slowest {slowest:.1f} s")
    return int(any(Outcome(kind).is_bad for kind in counts))
