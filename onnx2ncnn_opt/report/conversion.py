"""The report of `convert`: its results as JSON, lines and tables."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from onnx2ncnn_opt.manifest import Entry, Manifest
from onnx2ncnn_opt.report.console import Block
from onnx2ncnn_opt.report.summary import Summary, end_lines, layers_blocks, storage_lines, summary_fields
from onnx2ncnn_opt.report.verification import mask_lines, output_table, shapes_lines


@dataclass(frozen=True, eq=False, kw_only=True)
class ConversionSummary(Summary):
    """The facts about a finished conversion that the report shows.

    `prefix` starts the names of the `files`. `shapes` are the dynamic inputs' shapes in the runs. `notes` are other
    facts. `custom` are operators that became custom layers. `lost` are outputs that depend on none of ``--outputs``.
    `equal` are dynamic dimensions that became one, `cost` their costs, `fed_masks` inputs that are added to scores.
    """

    model: str
    producer: str
    manifest: Manifest
    custom: Sequence[str]
    lost: Sequence[str]
    equal: Sequence[str]
    cost: Sequence[str]
    fed_masks: Sequence[str]
    shapes: Sequence[Mapping[str, tuple[int, ...]]]
    prefix: str
    notes: Sequence[str] = ()


def conversion_fields(summary: ConversionSummary) -> dict[str, Any]:
    """Return the summary as the fields of a JSON object."""
    manifest = asdict(summary.manifest)
    return {
        "producer": summary.producer,
        "manifest": manifest,
        "layers": manifest["layers"],
        **summary_fields(summary),
        "custom": list(summary.custom),
        "notes": _notes(summary),
    }


def conversion_blocks(summary: ConversionSummary, *, verbose: bool = False) -> list[Block]:
    """Return the summary as lines and tables; `verbose` adds inputs, outputs, all rewrites and all near misses."""
    manifest = summary.manifest
    blocks: list[Block] = [f"model: {summary.model} (opset {manifest.source.opset}, {summary.producer})"]
    if verbose:
        blocks += [_port("input", tensor) for tensor in manifest.inputs]
        blocks += [_port("output", tensor) for tensor in manifest.outputs]
        blocks += [f"rewrite: {event}" for event in summary.applied]
        blocks += [f"near miss: {event}" for event in summary.near_misses]
    blocks += [f"bound: {bound.name} = {_value(bound.value)}" for bound in manifest.values]
    blocks += [f"note: {text}" for text in _notes(summary)]
    blocks += layers_blocks(summary, manifest.layers.before, manifest.layers.after)
    blocks += [f"custom: {op}" for op in summary.custom]
    blocks += storage_lines(summary)
    if summary.verified is not None:
        blocks += [f"note: {text}" for text in summary.notes]
        is_right = all(output.status == "ok" for output in summary.verified)
        blocks += [*shapes_lines(summary.shapes, others_refused=is_right), output_table(summary.verified)]
    blocks += mask_lines(summary.masks, summary.estimated, verbose=verbose)
    blocks.append(f"ncnn: {manifest.least_ncnn} or newer runs it")
    blocks += end_lines(summary, "ONNX Runtime")
    if summary.checked and not summary.estimated and "fp16" not in summary.checked:
        blocks.append("note: ARM and GPUs compute in fp16 by default; --on or --modes fp16 checks that")
    if summary.files:
        blocks.append(f"run: onnx2ncnn-opt example {shlex.quote(summary.prefix)} prints a program that runs the net")
    return blocks


def _notes(summary: ConversionSummary) -> list[str]:
    """Return the notes on dynamic sizes, lost outputs and masks."""
    notes = [f"{names} in this net: ONNX Runtime runs the model only with equal sizes" for names in summary.equal]
    notes += summary.cost
    if summary.lost:
        notes.append(f"nothing leads to {', '.join(summary.lost)} of the model: add what they need to --outputs")
    for size, least in summary.manifest.minimum.items():
        notes.append(f"{size} must be {least} or more in this net; for smaller sizes, fix it with --shape")
    for name in summary.fed_masks:
        notes.append(f"{name} is added to scores: -1e9 in a whole row gives NaN on ARM and GPUs, -1000 does not")
    return notes


def _port(kind: str, tensor: Entry) -> str:
    shape = ", ".join("?" if size is None else str(size) for size in tensor.shape)
    batch = "" if tensor.batch_axis is None else f", without its batch axis {tensor.batch_axis}"
    return f"{kind}: {tensor.name} {tensor.dtype}[{shape}] is blob {tensor.blob}{batch}"


def _value(value: object) -> str:
    """Return a value in the syntax of ``--value``, cut at 60 characters."""
    text = str(value).lower() if isinstance(value, (bool, tuple)) else str(value)
    return text if len(text) <= 60 else text[:60] + "..."
