"""The common report of `convert` and `optimize` on their work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from onnx2ncnn_opt.report.console import Block, Table
from onnx2ncnn_opt.report.verification import checked_lines, latency_lines
from onnx2ncnn_opt.report.words import file_size
from onnx2ncnn_opt.rewrite.events import Applied, Failed, NearMiss

if TYPE_CHECKING:
    from onnx2ncnn_opt.outputs import Latency, OutputReport


@dataclass(frozen=True, eq=False, kw_only=True)
class Summary:
    """A finished net.

    `storage` is a name and the number of weights stored so, `kept` the weights that were not. `verified` is None
    without a verification; `checked` says where and in which modes it ran. `files` are paths and sizes in bytes.
    """

    applied: Sequence[Applied]
    near_misses: Sequence[NearMiss]
    failed: Sequence[Failed]
    storage: tuple[str, int]
    kept: Sequence[str]
    verified: Sequence[OutputReport] | None
    files: Sequence[tuple[str, int]]
    seconds: float
    checked: str = ""
    masks: Sequence[str] = ()
    estimated: str = ""
    latency: Latency | None = None


def summary_fields(summary: Summary) -> dict[str, Any]:
    """Return the summary as JSON has it."""
    encoding, count = summary.storage
    return {
        "rewrites": [asdict(event) for event in summary.applied],
        "near_misses": [asdict(event) for event in summary.near_misses],
        "failed_passes": [asdict(event) for event in summary.failed],
        "storage": {"encoding": encoding or None, "count": count, "kept": list(summary.kept)},
        "masks": list(summary.masks),
        "estimated": summary.estimated or None,
        "files": [{"path": path, "bytes": size} for path, size in summary.files],
        "latency": None if summary.latency is None else asdict(summary.latency),
        "seconds": summary.seconds,
    }


def layers_blocks(summary: Summary, before: int, after: int) -> list[Block]:
    """Return the numbers of layers before and after, and the passes that changed them."""
    passes = Counter(event.pass_name for event in summary.applied)
    rows = tuple((name, str(count)) for name, count in passes.items())
    warnings = [f"warning: {event}" for event in summary.failed]
    return [*warnings, f"layers: {before} -> {after}", *([Table(("pass", "rewrites"), rows, "pass")] if rows else [])]


def storage_lines(summary: Summary, *, is_own: bool = False) -> list[Block]:
    """Return the storage of weights if it changed, and a line for each weight that could not be stored so.

    `is_own` is about a net that was stored so before.
    """
    name, count = summary.storage
    which = "folded weights as {0} again, {1} have 32 bits now" if is_own else "weights as {0}, {1} stay as they are"
    lines = [f"storage: {count} {which.format(name, len(summary.kept))}"] if name else []
    return [*lines, *(f"not {name}: {line}" for line in summary.kept)]


def end_lines(summary: Summary, other: str) -> list[Block]:
    """Return the times of the net and of the `other` one, the files, and the kind of verification."""
    return [
        *latency_lines(summary.latency, other),
        *(f"wrote: {path} ({file_size(size)})" for path, size in summary.files),
        f"time: {summary.seconds:.1f} s{'' if summary.verified is not None else ', not verified'}",
        *checked_lines(summary.checked, bool(summary.estimated)),
    ]
