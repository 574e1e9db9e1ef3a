"""A process that ends this one if a signal finds it in C code.

Python's handlers run between two steps of Python. A shape inference of ONNX, a run of ONNX Runtime or a large sum may
keep the interpreter for minutes. Nothing within the process can end it in order then. But Python's C code writes the
signal to a pipe at once. The process that reads it gives Python a moment to clean up, and then kills it and its
children.
"""

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
    """Make the process exit within a second of one of these signals, for which it has handlers.

    If the system cannot fork processes, C code runs to its end. It then leaves staged files, which the next run to the
    same prefix removes.
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
    """Wait until the process ends; kill it if a signal does not end it in time."""
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
    """Tell the watchdog that Python has seen the signal, and needs time to clean up."""
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
    """Yield the process's children if the system lists them; elsewhere they end when they find their pipe closed."""
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            yield from map(int, path.read_text(encoding="ascii").split())


def _kill(process: int) -> None:
    with suppress(OSError):
        os.kill(process, signal.SIGKILL)
