"""Right nets that `convert` refuses: it verifies fixtures, whose nets are known to be right, as a user's models.

    python -m scripts.measure.false_alarms [MODEL.onnx ...]

Without models, those of fixtures/ops and fixtures/snippets. A line for each model that verification finds something in,
and then how many there were of each result. Models that ncnn cannot express, or ONNX Runtime cannot run, are left out.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import Error, RunError, UnsupportedError
from testing import snippets
from testing.op_cases import load_cases


def fixtures() -> Iterator[tuple[str, bytes]]:
    """Names and models of the fixtures."""
    yield from ((str(case), case.model().SerializeToString()) for case in load_cases())
    for variant in snippets.VARIANTS:
        yield from ((f"{name}, {variant}", model.SerializeToString()) for name, model in snippets.kept(variant))


def judged(model: bytes | Path) -> tuple[str, str]:
    """What verification says of a model's net, and why."""
    try:
        report = lower(model).verify()
    except (UnsupportedError, RunError):
        return "not run", ""
    except Error as error:
        return "failed", str(error)
    wrong = [row.message for row in report.rows if row.status not in ("ok", "unproven")]
    return ("wrong" if wrong else "right"), "; ".join(wrong)


def main() -> None:
    """Go through the models, and print what is not right."""
    paths = [Path(name) for name in sys.argv[1:]]
    models = ((path.name, path) for path in paths) if paths else fixtures()
    found: Counter[str] = Counter()
    for name, model in models:
        result, reason = judged(model)
        found[result] += 1
        if reason:
            print(f"{name}: {result}: {reason}", flush=True)
    print(", ".join(f"{count} {result}" for result, count in found.items()))


if __name__ == "__main__":
    main()
