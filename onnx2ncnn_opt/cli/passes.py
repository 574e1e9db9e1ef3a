"""``onnx2ncnn-opt passes``."""

from __future__ import annotations

import sys

import click


@click.command(short_help="List the optimisation passes, in their order.")
def passes() -> None:
    """List the optimisation passes, in the order in which they run, those of plug-ins first."""
    from onnx2ncnn_opt.plugins import pipeline
    from onnx2ncnn_opt.report.console import Table, show

    rows = tuple((p.name, "yes" if p.exact else "no", p.summary) for p in pipeline())
    show([Table(("pass", "bit-equal", "what it does"), rows, named=(1,))], sys.stdout)
