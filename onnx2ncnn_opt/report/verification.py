"""What verification tells: one line for each output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnx2ncnn_opt.report.console import Table


@dataclass(frozen=True)
class OutputRow:
    """One output of the model: `status` is "ok" or what is wrong, `message` says more; numbers are None without any."""

    name: str
    status: str
    max_abs: float | None
    max_rel: float | None
    cosine: float | None
    message: str = ""


def sizes_lines(sizes: Sequence[str], *, others_refused: bool = True) -> list[str]:
    """The open sizes that the net was run at, where it has any.

    `others_refused` says that a single run is one of several, which ONNX Runtime did not take.
    """
    at = [text for text in sizes if text]
    alone = " (ONNX Runtime refused all others that were tried)" if len(at) == 1 and others_refused else ""
    return [f"run at: {'; '.join(at)}{alone}"] if at else []


def output_table(rows: Sequence[OutputRow], label: str = "output") -> Table:
    """The outputs as a table."""
    return Table(
        columns=("output", "result", "max error", "relative error", "cosine", ""),
        rows=tuple(
            (
                row.name,
                row.status,
                "-" if row.max_abs is None else f"{row.max_abs:.2e}",
                "-" if row.max_rel is None else f"{row.max_rel:.2e}",
                "-" if row.cosine is None else f"{row.cosine:.6f}",
                row.message,
            )
            for row in rows
        ),
        label=label,
        named=(2, 3, 4),
    )
