"""The Python interface for nets that exist already: optimise a .param and .bin, whoever made them."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx2ncnn_opt import entry_points, passes
from onnx2ncnn_opt.errors import RunError, ShapeError, UsageError, check_option, check_options
from onnx2ncnn_opt.ir.caches import caches
from onnx2ncnn_opt.ir.cut import cut, drop_unused
from onnx2ncnn_opt.ir.detections import DETECTORS, after_boxes, before_boxes
from onnx2ncnn_opt.ir.dim import Dim, Shape, symbol
from onnx2ncnn_opt.ir.features import Feature
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.memory import Memory, lower_peak, peak_memory
from onnx2ncnn_opt.ir.releases import NEWEST, check_release
from onnx2ncnn_opt.ir.shapes import assign_shapes
from onnx2ncnn_opt.ir.spec import SHAPE_HINTS_ID, LayerSpec
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.manifest import Manifest, read_manifest
from onnx2ncnn_opt.param.connect import DroppedSplit
from onnx2ncnn_opt.param.files import LoadedNet, NetFiles, all_or_nothing, read_net, write_net, write_staged
from onnx2ncnn_opt.param.pnnx import shapes_beside
from onnx2ncnn_opt.param.splits import count_layers, list_layers
from onnx2ncnn_opt.param.storage import ROUNDING, Storage, encoding_of, own_storage, plan_storage
from onnx2ncnn_opt.progress import counted
from onnx2ncnn_opt.rewrite.events import Applied, Event, Failed, NearMiss, Rewritten
from onnx2ncnn_opt.rewrite.masks import Mask, prove_masks, put_masks
from onnx2ncnn_opt.rewrite.rule import Pass

if TYPE_CHECKING:
    from onnx2ncnn_opt.outputs import Latency, OutputReport
    from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
    from onnx2ncnn_opt.verification.inputs import Draw
    from onnx2ncnn_opt.verification.masks import Precision
    from onnx2ncnn_opt.verification.verify import VerifyReport

# What a net is given masks for here; one that has any has been decided about.
_PRECISION = Feature.NO_FP16_ARITHMETIC | Feature.NO_FP16_STORAGE | Feature.NO_WINOGRAD

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Optimized(Rewritten):
    """An optimised net, in memory.

    `events` says what the passes did and what they nearly did, `layers` and `memory` are before and after. `storage`
    is what was decided about 16 bit weights, `exchanged` counts the layers whose operands were exchanged to save
    memory, and `dropped_splits` are Split layers that were good for nothing. `misfit` says which layer of the original
    does not take what it gets at these shapes, if one does not. `masks` are the layers that fp16 is not enough for, and
    `precision` is what fp16 does to the net, if that was estimated. `notes` are what the user should know.
    """

    source: NetFiles
    graph: Graph
    events: tuple[Event, ...]
    layers: tuple[int, int]
    memory: tuple[Memory, Memory]
    storage: Storage | None
    exchanged: int
    dropped_splits: tuple[DroppedSplit, ...]
    unread_layers: int
    trailing_bytes: int
    misfit: str
    is_binary: bool
    shapes: Mapping[str, tuple[int, ...]]
    _blobs: Mapping[str, str] = field(repr=False)  # what the original file calls the inputs and outputs
    _boxes: Mapping[Layer, tuple[str, ...]] = field(repr=False)  # what it calls the inputs of detection layers
    _is_cut: bool = field(repr=False)
    _is_masked: bool = field(repr=False)  # the original has masks of its own against errors of fp16
    masks: tuple[Mask, ...] = ()
    precision: Precision | None = None
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        before, after = self.layers
        return f"Optimized({before} -> {after} layers, {len(self.applied)} rewrites)"

    @property
    def caches(self) -> list[str]:
        """Outputs that only ncnn can read: the keys and values that attention keeps for the next run."""
        found = caches(self.graph)
        return [blob.name for blob in self.graph.outputs if blob in found]

    def _examples(self) -> dict[str, str]:
        """Shapes of inputs that could be meant, by name, where the manifest beside the original tells their rank."""
        manifest = manifest_of(self.source.param, self.graph)
        return {
            entry.blob: ",".join(
                str(s) if isinstance(s, int) else "16" for i, s in enumerate(entry.shape) if i != entry.batch_axis
            )
            for entry in (manifest.inputs if manifest else ())
        }

    def name_before(self, blob: Blob) -> str:
        """What the original file calls an input or output."""
        return self._blobs[blob.name]

    @contextmanager
    def staged(self, prefix: PathLike, *, binary: bool | None = None) -> Iterator[tuple[NetFiles, Mapping[Blob, str]]]:
        """The files under temporary names, which are renamed when the block ends without an error.

        With them come the names of inputs and outputs in them. `binary` is the form of the .param, by default that of
        the original.
        """
        as_binary = self.is_binary if binary is None else binary
        files = NetFiles.at(prefix, binary=as_binary)
        with all_or_nothing(files.param, files.bin) as (param, bin):
            yield NetFiles(param, bin), write_staged(self.graph, param, bin, binary=as_binary)

    def save(self, prefix: PathLike, *, binary: bool | None = None) -> NetFiles:
        """Write PREFIX.param (PREFIX.param.bin for `binary`) and PREFIX.bin: both, or none."""
        check_options(prefix=prefix)
        as_binary = self.is_binary if binary is None else binary
        with self.staged(prefix, binary=as_binary):
            return NetFiles.at(prefix, binary=as_binary)

    def estimated(self, *, seed: int = 0, masks: bool = True) -> Optimized:
        """The result after ncnn has run the net as if in fp16: with the `masks` that it needs, and `precision`.

        A net that has such masks already keeps them as they are. Raises UsageError where nothing tells an input's
        shape, and RunError where ncnn cannot run the net.
        """
        from onnx2ncnn_opt.runtime.base import Feed  # only where something runs
        from onnx2ncnn_opt.verification.estimate import Estimator
        from onnx2ncnn_opt.verification.masks import find_masks, measure
        from onnx2ncnn_opt.verification.nets import draw_runs

        first = islice(
            draw_runs(self.graph, self.shapes, seed=seed, examples=self._examples()), 2
        )  # ordinary and large ones
        runs = [{blob: Feed(array) for blob, array in feeds.items()} for _, feeds in first]
        with Estimator(self.graph, runs[0]) as estimator:
            estimators = [estimator.on(run) for run in runs]
            if self._is_masked or not masks:
                return replace(self, precision=measure(*estimators))
            found, precision = find_masks(*estimators)
        put_masks(self.graph, ((layer, mask.features) for layer, mask in found.items()))
        layers = (self.layers[0], count_layers(self.graph))
        return replace(self, masks=(*self.masks, *found.values()), precision=precision, layers=layers)

    def verify(
        self,
        files: NetFiles | None = None,
        names: Mapping[Blob, str] | None = None,
        *,
        seed: int = 0,
        timeout: float = 300.0,
        threads: int | None = None,
        worker: NcnnWorker | None = None,
        on: str | None = None,
        modes: Sequence[str] = (),
        rtol: float | None = None,
        atol: float | None = None,
    ) -> VerifyReport:
        """Run the net before and after in ncnn on inputs drawn from a seed, and compare every output but `caches`.

        The inputs are plain ones and large ones, for a small net many more, as `verify_net` draws them. Boxes that a
        detection layer chooses are judged as `Boxes` says.

        `files` are the ones to judge, with the names in them, as `staged` gives them; by default the graph is written
        to temporary ones. `threads` is the number of cores to use, and `worker` a process to use again. `on` is where
        ncnn runs, and `modes` in which ways, as `verify_net` takes them; the original runs there as well, in fp32.
        `rtol` and `atol` are what an output may be off by in every mode: in units of its largest value, and in any
        case.

        Raises VerificationError where ncnn cannot run the original net, and UsageError where nothing tells an input's
        shape, or one does not suit the net: ncnn would compute with what is beside its blobs.
        """
        if self.misfit:
            raise UsageError(
                f"the net cannot be verified at these shapes, which it does not take: {self.misfit}; give others with "
                "--shape, or leave out the verification with --no-verify"
            )
        from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker  # only where something is verified
        from onnx2ncnn_opt.runtime.targets import check_modes, find_target
        from onnx2ncnn_opt.verification.compare import DEFAULT, Tolerance, chosen, in_mode, with_rounding
        from onnx2ncnn_opt.verification.nets import FOLDING, Boxes, compare_outputs, draw_runs, run_reference
        from onnx2ncnn_opt.verification.verify import VerifyReport, found_at, worst_of

        check_options(seed=seed, threads=threads, timeout=timeout)
        chosen(DEFAULT, rtol, atol)
        target = worker.target if worker else find_target(on)
        modes = check_modes(modes) or target.modes
        runs = list(draw_runs(self.graph, self.shapes, seed=seed, examples=self._examples()))
        opaque = set(self.caches)
        outputs = [blob for blob in self.graph.outputs if not blob.is_input and blob.name not in opaque]
        given = [{self._blobs[blob.name]: array for blob, array in feeds.items()} for _, feeds in runs]
        after = after_boxes(self.graph)
        read = {blob: n for layer, names in self._boxes.items() for blob, n in zip(layer.inputs, names, strict=True)}
        origins = {blob: read[blob] for blob in before_boxes(self.graph) if blob in read}
        boxes = Boxes(
            {blob.name: name for blob, name in origins.items()},
            {blob.name: self._blobs[blob.name] for blob in outputs if blob in after},
        )
        origins |= {blob: self._blobs[blob.name] for blob in outputs if blob not in after}
        asked = {name: blob.name for blob, name in origins.items()}
        options: dict[str, Any] = {"timeout": timeout, "threads": threads}
        with (
            tempfile.TemporaryDirectory(prefix="onnx2ncnn-opt-") as folder,
            nullcontext(worker) if worker else NcnnWorker(target) as process,
            NcnnWorker(target) as second,  # which keeps the original loaded, and starts when that is needed
        ):

            def runner(paths: NetFiles, *, exact: bool, mode: str = "fp32", worker: NcnnWorker = process) -> NcnnRunner:
                return NcnnRunner(paths.param, paths.bin, worker=worker, exact=exact, mode=mode, **options)

            def original(*, exact: bool) -> list[dict[str, Array]]:
                net = runner(self.source, exact=exact)
                each = counted(given, "ncnn runs the net as it was", "runs")
                before = [run_reference(net, feeds, list(asked), apart=self._is_cut) for feeds in each]
                return [{asked[name]: array for name, array in results.items()} for results in before]

            def merged(
                each: Iterable[tuple[Draw, Sequence[OutputReport]]], mode: str = "fp32"
            ) -> tuple[OutputReport, ...]:
                """The reports of all runs as one, up to the first that is wrong."""
                reports: list[list[OutputReport]] = []
                for draw, found in each:
                    reports.append([found_at(report, str(draw)) for report in found])
                    if any(report.status not in ("ok", "unproven") for report in found):
                        break
                return tuple(replace(worst_of(of_output), mode=mode) for of_output in zip(*reports, strict=True))

            def judged(
                paths: NetFiles, known: Mapping[Blob, str], tolerance: Tolerance, mode: str = "fp32"
            ) -> Iterator[tuple[Draw, tuple[OutputReport, ...]]]:
                names = {**inner_names, **known}
                wanted = {blob.name: names[blob] for blob in (*origins, *outputs)}
                net = runner(paths, exact=exact and mode == "fp32", mode=mode)
                source = runner(self.source, exact=exact, worker=second)
                each = list(zip(runs, given, references, strict=True))
                for (draw, drawn), own, before in counted(each, f"ncnn runs the net in {mode}", "runs"):
                    if tolerance.relative > allowed.relative and draw.scale > 1:
                        continue  # the rounding of weights is judged on ordinary inputs, the net in 32 bits on all
                    feeds = {known[blob]: array for blob, array in drawn.items()}
                    limits = chosen(tolerance, rtol, atol)
                    reports = compare_outputs(net, feeds, before, wanted, limits)
                    yield draw, boxes.compare(net, feeds, wanted, source, own, reports, limits)

            def in_16_bits(
                written: NetFiles, known: Mapping[Blob, str], mode: str
            ) -> Iterator[tuple[Draw, list[OutputReport]]]:
                """The net with the kernels that ncnn would choose, against the original in float32."""
                tolerance = in_mode(mode, rounded)
                by_draw = {draw: number for number, (draw, _) in enumerate(runs)}
                for draw, reports in judged(written, known, tolerance, mode):
                    feeds, reference = given[by_draw[draw]], references[by_draw[draw]]
                    before: tuple[OutputReport, ...] = ()
                    if not self._is_cut and any(report.status != "ok" for report in reports):
                        own = {name: blob for blob, name in asked.items()}
                        net = runner(self.source, exact=False, mode=mode)
                        before = compare_outputs(net, feeds, reference, own, chosen(tolerance, rtol, atol))
                    problems = {report.name: report.message for report in before}
                    yield draw, [_told(report, problems.get(report.name)) for report in reports]

            exact, allowed = True, FOLDING
            try:
                references = original(exact=True)
            except RunError:  # some nets run with ncnn's usual kernels only
                exact, allowed = False, DEFAULT
                references = original(exact=False)
            inner_names = list_layers(self.graph).inner_names
            if files is None or names is None or boxes.outputs:  # a binary .param has no names of inner blobs
                files = NetFiles.at(Path(folder) / "net")
                names = write_net(self.graph, files.param, files.bin)
            rounded = allowed
            folded: tuple[OutputReport, ...] = ()
            if self.storage is not None and self.storage.count:
                rounded = with_rounding(ROUNDING[self.storage.encoding], self.storage.depth, allowed)
                full = NetFiles.at(Path(folder) / "full")
                with self.storage.reverted():
                    full_names = write_net(self.graph, full.param, full.bin)
                folded = merged(judged(full, full_names, allowed))
            reports: list[OutputReport] = []
            for mode in modes:
                each = judged(files, names, rounded) if mode == "fp32" else in_16_bits(files, names, mode)
                reports += merged(each, mode)
            checked = process.checked(modes)
        drawn = tuple(draw for draw, _ in runs)
        against = "the original net's"
        return VerifyReport(tuple(reports), seed, checked=checked, draws=drawn, against=against, folded=folded)

    def benchmark(
        self,
        files: NetFiles | None = None,
        names: Mapping[Blob, str] | None = None,
        *,
        seed: int = 0,
        seconds: float = 2.0,
        on: str | None = None,
    ) -> Latency:
        """Time the net after and before: one thread each, in fp32, in turns, for some `seconds`.

        The arguments are as for `verify`. Raises UsageError for a net that was cut, and where nothing tells an input's
        shape, and RunError where ncnn cannot run a net.
        """
        from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
        from onnx2ncnn_opt.runtime.targets import find_target
        from onnx2ncnn_opt.verification.latency import in_turns
        from onnx2ncnn_opt.verification.nets import draw_runs

        if self._is_cut or self.misfit:
            raise UsageError("only a whole net, at shapes that it takes, can be timed before and after")
        if files is None or names is None:
            with tempfile.TemporaryDirectory(prefix="onnx2ncnn-opt-") as folder:
                written = NetFiles.at(Path(folder) / "net")
                names = write_net(self.graph, written.param, written.bin)
                return self.benchmark(written, names, seed=seed, seconds=seconds, on=on)
        _, drawn = next(draw_runs(self.graph, self.shapes, seed=seed, examples=self._examples()))
        outputs = [blob for blob in self.graph.outputs if not blob.is_input]
        target = find_target(on)
        with NcnnWorker(target) as first, NcnnWorker(target) as second:
            after = NcnnRunner(files.param, files.bin, worker=first)
            before = NcnnRunner(self.source.param, self.source.bin, worker=second)
            return in_turns(
                partial(after.time, {names[b]: a for b, a in drawn.items()}, [names[b] for b in outputs]),
                partial(
                    before.time,
                    {self._blobs[b.name]: a for b, a in drawn.items()},
                    [self._blobs[b.name] for b in outputs],
                ),
                seconds,
            )


def _told(report: OutputReport, before: str | None) -> OutputReport:
    """A report of an output that is wrong, with what was wrong `before` the net was optimised."""
    if report.status == "ok" or not before:
        return report
    return replace(report, message=f"{report.message} (before it was optimised: {before})")


def optimize(
    param: PathLike,
    bin: PathLike,
    *,
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
    masks: bool = True,
    step: Callable[[str], None] = lambda text: None,
) -> Optimized:
    """Optimise a net; its .param may be text or binary. Nothing is written.

    `shapes` are the sizes of inputs by blob name, outermost first, perhaps after a batch of 1; by default those that
    the Input layers state, or that pnnx has written into NAME_ncnn.py or NAME.pnnx.param beside NAME.ncnn.param. They
    are what is verified and computed with, but the net may be fed others: only with `fixed_shapes` may passes rely
    on all sizes. `only` and `skip` choose passes, `limit` stops after so many rewrites. `start` and `end` are blobs
    between which to cut a subnet out. `storage` "fp16" or "bf16" stores weights in 16 bits where they survive it;
    without it that is done with weights that passes have computed from such weights alone. `shape_hints` writes the
    shapes into the layers (parameter 30), which then hold for no others on a GPU. `custom` declares layers that ncnn
    does not have, see `ir.custom.custom_layer`. `release` (YYYYMMDD) is the oldest ncnn that has to run what the passes
    make. `masks` gives feature masks to layers that fp16 is certainly not enough for; `Optimized.estimated` finds the
    others. `step` is told what is being done.

    Raises:
        ParamError, BinError: the files are broken, or have weights of undeclared custom layers.
        UsageError: a name, shape or option does not fit.
    """
    check_options(param=param, shapes=shapes, only=only, skip=skip, limit=limit, start=start, end=end, custom=custom)
    check_options(step=step)
    check_option("path", "bin", bin)
    for name, shape in (shapes or {}).items():
        check_option("list", f"shapes['{name}']", shape)
        for size in shape:
            check_option("count", f"a size in shapes['{name}']", size)
    types = entry_points.layer_types(custom)
    chosen = entry_points.select(only, skip)
    check_release(release)
    encoding = encoding_of(storage, release)
    step("reading the net")
    net = read_net(param, bin, types)
    graph = net.graph
    producers = {blob: name for name, blob in reversed(list(net.names.items()))}
    boxes = {layer: tuple(producers[blob] for blob in layer.inputs) for layer in graph if layer.type in DETECTORS}
    beside = {} if start or end else _beside(Path(param), graph, shapes or {})
    given = {**beside, **(shapes or {})}
    sizes = _bound(graph, given, partial=bool(start))
    batched = [] if start or end else _without_batches(graph, sizes, given)
    files = _names_in_file(net)
    if start or end:
        _infer(graph, sizes)
        starts, ends = (_find(net, names, option) for names, option in ((start, "--start"), (end, "--end")))
        # A start replaces the tensor for all that use it, so that is what the original is fed, not one Split's top.
        files |= {name: name for name in ends} | {name: producers[blob] for name, blob in starts.items()}
        for name, blob in starts.items():
            if shapes and name in shapes:
                blob.shape = tuple(shapes[name])
        inputs = {name: blob.shape for name, blob in starts.items()}
        cut(graph, starts, ends)
        sizes = {**sizes, **{name: _numbers(shape) for name, shape in inputs.items() if _is_fixed(shape)}}
        sizes = {blob.name: sizes[blob.name] for blob in graph.inputs if blob.name in sizes}
        _check_known(graph, shapes or {})
    before = count_layers(graph)
    misfit = _infer(graph, sizes)
    memory = peak_memory(graph)
    events = _run_passes(graph, chosen, None if fixed_shapes else sizes, limit, release, step)
    drop_unused(graph)
    _infer(graph, sizes)
    exchanged = lower_peak(graph)
    if not fixed_shapes:
        _open(graph, sizes)
    proved = prove_masks(graph) if masks else {}
    _infer(graph, sizes)
    masked = any(layer["featmask"] & _PRECISION for layer in graph)
    put_masks(graph, ((layer, mask.features) for layer, mask in proved.items()))
    if shape_hints:
        _add_hints(graph)
    plan = plan_storage(graph, encoding) if encoding else own_storage(graph)
    if plan:
        plan.apply()
    return Optimized(
        source=NetFiles(Path(param), Path(bin)),
        graph=graph,
        events=tuple(events),
        layers=(before, count_layers(graph)),
        memory=(memory, peak_memory(graph)),
        storage=plan,
        exchanged=len(exchanged),
        dropped_splits=net.dropped_splits,
        unread_layers=net.unread_layers,
        trailing_bytes=net.trailing_bytes,
        misfit=misfit,
        is_binary=net.is_binary,
        shapes=sizes,
        notes=(*_notes(graph, sizes, beside, batched, Path(param)),),
        _blobs=files,
        masks=tuple(proved.values()),
        _is_masked=masked,
        _boxes=boxes,
        _is_cut=bool(start or end),
    )


def manifest_of(path: Path, graph: Graph) -> Manifest | None:
    """NET.json beside NET.param, if it is a manifest with the net's inputs and outputs."""
    try:
        manifest = read_manifest(path.with_suffix(".json"))
    except UsageError:  # there is none, or it is something else
        return None
    blobs = [{blob.name for blob in graph.inputs}, {blob.name for blob in graph.outputs}]
    named = [{entry.blob for entry in entries} for entries in (manifest.inputs, manifest.outputs)]
    return manifest if blobs == named else None


def _beside(param: Path, graph: Graph, given: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """The shapes that pnnx tells of inputs whose shape nothing else tells."""
    _, shapes = shapes_beside(param)
    open_inputs = {blob.name for blob in graph.inputs if not _is_fixed(blob.shape)} - set(given)
    return {name: _numbers(shape) for name, shape in shapes.items() if name in open_inputs and 1 <= len(shape) <= 5}


def _without_batches(graph: Graph, sizes: dict[str, tuple[int, ...]], given: Mapping[str, Sequence[int]]) -> list[str]:
    """Take a leading 1 of given shapes for the batch, where the net does not take them otherwise; returns whose."""
    batched = [name for name, shape in given.items() if len(shape) > 1 and shape[0] == 1 and name in sizes]
    whole = [name for name in batched if len(sizes[name]) > 4]
    if not whole and not _infer(graph, sizes):
        return []
    for names in (batched, *([name] for name in batched)):
        tried = {**sizes, **{name: sizes[name][1:] for name in names}}
        if set(whole) <= set(names) and not _infer(graph, tried):
            sizes.update(tried)
            return list(names)
    return []


def _notes(
    graph: Graph,
    sizes: Mapping[str, Sequence[int]],
    beside: Mapping[str, Sequence[int]],
    batched: Sequence[str],
    param: Path,
) -> Iterator[str]:
    """What the reader should know about the shapes and the layers."""
    path, _ = shapes_beside(param) if beside else (None, {})
    if path is not None:
        yield f"from {path.name}: {', '.join(f'{name}:{_text(sizes[name])}' for name in beside if name in sizes)}"
    for name in batched:
        if name not in beside:
            yield f"{name}:{_text((1, *sizes[name]))} is a batch of one, {name}:{_text(sizes[name])}"
    unknown = Counter(layer.type for layer in graph if layer.spec is None)
    for kind, count in unknown.items():
        layers = f"{count} layers" if count > 1 else "1 layer"
        yield f"ncnn has no layer type {kind} ({layers}): the net loads only where a program registers it"


def _text(shape: Sequence[int]) -> str:
    return ",".join(map(str, shape))


def _run_passes(
    graph: Graph,
    chosen: Sequence[Pass],
    open_sizes: Mapping[str, Sequence[int]] | None,
    limit: int | None,
    release: int,
    step: Callable[[str], None],
) -> list[Event]:
    """The passes, again and again with the shapes of what they have made, until nothing changes."""
    applied: list[Event] = []
    failed: list[Event] = []
    while True:
        if open_sizes is not None:
            _infer(graph, open_sizes)
            _open(graph, open_sizes)
        left = None if limit is None else limit - len(applied)
        events = passes.run(graph, chosen, limit=left, release=release, step=step)
        new = [event for event in events if isinstance(event, Applied)]
        applied += new
        failed += (event for event in events if isinstance(event, Failed))
        chosen = [p for p in chosen if p.name not in {event.pass_name for event in failed}]
        if not new or left == len(new):
            return [*applied, *(event for event in events if isinstance(event, NearMiss)), *failed]


def _bound(graph: Graph, given: Mapping[str, Sequence[int]], *, partial: bool) -> dict[str, tuple[int, ...]]:
    """The shapes of inputs that are known, stated ones replaced by those given."""
    if not partial:
        _check_known(graph, given)
    sizes = {blob.name: _numbers(blob.shape) for blob in graph.inputs if _is_fixed(blob.shape)}
    return {**sizes, **{blob.name: tuple(given[blob.name]) for blob in graph.inputs if blob.name in given}}


def _check_known(graph: Graph, given: Mapping[str, Sequence[int]]) -> None:
    names = [blob.name for blob in graph.inputs]
    for name, shape in given.items():
        if name not in names:
            raise UsageError(f"no input is called '{name}'; inputs are: {', '.join(names)}")
        is_batched = len(shape) == 5 and shape[0] == 1
        if not (1 <= len(shape) <= 4 or is_batched) or not all(size > 0 for size in shape):
            raise UsageError(
                f"'{name}' cannot have the shape {','.join(map(str, shape))}: a blob has 1 to 4 sizes above 0"
            )


def _find(net: LoadedNet, names: Sequence[str], option: str) -> dict[str, Blob]:
    for name in names:
        if name not in net.names:
            raise UsageError(f"{option} {name}: the net has no blob of that name")
    return {name: net.names[name] for name in names}


def _names_in_file(net: LoadedNet) -> dict[str, str]:
    """What the file calls inputs and outputs, by their names in the graph."""
    return {blob.name: blob.name for blob in (*net.graph.inputs, *net.graph.outputs)}


def infer_net(graph: Graph, shapes: Mapping[str, Sequence[int]], batches: Mapping[str, int] | None = None) -> None:
    """Give all blobs of a net their shapes, from those of its inputs: `shapes` by name, else those that are stated.

    `batches` are the inputs' batch counts, where they are not 1; without them a leading 1 may be a batch of one. Raises
    UsageError where `shapes` do not fit the net's inputs.
    """
    sizes = _bound(graph, shapes, partial=False)
    if batches is None:
        _without_batches(graph, sizes, shapes)
    _infer(graph, sizes, batches)


def _infer(graph: Graph, sizes: Mapping[str, Sequence[Dim]], batches: Mapping[str, Dim] | None = None) -> str:
    """Shapes of all blobs from those of the inputs; unknown after what cannot be inferred, which is not an error here.

    Returns what is wrong with the first layer that cannot have such inputs.
    """
    problems = [_infer_layer(layer, sizes, batches or {}) for layer in graph]
    return next(filter(None, problems), "")


def _infer_layer(layer: Layer, sizes: Mapping[str, Sequence[Dim]], batches: Mapping[str, Dim]) -> str:
    if layer.type == "Input":
        for blob in layer.outputs:
            known = sizes.get(blob.name)
            blob.shape, blob.batch = tuple(known) if known else None, batches.get(blob.name, 1)
        return ""
    try:
        assign_shapes(layer)
    except ShapeError as error:
        for blob in layer.outputs:
            blob.shape, blob.batch = None, 1
        return str(error)
    return ""


def _open(graph: Graph, sizes: Mapping[str, Sequence[int]]) -> None:
    """Leave in the graph only shapes that passes may rely on: an Input hints at its sizes, programs feed others too.

    What stays are the channels of images and volumes, which convolutions fix anyway, and sizes of 1; the others become
    symbols. ncnn decides some things by whether a size is 1, which a symbol is assumed not to be: where that is not so
    at the stated sizes (an image of 32 rows that is halved five times), the shape becomes unknown. Where a Reshape
    makes the batch an axis, its count is such a size.
    """
    stated = {blob: blob.shape for layer in graph for blob in layer.outputs}
    symbols = {
        name: tuple(
            size if size == 1 or (axis == 0 and len(shape) > 2) else symbol(f"{name}.{axis}")
            for axis, size in enumerate(shape)
        )
        for name, shape in sizes.items()
    }
    values = {f"{name}.{axis}": size for name, shape in sizes.items() for axis, size in enumerate(shape)}
    is_axis = any(layer.type == "Reshape" and "input_batch_axis" in layer.params for layer in graph)
    batches = {blob.name: symbol(f"{blob.name}.batch") for blob in graph.inputs} if is_axis else {}
    values |= {f"{name}.batch": 1 for name in batches}

    def is_safe(blob: Blob) -> bool:
        shape, expected = blob.shape or (), stated[blob] or ()
        if len(shape) != len(expected):
            return False
        return all(
            size == known if isinstance(size, int) else size.subs(values) == known != 1
            for size, known in zip(shape, expected, strict=True)
        )

    for layer in graph:
        _infer_layer(layer, symbols, batches)
        for blob in layer.outputs:
            if not is_safe(blob):
                blob.shape = None


def _add_hints(graph: Graph) -> None:
    """Parameter 30 for all layers whose outputs' shapes are known; the writer fills it in from them."""
    for layer in graph:
        if layer.outputs and layer.type != "Split" and all(_is_fixed(blob.shape) for blob in layer.outputs):
            layer.params["shape_hints" if layer.spec else SHAPE_HINTS_ID] = ()


def _is_fixed(shape: Shape | None) -> bool:
    return shape is not None and all(isinstance(size, int) for size in shape)


def _numbers(shape: Shape | None) -> tuple[int, ...]:
    return tuple(size for size in shape or () if isinstance(size, int))
