"""``onnx2ncnn-opt inspect``."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from onnx2ncnn_opt.cli.options import EXISTING_FILE, binding_options
from onnx2ncnn_opt.cli.output import Output, output_options
from onnx2ncnn_opt.errors import lines_by_reason
from onnx2ncnn_opt.report.results import inspection_blocks


@click.command(short_help="Show the contents of a model or net.")
@click.argument("file", type=EXISTING_FILE, metavar="FILE")
@binding_options
@output_options
def inspect(output: Output, file: Path, shapes: dict[str, list[int | str]], values: dict[str, Any]) -> None:
    """Show the contents of an .onnx, .pt2 or .param file.

    Nodes that ncnn cannot compute are listed; they are not an error.
    """
    from onnx2ncnn_opt.api import inspect as api

    with output.working(f"looking at {file}"):
        inspection = api.inspect(file, shapes=shapes, values=values)
    output.fields |= asdict(inspection)
    output.show(inspection_blocks(output.fields, lines_by_reason(inspection.refused)))
