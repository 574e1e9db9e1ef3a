"""The report of a verification: one line for each output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from onnx2ncnn_opt.report.console import Table

if TYPE_CHECKING:
    from onnx2ncnn_opt.outputs import OutputReport


_MAX_INPUTS = 4  # with their shapes in a line


def shapes_lines(shapes: Sequence[Mapping[str, tuple[int, ...]]], *, others_refused: bool = True) -> list[str]:
    """Return a line with the shapes of dynamic inputs at which the net ran, if it has any.

    With `others_refused` a single run means that ONNX Runtime refused other sizes; a wrong net also runs only once.
    """
    if not any(shapes):
        return []
    names = list(shapes[0])
    if len(names) == 1:
        text = f"{names[0]} {' and '.join(str(list(run[names[0]])) for run in shapes)}"
    else:
        shown = names[:_MAX_INPUTS]
        runs = (", ".join(f"{name} {list(run[name])}" for name in shown) for run in shapes)
        rest = len(names) - len(shown)
        more = f"; and {rest} more input{'s' if rest > 1 else ''}" if rest else ""
        text = "; ".join(runs) + more
    alone = " (ONNX Runtime refused all other sizes that were tried)" if len(shapes) == 1 and others_refused else ""
    return [f"verified with: {text}{alone}"]


def output_table(rows: Sequence[OutputReport], label: str = "output", *, verbose: bool = True) -> Table:
    """Return the outputs as a table: the rule of each and its error; if `verbose` also the allowed one and the inputs.

    It has a column for modes if there are others than fp32.
    """
    modes = any(row.mode != "fp32" for row in rows)
    columns: list[tuple[str, Callable[[OutputReport], str]]] = [("output", lambda row: row.name)]
    columns += [("mode", lambda row: row.mode)] if modes else []
    columns += [("result", lambda row: row.status)]
    first = len(columns)
    columns += [("rule", lambda row: row.rule or "-")]
    columns += [("max error", lambda row: _number(row.max_abs))] if verbose else []
    columns += [("relative error", lambda row: _number(row.max_rel))]
    columns += [("allowed", lambda row: _number(row.allowed))] if verbose else []
    if has_inputs := verbose and any(row.inputs for row in rows):
        columns += [("at", lambda row: row.inputs or "-")]
    named = tuple(range(first, len(columns)))
    columns += [("", lambda row: row.message.removeprefix(f"at {row.inputs}: " if has_inputs else ""))]
    table = tuple(tuple(text(row) for _, text in columns) for row in rows)
    return Table(tuple(title for title, _ in columns), table, label=label, named=named)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"
