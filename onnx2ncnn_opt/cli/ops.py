"""``onnx2ncnn-opt ops``."""

import click

from onnx2ncnn_opt.cli.output import Output, output_options
from onnx2ncnn_opt.report.console import Table


@click.command(short_help="List the ONNX operators that can be converted.")
@output_options
def ops(output: Output) -> None:
    """List the ONNX operators that can be converted, those of plug-ins included."""
    from onnx2ncnn_opt.entry_points import installed_ops
    from onnx2ncnn_opt.onnx.ops import all_ops

    installed_ops()
    listed = list(all_ops())
    rows = tuple((op.qualified_name, str(op.since), op.summary) for op in listed)
    output.show([Table(("operator", "opset", "in ncnn"), rows, named=(1,))])
    output.fields["operators"] = [{"name": p.qualified_name, "opset": p.since, "summary": p.summary} for p in listed]
