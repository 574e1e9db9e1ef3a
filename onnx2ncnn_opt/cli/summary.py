"""The common report of `convert` and `optimize` on their work; `files` of it are as JSON has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from onnx2ncnn_opt.cli.verification import report_fields, stored_note, verdict
from onnx2ncnn_opt.report.console import Block, Table
from onnx2ncnn_opt.report.verification import latency_lines, mask_lines, output_table
from onnx2ncnn_opt.report.words import file_size, number_of

if TYPE_CHECKING:
    from onnx2ncnn_opt.api.apply_passes import Optimized
    from onnx2ncnn_opt.api.lower import Conversion
    from onnx2ncnn_opt.verification.driver import VerifyReport

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


def start_blocks(
    made: Conversion | Optimized, net: str, other: str, notes: Sequence[str], *, verbose: bool
) -> list[Block]:
    """Return the verdict on a net made of the `other` one, notes, and if `verbose` all rewrites and near misses."""
    blocks: list[Block] = [verdict(made.report, net, other, is_estimated=made.precision is not None)]
    blocks += [f"note: {text}" for text in notes]
    if verbose:
        blocks += [f"rewrite: {event}" for event in made.applied]
        blocks += [f"near miss: {event}" for event in made.near_misses]
    return blocks


def layers_blocks(
    made: Conversion | Optimized, before: int, after: int, *, verbose: bool, note: str = ""
) -> list[Block]:
    """Return the numbers of layers before and after, and if `verbose` the passes that changed them."""
    warnings = [f"warning: {event}" for event in made.failed]
    found = {"rewrite": made.applied, "near miss": made.near_misses}
    said = ", ".join(number_of(len(events), noun) for noun, events in found.items() if events)
    layers = f"layers: {before} -> {after}" + (f" ({said}; -v lists them)" if said and not verbose else "") + note
    passes = Counter(event.pass_name for event in made.applied)
    rows = tuple((name, str(count)) for name, count in passes.items())
    return [*warnings, layers, *([Table(("pass", "rewrites"), rows, "pass")] if rows and verbose else [])]


def output_blocks(report: VerifyReport | None, *, verbose: bool) -> list[Block]:
    """Return the outputs as tables, if `verbose` or if one does not agree; else what there is to say about them."""
    if report is None:
        return []
    if report.ok and not verbose:
        return [f"note: {row.name}: {row.message}" for row in report.rows if row.message]
    tables = (("output in fp32", report.folded), ("output", report.outputs))
    return [output_table(rows, label) for label, rows in tables if rows]


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
    made: Conversion | Optimized, files: Written, seconds: float, other: str, *, verbose: bool
) -> list[Block]:
    """Return the masks, the times of the net and of the `other` one, the files, and the time."""
    masks = [str(mask) for mask in made.masks]
    estimated, price = "", 0.0
    if (precision := made.precision) is not None:
        brief = precision.summary + ("; -v says more" if precision.details else "")
        estimated, price = str(precision) if verbose else brief, precision.price
    written = ", ".join(f"{file['path']} ({file_size(file['bytes'])})" for file in files)
    return [
        *mask_lines(masks, estimated, price, verbose=verbose),
        *latency_lines(made.latency, other),
        *([f"wrote: {written}"] if written else []),
        f"time: {seconds:.1f} s",
        *stored_note(made.report),
    ]
