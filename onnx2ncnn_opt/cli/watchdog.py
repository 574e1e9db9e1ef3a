"""A watchdog process that ends this one if a signal comes while C code runs.

Python runs signal handlers only between its own instructions. ONNX's shape inference, a run of ONNX Runtime or a large
sum may take minutes, and nothing in the process can end it then. But Python's C code writes the signal to a pipe at
once. The watchdog reads the pipe, gives Python time to clean up, and then kills the process and its children.
"""

import os
import select
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_SECONDS_TO_SEE = 0.6  # for Python to see the signal
_SECONDS_TO_CLEAN_UP = 10.0  # after that, on a busy machine
_SEEN = b"\0"  # not the number of a signal


def watch(numbers: frozenset[int]) -> None:
    """Make the process exit within a second of one of these signals, for which it has handlers.

    Without fork, a signal waits for the end of C code. A kill then leaves staged files; the next run with the same
    prefix removes them.
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
    """Wait until the process ends; kill it if it does not end in time after a signal."""
    for number in {*numbers, signal.SIGINT}:
        signal.signal(number, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # a reader of the output must not wait for this process
        os.dup2(nowhere, stream)
    while byte := os.read(pipe, 1):
        if byte[0] in numbers and not _ends(pipe):
            for child in [*_children(watched)]:
                if child != os.getpid():
                    _kill(child)
            if os.getppid() == watched:
                _kill(watched)
            return


def signal_seen() -> None:
    """Tell the watchdog that Python has seen the signal, and needs time to clean up."""
    writing = signal.set_wakeup_fd(-1)
    if writing >= 0:
        os.write(writing, _SEEN)


def _ends(pipe: int) -> bool:
    """Return True if the process ends in time; it gets more time if Python has seen the signal."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    seconds = _SECONDS_TO_SEE
    while poll.poll(seconds * 1000):
        data = os.read(pipe, 64)
        if not data:  # the process has ended
            return True
        if _SEEN in data:
            seconds = _SECONDS_TO_CLEAN_UP
    return False


def _children(process: int) -> Iterator[int]:
    """Yield the process's children if the system lists them; on other systems they end when their pipe is closed."""
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            yield from map(int, path.read_text(encoding="ascii").split())


def _kill(process: int) -> None:
    with suppress(OSError):
        os.kill(process, signal.SIGKILL)
