"""``onnx2ncnn-opt convert``."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnx2ncnn_opt.cli import options as option
from onnx2ncnn_opt.cli.headings import Grouped
from onnx2ncnn_opt.cli.output import Output, output_options, run_each
from onnx2ncnn_opt.cli.page import ReportFile, report_option
from onnx2ncnn_opt.cli.summary import failure, hint_at_no_verify, needs_verification, require_runtimes
from onnx2ncnn_opt.cli.targets import check_prefix, check_targets, client_prefix, is_folder, stem_of, targets, written
from onnx2ncnn_opt.errors import WORKS, UsageError
from onnx2ncnn_opt.system import command_line

if TYPE_CHECKING:
    from onnx2ncnn_opt.api.options import ConvertOptions
    from onnx2ncnn_opt.runtime.ncnn import NcnnWorker

_ENDINGS = (".ncnn.param", ".param", ".bin", ".ncnn.json")


def _quantize(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        raise click.UsageError("'onnx2ncnn-opt quantize MODEL -o PREFIX --data ...' makes int8 nets")


@click.command(cls=Grouped, short_help="Convert a model to a verified ncnn net.")
@click.argument("models", type=option.EXISTING_FILE, metavar="MODEL...", nargs=-1, required=True)
@click.option(
    "-o",
    "prefix",
    metavar="PREFIX",
    help="Write PREFIX.ncnn.param, PREFIX.ncnn.bin and PREFIX.ncnn.json. In a folder, such as nets/, they get the "
    "model's name; several models need a folder.  [default: the model's path without .onnx or .pt2]",
)
@option.conversion_options
@option.run_options
@option.budget_option
@option.benchmark_option("the net and of ONNX Runtime")
@click.option("--quantize", is_flag=True, hidden=True, expose_value=False, callback=_quantize)
@click.option(
    "--split",
    type=click.Choice(["llm"]),
    help="Also write a language model as the three nets of ncnn_llm, with model.json, into the folder PREFIX.",
)
@click.option(
    "--custom",
    multiple=True,
    metavar="DOMAIN::OP[=TYPE][:ATTR,...]",
    help="Convert an operator to a layer of your own; its attributes become parameters 0, 1, ...  Needs --no-verify.",
)
@click.option("--no-verify", is_flag=True, help="Do not compare the net with ONNX Runtime.")
@click.option("--keep-failed", is_flag=True, help="Keep the files of a net that fails verification.")
@option.verbose_option
@report_option
@output_options
def convert(
    output: Output,
    models: tuple[Path, ...],
    prefix: str | None,
    conversion: ConvertOptions,
    split: str | None,
    no_verify: bool,
    verbose: bool,
    report: ReportFile,
) -> None:
    """Convert each MODEL, an .onnx or .pt2 file, to an optimised ncnn net, and verify it.

    The files of a model appear only after all steps have succeeded. Options are for all models. The exit code is the
    largest of all models'.
    """
    verification = conversion.verification
    assert verification is not None
    is_measured = conversion.keep_failed or conversion.benchmark or split or needs_verification(verification)
    if no_verify and is_measured:
        raise click.UsageError(
            "--inputs, --on, --modes, --rtol, --atol, --benchmark, --split and --keep-failed need verification, which "
            "--no-verify skips"
        )
    if conversion.benchmark and verification.on:
        raise click.UsageError(
            "--benchmark times the net beside ONNX Runtime, which runs on this machine: not with --on"
        )
    with nullcontext() if no_verify else _ncnn_process(verification.on) as worker:  # starts on another core
        from onnx2ncnn_opt.api.lower import Files

        prefixes = targets(models, lambda model: _prefix(model, prefix, split, conversion.client), prefix)
        for model, path in prefixes.items():
            check_targets(Files.of(path).paths, {"the model": model})
        options = replace(conversion, verification=None if no_verify else verification, worker=worker)
        with report.written(output, {f"the model {model}": model for model in models}):
            run_each(output, prefixes, partial(_convert, output, options, report, split, verbose))


def _ncnn_process(on: str | None) -> AbstractContextManager[NcnnWorker | None]:
    """Start the runtimes on another core, because that takes time; one ncnn process serves all models."""
    from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
    from onnx2ncnn_opt.runtime.ort import SHARED

    require_runtimes(on, "onnxruntime")
    SHARED.warm_up()
    if on is not None:
        return nullcontext()
    worker = NcnnWorker()
    worker.warm_up()
    return worker


def _convert(
    output: Output,
    options: ConvertOptions,
    page: ReportFile,
    split: str | None,
    verbose: bool,
    model: Path,
    prefix: Path,
    fields: dict[str, Any],
) -> None:
    """Convert one model, and show the result."""
    from onnx2ncnn_opt.api.client import METADATA
    from onnx2ncnn_opt.api.convert import convert
    from onnx2ncnn_opt.api.lower import NOT_RUN, Files, lower
    from onnx2ncnn_opt.api.working_options import advised
    from onnx2ncnn_opt.cli.summary import conversion_blocks, conversion_fields

    start = time.perf_counter()
    with (
        output.working(f"converting {model}"),
        advised(model, options, output.arguments),
        hint_at_no_verify("converts without running the model"),
    ):
        if options.custom and options.verification is not None:
            lower(model, options)  # raises errors of other options and of the model first
            reason = f"--custom needs --no-verify: {NOT_RUN}, so that the net cannot be verified"
            raise UsageError(f"{reason}\n{WORKS}{command_line(*output.arguments, '--no-verify')}")
        conversion = convert(model, replace(options, prefix=prefix))
    verified = conversion.report
    has_files = verified is None or verified.ok or options.keep_failed
    names, manifest = Files.of(prefix), conversion.manifest()
    more = [names.param.with_name(METADATA)] if options.client else []
    files = written([*names.paths, *more]) if has_files else []
    if split and has_files:
        from onnx2ncnn_opt.api.split import split_llm
        from onnx2ncnn_opt.verification.decode import Decoder

        files += written(split_llm(names, prefix, lambda: Decoder(conversion.model, manifest, 0).all_steps()))
    fields |= conversion_fields(conversion, manifest, files, time.perf_counter() - start)
    page.add(output, conversion, options.verification)
    output.show(conversion_blocks(conversion, manifest, model, prefix, files, fields["seconds"], verbose=verbose))
    if verified is not None and not verified.ok:
        feeds = options.verification.feeds if options.verification else None
        inputs = ("--inputs", feeds) if isinstance(feeds, str | Path) else ()
        kept = ("bisect", model, names.param, names.bin, *inputs)
        words = kept if files else (*output.arguments, "--keep-failed")
        end = "the files are kept" if files else "no files are written"
        with advised(model, options, output.arguments):
            raise failure(verified, end, command_line(*map(str, words)))


def _prefix(model: Path, prefix: str | None, split: str | None, client: str | None) -> Path:
    if client is not None:
        return client_prefix(model, prefix)
    stem = stem_of(model)
    if prefix is None:
        return model.with_name(stem)
    check_prefix(prefix, _ENDINGS)
    path = Path(prefix.removesuffix(".ncnn"))
    return path / stem if is_folder(prefix) and (split is None or prefix.endswith(os.sep)) else path
