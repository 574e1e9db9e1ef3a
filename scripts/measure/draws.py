"""Count the planted faults that each kind of draw finds, and that no other kind finds.

    python -m scripts.measure.draws [-k REGEX] [--each 1] [--seed 0] [--most N] [--write]

The nets and faults are those of `scripts.fuzz.faults`. Each net is verified on the inputs of one kind after the other,
so not only the first wrong run counts. Inputs like data serve the estimate of fp16 alone, and are not counted.
"""

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from onnx2ncnn_opt.inputs.draws import KINDS
from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from onnx2ncnn_opt.verification.model import ModelRuns, verify_net
from onnx2ncnn_opt.verification.model_runs import Run
from onnx2ncnn_opt.verification.options import Verification
from onnx2ncnn_opt.verification.report import VerifyReport
from scripts.measure.measured import table
from testing.faults import Campaign, Subject, models


class _OneKind(ModelRuns):
    """The runs of a model, computed once, of which those of one kind are used."""

    def __init__(self, subject: Subject, how: Verification) -> None:
        super().__init__(subject.model, how, subject.manifest)
        self.all, self.kind = list(super().runs()), ""

    def runs(self) -> Iterator[Run]:
        self.start = time.monotonic()
        return (run for run in self.all if run.draw is not None and run.draw.kind == self.kind)


@dataclass(frozen=True)
class _ByKind(Subject):
    """A right net; `caught` has the kinds that found the last fault."""

    caught: set[str] = field(default_factory=set)
    model_runs: list[_OneKind] = field(default_factory=list)

    def verified(self, net: tuple[Path, Path], worker: NcnnWorker, how: Verification) -> VerifyReport:
        if not self.model_runs:
            self.model_runs.append(_OneKind(self, how))
        runs, reports = self.model_runs[0], {}
        for kind in dict.fromkeys(run.draw.kind for run in runs.all if run.draw is not None):
            runs.kind = kind
            reports[kind] = verify_net(self.model, *net, how, manifest=self.manifest, worker=worker, runs=runs)
        self.caught.clear()
        self.caught.update(kind for kind, report in reports.items() if not report.ok)
        return min(reports.values(), key=lambda report: report.ok)


@dataclass(frozen=True)
class _Kinds(Campaign):
    subjects: list[_ByKind] = field(default_factory=list)

    def subject(self, name: str, model: Any, folder: Path) -> Subject | None:
        found = super().subject(name, model, folder)
        if found is not None:
            found = _ByKind(**{each.name: getattr(found, each.name) for each in fields(found)})
            self.subjects[:] = [found]
        return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", help="a regular expression for names of nets")
    parser.add_argument("--each", type=int, default=1, help="places for each class of faults in each net")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=sys.maxsize, help="faults in each net")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    total, alone, example = Counter[str](), Counter[str](), dict[str, str]()
    with NcnnWorker() as worker:
        campaign = _Kinds(worker, options.each, options.seed, options.most)
        for fault in campaign.run((name, model) for name, model in models() if re.search(options.k, name)):
            caught = campaign.subjects[0].caught if fault.outcome == "caught" else set()
            total.update([*caught, "all"] if caught else [])
            if len(caught) == 1:
                alone.update(caught)
                example.setdefault(next(iter(caught)), f"{fault.kind} in {fault.net}")
    with table("draws", ("kind", "finds", "of", "alone", "example"), write=options.write) as add:
        for kind in KINDS:
            numbers = (total[kind], total["all"], alone[kind]) if kind != "data" else (None, None, None)
            add(kind, *numbers, example.get(kind))


if __name__ == "__main__":
    main()
