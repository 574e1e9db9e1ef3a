"""``onnx2ncnn-opt convert``."""

from __future__ import annotations

import os
import re
import sys
import time
from contextlib import suppress
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnx2ncnn_opt.cli.options import (
    EXISTING_FILE,
    Given,
    Runs,
    given_options,
    masks_option,
    release_option,
    run_options,
    skip_option,
    storage_options,
)
from onnx2ncnn_opt.cli.targets import check_targets
from onnx2ncnn_opt.cli.verification import failure, output_rows, output_sizes, require_runtimes
from onnx2ncnn_opt.errors import RunError, UsageError, VerificationError

if TYPE_CHECKING:
    from onnx2ncnn_opt.api.convert import Files
    from onnx2ncnn_opt.onnx.read.given import GivenShapes
    from onnx2ncnn_opt.report.verification import OutputRow

_NO_PREFIX = (".param", ".bin", ".ncnn.json")


@click.command(short_help="Convert a model to a verified ncnn net.")
@click.argument("model", type=EXISTING_FILE, metavar="MODEL")
@click.option(
    "-o",
    "output",
    metavar="PREFIX",
    help="Write PREFIX.ncnn.param, PREFIX.ncnn.bin and PREFIX.ncnn.json, or files with the model's name into the "
    "folder PREFIX.  [default: the model's path without .onnx or .pt2]",
)
@given_options
@run_options()
@click.option(
    "--outputs",
    multiple=True,
    metavar="NAME,...",
    help="Convert only the part of the model up to these values.",
)
@click.option(
    "--batch-axis",
    "batch_axes",
    multiple=True,
    metavar="NAME:K",
    help="Axis of an input that is the batch, or NAME:none.  [default: found in the model]",
)
@release_option()
@storage_options
@click.option(
    "--custom",
    multiple=True,
    metavar="DOMAIN::OP[=TYPE][:ATTR,...]",
    help="Convert an operator to a layer of your own; its attributes become parameters 0, 1, ...  Needs --no-verify.",
)
@masks_option
@click.option("--no-verify", is_flag=True, help="Do not compare the net with ONNX Runtime.")
@click.option("--keep-failed", is_flag=True, help="Keep the files of a net that fails verification.")
@skip_option()
@click.option("--no-optimize", is_flag=True, help="Skip all passes.")
@click.option("-v", "--verbose", is_flag=True, help="List every rewrite, and every near miss with the reason.")
def convert(
    model: Path,
    output: str | None,
    given: Given,
    runs: Runs,
    outputs: tuple[str, ...],
    batch_axes: tuple[str, ...],
    release: int | None,
    storage: str | None,
    custom: tuple[str, ...],
    no_masks: bool,
    no_verify: bool,
    keep_failed: bool,
    skip: tuple[str, ...],
    no_optimize: bool,
    verbose: bool,
) -> None:
    """Convert MODEL, an .onnx or .pt2 file, to an optimised ncnn net, and verify it.

    The files appear only after all steps have succeeded.
    """
    start = time.perf_counter()
    if no_verify and (given.feeds or keep_failed or runs.on or runs.modes):
        raise click.UsageError("--inputs, --on, --modes and --keep-failed need verification, which --no-verify skips")
    from onnx2ncnn_opt.api import convert as api
    from onnx2ncnn_opt.ir.releases import NEWEST
    from onnx2ncnn_opt.onnx.read.pt2 import is_pt2
    from onnx2ncnn_opt.report.console import show, working
    from onnx2ncnn_opt.report.conversion import ConversionSummary, conversion_blocks

    if custom and not no_verify:
        raise UsageError(f"--custom needs --no-verify: {api.NOT_RUN}, so that the net cannot be verified")
    prefix = _prefix(model, output)
    files = api.Files.at(prefix)
    check_targets(astuple(files), {"the model": model})
    if not no_verify:
        from onnx2ncnn_opt.runtime.ort import SHARED

        require_runtimes(runs.on, "onnxruntime")
        SHARED.warm_up()  # which takes a part of a second, on another core
    requested = [name for names in outputs for name in names.split(",")]
    equal: list[str] = []
    sizes: GivenShapes = given.shapes
    if not no_verify and not is_pt2(model):  # torch.export tells itself which sizes are equal
        from onnx2ncnn_opt.verification.equal_sizes import equal_sizes

        with working(f"looking at the sizes of {model}", sys.stderr):
            tied = equal_sizes(model, shapes=given.shapes, values=given.values, outputs=requested)
        sizes, equal = tied.shapes, [" = ".join(names) for names in tied.names]
    with working(f"converting {model}", sys.stderr):
        options: dict[str, Any] = {
            "values": given.values,
            "outputs": requested,
            "batch_axes": dict(map(_batch_axis, batch_axes)),
            "optimize": not no_optimize,
            "skip": skip,
            "storage": storage,
            "release": NEWEST if release is None else release,
            "custom": custom,
            "masks": not no_masks,
        }
        conversion = api.convert(model, shapes=sizes, **options)
        cost = api.cost_of_batch(conversion, **options)
    report, rows = None, None
    if not no_verify:
        with working("estimating what fp16 does to it", sys.stderr), suppress(RunError):  # verification tells of it
            conversion = conversion.estimated(feeds=given.feeds, seed=runs.seed, masks=not no_masks)
    try:
        with conversion.drafts(prefix) as drafts:
            if not no_verify:
                with working("verifying the net against ONNX Runtime", sys.stderr) as step:
                    report = conversion.verify_files(drafts, feeds=given.feeds, **vars(runs), step=step)
                rows = [_renamed(row, drafts, files) for row in output_rows(report.outputs)]
                if not keep_failed:
                    report.check()
    except VerificationError as error:
        if report is None:  # there is nothing to compare with
            raise VerificationError(f"{error}; --no-verify converts without running the model") from error
    written = report is None or report.ok or keep_failed
    summary = ConversionSummary(
        model=str(model),
        producer=conversion.model.producer,
        manifest=conversion.manifest(),
        applied=conversion.applied,
        near_misses=conversion.near_misses,
        custom=[str(op) for op in conversion.custom],
        lost=conversion.model.lost,
        equal=equal,
        cost=cost,
        storage=(storage or "", conversion.storage.count if conversion.storage else 0),
        kept=[str(kept) for kept in conversion.storage.kept] if conversion.storage else [],
        verified=rows,
        sizes=[] if report is None else output_sizes(report),
        files=[(str(path), path.stat().st_size) for path in astuple(files)] if written else [],
        prefix=str(prefix),
        seconds=time.perf_counter() - start,
        checked="" if report is None else report.checked,
        notes=() if report is None else report.notes,
        masks=[str(mask) for mask in conversion.masks],
        estimated="" if conversion.precision is None else str(conversion.precision),
    )
    show(conversion_blocks(summary, verbose=verbose), sys.stdout)
    if report is not None and not report.ok:
        raise failure(report, "the files are kept" if written else "no files are written (see --keep-failed)")


def _batch_axis(text: str) -> tuple[str, int | None]:
    name, _, axis = text.rpartition(":")
    if not name or not re.fullmatch(r"-?\d+|none", axis):
        raise UsageError(f"--batch-axis takes NAME:0, or another axis, or NAME:none, not '{text}'")
    return name, None if axis == "none" else int(axis)


def _prefix(model: Path, output: str | None) -> Path:
    stem = model.name.removesuffix(".onnx").removesuffix(".pt2")
    if output is None:
        return model.with_name(stem)
    if output.endswith(_NO_PREFIX):
        raise UsageError(f"-o takes a prefix, not '{output}': '-o net' writes net.ncnn.param and its companions")
    if output == "-":
        raise UsageError("a net is three files, which standard output cannot take; -o takes a prefix")
    path = Path(output.removesuffix(".ncnn"))
    return path / stem if path.is_dir() or output.endswith(os.sep) else path


def _renamed(row: OutputRow, drafts: Files, files: Files) -> OutputRow:
    """The row with the files' names as they are to be, not as they were while it was made."""
    message = row.message.replace(str(drafts.param), str(files.param)).replace(str(drafts.bin), str(files.bin))
    return replace(row, message=message)
