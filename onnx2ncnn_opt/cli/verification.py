"""What the commands that verify have in common: what they need, and how a result is shown and ends."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, replace
from typing import TYPE_CHECKING, Any, TypeVar

from onnx2ncnn_opt.cli.output import Output
from onnx2ncnn_opt.errors import RunError, VerificationError

if TYPE_CHECKING:
    from onnx2ncnn_opt.api.convert import Conversion
    from onnx2ncnn_opt.api.optimize import Optimized
    from onnx2ncnn_opt.outputs import Latency
    from onnx2ncnn_opt.param.files import NetFiles
    from onnx2ncnn_opt.verification.verify import VerifyReport

Made = TypeVar("Made", "Conversion", "Optimized")


def needs_verification(checks: Mapping[str, Any]) -> bool:
    """Whether options are given that say how to verify, which --no-verify skips."""
    return any(checks.get(name) not in (None, ()) for name in ("feeds", "on", "modes", "rtol", "atol"))


def estimated(output: Output, made: Made, **options: Any) -> Made:
    """The net after ncnn has run it as if in fp16; as it was where ncnn cannot, of which its verification tells."""
    with output.working("estimating what fp16 does to it"), suppress(RunError):
        return made.estimated(**options)
    return made


@contextmanager
def told_without_report(how: str) -> Iterator[list[VerifyReport]]:
    """A list for the report of a verification. With a report, a VerificationError ends the block without an error.

    Without one there was nothing to compare with; `how` says what `--no-verify` does.
    """
    reports: list[VerifyReport] = []
    try:
        yield reports
    except VerificationError as error:
        if not reports:  # there is nothing to compare with
            raise VerificationError(f"{error}; --no-verify {how}") from error


def require_runtimes(on: str | None, *packages: str) -> None:
    """Raise UsageError before the work where it is clear that a verification could not run."""
    from onnx2ncnn_opt.runtime.base import require
    from onnx2ncnn_opt.runtime.targets import find_target

    for package in packages:
        require(package)
    find_target(on).require()


def report_fields(report: VerifyReport) -> dict[str, Any]:
    """A verification as JSON has it."""
    return {
        "ok": report.ok,
        "outputs": [asdict(output) for output in report.outputs],
        "folded": [asdict(output) for output in report.folded],
        "sizes": [dict(sizes) for sizes in report.sizes],
        "seed": report.seed,
        "checked": report.checked,
        "notes": list(report.notes),
    }


def fields_or_none(report: VerifyReport | None) -> dict[str, Any] | None:
    """As `report_fields`; None without a verification."""
    return None if report is None else report_fields(report)


def failure(report: VerifyReport, consequence: str = "") -> VerificationError:
    """The error that a command ends with when outputs differ; the outputs themselves have been shown."""
    wrong = len({(output.name, output.mode) for output in report.rows if output.status != "ok"})
    message = f"{wrong} of {len(report.outputs)} outputs differ from {report.against}"
    return VerificationError(f"{message}; {consequence}" if consequence else message)


def renamed(report: VerifyReport, staged: NetFiles, files: NetFiles) -> VerifyReport:
    """A report with the files' names as they are to be, not as they were while it was made."""

    def named(message: str) -> str:
        for part, path in zip(astuple(staged), astuple(files), strict=True):
            message = message.replace(str(part), str(path))
        return message

    outputs, folded = (
        tuple(replace(row, message=named(row.message)) for row in rows) for rows in (report.outputs, report.folded)
    )
    return replace(report, outputs=outputs, folded=folded)


def summary_of(
    made: Conversion | Optimized, report: VerifyReport | None, latency: Latency | None, files: Any | None, start: float
) -> dict[str, Any]:
    """The fields of a `Summary`; `files` are those that have been written, `start` is when the work began."""
    storage = made.storage
    return {
        "applied": made.applied,
        "near_misses": made.near_misses,
        "failed": made.failed,
        "storage": (storage.encoding.value, storage.count) if storage else ("", 0),
        "kept": [str(kept) for kept in storage.kept] if storage else [],
        "verified": None if report is None else report.outputs,
        "files": [] if files is None else [(str(path), path.stat().st_size) for path in astuple(files)],
        "seconds": time.perf_counter() - start,
        "checked": "" if report is None else report.checked,
        "masks": [str(mask) for mask in made.masks],
        "estimated": "" if made.precision is None else str(made.precision),
        "latency": latency,
    }
