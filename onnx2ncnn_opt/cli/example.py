"""``onnx2ncnn-opt example``."""

from pathlib import Path
from typing import Any

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
@click.option(
    "--embed",
    is_flag=True,
    help="For apps without files: write the net next to the C++ program, as headers with arrays and constants.",
)
@output_options
def example(
    output: Output, path: Path, language: str, shapes: dict[str, list[int]], file: Path | None, embed: bool
) -> None:
    """Print a complete small program that runs PREFIX.ncnn.param: every input and output, with shapes and types."""
    from onnx2ncnn_opt.param.files import all_or_nothing
    from onnx2ncnn_opt.report import embed as headers
    from onnx2ncnn_opt.report import example as report
    from onnx2ncnn_opt.runtime.net import net_files
    from onnx2ncnn_opt.runtime.tail import tail_of
    from onnx2ncnn_opt.tail.header import c_name, header

    if embed and (file is None or language != "cpp"):
        raise UsageError("--embed writes headers next to a C++ program: give --cpp and -o FOLDER/main.cpp")
    param, bin, manifest = net_files(path)
    if manifest is None:
        raise UsageError(f"{param} has no manifest beside it, which would say how arrays go in and out")
    net = headers.embed(param, bin) if embed else None
    runner, name = tail_of(param, manifest), c_name(param.name.removesuffix(".param").removesuffix(".ncnn"))
    tail = runner.program if runner else None
    options: dict[str, Any] = {"shapes": shapes, "embedded": net, "tail": tail, "name": name}
    program = report.example(manifest, param, bin, language=language, **options)
    files = {} if file is None else {file: program}
    if tail is not None and language == "cpp":
        text = header(tail, name)
        if file is None:
            program = program.replace(f'#include "{name}.tail.h"', text)
        else:
            files[file.with_name(f"{name}.tail.h")] = text
    if file is not None and net is not None:
        files |= {file.with_name(f"{net.name}.mem.h"): net.mem, file.with_name(f"{net.name}.id.h"): net.ids}
    with all_or_nothing(*files) as staged:
        for part, text in zip(staged, files.values(), strict=True):
            part.write_bytes(text.encode())
    if not (output.as_json or output.quiet):
        click.echo("".join(f"wrote: {path}\n" for path in files) or program, nl=False)
    output.fields |= {"language": language, "program": program}
