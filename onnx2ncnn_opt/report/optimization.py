"""The report of `optimize` on its work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onnx2ncnn_opt.outputs import OutputReport
from onnx2ncnn_opt.report.console import Block
from onnx2ncnn_opt.report.summary import Summary, end_lines, layers_blocks, storage_lines, summary_fields
from onnx2ncnn_opt.report.verification import mask_lines, output_table
from onnx2ncnn_opt.report.words import file_size


@dataclass(frozen=True, eq=False, kw_only=True)
class OptimizationSummary(Summary):
    """An optimisation that is done.

    `layers`, `memory` (peak bytes, blobs of unknown size) and `weights` (bytes) are before and after. `is_own` says
    that most weights were stored so before. `renamed` are the inputs and outputs that have another name, or only an
    index, in the new files. `folded` is the net before its weights were shortened.
    """

    source: str
    layers: tuple[int, int]
    dropped_splits: Sequence[str]
    unread_layers: int
    trailing_bytes: int
    memory: Sequence[tuple[int, int]]
    exchanged: int
    weights: tuple[int, int]
    is_own: bool
    renamed: Mapping[str, str]
    caches: Sequence[str]
    folded: Sequence[OutputReport]
    notes: Sequence[str] = ()


def optimization_fields(summary: OptimizationSummary) -> dict[str, Any]:
    """Return the summary as JSON has it."""
    before, after = summary.layers
    (peak, unknown), (lower, unknown_after) = summary.memory
    is_known = not (unknown or unknown_after)
    small, large = summary.weights
    return {
        "layers": {"before": before, "after": after},
        **summary_fields(summary),
        "memory": {"before": peak, "after": lower} if is_known else None,
        "weights": {"before": small, "after": large},
        "renamed": dict(summary.renamed),
        "caches": list(summary.caches),
        "notes": list(summary.notes),
    }


def optimization_blocks(summary: OptimizationSummary, *, verbose: bool = False) -> list[Block]:
    """Return the summary as lines and tables: `verbose` adds every rewrite, and every near miss."""
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
    blocks += layers_blocks(summary, *summary.layers)
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
    blocks += storage_lines(summary, is_own=summary.is_own)
    blocks += [f"blob: {blob} is {name}" for blob, name in summary.renamed.items()]
    if summary.folded:
        blocks.append(output_table(summary.folded, "output in fp32"))
    if summary.verified:
        blocks.append(output_table(summary.verified))
        if summary.caches:
            blocks.append(f"note: caches are not compared, as only ncnn can read them: {', '.join(summary.caches)}")
    blocks += mask_lines(summary.masks, summary.estimated, verbose=verbose)
    return blocks + end_lines(summary, "before")
