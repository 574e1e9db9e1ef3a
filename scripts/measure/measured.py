"""The tables of what was measured, in fixtures/: a line for each pass, columns by name, "-" where there is nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from onnx2ncnn_opt.passes import PASSES

ROOT = Path(__file__).resolve().parents[2]
FIRINGS = ROOT / "fixtures" / "firings.tsv"
BENEFIT = ROOT / "fixtures" / "benefit.tsv"
SOURCES = ("models", "zoo", "pnnx")  # of the nets in which passes are counted

Rows = dict[str, dict[str, str]]


def read_table(path: Path) -> Rows:
    """The rows by the passes' names, each by column; none where there is no table yet."""
    header, *lines = path.read_text().splitlines() if path.exists() else ["pass"]
    rows = (dict(zip(header.split("\t"), line.split("\t"), strict=True)) for line in lines)
    return {row.pop("pass"): row for row in rows}


def write_table(path: Path, columns: Sequence[str], rows: Mapping[str, Mapping[str, str]]) -> None:
    """Write the rows of those passes that there are, in their order."""
    found = [(p.name, rows[p.name]) for p in PASSES if p.name in rows]
    lines = [("pass", *columns), *((name, *(row.get(column, "-") for column in columns)) for name, row in found)]
    path.write_text("".join("\t".join(line) + "\n" for line in lines))
