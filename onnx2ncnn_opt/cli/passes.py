"""``onnx2ncnn-opt passes``."""

import click

from onnx2ncnn_opt.cli.output import Output, output_options
from onnx2ncnn_opt.report.console import Table


@click.command(short_help="List the optimisation passes, in their order.")
@output_options
def passes(output: Output) -> None:
    """List the optimisation passes, in the order in which they run, those of plug-ins first."""
    from onnx2ncnn_opt.entry_points import pipeline

    all_passes = pipeline()
    rows = tuple((p.name, "yes" if p.exact else "no", p.summary) for p in all_passes)
    output.show([Table(("pass", "bit-equal", "what it does"), rows, named=(1,))])
    output.fields["passes"] = [{"name": p.name, "exact": p.exact, "summary": p.summary} for p in all_passes]
