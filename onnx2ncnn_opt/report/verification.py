"""The report of a verification: one line for each output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from onnx2ncnn_opt.report.console import Table
from onnx2ncnn_opt.report.words import number_of

if TYPE_CHECKING:
    from onnx2ncnn_opt.outputs import Latency, OutputReport


def latency_lines(latency: Latency | None, other: str) -> list[str]:
    """Return a line with the times of a net and of its reference, `other`; no lines if nothing was timed."""
    if latency is None:
        return []
    times = f"{latency.net:.3g} ms, {other} {latency.other:.3g} ms, ratio {latency.ratio:.2f}"
    return [f"latency: {times} (one thread, fp32, fastest of {latency.turns} turns)"]


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


def mask_lines(masks: Sequence[str], estimated: str, price: float, *, verbose: bool = False) -> list[str]:
    """Return lines with the number and cost of layers that need masks, and the effect of fp16 on the outputs.

    `verbose` adds the masks.
    """
    lines = [f"mask: {mask}" for mask in masks] if verbose else []
    if masks:
        cost = f", {price:.0%} of the multiplications" if estimated else ""
        lines.append(
            f"masks: {number_of(len(masks), 'layer')} {'needs' if len(masks) == 1 else 'need'} more than fp16{cost}"
            + ("" if verbose else "; -v lists them")
        )
    return [*lines, f"fp16 (estimated): {estimated}"] if estimated else lines


def output_table(rows: Sequence[OutputReport], label: str = "output") -> Table:
    """Return the outputs as a table: the rule of each, its error, the allowed one, and the inputs.

    It has a column for modes if there are others than fp32.
    """
    modes = any(row.mode != "fp32" for row in rows)
    columns: list[tuple[str, Callable[[OutputReport], str]]] = [("output", lambda row: row.name)]
    columns += [("mode", lambda row: row.mode)] if modes else []
    columns += [("result", lambda row: row.status)]
    first = len(columns)
    columns += [
        ("rule", lambda row: row.rule or "-"),
        ("max error", lambda row: _number(row.max_abs)),
        ("relative error", lambda row: _number(row.max_rel)),
        ("allowed", lambda row: _number(row.allowed)),
    ]
    if any(row.inputs for row in rows):
        columns += [("at", lambda row: row.inputs or "-")]
    named = tuple(range(first, len(columns)))
    columns += [("", lambda row: row.message)]
    table = tuple(tuple(text(row) for _, text in columns) for row in rows)
    return Table(tuple(title for title, _ in columns), table, label=label, named=named)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"
