"""``onnx2ncnn-opt mixed``."""

from __future__ import annotations

import os
from dataclasses import asdict, astuple
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnx2ncnn_opt.cli.options import EXISTING_FILE, given_options, manifest_option, place_options, verification_option
from onnx2ncnn_opt.cli.output import Output, output_options
from onnx2ncnn_opt.cli.targets import check_prefix, check_targets, written
from onnx2ncnn_opt.cli.verification import require_runtimes

if TYPE_CHECKING:
    from onnx2ncnn_opt.verification.options import Verification


@click.command(short_help="Find the fewest masks for fp16.")
@click.argument("model", type=EXISTING_FILE, metavar="MODEL.onnx")
@click.argument("param", type=EXISTING_FILE, metavar="NET.param")
@click.argument("bin", type=EXISTING_FILE, metavar="NET.bin")
@click.option("-o", "prefix", metavar="PREFIX", required=True, help="Write PREFIX.param and PREFIX.bin.")
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
@place_options
@output_options()
@verification_option
def mixed(
    output: Output,
    model: Path,
    param: Path,
    bin: Path,
    prefix: str,
    budget: float,
    manifest_path: Path | None,
    verification: Verification,
) -> None:
    """Give any net the fewest feature masks that fp16 needs.

    The files appear only after all steps have succeeded.
    """
    from onnx2ncnn_opt.manifest import read_manifest
    from onnx2ncnn_opt.param.files import NetFiles, write_net
    from onnx2ncnn_opt.report.mixed import MaskRow, mixed_blocks
    from onnx2ncnn_opt.verification.beside import manifest_beside
    from onnx2ncnn_opt.verification.mixed import mixed as mix

    check_prefix(prefix, (".param", ".bin", os.sep))
    files = NetFiles.at(prefix)
    check_targets(astuple(files), {"the model": model, "the net": param, "the net's weights": bin})
    require_runtimes(verification.on, "onnxruntime")
    manifest, note = (read_manifest(manifest_path), "") if manifest_path else manifest_beside(param, model)
    with output.working(f"finding masks for {param}"):
        result = mix(model, param, bin, budget=budget, manifest=manifest, verification=verification)
    write_net(result.graph, files.param, files.bin)
    rows = [MaskRow(str(chosen.mask), chosen.seconds) for chosen in result.chosen]
    notes = [f"note: {note}"] if note else []
    blocks = mixed_blocks(rows, result.before, result.after, budget, result.seconds, result.checked)
    wrote = [f"wrote: {path}" for path in astuple(files)]
    output.show([*notes, *blocks[:-1], *wrote, blocks[-1]])
    output.fields |= {
        "masks": [asdict(row) for row in rows],
        "budget": budget,
        "before": result.before,
        "after": result.after,
        "seconds": result.seconds,
        "checked": result.checked,
        "notes": [note] if note else [],
        "files": written(files),
    }
