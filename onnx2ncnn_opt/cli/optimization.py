"""The report of `optimize` on its work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx2ncnn_opt.cli.summary import Written, end_lines, layers_blocks, storage_lines, summary_fields
from onnx2ncnn_opt.report.console import Block
from onnx2ncnn_opt.report.verification import output_table
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


def optimization_blocks(made: Optimized, source: Path, files: Written, seconds: float, *, verbose: bool) -> list[Block]:
    """Return it as lines and tables: `verbose` adds every rewrite, and every near miss."""
    blocks: list[Block] = [f"net: {source}"]
    if made.unread_layers:
        blocks.append(f"note: layers after those that the header counts are left out: {made.unread_layers}")
    if made.trailing_bytes:
        blocks.append(f"note: {made.trailing_bytes} bytes after the last weight are left out")
    blocks += [f"note: {text}" for text in made.notes]
    if verbose:
        blocks += [f"rewrite: {event}" for event in made.applied]
        blocks += [f"dropped: Split '{split.layer}': {split.reason}" for split in made.dropped_splits]
        blocks += [f"near miss: {event}" for event in made.near_misses]
    blocks += layers_blocks(made, *made.layers)
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
    if made.report and made.report.folded:
        blocks.append(output_table(made.report.folded, "output in fp32"))
    if made.report and made.report.outputs:
        blocks.append(output_table(made.report.outputs))
        if made.caches:
            blocks.append(f"note: caches are not compared, as only ncnn can read them: {', '.join(made.caches)}")
    return blocks + end_lines(made, files, seconds, "before", verbose=verbose)
