"""What `convert` tells about its work."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from onnx2ncnn_opt.manifest import Manifest, Tensor
from onnx2ncnn_opt.outputs import OutputReport
from onnx2ncnn_opt.report.console import Block, Table
from onnx2ncnn_opt.report.verification import (
    LatencyRow,
    checked_lines,
    latency_lines,
    mask_lines,
    output_table,
    shapes_lines,
)
from onnx2ncnn_opt.report.words import file_size
from onnx2ncnn_opt.rewrite.events import Applied, NearMiss


@dataclass(frozen=True)
class ConversionSummary:
    """A conversion that is done.

    `prefix` is that of the `files`, which are paths and sizes in bytes; `verified` is None if nothing was, `shapes` are
    those of dynamic inputs that it was run at, `checked` says where and in which modes, `notes` what was seen besides.
    `custom` are the operators that became layers of their own, `lost` the model's outputs that no chosen one leads
    to, `equal` the dynamic dimensions that became one, `cost` what these cost. `storage` is a name and
    the number of weights stored so, `kept` those that were not.
    """

    model: str
    producer: str
    manifest: Manifest
    applied: Sequence[Applied]
    near_misses: Sequence[NearMiss]
    custom: Sequence[str]
    lost: Sequence[str]
    equal: Sequence[str]
    cost: Sequence[str]
    storage: tuple[str, int]
    kept: Sequence[str]
    verified: Sequence[OutputReport] | None
    shapes: Sequence[Mapping[str, tuple[int, ...]]]
    files: Sequence[tuple[str, int]]
    seconds: float
    prefix: str = ""
    checked: str = ""
    notes: Sequence[str] = ()
    masks: Sequence[str] = ()
    estimated: str = ""
    latency: LatencyRow | None = None


def conversion_fields(summary: ConversionSummary) -> dict[str, Any]:
    """The summary as JSON has it."""
    manifest = asdict(summary.manifest)
    encoding, count = summary.storage
    return {
        "producer": summary.producer,
        "manifest": manifest,
        "layers": manifest["layers"],
        "rewrites": [asdict(event) for event in summary.applied],
        "near_misses": [asdict(event) for event in summary.near_misses],
        "custom": list(summary.custom),
        "storage": {"encoding": encoding or None, "count": count, "kept": list(summary.kept)},
        "masks": list(summary.masks),
        "estimated": summary.estimated or None,
        "notes": _notes(summary),
        "files": [{"path": path, "bytes": size} for path, size in summary.files],
        "latency": None if summary.latency is None else asdict(summary.latency),
        "seconds": summary.seconds,
    }


def conversion_blocks(summary: ConversionSummary, *, verbose: bool = False) -> list[Block]:
    """The summary as lines and tables; `verbose` adds inputs and outputs, every rewrite, and what nearly was one."""
    manifest = summary.manifest
    blocks: list[Block] = [f"model: {summary.model} (opset {manifest.source.opset}, {summary.producer})"]
    if verbose:
        blocks += [_port("input", tensor) for tensor in manifest.inputs]
        blocks += [_port("output", tensor) for tensor in manifest.outputs]
        blocks += [f"rewrite: {event}" for event in summary.applied]
        blocks += [f"near miss: {event}" for event in summary.near_misses]
    blocks += [f"bound: {bound.name} = {_value(bound.value)}" for bound in manifest.values]
    blocks += [f"note: {text}" for text in _notes(summary)]
    blocks.append(f"layers: {manifest.layers.before} -> {manifest.layers.after}")
    passes = Counter(event.pass_name for event in summary.applied)
    if passes:
        blocks.append(Table(("pass", "rewrites"), tuple((name, str(n)) for name, n in passes.items()), "pass"))
    blocks += [f"custom: {op}" for op in summary.custom]
    blocks += storage_lines(*summary.storage, summary.kept)
    if summary.verified is not None:
        blocks += [f"note: {text}" for text in summary.notes]
        is_right = all(output.status == "ok" for output in summary.verified)
        blocks += [*shapes_lines(summary.shapes, others_refused=is_right), output_table(summary.verified)]
    blocks += mask_lines(summary.masks, summary.estimated, verbose=verbose)
    blocks.append(f"ncnn: {manifest.least_ncnn} or newer runs it")
    blocks += latency_lines(summary.latency, "ONNX Runtime")
    blocks += [f"wrote: {path} ({file_size(size)})" for path, size in summary.files]
    blocks.append(f"time: {summary.seconds:.1f} s{'' if summary.verified is not None else ', not verified'}")
    blocks += checked_lines(summary.checked, bool(summary.estimated))
    if summary.checked and not summary.estimated and "fp16" not in summary.checked:
        blocks.append("note: ARM and GPUs compute in fp16 unless told otherwise; --on or --modes fp16 checks that")
    if summary.files:
        blocks.append(f"run: onnx2ncnn-opt example {shlex.quote(summary.prefix)} prints a program that runs the net")
    return blocks


def _notes(summary: ConversionSummary) -> list[str]:
    """What the reader should know about the net."""
    notes = [f"{names} in this net: ONNX Runtime runs the model only with equal sizes" for names in summary.equal]
    notes += summary.cost
    if summary.lost:
        notes.append(f"nothing leads to {', '.join(summary.lost)} of the model: add what they need to --outputs")
    for size, least in summary.manifest.minimum.items():
        notes.append(f"{size} has to be {least} or more in this net; bind it with --shape where it is not")
    return notes


def _port(kind: str, tensor: Tensor) -> str:
    shape = ", ".join("?" if size is None else str(size) for size in tensor.shape)
    batch = "" if tensor.batch_axis is None else f", without its batch axis {tensor.batch_axis}"
    return f"{kind}: {tensor.name} {tensor.dtype}[{shape}] is blob {tensor.blob}{batch}"


def _value(value: object) -> str:
    """A value as it is given on the command line, shortened."""
    text = str(value).lower() if isinstance(value, (bool, tuple)) else str(value)
    return text if len(text) <= 60 else text[:60] + "..."


def storage_lines(name: str, count: int, kept: Sequence[str], *, is_own: bool = False) -> list[Block]:
    """How weights are stored, if not as they were, and a line for each that could not be.

    `is_own` is about a net that was stored so before.
    """
    which = "folded weights as {0} again, {1} have 32 bits now" if is_own else "weights as {0}, {1} stay as they are"
    lines = [f"storage: {count} {which.format(name, len(kept))}"] if name else []
    return [*lines, *(f"not {name}: {line}" for line in kept)]
