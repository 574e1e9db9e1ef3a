"""Random valid ONNX models through `convert`: ncnn computes ONNX Runtime's results, or the model is refused.

    python -m scripts.fuzz.models [--kind any] [--count 10000] [--seed 0] [--first 0] [--reasons] [--verify]
    python -m scripts.fuzz.models --only N [--kind any] [--seed 0]     one model, cut down to what goes wrong

The models (testing/generators.py has their kinds) are made of any operators that fit, on one to three inputs
of any rank; every third has dynamic sizes and runs at three of each. Each is converted without and with passes, runs in
ncnn (with passes also without packing and related kernels), and is compared at the tolerance of `verify`; it is
converted again, which has to give the same bytes, and its net goes through `optimize`, which has to find nothing to
do, or nothing wrong where it knows less: how many images there are. Outcomes:

    right
    refused          the converter names a reason (--reasons counts them)
    ill-conditioned  outputs differ, but rounding each value in the model changes them as much
    unproven         with --verify: `verify` finds nothing to compare
    ALARM            with --verify: `verify` calls the right net wrong
    WRONG, CRASH, TRACEBACK, SLOW, UNSTABLE    never
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from testing.conformance import Outcome
from testing.fuzz_models import Fuzzer, guarded, shrunk
from testing.generators import GENERATORS
from testing.random_models import RandomModel

ROOT = Path(__file__).parents[2]
BATCH = 100


def child(first: int, count: int, seed: int, kind: str, is_verified: bool) -> None:
    """Judge a run of models, a line each: number, outcome, seconds, reason."""
    warnings.simplefilter("error")
    with NcnnWorker() as worker, tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(Path(folder), worker, is_verified=is_verified)
        for number in range(first, first + count):
            print(f"{number}\tbegin", flush=True)
            model = GENERATORS[kind](seed, number)
            start = time.monotonic()
            outcome = guarded(fuzzer, model)
            reason = " ".join(outcome.reason.split())
            print(f"{number}\t{outcome.kind}\t{time.monotonic() - start:.2f}\t{reason}", flush=True)


def campaign(count: int, first: int, options: Sequence[str]) -> Iterator[tuple[int, Outcome, float]]:
    """Yield the outcomes of a run of models, judged in child processes, and the seconds that each took."""
    number = first
    while number < first + count:
        batch = min(BATCH, first + count - number)
        command = [sys.executable, "-m", "scripts.fuzz.models", "--child", str(number), str(batch), *options]
        process = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        for line in process.stdout.splitlines():
            at, kind, *rest = line.split("\t")
            number = int(at)
            if rest:
                yield number, Outcome(kind, rest[1]), float(rest[0])
        if process.returncode:
            yield number, Outcome("CRASH", f"the process ended: {process.stderr[-300:]}"), 0.0
        number += 1


def report(outcomes: Iterator[tuple[int, Outcome, float]], *, reasons: bool) -> int:
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
        for reason, numbers in sorted(refusals.items(), key=lambda item: -len(item[1])):
            print(f"{len(numbers):5} {reason} (first {numbers[0]})")
    summary = ", ".join(f"{n} {kind}" for kind, n in counts.most_common())
    print(f"{counts.total()} models: {summary}; slowest {slowest:.1f} s")
    return int(any(Outcome(kind).is_bad for kind in counts))


def show(model: RandomModel, is_verified: bool) -> int:
    """Judge one model, and print it without the parts that do not matter."""
    with NcnnWorker() as worker, tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(Path(folder), worker, is_verified=is_verified)
        outcome = guarded(fuzzer, model)
        print(outcome.kind, outcome.reason)
        if not outcome.is_bad and outcome.kind != "refused":
            return 0
        model = shrunk(fuzzer, model, outcome.kind)
        print(guarded(fuzzer, model).reason)
        print(f"opset {model.opset}, inputs {_shapes(model, model.inputs)}, outputs {_shapes(model, model.outputs)}")
        for node in model.nodes:
            small = {name: model.constants[name] for name in node.input if name in model.constants}
            said = {name: a.tolist() if a.size < 9 else f"{a.dtype}{list(a.shape)}" for name, a in small.items()}
            attributes = {a.name: _value(a) for a in node.attribute}
            print(f"  {', '.join(node.output)} = {node.op_type}({', '.join(node.input)}) {attributes} {said}")
    return int(outcome.is_bad)


def _value(attribute: Any) -> Any:
    import onnx

    return onnx.helper.get_attribute_value(attribute)


def _shapes(model: RandomModel, names: Mapping[str, Any] | Sequence[str]) -> str:
    return ", ".join(f"{n}: {[f'{a.dtype}{list(a.shape)}' for a in model.values[n]]}" for n in names)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=GENERATORS, default="any")
    parser.add_argument("--verify", action="store_true", help="verify what is right, as `convert` does")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first model, as after a stop")
    parser.add_argument("--reasons", action="store_true", help="say how often each reason to refuse came")
    parser.add_argument("--only", type=int, help="one model, cut down to what goes wrong")
    parser.add_argument("--child", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        first, count = options.child
        child(first, count, options.seed, options.kind, options.verify)
        return 0
    if options.only is not None:
        return show(GENERATORS[options.kind](options.seed, options.only), options.verify)
    passed = ["--seed", str(options.seed), "--kind", options.kind, *["--verify"] * options.verify]
    return report(campaign(options.count, options.first, passed), reasons=options.reasons)


if __name__ == "__main__":
    sys.exit(main())
