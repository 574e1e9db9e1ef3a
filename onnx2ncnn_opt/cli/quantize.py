"""``onnx2ncnn-opt quantize``."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnx2ncnn_opt.cli import options as option
from onnx2ncnn_opt.cli.headings import Grouped
from onnx2ncnn_opt.cli.output import Output, output_options
from onnx2ncnn_opt.cli.page import ReportFile, report_option
from onnx2ncnn_opt.cli.summary import require_runtimes
from onnx2ncnn_opt.cli.targets import check_prefix, check_targets, client_prefix, written
from onnx2ncnn_opt.errors import VerificationError
from onnx2ncnn_opt.report.words import some_of

if TYPE_CHECKING:
    from onnx2ncnn_opt.api.options import ConvertOptions
    from onnx2ncnn_opt.api.quantize import Quantization
    from onnx2ncnn_opt.manifest import Int8Layer


@click.command(cls=Grouped, short_help="Make an int8 net from data.")
@click.argument("net", type=option.EXISTING_FILE, metavar="MODEL.onnx|NET.param")
@click.argument("bin", type=option.EXISTING_FILE, required=False, metavar="[NET.bin]")
@click.option("-o", "prefix", metavar="PREFIX", required=True, help="Write PREFIX.ncnn.param, .bin and .json.")
@click.option(
    "--data",
    metavar="FILE.npz|FOLDER|MODULE:FUNCTION",
    help="Samples like those in use: arrays by input name whose first axis counts samples, a folder of arrays or "
    "pictures, or a function that yields them. A model that is quantised already needs none.",
)
@click.option("--keep", multiple=True, metavar="LAYER,...", help="Layers that stay float.")
@click.option("--all", "every", is_flag=True, help="Also make layers int8 that are no faster on this machine.")
@click.option(
    "--weights",
    type=click.Choice(["int8", "block8"]),
    help="The form of Gemm and attention: one scale, or one for 64 numbers of a row.  [default: blocks, if faster]",
)
@click.option(
    "--like",
    type=option.EXISTING_FILE,
    metavar="INT8.param",
    help="Make the same layers int8, in the same forms, as in an earlier net, without timing them.",
)
@click.option("--budget", "agreement", metavar="40dB|top1=0.99", help="The required agreement with the float net.")
@option.conversion_options
@option.place_options
@click.option("--keep-failed", is_flag=True, help="Keep the files of the best net if none meets the budget.")
@click.option("-v", "--verbose", is_flag=True, help="List all layers.")
@report_option
@output_options
def quantize(
    output: Output,
    net: Path,
    bin: Path | None,
    prefix: str,
    keep: tuple[str, ...],
    agreement: str | None,
    conversion: ConvertOptions,
    report: ReportFile,
    verbose: bool,
    **options: Any,
) -> None:
    """Make the layers int8 that are faster in int8 on this machine, with scales from data, and measure the loss.

    A model is first converted like by `convert`, with its options. The files appear only after all steps have
    succeeded.
    """
    is_net = net.name.endswith((".param", ".param.bin"))
    if conversion.client is not None and not is_net:
        prefix = str(client_prefix(net, prefix))
    check_prefix(prefix, (".param", ".bin", os.sep))
    from onnx2ncnn_opt.api.client import METADATA
    from onnx2ncnn_opt.api.lower import Files
    from onnx2ncnn_opt.api.quantize import quantize as make
    from onnx2ncnn_opt.api.working_options import advised
    from onnx2ncnn_opt.param.files import NetFiles

    files = (NetFiles.at(prefix) if is_net else Files.of(prefix)).paths
    files += (files[0].with_name(METADATA),) if conversion.client else ()
    sources = {"the model": net, **({"the net's weights": bin} if bin else {})}
    check_targets(files, sources)
    verification, keep_failed = conversion.verification, conversion.keep_failed
    assert verification is not None
    on = verification.on
    require_runtimes(on, *([] if is_net else ["onnxruntime"]))
    options["keep"] = [name for text in keep for name in text.split(",")]
    conversion = replace(conversion, verification=replace(verification, on=None), keep_failed=False)
    with report.written(output, sources):
        with (
            output.working(f"quantising {net}"),
            nullcontext() if is_net else advised(net, conversion, output.arguments),
        ):
            int8 = make(net, bin=bin, on=on, budget=agreement, conversion=conversion, **options)
        if not int8.result.missed or keep_failed:
            int8.save(prefix, keep_failed=True)
        output.show(list(_lines(int8, net, files, verbose=verbose)))
        fields = {name: value for name, value in vars(int8.result).items() if name != "graph"}
        output.fields |= {**fields, "layers": [asdict(row) for row in int8.layers], "files": written(files)}
        if int8.conversion is not None:
            report.add(output, int8.conversion, conversion.verification, int8=int8.manifest and int8.manifest.int8)
        if int8.result.missed:
            raise VerificationError(int8.result.missed)


def _lines(quantization: Quantization, net: Path, files: Sequence[Path], *, verbose: bool) -> Iterator[str]:
    """Yield lines with the verdict, the layers, their errors and times, and the files."""
    result, layers = quantization.result, quantization.layers
    before, after = result.seconds
    top1 = "" if result.top1 is None else f", {result.top1:.1%} of rows have the same largest entry"
    word = "missed" if result.missed else "ok"
    rows = "" if result.top1_at_least is None else f" and {result.top1_at_least:.1%} of rows,"
    if int8 := [row for row in layers if row.is_int8]:
        yield f"{word}: {files[0]} is {result.decibels:.1f} dB from {net} in float{top1} ({result.samples} samples)"
        yield f"other data: {result.at_least:.1f} dB{rows} or more (95 %, by the samples' number and spread)"
        yield f"layers: {len(int8)} of {len(layers)} are int8"
        time = "unknown" if math.isnan(after) else f"{before * 1e3:.4g} ms -> {after * 1e3:.4g} ms"
        yield f"time: {time} {result.times}"
        yield f"weights: {result.bytes[0] / 1e6:.2f} MB -> {result.bytes[1] / 1e6:.2f} MB"
    else:
        yield f"missed: {files[0]} would be {net} in float"
    for row in int8 if verbose else ():
        yield f"int8: {row.type} '{row.layer}': {', '.join(_measured(row))}"
    floats: dict[str, list[str]] = {}
    for row in layers:
        if not row.is_int8:
            floats.setdefault(row.reason if verbose else row.reason.partition(":")[0], []).append(row.layer)
    yield from (f"float: {some_of(names, every=verbose)}: {reason}" for reason, names in floats.items())
    yield from (f"note: {note}" for note in result.notes)
    if not result.missed:
        yield "wrote: " + ", ".join(str(path) for path in files if path.is_file())


def _measured(row: Int8Layer) -> Iterator[str]:
    """Yield what is known of an int8 layer."""
    from onnx2ncnn_opt.verification.sqnr import decibels

    if row.noise is not None:
        yield f"{decibels(row.noise):.1f} dB alone"
    if row.seconds is not None:
        yield " -> ".join(f"{seconds * 1e3:.3g}" for seconds in row.seconds) + " ms"
    if row.largest is not None:
        yield f"largest input {row.largest:.3g}, {row.cut or 0:.2%} saturate"
