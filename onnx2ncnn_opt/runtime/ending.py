"""Ending other processes, and describing how they ended."""

import os
import signal
import subprocess
from contextlib import suppress

_SIGNALS = (signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM))
_PATIENCE = 2.0  # seconds between them

# Windows' exit codes of crashes, from ntstatus.h.
_FIRST_CRASH = 0xC0000000
_CRASHES = {
    0xC0000005: "an access violation",
    0xC0000006: "a page that could not be read",
    0xC0000017: "no memory",
    0xC000001D: "an illegal instruction",
    0xC0000094: "an integer division by zero",
    0xC00000FD: "a stack overflow",
    0xC0000135: "a missing DLL",
    0xC0000374: "a corrupted heap",
    0xC0000409: "a fatal error of its own (abort)",
}


def send_signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to all processes of a session; Windows has no signals: kill the process and its children."""
    if hasattr(os, "killpg"):
        with suppress(OSError):
            os.killpg(process.pid, number)
    elif process.poll() is None:  # Windows cannot find the children of a process that has ended
        with suppress(OSError):
            subprocess.run(["taskkill", "/F", "/T", "/PID", str(process.pid)], capture_output=True, check=False)
        process.kill()


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and its whole session, because even an ended program may have left children."""
    for number in _SIGNALS:
        with suppress(subprocess.TimeoutExpired):
            send_signal(process, number)
            process.wait(_PATIENCE)
            return


def is_windows_crash(code: int) -> bool:
    """Return True if an exit code is Windows' code of a crash."""
    return code >= _FIRST_CRASH


def describe_exit(code: int) -> str:
    """Describe an exit code, or a negative signal number."""
    if is_windows_crash(code):
        return f"crashed with {_CRASHES.get(code, 'an exception')} ({code:#010X})".replace("0X", "0x")
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"crashed with {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"
