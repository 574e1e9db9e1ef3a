"""``onnx2ncnn-opt diff``."""

from dataclasses import asdict
from pathlib import Path

import click

from onnx2ncnn_opt.cli.options import EXISTING_FILE, layers_option
from onnx2ncnn_opt.cli.output import Output, output_options
from onnx2ncnn_opt.errors import ConversionError, UsageError
from onnx2ncnn_opt.report.results import difference_blocks


@click.command(short_help="Show the differences between two nets.")
@click.argument("a", type=EXISTING_FILE, metavar="A.param")
@click.argument("b", type=EXISTING_FILE, metavar="B.param")
@click.option(
    "--bins",
    type=(EXISTING_FILE, EXISTING_FILE),
    metavar="A.bin B.bin",
    help="The weights of both.  [default: A.bin and B.bin beside them]",
)
@layers_option
@output_options
def diff(output: Output, a: Path, b: Path, bins: tuple[Path, Path] | None, custom: tuple[str, ...]) -> None:
    """Show which layers, parameters and weights differ between two ncnn nets.

    Layers are matched by type, parameters and place in the data flow, not by name. Exit codes: 0 the nets are
    equal, 1 they differ, 2 trouble.
    """
    from onnx2ncnn_opt.api import diff as api

    try:
        difference = api.diff(a, b, bins, custom=custom)
    except ConversionError as error:  # its exit code 1 would mean that the nets differ
        raise UsageError(str(error)) from error
    output.fields |= {"equal": difference.equal, **asdict(difference)}
    output.show(difference_blocks(output.fields, equal=difference.equal))
    if not difference.equal:
        raise click.exceptions.Exit(1)
