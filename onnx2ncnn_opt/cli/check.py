"""``onnx2ncnn-opt check``."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnx2ncnn_opt.cli.options import target_options
from onnx2ncnn_opt.cli.output import Output, output_options
from onnx2ncnn_opt.cli.page import ReportFile, report_option
from onnx2ncnn_opt.cli.targets import check_targets
from onnx2ncnn_opt.progress import announce
from onnx2ncnn_opt.report.console import printable

if TYPE_CHECKING:
    from onnx2ncnn_opt.regression.result import ModelResult
    from onnx2ncnn_opt.report.record import NetRecord

_FILE = click.Path(path_type=Path)


@click.command(short_help="Check the nets of many models in CI.")
@click.argument("file", type=_FILE, default="ncnn-check.toml", metavar="[FILE.toml]")
@click.option("--record", is_flag=True, help="Write the baseline, for the models whose nets are right.")
@click.option("-k", "names", multiple=True, metavar="PATTERN", help="Take only these models, e.g. 'models/res*'.")
@click.option("--shard", default="1/1", metavar="I/N", help="Take the I-th of N parts of the models.")
@click.option("-j", "--jobs", type=click.IntRange(min=1), default=1, metavar="N", help="Work on N models at once.")
@target_options
@click.option("--keep", type=_FILE, metavar="FOLDER", help="Keep the nets of models that fail.")
@click.option("--junit", type=_FILE, metavar="FILE.xml", help="Write the results as JUnit's XML.")
@click.option("--markdown", type=_FILE, metavar="FILE.md", help="Append them as Markdown ($GITHUB_STEP_SUMMARY).")
@report_option
@output_options
def check(
    output: Output, file: Path, junit: Path | None, markdown: Path | None, report: ReportFile, **options: Any
) -> None:
    """Convert the models that FILE.toml lists, and compare their nets with the models and a baseline.

    FILE.toml is ncnn-check.toml by default; docs/ci.md lists its keys. The exit code is the worst of all models: 0
    all pass, 1 one was not converted, 2 something is missing, 3 a net is wrong or costs too much.
    """
    from onnx2ncnn_opt.cli.check_report import check_blocks, check_junit, check_markdown, check_record, model_line
    from onnx2ncnn_opt.regression.run import check as run

    sources = {"the list of models": file} if file.exists() else {}
    check_targets([path for path in (junit, markdown) if path], sources)
    with report.written(output, sources):
        with output.working(f"checking the models of {file}"):

            def look(result: ModelResult, record: NetRecord | None) -> None:
                report.records.append(check_record(result, record))

            def done(result: ModelResult) -> None:
                line = printable(model_line(result))
                if sys.stderr.isatty():
                    announce(line)
                elif not output.quiet:
                    click.echo(line, err=True)

            result = run(file, **options, done=done, look=look if report.path else None)
        if junit:
            junit.write_text(check_junit(result), encoding="utf-8")
        if markdown:
            with markdown.open("a", encoding="utf-8") as stream:
                stream.write(check_markdown(result))
        output.fields |= {"ok": result.ok, **asdict(result)}
        output.show(check_blocks(result))
        if not result.ok:
            raise click.exceptions.Exit(result.exit_code)
