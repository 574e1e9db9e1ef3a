"""Tables of measurements in fixtures/: one line for each pass, or one table for each question."""

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path

from onnx2ncnn_opt.passes import PASSES

ROOT = Path(__file__).resolve().parents[2]
FIRINGS = ROOT / "fixtures" / "firings.tsv"
BENEFIT = ROOT / "fixtures" / "benefit.tsv"
MEASURED = ROOT / "fixtures" / "measured"
WHOLE = ("models", "zoo", "pnnx")  # sources of whole nets in which passes are counted
SOURCES = (*WHOLE, "snippets", "ops")

Rows = dict[str, dict[str, str]]


def read_table(path: Path) -> Rows:
    """Return the rows by the passes' names, each by column; none without a file."""
    header, *lines = path.read_text().splitlines() if path.exists() else ["pass"]
    rows = (dict(zip(header.split("\t"), line.split("\t"), strict=True)) for line in lines)
    return {row.pop("pass"): row for row in rows}


def write_table(path: Path, columns: Sequence[str], rows: Mapping[str, Mapping[str, str]]) -> None:
    """Write the rows of existing passes, in their order."""
    found = [(p.name, rows[p.name]) for p in PASSES if p.name in rows]
    lines = [("pass", *columns), *((name, *(row.get(column, "-") for column in columns)) for name, row in found)]
    path.write_text("".join("\t".join(line) + "\n" for line in lines))


def read_measured(name: str) -> list[dict[str, str]]:
    """Return the rows of fixtures/measured/NAME.tsv, each by column."""
    lines = (MEASURED / f"{name}.tsv").read_text().splitlines()
    header, *rows = (line.split("\t") for line in lines if not line.startswith("# "))
    return [dict(zip(header, row, strict=True)) for row in rows]


@contextmanager
def table(name: str, columns: Sequence[str], *, write: bool) -> Iterator[Callable[..., None]]:
    """Print each row when it is known; with `write`, keep them all in fixtures/measured/NAME.tsv at the end."""
    lines = list[str]()

    def add(*cells: object) -> None:
        assert len(cells) == len(columns), cells
        lines.append("\t".join("-" if cell is None else str(cell) for cell in cells))
        print(lines[-1], flush=True)

    add(*columns)
    yield add
    if write:
        text = "".join(f"{line}\n" for line in (*_circumstances(), *lines))
        (MEASURED / f"{name}.tsv").write_text(text, encoding="utf-8")


def parser_of(doc: str | None, *paths: str) -> argparse.ArgumentParser:
    """Return the parser of a script that prints a table: the paths that it needs, and `--write`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in paths:
        parser.add_argument(name, type=Path, metavar=name.upper())
    parser.add_argument("--write", action="store_true", help="keep the table in fixtures/measured")
    return parser


def _circumstances() -> tuple[str, str]:
    """Return comments with the command, and with the machine, ncnn's version and the commit."""
    described = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    machine = f"{_processor()}, {os.cpu_count()} cores; ncnn {version('ncnn')}"
    return f"# python {' '.join(sys.orig_argv[1:])}", f"# {machine}; commit {described.stdout.strip()}; {date.today()}"


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
