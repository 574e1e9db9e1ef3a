"""Output of the command: tables and a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, NamedTuple, TextIO

from onnx2ncnn_opt.progress import listening

if TYPE_CHECKING:
    from rich.text import Text


class Table(NamedTuple):
    """Rows under a header.

    Plain lines have no header: each starts with `label`, and cells of the `named` columns follow the column's name.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    label: str = ""
    named: tuple[int, ...] = ()

    def plain(self) -> list[str]:
        """Return a line for each row, its cells aligned and separated by two spaces."""
        rows = [
            [f"{self.columns[i]} {cell}" if i in self.named else cell for i, cell in enumerate(row)]
            for row in self.rows
        ]
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        label = f"{self.label}: " if self.label else ""
        return [
            label + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]


Block = str | Table
_SOON = 2.0  # seconds before the first reminder


def show(blocks: Sequence[Block], stream: TextIO) -> None:
    """Write lines and tables to a stream: with rich to a terminal, else without escape codes."""
    if stream.isatty():
        _show_rich(blocks, stream)
        return
    for block in blocks:
        for line in block.plain() if isinstance(block, Table) else [block]:
            stream.write(" ".join(printable(line).split("\n")) + "\n")


def _show_rich(blocks: Sequence[Block], stream: TextIO) -> None:
    from rich import box  # only a terminal needs it
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    for block in blocks:
        if isinstance(block, str):
            console.print(Text(printable(block)), soft_wrap=True)
            continue
        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in block.columns:
            table.add_column(column, no_wrap=column != block.columns[-1])
        for row in block.rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        console.print(table)


@contextmanager
def working(what: str, stream: TextIO) -> Iterator[None]:
    """Show the progress of a long operation: a live line on a terminal, else a line after 2 s, 4 s, 8 s, ..."""
    operation = _Operation(what)
    with listening(operation.report), _live(operation, stream) if stream.isatty() else _reminders(operation, stream):
        yield


class _Operation:
    """An operation, its latest progress report, and its age."""

    def __init__(self, what: str) -> None:
        self.what, self.step, self.start = what, "", time.monotonic()

    def report(self, step: str) -> None:
        self.step = step

    def __str__(self) -> str:
        seconds = time.monotonic() - self.start
        age = f" ({seconds:.0f} s)" if seconds >= _SOON else ""
        return printable(f"{self.what}: {self.step}{age}" if self.step else f"{self.what}{age}")

    def __rich__(self) -> Text:
        from rich.text import Text

        return Text(str(self), no_wrap=True)


def _live(operation: _Operation, stream: TextIO) -> AbstractContextManager[object]:
    from rich.console import Console
    from rich.live import Live

    return Live(operation, console=Console(file=stream), transient=True)


@contextmanager
def _reminders(operation: _Operation, stream: TextIO) -> Iterator[None]:
    done = threading.Event()

    def remind() -> None:
        seconds = _SOON
        while not done.wait(seconds - (time.monotonic() - operation.start)):
            stream.write(f"{operation}\n")
            stream.flush()
            seconds *= 2

    thread = threading.Thread(target=remind, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def printable(text: str) -> str:
    """Escape characters with which a name in a model could control a terminal."""
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)
