"""The output of a command, for one or several models: lines for users, one JSON object for programs, or only errors."""

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click

from onnx2ncnn_opt.errors import Error, UnsupportedError, UsageError
from onnx2ncnn_opt.report import console
from onnx2ncnn_opt.report.console import Block, Table, printable
from onnx2ncnn_opt.report.words import json_value

FORMAT_VERSION = 1
_RESULTS = {1: "not converted", 2: "wrong usage", 3: "wrong"}


class Output:
    """The destination of a command's results; `main` ends it.

    `fields` are the command's own fields of --json; see docs/json.md.
    """

    def __init__(self) -> None:
        self.command: str | None = None
        self.arguments: Sequence[str] = ()  # of the command line
        self.as_json = False
        self.quiet = False
        self.fields: dict[str, Any] = {}

    def show(self, blocks: Sequence[Block]) -> None:
        """Print lines and tables for users."""
        if not (self.as_json or self.quiet):
            console.show(blocks, sys.stdout)

    def working(self, what: str) -> AbstractContextManager[None]:
        """Show the progress of the block, see `report.console.working`."""
        return nullcontext() if self.quiet else console.working(what, sys.stderr)

    def end(self, exit_code: int, error: BaseException | None = None) -> None:
        """Print the JSON object, if the command line was parsed as far as the command."""
        if self.as_json and self.command is not None:
            ended = {"exit_code": exit_code, "error": None if error is None else error_fields(error)}
            data = {"format_version": FORMAT_VERSION, "command": self.command, **ended, **self.fields}
            click.echo(json.dumps(json_value(data, lambda number: None), indent=1, allow_nan=False))


def error_fields(error: BaseException) -> dict[str, Any]:
    """Return an error as the fields of a JSON object; `nodes` are those that ncnn cannot compute."""
    nodes = [vars(node) for node in error.nodes] if isinstance(error, UnsupportedError) else []
    kind = UsageError if isinstance(error, click.ClickException) else type(error)
    return {"type": kind.__name__, "message": message_of(error), "nodes": nodes}


def message_of(error: BaseException) -> str:
    """Return the text of an error for users."""
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, OSError) and error.strerror:
        return f"{os.fspath(error.filename)}: {error.strerror}" if error.filename else error.strerror
    return str(error) or ("out of memory" if isinstance(error, MemoryError) else type(error).__name__)


def output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options --json and --quiet; the command gets its `Output` as first argument."""

    @functools.wraps(command)
    def with_output(*args: Any, quiet: bool, **options: Any) -> Any:
        output = click.get_current_context().ensure_object(Output)
        output.quiet = quiet
        return command(output, *args, **options)

    quiet = click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
    help = "Print one JSON object (docs/json.md)."  # `main` looks for it
    return click.option("--json", is_flag=True, expose_value=False, help=help)(quiet(with_output))


def run_each(output: Output, prefixes: Mapping[Path, Path], job: Callable[[Path, Path, dict[str, Any]], None]) -> None:
    """Run a job for each model, with the prefix of its files and its fields of the JSON, which the job fills in.

    A single job raises its errors. Errors of several jobs are printed at once; at the end comes a table, and the exit
    code is the largest of all.
    """
    results = output.fields["results"] = []
    for path, prefix in prefixes.items():
        name = str(path)
        fields: dict[str, Any] = {"source": name, "exit_code": 0, "error": None}
        results.append(fields)
        try:
            job(path, prefix, fields)
        except BrokenPipeError:  # the reader has closed the pipe
            raise
        except (Error, OSError, MemoryError) as error:
            code = error.exit_code if isinstance(error, Error) else 1
            fields |= {"exit_code": code, "error": error_fields(error)}
            if len(prefixes) == 1:
                raise
            text = message_of(error)
            message = text if text.startswith(name) else f"{name}: {text}"
            click.echo(f"Error: {printable(message)}", err=True)
    if len(prefixes) == 1:
        return
    output.show([Table(("model", "result", "layers", "time", ""), tuple(map(_row, results)), "result")])
    if worst := max(fields["exit_code"] for fields in results):
        raise click.exceptions.Exit(worst)


def _row(fields: Mapping[str, Any]) -> tuple[str, ...]:
    result = _RESULTS.get(fields["exit_code"], "ok" if fields.get("verification") else "ok, not verified")
    layers = "{before} -> {after}".format(**fields["layers"]) if "layers" in fields else "-"
    seconds = f"{fields['seconds']:.1f} s" if "seconds" in fields else "-"
    message = fields["error"]["message"].partition("\n")[0] if fields["error"] else ""
    return fields["source"], result, layers, seconds, message
