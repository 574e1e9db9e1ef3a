"""The results of `convert` as JSON, lines and tables."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx2ncnn_opt.cli import summary
from onnx2ncnn_opt.ir.cost import parameters
from onnx2ncnn_opt.ir.dim import names_in
from onnx2ncnn_opt.manifest import Entry, Manifest, limit_of
from onnx2ncnn_opt.report.console import Block
from onnx2ncnn_opt.report.verification import shapes_lines
from onnx2ncnn_opt.report.words import number_of, some_of
from onnx2ncnn_opt.system import command_line

if TYPE_CHECKING:
    from onnx2ncnn_opt.api.lower import Conversion
    from onnx2ncnn_opt.manifest import Image

_MANY_COPIES = 2**24  # numbers, 64 MB
_MOST_NAMES = 6  # of equal sizes in a note


def conversion_fields(result: Conversion, manifest: Manifest, files: summary.Written, seconds: float) -> dict[str, Any]:
    """Return a conversion as the fields of a JSON object."""
    entries = asdict(manifest)
    return {
        "producer": result.model.producer,
        "manifest": entries,
        "layers": entries["layers"],
        **summary.summary_fields(result, files, seconds),
        "custom": [str(op) for op in result.custom],
        "notes": _notes(result, manifest, verbose=True),
    }


def conversion_blocks(
    result: Conversion,
    manifest: Manifest,
    model: Path,
    prefix: Path,
    files: summary.Written,
    seconds: float,
    *,
    verbose: bool,
) -> list[Block]:
    """Return a conversion as lines and tables, the verdict first; `verbose` adds all details."""
    report, net = result.report, files[0]["path"] if files else f"{prefix}.ncnn.param"
    notes = [*_notes(result, manifest, verbose=verbose), *(report.notes if report else ())]
    blocks = summary.start_blocks(result, net, str(model), notes, verbose=verbose)
    if verbose:
        blocks.append(f"model: {model} (opset {manifest.source.opset}, {result.model.producer})")
        blocks += [_port("input", tensor) for tensor in manifest.inputs]
        blocks += [_port("output", tensor) for tensor in manifest.outputs]
    blocks += [f"bound: {bound.name} = {_value(bound.value)}" for bound in manifest.values]
    layers, release = manifest.layers, f"; ncnn {manifest.least_ncnn} or newer runs them"
    blocks += summary.layers_blocks(result, layers.before, layers.after, verbose=verbose, note=release)
    blocks += [f"custom: {op}" for op in result.custom]
    blocks += _tail_lines(result, verbose=verbose)
    blocks += summary.storage_lines(result)
    blocks += shapes_lines(report.shapes, others_refused=report.refused_other_sizes) if report else []
    blocks += summary.output_blocks(report, verbose=verbose)
    blocks += summary.end_lines(result, files, seconds, "ONNX Runtime", verbose=verbose)
    if report and report.checked and result.precision is None and "fp16" not in report.checked:
        blocks.append("note: ARM and GPUs compute in fp16 by default; --on or --modes fp16 checks that")
    if files:
        example = command_line("example", str(prefix))
        blocks.append(f"next: {example}  # a program that runs the net")
    return blocks


def _notes(result: Conversion, manifest: Manifest, *, verbose: bool) -> list[str]:
    """Return the notes on dynamic sizes, lost outputs and masks."""
    limits = [(str(size), *limit_of(str(size), least)) for size, least in result.minimum.items()]
    notes = [
        f"{name} must be {limit} in this net"
        + ("; for smaller sizes, fix it with --shape" if name == size else ", as the model has a table of that length")
        for size, name, limit in limits
        if name != size or "(" not in size
    ]
    if len(notes) < len(limits):
        names = names_in(size for size in result.minimum if "(" in str(size))
        notes.append(f"{', '.join(sorted(names))}: this net may not take all sizes of the model")
    chains = [names if len(names) <= _MOST_NAMES else [*names[:_MOST_NAMES], "..."] for names in result.equal]
    notes += [f"{' = '.join(chain)} in this net: ONNX Runtime runs the model only with equal sizes" for chain in chains]
    notes += [result.appended.note] if result.appended else []
    notes += _quantized_notes(result, verbose=verbose)
    notes += result.cost
    if result.model.lost:
        notes.append(f"nothing leads to {', '.join(result.model.lost)} of the model: add what they need to --outputs")
    tensors = [t for value in result.model.graph.initializers.values() if (t := value.const_value) is not None]
    own, stored = sum(tensor.size for tensor in tensors), parameters(result.graph)
    short = sum(tensor.size for tensor in tensors if tensor.dtype.itemsize == 2 and tensor.dtype.is_floating_point())
    if 2 * short > own and result.storage is None:
        notes.append("the model's weights have 16 bits, and the net's 32; --fp16 keeps them: half the size")
    if stored > 4 * own + _MANY_COPIES:  # weights of 2 bits are four to a number
        copies = "ncnn's layers cannot share weights, so each has a copy, and computed tables are weights"
        notes.append(f"the net stores {stored:,} numbers, the model {own:,}: {copies}")
    images = {entry.name: entry.image for entry in manifest.inputs if entry.image}
    notes += [_other_pixels(name, image) for name, image in images.items() if max(image.std) < 1]
    for entry in manifest.inputs:
        if entry.length:
            past = f"no input says how long {entry.length[1]} is, and unset caches do not tell"
            notes.append(f"{past}: the net takes {entry.name}, a row as long as past and new tokens together")
    for name in result.fed_masks:
        notes.append(f"{name} is added to scores: -1e9 in a whole row gives NaN on ARM and GPUs, -1000 does not")
    return notes


def _other_pixels(name: str, image: Image) -> str:
    """Return a note that the arithmetic is that on pixels of 0..1, as torchvision has it."""
    mean, std = (",".join(f"{255 * number:.5g}" for number in numbers) for numbers in (image.mean, image.std))
    return f"{name}: a std below 1 is for pixels of 0..1; for pixels of 0..255, take mean={mean}:std={std}"


def _quantized_notes(result: Conversion, *, verbose: bool) -> list[str]:
    """Return notes on a quantised model: its int8 layers, their differences from it, and its float layers."""
    at_run_time = {node.name for node in result.model.graph if node.op_type == "DynamicQuantizeLinear"}
    if result.quantized == "float" and at_run_time:
        layers = sum(bool(at_run_time.intersection(layer.origin)) for layer in result.graph)
        what = f"the model rounds to 8 bits at run time, which takes {layers} layers"
        return [f"{what}; --quantized keep leaves it out: smaller, faster, nearer to the float model"]
    floats = {name: reason for name, reason in result.kept.items() if reason}
    count = len(result.kept) - len(floats)
    notes = []
    if count:
        notes = [
            f"{count} of {number_of(len(result.kept), 'quantised product')} in int8; ncnn rounds half away from 0 to "
            "-127..127; unsigned and shifted inputs have 127 / largest as their scale, up to twice the model's step; "
            "the model's other roundings are left out; --quantized float keeps them"
        ]
    by_reason: dict[str, list[str]] = {}
    for name, reason in floats.items():
        by_reason.setdefault(reason, []).append(name)
    return notes + [f"{some_of(names, every=verbose)} in float: {reason}" for reason, names in by_reason.items()]


def _tail_lines(result: Conversion, *, verbose: bool) -> list[Block]:
    """Return lines on the nodes in the tail, and the reasons."""
    if result.tail is None:
        return []
    count, reasons = number_of(len(result.tail.model.graph.node), "node"), result.tail.reasons
    if verbose:
        return [f"tail: {count} after the net", *(f"tail: {reason}" for reason in reasons)]
    more = f" and {number_of(len(reasons) - 1, 'other reason')}; -v lists them" if len(reasons) > 1 else ""
    return [f"tail: {count} after the net: {reasons[0]}{more}"]


def _port(kind: str, tensor: Entry) -> str:
    shape = ", ".join("?" if size is None else str(size) for size in tensor.shape)
    batch = "" if tensor.batch_axis is None else f", without its batch axis {tensor.batch_axis}"
    return f"{kind}: {tensor.name} {tensor.dtype}[{shape}] is blob {tensor.blob}{batch}"


def _value(value: object) -> str:
    """Return a value in the syntax of ``--value``, cut at 60 characters."""
    text = str(value).lower() if isinstance(value, (bool, tuple)) else str(value)
    return text if len(text) <= 60 else text[:60] + "..."
