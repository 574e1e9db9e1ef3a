"""What `optimize` tells about its work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from onnx2ncnn_opt.outputs import OutputReport
from onnx2ncnn_opt.report.console import Block, Table
from onnx2ncnn_opt.report.conversion import storage_lines
from onnx2ncnn_opt.report.verification import (
    LatencyRow,
    checked_lines,
    latency_lines,
    mask_lines,
    output_table,
)
from onnx2ncnn_opt.report.words import file_size
from onnx2ncnn_opt.rewrite.events import Applied, NearMiss


@dataclass(frozen=True)
class OptimizationSummary:
    """An optimisation that is done.

    `layers`, `memory` (peak bytes, blobs of unknown size) and `weights` (bytes) are before and after. `storage` is a
    name and the number of weights stored so, `kept` those that were not; `is_own` says that most were before. `renamed`
    are the inputs and outputs that have another name, or only an index, in the new files. `verified` is None if nothing
    was, `checked` says where and in which modes; `folded` is the net before its weights were shortened. `files` are
    paths and sizes in bytes.
    """

    source: str
    layers: tuple[int, int]
    applied: Sequence[Applied]
    near_misses: Sequence[NearMiss]
    dropped_splits: Sequence[str]
    unread_layers: int
    trailing_bytes: int
    memory: Sequence[tuple[int, int]]
    exchanged: int
    weights: tuple[int, int]
    storage: tuple[str, int]
    is_own: bool
    kept: Sequence[str]
    renamed: Mapping[str, str]
    caches: Sequence[str]
    folded: Sequence[OutputReport]
    verified: Sequence[OutputReport] | None
    files: Sequence[tuple[str, int]]
    seconds: float
    checked: str = ""
    masks: Sequence[str] = ()
    estimated: str = ""
    latency: LatencyRow | None = None
    notes: Sequence[str] = ()


def optimization_fields(summary: OptimizationSummary) -> dict[str, Any]:
    """The summary as JSON has it."""
    before, after = summary.layers
    (peak, unknown), (lower, unknown_after) = summary.memory
    is_known = not (unknown or unknown_after)
    small, large = summary.weights
    name, count = summary.storage
    return {
        "layers": {"before": before, "after": after},
        "rewrites": [asdict(event) for event in summary.applied],
        "near_misses": [asdict(event) for event in summary.near_misses],
        "memory": {"before": peak, "after": lower} if is_known else None,
        "weights": {"before": small, "after": large},
        "storage": {"encoding": name or None, "count": count, "kept": list(summary.kept)},
        "masks": list(summary.masks),
        "estimated": summary.estimated or None,
        "renamed": dict(summary.renamed),
        "caches": list(summary.caches),
        "notes": list(summary.notes),
        "files": [{"path": path, "bytes": size} for path, size in summary.files],
        "latency": None if summary.latency is None else asdict(summary.latency),
        "seconds": summary.seconds,
    }


def optimization_blocks(summary: OptimizationSummary, *, verbose: bool = False) -> list[Block]:
    """The summary as lines and tables: `verbose` adds every rewrite, and what nearly was one."""
    blocks: list[Block] = [f"net: {summary.source}"]
    if summary.unread_layers:
        blocks.append(f"note: layers after those that the header counts are left out: {summary.unread_layers}")
    if summary.trailing_bytes:
        blocks.append(f"note: {summary.trailing_bytes} bytes after the last weight are left out")
    blocks += [f"note: {text}" for text in summary.notes]
    if verbose:
        blocks += [f"rewrite: {event}" for event in summary.applied]
        blocks += [f"dropped: {line}" for line in summary.dropped_splits]
        blocks += [f"near miss: {event}" for event in summary.near_misses]
    before, after = summary.layers
    blocks.append(f"layers: {before} -> {after}")
    passes = Counter(event.pass_name for event in summary.applied)
    if passes:
        blocks.append(Table(("pass", "rewrites"), tuple((name, str(n)) for name, n in passes.items()), "pass"))
    (peak, unknown), (lower, unknown_after) = summary.memory
    if peak and not (unknown or unknown_after):
        count = "1 layer" if summary.exchanged == 1 else f"{summary.exchanged} layers"
        exchanged = f", with the operands of {count} exchanged" if summary.exchanged else ""
        blocks.append(f"memory: {file_size(peak)} -> {file_size(lower)} for blobs at their peak (estimate){exchanged}")
    else:
        blocks.append("memory: not known, as the sizes of blobs are not (see --shape)")
    small, large = summary.weights
    if large > small:
        blocks.append(f"weights: {file_size(small)} -> {file_size(large)}")
    blocks += storage_lines(*summary.storage, summary.kept, is_own=summary.is_own)
    blocks += [f"blob: {blob} is {name}" for blob, name in summary.renamed.items()]
    if summary.folded:
        blocks.append(output_table(summary.folded, "output in fp32"))
    if summary.verified:
        blocks.append(output_table(summary.verified))
        if summary.caches:
            blocks.append(f"note: caches are not compared, as only ncnn can read them: {', '.join(summary.caches)}")
    blocks += mask_lines(summary.masks, summary.estimated, verbose=verbose)
    blocks += latency_lines(summary.latency, "before")
    blocks += [f"wrote: {path} ({file_size(size)})" for path, size in summary.files]
    blocks.append(f"time: {summary.seconds:.1f} s{'' if summary.verified is not None else ', not verified'}")
    return [*blocks, *checked_lines(summary.checked, bool(summary.estimated))]
