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
