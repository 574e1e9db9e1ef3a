"""An existing net of any converter in memory: its shapes, the passes on it, and its verification."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx2ncnn_opt import passes
from onnx2ncnn_opt.api.net_shapes import (
    bound_shapes,
    check_known,
    infer_shapes,
    manifest_of,
    numbers,
    open_shapes,
    shape_notes,
    shapes_of_pnnx,
    without_batches,
)
from onnx2ncnn_opt.errors import UsageError, check_options
from onnx2ncnn_opt.ir.attention import caches
from onnx2ncnn_opt.ir.cut import cut, drop_unused
from onnx2ncnn_opt.ir.detections import DETECTORS
from onnx2ncnn_opt.ir.dim import is_fixed
from onnx2ncnn_opt.ir.features import Feature, MasksFor
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.memory import Memory, lower_peak, peak_memory
from onnx2ncnn_opt.param.connect import DroppedSplit, ParsedNet
from onnx2ncnn_opt.param.files import NetFiles, PathLike, all_or_nothing, write_staged
from onnx2ncnn_opt.param.splits import count_layers
from onnx2ncnn_opt.param.storage import Storage
from onnx2ncnn_opt.rewrite.events import Applied, Event, Failed, NearMiss, Rewritten
from onnx2ncnn_opt.rewrite.prove_masks import Mask, put_masks
from onnx2ncnn_opt.rewrite.rule import Pass
from onnx2ncnn_opt.system import temporary_folder
from onnx2ncnn_opt.verification.options import Verification

if TYPE_CHECKING:
    from onnx2ncnn_opt.inputs.draws import Draw
    from onnx2ncnn_opt.outputs import Latency
    from onnx2ncnn_opt.precision.search_masks import Precision
    from onnx2ncnn_opt.runtime.base import Feed
    from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
    from onnx2ncnn_opt.verification.pair import NetPair
    from onnx2ncnn_opt.verification.report import VerifyReport

# The features that this package's masks switch off; a net with such a mask keeps its masks.
_PRECISION = Feature.NO_FP16_ARITHMETIC | Feature.NO_FP16_STORAGE | Feature.NO_WINOGRAD


@dataclass(frozen=True, kw_only=True)
class Optimized(Rewritten):
    """An optimised net, in memory.

    `events` are the rewrites and near misses of the passes; `layers`, `memory` and `sizes` (bytes of weights) are
    before and after. `storage` is the plan for 16-bit weights, `exchanged` the number of layers whose operands were
    exchanged to save memory, `dropped_splits` the needless Splits. `misfit` names the layer of the original net that
    cannot take its inputs at these shapes. `masks` are the layers that need more than fp16, `precision` is the
    estimated effect of fp16. `notes` are for the user. `report` is the verification, `latency` the time of a run, both
    None if not requested. `renamed` are names of inputs and outputs that differ in the files.
    """

    source: NetFiles
    graph: Graph
    events: tuple[Event, ...] = ()
    layers: tuple[int, int]
    memory: tuple[Memory, Memory]
    storage: Storage | None = None
    exchanged: int = 0
    dropped_splits: tuple[DroppedSplit, ...]
    unread_layers: int
    trailing_bytes: int
    misfit: str
    is_binary: bool
    shapes: Mapping[str, tuple[int, ...]]
    _blobs: Mapping[str, str] = field(repr=False)  # names of inputs and outputs in the original file
    _boxes: Mapping[Layer, tuple[str, ...]] = field(repr=False)  # names of detection layers' inputs in that file
    _is_cut: bool = field(repr=False)
    _is_masked: bool = field(default=False, repr=False)  # the original has masks against errors of fp16
    masks: tuple[Mask, ...] = ()
    precision: Precision | None = None
    notes: tuple[str, ...] = ()
    report: VerifyReport | None = None
    latency: Latency | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    sizes: tuple[int, int] = (0, 0)

    def __repr__(self) -> str:
        before, after = self.layers
        return f"Optimized({before} -> {after} layers, {len(self.applied)} rewrites)"

    @property
    def caches(self) -> list[str]:
        """The outputs that are attention's keys and values for the next run; only ncnn can read them."""
        cache_blobs = caches(self.graph)
        return [blob.name for blob in self.graph.outputs if blob in cache_blobs]

    def _examples(self) -> dict[str, str]:
        """Return example shapes of inputs by name, for the ranks in the manifest next to the original net."""
        manifest = manifest_of(self.source.param, self.graph)
        least = manifest.minimum if manifest else {}
        return {
            entry.blob: ",".join(
                str(s if isinstance(s, int) else max(16, least.get(str(s), 0)))
                for i, s in enumerate(entry.shape)
                if i != entry.batch_axis
            )
            for entry in (manifest.inputs if manifest else ())
        }

    def name_before(self, blob: Blob) -> str:
        """Return the name of an input or output in the original file."""
        return self._blobs[blob.name]

    @contextmanager
    def staged(self, prefix: PathLike, *, binary: bool | None = None) -> Iterator[tuple[NetFiles, Mapping[Blob, str]]]:
        """Write the files under temporary names; rename them if the block ends without an error.

        Yields the files, and the names of inputs and outputs in them. `binary` is the form of the .param, by default
        that of the original.
        """
        as_binary = self.is_binary if binary is None else binary
        files = NetFiles.at(prefix, binary=as_binary)
        with all_or_nothing(files.param, files.bin) as (param, bin):
            yield NetFiles(param, bin), write_staged(self.graph, param, bin, binary=as_binary)

    @contextmanager
    def staged_in_temporary_folder(self) -> Iterator[tuple[NetFiles, Mapping[Blob, str]]]:
        """Write the files to a folder that exists during the block."""
        with temporary_folder() as folder, self.staged(Path(folder) / "net") as staged:
            yield staged

    def save(self, prefix: PathLike, *, binary: bool | None = None) -> NetFiles:
        """Write PREFIX.param (PREFIX.param.bin for `binary`) and PREFIX.bin: both, or none.

        Raises VerificationError for a net that failed verification.
        """
        check_options(prefix=prefix)
        if self.report is not None:
            self.report.check()
        as_binary = self.is_binary if binary is None else binary
        with self.staged(prefix, binary=as_binary):
            return NetFiles.at(prefix, binary=as_binary)

    def estimated(self, verification: Verification = Verification(), *, masks: MasksFor = True) -> Optimized:
        """Simulate fp16 in ncnn, on inputs like data; return the net with the masks that it needs, and `precision`.

        `masks` says whether to set masks, or for which device; a net that already has such masks keeps them. Raises
        UsageError if an input's shape is unknown, and RunError if ncnn cannot run the net.
        """
        from onnx2ncnn_opt.precision.search_masks import masks_for_data
        from onnx2ncnn_opt.runtime.base import Feed  # only where something runs

        seed, wanted = verification.seed, masks and not self._is_masked

        def drawn(draw: Draw) -> dict[Blob, Feed]:
            return {blob: Feed(array) for _, feeds in self.pair.draws(seed, [draw]) for blob, array in feeds.items()}

        options: dict[str, Any] = {"budget": verification.budget, "effort": verification.effort}
        new_masks, precision = masks_for_data(self.graph, drawn, seed, masks=wanted, **options)
        put_masks(self.graph, ((layer, mask.features) for layer, mask in new_masks.items()))
        layers = (self.layers[0], count_layers(self.graph))
        return replace(self, masks=(*self.masks, *new_masks.values()), precision=precision, layers=layers)

    @property
    def pair(self) -> NetPair:
        """The net before and after the passes, for verification."""
        from onnx2ncnn_opt.verification.pair import NetPair

        return NetPair(
            self.source, self.graph, self._blobs, self.shapes, self._examples(), self.storage, self._boxes, self._is_cut
        )

    def verify(
        self,
        verification: Verification = Verification(),
        *,
        files: NetFiles | None = None,
        names: Mapping[Blob, str] | None = None,
        worker: NcnnWorker | None = None,
    ) -> VerifyReport:
        """Run the net before and after the passes in ncnn, and compare every output except `caches`.

        `files` and `names` are the results of `staged`; without them the graph is written to temporary files. `worker`
        is an ncnn process to reuse.

        Raises VerificationError or RunError if ncnn cannot run the original net. Raises UsageError if an input has no
        shape, or a shape that the net cannot take: ncnn would access memory outside its blobs.
        """
        if self.misfit:
            raise UsageError(
                f"the net cannot be verified at these shapes, which it does not take: {self.misfit}; give others with "
                "--shape, or leave out the verification with --no-verify"
            )
        from onnx2ncnn_opt.verification.pair import verify_pair

        return verify_pair(self.pair, verification, files=files, names=names, worker=worker)

    def benchmark(
        self,
        files: NetFiles | None = None,
        names: Mapping[Blob, str] | None = None,
        *,
        verification: Verification = Verification(),
        seconds: float = 2.0,
    ) -> Latency:
        """Time the net after and before the passes, alternating, for `seconds`: in fp32, with one thread each.

        The other arguments are as for `verify`. Raises UsageError for a net that was cut, or if an input's shape is
        unknown, and RunError if ncnn cannot run a net.
        """
        from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
        from onnx2ncnn_opt.runtime.targets import find_target
        from onnx2ncnn_opt.verification.latency import in_turns

        if self._is_cut or self.misfit:
            raise UsageError("only a whole net, at shapes that it takes, can be timed before and after")
        if files is None or names is None:
            with self.staged_in_temporary_folder() as (staged, staged_names):
                return self.benchmark(staged, staged_names, verification=verification, seconds=seconds)
        _, drawn = next(self.pair.draws(verification.seed))
        outputs = [blob for blob in self.graph.outputs if not blob.is_input]
        target = find_target(verification.on)
        with NcnnWorker(target) as first, NcnnWorker(target) as second:
            after = NcnnRunner(files.param, files.bin, worker=first)
            before = NcnnRunner(self.source.param, self.source.bin, worker=second)
            old_names = {blob: self._blobs[blob.name] for blob in (*drawn, *outputs)}
            time_after, time_before = (
                partial(runner.time, {of[blob]: array for blob, array in drawn.items()}, [of[blob] for blob in outputs])
                for runner, of in ((after, names), (before, old_names))
            )
            return in_turns(time_after, time_before, seconds)


def with_shapes(
    net: ParsedNet, files: NetFiles, shapes: Mapping[str, Sequence[int]], start: Sequence[str], end: Sequence[str]
) -> Optimized:
    """Give a net its shapes, and cut it; return it before any pass."""
    graph, is_cut = net.graph, bool(start or end)
    producers = {blob: name for name, blob in reversed(list(net.names.items()))}
    boxes = {layer: tuple(producers[blob] for blob in layer.inputs) for layer in graph if layer.type in DETECTORS}
    pnnx_shapes = {} if is_cut else shapes_of_pnnx(files.param, graph, shapes)
    all_shapes = {**pnnx_shapes, **shapes}
    sizes = bound_shapes(graph, all_shapes, partial=bool(start))
    batched = [] if is_cut else without_batches(graph, sizes, all_shapes)
    names = {blob.name: blob.name for blob in (*graph.inputs, *graph.outputs)}
    if is_cut:
        starts, ends = (_find(net, *wanted) for wanted in ((start, "--start"), (end, "--end")))
        # A start replaces the tensor for all its users: so the original net gets the tensor, not a Split's top.
        names |= {name: name for name in ends} | {name: producers[blob] for name, blob in starts.items()}
        sizes = _cut_out(graph, starts, ends, sizes, shapes)
    count = count_layers(graph)
    misfit = infer_shapes(graph, sizes)
    memory = peak_memory(graph)
    return Optimized(
        source=files,
        graph=graph,
        layers=(count, count),
        memory=(memory, memory),
        dropped_splits=net.dropped_splits,
        unread_layers=net.unread_layers,
        trailing_bytes=net.trailing_bytes,
        misfit=misfit,
        is_binary=net.is_binary,
        shapes=sizes,
        notes=(*shape_notes(graph, sizes, pnnx_shapes, batched, files.param),),
        _blobs=names,
        _boxes=boxes,
        _is_cut=is_cut,
    )


def _cut_out(
    graph: Graph,
    starts: Mapping[str, Blob],
    ends: Mapping[str, Blob],
    sizes: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, Sequence[int]],
) -> dict[str, tuple[int, ...]]:
    """Cut a subnet out of a graph, and return the sizes of its inputs; `shapes` are the caller's."""
    infer_shapes(graph, sizes)
    for name, blob in starts.items():
        if name in shapes:
            blob.shape = tuple(shapes[name])
    inputs = {name: blob.shape for name, blob in starts.items()}
    cut(graph, starts, ends)
    fixed = {**sizes, **{name: numbers(shape) for name, shape in inputs.items() if is_fixed(shape)}}
    check_known(graph, shapes)
    return {blob.name: fixed[blob.name] for blob in graph.inputs if blob.name in fixed}


def with_passes(
    net: Optimized, chosen: Sequence[Pass], *, fixed_shapes: bool, limit: int | None, release: int
) -> Optimized:
    """Run passes until none changes the net."""
    graph, sizes = net.graph, net.shapes
    applied: list[Event] = []
    failed: list[Event] = []
    while True:
        if not fixed_shapes:
            infer_shapes(graph, sizes)
            open_shapes(graph, sizes)
        remaining = None if limit is None else limit - len(applied)
        events = passes.run(graph, chosen, limit=remaining, release=release)
        new = [event for event in events if isinstance(event, Applied)]
        applied += new
        failed += (event for event in events if isinstance(event, Failed))
        chosen = [p for p in chosen if p.name not in {event.pass_name for event in failed}]
        if not new or remaining == len(new):
            break
    drop_unused(graph)
    infer_shapes(graph, sizes)
    near_misses = (event for event in events if isinstance(event, NearMiss))
    is_masked = any(layer["featmask"] & _PRECISION for layer in graph)
    exchanged = len(lower_peak(graph))
    if not fixed_shapes:
        open_shapes(graph, sizes)
    return replace(net, events=(*applied, *near_misses, *failed), exchanged=exchanged, _is_masked=is_masked)


def _find(net: ParsedNet, names: Sequence[str], option: str) -> dict[str, Blob]:
    for name in names:
        if name not in net.names:
            raise UsageError(f"{option} {name}: the net has no blob of that name")
    return {name: net.names[name] for name in names}
