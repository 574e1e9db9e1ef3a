"""What the commands that verify have in common: what they need, and how a result is shown and ends."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from onnx2ncnn_opt.errors import VerificationError

if TYPE_CHECKING:
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
        "sizes": [dict(sizes) for sizes in report.sizes],
        "seed": report.seed,
        "checked": report.checked,
        "notes": list(report.notes),
    }


def failure(report: VerifyReport, consequence: str = "") -> VerificationError:
    """The error that a command ends with when outputs differ; the outputs themselves have been shown."""
    wrong = sum(output.status != "ok" for output in report.outputs)
    message = f"{wrong} of {len(report.outputs)} outputs differ from ONNX Runtime's"
    return VerificationError(f"{message}; {consequence}" if consequence else message)
