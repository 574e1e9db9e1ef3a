"""Workers on this machine as forks of this process: they share its imports, which take most of a start."""

import gc
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from subprocess import PIPE, Popen
from typing import Any

# A new session: a signal reaches all its processes, and an interrupt of the caller reaches none.
OWN_STREAMS: dict[str, Any] = {"stdin": PIPE, "stdout": PIPE, "stderr": PIPE, "start_new_session": True}
_COUNT = 2  # ONNX Runtime's and ncnn's
_waiting: list[Popen[bytes]] = []  # for their programs


def fork(bootstrap: str) -> None:
    """Fork the processes of the next workers, if that is safe: on Linux, while this process has one thread.

    They do what `python -c BOOTSTRAP` would do.
    """
    with suppress(OSError):  # another system has no such folder
        while hasattr(os, "fork") and len(os.listdir("/proc/self/task")) == 1 and len(_waiting) < _COUNT:
            command, run = [sys.executable, "-c", bootstrap], partial(_run, bootstrap)
            _waiting.append(Popen(command, restore_signals=False, preexec_fn=run, **OWN_STREAMS))


def forked(command: Sequence[str]) -> Popen[bytes] | None:
    """Return a forked process that does what a command would do; None if there is none."""
    return _waiting.pop() if _waiting and [*command] == _waiting[-1].args else None


def _run(bootstrap: str) -> None:
    """Run in a forked process what its command would run, and end the process."""
    os.closerange(3, 1 << 20)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    gc.enable()  # Popen disables it
    _callers = sys.stdin, sys.stdout, sys.stderr  # to free them could close the new ones
    result: object = None
    try:
        streams = [open(i, mode, 1, "utf-8", "backslashreplace") for i, mode in enumerate("rww")]  # noqa: SIM115
        sys.stdin, sys.stdout, sys.stderr = streams
        if sys.path[0] == os.getcwd():  # of `python -m`
            del sys.path[0]
        exec(bootstrap, {"__name__": "__main__"})
    except BaseException as end:  # as Python ends a program: no exception may reach the caller of the fork
        result = end.code if isinstance(end, SystemExit) else traceback.format_exc()
    if result:
        print(result, file=sys.stderr)
    os._exit(1 if result else 0)
