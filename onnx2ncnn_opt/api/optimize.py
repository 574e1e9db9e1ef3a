"""The main job for existing nets: optimise a .param and .bin of any converter, and verify the result."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx2ncnn_opt import entry_points, passes
from onnx2ncnn_opt.api.finish import finish, name_blobs
from onnx2ncnn_opt.api.net_shapes import (
    add_hints,
    bound_shapes,
    check_known,
    infer_shapes,
    manifest_of,
    open_shapes,
    shape_notes,
    shapes_of_pnnx,
    without_batches,
)
from onnx2ncnn_opt.api.options import ConvertOptions
from onnx2ncnn_opt.api.result import NetResult
from onnx2ncnn_opt.errors import UsageError, check_option, check_options
from onnx2ncnn_opt.ir.attention import caches
from onnx2ncnn_opt.ir.cut import cut, drop_unused
from onnx2ncnn_opt.ir.detections import DETECTORS, decisive
from onnx2ncnn_opt.ir.dim import is_fixed
from onnx2ncnn_opt.ir.features import Feature, MasksFor
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.memory import Memory, lower_peak, peak_memory
from onnx2ncnn_opt.ir.releases import NEWEST, check_release
from onnx2ncnn_opt.ir.spec import LayerSpec
from onnx2ncnn_opt.outputs import Latency
from onnx2ncnn_opt.param.connect import DroppedSplit, ParsedNet
from onnx2ncnn_opt.param.files import NetFiles, PathLike, bin_beside, read_net, write_param
from onnx2ncnn_opt.param.param_bin import named_by_index
from onnx2ncnn_opt.param.splits import count_layers, list_layers
from onnx2ncnn_opt.param.storage import encoding_of
from onnx2ncnn_opt.progress import announce
from onnx2ncnn_opt.rewrite.events import Applied, Event, Failed, NearMiss
from onnx2ncnn_opt.rewrite.rule import Pass
from onnx2ncnn_opt.runtime.base import Feed
from onnx2ncnn_opt.runtime.latency import in_turns
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.targets import find_target
from onnx2ncnn_opt.verification.options import Verification

if TYPE_CHECKING:  # needs onnx
    from onnx2ncnn_opt.inputs.draws import Draw
    from onnx2ncnn_opt.verification.pair import NetPair
    from onnx2ncnn_opt.verification.report import VerifyReport

# The features that this package's masks switch off; a net with such a mask keeps its masks.
_PRECISION = Feature.NO_FP16_ARITHMETIC | Feature.NO_FP16_STORAGE | Feature.NO_WINOGRAD


@dataclass(frozen=True, eq=False, kw_only=True)
class Optimized(NetResult[NetFiles]):
    """An optimised net, in memory.

    `layers`, `memory` and `sizes` (bytes of weights) are before and after. `exchanged` is the number of layers whose
    operands were exchanged to save memory, `dropped_splits` the needless Splits. `misfit` names the layer of the
    original net that cannot take its inputs at these shapes. With `is_binary` the .param is written in ncnn's binary
    format. `notes` are for the user. `renamed` are names of inputs and outputs that differ in the files.
    """

    source: NetFiles
    layers: tuple[int, int]
    memory: tuple[Memory, Memory]
    exchanged: int = 0
    dropped_splits: tuple[DroppedSplit, ...]
    trailing_bytes: int
    misfit: str
    is_binary: bool
    shapes: Mapping[str, tuple[int, ...]]
    _blobs: Mapping[str, str] = field(repr=False)  # names of inputs and outputs in the original file
    _boxes: Mapping[Layer, tuple[str, ...]] = field(repr=False)  # names of detection layers' inputs in that file
    _is_cut: bool = field(repr=False)
    _is_masked: bool = field(default=False, repr=False)  # the original has masks against errors of fp16
    notes: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    sizes: tuple[int, int] = (0, 0)

    against = "the original"

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

    @property
    def names(self) -> Mapping[Blob, str]:
        """The names of inputs and outputs in the files; in a binary .param they are indexes."""
        listing = list_layers(self.graph)
        return named_by_index(listing) if self.is_binary else listing.names

    def files(self, prefix: PathLike | None) -> NetFiles:
        """Return the paths PREFIX.param (PREFIX.param.bin if binary) and PREFIX.bin."""
        return NetFiles.at(self.source.param.stem if prefix is None else prefix, binary=self.is_binary)

    def describe(self, files: NetFiles) -> None:
        """Write the .param."""
        write_param(self.graph, files.param, binary=self.is_binary)

    def _with_files(self, files: NetFiles) -> Optimized:
        renamed = {blob.name: name for blob, name in self.names.items() if blob.name != name}
        before = self.source.bin.stat().st_size - self.trailing_bytes
        return replace(self, renamed=renamed, sizes=(before, files.bin.stat().st_size))

    def _require_known(self, consequence: str) -> None:
        if self.misfit:
            raise UsageError(
                f"{consequence} at these shapes, which it does not take: {self.misfit}; give others with --shape, or "
                "leave out the verification with --no-verify"
            )

    def _feeds(self, verification: Verification) -> Callable[[Draw], Mapping[Blob, Feed]]:
        draws = partial(self.pair.draws, verification.seed)
        return lambda draw: {blob: Feed(x) for _, arrays in draws([draw]) for blob, x in arrays.items()}

    def estimated(
        self, verification: Verification = Verification(), *, masks: MasksFor = True, **net: Any
    ) -> Optimized:
        """Simulate fp16 in ncnn (`NetResult.estimated`); a net that already has masks keeps them."""
        result = super().estimated(verification, masks=masks and not self._is_masked, **net)
        return replace(result, layers=(self.layers[0], count_layers(self.graph)))

    @property
    def pair(self) -> NetPair:
        """The net before and after the passes, for verification."""
        from onnx2ncnn_opt.verification.pair import NetPair

        return NetPair(
            self.source, self.graph, self._blobs, self.shapes, self._examples(), self.storage, self._boxes, self._is_cut
        )

    def _verify(
        self, files: NetFiles, verification: Verification, worker: NcnnWorker | None, runs: None
    ) -> VerifyReport:
        from onnx2ncnn_opt.verification.pair import verify_pair

        return verify_pair(self.pair, verification, files=files, names=self.names, worker=worker)

    def _time(self, files: NetFiles, verification: Verification, seconds: float) -> Latency:
        if self._is_cut:
            raise UsageError("only a whole net can be timed before and after")
        _, drawn = next(self.pair.draws(verification.seed))
        outputs = [blob for blob in self.graph.outputs if not blob.is_input]
        target = find_target(verification.on)
        with NcnnWorker(target) as first, NcnnWorker(target) as second:
            after = NcnnRunner(files.param, files.bin, worker=first)
            before = NcnnRunner(self.source.param, self.source.bin, worker=second)
            old_names = {blob: self._blobs[blob.name] for blob in (*drawn, *outputs)}
            time_after, time_before = (
                partial(runner.time, {of[blob]: array for blob, array in drawn.items()}, [of[blob] for blob in outputs])
                for runner, of in ((after, self.names), (before, old_names))
            )
            return in_turns(time_after, time_before, seconds)


def _with_shapes(
    net: ParsedNet, files: NetFiles, shapes: Mapping[str, Sequence[int]], start: Sequence[str], end: Sequence[str]
) -> Optimized:
    """Give a net its shapes, and cut it; return it before any pass."""
    graph, is_cut = net.graph, bool(start or end)
    producers = {blob: name for name, blob in reversed(list(net.names.items()))}
    boxes = {layer: tuple(producers[blob] for blob in decisive(layer)) for layer in graph if layer.type in DETECTORS}
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
    notes = [*shape_notes(graph, sizes, pnnx_shapes, batched, files.param)]
    if net.unread_layers:
        notes.append(f"layers after those that the header counts are left out: {net.unread_layers}")
    if net.trailing_bytes:
        notes.append(f"{net.trailing_bytes} bytes after the last weight are left out")
    return Optimized(
        source=files,
        graph=graph,
        layers=(count, count),
        memory=(memory, memory),
        dropped_splits=net.dropped_splits,
        trailing_bytes=net.trailing_bytes,
        misfit=misfit,
        is_binary=net.is_binary,
        shapes=sizes,
        notes=tuple(notes),
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
    fixed = {**sizes, **{name: shape for name, shape in inputs.items() if is_fixed(shape)}}
    check_known(graph, shapes)
    return {blob.name: fixed[blob.name] for blob in graph.inputs if blob.name in fixed}


def _with_passes(
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


def optimize(  # noqa: PLR0913
    param: PathLike,
    bin: PathLike | None = None,
    prefix: PathLike | None = None,
    *,
    binary: bool | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    fixed_shapes: bool = False,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    limit: int | None = None,
    start: Sequence[str] = (),
    end: Sequence[str] = (),
    storage: str | None = None,
    shape_hints: bool = False,
    custom: Collection[str | LayerSpec] = (),
    release: int = NEWEST,
    masks: MasksFor = True,
    blob_names: str = "onnx",
    verification: Verification | None = Verification(),
    benchmark: bool = False,
) -> Optimized:
    """Optimise a net, text or binary, and verify that it computes the same.

    1. Read the net and run the passes. 2. Estimate fp16, and set the masks that the net needs. 3. Write PREFIX.param
    (PREFIX.param.bin for `binary`) and PREFIX.bin, if there is a `prefix`, and run the net before and after the passes.
    If they differ, the files are removed: `report` of the result says why, and `save` raises. 4. With `benchmark`, time
    both. Without a `verification`, nothing runs.

    `bin` is NET.bin by default. `shapes` are the sizes of inputs by blob name, outermost first; a leading 1 may be the
    batch. The default is the shapes in the Input layers, or those of pnnx in NAME_ncnn.py or NAME.pnnx.param next to
    NAME.ncnn.param. Passes may rely on all shapes only with `fixed_shapes`; without it the net also takes other shapes.
    `only` and `skip` choose passes, `limit` is the largest number of rewrites. `start` and `end` are blobs: the layers
    between them become the net. `storage` "fp16" or "bf16" stores weights in 16 bits if they lose little; without it,
    only weights computed from 16-bit weights get 16 bits. `shape_hints` writes the shapes into the layers (parameter
    30); on a GPU the net then takes no others. `custom` declares layers that ncnn lacks (`ir.custom.custom_layer`).
    `release` (YYYYMMDD) is the oldest ncnn that has to run the result. `masks` gives feature masks to layers that need
    more than fp16. `blob_names` "pnnx" names inputs in0, in1, ... and outputs out0, out1, ...; "onnx" keeps the names.

    Raises:
        ParamError, BinError: the files are broken, or have weights of undeclared custom layers.
        UsageError: a name, shape or option is invalid.
        RunError, VerificationError: ncnn cannot run the original net.
    """
    check_options(param=param, bin=bin, shapes=shapes, only=only, skip=skip, limit=limit, start=start, end=end)
    check_options(custom=custom)
    options = ConvertOptions(prefix, blob_names=blob_names, verification=verification, masks=masks, benchmark=benchmark)
    for name, shape in (shapes or {}).items():
        check_option("list", f"shapes['{name}']", shape)
        for size in shape:
            check_option("count", f"a size in shapes['{name}']", size)
    types = entry_points.layer_types(custom)
    chosen = entry_points.select(only, skip)
    check_release(release)
    encoding = encoding_of(storage, release)
    announce("reading the net")
    files = NetFiles(Path(param), bin_beside(Path(param)) if bin is None else Path(bin))
    net = _with_shapes(read_net(files.param, files.bin, types), files, shapes or {}, start, end)
    net = _with_passes(net, chosen, fixed_shapes=fixed_shapes, limit=limit, release=release)
    storage_plan, proved = finish(net.graph, encoding=encoding, keeps_storage=True, masks=masks)
    name_blobs(net.graph, blob_names)
    infer_shapes(net.graph, net.shapes)
    if shape_hints:
        add_hints(net.graph)
    layers, memory = (net.layers[0], count_layers(net.graph)), (net.memory[0], peak_memory(net.graph))
    result = replace(net, layers=layers, memory=memory, storage=storage_plan, masks=proved)
    result = result if binary is None else replace(result, is_binary=binary)
    return result.finished(options)
