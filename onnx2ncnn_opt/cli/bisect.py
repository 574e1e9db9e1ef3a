"""``onnx2ncnn-opt bisect``."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnx2ncnn_opt.cli import options as option
from onnx2ncnn_opt.cli.output import Output, output_options
from onnx2ncnn_opt.cli.verification import failure, report_blocks, report_fields, require_runtimes

if TYPE_CHECKING:
    from onnx2ncnn_opt.verification.options import Verification


@click.command(short_help="Find the first layer that is wrong.")
@click.argument("model", type=option.EXISTING_FILE, metavar="MODEL")
@click.argument("param", type=option.EXISTING_FILE, metavar="[NET.param", required=False)
@click.argument("bin", type=option.EXISTING_FILE, metavar="NET.bin]", required=False)
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
@output_options()
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
    """Find the first layer of a net that is wrong, or with --passes the rewrite that makes it wrong.

    The net is verified as `verify` does. Exit codes: 0 it is right, 3 it is wrong.
    """
    if passes and (param or manifest_path or write):
        raise click.UsageError("--passes converts MODEL itself: give no net, --manifest or --write with it")
    if not passes and (param is None or bin is None or skip):
        raise click.UsageError("give MODEL NET.param NET.bin, or --passes MODEL, which --skip goes with")
    require_runtimes(verification.on, "onnxruntime")
    from onnx2ncnn_opt.runtime.ort import SHARED

    SHARED.warm_up()
    if passes:
        _bisect_passes(output, model, skip, verification)
    else:
        assert param is not None
        assert bin is not None
        _bisect_net(output, model, param, bin, manifest_path, write, verification)


def _bisect_net(
    output: Output,
    model: Path,
    param: Path,
    bin: Path,
    manifest_path: Path | None,
    write: Path | None,
    verification: Verification,
) -> None:
    from onnx2ncnn_opt.api import bisect as api
    from onnx2ncnn_opt.report.results import difference_blocks, located_blocks, pair_lines

    with output.working(f"bisecting {param}"):
        found = api.bisect(model, param, bin, verification, manifest=manifest_path, write=write)
    located = None
    if found.located is not None:
        located = asdict(replace(found.located, arrays={}))
        del located["arrays"]
    pair = None
    if found.pair is not None:
        paths = {f.name: str(getattr(found.pair.files, f.name)) for f in fields(found.pair.files)}
        pair = {**paths, "nodes": found.pair.nodes, "layers": found.pair.layers}
    difference = asdict(found.difference) if found.difference else None
    output.fields |= {**report_fields(found.report), "located": located, "difference": difference, "pair": pair}
    blocks = report_blocks(found.report, param, model)
    if located is not None:
        blocks += located_blocks(located)
    elif not found.report.ok:
        blocks.append("first wrong layer: none was found; the outputs' lines say what is wrong")
    if write and not found.report.ok:
        blocks += pair_lines(pair)
    if found.difference is not None and not found.report.ok:
        blocks += difference_blocks(asdict(found.difference), equal=found.difference.equal)
    output.show(blocks)
    if not found.report.ok:
        raise failure(found.report)


def _bisect_passes(output: Output, model: Path, skip: tuple[str, ...], verification: Verification) -> None:
    from onnx2ncnn_opt.api.bisect import bisect_passes
    from onnx2ncnn_opt.report.results import pass_lines

    with output.working(f"bisecting the passes on {model}"):
        found = bisect_passes(model, verification, skip=skip)
    event = asdict(found.event) if found.event else None
    output.fields |= {**report_fields(found.report), "rewrites": found.rewrites, "number": found.number, "event": event}
    output.show(
        [*report_blocks(found.report, "the net", model), *pass_lines(found.rewrites, found.number, str(found.event))]
    )
    if not found.report.ok:
        raise failure(found.report)
