"""The results of `optimize` as JSON, lines and tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx2ncnn_opt.cli import summary
from onnx2ncnn_opt.report.console import Block
from onnx2ncnn_opt.report.words import file_size, number_of

if TYPE_CHECKING:
    from onnx2ncnn_opt.api.optimized import Optimized


def optimization_fields(result: Optimized, files: summary.Written, seconds: float) -> dict[str, Any]:
    """Return an optimised net as the fields of a JSON object."""
    before, after = result.layers
    old, new = result.memory
    old_size, new_size = result.sizes
    return {
        "layers": {"before": before, "after": after},
        **summary.summary_fields(result, files, seconds),
        "memory": None if old.unknown or new.unknown else {"before": old.peak, "after": new.peak},
        "weights": {"before": old_size, "after": new_size},
        "renamed": dict(result.renamed),
        "caches": result.caches,
        "notes": list(result.notes),
    }


def optimization_blocks(
    result: Optimized, source: Path, target: Path, files: summary.Written, seconds: float, *, verbose: bool
) -> list[Block]:
    """Return an optimised net as lines and tables, the verdict first; `verbose` adds rewrites and near misses."""
    notes = list(result.notes)
    if result.unread_layers:
        notes.append(f"layers after those that the header counts are left out: {result.unread_layers}")
    if result.trailing_bytes:
        notes.append(f"{result.trailing_bytes} bytes after the last weight are left out")
    if result.report and result.caches:
        notes.append(f"caches are not compared, as only ncnn can read them: {', '.join(result.caches)}")
    blocks = summary.start_blocks(result, str(target), str(source), notes, verbose=verbose)
    if verbose:
        blocks += [f"dropped: Split '{split.layer}': {split.reason}" for split in result.dropped_splits]
    blocks += summary.layers_blocks(result, *result.layers, verbose=verbose)
    old, new = result.memory
    if old.peak and not (old.unknown or new.unknown):
        count = number_of(result.exchanged, "layer")
        exchanged = f", with the operands of {count} exchanged" if result.exchanged else ""
        sizes = f"{file_size(old.peak)} -> {file_size(new.peak)}"
        blocks.append(f"memory: {sizes} for blobs at their peak (estimate){exchanged}")
    else:
        blocks.append("memory: not known, as the sizes of blobs are not (see --shape)")
    old_size, new_size = result.sizes
    if new_size > old_size:
        blocks.append(f"weights: {file_size(old_size)} -> {file_size(new_size)}")
    blocks += summary.storage_lines(result)
    blocks += [f"blob: {blob} is {name}" for blob, name in result.renamed.items()]
    blocks += summary.output_blocks(result.report, verbose=verbose)
    return blocks + summary.end_lines(result, files, seconds, "before", verbose=verbose)
