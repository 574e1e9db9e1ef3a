"""A net on disk that runs on arrays by their ONNX names."""

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from onnx2ncnn_opt.errors import RunError, UsageError, check_options
from onnx2ncnn_opt.manifest import Entry, Manifest, mixture, read_manifest
from onnx2ncnn_opt.onnx.read.given import parsed_size
from onnx2ncnn_opt.runtime._ncnn_net import NCNN_ERRORS, NcnnNet
from onnx2ncnn_opt.runtime.base import Array, Failure, Feed, Fetch, Step, all_there, require
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker, as_feed
from onnx2ncnn_opt.runtime.slots import Slot, check_arrays, check_fed, feeds_of, np_dtype, sizes_of, too_small
from onnx2ncnn_opt.runtime.steps import StepInputs
from onnx2ncnn_opt.runtime.tail import tail_of
from onnx2ncnn_opt.runtime.targets import MODES, check_modes, find_target


class Net(AbstractContextManager["Net"]):
    """A net that `convert` wrote, or any other net, ready to run.

    `path` is the prefix of PREFIX.ncnn.param, .bin and .json, or a .param file. Its .bin is next to it unless `bin`
    names it. The manifest, NET.json next to NET.param, says how the model's arrays go in and out. Without a manifest,
    arrays have the names of blobs and the dims of their Mats, outermost first.

    `mode` is "fp32" (in which nets are verified by default), "fp16" or "bf16". `threads` are all cores by default. ncnn
    runs in a separate process, because a bad net may crash it; `timeout` is in seconds for each run. `on` is another
    device, as for the command's --on. With `isolated=False`, ncnn runs in this process: this is faster for small nets,
    but only for verified nets. Use a Net as a context manager, or `close` it, and in one thread at a time.

    A decoder runs token by token: ncnn's process keeps the caches of attention, and `past` is their length. `step`
    feeds the next tokens, `rewind` forgets the last ones, `reset` forgets all.

    Raises UsageError for invalid files, manifests or options, or if ncnn is missing; RunError if ncnn refuses the net.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        bin: str | os.PathLike[str] | None = None,
        mode: str = "fp32",
        threads: int | None = None,
        on: str | None = None,
        isolated: bool = True,
        timeout: float = 300.0,
    ) -> None:
        check_modes([mode])
        check_options(path=path, bin=bin, threads=threads, timeout=timeout)
        if threads == 0:
            raise UsageError("threads has to be 1 or more, or None for all cores")
        self.param, self.bin, self.manifest = net_files(Path(path), None if bin is None else Path(bin))
        self._tail = tail_of(self.param, self.manifest)
        self._runner: NcnnRunner | _InProcess
        if isolated:
            target = find_target(on)
            target.require()
            worker = NcnnWorker(target)
            self._runner = NcnnRunner(self.param, self.bin, mode=mode, threads=threads, timeout=timeout, worker=worker)
            self._end = worker.close
        elif on is not None:
            raise UsageError(f"isolated=False runs the net in this process, which is not on '{on}'")
        else:
            require("ncnn")
            options: dict[str, Any] = {**MODES[mode], **({} if threads is None else {"num_threads": threads})}
            self._runner = _InProcess(self.param, self.bin, options)
            self._end = self._runner.close
        self.past = 0
        self._kept_inputs: dict[str, Any] = {}
        try:
            self._check_blobs()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        if self.manifest is None:
            return f"Net({self.param}, no manifest)"
        ports = (", ".join(map(str, entries)) for entries in (self.inputs, self.outputs))
        return f"Net({self.param}: {' -> '.join(ports)})"

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End ncnn's process, or delete the net in this process; a later run loads the net again."""
        self._end()

    @property
    def inputs(self) -> tuple[Entry, ...]:
        """The model's inputs, without caches; empty without a manifest."""
        return tuple(e for e in self.manifest.model_inputs if e.cache is None) if self.manifest else ()

    @property
    def outputs(self) -> tuple[Entry, ...]:
        """The model's outputs, without caches; empty without a manifest."""
        return tuple(e for e in self.manifest.model_outputs if e.cache is None) if self.manifest else ()

    def run(
        self, inputs: Mapping[str, Any], outputs: Sequence[str] | None = None, *, cast: bool = False
    ) -> dict[str, Array]:
        """Return the outputs by name (all by default), in the model's shapes and types.

        `inputs` are arrays by name, or values that numpy converts to arrays. Inputs that the conversion bound to a
        value may be missing. `cast` lets a float input take integers and float64. A decoder forgets all steps.

        Raises UsageError for a name, shape or type that the model does not have, RunError if ncnn cannot compute an
        output, and CrashError if its process crashes or takes too long.
        """
        if not isinstance(inputs, Mapping):
            raise UsageError(f"inputs has to be a dict of arrays by name, not {inputs!r:.80}")
        check_options(inputs=inputs, outputs=() if outputs is None else outputs)
        if self.manifest is None:
            return self._run_blobs(inputs, outputs)
        self.reset()
        return self._run(self.manifest, inputs, outputs, cast=cast)

    def step(
        self, ids: Any, inputs: Mapping[str, Any] | None = None, outputs: Sequence[str] | None = None
    ) -> dict[str, Array]:
        """Return the outputs for the next tokens of a decoder, like `run`, and append the tokens to the caches.

        `ids` are one token or several, in the shape of the input or as a list. Mask and positions are made from the
        number of tokens, unless `inputs` has them. Other inputs, such as an encoder's results, are needed in the first
        step; later steps reuse them until `reset`. After an error the caches are as before the step.

        Raises UsageError for a net without caches or without an input for tokens, and the errors of `run`.
        """
        if self.manifest is None or not self.manifest.caches:
            reason = "has no caches of attention, or no manifest that names them"
            raise UsageError(f"{self.param} {reason}: use run (docs/llm.md, When it does not work)")
        step = StepInputs.of(self.manifest)
        arrays = {**self._kept_inputs, **step.arrays(np.atleast_1d(ids), self.past), **(inputs or {})}
        results = self._run(self.manifest, arrays, outputs)
        self._kept_inputs = {entry.name: arrays[entry.name] for entry in step.others if entry.name in arrays}
        self.past += step.rows(arrays)
        return results

    def rewind(self, count: int) -> None:
        """Forget the last `count` tokens; raises UsageError if there are fewer."""
        if not isinstance(count, int) or not 0 <= count <= self.past:
            raise UsageError(f"the net can forget 0 to {self.past} tokens, not {count!r:.80}")
        self.past -= count

    def reset(self) -> None:
        """Forget all tokens, and the arrays of other inputs."""
        self.past, self._kept_inputs = 0, {}

    def _run(
        self, manifest: Manifest, inputs: Mapping[str, Any], outputs: Sequence[str] | None, *, cast: bool = False
    ) -> dict[str, Array]:
        arrays = check_arrays(inputs, self.inputs, {value.name: value.array() for value in manifest.values}, cast=cast)
        pasts = {e.name: [n if isinstance(n, int) else self.past for n in e.shape] for e in manifest.inputs if e.cache}
        # Only the shapes of caches matter: these arrays take no memory.
        arrays |= {name: np.broadcast_to(0, shape) for name, shape in pasts.items()}
        if problem := too_small(manifest, arrays):
            raise UsageError(problem)
        names = [entry.name for entry in self.outputs]
        for name in outputs or ():
            if name not in names:
                raise UsageError(f"the model has no output '{name}'; its outputs are {', '.join(names)}")
        names = names if outputs is None else list(outputs)
        entries = {entry.name: entry for entry in manifest.read if self._tail or entry.name in names}
        blobs = self._runner.input_names()
        fed = [slot for slot in map(Slot.of, manifest.fed) if slot.blob in blobs]
        slots = [Slot.of(entry) for entry in entries.values()]
        step = Step(feeds_of(fed, arrays), manifest.caches, self.past)
        results = all_there(self._runner.extract(step, [slot.fetch for slot in slots]), self.param)
        sizes = sizes_of(manifest.inputs, arrays)
        values = {slot.name: as_output(entries[slot.name], slot, results[slot.blob], sizes) for slot in slots}
        values = self._tail.run(arrays, values) if self._tail else values
        return {name: values[name] for name in names}

    def _run_blobs(self, inputs: Mapping[str, Any], outputs: Sequence[str] | None) -> dict[str, Array]:
        names = self._runner.input_names()
        if set(inputs) != set(names):
            raise UsageError(f"the net has the inputs {', '.join(names)}; given are {', '.join(inputs) or 'none'}")
        feeds = {name: Feed(np.asarray(array)) for name, array in inputs.items()}
        blobs = self._runner.output_names() if outputs is None else outputs
        return all_there(self._runner.extract(feeds, [Fetch(blob) for blob in blobs]), self.param)

    def _check_blobs(self) -> None:
        """Raise UsageError if the manifest belongs to another net."""
        inputs, outputs = self._runner.input_names(), self._runner.output_names()
        if self.manifest is None:
            return
        # ncnn's output_names lacks an output that a layer reads too.
        words = {*self.param.read_text(encoding="utf-8", errors="replace").split(), *inputs, *outputs}
        entries = (*self.manifest.inputs, *self.manifest.outputs)
        if missing := [entry.blob for entry in entries if entry.blob not in words]:
            problem = f"there is no blob '{missing[0]}'"
            raise UsageError(f"the manifest beside {self.param} is that of another net: {problem}")
        check_fed([entry.blob for entry in self.manifest.inputs], inputs, [entry.name for entry in self.inputs])


class _InProcess:
    """A net in this process; a crash of the net ends the process."""

    def __init__(self, param: Path, bin: Path, options: dict[str, Any]) -> None:
        self._param, self._bin, self._options = param, bin, options
        self._net: NcnnNet | None = None

    def _loaded(self) -> NcnnNet:
        if self._net is None:
            try:
                self._net = NcnnNet(os.fspath(self._param), os.fspath(self._bin), self._options)
            except NCNN_ERRORS as error:
                raise RunError(f"ncnn refuses {self._param}: {error}") from error
        return self._net

    def input_names(self) -> list[str]:
        return self._loaded().inputs

    def output_names(self) -> list[str]:
        return self._loaded().outputs

    def extract(self, feeds: Mapping[str, Feed], outputs: Sequence[Fetch]) -> dict[str, Array | Failure]:
        net = self._loaded()
        caches, past = (feeds.caches, feeds.past) if isinstance(feeds, Step) else ((), 0)
        items = [{"blob": blob, **as_feed(blob, feed)._asdict()} for blob, feed in feeds.items()]
        try:
            extractor = net.feed(items, caches, past)
        except NCNN_ERRORS as error:
            raise RunError(f"ncnn refuses {self._param}: {error}") from error
        results: dict[str, Array | Failure] = {}
        for fetch in outputs:
            try:
                results[fetch.blob] = fetch.read(net.extract(extractor, fetch._asdict()))
            except NCNN_ERRORS as error:
                results[fetch.blob] = Failure(str(error))
        try:
            if caches:
                net.keep(extractor, caches)
        except NCNN_ERRORS as error:
            raise RunError(f"{self._param}: {error}") from error
        return results

    def close(self) -> None:
        self._net = None


def net_files(path: Path, bin: Path | None = None) -> tuple[Path, Path, Manifest | None]:
    """Return the .param and .bin of a net, and its manifest if there is one; UsageError for missing or mixed files."""
    if path.name.endswith((".param", ".param.bin")):
        param = path
    else:
        prefix = str(path).removesuffix(".ncnn")
        tried = [Path(f"{prefix}.ncnn.param"), Path(f"{prefix}.param")]
        existing = next((candidate for candidate in tried if candidate.is_file()), None)
        if existing is None:
            raise UsageError(f"there is no net at {path}: neither {tried[0]} nor {tried[1]} is a file")
        param = existing
    stem = str(param).removesuffix(".bin").removesuffix(".param")
    bin = Path(f"{stem}.bin") if bin is None else bin
    for file in (param, bin):
        if not file.is_file():
            raise UsageError(f"there is no file {file}")
    path = Path(f"{stem}.json")
    manifest = read_manifest(path) if path.is_file() else None
    if problem := mixture(manifest, param, bin):
        raise UsageError(problem)
    return param, bin, manifest


def as_output(entry: Entry, slot: Slot, result: Array, sizes: Mapping[str, int]) -> Array:
    """Return a fetched array in the model's shape and type; RunError for another shape, or non-finite integers."""
    array = slot.restored(result, [_size(dim, sizes) for dim in entry.shape])
    if array is None:
        raise RunError(f"ncnn's {entry.name} has the shape {list(result.shape)}, the model's is {entry}")
    dtype = np_dtype(entry)
    if dtype.kind in "iu" and array.dtype.kind == "f":
        if not np.isfinite(array).all():
            raise RunError(f"ncnn's {entry.name} is not finite everywhere, but {entry.dtype} in the model")
        array = np.rint(array)
    return array.astype(dtype, copy=False)


def _size(dim: int | str | None, sizes: Mapping[str, int]) -> int | None:
    size = parsed_size(dim, sizes) if isinstance(dim, str) else dim
    return size if isinstance(size, int) else None
