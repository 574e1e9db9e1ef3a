"""``onnx2ncnn-opt verify``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from onnx2ncnn_opt.cli.options import EXISTING_FILE, Given, Runs, given_options, manifest_option, run_options
from onnx2ncnn_opt.cli.verification import failure, output_rows, output_sizes


@click.command(short_help="Compare any net with its model.")
@click.argument("model", type=EXISTING_FILE, metavar="MODEL")
@click.argument("param", type=EXISTING_FILE, metavar="NET.param")
@click.argument("bin", type=EXISTING_FILE, metavar="NET.bin")
@manifest_option
@given_options
@run_options()
def verify(
    model: Path,
    param: Path,
    bin: Path,
    manifest_path: Path | None,
    given: Given,
    runs: Runs,
) -> None:
    """Compare any net with MODEL (.onnx or .pt2) in ONNX Runtime."""
    from onnx2ncnn_opt.api.convert import reference
    from onnx2ncnn_opt.manifest import read_manifest
    from onnx2ncnn_opt.onnx.exported import exported
    from onnx2ncnn_opt.report.console import show, working
    from onnx2ncnn_opt.report.verification import checked_lines, output_table, sizes_lines
    from onnx2ncnn_opt.runtime.ort import SHARED
    from onnx2ncnn_opt.verification.beside import manifest_beside
    from onnx2ncnn_opt.verification.verify import verify_net

    manifest, note = (read_manifest(manifest_path), "") if manifest_path else manifest_beside(param, model)
    SHARED.warm_up()
    with working(f"running {param} against {model}", sys.stderr) as step:
        report = verify_net(
            reference(exported(model)),
            param,
            bin,
            manifest=manifest,
            **vars(given),
            **vars(runs),
            step=step,
        )
    notes = [note] if note else []
    show(
        [
            *(f"note: {text}" for text in (*notes, *report.notes)),
            *sizes_lines(output_sizes(report), others_refused=manifest is not None),
            output_table(output_rows(report.outputs)),
            *checked_lines(report.checked),
        ],
        sys.stdout,
    )
    if not report.ok:
        raise failure(report)
