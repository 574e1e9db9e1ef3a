"""ncnn in a separate process, on this machine or a device: a broken net may end that process, not the caller's."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onnx2ncnn_opt.errors import CrashError, RunError, UsageError
from onnx2ncnn_opt.progress import counted
from onnx2ncnn_opt.runtime.base import Array, Failure, Feed, Fetch, Step, all_there, outdated
from onnx2ncnn_opt.runtime.child import ARRAY, Child, Worker
from onnx2ncnn_opt.runtime.targets import LOCAL, MODES, Target

_PROGRAMS = tuple(Path(__file__).with_name(name) for name in ("_ncnn_net.py", "_ncnn_worker.py"))

# Winograd alone causes an error of about 3e-4 in a 3x3 convolution.
_PLAIN = dict.fromkeys(("use_winograd_convolution", "use_sgemm_convolution"), False)
_EXACT = {**_PLAIN, "use_packing_layout": False}

_SECONDS_TO_START = 60.0
_STATS = {"largest": float, "special": int, "batch": bool, "errors": [float]}


class WalkStep(NamedTuple):
    """A blob of a walk: it gets random errors, and is then rounded to fp16 if `rounded`."""

    blob: str
    rounded: bool = False
    noise: tuple[float, ...] = ()  # sizes (root mean squares) of absolute errors; each number draws one
    relative: float = 0.0  # the size of a further error, relative to the number
    send: bool = False  # return the blob
    sample: int = 0  # if not `send`: return about so many of its numbers, before errors and rounding


class BlobStats(NamedTuple):
    """The statistics of a blob of a walk; `array` is the blob or its sample, None if neither was requested."""

    largest: float  # the largest finite number before rounding
    special: int  # the number of non-finite numbers after rounding, without 3.4e38, which stands for infinity
    is_batch: bool  # the array's first axis is the Mat's batch
    array: Array | None
    errors: tuple[float, ...] = ()  # mean squares, in a sample, of the random errors and of the rounding errors


class Times(NamedTuple):
    """Seconds for each blob, in the order of the request, and for a whole run: each the fastest of `runs`."""

    blobs: tuple[float, ...]
    whole: float
    runs: int


class NcnnWorker(Worker):
    """A process that runs nets, one at a time; several `NcnnRunner`s may share it."""

    def __init__(self, target: Target = LOCAL) -> None:
        super().__init__("ncnn", f"`{' '.join(target.command)}`")
        self.target = target
        self._runner: NcnnRunner | None = None
        self._sent: set[str] = set()

    def lost(self) -> None:
        """Note that the process has ended, with its net and its files."""
        super().lost()
        self._runner, self._sent = None, set()

    def _started(self) -> Child:
        target = self.target
        target.require()
        return Child(
            target.command,
            _PROGRAMS,
            {"vulkan": target.vulkan, "files": not target.shares_files},
            seconds=_SECONDS_TO_START * target.patience,
            remote=target.is_remote,
            greeting=("ncnn", "machine"),
        )

    def _problem(self, greeting: Mapping[str, str]) -> str:
        problem = super()._problem(greeting)
        if not problem and (old := outdated("ncnn", greeting["ncnn"])):
            problem = f"its ncnn {old}"
        if problem and not self.target.is_local:
            problem += "; `python3 -m pip install -U numpy ncnn` there gets what is needed"
        return problem

    def checked(self, modes: Sequence[str]) -> str:
        """Describe the machine and the modes for users: "x86-64 fp32", "aarch64 fp32, fp16 (qemu)"."""
        return self.target.described(self.start().greeting, modes)

    @contextmanager
    def session(self, runner: NcnnRunner) -> Iterator[Child]:
        """Yield the process with `runner`'s net; raises CrashError if it crashes, or at the runner's timeout."""
        with self.within(runner.timeout * self.target.patience, str(runner.param)) as child:
            if self._runner is not runner:
                last, self._runner = self._runner, None
                runner.load(child, last)
                self._runner = runner
            yield child

    def holds(self, runner: NcnnRunner) -> bool:
        """Return True if the process has loaded the runner's net."""
        return self._runner is runner

    def memory(self, *, restart: bool = False) -> int | None:
        """Return the peak memory of the process in bytes, None if unknown; `restart` first resets the peak."""
        with self.within(_SECONDS_TO_START * self.target.patience, "a question") as child:
            child.send({"do": "memory", "restart": restart})
            bytes: int | None = child.receive(bytes=int | None).get("bytes")
            return bytes

    def file(self, path: Path) -> str:
        """Return the file's name for the process; a process on another machine gets the file's bytes first."""
        if self.target.shares_files:
            return str(path.absolute())
        child = self.start()
        try:
            data = path.read_bytes()
        except OSError as error:
            raise RunError(f"cannot read {path}: {error}") from error
        name = hashlib.sha256(data).hexdigest()
        if name not in self._sent:
            child.send({"do": "put", "name": name, "size": len(data)}, data)
            answer = child.receive()
            if "error" in answer:
                raise RunError(f"{path} cannot be stored on the device: {answer['error']}")
            self._sent.add(name)
        return name


class NcnnRunner(AbstractContextManager["NcnnRunner"]):
    """One net, ready to run.

    `mode` is one of MODES. `plain` turns winograd and sgemm off, `exact` also packing: then two nets of equal layers
    give equal bits. `timeout` is in seconds for each run, and longer on a slow target. `threads` of None are all cores
    of the target. The runner reads the files at the first use. `worker` is the process that runs the net.
    """

    def __init__(
        self,
        param: Path,
        bin: Path,
        *,
        mode: str = "fp32",
        plain: bool = False,
        exact: bool = False,
        timeout: float = 300.0,
        threads: int | None = 1,
        worker: NcnnWorker | None = None,
    ) -> None:
        self.param, self.bin, self.timeout = param, bin, timeout
        self._options: dict[str, int] = {**MODES[mode], **(_EXACT if exact else _PLAIN if plain else {})}
        if threads is not None:
            self._options["num_threads"] = threads
        self.worker = NcnnWorker() if worker is None else worker
        self._owns_worker = worker is None
        self._files: Any = None  # the identity of the loaded files
        self._names: dict[str, Any] = {}
        self._last_step: Step | None = None  # the process has the caches after it

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, unless it is the caller's."""
        if self._owns_worker:
            self.worker.close()

    def input_names(self) -> list[str]:
        """Return the tops of the net's Input layers, in file order."""
        return list(self._loaded()["inputs"])

    def output_names(self) -> list[str]:
        """Return the blobs that no layer consumes, in file order."""
        return list(self._loaded()["outputs"])

    def run(self, feeds: Mapping[str, Feed | Array], outputs: Sequence[Fetch | str] | None = None) -> dict[str, Array]:
        """Return the outputs (by default all) by blob name; RunError if one of them is missing."""
        return all_there(self.extract(feeds, outputs), self.param)

    def extract(
        self, feeds: Mapping[str, Feed | Array], outputs: Sequence[Fetch | str] | None = None
    ) -> dict[str, Array | Failure]:
        """Return the outputs like `run`, with a Failure for each missing one.

        All outputs come from one extractor, as in a user's program. If ncnn crashes on one of them, the later ones are
        Failures too. Raises RunError if ncnn refuses the net or the feeds.
        """
        outputs = self.output_names() if outputs is None else outputs
        fetches = dict.fromkeys(Fetch(output) if isinstance(output, str) else output for output in outputs)
        described = [fetch._asdict() for fetch in fetches]
        results: dict[str, Array | Failure] = {}
        is_fed = False
        try:
            with self._requested(feeds, do="run", outputs=described) as child:
                self._receive(child)
                is_fed = True
                for fetch in fetches:
                    answer = child.receive(**ARRAY)
                    if "error" in answer:
                        results[fetch.blob] = Failure(answer["error"] + child.printed(answer["mark"]))
                    else:
                        results[fetch.blob] = fetch.read(child.receive_array(answer))
                if isinstance(feeds, Step) and feeds.caches:
                    self._receive(child)
                    self._last_step = feeds
        except CrashError as death:
            if not is_fed:
                raise
            first, *others = [fetch.blob for fetch in fetches if fetch.blob not in results] or ["caches"]
            results[first] = Failure(str(death), crashed=True)
            results.update(dict.fromkeys(others, Failure(f"not reached: ncnn died on '{first}'", crashed=True)))
        return results

    def time(self, feeds: Mapping[str, Feed | Array], outputs: Sequence[str], seconds: float) -> list[float]:
        """Return the times of the runs that fit into `seconds`: CPU time of one thread, on a GPU elapsed time.

        The runner's `threads` have to be 1. Raises RunError if an output is missing, and CrashError.
        """
        described = [{"blob": blob} for blob in outputs]
        with self._requested(feeds, do="time", outputs=described, seconds=seconds) as child:
            return [float(time) for time in self._receive(child, times=[float])["times"]]

    def walk(
        self,
        feeds: Mapping[str, Feed | Array],
        steps: Sequence[WalkStep],
        visit: Callable[[WalkStep, BlobStats], None],
        seed: int = 0,
    ) -> None:
        """Compute a net blob by blob, change each before its readers are computed, and call `visit` for each.

        `seed` is for the random errors. `steps` are in the order of the file's layers, because ncnn frees a blob after
        its reader has run. Raises RunError if a blob is missing, and CrashError.
        """
        # Sending lists of floats as text would take as long as the net itself.
        noises = (base64.b64encode(np.array(step.noise, np.float32).tobytes()).decode() for step in steps)
        described = [{**step._asdict(), "noise": noise} for step, noise in zip(steps, noises, strict=True)]
        with self._requested(feeds, do="walk", steps=described, seed=seed) as child:
            self._receive(child)
            failure: RunError | None = None
            for step in counted(steps, "ncnn computes the net blob by blob", "blobs"):
                try:
                    answer = self._receive(child, **_STATS, **(ARRAY if step.send or step.sample else {}))
                except RunError as error:  # the other answers still have to be read
                    failure = failure or error
                    continue
                array = child.receive_array(answer) if step.send or step.sample else None
                if failure is None:
                    numbers = answer["largest"], answer["special"], answer["batch"]
                    visit(step, BlobStats(*numbers, array, answer["errors"]))
            if failure is not None:
                raise failure

    def time_blobs(
        self, feeds: Mapping[str, Feed | Array], blobs: Sequence[str], *, runs: int = 20, seconds: float = 5.0
    ) -> Times:
        """Measure the time of each blob, and of a whole run: CPU time of a thread, on a GPU elapsed time.

        ncnn's Python package does not time layers. So the blobs are extracted in the order of the file's layers: each
        extraction runs one layer and copies its blob. The time of the copy is measured too, and subtracted. After a
        warm-up run there are `runs`, or fewer if `seconds` are over, but at least one. The fastest counts, because
        other work on the machine only adds time. Raises RunError if a blob is missing, and CrashError.
        """
        with self._requested(feeds, do="time_blobs", blobs=list(blobs), runs=runs, seconds=seconds) as child:
            answer = self._receive(child, blobs=[float], whole=float, runs=int)
        return Times(tuple(answer["blobs"]), answer["whole"], answer["runs"])

    def load(self, child: Child, last: NcnnRunner | None = None) -> None:
        """Load the net into the worker's process, which has the net of `last`; the worker calls this."""
        param, bin = self.worker.file(self.param), self.worker.file(self.bin)
        self._last_step, self._files = None, self._identity()
        if last is not None and self._files and (self._files, self._options) == (last._files, last._options):
            self._names = last._names  # ncnn may take a second to transform the weights
            return
        child.send({"do": "load", "param": param, "bin": bin, "options": self._options})
        self._names = self._receive(child, inputs=[str], outputs=[str])

    def _identity(self) -> tuple[bytes, int, int, int] | None:
        """Return what tells the files from others: a .param has few bytes, and each net's .bin is a file of its own."""
        try:
            status = self.bin.stat()
            return self.param.read_bytes(), status.st_ino, status.st_mtime_ns, status.st_size
        except OSError:  # ncnn's own error says more
            return None

    def _loaded(self) -> dict[str, Any]:
        if not self._names:
            with self.worker.session(self):
                pass
        return self._names

    @contextmanager
    def _requested(self, feeds: Mapping[str, Feed | Array], **request: Any) -> Iterator[Child]:
        """Send a request with feeds to the process, and yield it; run missing earlier steps of a decoder first."""
        if isinstance(feeds, Step):
            request |= {"caches": feeds.caches, "past": feeds.past}
            last = self._last_step if self.worker.holds(self) else None
            done = (last, last.before) if last else ()  # the process can shorten the caches by a step
            if feeds.before is not None and not any(feeds.before is step for step in done):
                self.extract(feeds.before, ())
        described, arrays = [], []
        for blob, feed in feeds.items():
            array, axis = as_feed(blob, feed)
            described.append({"blob": blob, "batch_axis": axis, "dtype": array.dtype.str, "shape": array.shape})
            arrays.append(array)
        with self.worker.session(self) as child:
            child.send({**request, "feeds": described}, *arrays)
            yield child

    def _receive(self, child: Child, **fields: Any) -> dict[str, Any]:
        answer = child.receive(**fields)
        if "error" in answer:
            raise RunError(f"ncnn refuses {self.param}: {answer['error']}{child.printed(answer['mark'])}")
        return answer


def as_feed(blob: str, feed: Feed | Array) -> Feed:
    """Return a feed of float32 or int32 (ncnn's binding crashes on 64 bits); UsageError unless it has 1 to 4 dims."""
    feed = feed if isinstance(feed, Feed) else Feed(feed)
    array = as_ncnn(feed.array)
    if array.ndim == 1 and feed.batch_axis == 0:  # a number for each item
        array = array[:, None]
    dims = array.ndim - (feed.batch_axis is not None)
    if not 1 <= dims <= 4 or not array.size:
        raise UsageError(
            f"blob '{blob}' cannot be fed an array of shape {feed.array.shape}"
            + (f" with batch axis {feed.batch_axis}" if feed.batch_axis is not None else "")
            + ": a Mat has one to four dimensions besides its batch, and no empty ones"
        )
    return Feed(array, feed.batch_axis)


def as_ncnn(array: Array) -> Array:
    """Return the array as int32 (integers and bools) or float32, rank 0 as [1]; UsageError for larger integers."""
    if array.dtype.kind in "iub":
        limits = np.iinfo(np.int32)
        if array.size and (array.max() > limits.max or array.min() < limits.min):
            raise UsageError(f"ncnn's integers have 32 bits, and {array.min()}..{array.max()} does not fit into them")
        return np.atleast_1d(array).astype(np.int32, copy=False)
    return np.atleast_1d(array).astype(np.float32, copy=False)
