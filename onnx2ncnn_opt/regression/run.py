"""Conversion and judgement of all models, each in child processes."""

import os
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from onnx2ncnn_opt.errors import UsageError, bounded, check_options
from onnx2ncnn_opt.manifest import tail_path
from onnx2ncnn_opt.progress import Count
from onnx2ncnn_opt.regression.baseline import BaselineFiles, recorded_names
from onnx2ncnn_opt.regression.config import DEFAULT_FILE, Config, Model, parse_shard, read_config
from onnx2ncnn_opt.regression.judge import Request
from onnx2ncnn_opt.regression.processes import EndedProcess, Processes
from onnx2ncnn_opt.regression.result import CheckResult, ModelResult
from onnx2ncnn_opt.report.record import NetRecord
from onnx2ncnn_opt.system import temporary_folder
from onnx2ncnn_opt.version import __version__

_MAX_RUNS = 20  # a process that takes longer than 20 timeouts of a run hangs
_CONVERT = ("-m", "onnx2ncnn_opt", "convert", "{onnx}", "-o", "{out}", "--keep-failed")
_WRONG_NET = 3  # the exit code of our converter for a wrong net, which --keep-failed keeps
# A child process that calls `judge` or `look` with the request in a folder; the result is a file of that name.
_CALL = """
import pickle, sys
from pathlib import Path
from onnx2ncnn_opt.onnx.read.deferred import defer_imports
defer_imports()
from onnx2ncnn_opt.regression import judge
result = judge.{0}(pickle.loads(Path(sys.argv[1], "request").read_bytes()))
Path(sys.argv[1], "{0}").write_bytes(pickle.dumps(result))
"""


def check(
    file: str | os.PathLike[str] = DEFAULT_FILE,
    *,
    record: bool = False,
    names: Sequence[str] = (),
    shard: str = "1/1",
    on: str | None = None,
    modes: Sequence[str] = (),
    jobs: int = 1,
    keep: str | os.PathLike[str] | None = None,
    done: Callable[[ModelResult], None] = lambda result: None,
    look: Callable[[ModelResult, NetRecord | None], None] | None = None,
) -> CheckResult:
    """Check the models of an ncnn-check.toml against their baseline, or `record` the baseline.

    `names` are patterns of models; `shard` "i/n" takes the i-th of n parts of these models. `on` and `modes` replace
    the file's. `jobs` models run in parallel. The nets of models that fail are copied to the folder `keep`. `done` gets
    each result immediately. `look` gets the results in the order of the models, and the content of a report about each
    net; None if no net can be read.

    Raises UsageError for a wrong file or option; errors of a model are in its result.
    """
    check_options(names=names, modes=modes, jobs=jobs)
    config = read_config(Path(file)).everywhere(on=on, modes=modes)
    stems = {BaselineFiles(config.baseline, model.name).stem for model in config.models}
    config = config.chosen(names, parse_shard(shard))
    folder = None if keep is None else Path(keep)
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise UsageError(f"cannot keep nets in {folder}: {error.strerror}") from error
    count = Count("checked", "models", len(config.models))
    with Processes() as processes, ThreadPoolExecutor(max(jobs, 1)) as threads:

        def checked(model: Model) -> tuple[ModelResult, NetRecord | None]:
            result, report = _checked(config, model, record, folder, processes, looks=look is not None)
            done(result)
            count.add()
            return result, report

        try:
            contexts = [copy_context() for _ in config.models]  # threads report progress to the same listener
            pairs = tuple(threads.map(lambda context, model: context.run(checked, model), contexts, config.models))
        except BaseException:
            processes.stop()  # so that threads stop waiting for them
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    if look is not None:
        for result, report in pairs:
            look(result, report)
    results = tuple(result for result, _ in pairs)
    recorded = recorded_names(config.baseline)
    missing = tuple(name for name in recorded if BaselineFiles(config.baseline, name).stem not in stems)
    return CheckResult(os.fspath(file), os.fspath(config.baseline), results, missing)


def check_model(config: Config, model: Model) -> ModelResult:
    """Convert one model and judge the net; a crash or a hang of either makes a failed result."""
    return _checked(config, model, False, None, Processes(), looks=False)[0]


def _checked(
    config: Config, model: Model, record: bool, keep: Path | None, processes: Processes, *, looks: bool
) -> tuple[ModelResult, NetRecord | None]:
    """Return the result for one model, and with `looks` the content of a report about its net."""
    start = time.perf_counter()
    with temporary_folder() as folder:
        task = _Task(config, model, Path(folder), processes)
        result = task.result(record, keep)
        if keep is not None and not result.ok and (problem := task.keep(keep)):
            result = replace(result, notes=(*result.notes, problem))
        report = task.look() if looks else None
    return replace(result, seconds=round(time.perf_counter() - start, 3)), report


class _Task:
    """The conversion and judgement of one model, in an empty temporary folder."""

    def __init__(self, config: Config, model: Model, folder: Path, processes: Processes) -> None:
        self.config, self.model, self.folder, self.processes = config, model, folder, processes
        self.out = folder / "net"
        self.net: tuple[Path, Path] | None = None

    def result(self, record: bool, keep: Path | None) -> ModelResult:
        if not self.model.path.is_file():
            return ModelResult.failed(self.model.name, "model", f"there is no file {self.model.path}", 2)
        if error := self.convert():
            return ModelResult.failed(self.model.name, "conversion", error, 1)
        stored = BaselineFiles(self.config.baseline, self.model.name)
        assert self.net is not None
        request = Request(self.model, *self.net, stored, record, self.version(), self.next_command(keep))
        (self.folder / "request").write_bytes(pickle.dumps(request))
        judged: ModelResult | None
        ended, judged = self.called("judge")
        message = bounded(f"the process that judges the net {ended.message}")
        return judged or ModelResult.failed(self.model.name, "net", message, 3)

    def next_command(self, keep: Path | None) -> tuple[str, ...]:
        """Return the command that finds the cause of a wrong net: `bisect`, or `check --keep` if it is not kept."""
        assert self.net is not None
        param, bin = self.net
        if self.model.net is None:
            if keep is None:
                return "check", os.fspath(self.config.file), "-k", self.model.name, "--keep", "failed-nets"
            kept = BaselineFiles(keep, self.model.name).net
            param, bin = kept.param, kept.bin
        return "bisect", *map(os.fspath, (self.model.path, param, bin))

    def look(self) -> NetRecord | None:
        """Return the content of a report about the net; None if there is no net, or it cannot be read."""
        report: NetRecord | None = None if self.net is None else self.called("look")[1]
        return report

    def called(self, function: str) -> tuple[EndedProcess, Any]:
        """Call a function in a process, which runs the net many times; return its result, None if it died before."""
        seconds = self.model.timeout * _MAX_RUNS * (10 if self.model.on else 1)
        ended = self.python("-c", _CALL.format(function), os.fspath(self.folder), seconds=seconds)
        try:
            return ended, pickle.loads((self.folder / function).read_bytes())
        except (OSError, EOFError, pickle.UnpicklingError):
            return ended, None

    def convert(self) -> str:
        """Convert the model and find the net's files; return the error, if any."""
        stamp = self.folder / "start"
        stamp.touch()
        if self.model.convert or self.model.net is None:
            ended = self.converter()
            if ended.code not in ((0,) if self.model.convert else (0, _WRONG_NET)):
                return bounded(f"the converter {ended.message}")
        paths = [self.model.net] if self.model.net else [Path(f"{self.out}{end}.param") for end in (".ncnn", "")]
        param = next(filter(Path.is_file, paths), None)
        if param is None:
            return f"there is no net: no file {' or '.join(path.name for path in paths)} was written"
        bin = param.with_suffix(".bin")
        if not bin.is_file():
            return f"there is no file {bin.name} beside {param.name}"
        old = [path.name for path in (param, bin) if path.stat().st_mtime < stamp.stat().st_mtime]
        if old and self.model.convert:
            return f"{' and '.join(old)} is older than the conversion: the converter did not write it"
        self.net = param, bin
        return ""

    def converter(self) -> EndedProcess:
        values = {"onnx": os.fspath(self.model.path), "out": os.fspath(self.out), "stem": self.model.stem}
        if self.model.convert:
            command = [word.format(**values) for word in self.model.convert]
            return self.processes.run(command, seconds=self.model.timeout, folder=self.config.file.parent)
        words = [word.format(**values) for word in _CONVERT]
        return self.python(*words, *self.model.options.arguments, seconds=self.model.timeout)

    def python(self, *arguments: str, seconds: float) -> EndedProcess:
        """Run this Python with this process's packages, in the temporary folder."""
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
        environment = {**os.environ, "PYTHONPATH": paths}
        command = [sys.executable, *arguments]
        return self.processes.run(command, seconds=seconds, folder=self.folder, environment=environment)

    def version(self) -> str:
        """Return the version that the converter prints."""
        if not self.model.version:
            return "" if self.model.convert else f"onnx2ncnn-opt {__version__}"
        ended = self.processes.run(self.model.version, seconds=self.model.timeout, folder=self.config.file.parent)
        return " ".join(ended.output.split())[:200] if ended.code == 0 else ended.how

    def keep(self, folder: Path) -> str:
        """Copy the net to a folder; return the error, if any."""
        if self.net is None:
            return ""
        stored = BaselineFiles(folder, self.model.name).net
        sources = (*self.net, self.net[0].with_suffix(".json"), tail_path(self.net[0]))
        try:
            stored.param.parent.mkdir(parents=True, exist_ok=True)
            for source, target in zip(sources, astuple(stored), strict=True):
                if source.is_file():
                    shutil.copyfile(source, target)
        except OSError as error:
            return f"the net could not be kept: {stored.param}: {error.strerror}"
        return ""
