"""The results of verification, `convert` and `optimize`: JSON, lines and tables, and the error of a wrong net.

The module is imported for --help, so its functions import what they need of the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx2ncnn_opt.errors import UnprovenError, VerificationError
from onnx2ncnn_opt.report.console import Block, Table
from onnx2ncnn_opt.report.results import output_table, shapes_lines
from onnx2ncnn_opt.report.words import file_size, number_of, some_of
from onnx2ncnn_opt.system import command_line

if TYPE_CHECKING:
    from onnx2ncnn_opt.api.lower import Conversion
    from onnx2ncnn_opt.api.optimize import Optimized
    from onnx2ncnn_opt.api.result import NetResult
    from onnx2ncnn_opt.manifest import Entry, Image, Manifest
    from onnx2ncnn_opt.precision.masks import Precision
    from onnx2ncnn_opt.rewrite.prove_masks import Mask
    from onnx2ncnn_opt.verification.options import Verification
    from onnx2ncnn_opt.verification.report import VerifyReport

Written = Sequence[Mapping[str, Any]]  # entries of the JSON
_MANY_COPIES = 2**24  # numbers, 64 MB
_INNER = "values before the tail; use the printed program"
_WITHOUT = ", export without NMS, or give the value before it to --append nms:VALUE"
_MOST_NAMES = 6  # of equal sizes in a note


def needs_verification(verification: Verification) -> bool:
    """Return True if there are options for verification, which --no-verify would ignore."""
    v = verification
    return any(value not in (None, ()) for value in (v.feeds, v.on, v.modes, v.rtol, v.atol))


@contextmanager
def hint_at_no_verify(how: str) -> Iterator[None]:
    """Add to a VerificationError of the block that --no-verify works, and `how`."""
    try:
        yield
    except VerificationError as error:
        error.args = (f"{error}; --no-verify {how}",)
        raise


def require_runtimes(on: str | None, *packages: str) -> None:
    """Raise UsageError before the work if verification certainly cannot run."""
    from onnx2ncnn_opt.runtime.base import require
    from onnx2ncnn_opt.runtime.targets import find_target

    for package in packages:
        require(package)
    find_target(on).require()


def report_fields(report: VerifyReport) -> dict[str, Any]:
    """Return a verification as the fields of a JSON object."""
    return {
        "ok": report.ok,
        "outputs": [asdict(output) for output in report.outputs],
        "folded": [asdict(output) for output in report.folded],
        "sizes": [dict(sizes) for sizes in report.sizes],
        "seed": report.seed,
        "checked": report.checked,
        "notes": list(report.notes),
    }


def verdict(report: VerifyReport | None, net: str, other: str, *, is_estimated: bool = False) -> str:
    """Return a line: whether a net agrees with the other one, its largest error, and the devices and modes."""
    if report is None:
        return f"done: {net}, not verified"
    from onnx2ncnn_opt.verdict.rules import RESERVES

    rows, checked = report.rows, report.checked
    is_unproven = all(row.status in ("ok", "unproven") for row in rows)
    word, what = ("unproven", "may differ from") if is_unproven else ("wrong", "differs from")
    if _is_dead(report):
        what = "does not run, unlike"
    if report.ok:
        word, what = "ok", "agrees with"
    if is_estimated and ("fp16" not in checked or _stores_only(checked)):
        checked += ", fp16 estimated"
    errors = [row.max_rel for row in rows if row.max_rel is not None]
    error = [f"relative error {max(errors):.1e}"] if errors else []
    reserves = {row.rule: RESERVES[row.rule] for row in rows if report.ok and row.rule in RESERVES}
    return f"{word}: {net} {what} {other} ({'; '.join([*error, *reserves.values(), checked])})"


def _is_dead(report: VerifyReport) -> bool:
    return {row.status for row in report.rows} <= {"crashed", "refused"}


def _stores_only(checked: str) -> bool:
    return "fp16 storage" in checked


def stored_note(report: VerifyReport | None) -> list[str]:
    """Return a note if a net ran in fp16 on a CPU without fp16 arithmetic: x86, or ARM before v8.2."""
    note = "note: in fp16 this CPU only stores some weights in 16 bits, and computes in fp32; --on takes other devices"
    return [note] if report and _stores_only(report.checked) else []


def report_blocks(report: VerifyReport, net: object, model: object, *, verbose: bool = False) -> list[Block]:
    """Return a verification as lines and tables: the verdict, notes, shapes, and outputs."""
    return [
        verdict(report, str(net), str(model)),
        *(f"note: {text}" for text in report.notes),
        *shapes_lines(report.shapes, others_refused=report.refused_other_sizes),
        output_table(report.outputs, verbose=verbose),
        *stored_note(report),
    ]


def failure(report: VerifyReport, consequence: str = "", after: str = "") -> VerificationError:
    """Return the error that ends a command after it has shown wrong outputs; `after` is the command to run next."""
    wrong = len({(output.name, output.mode) for output in report.rows if output.status != "ok"})
    is_unproven = all(output.status in ("ok", "unproven") for output in report.rows)
    what = "are missing" if _is_dead(report) else f"differ from {report.against}"
    what = "are unproven; give inputs that suit the model with --inputs" if is_unproven else what
    message = "; ".join(filter(None, (f"{wrong} of {len(report.outputs)} outputs {what}", consequence)))
    if is_unproven:
        return UnprovenError(message)
    return VerificationError(f"{message}\nnext: {after}" if after else message)


def summary_fields(result: NetResult[Any], files: Written, seconds: float) -> dict[str, Any]:
    """Return the summary as the fields of a JSON object."""
    storage = result.storage
    return {
        "rewrites": [asdict(event) for event in result.applied],
        "near_misses": [asdict(event) for event in result.near_misses],
        "failed_passes": [asdict(event) for event in result.failed],
        "storage": {
            "encoding": storage.encoding.value if storage else None,
            "count": storage.count if storage else 0,
            "kept": list(storage.kept) if storage else [],
        },
        "masks": [str(mask) for mask in result.masks],
        "estimated": None if result.precision is None else str(result.precision),
        "price": None if result.precision is None else result.precision.price,
        "files": files,
        "latency": None if result.latency is None else asdict(result.latency),
        "seconds": seconds,
        "verification": report_fields(result.report) if result.report else None,
    }


def _net_blocks(
    result: NetResult[Any],
    net: object,
    other: object,
    notes: Sequence[str],
    layers: str,
    files: Written,
    seconds: float,
    *,
    start: Sequence[str] = (),
    middle: Sequence[str] = (),
    end: Sequence[str] = (),
    verbose: bool,
) -> list[Block]:
    """Return a net, made from the `other` one, as lines and tables, the verdict first; `verbose` adds all details.

    `start`, `middle` and `end` are further lines, before those with `layers`, storage and outputs.
    """
    precision, report, storage = result.precision, result.report, result.storage
    blocks: list[Block] = [verdict(report, str(net), str(other), is_estimated=precision is not None)]
    blocks += [f"note: {text}" for text in notes]
    events = {"rewrite": result.applied, "near miss": result.near_misses}
    blocks += [f"{kind}: {event}" for kind, listed in events.items() for event in listed if verbose]
    blocks += [*start, *(f"warning: {event}" for event in result.failed)]
    counts = ", ".join(number_of(len(listed), kind) for kind, listed in events.items() if listed)
    blocks.append(layers.format(f" ({counts}; -v lists them)" if counts and not verbose else ""))
    passes = Counter(event.pass_name for event in result.applied)
    rows = tuple((name, str(count)) for name, count in passes.items())
    blocks += [Table(("pass", "rewrites"), rows, "pass")] if rows and verbose else []
    blocks += middle
    if storage is not None:
        name, kept = storage.encoding.value, storage.kept
        own = f"folded weights as {name} again, {len(kept)} have 32 bits now"
        text = own if storage.is_own else f"weights as {name}, {len(kept)} stay as they are"
        blocks += [f"storage: {storage.count} {text}", *(f"not {name}: {line}" for line in kept)]
    blocks += end
    if report and report.ok and not verbose:
        blocks += [f"note: {row.name}: {row.message}" for row in report.rows if row.message]
    elif report:
        tables = (("output in fp32", report.folded), ("output", report.outputs))
        blocks += [output_table(rows, label) for label, rows in tables if rows]
    blocks += [*_mask_lines(result.masks, precision, verbose=verbose)]
    if (latency := result.latency) is not None:
        times = f"{latency.net:.3g} ms, {result.against} {latency.other:.3g} ms, ratio {latency.ratio:.2f}"
        blocks.append(f"latency: {times} (one thread, fp32, fastest of {latency.turns} turns)")
    written = ", ".join(f"{file['path']} ({file_size(file['bytes'])})" for file in files)
    blocks += [f"wrote: {written}"] if written else []
    return [*blocks, f"time: {seconds:.1f} s", *stored_note(report)]


def _mask_lines(masks: Sequence[Mask], precision: Precision | None, *, verbose: bool) -> list[str]:
    """Return lines with the number and cost of layers that need masks, and the effect of fp16 on the outputs.

    `verbose` adds the masks.
    """
    lines = [f"mask: {mask}" for mask in masks] if verbose else []
    if masks:
        cost = f", {precision.price:.0%} of the multiplications" if precision else ""
        need = f"masks: {number_of(len(masks), 'layer')} {'needs' if len(masks) == 1 else 'need'} more than fp16{cost}"
        lines.append(need if verbose else f"{need}; -v lists them")
    if precision is None:
        return lines
    summary = precision.summary + ("; -v says more" if precision.details else "")
    return [*lines, f"fp16 (estimated): {precision if verbose else summary}"]


def conversion_fields(result: Conversion, manifest: Manifest, files: Written, seconds: float) -> dict[str, Any]:
    """Return a conversion as the fields of a JSON object."""
    entries = asdict(manifest)
    return {
        "producer": result.model.producer,
        "manifest": entries,
        "layers": entries["layers"],
        **summary_fields(result, files, seconds),
        "custom": [str(op) for op in result.custom],
        "notes": _notes(result, manifest, verbose=True),
    }


def conversion_blocks(
    result: Conversion, manifest: Manifest, model: Path, prefix: Path, files: Written, seconds: float, *, verbose: bool
) -> list[Block]:
    """Return a conversion as lines and tables, the verdict first; `verbose` adds all details."""
    report, layers = result.report, manifest.layers
    bound = [f"bound: {bound.name} = {_value(bound.value)}" for bound in manifest.values]
    ports = [_port("input", tensor) for tensor in manifest.inputs]
    ports += [_port("output", tensor) for tensor in manifest.outputs]
    about = [f"model: {model} (opset {manifest.source.opset}, {result.model.producer})", *ports]
    blocks = _net_blocks(
        result,
        files[0]["path"] if files else f"{prefix}.ncnn.param",
        model,
        [*_notes(result, manifest, verbose=verbose), *(report.notes if report else ())],
        f"layers: {layers.before} -> {layers.after}{{}}; ncnn {manifest.least_ncnn} or newer runs them",
        files,
        seconds,
        start=[*about, *bound] if verbose else bound,
        middle=[*(f"custom: {op}" for op in result.custom), *_tail_lines(result, verbose=verbose)],
        end=shapes_lines(report.shapes, others_refused=report.refused_other_sizes) if report else [],
        verbose=verbose,
    )
    if report and report.checked and result.precision is None and "fp16" not in report.checked:
        blocks.append("note: ARM and GPUs compute in fp16 by default; --on or --modes fp16 checks that")
    example = f"next: {command_line('example', str(prefix))}  # a program that runs the net"
    return [*blocks, example] if files else blocks


def _notes(result: Conversion, manifest: Manifest, *, verbose: bool) -> list[str]:
    """Return the notes on dynamic sizes, lost outputs and masks."""
    from onnx2ncnn_opt.ir.cost import parameters
    from onnx2ncnn_opt.ir.dim import names_in
    from onnx2ncnn_opt.manifest import limit_of
    from onnx2ncnn_opt.param.splits import list_layers
    from onnx2ncnn_opt.rewrite.prove_masks import added_inputs

    limits = [(str(size), *limit_of(str(size), least)) for size, least in result.minimum.items()]
    notes = [
        f"{name} must be {limit} in this net"
        + ("; for smaller sizes, fix it with --shape" if name == size else ": a table or a sort takes no more")
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
    caches = {blob for pair in manifest.caches for blob in pair}
    listed = [name for name in list_layers(result.graph).outputs if name not in caches]
    if listed != [entry.blob for entry in manifest.read]:
        notes.append(f"ncnn lists the outputs as {', '.join(listed)}: take them by name, not by number")
    added = added_inputs(result.graph)
    for name in (port.name for port in result.inputs if port.blob in added):
        notes.append(f"{name} is added to scores: -1e9 in a whole row gives NaN on ARM and GPUs, -1000 does not")
    return notes


def _other_pixels(name: str, image: Image) -> str:
    """Return a note that the arithmetic is that on pixels of 0..1, as torchvision has it."""
    mean, std = (",".join(f"{255 * number:.5g}" for number in numbers) for numbers in (image.mean, image.std))
    return f"{name}: a std below 1 is for pixels of 0..1; for pixels of 0..255, take mean={mean}:std={std}"


def _quantized_notes(result: Conversion, *, verbose: bool) -> list[str]:
    """Return notes on a quantised model: its int8 layers, their differences from it, and its float layers."""
    at_run_time = {node.name for node in result.model.graph if node.op_type == "DynamicQuantizeLinear"}
    if result.options.quantized == "float" and at_run_time:
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


def _tail_lines(result: Conversion, *, verbose: bool) -> list[str]:
    """Return lines on the nodes in the tail, and the reasons."""
    if result.tail is None:
        return []
    count, reasons = number_of(len(result.tail.model.graph.node), "node"), result.tail.reasons
    manifest = result.manifest()
    net, model = (([x.name for x in entries]) for entries in (manifest.outputs, manifest.model_outputs))
    inner = ", ".join(entry.blob for entry in manifest.outputs if entry.name not in model)
    lost = ", ".join(name for name in model if name not in net)
    note = f"note: programs that load the .param alone get {inner} in place of {lost}: {_INNER}"
    note += _WITHOUT if "NonMaxSuppression" in result.tail.operators else ""
    if verbose:
        return [f"tail: {count} after the net", *(f"tail: {reason}" for reason in reasons), note]
    more = f" and {number_of(len(reasons) - 1, 'other reason')}; -v lists them" if len(reasons) > 1 else ""
    return [f"tail: {count} after the net: {reasons[0]}{more}", note]


def _port(kind: str, tensor: Entry) -> str:
    shape = ", ".join("?" if size is None else str(size) for size in tensor.shape)
    batch = "" if tensor.batch_axis is None else f", without its batch axis {tensor.batch_axis}"
    return f"{kind}: {tensor.name} {tensor.dtype}[{shape}] is blob {tensor.blob}{batch}"


def _value(value: object) -> str:
    """Return a value in the syntax of ``--value``, cut at 60 characters."""
    text = str(value).lower() if isinstance(value, (bool, tuple)) else str(value)
    return text if len(text) <= 60 else text[:60] + "..."


def optimization_fields(result: Optimized, files: Written, seconds: float) -> dict[str, Any]:
    """Return an optimised net as the fields of a JSON object."""
    before, after = result.layers
    old, new = result.memory
    old_size, new_size = result.sizes
    return {
        "layers": {"before": before, "after": after},
        **summary_fields(result, files, seconds),
        "memory": None if old.unknown or new.unknown else {"before": old.peak, "after": new.peak},
        "weights": {"before": old_size, "after": new_size},
        "renamed": dict(result.renamed),
        "caches": result.caches,
        "notes": list(result.notes),
    }


def optimization_blocks(
    result: Optimized, source: Path, target: Path, files: Written, seconds: float, *, verbose: bool
) -> list[Block]:
    """Return an optimised net as lines and tables, the verdict first; `verbose` adds rewrites and near misses."""
    notes = list(result.notes)
    if result.report and result.caches:
        notes.append(f"caches are not compared, as only ncnn can read them: {', '.join(result.caches)}")
    (old, new), (old_size, new_size), (before, after) = result.memory, result.sizes, result.layers
    memory = "memory: not known, as the sizes of blobs are not (see --shape)"
    if old.peak and not (old.unknown or new.unknown):
        count = number_of(result.exchanged, "layer")
        exchanged = f", with the operands of {count} exchanged" if result.exchanged else ""
        sizes = f"{file_size(old.peak)} -> {file_size(new.peak)}"
        memory = f"memory: {sizes} for blobs at their peak (estimate){exchanged}"
    weights = [f"weights: {file_size(old_size)} -> {file_size(new_size)}"] if new_size > old_size else []
    return _net_blocks(
        result,
        target,
        source,
        notes,
        f"layers: {before} -> {after}{{}}",
        files,
        seconds,
        start=[f"dropped: Split '{split.layer}': {split.reason}" for split in result.dropped_splits if verbose],
        middle=[memory, *weights],
        end=[f"blob: {blob} is {name}" for blob, name in result.renamed.items()],
        verbose=verbose,
    )
