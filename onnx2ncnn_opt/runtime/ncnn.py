"""ncnn, in a child process: a net that is wrong may end that process, but never the caller's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from onnx2ncnn_opt.errors import CrashError, RunError, UsageError
from onnx2ncnn_opt.runtime.base import Array, Failure, Feed, Fetch, require

_WORKER = Path(__file__).with_name("_ncnn_worker.py")

# Storage in 16 bits is a choice of the deployment, not of the net: it is never used to judge one.
_FP32 = dict.fromkeys(
    ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic", "use_bf16_packed", "use_bf16_storage"), False
)
# Winograd alone costs about 3e-4 on a 3x3 convolution. Without these, equal layers give equal bits.
_EXACT = dict.fromkeys(("use_winograd_convolution", "use_sgemm_convolution", "use_packing_layout"), False)

_SAID_AT_MOST = 2000


class NcnnWorker:
    """A child process that runs nets, one at a time; it is started when first needed, and again after a crash.

    Use as a context manager (or `close` it), and give it to several `NcnnRunner`s to save the start of a process each.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._runner: NcnnRunner | None = None
        self._log: tempfile.TemporaryDirectory[str] | None = None
        self._log_read = 0

    def __enter__(self) -> NcnnWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child process; a later run starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        if self._log is not None:
            self._log.cleanup()
        self._process = self._runner = self._log = None

    def _start(self) -> subprocess.Popen[bytes]:
        require("ncnn")
        # A file, because a pipe that nobody reads would stop a net that complains at length.
        self._log, self._log_read = tempfile.TemporaryDirectory(prefix="onnx2ncnn_opt."), 0
        # On a busy machine threads that spin while they wait for each other take minutes for what takes a second.
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
        with (Path(self._log.name) / "stderr").open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, os.fspath(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
            )
        return self._process

    @contextmanager
    def session(self, runner: NcnnRunner) -> Iterator[subprocess.Popen[bytes]]:
        """The process with `runner`'s net in it; its end, by itself or by the runner's timeout, raises CrashError."""
        process = self._process or self._start()
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            process.kill()

        timer = threading.Timer(runner.timeout, expire)
        timer.start()
        in_step = False
        try:
            if self._runner is not runner:
                self._runner = None
                runner.load(process)
                self._runner = runner
            yield process
            in_step = True
        except (EOFError, OSError) as end:
            code = process.wait()
            reason = f"did not finish within {runner.timeout:g} s" if expired.is_set() else _cause(code)
            raise CrashError(f"ncnn {reason} on {runner.param}{self.said()}") from end
        except RunError:
            in_step = True  # an error that the process has told, and gone on from
            raise
        finally:
            timer.cancel()
            if not in_step:
                # Whatever else the process has to say would be taken for the answer to the next request.
                self.close()

    def said(self, until: int | None = None) -> str:
        """What ncnn wrote to stderr since this was last asked (up to a position in it), as the end of a message."""
        assert self._log is not None
        with (Path(self._log.name) / "stderr").open("rb") as stderr:
            stderr.seek(self._log_read)
            size = -1 if until is None else until - self._log_read
            text = stderr.read(size).decode(errors="replace").strip()
            self._log_read = stderr.tell()
        return f"; ncnn says: {text[-_SAID_AT_MOST:]}" if text else ""


class NcnnRunner:
    """One net, ready to run.

    `exact` turns winograd, sgemm and packing off, so that two nets of equal layers give equal bits; 16 bit storage is
    off in any case. `timeout` is in seconds, for each run. Paths are read when the net is first used.
    """

    def __init__(
        self,
        param: Path,
        bin: Path,
        *,
        exact: bool = False,
        timeout: float = 300.0,
        threads: int = 1,
        worker: NcnnWorker | None = None,
    ) -> None:
        self.param, self.bin, self.timeout = param, bin, timeout
        self._options = {**_FP32, **(_EXACT if exact else {}), "num_threads": threads}
        self._worker = NcnnWorker() if worker is None else worker
        self._owns_worker = worker is None
        self._names: dict[str, Any] = {}

    def __enter__(self) -> NcnnRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child process, unless it was given by the caller."""
        if self._owns_worker:
            self._worker.close()

    def input_names(self) -> list[str]:
        """The tops of the net's Input layers, in file order."""
        return list(self._loaded()["inputs"])

    def output_names(self) -> list[str]:
        """The blobs that no layer consumes, in file order."""
        return list(self._loaded()["outputs"])

    def run(self, feeds: Mapping[str, Feed | Array], outputs: Sequence[Fetch | str] | None = None) -> dict[str, Array]:
        """The outputs (all of the net's by default) by blob name; RunError if any of them cannot be had."""
        results = self.extract(feeds, outputs)
        failures = [f"  {blob}: {result}" for blob, result in results.items() if isinstance(result, Failure)]
        if failures:
            raise RunError(f"ncnn could not compute outputs of {self.param}:\n" + "\n".join(failures))
        return {blob: result for blob, result in results.items() if not isinstance(result, Failure)}

    def extract(
        self, feeds: Mapping[str, Feed | Array], outputs: Sequence[Fetch | str] | None = None
    ) -> dict[str, Array | Failure]:
        """As `run`, with a Failure for each output that could not be had.

        All outputs come from one extractor, as a user's program would get them. Once ncnn has died on one of them, the
        ones after it are Failures too. Raises RunError if the net does not load or does not take the feeds.
        """
        given = {blob: _feed(blob, feed) for blob, feed in feeds.items()}
        outputs = self.output_names() if outputs is None else outputs
        wanted = dict.fromkeys(Fetch(output) if isinstance(output, str) else output for output in outputs)
        request = {
            "feeds": [
                {"blob": blob, "batch_axis": feed.batch_axis, "dtype": feed.array.dtype.str, "shape": feed.array.shape}
                for blob, feed in given.items()
            ],
            "outputs": [{"blob": fetch.blob, "batch_axis": fetch.batch_axis} for fetch in wanted],
        }
        results: dict[str, Array | Failure] = {}
        fed = False
        try:
            with self._worker.session(self) as process:
                _send(process, request, *(feed.array for feed in given.values()))
                self._receive(process)
                fed = True
                for fetch in wanted:
                    results[fetch.blob] = self._fetched(process, fetch)
        except CrashError as death:
            if not fed:
                raise
            first, *others = (fetch.blob for fetch in wanted if fetch.blob not in results)
            results[first] = Failure(str(death), crashed=True)
            results.update(dict.fromkeys(others, Failure(f"not reached: ncnn died on '{first}'", crashed=True)))
        return results

    def load(self, process: subprocess.Popen[bytes]) -> None:
        """Put the net into the worker's process; called by it."""
        _send(process, {"param": os.fspath(self.param), "bin": os.fspath(self.bin), "options": self._options})
        self._names = self._receive(process)

    def _loaded(self) -> dict[str, Any]:
        if not self._names:
            with self._worker.session(self):
                pass
        return self._names

    def _receive(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        answer = _answer(process)
        if "error" in answer:
            raise RunError(f"ncnn refuses {self.param}: {answer['error']}{self._worker.said(answer['log'])}")
        return answer

    def _fetched(self, process: subprocess.Popen[bytes], fetch: Fetch) -> Array | Failure:
        answer = _answer(process)
        if "error" in answer:
            return Failure(answer["error"] + self._worker.said(answer["log"]))
        array = np.empty(answer["shape"], answer["dtype"])
        assert process.stdout is not None
        if process.stdout.readinto(array.reshape(-1).view(np.uint8).data) < array.nbytes:  # type: ignore[attr-defined]
            raise EOFError
        return array.view(np.int32) if fetch.integer and array.itemsize == 4 else array


def _send(process: subprocess.Popen[bytes], message: dict[str, Any], *arrays: Array) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message).encode() + b"\n")
    for array in arrays:  # reshape puts any array into C order
        process.stdin.write(array.reshape(-1).view(np.uint8).data)
    process.stdin.flush()


def _answer(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    answer: dict[str, Any] = json.loads(line)
    return answer


def _feed(blob: str, feed: Feed | Array) -> Feed:
    """A feed that the binding takes: float32 or int32, as it crashes on 64 bits, in one to four dimensions."""
    feed = feed if isinstance(feed, Feed) else Feed(feed)
    array = as_ncnn(feed.array)
    dims = array.ndim - (feed.batch_axis is not None)
    if not 1 <= dims <= 4 or not array.size:
        raise UsageError(
            f"blob '{blob}' cannot be fed an array of shape {feed.array.shape}"
            + (f" with batch axis {feed.batch_axis}" if feed.batch_axis is not None else "")
            + ": a Mat has one to four dimensions besides its batch, and no empty ones"
        )
    return Feed(array, feed.batch_axis)


def as_ncnn(array: Array) -> Array:
    """The array in an element type that ncnn knows: integers and bools as int32, the rest as float32; rank 0 as [1].

    Raises UsageError for integers that do not fit.
    """
    if array.dtype.kind in "iub":
        limits = np.iinfo(np.int32)
        if array.size and (array.max() > limits.max or array.min() < limits.min):
            raise UsageError(f"ncnn's integers have 32 bits, and {array.min()}..{array.max()} does not fit into them")
        dtype: type[np.generic] = np.int32
    else:
        dtype = np.float32
    return np.atleast_1d(array).astype(dtype, copy=False)


def _cause(code: int) -> str:
    """How a process ended, from its return code."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"crashed with {name}{hint}"
