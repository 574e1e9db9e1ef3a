"""``onnx2ncnn-opt mixed``."""

from __future__ import annotations

import os
import sys
from dataclasses import astuple
from pathlib import Path

import click

from onnx2ncnn_opt.cli.options import EXISTING_FILE, Given, Runs, given_options, manifest_option, run_options
from onnx2ncnn_opt.cli.targets import check_targets
from onnx2ncnn_opt.cli.verification import require_runtimes
from onnx2ncnn_opt.errors import UsageError


@click.command()
@click.argument("model", type=EXISTING_FILE, metavar="MODEL.onnx")
@click.argument("param", type=EXISTING_FILE, metavar="NET.param")
@click.argument("bin", type=EXISTING_FILE, metavar="NET.bin")
@click.option("-o", "output", metavar="PREFIX", required=True, help="Write PREFIX.param and PREFIX.bin.")
@click.option(
    "--budget",
    type=float,
    default=1e-2,
    show_default=True,
    metavar="ERROR",
    help="The largest error of an output in fp16, in units of its largest value.",
)
@manifest_option
@given_options
@run_options(modes=False)
def mixed(
    model: Path,
    param: Path,
    bin: Path,
    output: str,
    budget: float,
    manifest_path: Path | None,
    given: Given,
    runs: Runs,
) -> None:
    """Give any net the fewest feature masks that fp16 needs.

    The files appear only after all steps have succeeded.
    """
    from onnx2ncnn_opt.api.optimize import NetFiles
    from onnx2ncnn_opt.manifest import read_manifest
    from onnx2ncnn_opt.param.files import write_net
    from onnx2ncnn_opt.report.console import show, working
    from onnx2ncnn_opt.report.mixed import MaskRow, mixed_blocks
    from onnx2ncnn_opt.verification.beside import manifest_beside
    from onnx2ncnn_opt.verification.mixed import mixed as mix

    if output.endswith((".param", ".bin", os.sep)):
        raise UsageError(f"-o takes a prefix, not '{output}': '-o net' writes net.param and net.bin")
    files = NetFiles.at(output)
    check_targets(astuple(files), {"the model": model, "the net": param, "the net's weights": bin})
    require_runtimes(runs.on, "onnxruntime")
    manifest, note = (read_manifest(manifest_path), "") if manifest_path else manifest_beside(param, model)
    with working(f"finding masks for {param}", sys.stderr) as step:
        result = mix(
            model,
            param,
            bin,
            budget=budget,
            manifest=manifest,
            **vars(given),
            seed=runs.seed,
            on=runs.on,
            step=step,
        )
    write_net(result.graph, files.param, files.bin)
    rows = [MaskRow(str(chosen.mask), chosen.seconds) for chosen in result.chosen]
    notes = [f"note: {note}"] if note else []
    blocks = mixed_blocks(rows, result.before, result.after, budget, result.seconds, result.checked)
    wrote = [f"wrote: {path}" for path in astuple(files)]
    show([*notes, *blocks[:-1], *wrote, blocks[-1]], sys.stdout)
