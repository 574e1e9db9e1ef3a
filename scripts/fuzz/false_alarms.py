"""Verify right nets with many seeds, and list those that verification calls wrong.

    python -m scripts.fuzz.false_alarms ops models [--seeds 5] [-k REGEX]
    python -m scripts.fuzz.false_alarms FOLDER        # of .onnx files

`ops` are the cases of fixtures/ops that are not refusals, `models` the exports in fixtures/models. What is listed is
either a false alarm, or a net that is wrong at these inputs.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import Error, UnsupportedError
from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from onnx2ncnn_opt.verification.options import Verification
from testing.exports import MODELS, refilled
from testing.op_cases import load_cases

ROOT = Path(__file__).parents[2]

APART = 10  # more seeds than one verification takes


def subjects(names: list[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names, and what makes the models."""
    for name in names:
        if name == "ops":
            yield from ((str(case), case.model) for case in load_cases() if not case.result.startswith("refused"))
        elif name == "models":
            yield from ((path.stem, lambda path=path: refilled(path)) for path in MODELS)
        else:
            yield from ((path.stem, lambda path=path: path) for path in sorted(Path(name).glob("*.onnx")))


def main() -> None:
    """List them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("-k", default="", help="a regular expression for names")
    arguments = parser.parse_args()
    counts = {"right": 0, "refused": 0, "listed": 0}
    start = time.perf_counter()
    with NcnnWorker() as worker:
        for name, make in subjects(arguments.what):
            if not re.search(arguments.k, name):
                continue
            try:
                conversion = lower(make())
            except UnsupportedError:
                counts["refused"] += 1
                continue
            found = set()
            for number in range(arguments.seeds):
                try:
                    outputs = conversion.verify(verification=Verification(seed=number * APART), worker=worker).outputs
                    found |= {f"{o.name}: {o.status}: {o.message}" for o in outputs if o.status != "ok"}
                except Error as error:
                    found.add(f"{type(error).__name__}: {str(error).splitlines()[0]}")
            counts["listed" if found else "right"] += 1
            for text in sorted(found):
                print(f"{name}: {text}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in counts.items()), f"in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
