"""``onnx2ncnn-opt convert``."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnx2ncnn_opt.cli import options as option
from onnx2ncnn_opt.cli import verification
from onnx2ncnn_opt.cli.output import Output, output_options
from onnx2ncnn_opt.cli.page import ReportFile, report_option
from onnx2ncnn_opt.cli.several import run_each
from onnx2ncnn_opt.cli.targets import check_prefix, check_targets, is_folder, make_folder, targets
from onnx2ncnn_opt.errors import UsageError

if TYPE_CHECKING:
    from onnx2ncnn_opt.onnx.read.given import GivenShapes
    from onnx2ncnn_opt.runtime.ncnn import NcnnWorker

_ENDINGS = (".ncnn.param", ".param", ".bin", ".ncnn.json")


@click.command(short_help="Convert a model to a verified ncnn net.")
@click.argument("models", type=option.EXISTING_FILE, metavar="MODEL...", nargs=-1, required=True)
@click.option(
    "-o",
    "prefix",
    metavar="PREFIX",
    help="Write PREFIX.ncnn.param, PREFIX.ncnn.bin and PREFIX.ncnn.json. In a folder, as nets/, they get the model's "
    "name; several models need that.  [default: the model's path without .onnx or .pt2]",
)
@option.given_options
@option.run_options()
@option.tolerance_options
@option.benchmark_option("the net and of ONNX Runtime")
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
@option.release_option()
@option.storage_options
@click.option(
    "--custom",
    multiple=True,
    metavar="DOMAIN::OP[=TYPE][:ATTR,...]",
    help="Convert an operator to a layer of your own; its attributes become parameters 0, 1, ...  Needs --no-verify.",
)
@option.masks_option
@click.option("--no-verify", is_flag=True, help="Do not compare the net with ONNX Runtime.")
@click.option("--keep-failed", is_flag=True, help="Keep the files of a net that fails verification.")
@option.skip_option()
@click.option("--no-optimize", is_flag=True, help="Skip all passes.")
@click.option("-v", "--verbose", is_flag=True, help="List every rewrite, and every near miss with the reason.")
@report_option
@output_options()
def convert(
    output: Output,
    models: tuple[Path, ...],
    prefix: str | None,
    checks: dict[str, Any],
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
    if no_verify and (keep_failed or benchmark or verification.needs_verification(checks)):
        raise click.UsageError(
            "--inputs, --on, --modes, --rtol, --atol, --benchmark and --keep-failed need verification, which "
            "--no-verify skips"
        )
    if benchmark and checks["on"]:
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

        verification.require_runtimes(checks["on"], "onnxruntime")
        worker = NcnnWorker() if checks["on"] is None else None
        for runtime in filter(None, (SHARED, worker)):  # which takes a part of a second, on another core
            runtime.warm_up()
    options: dict[str, Any] = {
        "values": checks.pop("values"),
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
    shapes, verified = checks.pop("shapes"), None if no_verify else checks
    common: dict[str, Any] = {"verbose": verbose, "keep_failed": keep_failed, "benchmark": benchmark, "page": report}
    common["worker"] = worker
    with worker or nullcontext(), report.written(output, {f"the model {model}": model for model in models}):
        run_each(
            output,
            {
                str(model): partial(_convert, output, model, path, shapes, verified, options, **common)
                for model, path in prefixes.items()
            },
        )


def _convert(
    output: Output,
    model: Path,
    prefix: Path,
    shapes: GivenShapes,
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
    from onnx2ncnn_opt.onnx.read.exported import is_pt2
    from onnx2ncnn_opt.report.conversion import ConversionSummary, conversion_blocks, conversion_fields

    start = time.perf_counter()
    files = api.Files.of(prefix)
    equal: list[str] = []
    if checks and not is_pt2(model):  # torch.export tells itself which sizes are equal
        from onnx2ncnn_opt.verification.equal_sizes import equal_sizes

        with output.working(f"looking at the sizes of {model}"):
            tied = equal_sizes(model, shapes=shapes, values=options["values"], outputs=options["outputs"])
        shapes, equal = tied.shapes, [" = ".join(names) for names in tied.names]
    with output.working(f"converting {model}"):
        conversion = api.convert(model, shapes=shapes, **options)
    latency = None
    if checks:
        drawn = {"feeds": checks["feeds"], "seed": checks["seed"]}
        conversion = verification.estimated(output, conversion, **drawn, masks=options["masks"], worker=worker)
    with ExitStack() as stack:
        reports = stack.enter_context(verification.told_without_report("converts without running the model"))
        with output.working(f"writing {prefix}"):
            staged = stack.enter_context(conversion.staged(prefix))
        if checks:
            with output.working("verifying the net against ONNX Runtime"):
                report = conversion.verify_files(staged, **checks, worker=worker)
            reports.append(verification.renamed(report, staged, files))
            if not keep_failed:
                report.check()
            if benchmark and report.ok:
                with output.working("timing the net and ONNX Runtime"):
                    latency = conversion.benchmark(staged, **drawn)
    found = reports[0] if reports else None
    with output.working("looking at what dynamic dimensions cost"):
        cost = api.cost_of_dynamic(conversion, ran_at=found.sizes[0] if found else None, **options)
    written = found is None or found.ok or keep_failed
    summary = ConversionSummary(
        model=str(model),
        producer=conversion.model.producer,
        manifest=conversion.manifest(),
        custom=[str(op) for op in conversion.custom],
        lost=conversion.model.lost,
        equal=equal,
        cost=cost,
        fed_masks=conversion.fed_masks,
        shapes=() if found is None else found.shapes,
        prefix=str(prefix),
        notes=() if found is None else found.notes,
        **verification.summary_of(conversion, found, latency, files if written else None, start),
    )
    fields |= {**conversion_fields(summary), "verification": verification.fields_or_none(found)}
    if page.path is not None:
        from onnx2ncnn_opt.api.report import report_conversion

        with output.working("gathering what the report shows"):
            runs = {**drawn, "on": checks["on"]} if checks else {}
            page.records.append(report_conversion(conversion, found, **runs))
    output.show(conversion_blocks(summary, verbose=verbose))
    if found is not None and not found.ok:
        consequence = "the files are kept" if written else "no files are written (see --keep-failed)"
        raise verification.failure(found, consequence)


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
