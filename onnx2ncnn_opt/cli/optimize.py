"""``onnx2ncnn-opt optimize``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
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
from onnx2ncnn_opt.cli.targets import check_prefix, check_targets, is_folder, targets, written
from onnx2ncnn_opt.errors import UsageError

if TYPE_CHECKING:
    from onnx2ncnn_opt.verification.options import Verification

_ENDINGS = (".param", ".bin")
_PARAM = (".param", ".param.bin")


@click.command(cls=Grouped, short_help="Optimise any ncnn net, and verify it.")
@click.argument("files", type=option.EXISTING_FILE, metavar="IN.param [IN.bin] ...", nargs=-1, required=True)
@click.option(
    "-o",
    "prefix",
    metavar="PREFIX",
    required=True,
    help="Write PREFIX.param and PREFIX.bin. In a folder, e.g. nets/, they get the net's name; several nets need one.",
)
@click.option(
    "--binary/--text", default=None, help="Format of the .param; PREFIX.param.bin if binary.  [default: as IN]"
)
@option.shape_option(
    "BLOB:SIZES",
    "Shape of an input, outermost size first, e.g. data:3,224,224.  [default: as in IN, or in pnnx's files beside it]",
)
@click.option("--fixed-shapes", is_flag=True, help="Let passes rely on these shapes: the net will never get others.")
@option.run_options
@option.effort_option
@option.tolerance_options
@option.benchmark_option("the net before and after")
@option.masks_option
@option.blob_names_option
@click.option("--no-verify", is_flag=True, help="Do not run the net before and after.")
@click.option("--only", multiple=True, metavar="PASS", help="Run only this pass; may be given several times.")
@option.skip_option()
@click.option("--limit", type=click.IntRange(min=0), metavar="N", help="Stop after N rewrites, to find a wrong one.")
@option.storage_options
@option.release_option
@click.option("--start", multiple=True, metavar="BLOB", help="Cut: this blob becomes an input.")
@click.option("--end", multiple=True, metavar="BLOB", help="Cut: this blob becomes an output.")
@click.option("--shape-hints", is_flag=True, help="Write the shapes into the layers, which fixes them on a GPU.")
@option.layers_option
@option.verbose_option
@report_option
@output_options
@option.verification_option
def optimize(
    output: Output,
    files: tuple[Path, ...],
    prefix: str,
    verification: Verification,
    no_verify: bool,
    verbose: bool,
    report: ReportFile,
    **options: Any,
) -> None:
    """Optimise any ncnn net, and verify that it computes the same.

    The default IN.bin is the file next to IN.param. The files of a net appear only after all steps have succeeded.
    Options are for all nets. The exit code is the largest of all nets'.
    """
    benchmark, binary = options["benchmark"], options["binary"]
    if no_verify and (benchmark or needs_verification(verification)):
        message = "--on, --modes, --rtol, --atol and --benchmark need verification, which --no-verify skips"
        raise click.UsageError(message)
    if benchmark and (options["start"] or options["end"]):
        raise click.UsageError("--benchmark times whole nets, which --start and --end do not leave")
    from onnx2ncnn_opt.param.files import NetFiles, bin_beside

    check_prefix(prefix, _ENDINGS)
    nets = _nets(files)
    folder = Path(prefix) if is_folder(prefix) else None
    prefixes = targets(nets, lambda param: folder / bin_beside(param).stem if folder else Path(prefix), prefix)
    for param, path in prefixes.items():
        sources = {"the input": param, "the input's weights": nets[param]}
        for as_binary in (False, True) if binary is None else (binary,):
            check_targets(NetFiles.at(path, binary=as_binary).paths, sources)
    if not no_verify:
        require_runtimes(verification.on)
    options["shapes"] = verification.shapes
    options["verification"] = None if no_verify else replace(verification, shapes=None)
    with report.written(output, {f"the input {file}": file for pair in nets.items() for file in pair}):
        run_each(output, prefixes, partial(_optimize, output, nets, options, report, verbose))


def _nets(files: Sequence[Path]) -> dict[Path, Path]:
    """Return the .bin of each .param: the file after it, or NAME.bin in its folder."""
    from onnx2ncnn_opt.param.files import bin_beside

    nets: dict[Path, Path] = {}
    rest = list(files)
    while rest:
        param = rest.pop(0)
        if param in nets:
            raise UsageError(f"{param} is given twice")
        is_next = rest and param.name.endswith(_PARAM) and rest[0].name.endswith(_PARAM) and rest[0] != param
        if rest and not is_next:
            nets[param] = rest.pop(0)
            continue
        nets[param] = bin_beside(param)
        if not nets[param].is_file():
            raise UsageError(f"{param} has no {nets[param].name} beside it: name its .bin after it")
    return nets


def _optimize(
    output: Output,
    bins: Mapping[Path, Path],
    options: Mapping[str, Any],
    page: ReportFile,
    verbose: bool,
    param: Path,
    prefix: Path,
    fields: dict[str, Any],
) -> None:
    """Optimise one net, and show the result."""
    from onnx2ncnn_opt.api.optimize import optimize
    from onnx2ncnn_opt.cli.summary import optimization_blocks, optimization_fields

    clock = time.perf_counter()
    with output.working(f"optimising {param}"), hint_at_no_verify("optimises without running the net"):
        result = optimize(param, bins[param], prefix, **options)
    verified = result.report
    paths = result.files(prefix).paths
    files = written(paths) if verified is None or verified.ok else []
    fields |= optimization_fields(result, files, time.perf_counter() - clock)
    page.add(output, result, options["verification"])
    output.show(optimization_blocks(result, param, paths[0], files, fields["seconds"], verbose=verbose))
    if verified is not None and not verified.ok:
        raise failure(verified, "no files are written")
