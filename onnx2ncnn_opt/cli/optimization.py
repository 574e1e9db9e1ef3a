"""The report of `optimize` on its work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx2ncnn_opt.cli.summary import (
    Written,
    end_lines,
    layers_blocks,
    output_blocks,
    start_blocks,
    storage_lines,
    summary_fields,
)
from onnx2ncnn_opt.report.console import Block
from onnx2ncnn_opt.report.words import file_size

if TYPE_CHECKING:
    from onnx2ncnn_opt.api.apply_passes import Optimized


def optimization_fields(made: Optimized, files: Written, seconds: float) -> dict[str, Any]:
    """Return a finished optimisation as JSON has it."""
    before, after = made.layers
    peak, lower = made.memory
    small, large = made.sizes
    return {
        "layers": {"before": before, "after": after},
        **summary_fields(made, files, seconds),
        "memory": None if peak.unknown or lower.unknown else {"before": peak.peak, "after": lower.peak},
        "weights": {"before": small, "after": large},
        "renamed": dict(made.renamed),
        "caches": made.caches,
        "notes": list(made.notes),
    }


def optimization_blocks(
    made: Optimized, source: Path, target: Path, files: Written, seconds: float, *, verbose: bool
) -> list[Block]:
    """Return it as lines and tables, the verdict first; `verbose` adds every rewrite, and every near miss."""
    notes = list(made.notes)
    if made.unread_layers:
        notes.append(f"layers after those that the header counts are left out: {made.unread_layers}")
    if made.trailing_bytes:
        notes.append(f"{made.trailing_bytes} bytes after the last weight are left out")
    if made.report and made.caches:
        notes.append(f"caches are not compared, as only ncnn can read them: {', '.join(made.caches)}")
    blocks = start_blocks(made, str(target), str(source), notes, verbose=verbose)
    if verbose:
        blocks += [f"dropped: Split '{split.layer}': {split.reason}" for split in made.dropped_splits]
    blocks += layers_blocks(made, *made.layers, verbose=verbose)
    peak, lower = made.memory
    if peak.peak and not (peak.unknown or lower.unknown):
        count = "1 layer" if made.exchanged == 1 else f"{made.exchanged} layers"
        exchanged = f", with the operands of {count} exchanged" if made.exchanged else ""
        sizes = f"{file_size(peak.peak)} -> {file_size(lower.peak)}"
        blocks.append(f"memory: {sizes} for blobs at their peak (estimate){exchanged}")
    else:
        blocks.append("memory: not known, as the sizes of blobs are not (see --shape)")
    small, large = made.sizes
    if large > small:
        blocks.append(f"weights: {file_size(small)} -> {file_size(large)}")
    blocks += storage_lines(made)
    blocks += [f"blob: {blob} is {name}" for blob, name in made.renamed.items()]
    blocks += output_blocks(made.report, verbose=verbose)
    return blocks + end_lines(made, files, seconds, "before", verbose=verbose)
