"""The code that all worker processes share; runtime/child.py sends it over their stdin.

It runs in any Python from 3.8 on, also on a machine without this package. A message on stdin or stdout is one line of
JSON; the arrays that it describes ("dtype", "shape") follow it as raw bytes. stderr carries the text that libraries
print, and marks: a mark is a word between two zero bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

GREETING = b"onnx2ncnn-opt worker\n"
SET_PIPE_SIZE, LARGE_PIPE = 1031, 1 << 20  # Linux; with 64 kB, the usual size, large arrays take twice the time


class Missing(Exception):
    """Something that the worker needs is missing on this machine; the message, for users, names it."""


class Server:
    """Answers requests until its stdin ends; a request {"do": "x", "a": 1} calls do_x(a=1).

    Each of the request's "feeds" gets the "array" that follows it; "size" bytes that follow it become `data`.
    """

    # After these errors of a request the process continues; any other error is a fault of the worker, and ends it.
    errors: tuple[type[Exception], ...] = (MemoryError, OSError)

    def __init__(self, requests: IO[bytes], answers: IO[bytes], folder: str | None) -> None:
        self.requests, self.answers, self.folder = requests, answers, folder
        self.marks = 0

    def start(self, config: dict[str, Any]) -> dict[str, Any]:
        """Import the libraries; return facts for the caller, such as versions. Raises Missing or ImportError."""
        raise NotImplementedError

    def read_array(self, described: dict[str, Any]) -> np.ndarray[Any, Any]:
        """Return the array that follows a request."""
        import numpy as np

        array = np.empty(described["shape"], described["dtype"])
        view = array.reshape(-1).view(np.uint8).data
        while view:
            count = self.requests.readinto(view)  # type: ignore[attr-defined]
            if not count:
                sys.exit(0)
            view = view[count:]
        return array

    def answer(self, message: dict[str, Any], array: np.ndarray[Any, Any] | None = None) -> None:
        """Send a message, and the array that it describes."""
        data = b""
        if array is not None:
            message, data = {**message, "dtype": array.dtype.str, "shape": array.shape}, array.tobytes()
        self.answers.write(json.dumps(message).encode() + b"\n")
        self.answers.write(data)
        self.answers.flush()

    def attempt(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of a step; after an error, send it and return None."""
        try:
            return step(*args, **kwargs)
        except self.errors as error:
            self.answer({"error": str(error) or type(error).__name__, "mark": self.mark()})
            return None

    def mark(self) -> str:
        """Write a mark after the text that was printed up to now, and return its word."""
        self.marks += 1
        sys.stderr.flush()
        write_mark(str(self.marks))
        return str(self.marks)

    def serve(self) -> None:
        """Answer requests until stdin ends."""
        for line in self.requests:
            request = json.loads(line)
            step = getattr(self, "do_" + request.pop("do"))
            try:
                for feed in request.get("feeds", ()):
                    feed["array"] = self.read_array(feed)
                if "size" in request:
                    request["data"] = self.requests.read(request.pop("size"))
            except MemoryError:  # announced arrays are still on their way: the process cannot continue
                sys.exit("out of memory")
            self.attempt(step, **request)


def write_mark(word: str) -> None:
    """Write a mark to stderr."""
    os.write(2, b"\0" + word.encode() + b"\0")


def supervise(child: int, requests: int, folder: str | None) -> None:
    """Forward requests to the child process, wait for it, and report a crash or an error."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the signal ends the child, and this process has to clean up
    threading.Thread(target=forward, args=(requests, child), daemon=True).start()
    _, status = os.waitpid(child, 0)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    if os.WIFSIGNALED(status):
        write_mark("crashed " + str(os.WTERMSIG(status)))
    elif status:
        write_mark("ended " + str(os.WEXITSTATUS(status)))
    os._exit(1 if status else 0)


def forward(requests: int, child: int) -> None:
    """Copy stdin to the child process, and kill it at the end of stdin, when the caller has gone.

    This process reads stdin, not the child, because macOS has no poll that reports the end without reading the data.
    """
    with suppress(OSError), os.fdopen(requests, "wb") as stream:  # the child may end first
        for part in iter(lambda: os.read(0, 1 << 16), b""):
            stream.write(part)
            stream.flush()
        os.kill(child, signal.SIGKILL)


def main(kind: type[Server]) -> None:
    """Run a worker; the first line on stdin is its configuration."""
    # The caller decides when to stop. A crash must not leave a core file of the size of the model.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except ImportError:
        pass  # Windows writes no core files
    with suppress(ImportError, OSError):  # another system, no pipe, or the user has many large ones
        import fcntl

        fcntl.fcntl(1, SET_PIPE_SIZE, LARGE_PIPE)
    # On a busy machine, threads that spin while they wait for each other can turn a second into minutes.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's threads spin at its import
    config = json.loads(sys.stdin.buffer.readline())
    folder = tempfile.mkdtemp(prefix="onnx2ncnn-opt-") if config["files"] else None
    if hasattr(os, "fork"):  # the parent process sees any crash of the child
        reading, writing = os.pipe()
        child = os.fork()
        if child:
            os.close(reading)
            supervise(child, writing, folder)
        os.close(writing)
        os.dup2(reading, 0)
    # The text of libraries goes to stderr, so stdout carries only answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    worker = kind(sys.stdin.buffer, answers, folder)
    try:
        greeting = worker.start(config)
    except (ImportError, Missing) as error:
        greeting = {"error": str(error)}
    answers.write(GREETING)
    worker.answer({**greeting, "mark": worker.mark()})
    try:
        if "error" not in greeting:
            worker.serve()
    finally:
        if folder is not None:  # without fork, no other process removes it
            shutil.rmtree(folder, ignore_errors=True)
