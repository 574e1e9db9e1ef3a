"""A net in memory, of a model or of another net: writing it, estimating fp16, verifying and timing it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from onnx2ncnn_opt.api.options import ConvertOptions
from onnx2ncnn_opt.errors import RunError, VerificationError, check_options
from onnx2ncnn_opt.ir.features import MasksFor
from onnx2ncnn_opt.ir.graph import Blob, Graph
from onnx2ncnn_opt.outputs import Latency
from onnx2ncnn_opt.param.binary import write_weights
from onnx2ncnn_opt.param.files import NetFiles, PathLike, all_or_nothing
from onnx2ncnn_opt.param.storage import Storage
from onnx2ncnn_opt.progress import announce
from onnx2ncnn_opt.rewrite.events import Applied, Event, Failed, NearMiss
from onnx2ncnn_opt.rewrite.prove_masks import Mask, put_masks
from onnx2ncnn_opt.runtime.base import Feed
from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from onnx2ncnn_opt.system import temporary_folder
from onnx2ncnn_opt.verification.options import NO_ESTIMATE, Verification

if TYPE_CHECKING:  # needs onnx
    from onnx2ncnn_opt.inputs.draws import Draw
    from onnx2ncnn_opt.precision.masks import Precision
    from onnx2ncnn_opt.verification.report import VerifyReport

F = TypeVar("F", bound=NetFiles)
R = TypeVar("R", bound="NetResult[Any]")


@dataclass(frozen=True, eq=False, kw_only=True)
class NetResult(ABC, Generic[F]):
    """A net in memory.

    `graph` is the net after the passes, `events` are their rewrites and near misses. `storage` is the plan for 16-bit
    weights, `masks` are the layers that need more than fp16, and `precision` is the estimated effect of fp16. `report`
    is the verification, `latency` the time of a run, both None if not requested. `integers` are outputs that hold
    integers.
    """

    graph: Graph
    events: tuple[Event, ...] = ()
    storage: Storage | None = None
    masks: tuple[Mask, ...] = ()
    precision: Precision | None = None
    report: VerifyReport | None = None
    latency: Latency | None = None
    integers: Collection[Blob] = ()

    against: ClassVar[str]  # what the net is compared with

    @property
    def applied(self) -> tuple[Applied, ...]:
        """The rewrites, in order."""
        return tuple(event for event in self.events if isinstance(event, Applied))

    @property
    def near_misses(self) -> tuple[NearMiss, ...]:
        """The matched patterns that could not be rewritten, with the reasons."""
        return tuple(event for event in self.events if isinstance(event, NearMiss))

    @property
    def failed(self) -> tuple[Failed, ...]:
        """The skipped passes, with the errors."""
        return tuple(event for event in self.events if isinstance(event, Failed))

    @abstractmethod
    def files(self, prefix: PathLike | None) -> F:
        """Return the paths of the files; without a prefix they have the model's or the net's name."""

    @contextmanager
    def staging(self, prefix: PathLike) -> Iterator[F]:
        """Give the files temporary names, and rename all if the block succeeds; write all but net and manifest."""
        files = self.files(prefix)
        with all_or_nothing(*files.paths) as staged:
            yield type(files)(*staged)

    @abstractmethod
    def describe(self, files: F) -> None:
        """Write the files that masks change: all but the weights."""

    @abstractmethod
    def _require_known(self, consequence: str) -> None: ...

    @abstractmethod
    def _feeds(self, verification: Verification) -> Mapping[Blob, Feed] | Callable[[Draw], Mapping[Blob, Feed]]: ...

    @abstractmethod
    def _verify(self, files: F, verification: Verification, worker: NcnnWorker | None, runs: Any) -> VerifyReport: ...

    @abstractmethod
    def _time(self, files: F, verification: Verification, seconds: float) -> Latency: ...

    def begin_runs(self, verification: Verification) -> Future[Any] | None:
        """Start the runs of the model for `verify`, in a thread."""

    def _with_files(self: R, files: F) -> R:
        return self

    @contextmanager
    def staged(self, prefix: PathLike | None = None) -> Iterator[F]:
        """Write the files under temporary names, and rename them when the block ends without an error.

        Without a prefix, they are in a folder that exists during the block.
        """
        with ExitStack() as stack:
            path = Path(stack.enter_context(temporary_folder())) / "net" if prefix is None else prefix
            files = stack.enter_context(self.staging(path))
            with files.bin.open("wb") as stream:
                write_weights(self.graph, stream)
            self.describe(files)
            yield files

    def save(self, prefix: PathLike) -> F:
        """Write the files, a conversion's manifest and tail too: all, or none.

        Raises VerificationError for a net that failed verification.
        """
        check_options(prefix=prefix)
        if self.report is not None:
            self.report.check()
        with self.staged(prefix):
            return self.files(prefix)

    def estimated(
        self: R,
        verification: Verification = Verification(),
        *,
        masks: MasksFor = True,
        bin: Path | None = None,
        worker: NcnnWorker | None = None,
    ) -> R:
        """Simulate fp16 in ncnn; return the net with the masks that it needs, and `precision`.

        The inputs are the feeds of the verification, by default inputs like data. `masks` says whether to set masks, or
        for which device. `bin` are the weights, if they are written; `worker` is an ncnn process to reuse. Raises
        RunError if ncnn cannot run the net, UsageError if an input's shape is unknown, and VerificationError for
        `custom` operators.
        """
        from onnx2ncnn_opt.precision.fp16_run import Estimator  # both runtimes
        from onnx2ncnn_opt.precision.masks import find_masks, masks_for_data

        self._require_known("nothing can be estimated")
        options: dict[str, Any] = {"budget": verification.budget, "effort": verification.effort, "masks": masks}
        options |= {"integers": self.integers}
        net: dict[str, Any] = {"worker": worker, "bin": bin}
        feeds = self._feeds(verification)
        if callable(feeds):
            new, precision = masks_for_data(self.graph, feeds, verification.seed, net, **options)
        else:
            with Estimator(self.graph, feeds, **net) as estimator:
                new, precision = find_masks([estimator], **options)
        put_masks(self.graph, ((layer, mask.features) for layer, mask in new.items()))
        return replace(self, masks=(*self.masks, *new.values()), precision=precision)

    def verify(
        self,
        verification: Verification = Verification(),
        *,
        files: F | None = None,
        worker: NcnnWorker | None = None,
        runs: Future[Any] | None = None,
    ) -> VerifyReport:
        """Compare the net with ONNX Runtime on the model, or with the net before the passes, except `caches`.

        `files` are the net's, if they are written, `runs` are those of `begin_runs`, if it was called. Raises
        VerificationError for `custom` operators, RunError if ncnn cannot run the original net, and UsageError if an
        input has no shape, or one that the net cannot take: ncnn would access memory outside its blobs.
        """
        self._require_known("the net cannot be verified")
        with self.staged() if files is None else nullcontext(files) as written:
            return self._verify(written, verification, worker, runs or self.begin_runs(verification))

    def benchmark(
        self, verification: Verification = Verification(), *, files: F | None = None, seconds: float = 2.0
    ) -> Latency:
        """Time the net and ONNX Runtime, or the net before the passes, alternating, for `seconds`: in fp32, one thread.

        `files` are the net's, if they are written; `verification` has the inputs. Raises RunError if a runtime fails,
        VerificationError for `custom` operators, and UsageError for a net that was cut.
        """
        check_options(seconds=seconds)
        self._require_known("the net cannot be timed")
        with self.staged() if files is None else nullcontext(files) as written:
            return self._time(written, verification, seconds)

    def finished(self: R, options: ConvertOptions) -> R:
        """Write the files, estimate fp16, verify the net and time it; remove the files if it is wrong."""
        result, verification, worker = self, options.verification, options.worker
        try:
            with self.staged(options.prefix) as files:
                if verification is None:
                    return self._with_files(files)
                self._require_known("the net cannot be verified")
                runs = self.begin_runs(verification)
                announce("estimating what fp16 does to the net")
                try:
                    result = self.estimated(verification, masks=options.masks, bin=files.bin, worker=worker)
                    result.describe(files)
                except RunError as error:  # verification gives a better reason, unless it can run the net
                    if options.masks and self.verify(verification, files=files, worker=worker).ok:
                        raise RunError(NO_ESTIMATE.format(error)) from error
                announce(f"verifying the net against {self.against}")
                report = result.verify(verification, files=files, worker=worker, runs=runs)
                report = report.renamed(files.paths, self.files(options.prefix).paths)
                result = replace(result._with_files(files), report=report)
                if options.benchmark and report.ok:
                    announce(f"timing the net and {self.against}")
                    result = replace(result, latency=result.benchmark(verification, files=files))
                if not options.keep_failed:
                    report.check()
        except VerificationError:
            if result.report is None:  # nothing was compared
                raise
        return result
