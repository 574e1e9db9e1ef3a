"""The loop of verification: run a net in each mode, on each set of inputs, and compare it with its reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, get_args

from onnx2ncnn_opt.errors import CrashError, Error, UnprovenError, VerificationError
from onnx2ncnn_opt.inputs.draws import Draw
from onnx2ncnn_opt.manifest import Manifest
from onnx2ncnn_opt.outputs import OutputReport, Status
from onnx2ncnn_opt.progress import announce
from onnx2ncnn_opt.runtime.base import Array, Failure
from onnx2ncnn_opt.verdict.rules import ORDER
from onnx2ncnn_opt.verification.model_runs import Run

MODEL = "ONNX Runtime's"  # outputs, the reference of a converted net
WrongRun = tuple[str, Mapping[str, Array]]  # a mode, and inputs by name
_COMPARED = ("ok", "mismatch", "nan")


@dataclass(frozen=True)
class VerifyReport:
    """The result of a verification: all outputs in each mode, with the largest errors and the worst status of all runs.

    If `optimize` stores weights in 16 bits, `folded` has the outputs of the same net with 32-bit weights. Their
    tolerance is smaller.
    """

    outputs: tuple[OutputReport, ...]
    seed: int | None  # the first seed of the inputs, None if the user gave inputs
    sizes: tuple[Mapping[str, int], ...] = ({},)  # dynamic sizes of the runs
    shapes: tuple[Mapping[str, tuple[int, ...]], ...] = ({},)  # the shapes of inputs with dynamic sizes
    checked: str = ""  # ncnn's device and modes
    draws: tuple[Draw, ...] = ()  # the inputs at each size
    notes: tuple[str, ...] = ()  # for users
    against: str = MODEL  # the reference
    folded: tuple[OutputReport, ...] = ()
    wrong: WrongRun | None = field(default=None, repr=False, compare=False)  # the first run with a wrong output
    manifest: Manifest | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        return f"VerifyReport({', '.join(map(str, self.rows))}; {self.checked})"

    @property
    def rows(self) -> tuple[OutputReport, ...]:
        """`folded` and `outputs`."""
        return (*self.folded, *self.outputs)

    @property
    def ok(self) -> bool:
        """True if every output agrees."""
        return all(output.status == "ok" for output in self.rows)

    @property
    def refused_other_sizes(self) -> bool:
        """True if a net that ran at one set of sizes only did so because ONNX Runtime refused the others."""
        return self.ok and self.manifest is not None and self.seed is not None

    def renamed(self, staged: Sequence[Path], files: Sequence[Path]) -> VerifyReport:
        """Return the report with the final names of staged files in its messages."""

        def named(row: OutputReport) -> OutputReport:
            for part, path in zip(staged, files, strict=True):
                row = replace(row, message=row.message.replace(str(part), str(path)))
            return row

        return replace(self, folded=tuple(map(named, self.folded)), outputs=tuple(map(named, self.outputs)))

    def check(self) -> None:
        """Raise VerificationError with a line for each output that does not agree."""
        check_outputs(self.folded, f"from {self.against} before their weights are stored in 16 bits")
        check_outputs(self.outputs, f"from {self.against}")


def check_outputs(outputs: Sequence[OutputReport], what: str) -> None:
    """Raise VerificationError with a line for each output that differs, or UnprovenError; `what` follows "differ"."""
    wrong = [
        f"  {output.name}{'' if output.mode == 'fp32' else f' in {output.mode}'}: {output.message}"
        for output in outputs
        if output.status != "ok"
    ]
    if is_wrong(outputs):
        raise VerificationError(f"{len(wrong)} of {len(outputs)} outputs differ {what}:\n" + "\n".join(wrong))
    if wrong:
        raise UnprovenError(f"{len(wrong)} of {len(outputs)} outputs are unproven:\n" + "\n".join(wrong))


class Judge(Protocol):
    """A net and its reference: a model in ONNX Runtime, or the net that it was made from."""

    def runs(self, mode: str) -> Iterable[Run]:
        """Return the inputs for a mode, with the reference's outputs."""

    def compare(self, run: Run, mode: str) -> Sequence[OutputReport]:
        """Run the net on these inputs, and compare its outputs."""


def judge_modes(judge: Judge, modes: Sequence[str]) -> tuple[tuple[OutputReport, ...], WrongRun | None]:
    """Run a net in each mode until inputs give a wrong output; return the reports, and the first wrong run."""
    rows: list[OutputReport] = []
    wrong: WrongRun | None = None
    for mode in modes:
        reports: list[list[OutputReport]] = []
        for run in judge.runs(mode):
            announce(f"ncnn runs the net in {mode}, {run or 'on the inputs'}")
            outputs = judge.compare(run, mode)
            at = f"at {run}: " if str(run) else ""
            texts = (f"{at}{output.message}" if output.message else "" for output in outputs)
            reports.append([replace(o, message=text, inputs=str(run)) for o, text in zip(outputs, texts, strict=True)])
            if is_wrong(outputs):
                wrong = wrong or (mode, run.feeds)
                break
        rows += [replace(merged(runs), mode=mode) for runs in zip(*reports, strict=True)]
    return tuple(rows), wrong


def failed(names: Iterable[str], error: Error) -> tuple[OutputReport, ...]:
    """Return the reports of all outputs of a net that does not run."""
    status: Status = "crashed" if isinstance(error, CrashError) else "refused"
    return tuple(OutputReport(name, None, status, str(error)) for name in names)


def missing(name: str, blob: str, failure: Failure) -> OutputReport:
    """Return the report of an output that ncnn could not compute."""
    return OutputReport(name, blob, "crashed" if failure.crashed else "missing", failure.reason)


def is_wrong(outputs: Sequence[OutputReport]) -> bool:
    """Return True if an output is wrong; "unproven" is not wrong."""
    return any(output.status not in ("ok", "unproven") for output in outputs)


def merged(reports: Sequence[OutputReport]) -> OutputReport:
    """Merge the reports of an output in all runs: the worst status (except "unproven"), and the largest errors.

    Of several runs that agree, the last rule of `RULES` counts, and then the largest error; a message stays.
    """
    proven = [output for output in reports if output.status != "unproven"] or reports

    def severity(output: OutputReport) -> tuple[int, int, float]:
        return get_args(Status).index(output.status), ORDER.get(output.rule, 0), output.max_rel or 0.0

    worst = max(proven, key=severity)
    message = next((o.message for o in (worst, *proven) if o.message and o.status == worst.status), "")

    def most(of: Callable[[Iterable[float]], float], key: str) -> float | None:
        numbers = [number for output in proven if (number := getattr(output, key)) is not None]
        return of(numbers) if numbers and worst.status in _COMPARED else None

    absolute, relative, cosine = most(max, "max_abs"), most(max, "max_rel"), most(min, "cosine")
    return replace(worst, message=message, max_abs=absolute, max_rel=relative, cosine=cosine)
