"""The option --report: a page about the nets of a command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnx2ncnn_opt.cli.output import Output
from onnx2ncnn_opt.cli.targets import check_targets
from onnx2ncnn_opt.errors import Stop
from onnx2ncnn_opt.report.words import file_size

if TYPE_CHECKING:
    from onnx2ncnn_opt.api.result import NetResult
    from onnx2ncnn_opt.report.record import NetRecord
    from onnx2ncnn_opt.verification.options import Verification


class ReportFile:
    """The path of --report, None without the option, and the records for the page."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.records: list[NetRecord] = []

    def add(self, output: Output, result: NetResult[Any], verification: Verification | None, **more: Any) -> None:
        """Add the record of a net, with `more` fields, if there is a page."""
        if self.path is not None:
            from onnx2ncnn_opt.api.report import report_result

            with output.working("gathering what the report shows"):
                self.records.append(replace(report_result(result, verification), **more))

    @contextmanager
    def written(self, output: Output, sources: Mapping[str, Path]) -> Iterator[None]:
        """Write the page after the block and print its name, also after an error, when users need the page most.

        Write nothing if there is no record, or if the command was stopped. Raises UsageError before the block if the
        file cannot be written, or is one of the `sources` (roles and paths).
        """
        if self.path is not None:
            check_targets([self.path], sources)
        try:
            yield
        except (Stop, KeyboardInterrupt):
            self.records.clear()
            raise
        finally:
            if self.path is not None and self.records:
                from onnx2ncnn_opt.api.report import Report

                Report(tuple(self.records)).save(self.path)
                output.show([f"wrote: {self.path} ({file_size(self.path.stat().st_size)})"])


# --report, as `report`.
report_option = click.option(
    "--report",
    type=click.Path(path_type=Path),
    callback=lambda ctx, param, path: ReportFile(path),
    metavar="FILE.html",
    help="Write a page about the result: errors and costs of layers, what the passes did (docs/report.md).",
)
