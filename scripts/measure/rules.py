"""Count the rules that decide about outputs of right nets, and of nets with planted faults.

    python -m scripts.measure.rules ops models snippets hard [FOLDER ...] [--faults RESULTS.jsonl] [--write]

The names are those of scripts/fuzz/false_alarms.py; a FOLDER has .onnx files. `models` count twice, also with weights
in 16 bits. RESULTS are those of `scripts.fuzz.faults --results`: the rule that refused a caught fault, and the one that
let a missed fault through. With `--write` the table goes to fixtures/measured/rules.tsv.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import Error
from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from onnx2ncnn_opt.verdict.rules import RULES, UNPROVEN
from onnx2ncnn_opt.verification.options import Verification
from scripts.fuzz.false_alarms import subjects
from scripts.measure.measured import table

NAMES = [*(rule.name for rule in RULES), UNPROVEN.name]
OTHER = "wrong"  # an output of a right net: a false alarm; or a fault that no rule found, as a crash


def counted(models: Iterator[tuple[str, Callable[[], Any]]], storage: str | None, worker: NcnnWorker) -> Counter[str]:
    """Return how many outputs each rule decided."""
    counts: Counter[str] = Counter()
    for name, make in models:
        try:
            outputs = lower(make(), storage=storage).verify(Verification(), worker=worker).outputs
        except Error:  # refused, by this package or by ONNX Runtime
            continue
        wrong = [output for output in outputs if output.status not in ("ok", "unproven")]
        for output in wrong:
            print(f"# {name}: {output.name} {output.status} by {output.rule}: {output.message}", flush=True)
        counts.update(OTHER if output in wrong else output.rule for output in outputs)
    return counts


def of_faults(results: Path) -> Iterator[tuple[str, Counter[str]]]:
    """Yield the rules that refused planted faults, and the rules that let them through."""
    faults = [json.loads(line) for line in results.read_text().splitlines()]
    for what, outcomes in (("faults, caught", ("caught",)), ("faults, missed", ("small", "SERIOUS"))):
        yield what, Counter(fault["rule"] or OTHER for fault in faults if fault["outcome"] in outcomes)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", metavar="SOURCE")
    parser.add_argument("--faults", type=Path, metavar="RESULTS.jsonl")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    sources: list[tuple[str, str | None]] = [(name, None) for name in options.what]
    sources += [("models", "fp16")] if "models" in options.what else []
    with table("rules", ("source", "outputs", *NAMES, OTHER), write=options.write) as add, NcnnWorker() as worker:
        for name, storage in sources:
            counts = counted(subjects([name]), storage, worker)
            label = f"{Path(name).name}, weights in {storage}" if storage else Path(name).name
            add(label, counts.total(), *(counts[rule] for rule in (*NAMES, OTHER)))
        for label, counts in of_faults(options.faults) if options.faults else ():
            add(label, counts.total(), *(counts[rule] for rule in (*NAMES, OTHER)))


if __name__ == "__main__":
    main()
