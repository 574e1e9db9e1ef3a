"""``onnx2ncnn-opt mixed``."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnx2ncnn_opt.cli.options import (
    EXISTING_FILE,
    bin_argument,
    budget_option,
    given_options,
    manifest_option,
    place_options,
    verification_option,
)
from onnx2ncnn_opt.cli.output import Output, output_options
from onnx2ncnn_opt.cli.summary import require_runtimes
from onnx2ncnn_opt.cli.targets import check_prefix, check_targets, written

if TYPE_CHECKING:
    from onnx2ncnn_opt.api.mixed import Mixed
    from onnx2ncnn_opt.param.files import NetFiles
    from onnx2ncnn_opt.verification.options import Verification


@click.command(short_help="Find the cheapest masks for fp16.")
@click.argument("model", type=EXISTING_FILE, metavar="MODEL.onnx")
@click.argument("param", type=EXISTING_FILE, metavar="NET.param")
@bin_argument
@click.option("-o", "prefix", metavar="PREFIX", required=True, help="Write PREFIX.param and PREFIX.bin.")
@budget_option
@manifest_option
@given_options
@place_options
@output_options
@verification_option
def mixed(
    output: Output,
    model: Path,
    param: Path,
    bin: Path,
    prefix: str,
    manifest_path: Path | None,
    verification: Verification,
) -> None:
    """Give any net the cheapest feature masks that fp16 needs.

    The files appear only after all steps have succeeded.
    """
    from onnx2ncnn_opt.api.mixed import mixed as mix
    from onnx2ncnn_opt.api.verify import manifest_for
    from onnx2ncnn_opt.param.files import NetFiles, write_net

    check_prefix(prefix, (".param", ".bin", os.sep))
    files = NetFiles.at(prefix)
    check_targets(files.paths, {"the model": model, "the net": param, "the net's weights": bin})
    require_runtimes(verification.on, "onnxruntime")
    manifest, note = manifest_for(model, param, manifest_path)
    with output.working(f"finding masks for {param}"):
        result = mix(model, param, bin, manifest=manifest, verification=verification)
    write_net(result.graph, files.param, files.bin)
    output.show([*([f"note: {note}"] if note else []), *_lines(result, files)])
    output.fields |= {
        "masks": [{"mask": str(mask), "seconds": seconds} for mask, seconds in result.masks],
        **{name: getattr(result, name) for name in ("budget", "before", "after", "seconds", "checked")},
        "notes": [note] if note else [],
        "files": written(files.paths),
    }


def _lines(result: Mixed, files: NetFiles) -> list[str]:
    """Return lines with the verdict, the masks and their costs, and the time."""
    error = "NaN or infinity" if math.isnan(result.before) else f"{result.before:.1e}"
    before = f", {error} without these masks" if result.masks else ""
    off = f"off by {result.after:.1e} of an output's largest value{before}; {result.budget:.1e} is allowed"
    lines = [f"ok: {files.param} is {off} ({result.checked})"]
    for mask, seconds in result.masks:
        lines.append(f"mask: {mask}" + ("" if seconds is None else f"; costs {seconds * 1e3:+.2f} ms"))
    time = "not measured" if result.seconds is None else f"{result.seconds * 1e3:.2f} ms with masks"
    return [*lines, f"masks: {len(result.masks)}", f"time: {time}", f"wrote: {', '.join(map(str, files.paths))}"]
