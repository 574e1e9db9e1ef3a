"""Programs that run with a timeout, and that are ended with all their children."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from onnx2ncnn_opt.runtime.ending import SIGNALS, describe_exit, send_signal

_SAID_AT_MOST = 4000
_MOMENT = 2.0  # seconds to end in order


@dataclass(frozen=True)
class EndedProcess:
    """The end of a program: its exit code (None if it was stopped), the same in words, and its last output."""

    code: int | None
    how: str
    said: str

    @property
    def message(self) -> str:
        """All of it, as the end of a sentence."""
        return f"{self.how}; it says: {self.said}" if self.said else self.how


class Processes:
    """The programs that are running for one check; `stop`, from any thread, and the end of a `with` end them all."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(
        self,
        command: Sequence[str],
        *,
        seconds: float,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> EndedProcess:
        """Run a program to its end, or to that of its time."""
        with tempfile.TemporaryFile() as log:  # a pipe would stay open in processes that the program leaves behind
            try:
                process = self._start(command, folder, environment, log.fileno())
            except OSError as error:
                return EndedProcess(None, f"cannot be started: {error.strerror or error}", "")
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end(process)
                with self._lock:
                    self._running.discard(process)
            log.seek(max(0, log.seek(0, os.SEEK_END) - _SAID_AT_MOST))
            said = log.read().decode(errors="replace").strip()
        return EndedProcess(code, _how(code, seconds), said)

    def stop(self) -> None:
        """End all that runs, and start nothing more."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for process in running:
            end(process)

    def _start(
        self, command: Sequence[str], folder: Path | None, environment: Mapping[str, str] | None, log: int
    ) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._stopped:
                raise OSError("the check was stopped")
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # the whole session can be killed
            )
            self._running.add(process)
            return process


def end(process: subprocess.Popen[bytes]) -> None:
    """End a program and its whole session; a program that has ended may have left children."""
    for number in SIGNALS:
        send_signal(process, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_MOMENT)
    process.wait()


def _how(code: int | None, seconds: float) -> str:
    if code is None:
        return f"did not finish within {seconds:g} s"
    return describe_exit(code)
