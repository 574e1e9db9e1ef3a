"""Programs with a timeout; their children end with them."""

import os
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from onnx2ncnn_opt.runtime.ending import describe_exit, stop

_MAX_OUTPUT = 4000  # bytes


@dataclass(frozen=True)
class EndedProcess:
    """The exit code of a program (None after a timeout), a description of it, and the program's last output."""

    code: int | None
    how: str
    output: str

    @property
    def message(self) -> str:
        """The description and the output, as the end of a sentence."""
        return f"{self.how}; it says: {self.output}" if self.output else self.how


class Processes(AbstractContextManager["Processes"]):
    """The running programs of one check; `stop`, from any thread, or the end of a `with` block ends them all."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopped = False

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
        """Run a program until it ends or its time is over."""
        with tempfile.TemporaryFile() as log:  # no pipe, because processes that the program leaves keep it open
            try:
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
                        start_new_session=True,  # so that `stop` reaches the children
                    )
                    self._running.add(process)
            except OSError as error:
                return EndedProcess(None, f"cannot be started: {error.strerror or error}", "")
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                stop(process)
                with self._lock:
                    self._running.discard(process)
            log.seek(max(0, log.seek(0, os.SEEK_END) - _MAX_OUTPUT))
            output = log.read().decode(errors="replace").strip()
        how = f"did not finish within {seconds:g} s" if code is None else describe_exit(code)
        return EndedProcess(code, how, output)

    def stop(self) -> None:
        """End all running programs; `run` starts no more."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for process in running:
            stop(process)
