"""Processes as forks of one that has imported their modules, because imports take most of a small command's time.

`python -m testing.forks KIND FD` serves: each message on the socket asks for a fork, with its stdin, stdout and stderr
and a pipe, into which the fork writes its process number, and the server its exit code, negative for a signal.
"""

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

CAN_FORK = sys.platform == "linux"
_PYTHON = sys.executable  # which tests exchange
_MESSAGE = 1 << 16
# What runtime/ sets for its workers: libraries read these variables when they are loaded.
_OF_WORKERS = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "OPENBLAS_NUM_THREADS": "1",
}
_SECONDS = 120  # for a command


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


_VARIABLES = _variables()


@cache
def server(kind: str) -> socket.socket:
    """Return the socket of the process that forks this kind; the process ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [_PYTHON, "-m", "testing.forks", kind, str(theirs.fileno())],
            cwd=Path(__file__).parents[1],
            env=_VARIABLES if kind == "command" else {**_OF_WORKERS, **_VARIABLES},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    process.returncode = 0  # nobody waits for it
    atexit.register(ours.close)
    return ours


class Fork:
    """A process, with what runtime/ uses of a Popen."""

    def __init__(self, kind: str, streams: Sequence[int], **request: Any) -> None:
        self._answers, theirs = os.pipe()
        socket.send_fds(server(kind), [json.dumps(request).encode()], [*streams, theirs])
        os.close(theirs)
        self._text, self._lock = b"", Lock()
        self.returncode: int | None = None
        self.pid = self._number()

    def _number(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (timeout or 0)
        while b"\n" not in self._text:
            ready, _, _ = select.select([self._answers], [], [], timeout and max(0.0, end - time.monotonic()))
            if not ready:
                raise subprocess.TimeoutExpired("a fork", timeout or 0)
            part = os.read(self._answers, 100)
            assert part, "the server of forks has ended"
            self._text += part
        number, _, self._text = self._text.partition(b"\n")
        return int(number)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, negative for a signal; TimeoutExpired if it has not ended."""
        with self._lock:
            if self.returncode is None:
                self.returncode = self._number(timeout)
                os.close(self._answers)
            return self.returncode


class Worker(Fork):
    """What `python -c CODE` would run, with pipes as its streams."""

    def __init__(self, code: str) -> None:
        (stdin, writing), (reading, stdout), (errors, stderr) = (os.pipe() for _ in range(3))
        super().__init__("worker", (stdin, stdout, stderr), code=code)
        for stream in (stdin, stdout, stderr):
            os.close(stream)
        self.stdin = os.fdopen(writing, "wb")
        self.stdout, self.stderr = os.fdopen(reading, "rb"), os.fdopen(errors, "rb")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def popen(command: Sequence[str], **options: Any) -> Any:
    """Start a process of runtime/: a fork, if it is this Python with the variables that it had at its start."""
    if [*command[:-1]] == [_PYTHON, "-c"] and CAN_FORK and _variables() == _VARIABLES:
        return Worker(command[-1])
    return subprocess.Popen(command, **options)


def install() -> None:
    """Let this process fork the workers of runtime/."""
    importlib.import_module("onnx2ncnn_opt.runtime.child").Popen = popen  # type: ignore[attr-defined]


def run_command(folder: Path, args: Sequence[str], paths: str, out: int, err: int) -> int:
    """Run ``onnx2ncnn-opt ARGS`` in a folder, with PYTHONPATH; return its exit code."""
    with open(os.devnull, "rb") as null:
        return Fork("command", (null.fileno(), out, err), folder=str(folder), args=[*args], paths=paths).wait()


def _import_for(kind: str) -> None:
    if kind == "worker":
        for name in ("numpy", "ncnn"):  # not onnxruntime, because it has a thread
            importlib.import_module(name)
        return
    from onnx2ncnn_opt.__main__ import prepare

    prepare()
    import click

    from onnx2ncnn_opt.cli.main import cli

    package = importlib.import_module("onnx2ncnn_opt")
    for name in package.__all__:
        getattr(package, name)
    importlib.import_module("onnx2ncnn_opt.report.console")
    importlib.import_module("onnx2ncnn_opt.onnx.ops").all_ops()
    for name in cli.list_commands(click.Context(cli)):
        cli.get_command(click.Context(cli), name)
    install()
    server("worker")


def _command(folder: str, args: list[str], paths: str) -> int:
    from onnx2ncnn_opt.cli.main import main

    signal.alarm(_SECONDS)
    os.chdir(folder)
    sys.path[:1] = [folder, *filter(None, paths.split(os.pathsep))]
    sys.argv = ["onnx2ncnn-opt", *args]
    return main()


def _worker(code: str) -> None:
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


def _become(kind: str, message: bytes, *files: int) -> int:
    """Give a fork the state of a new process, and run it; return its exit code."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for number, stream in enumerate(files[:3]):
        os.dup2(stream, number)
    os.write(files[3], b"%d\n" % os.getpid())
    for file in files:
        os.close(file)
    run: Callable[..., Any] = _worker if kind == "worker" else _command
    code: Any = 1
    try:
        code = run(**json.loads(message))
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    return code or 0


def main(kind: str, number: str) -> None:
    """Serve until all other ends of the socket are closed."""
    _import_for(kind)
    gc.freeze()
    pipes: dict[int, int] = {}
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    requests = socket.socket(fileno=int(number))
    while True:
        ready, _, _ = select.select([requests.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 1 << 10)
            while pipes and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                with suppress(BrokenPipeError):  # its caller may have ended
                    os.write(pipes[ended[0]], b"%d\n" % os.waitstatus_to_exitcode(ended[1]))
                os.close(pipes.pop(ended[0]))
            continue
        message, files, _, _ = socket.recv_fds(requests, _MESSAGE, 4)
        if not message:
            return
        process = os.fork()
        if process == 0:
            requests.close()
            for other in (woken, wake, *pipes.values()):
                os.close(other)
            os._exit(_become(kind, message, *files))  # to take down all that was imported would be most of the time
        *streams, pipes[process] = files
        for stream in streams:
            os.close(stream)


if __name__ == "__main__":
    main(*sys.argv[1:])
