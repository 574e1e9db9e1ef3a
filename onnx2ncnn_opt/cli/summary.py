"""The common report of `convert` and `optimize` on their work; `files` of it are as JSON has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from onnx2ncnn_opt.cli.verification import report_fields
from onnx2ncnn_opt.report.console import Block, Table
from onnx2ncnn_opt.report.verification import checked_lines, latency_lines, mask_lines
from onnx2ncnn_opt.report.words import file_size

if TYPE_CHECKING:
    from onnx2ncnn_opt.api.apply_passes import Optimized
    from onnx2ncnn_opt.api.lower import Conversion

Written = Sequence[Mapping[str, Any]]


def summary_fields(made: Conversion | Optimized, files: Written, seconds: float) -> dict[str, Any]:
    """Return the summary as JSON has it."""
    storage = made.storage
    return {
        "rewrites": [asdict(event) for event in made.applied],
        "near_misses": [asdict(event) for event in made.near_misses],
        "failed_passes": [asdict(event) for event in made.failed],
        "storage": {
            "encoding": storage.encoding.value if storage else None,
            "count": storage.count if storage else 0,
            "kept": [str(kept) for kept in storage.kept] if storage else [],
        },
        "masks": [str(mask) for mask in made.masks],
        "estimated": None if made.precision is None else str(made.precision),
        "price": None if made.precision is None else made.precision.price,
        "files": files,
        "latency": None if made.latency is None else asdict(made.latency),
        "seconds": seconds,
        "verification": report_fields(made.report) if made.report else None,
    }


def layers_blocks(made: Conversion | Optimized, before: int, after: int) -> list[Block]:
    """Return the numbers of layers before and after, and the passes that changed them."""
    passes = Counter(event.pass_name for event in made.applied)
    rows = tuple((name, str(count)) for name, count in passes.items())
    warnings = [f"warning: {event}" for event in made.failed]
    return [*warnings, f"layers: {before} -> {after}", *([Table(("pass", "rewrites"), rows, "pass")] if rows else [])]


def storage_lines(made: Conversion | Optimized) -> list[Block]:
    """Return the storage of weights if it changed, and a line for each weight that could not be stored so."""
    storage = made.storage
    if storage is None:
        return []
    name, kept = storage.encoding.value, storage.kept
    again = f"folded weights as {name} again, {len(kept)} have 32 bits now"
    which = again if storage.is_own else f"weights as {name}, {len(kept)} stay as they are"
    return [f"storage: {storage.count} {which}", *(f"not {name}: {line}" for line in kept)]


def end_lines(
    made: Conversion | Optimized, files: Written, seconds: float, other: str, *, verbose: bool, note: str = ""
) -> list[Block]:
    """Return the masks, a note, the times of the net and of the `other` one, the files, and the verification."""
    masks = [str(mask) for mask in made.masks]
    estimated, price = ("", 0.0) if made.precision is None else (str(made.precision), made.precision.price)
    return [
        *mask_lines(masks, estimated, price, verbose=verbose),
        *([note] if note else []),
        *latency_lines(made.latency, other),
        *(f"wrote: {file['path']} ({file_size(file['bytes'])})" for file in files),
        f"time: {seconds:.1f} s{'' if made.report is not None else ', not verified'}",
        *checked_lines(made.report.checked if made.report else "", bool(estimated)),
    ]
