"""Linux with what macOS and Windows lack taken away; a process calls one of these before it imports anything else."""

import os
import select
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

_KILL = 9


def macos() -> None:
    """Take away a poll that reports hang-ups of streams registered for no event: XNU watches nothing then."""

    class Poll:
        def __init__(self) -> None:
            self._real = real()

        def register(self, stream: int, events: int = select.POLLIN) -> None:
            if events:
                self._real.register(stream, events)

        def unregister(self, stream: int) -> None:
            with suppress(KeyError):
                self._real.unregister(stream)

        def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
            return self._real.poll(timeout)

    real = select.poll
    select.poll = Poll  # type: ignore[assignment, misc]


def windows() -> None:
    """Take away fork, sessions, signals, poll and resource; no file can be removed or replaced while it is open.

    A text file without an encoding is an error, because its encoding would not be UTF-8.
    """
    from onnx2ncnn_opt import system

    system.WINDOWS = True
    for module, names in (
        (os, ("fork", "forkpty", "killpg", "setsid")),
        (signal, ("SIGPIPE", "SIGHUP", "SIGKILL", "SIGALRM", "alarm")),
        (select, ("poll", "epoll")),
    ):
        for name in names:
            delattr(module, name)
    for name in ("resource", "fcntl", "pty"):
        sys.modules[name] = None  # type: ignore[assignment]
    start = subprocess.Popen.__init__
    subprocess.Popen.__init__ = wraps(start)(  # type: ignore[method-assign]
        lambda self, *args, start_new_session=False, **options: start(self, *args, **options)
    )
    subprocess.Popen.kill = lambda self: self.send_signal(_KILL)  # type: ignore[method-assign]
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    for name in ("unlink", "remove", "replace", "rename"):
        setattr(os, name, _refusing(getattr(os, name)))
    warnings.filterwarnings("error", category=EncodingWarning, module="onnx2ncnn_opt")


def _refusing(step: Callable[..., None]) -> Callable[..., None]:
    @wraps(step)
    def refusing(*paths: Any, **options: Any) -> None:
        wanted = {os.path.realpath(path) for path in paths}
        if used := wanted & set(_files_in_use()):
            raise PermissionError(13, "Access is denied", *used)
        step(*paths, **options)

    return refusing


def _files_in_use() -> Iterator[str]:
    """Yield the files that processes of this system have open or mapped: those with its variables."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.environb[b"TMPDIR"] not in (process / "environ").read_bytes():
                continue
            for line in (process / "maps").read_text(encoding="utf-8").splitlines():
                yield line[line.find("/") :]
            for stream in (process / "fd").iterdir():
                with suppress(OSError):
                    yield os.readlink(stream)


# Windows' program that ends a process and its children, called as `taskkill /F /T /PID 123`.
TASKKILL = f"""#!{sys.executable} -S
import glob, os, sys
def end(process):
    children = [word for path in glob.glob(f"/proc/{{process}}/task/*/children") for word in open(path).read().split()]
    os.kill(process, {_KILL})
    for child in children:
        end(int(child))
end(int(sys.argv[-1]))
"""
