"""ncnn in a process of its own, here or on a device: a faulty net may end that process, but not the caller's."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnx2ncnn_opt.errors import CrashError, RunError, UsageError
from onnx2ncnn_opt.progress import counted
from onnx2ncnn_opt.runtime.base import Array, Failure, Feed, Fetch, Step, all_there, outdated
from onnx2ncnn_opt.runtime.child import ARRAY, Child, Worker
from onnx2ncnn_opt.runtime.targets import LOCAL, MODES, Target

_PROGRAMS = tuple(Path(__file__).with_name(name) for name in ("_ncnn_net.py", "_ncnn_worker.py"))

# Winograd alone costs about 3e-4 on a 3x3 convolution. Without these, equal layers give equal bits.
_EXACT = dict.fromkeys(("use_winograd_convolution", "use_sgemm_convolution", "use_packing_layout"), False)

_SECONDS_TO_START = 60.0
_STATS = {"largest": float, "special": int, "batch": bool, "errors": [float]}


@dataclass(frozen=True)
class WalkStep:
    """A blob of a walk: it gets random errors, and is then rounded."""

    blob: str
    rounding: str = ""  # to 16 bits, "fp16" or "bf16", or not
    # A layer makes it in 32 bits on ARM, and ncnn rounds it between layers: the last up to three numbers, which do not
    # fill a group of four, one by one.
    cast: bool = False
    noise: tuple[float, ...] = ()  # the root mean square of each error is drawn from these
    relative: float = 0.0  # and another one is relative to the number
    send: bool = False  # return the blob, ...
    sample: int = 0  # ... or about so many numbers of it, before its errors
    source: str = ""  # the blob of the same shape that it is computed as, if that is another one


@dataclass(frozen=True)
class BlobStats:
    """A blob of a walk, or the sample of it; None if neither was asked for."""

    largest: float  # finite number, before it was rounded
    special: int  # count of numbers that are not finite after rounding, without 3.4e38, which stands for infinity
    is_batch: bool  # the array's first axis is the Mat's batch
    array: Array | None
    errors: tuple[float, ...] = ()  # mean squares of the random errors and of those of rounding, of a sample


@dataclass(frozen=True)
class Times:
    """Times in seconds: for each blob, in the order of the request, and for a whole run; the fastest of `runs`."""

    blobs: tuple[float, ...]
    whole: float
    runs: int


class NcnnWorker(Worker):
    """A process that runs nets, one at a time; several `NcnnRunner`s may share it. `close` it, or use `with`."""

    def __init__(self, target: Target = LOCAL) -> None:
        super().__init__("ncnn", f"`{' '.join(target.command)}`")
        self.target = target
        self._runner: NcnnRunner | None = None
        self._sent: set[str] = set()

    def __enter__(self) -> NcnnWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lost(self) -> None:
        """Note that the process has ended, and with it the net and the files in it."""
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
        """Return where nets run and in which modes, for people: "x86-64 fp32", "aarch64 fp32, fp16 (qemu)"."""
        return self.target.described(self.start().greeting, modes)

    @contextmanager
    def session(self, runner: NcnnRunner) -> Iterator[Child]:
        """Yield the process with `runner`'s net; raises CrashError if it ends, by itself or by the runner's timeout."""
        with self.within(runner.timeout * self.target.patience, str(runner.param)) as child:
            if self._runner is not runner:
                self._runner = None
                runner.load(child)
                self._runner = runner
            yield child

    def holds(self, runner: NcnnRunner) -> bool:
        """Return True if the process has the runner's net."""
        return self._runner is runner

    def memory(self, *, restart: bool = False) -> int | None:
        """Return the most bytes that the process had since the last `restart`; None if its system does not say."""
        with self.within(_SECONDS_TO_START * self.target.patience, "a question") as child:
            child.send({"do": "memory", "restart": restart})
            bytes: int | None = child.receive(bytes=int | None)["bytes"]
            return bytes

    def file(self, path: Path) -> str:
        """Return the name of a file for the process; one that does not see this machine's files gets its bytes."""
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


class NcnnRunner:
    """One net, ready to run.

    `mode` is one of MODES. `exact` turns winograd, sgemm and packing off, so that two nets of equal layers give equal
    bits. `timeout` is in seconds, for each run, and longer on a slow target. `threads` are as many as the target has
    cores by default. Paths are read when the net is first used. `worker` says where it runs.
    """

    def __init__(
        self,
        param: Path,
        bin: Path,
        *,
        mode: str = "fp32",
        exact: bool = False,
        timeout: float = 300.0,
        threads: int | None = 1,
        worker: NcnnWorker | None = None,
    ) -> None:
        self.param, self.bin, self.timeout = param, bin, timeout
        self._options: dict[str, int] = {**MODES[mode], **(_EXACT if exact else {})}
        if threads is not None:
            self._options["num_threads"] = threads
        self.worker = NcnnWorker() if worker is None else worker
        self._owns_worker = worker is None
        self._names: dict[str, Any] = {}
        self._held: Step | None = None  # the caches in the process are those after it

    def __enter__(self) -> NcnnRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child process, unless it was given by the caller."""
        if self._owns_worker:
            self.worker.close()

    def input_names(self) -> list[str]:
        """Return the tops of the net's Input layers, in file order."""
        return list(self._loaded()["inputs"])

    def output_names(self) -> list[str]:
        """Return the blobs that no layer consumes, in file order."""
        return list(self._loaded()["outputs"])

    def run(self, feeds: Mapping[str, Feed | Array], outputs: Sequence[Fetch | str] | None = None) -> dict[str, Array]:
        """Return the outputs (all of the net's by default) by blob name; RunError if one of them is missing."""
        return all_there(self.extract(feeds, outputs), self.param)

    def extract(
        self, feeds: Mapping[str, Feed | Array], outputs: Sequence[Fetch | str] | None = None
    ) -> dict[str, Array | Failure]:
        """Return the outputs like `run`, with a Failure for each missing one.

        All outputs come from one extractor, as a user's program would get them. Once ncnn has died on one of them, the
        ones after it are Failures too. Raises RunError if the net does not load or does not take the feeds.
        """
        outputs = self.output_names() if outputs is None else outputs
        wanted = dict.fromkeys(Fetch(output) if isinstance(output, str) else output for output in outputs)
        described = [{"blob": fetch.blob, "batch_axis": fetch.batch_axis} for fetch in wanted]
        results: dict[str, Array | Failure] = {}
        fed = False
        try:
            with self._asked(feeds, do="run", outputs=described) as child:
                self._receive(child)
                fed = True
                for fetch in wanted:
                    answer = child.receive(**ARRAY)
                    if "error" in answer:
                        results[fetch.blob] = Failure(answer["error"] + child.said(answer["mark"]))
                    else:
                        results[fetch.blob] = fetch.read(child.receive_array(answer))
                if isinstance(feeds, Step) and feeds.caches:
                    self._receive(child)
                    self._held = feeds
        except CrashError as death:
            if not fed:
                raise
            first, *others = [fetch.blob for fetch in wanted if fetch.blob not in results] or ["caches"]
            results[first] = Failure(str(death), crashed=True)
            results.update(dict.fromkeys(others, Failure(f"not reached: ncnn died on '{first}'", crashed=True)))
        return results

    def time(self, feeds: Mapping[str, Feed | Array], outputs: Sequence[str], seconds: float) -> list[float]:
        """Return the seconds of each run, for as many as fit into `seconds`: CPU time of one thread, or time on a GPU.

        The runner's `threads` have to be 1. Raises RunError if an output is missing, and CrashError.
        """
        described = [{"blob": blob} for blob in outputs]
        with self._asked(feeds, do="time", outputs=described, seconds=seconds) as child:
            return [float(each) for each in self._receive(child, times=[float])["times"]]

    def walk(
        self,
        feeds: Mapping[str, Feed | Array],
        steps: Sequence[WalkStep],
        visit: Callable[[WalkStep, BlobStats], None],
        seed: int = 0,
    ) -> None:
        """Compute a net blob by blob, rounding each before the next is computed from it; `visit` is called for each.

        The seed is that of the random errors. `steps` are all blobs to be rounded, in the order of the file's layers: a
        blob is gone once it has been read.
        Raises RunError if a blob is missing, and CrashError.
        """
        # As text, lists of floats take as long as the net itself.
        noises = [base64.b64encode(np.array(step.noise, np.float32).tobytes()).decode() for step in steps]
        described = [{**vars(step), "noise": noise} for step, noise in zip(steps, noises, strict=True)]
        with self._asked(feeds, do="walk", steps=described, seed=seed) as child:
            self._receive(child)
            failure: RunError | None = None
            for step in counted(steps, "ncnn computes the net blob by blob", "blobs"):
                try:
                    answer = self._receive(child, **_STATS, **(ARRAY if step.send or step.sample else {}))
                except RunError as error:  # the other answers still come
                    failure = failure or error
                    continue
                array = child.receive_array(answer) if step.send or step.sample else None
                if failure is None:
                    visit(
                        step, BlobStats(answer["largest"], answer["special"], answer["batch"], array, answer["errors"])
                    )
            if failure is not None:
                raise failure

    def time_blobs(
        self, feeds: Mapping[str, Feed | Array], blobs: Sequence[str], *, runs: int = 20, seconds: float = 5.0
    ) -> Times:
        """Measure the time of each blob, one after the other, and of a whole run: CPU time of a thread, or GPU time.

        ncnn's Python package does not time layers. So each blob is extracted before the next, which runs only the layer
        that makes it; the copy for the caller is measured as well, and subtracted. `blobs` are in the order of the
        file's layers. There are `runs`, or as many as fit into `seconds`, but one at least, after one that does not
        count. The fastest counts: other work of the machine only adds time.

        Raises RunError if a blob is missing, and CrashError.
        """
        with self._asked(feeds, do="time_blobs", blobs=list(blobs), runs=runs, seconds=seconds) as child:
            answer = self._receive(child, blobs=[float], whole=float, runs=int)
        return Times(tuple(answer["blobs"]), answer["whole"], answer["runs"])

    def load(self, child: Child) -> None:
        """Load the net into the worker's process; the worker calls this."""
        param, bin = self.worker.file(self.param), self.worker.file(self.bin)
        child.send({"do": "load", "param": param, "bin": bin, "options": self._options})
        self._held = None
        self._names = self._receive(child, inputs=[str], outputs=[str])

    def _loaded(self) -> dict[str, Any]:
        if not self._names:
            with self.worker.session(self):
                pass
        return self._names

    @contextmanager
    def _asked(self, feeds: Mapping[str, Feed | Array], **request: Any) -> Iterator[Child]:
        """Send a request with feeds to the process, and yield it; a decoder takes the steps before this one first."""
        if isinstance(feeds, Step):
            request |= {"caches": feeds.caches, "past": feeds.past}
            held = self._held if self.worker.holds(self) else None
            rows = (held, held.before) if held else ()  # a cache gets shorter, if it has to
            if feeds.before is not None and not any(feeds.before is step for step in rows):
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
            raise RunError(f"ncnn refuses {self.param}: {answer['error']}{child.said(answer['mark'])}")
        return answer


def as_feed(blob: str, feed: Feed | Array) -> Feed:
    """Return a feed that the binding takes: float32 or int32, as it crashes on 64 bits, in one to four dimensions."""
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
    """Return the array as int32 (integers and bools) or float32, rank 0 as [1]; UsageError for larger integers."""
    if array.dtype.kind in "iub":
        limits = np.iinfo(np.int32)
        if array.size and (array.max() > limits.max or array.min() < limits.min):
            raise UsageError(f"ncnn's integers have 32 bits, and {array.min()}..{array.max()} does not fit into them")
        return np.atleast_1d(array).astype(np.int32, copy=False)
    return np.atleast_1d(array).astype(np.float32, copy=False)
