"""``onnx2ncnn-opt optimize``."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from dataclasses import astuple, replace
from pathlib import Path

import click

from onnx2ncnn_opt.cli.options import (
    EXISTING_FILE,
    Runs,
    layers_option,
    masks_option,
    release_option,
    run_options,
    shape_option,
    skip_option,
    storage_options,
)
from onnx2ncnn_opt.cli.targets import check_targets
from onnx2ncnn_opt.cli.verification import output_rows, require_runtimes
from onnx2ncnn_opt.errors import RunError, UsageError, VerificationError

_NO_PREFIX = (".param", ".bin")


@click.command(short_help="Optimise any ncnn net, and verify it.")
@click.argument("param", type=EXISTING_FILE, metavar="IN.param")
@click.argument("bin", type=EXISTING_FILE, metavar="IN.bin")
@click.option("-o", "output", metavar="PREFIX", required=True, help="Write PREFIX.param and PREFIX.bin.")
@click.option(
    "--binary/--text", default=None, help="Format of the .param; PREFIX.param.bin if binary.  [default: as IN]"
)
@shape_option("BLOB:SIZES", "Shape of an input, outermost size first, e.g. data:3,224,224.  [default: as in IN]")
@click.option("--fixed-shapes", is_flag=True, help="Let passes rely on these shapes: the net will never get others.")
@run_options()
@masks_option
@click.option("--no-verify", is_flag=True, help="Do not run the net before and after.")
@click.option("--only", multiple=True, metavar="PASS", help="Run only this pass; may be given several times.")
@skip_option()
@click.option("--limit", type=click.IntRange(min=0), metavar="N", help="Stop after N rewrites, to find a wrong one.")
@storage_options
@release_option()
@click.option("--start", multiple=True, metavar="BLOB", help="Cut: this blob becomes an input.")
@click.option("--end", multiple=True, metavar="BLOB", help="Cut: this blob becomes an output.")
@click.option("--shape-hints", is_flag=True, help="Write the shapes into the layers, which fixes them on a GPU.")
@layers_option
@click.option("-v", "--verbose", is_flag=True, help="List near misses as well, with the reason.")
def optimize(
    param: Path,
    bin: Path,
    output: str,
    binary: bool | None,
    shapes: dict[str, list[int]],
    fixed_shapes: bool,
    runs: Runs,
    no_masks: bool,
    no_verify: bool,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    limit: int | None,
    storage: str | None,
    release: int | None,
    start: tuple[str, ...],
    end: tuple[str, ...],
    shape_hints: bool,
    custom: tuple[str, ...],
    verbose: bool,
) -> None:
    """Optimise any ncnn net, and verify that it computes the same.

    The files appear only after all steps have succeeded.
    """
    clock = time.perf_counter()
    if no_verify and (runs.on or runs.modes):
        raise click.UsageError("--on and --modes need verification, which --no-verify skips")
    from onnx2ncnn_opt.api import optimize as api
    from onnx2ncnn_opt.ir.releases import NEWEST
    from onnx2ncnn_opt.report.console import show, working
    from onnx2ncnn_opt.report.optimization import OptimizationSummary, optimization_blocks
    from onnx2ncnn_opt.report.verification import OutputRow

    if output.endswith((*_NO_PREFIX, os.sep)):
        raise UsageError(f"-o takes a prefix, not '{output}': '-o net' writes net.param and net.bin")
    sources = {"the input": param, "the input's weights": bin}
    check_targets(astuple(api.NetFiles.at(output, binary=bool(binary))), sources)
    if not no_verify:
        require_runtimes(runs.on)
    with working(f"optimising {param}", sys.stderr):
        result = api.optimize(
            param,
            bin,
            shapes=shapes,
            fixed_shapes=fixed_shapes,
            only=only,
            skip=skip,
            limit=limit,
            start=start,
            end=end,
            storage=storage,
            shape_hints=shape_hints,
            custom=custom,
            masks=not no_masks,
            release=NEWEST if release is None else release,
        )
    if not no_verify and not result.misfit:
        with working("estimating what fp16 does to it", sys.stderr), suppress(RunError):  # verification tells of it
            result = result.estimated(seed=runs.seed, masks=not no_masks)
    as_binary = result.is_binary if binary is None else binary
    files = api.NetFiles.at(output, binary=as_binary)
    check_targets(astuple(files), sources)
    folded: list[OutputRow] = []
    rows, report, size = None, None, 0
    wrong: VerificationError | None = None
    try:
        with result.drafts(output, binary=as_binary) as (drafts, names):
            size = drafts.bin.stat().st_size
            known = {blob.name: name for blob, name in names.items() if blob.name != name}
            if not no_verify:
                with working("running the net before and after", sys.stderr):
                    report = result.verify(drafts, names, **vars(runs))
                folded, rows = (
                    [replace(row, message=_renamed(row.message, drafts, files)) for row in output_rows(outputs)]
                    for outputs in (report.folded, report.outputs)
                )
                report.check()
    except VerificationError as error:
        if report is None:  # there is nothing to compare with
            raise VerificationError(f"{error}; --no-verify optimises without running the net") from error
        wrong = error
    summary = OptimizationSummary(
        source=str(param),
        layers=result.layers,
        applied=result.applied,
        near_misses=result.near_misses,
        dropped_splits=[f"Split '{split.layer}': {split.reason}" for split in result.dropped_splits],
        unread_layers=result.unread_layers,
        trailing_bytes=result.trailing_bytes,
        memory=[(memory.peak, memory.unknown) for memory in result.memory],
        exchanged=result.exchanged,
        weights=(bin.stat().st_size - result.trailing_bytes, size),
        storage=(result.storage.encoding.value, result.storage.count) if result.storage else ("", 0),
        is_own=result.storage is not None and result.storage.is_own,
        kept=[str(kept) for kept in result.storage.kept] if result.storage else [],
        renamed=known,
        caches=result.caches,
        folded=folded,
        verified=rows,
        files=[] if wrong else [(str(path), path.stat().st_size) for path in astuple(files)],
        seconds=time.perf_counter() - clock,
        checked="" if report is None else report.checked,
        masks=[str(mask) for mask in result.masks],
        estimated="" if result.precision is None else str(result.precision),
    )
    show(optimization_blocks(summary, verbose=verbose), sys.stdout)
    if wrong is not None and rows is not None:
        count = len({(row.name, row.mode) for row in (*folded, *rows) if row.status != "ok"})
        raise VerificationError(f"{count} of {len(rows)} outputs differ from the original net's; no files are written")


def _renamed(message: str, drafts: object, files: object) -> str:
    """A message with the files' names as they are to be, not as they were while it was made."""
    for draft, path in zip(astuple(drafts), astuple(files), strict=True):  # type: ignore[call-overload]
        message = message.replace(str(draft), str(path))
    return message
