"""What the commands that verify have in common: what they need, and how a result is shown and ends."""

from __future__ import annotations

from dataclasses import asdict, astuple, replace
from typing import TYPE_CHECKING, Any

from onnx2ncnn_opt.errors import VerificationError

if TYPE_CHECKING:
    from onnx2ncnn_opt.param.files import NetFiles
    from onnx2ncnn_opt.verification.verify import VerifyReport


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
