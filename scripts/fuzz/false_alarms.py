"""Verify right nets with many seeds, and list those that verification calls wrong.

    python -m scripts.fuzz.false_alarms ops models snippets hard [--seeds 5] [-k REGEX]
    python -m scripts.fuzz.false_alarms FOLDER        # of .onnx files
    python -m scripts.fuzz.false_alarms hard --write

`ops` are the cases of fixtures/ops that are not refusals, `models` the exports in fixtures/models, `snippets` those in
fixtures/snippets, `hard` the models of testing/hard_models.py, whose outcomes `--write` puts into
fixtures/hard_models.tsv. A listed net is either a false alarm, or wrong at these inputs.
"""

import argparse
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import Error, RunError, UnsupportedError
from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from onnx2ncnn_opt.verification.options import Verification
from testing import snippets
from testing.exports import MODELS, refilled
from testing.hard_models import FAMILIES, SEEDS, hard_model
from testing.op_cases import load_cases

ROOT = Path(__file__).parents[2]

APART = 10  # more seeds than one verification takes


def subjects(names: list[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the names of models, and functions that make them."""
    for name in names:
        if name == "ops":
            yield from ((str(case), case.model) for case in load_cases() if not case.result.startswith("refused"))
        elif name == "models":
            yield from ((path.stem, lambda path=path: refilled(path)) for path in MODELS)
        elif name == "snippets":
            for variant in snippets.VARIANTS:
                yield from ((f"{kind}, {variant}", lambda model=model: model) for kind, model in snippets.kept(variant))
        elif name == "hard":
            for family in FAMILIES:
                for seed in range(SEEDS):
                    yield f"{family} {seed}", partial(hard_model, family, seed)
        else:
            yield from ((path.stem, lambda path=path: path) for path in sorted(Path(name).glob("*.onnx")))


def main() -> None:
    """List the false alarms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("-k", default="", help="a regular expression for names")
    parser.add_argument("--write", action="store_true", help="write the outcomes of `hard` to fixtures/hard_models.tsv")
    arguments = parser.parse_args()
    lines = ["family\tseed\toutcome"]
    counts = {"right": 0, "refused": 0, "listed": 0}
    start = time.perf_counter()
    with NcnnWorker() as worker:
        for name, make in subjects(arguments.what):
            if not re.search(arguments.k, name):
                continue
            try:
                conversion = lower(make())
            except (UnsupportedError, RunError):
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
            lines.append("\t".join((*name.split(" "), "; ".join(sorted(found)) or "ok")))
            for text in sorted(found):
                print(f"{name}: {text}", flush=True)
    if arguments.write:
        (ROOT / "fixtures" / "hard_models.tsv").write_text("\n".join(lines) + "\n")
    print(", ".join(f"{count} {what}" for what, count in counts.items()), f"in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
