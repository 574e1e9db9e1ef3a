"""A worker process: its start, messages, timeouts and end.

The process may be on another machine: everything that it needs goes over its stdin, its own program first.
"""

import json
import math
import os
import re
import shlex
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import IO, Any, TypeVar

import numpy as np

from onnx2ncnn_opt.errors import CrashError, Error, UsageError
from onnx2ncnn_opt.runtime._worker import GREETING
from onnx2ncnn_opt.runtime.ahead import begin
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.runtime.deadline import Deadline
from onnx2ncnn_opt.runtime.ending import describe_exit, is_windows_crash, stop
from onnx2ncnn_opt.runtime.forks import OWN_STREAMS, fork, forked

# Reads the files of a program from stdin, and runs them as one. It ignores modules in the current folder.
_BOOTSTRAP = (
    "import sys;sys.path[:]=filter(None,sys.path);s=sys.stdin.buffer;n=lambda:int(s.readline());"
    "[exec(compile(s.read(n()),'worker','exec'),globals())for _ in range(n())]"
)
_COMMON = Path(__file__).with_name("_worker.py")
_END = re.compile(rb"\0(crashed|ended) (\d{1,9})\0")
_MAX_MESSAGE = 2000
_MAX_KEPT = 1 << 20
# A login may print lines before the worker does.
_LINES_BEFORE_GREETING = 200
# Limits in bytes: a device that sends more is refused, because it could take all memory of this machine.
_MAX_REPLY = 1 << 22
_MAX_ARRAY = 1 << 31
_MAX_AXES = 32
_MAX_SHOWN = 80
# The fields of a reply before an array. The kind of a field is a type; [kind] is a list.
ARRAY: Mapping[str, Any] = {"dtype": str, "shape": [int]}
_DTYPES = frozenset(np.dtype(order + code).str for code in "?bBhHiIqQefd" for order in "<>")
_PATIENCE = 2.0  # seconds in which another process does a trivial step


class Ended(Exception):
    """The end of the process: `how` is like "crashed with SIGSEGV", `printed` is like "; it says: out of memory"."""

    def __init__(self, how: str, printed: str = "") -> None:
        super().__init__(how + printed)
        self.how, self.printed = how, printed


class _InvalidReply(EOFError):
    """A reply that no worker sends; the message quotes it."""

    def __init__(self, reply: bytes) -> None:
        super().__init__(f"sent an invalid reply: {reply[:_MAX_SHOWN].decode(errors='replace')!r}")


class TimeUp(Ended):
    """The process took too long, and was killed."""


class Child:
    """A process that runs a worker.

    `command` starts Python on this machine or another; `programs` are the worker's files, without _worker.py.
    `remote` says that `command` only connects to the process, and may end without it. `config` is for the worker, which
    answers with a text for each name in `greeting`, or with an "error" that says what it lacks. Raises Ended, with the
    printed text, if no worker starts.
    """

    def __init__(
        self,
        command: Sequence[str],
        programs: Sequence[Path],
        config: Mapping[str, Any],
        *,
        seconds: float,
        remote: bool = False,
        greeting: Sequence[str] = (),
    ) -> None:
        self._remote = remote
        self._greeting_fields = dict.fromkeys((*greeting, "mark"), str)
        takes_shell, quoted = command[0] == "ssh", shlex.quote(_BOOTSTRAP)  # ssh hands its arguments to a shell
        try:
            self._start([*command, "-c", quoted if takes_shell else _BOOTSTRAP], programs, config, seconds)
        except Ended as first:
            if takes_shell or not remote or isinstance(first, TimeUp):
                raise
            try:  # other commands (adb shell) may use a shell too, and then the only sign is a syntax error
                self._start([*command, "-c", quoted], programs, config, seconds)
            except Ended:
                raise first from None

    def _start(
        self, command: Sequence[str], programs: Sequence[Path], config: Mapping[str, Any], seconds: float
    ) -> None:
        try:
            self.process: Popen[bytes] = forked(command) or Popen(command, **OWN_STREAMS)
        except OSError as error:
            raise Ended(f"cannot be started: {error}") from error
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        self._stderr = _OutputReader(self.process.stderr)
        self._deadline = Deadline(self.process)
        with self.within(seconds):
            self._stdin.write(b"%d\n" % (1 + len(programs)))
            for source in (path.read_bytes() for path in (_COMMON, *programs)):
                self._stdin.write(b"%d\n%s" % (len(source), source))
            self.send(config)
            self._skip_to_greeting()
            self.greeting = self.receive(**self._greeting_fields)
        self.printed(self.greeting["mark"])

    def _skip_to_greeting(self) -> None:
        line = b""
        for _ in range(_LINES_BEFORE_GREETING):
            line = self._stdout.readline(_MAX_KEPT)
            if line.endswith(GREETING):
                return
            if not line:
                raise EOFError
        raise _InvalidReply(line)

    def send(self, message: Mapping[str, Any], *arrays: Array | bytes) -> None:
        """Send a message, and the arrays or bytes that follow it."""
        self._stdin.write(json.dumps(message).encode() + b"\n")
        for array in arrays:  # reshape puts any array into C order
            self._stdin.write(array if isinstance(array, bytes) else array.reshape(-1).view(np.uint8).data)
        self._stdin.flush()

    def receive(self, **fields: Any) -> dict[str, Any]:
        """Return the next answer: `fields` of their kinds (see ARRAY), or "error" and "mark"; EOFError if invalid."""
        line = self._stdout.readline(_MAX_REPLY)
        if not line.endswith(b"\n") and len(line) < _MAX_REPLY:  # the process has ended
            raise EOFError
        try:
            answer = json.loads(line)
            json.dumps(answer, ensure_ascii=False).encode()  # refuses text that cannot be printed
        except (ValueError, RecursionError):  # text of a program such as ssh, or of a hostile device
            raise _InvalidReply(line) from None
        expected = {"error": str, "mark": str} if isinstance(answer, dict) and "error" in answer else fields
        if not isinstance(answer, dict) or not all(_is_kind(answer.get(name), expected[name]) for name in expected):
            raise _InvalidReply(line)
        return answer

    def receive_array(self, described: Mapping[str, Any]) -> Array:
        """Return the array that follows an answer with the fields of ARRAY."""
        shape, dtype = described["shape"], described["dtype"]
        is_array = dtype in _DTYPES and len(shape) <= _MAX_AXES and all(0 <= size < _MAX_ARRAY for size in shape)
        if not is_array or (self._remote and math.prod(shape) * np.dtype(dtype).itemsize > _MAX_ARRAY):
            raise _InvalidReply(f"an array of {dtype} {shape}".encode())
        array = np.empty(shape, dtype)
        if self._stdout.readinto(array.reshape(-1).view(np.uint8).data) < array.nbytes:  # type: ignore[attr-defined]
            raise EOFError
        return array

    def printed(self, mark: str | None = None) -> str:
        """Return the text printed since the last call, up to a mark or the end, as the end of a message."""
        return _message_end(self._stderr.until(mark))

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Limit the time of a block; raises Ended if the process ends in the block, TimeUp if it takes too long."""
        finished = False
        try:
            self._deadline.set(seconds)
            yield
            finished = True
        except (EOFError, OSError) as end:
            how, printed = self._ended(end)
            if self._deadline.expired:
                raise TimeUp(f"did not finish within {seconds:g} s", printed) from end
            raise Ended(how, printed) from end
        except Error:  # the process reported it, and continues
            finished = True
            raise
        finally:
            self._deadline.set(math.inf)
            if not finished:
                # The rest of this answer would be read as the answer to the next request.
                stop(self.process)
                self.close()

    def close(self) -> None:
        """End the process, and wait for its end."""
        self._deadline.end()
        if hasattr(os, "killpg"):  # on Windows a killed worker would leave files: the end of its stdin ends it
            stop(self.process)
        for stream in (self._stdin, self._stdout):
            with suppress(OSError):  # there may be unsent data
                stream.close()
        try:
            self.process.wait(_PATIENCE)
        except TimeoutExpired:
            stop(self.process)

    def _ended(self, end: Exception) -> tuple[str, str]:
        """Return how the process ended, and the last text that it printed; `end` is the error of reading from it."""
        try:
            code: int | None = self.process.wait(_PATIENCE)
        except TimeoutExpired:  # it has closed its stdout, or sent an invalid reply
            code = None
            stop(self.process)
        text = self._stderr.until(None)
        mark, printed = _END.search(text), _message_end(_END.sub(b"", text))
        if mark and code is not None:
            return describe_exit(-int(mark[2]) if mark[1] == b"crashed" else int(mark[2])), printed
        if isinstance(end, _InvalidReply):
            return str(end), printed
        if code is None:  # this process killed it
            return "closed its output", printed
        if self._remote and not is_windows_crash(code):
            return f"ended with exit code {code} and no word of the worker (a lost connection?)", printed
        return describe_exit(code), printed


_Worker = TypeVar("_Worker", bound="Worker")


class Worker(ABC):
    """The owner of a process: it starts the process at the first use or in `warm_up`, and again after a crash.

    `close` it, or use `with`.
    """

    def __init__(self, runtime: str, command: str, hint: str = "") -> None:
        self._runtime, self._command = runtime, command  # for messages
        self._hint = hint  # the end of a timeout's message
        self._lock = threading.Lock()
        self._child: Child | None = None

    def __enter__(self: _Worker) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _started(self) -> Child:
        """Start the process; raises Ended if that fails."""

    def _problem(self, greeting: Mapping[str, str]) -> str:
        """Return an error text if the process lacks something, else ""."""
        return greeting.get("error", "")

    def start(self) -> Child:
        """Return the process, one for all threads; UsageError if it cannot start, or lacks something."""
        with self._lock:
            if self._child is None:
                try:
                    child = self._started()
                except Ended as end:
                    raise UsageError(f"{self._runtime} cannot be run by {self._command}, which {end}") from end
                if problem := self._problem(child.greeting):
                    child.close()
                    raise UsageError(f"{self._runtime} cannot be run by {self._command}: {problem}")
                self._child = child
            return self._child

    @contextmanager
    def within(self, seconds: float, what: str) -> Iterator[Child]:
        """Yield the process; raises CrashError, which names `what`, if the process crashes or takes too long."""
        child = self.start()
        try:
            with child.within(seconds):
                yield child
        except Ended as end:
            self.lost()
            hint = self._hint if isinstance(end, TimeUp) else ""
            raise CrashError(f"{self._runtime} {end.how} on {what}{hint}{end.printed}") from end

    def close(self) -> None:
        """End the process; a later run starts another."""
        with self._lock:
            if self._child is not None:
                self._child.close()
            self.lost()

    def lost(self) -> None:
        """Note that the process has ended."""
        self._child = None

    def warm_up(self) -> None:
        """Start the process while the caller continues; `start` raises the UsageError if that fails."""
        fork(_BOOTSTRAP)
        begin(self.start)


class _OutputReader:
    """The text that a process prints; a thread reads it, because a full pipe would block the process."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._text, self._has_ended = b"", False
        self._changed = threading.Condition()
        threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            for part in iter(lambda: os.read(stream.fileno(), 1 << 16), b""):
                with self._changed:
                    self._text = (self._text + part)[-_MAX_KEPT:]
                    self._changed.notify()
        with self._changed:
            self._has_ended = True
            self._changed.notify()

    def until(self, mark: str | None) -> bytes:
        """Return the text up to a mark or the end, or the text so far after two seconds."""
        end = b"\0%s\0" % mark.encode() if mark is not None else None
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or (end is not None and end in self._text), _PATIENCE)
            text, _, self._text = self._text.partition(end) if end is not None else (self._text, b"", b"")
        return text


def _message_end(printed: bytes) -> str:
    """Return the last part of the printed text, as the end of a message."""
    text = printed.decode(errors="replace").strip()
    return f"; it says: {text[-_MAX_MESSAGE:]}" if text else ""


def _is_kind(value: Any, kind: Any) -> bool:
    """Return True if a value from JSON is of a kind: a type, or [kind] for a list of any length."""
    if isinstance(kind, list):
        return isinstance(value, list) and all(_is_kind(item, kind[0]) for item in value)
    return isinstance(value, kind)
