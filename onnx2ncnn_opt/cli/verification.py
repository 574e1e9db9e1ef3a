"""The common parts of commands that verify: their requirements, the output of a result, and the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple
from typing import TYPE_CHECKING, Any

from onnx2ncnn_opt.errors import UnprovenError, VerificationError

if TYPE_CHECKING:
    from onnx2ncnn_opt.api.apply_passes import Optimized
    from onnx2ncnn_opt.api.lower import Conversion
    from onnx2ncnn_opt.param.files import NetFiles
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
        raise VerificationError(f"{error}; --no-verify {how}") from error


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


def fields_or_none(report: VerifyReport | None) -> dict[str, Any] | None:
    """Return the fields as `report_fields` does; None without a verification."""
    return None if report is None else report_fields(report)


def failure(report: VerifyReport, consequence: str = "") -> VerificationError:
    """Return the error that ends a command if outputs differ; the outputs have already been shown."""
    wrong = len({(output.name, output.mode) for output in report.rows if output.status != "ok"})
    is_unproven = all(output.status in ("ok", "unproven") for output in report.rows)
    what = "are unproven; give inputs that suit the model" if is_unproven else f"differ from {report.against}"
    message = "; ".join(filter(None, (f"{wrong} of {len(report.outputs)} outputs {what}", consequence)))
    return UnprovenError(message) if is_unproven else VerificationError(message)


def summary_of(made: Conversion | Optimized, files: NetFiles | None, start: float) -> dict[str, Any]:
    """Return the fields of a `Summary`; `files` are the written ones, `start` is when the work began."""
    storage, report = made.storage, made.report
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
        "latency": made.latency,
    }
