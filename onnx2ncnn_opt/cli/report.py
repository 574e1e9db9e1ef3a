"""``onnx2ncnn-opt report``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnx2ncnn_opt.cli.options import (
    EXISTING_FILE,
    bin_argument,
    given_options,
    manifest_option,
    run_options,
    verification_option,
)
from onnx2ncnn_opt.cli.output import Output, output_options
from onnx2ncnn_opt.cli.summary import failure, report_blocks, report_fields, require_runtimes
from onnx2ncnn_opt.cli.targets import check_targets, written
from onnx2ncnn_opt.report.words import file_size

if TYPE_CHECKING:
    from onnx2ncnn_opt.verification.options import Verification


@click.command(short_help="Write a page about a net.")
@click.argument("model", type=EXISTING_FILE, metavar="MODEL")
@click.argument("param", type=EXISTING_FILE, metavar="[NET.param]", required=False)
@bin_argument
@click.option(
    "-o", "path", type=click.Path(path_type=Path), metavar="FILE.html", required=True, help="The file to write."
)
@manifest_option
@given_options
@run_options
@output_options
@verification_option
def report(
    output: Output,
    model: Path,
    param: Path | None,
    bin: Path | None,
    path: Path,
    manifest_path: Path | None,
    verification: Verification,
) -> None:
    """Write an HTML page about a net of MODEL (.onnx or .pt2), from any converter. Without a net, convert MODEL first.

    The page shows the errors of outputs and layers, the cost of each layer, the memory of a run, and the edits of the
    passes. The net is verified as by `verify`. Exit codes: 0 the net is right, 3 it is wrong; both write the file.
    """
    if manifest_path and not param:
        raise click.UsageError("--manifest describes a net, and there is none: give NET.param")
    nets = {"the net": param, "the net's weights": bin}
    check_targets([path], {"the model": model, **{what: file for what, file in nets.items() if file}})
    require_runtimes(verification.on, "onnxruntime")
    from onnx2ncnn_opt.api.report import make_report

    with output.working(f"looking into {param or model}"):
        page = make_report(model, param, bin, verification, manifest=manifest_path)
    page.save(path)
    verified = page.verified
    assert verified is not None
    output.fields |= {**report_fields(verified), "files": written([path])}
    output.show(
        [*report_blocks(verified, param or "the net", model), f"wrote: {path} ({file_size(path.stat().st_size)})"]
    )
    if not verified.ok:
        raise failure(verified)
