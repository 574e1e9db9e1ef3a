"""``onnx2ncnn-opt convert``."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnx2ncnn_opt.cli.options import (
    EXISTING_FILE,
    Allowed,
    Given,
    Runs,
    benchmark_option,
    given_options,
    masks_option,
    release_option,
    run_options,
    skip_option,
    storage_options,
    tolerance_options,
)
from onnx2ncnn_opt.cli.output import Output, output_options
from onnx2ncnn_opt.cli.page import ReportFile, report_option
from onnx2ncnn_opt.cli.several import run_each
from onnx2ncnn_opt.cli.targets import check_prefix, check_targets, is_folder, make_folder, targets
from onnx2ncnn_opt.cli.verification import failure, renamed, report_fields, require_runtimes
from onnx2ncnn_opt.errors import RunError, UsageError, VerificationError

if TYPE_CHECKING:
    from onnx2ncnn_opt.onnx.read.given import GivenShapes
    from onnx2ncnn_opt.runtime.ncnn import NcnnWorker

_ENDINGS = (".ncnn.param", ".param", ".bin", ".ncnn.json")


@click.command(short_help="Convert a model to a verified ncnn net.")
@click.argument("models", type=EXISTING_FILE, metavar="MODEL...", nargs=-1, required=True)
@click.option(
    "-o",
    "prefix",
    metavar="PREFIX",
    help="Write PREFIX.ncnn.param, PREFIX.ncnn.bin and PREFIX.ncnn.json. In a folder, as nets/, they get the model's "
    "name; several models need that.  [default: the model's path without .onnx or .pt2]",
)
@given_options
@run_options()
@tolerance_options
@benchmark_option("the net and of ONNX Runtime")
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
@click.option(
    "--image",
    "images",
    multiple=True,
    metavar="NAME:mean=...:std=...[:bgr]",
    help="Let the net take pixels of 0..255, e.g. x:mean=123.7,116.3,103.5:std=58.4,57.1,57.4; with :bgr in OpenCV's "
    "order.",
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
@report_option
@output_options()
def convert(
    output: Output,
    models: tuple[Path, ...],
    prefix: str | None,
    given: Given,
    runs: Runs,
    allowed: Allowed,
    benchmark: bool,
    outputs: tuple[str, ...],
    batch_axes: tuple[str, ...],
    images: tuple[str, ...],
    release: int | None,
    storage: str | None,
    custom: tuple[str, ...],
    no_masks: bool,
    no_verify: bool,
    keep_failed: bool,
    skip: tuple[str, ...],
    no_optimize: bool,
    verbose: bool,
    report: ReportFile,
) -> None:
    """Convert each MODEL, an .onnx or .pt2 file, to an optimised ncnn net, and verify it.

    The files of a model appear only after all steps have succeeded. Options are for all models. The exit code is the
    largest of all models'.
    """
    if no_verify and (given.feeds or keep_failed or runs.on or runs.modes or benchmark or allowed != Allowed()):
        raise click.UsageError(
            "--inputs, --on, --modes, --rtol, --atol, --benchmark and --keep-failed need verification, which "
            "--no-verify skips"
        )
    if benchmark and runs.on:
        raise click.UsageError(
            "--benchmark times the net beside ONNX Runtime, which runs on this machine: not with --on"
        )
    from onnx2ncnn_opt.api import convert as api
    from onnx2ncnn_opt.ir.releases import NEWEST

    if custom and not no_verify:
        raise UsageError(f"--custom needs --no-verify: {api.NOT_RUN}, so that the net cannot be verified")
    prefixes = targets(models, lambda model: _prefix(model, prefix), prefix)
    make_folder(prefix or "")
    for model, path in prefixes.items():
        check_targets(astuple(api.Files.of(path)), {"the model": model})
    worker = None
    if not no_verify:
        from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
        from onnx2ncnn_opt.runtime.ort import SHARED

        require_runtimes(runs.on, "onnxruntime")
        worker = NcnnWorker() if runs.on is None else None
        for runtime in filter(None, (SHARED, worker)):  # which takes a part of a second, on another core
            runtime.warm_up()
    options: dict[str, Any] = {
        "values": given.values,
        "outputs": [name for names in outputs for name in names.split(",")],
        "batch_axes": dict(map(_batch_axis, batch_axes)),
        "optimize": not no_optimize,
        "skip": skip,
        "storage": storage,
        "release": NEWEST if release is None else release,
        "custom": custom,
        "masks": not no_masks,
        "images": dict(map(_image, images)),
    }
    verified = None if no_verify else {**vars(runs), **vars(allowed)}
    common: dict[str, Any] = {"verbose": verbose, "keep_failed": keep_failed, "benchmark": benchmark, "page": report}
    common["worker"] = worker
    with worker or nullcontext(), report.written(output, {f"the model {model}": model for model in models}):
        run_each(
            output,
            {
                str(model): partial(_convert, output, model, path, given, verified, options, **common)
                for model, path in prefixes.items()
            },
        )


def _convert(
    output: Output,
    model: Path,
    prefix: Path,
    given: Given,
    checks: Mapping[str, Any] | None,
    options: Mapping[str, Any],
    fields: dict[str, Any],
    *,
    keep_failed: bool,
    benchmark: bool,
    verbose: bool,
    page: ReportFile,
    worker: NcnnWorker | None,
) -> None:
    """Convert one model; without `checks` it is not verified. `worker` runs nets, where it is given."""
    from onnx2ncnn_opt.api import convert as api
    from onnx2ncnn_opt.onnx.read.pt2 import is_pt2
    from onnx2ncnn_opt.report.conversion import ConversionSummary, conversion_blocks, conversion_fields
    from onnx2ncnn_opt.report.verification import LatencyRow

    start = time.perf_counter()
    files = api.Files.of(prefix)
    equal: list[str] = []
    sizes: GivenShapes = given.shapes
    if checks and not is_pt2(model):  # torch.export tells itself which sizes are equal
        from onnx2ncnn_opt.verification.equal_sizes import equal_sizes

        with output.working(f"looking at the sizes of {model}"):
            tied = equal_sizes(model, shapes=given.shapes, values=given.values, outputs=options["outputs"])
        sizes, equal = tied.shapes, [" = ".join(names) for names in tied.names]
    with output.working(f"converting {model}") as step:
        conversion = api.convert(model, shapes=sizes, step=step, **options)
    report, latency = None, None
    if checks:
        with output.working("estimating what fp16 does to it"), suppress(RunError):  # verification tells of it
            conversion = conversion.estimated(
                feeds=given.feeds, seed=checks["seed"], masks=options["masks"], worker=worker
            )
    try:
        with conversion.staged(prefix) as staged:
            if checks:
                with output.working("verifying the net against ONNX Runtime") as step:
                    report = conversion.verify_files(staged, feeds=given.feeds, **checks, worker=worker, step=step)
                report = renamed(report, staged, files)
                if not keep_failed:
                    report.check()
                if benchmark and report.ok:
                    with output.working("timing the net and ONNX Runtime"):
                        latency = conversion.benchmark(staged, feeds=given.feeds, seed=checks["seed"])
    except VerificationError as error:
        if report is None:  # there is nothing to compare with
            raise VerificationError(f"{error}; --no-verify converts without running the model") from error
    with output.working("looking at what dynamic dimensions cost"):
        cost = api.cost_of_dynamic(conversion, ran_at=report.sizes[0] if report else None, **options)
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
        storage=(options["storage"] or "", conversion.storage.count if conversion.storage else 0),
        kept=[str(kept) for kept in conversion.storage.kept] if conversion.storage else [],
        verified=None if report is None else report.outputs,
        shapes=() if report is None else report.shapes,
        files=[(str(path), path.stat().st_size) for path in astuple(files)] if written else [],
        prefix=str(prefix),
        seconds=time.perf_counter() - start,
        checked="" if report is None else report.checked,
        notes=() if report is None else report.notes,
        masks=[str(mask) for mask in conversion.masks],
        estimated="" if conversion.precision is None else str(conversion.precision),
        latency=None if latency is None else LatencyRow(*astuple(latency)),
    )
    fields |= {**conversion_fields(summary), "verification": None if report is None else report_fields(report)}
    if page.path is not None:
        from onnx2ncnn_opt.api.report import report_conversion

        with output.working("gathering what the report shows") as step:
            runs = {"feeds": given.feeds, "seed": checks["seed"], "on": checks["on"]} if checks else {}
            page.records.append(report_conversion(conversion, report, **runs, step=step))
    output.show(conversion_blocks(summary, verbose=verbose))
    if report is not None and not report.ok:
        raise failure(report, "the files are kept" if written else "no files are written (see --keep-failed)")


def _batch_axis(text: str) -> tuple[str, int | None]:
    name, _, axis = text.rpartition(":")
    if not name or not re.fullmatch(r"-?\d+|none", axis):
        raise UsageError(f"--batch-axis takes NAME:0, or another axis, or NAME:none, not '{text}'")
    return name, None if axis == "none" else int(axis)


def _image(text: str) -> tuple[str, str]:
    """The name, which may have colons in it, and what is done to its pixels."""
    match = re.fullmatch(r"(.+?)((:mean=[^:]*|:std=[^:]*|:bgr)+)", text)
    if match is None:
        raise UsageError(f"--image takes NAME:mean=123.7,116.3,103.5:std=58.4,57.1,57.4[:bgr], not '{text}'")
    return match[1], match[2][1:]


def _prefix(model: Path, prefix: str | None) -> Path:
    stem = model.name.removesuffix(".onnx").removesuffix(".pt2")
    if prefix is None:
        return model.with_name(stem)
    check_prefix(prefix, _ENDINGS)
    path = Path(prefix.removesuffix(".ncnn"))
    return path / stem if is_folder(prefix) else path
