"""``onnx2ncnn-opt inspect``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from onnx2ncnn_opt.cli.options import EXISTING_FILE, binding_options, json_option


@click.command(short_help="Show the contents of a model or net.")
@click.argument("file", type=EXISTING_FILE, metavar="FILE")
@binding_options
@json_option("api.inspect.Inspection")
def inspect(file: Path, shapes: dict[str, list[int | str]], values: dict[str, Any], as_json: bool) -> None:
    """Show the contents of an .onnx, .pt2 or .param file.

    Nodes that ncnn cannot compute are listed; they are not an error.
    """
    from onnx2ncnn_opt.api import inspect as inspection
    from onnx2ncnn_opt.errors import lines_by_reason
    from onnx2ncnn_opt.report.console import show, working
    from onnx2ncnn_opt.report.inspection import inspection_blocks

    with working(f"looking at {file}", sys.stderr):
        found = inspection.inspect(file, shapes=shapes, values=values)
    if as_json:
        click.echo(json.dumps({"format_version": 1, **asdict(found)}, indent=1))
    else:
        show(inspection_blocks(asdict(found), lines_by_reason(found.refused)), sys.stdout)
