"""``onnx2ncnn-opt verify``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnx2ncnn_opt.cli import options as option
from onnx2ncnn_opt.cli.headings import Grouped
from onnx2ncnn_opt.cli.output import Output, output_options
from onnx2ncnn_opt.cli.page import ReportFile, report_option
from onnx2ncnn_opt.cli.summary import failure, report_blocks, report_fields
from onnx2ncnn_opt.system import command_line

if TYPE_CHECKING:
    from onnx2ncnn_opt.verification.options import Verification


@click.command(cls=Grouped, short_help="Compare any net with its model.")
@click.argument("model", type=option.EXISTING_FILE, metavar="MODEL")
@click.argument("param", type=option.EXISTING_FILE, metavar="NET.param")
@option.bin_argument
@option.manifest_option
@option.given_options
@option.draw_options
@option.run_options
@option.effort_option
@option.tolerance_options
@report_option
@click.option("-v", "--verbose", is_flag=True, help="Print the error that each rule allows, and the inputs.")
@output_options
@option.verification_option
def verify(
    output: Output,
    model: Path,
    param: Path,
    bin: Path,
    manifest_path: Path | None,
    verification: Verification,
    report: ReportFile,
    verbose: bool,
) -> None:
    """Compare any net with MODEL (.onnx or .pt2) in ONNX Runtime."""
    from onnx2ncnn_opt.api import verify as api
    from onnx2ncnn_opt.runtime.ort import SHARED

    SHARED.warm_up()
    with report.written(output, {"the model": model, "the net": param, "the net's weights": bin}):
        with output.working(f"running {param} against {model}"):
            result = api.verify(model, param, bin, verification, manifest=manifest_path)
        if report.path is not None:
            from onnx2ncnn_opt.api.report import report_net

            with output.working("gathering what the report shows"):
                record = report_net(model, param, bin, result, verification)
            report.records.append(record)
    output.fields |= report_fields(result)
    output.show(report_blocks(result, param, model, verbose=verbose))
    if not result.ok:
        from onnx2ncnn_opt.api.working_options import without

        shared = without(output.arguments[1:], "--effort", "--rtol", "--atol", "--report")
        raise failure(result, after=command_line("bisect", *shared))
