"""ONNX Runtime on the original model, in a separate process: the reference for a net."""

import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from itertools import count
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np

from onnx2ncnn_opt.errors import RefusalError, RunError
from onnx2ncnn_opt.runtime.base import Array, require
from onnx2ncnn_opt.runtime.child import ARRAY, Child, Worker

_WORKER = Path(__file__).with_name("_ort_worker.py")
_SECONDS_TO_START = 60.0
# The option against saturation makes ONNX Runtime convert int8 weights to uint8. It then refuses the model if two nodes
# read the same weight, or if an operator, such as QGemm, has no kernel for these types.
_REFUSALS = ("Attempt to replace the existing tensor", "Failed to find kernel", "Could not find an implementation")
_INT8_PRODUCTS = (b"MatMulInteger", b"DynamicQuantizeMatMul", b"QGemm", b"QLinearConv", b"QLinearMatMul")
_MAX_SESSIONS = 3  # of the process: a model, the model in float64, and the model with rounding errors


class OrtWorker(Worker):
    """A process that runs models."""

    def __init__(self) -> None:
        super().__init__("ONNX Runtime", sys.executable, "; smaller inputs may do (--shape, --inputs)")
        self._requests = RLock()  # one thread at a time sends requests
        self._held: dict[int, dict[str, Any]] = {}  # descriptions of the process's sessions by number

    def lost(self) -> None:
        """Note that the process has ended, with its sessions."""
        super().lost()
        self._held = {}

    @contextmanager
    def within(self, seconds: float, what: str) -> Iterator[Child]:
        """Yield the process; other threads wait until the end of the block. Raises CrashError like `Worker.within`."""
        with self._requests, super().within(seconds, what) as child:
            yield child

    def _started(self) -> Child:
        require("onnxruntime")
        return Child((sys.executable,), [_WORKER], {"files": False}, seconds=_SECONDS_TO_START)

    def hold(self, number: int, load: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return a session's description; `load` it if the process lacks it, and drop one if there are too many."""
        description = self._held.pop(number, None)
        if description is None:
            if len(self._held) == _MAX_SESSIONS:
                self.drop(next(iter(self._held)))  # the least recently used one
            description = load()
        self._held[number] = description
        return description

    def drop(self, number: int) -> None:
        """Delete a session, if the process has it."""
        with self._requests:
            if self._held.pop(number, None) is not None and self._child is not None:
                self._child.send({"do": "drop", "number": number})


SHARED = OrtWorker()  # one process for all models; it ends with this process
_numbers = count()
_numbers_of: dict[tuple[Any, ...], int] = {}  # of files


class OrtRunner:
    """An ONNX model on ONNX Runtime's CPU provider.

    `model` is a path (external data is next to it, the size has no limit), or the bytes of a model of less than 2 GB
    with external data in `folder`. `outputs` are values of the graph to compute instead of its outputs. `values` are
    constant feeds of every run, if the outputs need them. `threads` of None are all cores. `timeout` is in seconds, for
    loading and for each run.

    `fast` is for measuring times: subnormal numbers are 0 in the whole process, as in ncnn, and runs need not repeat to
    the bit. `plain` runs the nodes without graph optimisations, but then products of 8-bit integers are wrong on some
    CPUs. `once`, which `outputs` imply, keeps the layout of weights, for a model that runs a few times.
    Raises RunError if ONNX Runtime refuses the model.
    """

    def __init__(
        self,
        model: Path | bytes,
        *,
        outputs: Collection[str] = (),
        values: Mapping[str, Array] | None = None,
        threads: int | None = 1,
        folder: Path | None = None,
        timeout: float = 300.0,
        fast: bool = False,
        plain: bool = False,
        once: bool = False,
        worker: OrtWorker = SHARED,
    ) -> None:
        self._worker, self._timeout = worker, timeout
        self._threads = threads or os.cpu_count() or 1
        self._flags = {"fast": fast, "plain": plain, "once": once or bool(outputs), "precise": True}
        self._name = "the model" if isinstance(model, bytes) else os.fspath(model)
        data_folder = model.absolute().parent if isinstance(model, Path) else folder
        if outputs:
            from onnx2ncnn_opt.onnx.edit.model import read_model, to_bytes

            folder, model = data_folder, to_bytes(read_model(model, outputs))
        elif isinstance(model, Path) and "\\udc" in ascii(model):  # it takes no name that is not UTF-8
            folder, model = data_folder, model.read_bytes()
        if unsigned := self._without_int8(model, weights=False):
            folder, model = data_folder, unsigned
        self._model, self._folder, self._number = model, folder, self._numbered(model)
        try:
            description = self._loaded()
        except RunError as error:
            if not any(text in str(error) for text in _REFUSALS):
                raise
            self._flags["precise"], self._number = False, next(_numbers)
            self._model, self._folder = self._without_int8(model, weights=True) or model, data_folder
            description = self._loaded()
        self._inputs, self._outputs = description["inputs"], description["outputs"]
        names = {*self._inputs, *description["with_default"]}
        self._values = {name: array for name, array in (values or {}).items() if name in names}

    @staticmethod
    def _without_int8(model: Path | bytes, *, weights: bool) -> bytes | None:
        if not isinstance(model, bytes) and not model.is_file():
            return None
        data = model if isinstance(model, bytes) else _message(*_state(model.absolute()))
        if not any(kind in data for kind in _INT8_PRODUCTS):
            return None
        from onnx2ncnn_opt.onnx.edit.unsigned import without_int8

        return without_int8(data, weights=weights)

    def input_names(self) -> list[str]:
        """Return the inputs that have to be fed, in the model's order."""
        return [name for name in self._inputs if name not in self._values]

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Return every output by name; RunError if ONNX Runtime refuses the feeds or fails."""
        with self._requested({"do": "run"}, feeds) as (child, _):
            return {name: child.receive_array(self._receive(child, "failed on", **ARRAY)) for name in self._outputs}

    def run_any(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Return every output by name, like `run`; ignore feeds for which the model has no input."""
        names = set(self.input_names())
        return self.run({name: array for name, array in feeds.items() if name in names})

    def time(self, feeds: Mapping[str, Array], seconds: float) -> list[float]:
        """Return the CPU times, in seconds, of the runs of one thread that fit into `seconds`."""
        with self._requested({"do": "time", "seconds": seconds}, feeds, times=[float]) as (_, answer):
            return [float(time) for time in answer["times"]]

    @contextmanager
    def _requested(
        self, request: Mapping[str, Any], feeds: Mapping[str, Array], **fields: Any
    ) -> Iterator[tuple[Child, dict[str, Any]]]:
        """Send a request with arrays; yield the process and its first answer, which has `fields`."""
        arrays = {name: np.asarray(array) for name, array in {**self._values, **feeds}.items()}
        described = []
        for name, array in arrays.items():
            if array.dtype.kind not in "biuf":
                raise RefusalError(f"ONNX Runtime failed on {self._name}: it takes no {array.dtype} as '{name}'")
            described.append({"name": name, "dtype": array.dtype.str, "shape": array.shape})
        with self._worker.within(self._timeout, self._name) as child:
            self._worker.hold(self._number, partial(self._load, child))
            child.send({**request, "number": self._number, "feeds": described}, *arrays.values())
            yield child, self._receive(child, "failed on", **fields)

    def close(self) -> None:
        """Delete the session in the process."""
        self._worker.drop(self._number)

    def _numbered(self, model: Path | bytes) -> int:
        """Return the number of a session; runners of the same file with the same options share one."""
        if isinstance(model, bytes) or not model.is_file():
            return next(_numbers)
        state = _state(model.absolute())
        external = (_state(model.absolute().parent / name) for name in _external_files(*state))
        return _numbers_of.setdefault((*state, *external, self._threads, *self._flags.values()), next(_numbers))

    def _loaded(self) -> dict[str, Any]:
        with self._worker.within(self._timeout, self._name) as child:
            return self._worker.hold(self._number, partial(self._load, child))

    def _load(self, child: Child) -> dict[str, Any]:
        path, data = (None, self._model) if isinstance(self._model, bytes) else (str(self._model.absolute()), b"")
        folder = None if self._folder is None else os.fspath(self._folder)
        request = {"number": self._number, "path": path, "size": len(data), "threads": self._threads, "folder": folder}
        child.send({"do": "load", **request, **self._flags}, data)
        return self._receive(child, "refuses", inputs=[str], outputs=[str], with_default=[str])

    def _receive(self, child: Child, what: str, **fields: Any) -> dict[str, Any]:
        answer = child.receive(**fields)
        if "error" in answer:
            raise RefusalError(f"ONNX Runtime {what} {self._name}: {_plain(answer['error'])}")
        return answer


def _state(file: Path) -> tuple[str, int, int, int]:
    """Return a file's path, inode, time and size, which change if it is written again."""
    status = file.stat() if file.is_file() else None
    return os.fspath(file), *((status.st_ino, status.st_mtime_ns, status.st_size) if status else (0, 0, 0))


@lru_cache(_MAX_SESSIONS)
def _message(model: str, _inode: int, _time: int, _size: int) -> bytes:
    """Return the bytes of a model without its large weights."""
    from onnx2ncnn_opt.onnx.read.embedded import without_weights

    return without_weights(Path(model))


@cache
def _external_files(*model: Any) -> list[str]:
    """Return the names of files that hold external data of a model with this `_state`."""
    data = _message(*model)
    starts = (match.end() for match in re.finditer(rb"\n\x08location\x12", data))  # key and value of a message
    return sorted({data[i + 1 : i + 1 + data[i]].decode(errors="replace") for i in starts})


def _plain(error: str) -> str:
    """Return the node and the reason of an ONNX Runtime error, without places in its sources."""
    node = re.search(r"running (\w+) node\. Name:'([^']*)'", error)
    reason = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : |.*Status Message: |.* was false\. ", "", error).strip()
    return f"{node[1]} '{node[2]}': {reason}" if node else reason
