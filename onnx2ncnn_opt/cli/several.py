"""Running a command for several models; an error of one does not stop the others."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from onnx2ncnn_opt.cli.output import Output, error_fields, message_of
from onnx2ncnn_opt.errors import Error

_RESULTS = {1: "not converted", 2: "wrong usage", 3: "wrong"}


def run_each(output: Output, prefixes: Mapping[Path, Path], job: Callable[[Path, Path, dict[str, Any]], None]) -> None:
    """Run a job for each model, with the prefix of its files and its fields of the JSON, which the job fills in.

    A single job raises its errors. Errors of several jobs are printed at once; at the end comes a table, and the exit
    code is the largest of all.
    """
    from onnx2ncnn_opt.report.console import Table, printable

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
    verified = "ok" if fields.get("verification") else "ok, not verified"
    distance = fields.get("quantization", {}).get("decibels")
    result = _RESULTS.get(fields["exit_code"], verified + (f", {distance:.1f} dB" if distance else ""))
    layers = "{before} -> {after}".format(**fields["layers"]) if "layers" in fields else "-"
    seconds = f"{fields['seconds']:.1f} s" if "seconds" in fields else "-"
    message = fields["error"]["message"].partition("\n")[0] if fields["error"] else ""
    return fields["source"], result, layers, seconds, message
