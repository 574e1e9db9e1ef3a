"""A process that ends this one where a signal finds it in C code.

Python's handlers run between two steps of Python. A shape inference of ONNX, a run of ONNX Runtime or a large sum may
keep the interpreter for minutes, and nothing within the process can end it in order then. But the signal itself is
written to a pipe at once: whoever reads it gives Python a moment to clean up, and kills it and its children after that.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_MOMENT = 0.6  # seconds for Python to see the signal
_LONGER = 10.0  # seconds to clean up after that, on a busy machine
_SEEN = b"\0"  # the number of no signal


def watch(numbers: frozenset[int]) -> None:
    """See to it that the process ends within a second after one of these signals, for which it has handlers.

    Where processes cannot be forked, C code runs to its end. What is left then are staged files, which the next run to
    the same prefix clears away.
    """
    if not hasattr(os, "fork"):
        return
    reading, writing = os.pipe()
    watched = os.getpid()
    if os.fork() == 0:
        try:
            os.close(writing)
            _guard(reading, watched, numbers)
        finally:
            os._exit(0)
    os.close(reading)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)


def _guard(pipe: int, watched: int, numbers: frozenset[int]) -> None:
    """Wait until the process ends, or is told to and does not."""
    for number in {*numbers, signal.SIGINT}:
        signal.signal(number, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # a reader of the output must not wait for this process
        os.dup2(nowhere, stream)
    while said := os.read(pipe, 1):
        if said[0] in numbers and not _ends(pipe):
            for child in [*_children(watched)]:
                if child != os.getpid():
                    _kill(child)
            if os.getppid() == watched:
                _kill(watched)
            return


def seen() -> None:
    """Tell the watchdog that Python has seen the signal, so that there is time to clean up."""
    writing = signal.set_wakeup_fd(-1)
    if writing >= 0:
        os.write(writing, _SEEN)


def _ends(pipe: int) -> bool:
    """Return True if the process ends within a moment, or later if Python has seen the signal."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    seconds = _MOMENT
    while poll.poll(seconds * 1000):
        said = os.read(pipe, 64)
        if not said:  # the other end is closed
            return True
        if _SEEN in said:
            seconds = _LONGER
    return False


def _children(process: int) -> Iterator[int]:
    """Where the system tells; elsewhere they end as soon as they find their pipe closed."""
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            yield from map(int, path.read_text().split())


def _kill(process: int) -> None:
    with suppress(OSError):
        os.kill(process, signal.SIGKILL)
