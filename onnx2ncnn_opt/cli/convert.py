"""``onnx2ncnn-opt convert``."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnx2ncnn_opt.cli import options as option
from onnx2ncnn_opt.cli.output import Output, output_options
from onnx2ncnn_opt.cli.page import ReportFile, report_option
from onnx2ncnn_opt.cli.quantize import NO_QUANTIZATION, quantization_options, quantize_to
from onnx2ncnn_opt.cli.several import run_each
from onnx2ncnn_opt.cli.targets import check_prefix, check_targets, is_folder, targets, written
from onnx2ncnn_opt.cli.verification import failure, hint_at_no_verify, needs_verification, require_runtimes
from onnx2ncnn_opt.errors import THEN, WORKS, CrashError, Error, RunError, UnprovenError, UnsupportedError, UsageError
from onnx2ncnn_opt.report.words import json_value
from onnx2ncnn_opt.system import command_line

if TYPE_CHECKING:
    from onnx2ncnn_opt.api.lower import Conversion
    from onnx2ncnn_opt.manifest import Int8
    from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
    from onnx2ncnn_opt.verification.options import Verification

_ENDINGS = (".ncnn.param", ".param", ".bin", ".ncnn.json")


@click.command(short_help="Convert a model to a verified ncnn net.")
@click.argument("models", type=option.EXISTING_FILE, metavar="MODEL...", nargs=-1, required=True)
@click.option(
    "-o",
    "prefix",
    metavar="PREFIX",
    help="Write PREFIX.ncnn.param, PREFIX.ncnn.bin and PREFIX.ncnn.json. In a folder, such as nets/, they get the "
    "model's name; several models need a folder.  [default: the model's path without .onnx or .pt2]",
)
@option.given_options
@option.run_options
@option.effort_option
@option.tolerance_options
@option.benchmark_option("the net and of ONNX Runtime")
@click.option(
    "--outputs", multiple=True, metavar="NAME,...", help="Convert only the part of the model up to these values."
)
@click.option(
    "--batch-axis",
    "batch_axes",
    multiple=True,
    metavar="NAME:K",
    help="Axis of an input that is the batch, or NAME:none.  [default: found in the model]",
)
@option.image_option
@click.option(
    "--tail",
    type=click.Choice(["auto", "only-needed", "never"]),
    default="auto",
    show_default=True,
    help="Nodes that may follow the net as NumPy or C++: those that ncnn cannot express (only-needed), and also those "
    "that would be many layers (auto), such as TopK and NonMaxSuppression.",
)
@click.option(
    "--quantized",
    type=click.Choice(["float", "keep"]),
    default="float",
    show_default=True,
    help="The layers for products of a quantised model: float layers with the model's roundings (float), or int8 "
    "layers with its weights and scales, which are smaller and faster and differ a little (keep).",
)
@click.option(
    "--append",
    metavar="nms:OUTPUT[:conf=...:iou=...:max=...]",
    help="Decode a detector's raw output and keep its best boxes, e.g. nms:output0:conf=0.25:iou=0.45:max=300; further "
    "options say how to read the columns: boxes=, classes=, objectness=, layout=.",
)
@click.option(
    "--last-row",
    metavar="OUTPUT",
    help="Compute only the last row of an output: in logits [batch, tokens, vocabulary], the scores of the next token.",
)
@click.option("--noise-inputs", is_flag=True, help="Make inputs of nodes that draw random numbers.")
@click.option(
    "--split",
    type=click.Choice(["llm"]),
    help="Also write a language model as the three nets of ncnn_llm, with model.json, into the folder PREFIX.",
)
@click.option("--quantize", is_flag=True, help="Make an int8 net like the command `quantize`, with its options:")
@quantization_options
@option.release_option
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
@option.negative_option("--no-optimize", "optimize", "Skip all passes.")
@option.verbose_option
@report_option
@output_options
@option.verification_option
def convert(
    output: Output,
    models: tuple[Path, ...],
    prefix: str | None,
    verification: Verification,
    outputs: tuple[str, ...],
    batch_axes: tuple[str, ...],
    last_row: str | None,
    noise_inputs: bool,
    split: str | None,
    no_verify: bool,
    verbose: bool,
    report: ReportFile,
    quantize: bool,
    quantization: dict[str, Any],
    **options: Any,
) -> None:
    """Convert each MODEL, an .onnx or .pt2 file, to an optimised ncnn net, and verify it.

    The files of a model appear only after all steps have succeeded. Options are for all models. The exit code is the
    largest of all models'.
    """
    if no_verify and (options["keep_failed"] or options["benchmark"] or split or needs_verification(verification)):
        raise click.UsageError(
            "--inputs, --on, --modes, --rtol, --atol, --benchmark, --split and --keep-failed need verification, which "
            "--no-verify skips"
        )
    if not quantize and quantization != NO_QUANTIZATION:
        raise click.UsageError("--data, --method, --keep, --budget, --all, --weights and --table belong to --quantize")
    if quantize and (no_verify or split or options["benchmark"] or options["custom"]):
        raise click.UsageError(
            "--quantize runs and changes the net: not with --no-verify, --split, --benchmark, --custom"
        )
    changes = [options["append"], None if last_row is None else f"last-row:{last_row}", noise_inputs and "noise-inputs"]
    if sum(map(bool, changes)) > 1:
        raise click.UsageError("--append, --last-row and --noise-inputs each change the model: give one of them")
    if options["benchmark"] and verification.on:
        raise click.UsageError(
            "--benchmark times the net beside ONNX Runtime, which runs on this machine: not with --on"
        )
    with nullcontext() if no_verify else _ncnn_process(verification.on) as worker:  # starts on another core
        from onnx2ncnn_opt.api.lower import Files

        prefixes = targets(models, lambda model: _prefix(model, prefix, split), prefix)
        for model, path in prefixes.items():
            check_targets(astuple(Files.of(path)), {"the model": model})
        options |= {
            "append": next(filter(None, changes), None),
            "shapes": verification.shapes,
            "values": verification.values,
            "outputs": [name for names in outputs for name in names.split(",")],
            "batch_axes": dict(map(_batch_axis, batch_axes)),
            "verification": None if no_verify else replace(verification, shapes=None, values=None),
        }
        options["worker"] = worker
        with report.written(output, {f"the model {model}": model for model in models}):
            job = _Job(output, options, quantization, report, split, verbose)
            run_each(output, prefixes, job.quantize if quantize else job.convert)


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


@dataclass(frozen=True)
class _Job:
    """The conversion of models with the same options; `page` is the page of --report."""

    output: Output
    options: Mapping[str, Any]
    quantization: Mapping[str, Any]
    page: ReportFile
    split: str | None
    verbose: bool

    def quantize(self, model: Path, prefix: Path, fields: dict[str, Any]) -> None:
        """Convert one model to int8, and show the result."""
        from onnx2ncnn_opt.cli.conversion import conversion_fields

        start = time.perf_counter()
        int8_fields: dict[str, Any] = {}
        with self._working_command(model):
            int8 = quantize_to(
                self.output, model, prefix, self.quantization, self.options, int8_fields, verbose=self.verbose
            )
        assert int8.conversion is not None
        assert int8.manifest is not None
        seconds = time.perf_counter() - start
        fields |= conversion_fields(int8.conversion, int8.manifest, int8_fields.pop("files"), seconds)
        fields["quantization"] = json_value(int8_fields, lambda number: None)  # decibels may be infinite
        self._add_page(int8.conversion, int8.manifest.int8)

    def convert(self, model: Path, prefix: Path, fields: dict[str, Any]) -> None:
        """Convert one model, and show the result."""
        from onnx2ncnn_opt.api.convert import convert
        from onnx2ncnn_opt.api.lower import NOT_RUN, Files, lower
        from onnx2ncnn_opt.cli.conversion import conversion_blocks, conversion_fields

        start, output, options = time.perf_counter(), self.output, self.options
        with (
            output.working(f"converting {model}"),
            self._working_command(model),
            hint_at_no_verify("converts without running the model"),
        ):
            if options["custom"] and options["verification"] is not None:
                lower(model, **self._lower_options)  # raises errors of other options and of the model first
                reason = f"--custom needs --no-verify: {NOT_RUN}, so that the net cannot be verified"
                raise UsageError(f"{reason}\n{WORKS}{command_line(*output.arguments, '--no-verify')}")
            conversion = convert(model, prefix, **options)
        verified = conversion.report
        has_files = verified is None or verified.ok or options["keep_failed"]
        files, manifest = written(Files.of(prefix)) if has_files else [], conversion.manifest()
        if self.split and has_files:
            from onnx2ncnn_opt.api.split import split_llm
            from onnx2ncnn_opt.verification.decode import Decoder

            paths = split_llm(Files.of(prefix), prefix, lambda: Decoder(conversion.model, manifest, 0).steps())
            files += [{"path": str(path), "bytes": path.stat().st_size} for path in paths]
        fields |= conversion_fields(conversion, manifest, files, time.perf_counter() - start)
        self._add_page(conversion)
        seconds = fields["seconds"]
        output.show(conversion_blocks(conversion, manifest, model, prefix, files, seconds, verbose=self.verbose))
        if verified is not None and not verified.ok:
            names, feeds = Files.of(prefix), options["verification"].feeds
            inputs = ("--inputs", feeds) if isinstance(feeds, str | Path) else ()
            kept = ("bisect", model, names.param, names.bin, *inputs)
            words = kept if files else (*output.arguments, "--keep-failed")
            end = "the files are kept" if files else "no files are written"
            with self._working_command(model):
                raise failure(verified, end, command_line(*map(str, words)))

    def _add_page(self, conversion: Conversion, int8: Int8 | None = None) -> None:
        """Add the record of a conversion to the page."""
        if self.page.path is not None:
            from onnx2ncnn_opt.api.report import report_conversion

            with self.output.working("gathering what the report shows"):
                record = report_conversion(conversion, conversion.report, self.options["verification"])
            self.page.records.append(replace(record, int8=int8))

    @property
    def _lower_options(self) -> dict[str, Any]:
        others = ("verification", "benchmark", "keep_failed", "worker")
        return {key: value for key, value in self.options.items() if key not in others}

    @contextmanager
    def _working_command(self, model: Path) -> Iterator[None]:
        """Search for options without an error of the block, and add the command with these options to the error."""
        try:
            yield
        except (RunError, UnprovenError, UnsupportedError, UsageError) as error:
            if not isinstance(error, CrashError) and (self.options["shapes"] or not isinstance(error, UsageError)):
                error.args = (self._with_command(model, error),)
            raise

    def _with_command(self, model: Path, error: Error) -> str:
        """Return the text of an error, with a command that works instead of advice if there is one."""
        from onnx2ncnn_opt.api.working_options import as_arguments, second_net, without, working_options

        more, text = working_options(model, error, self._lower_options, self.options["verification"]), str(error)
        if more is None:
            return text
        second: Iterable[str] = ()
        if isinstance(error, UnsupportedError) and error.second and more == {"outputs": [*error.cuts[0]]}:
            second = second_net(model, *error.second)
        is_usage = isinstance(error, UsageError)
        if "shapes" in more and not is_usage:
            more = {**more, "shapes": {**(self.options["shapes"] or {}), **more["shapes"]}}
        replaced = {
            "--outputs": "outputs" in more,
            "--custom": "custom" in more,
            "--shape": is_usage or "shapes" in more,
        }
        kept = without(self.output.arguments, *(option for option, is_replaced in replaced.items() if is_replaced))
        kept = [word for word in kept if word != "--no-verify" or "custom" not in more]
        if error.advice and more.keys() <= {"shapes", "values"}:
            text = text.partition(error.advice)[0].rstrip()
        return "\n".join([text, WORKS + command_line(*kept, *as_arguments(more)), *(THEN + line for line in second)])


def _batch_axis(text: str) -> tuple[str, int | None]:
    name, _, axis = text.rpartition(":")
    if not name or not re.fullmatch(r"-?\d+|none", axis):
        raise UsageError(f"--batch-axis takes NAME:0, or another axis, or NAME:none, not '{text}'")
    return name, None if axis == "none" else int(axis)


def _prefix(model: Path, prefix: str | None, split: str | None) -> Path:
    stem = model.name.removesuffix(".onnx").removesuffix(".pt2")
    if prefix is None:
        return model.with_name(stem)
    check_prefix(prefix, _ENDINGS)
    path = Path(prefix.removesuffix(".ncnn"))
    return path / stem if is_folder(prefix) and (split is None or prefix.endswith(os.sep)) else path
