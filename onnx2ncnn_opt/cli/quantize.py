"""``onnx2ncnn-opt quantize``."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnx2ncnn_opt.cli.options import EXISTING_FILE, all_of, binding_options, changing, image_option, on_option
from onnx2ncnn_opt.cli.output import Output, output_options
from onnx2ncnn_opt.cli.targets import check_prefix, check_targets, written
from onnx2ncnn_opt.cli.verification import require_runtimes
from onnx2ncnn_opt.errors import VerificationError
from onnx2ncnn_opt.report.words import some_of

if TYPE_CHECKING:
    from onnx2ncnn_opt.api.quantize import Quantization


# The values of the options if none is given.
NO_QUANTIZATION: dict[str, Any] = dict.fromkeys(("data", "budget", "weights", "table", "like"))
NO_QUANTIZATION |= {"method": "mse", "keep": (), "every": False}


def _as_quantization(options: dict[str, Any]) -> None:
    """Collect the options as `quantization`; a budget that is a number belongs to the masks of `convert`."""
    masks_budget = {"budget": options.pop("budget")} if isinstance(options["budget"], float) else {}
    options |= {"quantization": {name: options.pop(name, None) for name in NO_QUANTIZATION}, **masks_budget}


# The options of `quantize` and of `convert --quantize`, as one dict.
quantization_options = all_of(
    changing(_as_quantization),
    click.option(
        "--data",
        metavar="FILE.npz|FOLDER|MODULE:FUNCTION",
        help="Samples like those in use: arrays by input name whose first axis counts samples, a folder of arrays or "
        "pictures, or a function that yields them. A model that is quantised already needs none.",
    ),
    click.option(
        "--method",
        type=click.Choice(["mse", "minmax", "percentile", "kl"]),
        default="mse",
        show_default=True,
        help="How to choose the threshold, the largest number that does not saturate.",
    ),
    click.option("--keep", multiple=True, metavar="LAYER,...", help="Layers that stay float."),
    click.option("--all", "every", is_flag=True, help="Also make layers int8 that are no faster on this machine."),
    click.option(
        "--weights",
        type=click.Choice(["int8", "block8"]),
        help="The form of Gemm and attention: one scale, or one for 64 numbers of a row.  [default: blocks, if faster]",
    ),
    click.option(
        "--table",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Scales in the format of ncnn2table: the file is read if it exists, else written.",
    ),
    click.option(
        "--like",
        type=EXISTING_FILE,
        metavar="INT8.param",
        help="Make the same layers int8, in the same forms, as in an earlier net, without timing them.",
    ),
)


@click.command(short_help="Make an int8 net from data.")
@click.argument("net", type=EXISTING_FILE, metavar="MODEL.onnx|NET.param")
@click.argument("bin", type=EXISTING_FILE, required=False, metavar="[NET.bin]")
@click.option("-o", "prefix", metavar="PREFIX", required=True, help="Write PREFIX.ncnn.param, .bin and .json.")
@image_option
@binding_options
@quantization_options
@click.option("--budget", metavar="40dB|top1=0.99", help="The required agreement with the float net.")
@on_option
@click.option("--keep-failed", is_flag=True, help="Keep the files of the best net if none meets the budget.")
@click.option("-v", "--verbose", is_flag=True, help="List all layers.")
@output_options
def quantize(
    output: Output,
    net: Path,
    bin: Path | None,
    prefix: str,
    quantization: dict[str, Any],
    verbose: bool,
    **options: Any,
) -> None:
    """Make the layers int8 that are faster in int8 on this machine, with scales from data, and measure the loss.

    The files appear only after all steps have succeeded.
    """
    quantize_to(output, net, prefix, quantization, options, output.fields, bin=bin, verbose=verbose)


def quantize_to(
    output: Output,
    net: Path,
    prefix: str | Path,
    quantization: Mapping[str, Any],
    options: Mapping[str, Any],
    fields: dict[str, Any],
    *,
    bin: Path | None = None,
    verbose: bool,
) -> Quantization:
    """Quantise a net, or a model with the `options` of a conversion, write it, and show the result."""
    from onnx2ncnn_opt.api.lower import Files
    from onnx2ncnn_opt.api.quantize import quantize as make
    from onnx2ncnn_opt.ir.graph import Graph
    from onnx2ncnn_opt.param.files import NetFiles
    from onnx2ncnn_opt.quantization.table import format_table

    check_prefix(str(prefix), (".param", ".bin", os.sep))
    is_net = net.name.endswith((".param", ".param.bin"))
    files = NetFiles.at(prefix) if is_net else Files.of(prefix)
    table = quantization["table"]
    is_read = table is not None and table.exists()
    check_targets(
        [*astuple(files), *([table] if table and not is_read else [])],
        {"the model": net, **({"the net's weights": bin} if bin else {})},
    )
    on = options["verification"].on if "verification" in options else options["on"]
    require_runtimes(on, *([] if is_net else ["onnxruntime"]))
    keep = [name for text in quantization["keep"] for name in text.split(",")]
    quantization = {**quantization, "keep": keep, "table": table if is_read else None}
    conversion = {name: value for name, value in options.items() if name not in ("keep_failed", "on")}
    with output.working(f"quantising {net}"):
        int8 = make(net, bin=bin, on=on, **quantization, **conversion)
    if not int8.result.missed or options["keep_failed"]:
        int8.save(prefix, keep_failed=True)
        if table is not None and not is_read:
            table.write_text(format_table(int8.graph), encoding="utf-8")
    output.show(_lines(int8, net, files, verbose=verbose))
    fields |= {**asdict(replace(int8.result, graph=Graph())), "files": written(files)}  # asdict would copy the graph
    del fields["graph"]
    if int8.result.missed:
        raise VerificationError(int8.result.missed)
    return int8


def _lines(quantization: Quantization, net: Path, files: Any, *, verbose: bool) -> list[str]:
    """Return lines with the verdict, the layers, their errors and times, and the files."""
    from onnx2ncnn_opt.verification.sqnr import decibels

    result, layers = quantization.result, quantization.layers
    int8 = [row for row in layers if row.is_int8]
    before, after = result.seconds
    top1 = "" if result.top1 is None else f", {result.top1:.1%} of rows have the same largest entry"
    word = "missed" if result.missed else "ok"
    rows = "" if result.top1_at_least is None else f" and {result.top1_at_least:.1%} of rows,"
    int8_net = [
        f"{word}: {files.param} is {result.decibels:.1f} dB from {net} in float{top1} ({result.samples} samples)",
        f"other data: {result.at_least:.1f} dB{rows} or more (95 %, by the samples' number and spread)",
        f"layers: {len(int8)} of {len(layers)} are int8",
        f"time: {'unknown' if math.isnan(after) else f'{before * 1e3:.2f} ms -> {after * 1e3:.2f} ms'} {result.times}",
        f"weights: {result.bytes[0] / 1e6:.2f} MB -> {result.bytes[1] / 1e6:.2f} MB",
    ]
    lines = int8_net if int8 else [f"missed: {files.param} would be {net} in float"]
    floats: dict[str, list[str]] = {}
    for row in layers:
        if row.is_int8 and verbose:
            ms = " -> ".join(f"{seconds * 1e3:.3f}" for seconds in row.seconds)
            lines.append(
                f"int8: {row.type} '{row.layer}': {decibels(row.noise):.1f} dB alone, {ms} ms, largest input "
                f"{row.largest:.3g}, {row.cut:.2%} cut off"
            )
        elif not row.is_int8:
            floats.setdefault(row.reason if verbose else row.reason.partition(":")[0], []).append(row.layer)
    lines += [f"float: {some_of(names, every=verbose)}: {reason}" for reason, names in floats.items()]
    lines += [f"note: {note}" for note in result.notes]
    if not result.missed:
        lines.append("wrote: " + ", ".join(str(path) for path in astuple(files) if path.is_file()))
    return lines
