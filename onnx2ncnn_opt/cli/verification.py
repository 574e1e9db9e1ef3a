"""The common parts of commands that verify: requirements, output, and the error of a failed verification."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from onnx2ncnn_opt.errors import UnprovenError, VerificationError

if TYPE_CHECKING:
    from onnx2ncnn_opt.report.console import Block
    from onnx2ncnn_opt.verification.options import Verification
    from onnx2ncnn_opt.verification.report import VerifyReport


def needs_verification(verification: Verification) -> bool:
    """Return True if there are options for verification, which --no-verify would ignore."""
    v = verification
    return any(value not in (None, ()) for value in (v.feeds, v.on, v.modes, v.rtol, v.atol))


@contextmanager
def hint_at_no_verify(how: str) -> Iterator[None]:
    """Add to a VerificationError of the block that --no-verify works, and `how`."""
    try:
        yield
    except VerificationError as error:
        error.args = (f"{error}; --no-verify {how}",)
        raise


def require_runtimes(on: str | None, *packages: str) -> None:
    """Raise UsageError before the work if verification certainly cannot run."""
    from onnx2ncnn_opt.runtime.base import require
    from onnx2ncnn_opt.runtime.targets import find_target

    for package in packages:
        require(package)
    find_target(on).require()


def report_fields(report: VerifyReport) -> dict[str, Any]:
    """Return a verification as the fields of a JSON object."""
    return {
        "ok": report.ok,
        "outputs": [asdict(output) for output in report.outputs],
        "folded": [asdict(output) for output in report.folded],
        "sizes": [dict(sizes) for sizes in report.sizes],
        "seed": report.seed,
        "checked": report.checked,
        "notes": list(report.notes),
    }


def verdict(report: VerifyReport | None, net: str, other: str, *, is_estimated: bool = False) -> str:
    """Return a line: whether a net agrees with the other one, its largest error, and the devices and modes."""
    from onnx2ncnn_opt.verdict.rules import RESERVES

    if report is None:
        return f"done: {net}, not verified"
    rows, checked = report.rows, report.checked
    is_unproven = all(row.status in ("ok", "unproven") for row in rows)
    word, what = ("unproven", "may differ from") if is_unproven else ("wrong", "differs from")
    if _is_dead(report):
        what = "does not run, unlike"
    if report.ok:
        word, what = "ok", "agrees with"
    if is_estimated and ("fp16" not in checked or _stores_only(checked)):
        checked += ", fp16 estimated"
    errors = [row.max_rel for row in rows if row.max_rel is not None]
    error = [f"relative error {max(errors):.1e}"] if errors else []
    reserves = {row.rule: RESERVES[row.rule] for row in rows if report.ok and row.rule in RESERVES}
    return f"{word}: {net} {what} {other} ({'; '.join([*error, *reserves.values(), checked])})"


def _is_dead(report: VerifyReport) -> bool:
    return {row.status for row in report.rows} <= {"crashed", "refused"}


def _stores_only(checked: str) -> bool:
    return "fp16 storage" in checked


def stored_note(report: VerifyReport | None) -> list[str]:
    """Return a note if a net ran in fp16 on a CPU without fp16 arithmetic: x86, or ARM before v8.2."""
    note = "note: in fp16 this CPU only stores some weights in 16 bits, and computes in fp32; --on takes other devices"
    return [note] if report and _stores_only(report.checked) else []


def report_blocks(report: VerifyReport, net: object, model: object) -> list[Block]:
    """Return a verification as lines and tables: the verdict, notes, shapes, and outputs."""
    from onnx2ncnn_opt.report.verification import output_table, shapes_lines

    return [
        verdict(report, str(net), str(model)),
        *(f"note: {text}" for text in report.notes),
        *shapes_lines(report.shapes, others_refused=report.refused_other_sizes),
        output_table(report.outputs),
        *stored_note(report),
    ]


def failure(report: VerifyReport, consequence: str = "", after: str = "") -> VerificationError:
    """Return the error that ends a command after it has shown wrong outputs; `after` is the command to run next."""
    wrong = len({(output.name, output.mode) for output in report.rows if output.status != "ok"})
    is_unproven = all(output.status in ("ok", "unproven") for output in report.rows)
    what = "are missing" if _is_dead(report) else f"differ from {report.against}"
    what = "are unproven; give inputs that suit the model with --inputs" if is_unproven else what
    message = "; ".join(filter(None, (f"{wrong} of {len(report.outputs)} outputs {what}", consequence)))
    if is_unproven:
        return UnprovenError(message)
    return VerificationError(f"{message}\nnext: {after}" if after else message)
