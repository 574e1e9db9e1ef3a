"""The common parts of commands that verify: their requirements, the output of a result, and the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from onnx2ncnn_opt.errors import UnprovenError, VerificationError

if TYPE_CHECKING:
    from onnx2ncnn_opt.report.console import Block
    from onnx2ncnn_opt.verification.driver import VerifyReport
    from onnx2ncnn_opt.verification.options import Verification


def needs_verification(verification: Verification) -> bool:
    """Return True if options say how to verify; --no-verify would ignore them."""
    how = verification
    return any(value not in (None, ()) for value in (how.feeds, how.on, how.modes, how.rtol, how.atol))


@contextmanager
def hint_at_no_verify(how: str) -> Iterator[None]:
    """Add to an error that leaves nothing to compare with `how` --no-verify works."""
    try:
        yield
    except VerificationError as error:
        error.args = (f"{error}; --no-verify {how}",)
        raise


def require_runtimes(on: str | None, *packages: str) -> None:
    """Raise UsageError before the work where it is clear that a verification could not run."""
    from onnx2ncnn_opt.runtime.base import require
    from onnx2ncnn_opt.runtime.targets import find_target

    for package in packages:
        require(package)
    find_target(on).require()


def report_fields(report: VerifyReport) -> dict[str, Any]:
    """Return the fields of a verification in JSON."""
    return {
        "ok": report.ok,
        "outputs": [asdict(output) for output in report.outputs],
        "folded": [asdict(output) for output in report.folded],
        "sizes": [dict(sizes) for sizes in report.sizes],
        "seed": report.seed,
        "checked": report.checked,
        "notes": list(report.notes),
    }


def report_blocks(report: VerifyReport, net: object, model: object) -> list[Block]:
    """Return the verification of a net against its model for people: the verdict, notes, shapes, and outputs."""
    from onnx2ncnn_opt.report.verification import output_table, shapes_lines, stored_note, verdict

    return [
        verdict(report, str(net), str(model)),
        *(f"note: {text}" for text in report.notes),
        *shapes_lines(report.shapes, others_refused=report.ok and report.manifest is not None),
        output_table(report.outputs),
        *stored_note(report),
    ]


def failure(report: VerifyReport, consequence: str = "") -> VerificationError:
    """Return the error that ends a command if outputs differ; the outputs have already been shown."""
    wrong = len({(output.name, output.mode) for output in report.rows if output.status != "ok"})
    is_unproven = all(output.status in ("ok", "unproven") for output in report.rows)
    what = "are unproven; give inputs that suit the model" if is_unproven else f"differ from {report.against}"
    message = "; ".join(filter(None, (f"{wrong} of {len(report.outputs)} outputs {what}", consequence)))
    return UnprovenError(message) if is_unproven else VerificationError(message)
