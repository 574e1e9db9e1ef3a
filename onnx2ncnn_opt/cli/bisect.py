"""``onnx2ncnn-opt bisect``."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnx2ncnn_opt.cli import options as option
from onnx2ncnn_opt.cli.output import Output, output_options
from onnx2ncnn_opt.cli.summary import failure, report_blocks, report_fields, require_runtimes
from onnx2ncnn_opt.report.results import difference_blocks, located_blocks, pair_lines, pass_lines

if TYPE_CHECKING:
    from onnx2ncnn_opt.api.bisect import Bisection
    from onnx2ncnn_opt.verification.options import Verification


@click.command(short_help="Find the first wrong layer.")
@click.argument("model", type=option.EXISTING_FILE, metavar="MODEL")
@click.argument("param", type=option.EXISTING_FILE, metavar="[NET.param]", required=False)
@option.bin_argument
@click.option("--passes", is_flag=True, help="Convert MODEL, and find the rewrite that breaks it; takes no net.")
@option.manifest_option
@option.skip_option("With --passes: leave a pass out; may be given several times.")
@click.option(
    "--write",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Write the smallest part of MODEL and the net that is wrong on its own, and its inputs, for `verify`.",
)
@option.given_options
@option.draw_options
@option.run_options
@output_options
@option.verification_option
def bisect(
    output: Output,
    model: Path,
    param: Path | None,
    bin: Path | None,
    passes: bool,
    manifest_path: Path | None,
    skip: tuple[str, ...],
    write: Path | None,
    verification: Verification,
) -> None:
    """Find the first wrong layer of a net, or with --passes the rewrite that makes the net wrong.

    The net is first verified, as by `verify`. Exit codes: 0 the net is right, 3 it is wrong.
    """
    if passes and (param or manifest_path or write):
        raise click.UsageError("--passes converts MODEL itself: give no net, --manifest or --write with it")
    if not passes and (param is None or bin is None or skip):
        raise click.UsageError("give MODEL NET.param, or --passes MODEL, which --skip goes with")
    require_runtimes(verification.on, "onnxruntime")
    from onnx2ncnn_opt.runtime.ort import SHARED

    SHARED.warm_up()
    if passes or param is None:
        _bisect_passes(output, model, skip, verification)
        return
    from onnx2ncnn_opt.api import bisect as api

    with output.working(f"bisecting {param}"):
        result = api.bisect(model, param, bin, verification, manifest=manifest_path, write=write)
    _show(output, result, model, param, is_written=write is not None)


def _show(output: Output, result: Bisection, model: Path, param: Path, *, is_written: bool) -> None:
    report = result.report
    located = None
    if result.located is not None:
        located = asdict(replace(result.located, arrays={}))
        del located["arrays"]
    pair = None
    if result.pair is not None:
        paths = {name: str(path) for name, path in vars(result.pair.files).items()}
        pair = {**paths, "nodes": result.pair.nodes, "layers": result.pair.layers}
    difference = asdict(result.difference) if result.difference else None
    output.fields |= {**report_fields(report), "located": located, "difference": difference, "pair": pair}
    blocks = report_blocks(report, param, model)
    if located is not None:
        blocks += located_blocks(located)
    elif not report.ok:
        blocks.append("first wrong layer: none was found; the outputs' lines say what is wrong")
    if is_written and not report.ok:
        blocks += pair_lines(pair)
    if difference is not None and result.difference is not None and not report.ok:
        blocks += difference_blocks(difference, equal=result.difference.equal)
    output.show(blocks)
    if not report.ok:
        raise failure(report)


def _bisect_passes(output: Output, model: Path, skip: tuple[str, ...], verification: Verification) -> None:
    from onnx2ncnn_opt.api.bisect import bisect_passes

    with output.working(f"bisecting the passes on {model}"):
        result = bisect_passes(model, verification, skip=skip)
    report, rewrites, number = result.report, result.rewrites, result.number
    event = asdict(result.event) if result.event else None
    output.fields |= {**report_fields(report), "rewrites": rewrites, "number": number, "event": event}
    output.show([*report_blocks(report, "the net", model), *pass_lines(rewrites, number, str(result.event))])
    if not report.ok:
        raise failure(report)
