"""``onnx2ncnn-opt ops``."""

from __future__ import annotations

import sys

import click


@click.command(short_help="List the ONNX operators that can be converted.")
def ops() -> None:
    """List the ONNX operators that can be converted, those of plug-ins included."""
    from onnx2ncnn_opt.onnx.registry import all_ops
    from onnx2ncnn_opt.plugins import installed_ops
    from onnx2ncnn_opt.report.console import Table, show

    installed_ops()
    rows = tuple((op.qualified_name, str(op.since), op.summary) for op in all_ops())
    show([Table(("operator", "opset", "in ncnn"), rows, named=(1,))], sys.stdout)
