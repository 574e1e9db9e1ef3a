"""``onnx2ncnn-opt example``."""

from pathlib import Path

import click

from onnx2ncnn_opt.cli.options import shape_option
from onnx2ncnn_opt.cli.output import Output, output_options
from onnx2ncnn_opt.errors import UsageError


@click.command(short_help="Print a program that runs a net.")
@click.argument("path", type=click.Path(path_type=Path), metavar="PREFIX")
@click.option("--cpp", "language", flag_value="cpp", default=True, help="In C++.  [default]")
@click.option("--python", "language", flag_value="python", help="In Python, with numpy and ncnn.")
@shape_option("NAME:SIZES", "Sizes for an input that has dynamic dimensions, e.g. x:1,3,320,320.")
@click.option("-o", "file", type=click.Path(path_type=Path), metavar="FILE", help="Write the program to this file.")
@output_options(quiet=False)
def example(output: Output, path: Path, language: str, shapes: dict[str, list[int]], file: Path | None) -> None:
    """Print a complete small program that runs PREFIX.ncnn.param: every input and output, with shapes and types."""
    from onnx2ncnn_opt.param.files import all_or_nothing
    from onnx2ncnn_opt.report import example as report
    from onnx2ncnn_opt.runtime.net import net_files

    param, bin, manifest = net_files(path)
    if manifest is None:
        raise UsageError(f"{param} has no manifest beside it, which would say how arrays go in and out")
    program = report.example(manifest, param, bin, language=language, shapes=shapes)
    if file is not None:
        with all_or_nothing(file) as (staged,):
            staged.write_bytes(program.encode())
    if not output.as_json:
        click.echo(program if file is None else f"wrote: {file}\n", nl=False)
    output.fields |= {"language": language, "program": program}
