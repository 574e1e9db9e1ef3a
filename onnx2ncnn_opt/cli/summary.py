"""The common results of `convert` and `optimize`: JSON, lines and tables; `files` are entries of the JSON."""

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
    from onnx2ncnn_opt.api.lower import Conversion
    from onnx2ncnn_opt.api.optimized import Optimized
    from onnx2ncnn_opt.verification.report import VerifyReport

Written = Sequence[Mapping[str, Any]]


def summary_fields(result: Conversion | Optimized, files: Written, seconds: float) -> dict[str, Any]:
    """Return the summary as the fields of a JSON object."""
    storage = result.storage
    return {
        "rewrites": [asdict(event) for event in result.applied],
        "near_misses": [asdict(event) for event in result.near_misses],
        "failed_passes": [asdict(event) for event in result.failed],
        "storage": {
            "encoding": storage.encoding.value if storage else None,
            "count": storage.count if storage else 0,
            "kept": [str(kept) for kept in storage.kept] if storage else [],
        },
        "masks": [str(mask) for mask in result.masks],
        "estimated": None if result.precision is None else str(result.precision),
        "price": None if result.precision is None else result.precision.price,
        "files": files,
        "latency": None if result.latency is None else asdict(result.latency),
        "seconds": seconds,
        "verification": report_fields(result.report) if result.report else None,
    }


def start_blocks(
    result: Conversion | Optimized, net: str, other: str, notes: Sequence[str], *, verbose: bool
) -> list[Block]:
    """Return the verdict on a net against the `other` one, notes, and if `verbose` all rewrites and near misses."""
    blocks: list[Block] = [verdict(result.report, net, other, is_estimated=result.precision is not None)]
    blocks += [f"note: {text}" for text in notes]
    if verbose:
        blocks += [f"rewrite: {event}" for event in result.applied]
        blocks += [f"near miss: {event}" for event in result.near_misses]
    return blocks


def layers_blocks(
    result: Conversion | Optimized, before: int, after: int, *, verbose: bool, note: str = ""
) -> list[Block]:
    """Return the numbers of layers before and after, and if `verbose` the passes that changed them."""
    warnings = [f"warning: {event}" for event in result.failed]
    all_events = {"rewrite": result.applied, "near miss": result.near_misses}
    counts = ", ".join(number_of(len(events), noun) for noun, events in all_events.items() if events)
    layers = f"layers: {before} -> {after}" + (f" ({counts}; -v lists them)" if counts and not verbose else "") + note
    passes = Counter(event.pass_name for event in result.applied)
    rows = tuple((name, str(count)) for name, count in passes.items())
    return [*warnings, layers, *([Table(("pass", "rewrites"), rows, "pass")] if rows and verbose else [])]


def output_blocks(report: VerifyReport | None, *, verbose: bool) -> list[Block]:
    """Return the outputs as tables if `verbose` or if one does not agree, else notes on them."""
    if report is None:
        return []
    if report.ok and not verbose:
        return [f"note: {row.name}: {row.message}" for row in report.rows if row.message]
    tables = (("output in fp32", report.folded), ("output", report.outputs))
    return [output_table(rows, label) for label, rows in tables if rows]


def storage_lines(result: Conversion | Optimized) -> list[Block]:
    """Return a line on weights in 16 bits, and a line for each weight that keeps 32 bits."""
    storage = result.storage
    if storage is None:
        return []
    name, kept = storage.encoding.value, storage.kept
    own = f"folded weights as {name} again, {len(kept)} have 32 bits now"
    text = own if storage.is_own else f"weights as {name}, {len(kept)} stay as they are"
    return [f"storage: {storage.count} {text}", *(f"not {name}: {line}" for line in kept)]


def end_lines(
    result: Conversion | Optimized, files: Written, seconds: float, other: str, *, verbose: bool
) -> list[Block]:
    """Return lines with the masks, the times of the net and the `other` one, the files, and the command's time."""
    masks = [str(mask) for mask in result.masks]
    estimated, price = "", 0.0
    if (precision := result.precision) is not None:
        summary = precision.summary + ("; -v says more" if precision.details else "")
        estimated, price = str(precision) if verbose else summary, precision.price
    written = ", ".join(f"{file['path']} ({file_size(file['bytes'])})" for file in files)
    return [
        *mask_lines(masks, estimated, price, verbose=verbose),
        *latency_lines(result.latency, other),
        *([f"wrote: {written}"] if written else []),
        f"time: {seconds:.1f} s",
        *stored_note(result.report),
    ]
