"""Lowering a model to an ncnn graph in memory, and verifying and saving the graph."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx2ncnn_opt import entry_points, passes
from onnx2ncnn_opt.errors import ConversionError, UsageError, VerificationError, check_option, check_options
from onnx2ncnn_opt.finish import finish, require_release
from onnx2ncnn_opt.ir.attention import cache_pairs, join_cache_inputs
from onnx2ncnn_opt.ir.cost import multiplications_of
from onnx2ncnn_opt.ir.dim import Dim, Sym, sum_of, texts
from onnx2ncnn_opt.ir.features import MasksFor
from onnx2ncnn_opt.ir.graph import Blob, Graph
from onnx2ncnn_opt.ir.releases import NEWEST, check_release, least_release
from onnx2ncnn_opt.ir.tables import tables
from onnx2ncnn_opt.ir.weight import Encoding
from onnx2ncnn_opt.manifest import (
    Bound,
    Cache,
    Entry,
    Image,
    LayerCount,
    Manifest,
    Masked,
    Source,
    TailFile,
    file_hash,
    read_manifest,
    tail_path,
)
from onnx2ncnn_opt.onnx.custom import CustomOp, parse_custom
from onnx2ncnn_opt.onnx.importer import Imported, import_model
from onnx2ncnn_opt.onnx.read.append import Appended, append_decoding
from onnx2ncnn_opt.onnx.read.binding import TensorInfo
from onnx2ncnn_opt.onnx.read.exported import exported, reference
from onnx2ncnn_opt.onnx.read.given import GivenShapes
from onnx2ncnn_opt.onnx.read.load import LoadedModel, load_model
from onnx2ncnn_opt.onnx.read.quantized import AT_RUN_TIME, INT8, without_rounding
from onnx2ncnn_opt.onnx.tail.extract import Tail
from onnx2ncnn_opt.onnx.value import is_float
from onnx2ncnn_opt.onnx.walk import Port
from onnx2ncnn_opt.param.binary import write_weights
from onnx2ncnn_opt.param.files import NetFiles, all_or_nothing, write_param
from onnx2ncnn_opt.param.names import clean_name
from onnx2ncnn_opt.param.splits import Listing, count_layers, list_layers
from onnx2ncnn_opt.param.storage import Storage, encoding_of
from onnx2ncnn_opt.preprocessing import parse_image, take_pixels
from onnx2ncnn_opt.progress import announce
from onnx2ncnn_opt.quantization.centre import centre
from onnx2ncnn_opt.rewrite.events import Event, Rewritten
from onnx2ncnn_opt.rewrite.prove_masks import Mask, added_inputs, put_masks
from onnx2ncnn_opt.rewrite.rule import Pass
from onnx2ncnn_opt.rewrite.square_roots import flush_subnormal_operands
from onnx2ncnn_opt.system import temporary_folder
from onnx2ncnn_opt.verification.options import Verification
from onnx2ncnn_opt.version import __version__

if TYPE_CHECKING:
    from concurrent.futures import Future

    from onnx2ncnn_opt.inputs.draws import Draw
    from onnx2ncnn_opt.outputs import Latency
    from onnx2ncnn_opt.precision.search_masks import Precision
    from onnx2ncnn_opt.runtime.base import Array, Feed
    from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
    from onnx2ncnn_opt.verification.model import ModelRuns
    from onnx2ncnn_opt.verification.report import VerifyReport

TAILS = ("auto", "only-needed", "never")
QUANTIZED = ("float", "keep")
NOT_RUN = "what custom operators compute is not known here"


@dataclass(frozen=True)
class Files(NetFiles):
    """The files of a net, its manifest, and its tail; most nets have no tail."""

    manifest: Path
    tail: Path

    @classmethod
    def of(cls, prefix: str | os.PathLike[str]) -> Files:
        """Return the paths PREFIX.ncnn.param, PREFIX.ncnn.bin, PREFIX.ncnn.json and PREFIX.ncnn.tail.onnx."""
        base = f"{os.fspath(prefix)}.ncnn"
        net = NetFiles.at(base)
        return cls(net.param, net.bin, Path(f"{base}.json"), tail_path(net.param))

    @classmethod
    @contextmanager
    def staged(cls, prefix: str | os.PathLike[str], tail: Tail | None) -> Iterator[Files]:
        """Yield paths with temporary names; rename the files if the block succeeds. Write the tail, and the hashes."""
        files = cls.of(prefix)
        with all_or_nothing(files.param, files.bin, *([files.tail] if tail else []), files.manifest) as staged:
            param, bin, *tails, manifest = staged
            if tail:
                tails[0].write_bytes(tail.data)
            yield cls(param, bin, manifest, *(tails or [files.tail]))
            hashes = {"param": file_hash(param), "bin": file_hash(bin)}
            manifest.write_bytes(replace(read_manifest(manifest), sha256=hashes).to_json().encode())
        if tail is None:
            files.tail.unlink(missing_ok=True)  # the tail of an earlier net


@dataclass(frozen=True, eq=False)
class Conversion(Rewritten):
    """A converted model, in memory.

    `graph` is the ncnn graph after the passes, `inputs` and `outputs` say how the model's arrays go in and out,
    `events` are the rewrites and near misses of the passes. `layers_before` counts layers before the passes. `custom`
    are the operators that became custom layers. `minimum` and `cases` are the manifest's. `masks` are the
    layers that need more than fp16, and `precision` is the estimated effect of fp16. `images` are the inputs that take
    pixels. `appended` is the model with the decoding of the option `append`; it is also the `source`. `equal` are names
    of dynamic dimensions that have to be equal, `cost` describes the cost of dynamic dimensions. `report` is the
    verification, `latency` the time of a run, both None if not requested. `tail` are the nodes after the net; then
    `model` and `cut` end where the tail begins. If `quantized` is not "float", `kept` has, for each layer of a
    quantised product, the reason why it is float (empty: it is int8).
    """

    model: LoadedModel
    source: Any
    graph: Graph
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    events: tuple[Event, ...] = ()
    layers_before: int = 0
    cut: tuple[str, ...] = ()
    release: int = NEWEST
    storage: Storage | None = None
    custom: tuple[CustomOp, ...] = ()
    minimum: Mapping[Dim, int] = field(default_factory=dict)
    cases: Collection[Dim] = ()
    masks: tuple[Mask, ...] = ()
    precision: Precision | None = None
    images: Mapping[str, Image] = field(default_factory=dict)
    appended: Appended | None = None
    equal: tuple[tuple[str, ...], ...] = ()
    cost: tuple[str, ...] = ()
    report: VerifyReport | None = None
    latency: Latency | None = None
    tail: Tail | None = None
    quantized: str = "float"
    kept: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        shapes = "; ".join(f"{p.name} [{', '.join(map(str, p.shape))}]" for p in (*self.inputs, *self.outputs))
        return f"Conversion({self.model.name}: {self.layers_before} -> {count_layers(self.graph)} layers, {shapes})"

    @property
    def fed_masks(self) -> list[str]:
        """The names of the inputs that are added to attention's scores."""
        added = added_inputs(self.graph)
        return [port.name for port in self.inputs if port.blob in added]

    def manifest(self, listing: Listing | None = None) -> Manifest:
        """Return the content of PREFIX.ncnn.json; `listing` has the lines of the .param, if they are known already."""
        listing = listing or list_layers(self.graph)
        caches = _caches(self.graph, (*self.inputs, *self.outputs))
        images, rows = self.images, tables(self.graph)
        costs = [multiplications_of(layer) for layer in self.graph]
        of_inputs = ((p, _entry(p, listing.names, caches)) for p in self.inputs)
        return Manifest(
            inputs=tuple(replace(e, image=images.get(p.name), table=rows.get(p.blob)) for p, e in of_inputs),
            outputs=tuple(_entry(port, listing.names, caches) for port in self.outputs),
            source=Source(self.model.digest(), self.model.opsets.get("", 1), self.appended and self.appended.text),
            tool=f"onnx2ncnn-opt {__version__}",
            ncnn=str(self.release),
            layers=LayerCount(self.layers_before, len(listing.lines)),
            passes=tuple(dict.fromkeys(event.pass_name for event in self.applied)),
            values=tuple(Bound.of(name, array) for name, array in self.model.values.items()),
            masks=tuple(Masked(clean_name(m.layer), int(m.features), *m[3:]) for m in self.masks),
            minimum={str(size): least for size, least in self.minimum.items()},
            cases=tuple(map(str, self.cases)),
            least_ncnn=str(least_release(self.graph)),
            macs="" if None in costs else str(sum_of(cost for cost in costs if cost is not None)),
            tail=None if self.tail is None else _tail_file(self.tail, self.outputs),
        )

    @contextmanager
    def staged(self, prefix: str | os.PathLike[str]) -> Iterator[Files]:
        """Write the files under temporary names, and rename them when the block ends without an error."""
        with Files.staged(prefix, self.tail) as files:
            with files.bin.open("wb") as stream:
                write_weights(self.graph, stream)
            self.describe(files)
            yield files

    def describe(self, files: Files) -> None:
        """Write the .param and the manifest, the only files that masks change."""
        listing = write_param(self.graph, files.param)
        files.manifest.write_bytes(self.manifest(listing).to_json().encode())

    def save(self, prefix: str | os.PathLike[str]) -> Files:
        """Write PREFIX.ncnn.param, .bin and .json, and PREFIX.ncnn.tail.onnx if there is a tail: all, or none.

        Raises VerificationError for a net that failed verification.
        """
        check_options(prefix=prefix)
        if self.report is not None:
            self.report.check()
        with self.staged(prefix):
            pass
        return Files.of(prefix)

    def estimated(
        self,
        verification: Verification = Verification(),
        *,
        masks: MasksFor = True,
        bin: Path | None = None,
        worker: NcnnWorker | None = None,
    ) -> Conversion:
        """Simulate fp16 in ncnn; return the conversion with the masks that the net needs, and `precision`.

        The inputs are the feeds of the verification, by default inputs like data. `masks` says whether to set masks, or
        for which device. `bin` are the weights, if they are written; `worker` is an ncnn process to reuse. Raises
        RunError if ncnn cannot run the net, and VerificationError for `custom` operators.
        """
        from onnx2ncnn_opt.inputs.draws import Draw, draw_inputs
        from onnx2ncnn_opt.precision.fp16_run import Estimator
        from onnx2ncnn_opt.precision.search_masks import find_masks, masks_for_data
        from onnx2ncnn_opt.runtime.slots import Slot, model_feeds  # both runtimes
        from onnx2ncnn_opt.verification.model_runs import any_feeds, first_sizes

        self._require_known("nothing can be estimated")
        source, manifest, seed = reference(self.source), self.manifest(), verification.seed

        def by_blob(arrays: Mapping[str, Array]) -> dict[Blob, Feed]:
            feeds = model_feeds([Slot.of(entry) for entry in manifest.inputs], arrays)
            return {port.blob: feeds[entry.blob] for port, entry in zip(self.inputs, manifest.inputs, strict=True)}

        options: dict[str, Any] = {"budget": verification.budget, "masks": masks, "effort": verification.effort}
        options["integers"] = {port.blob for port in self.outputs if not is_float(port.dtype)}
        net: dict[str, Any] = {"worker": worker, "bin": bin}
        if verification.feeds is None:
            sizes = first_sizes(source, self.model, manifest, Draw(seed, plain=True), outputs=self.cut)

            def drawn(draw: Draw) -> dict[Blob, Feed]:
                return by_blob(draw_inputs(self.model, sizes, draw=draw))

            new_masks, precision = masks_for_data(self.graph, drawn, seed, net, **options)
        else:
            arrays = any_feeds(source, self.model, manifest, outputs=self.cut, feeds=verification.feeds)
            with Estimator(self.graph, by_blob(arrays), **net) as estimator:
                new_masks, precision = find_masks([estimator], **options)
        put_masks(self.graph, ((layer, mask.features) for layer, mask in new_masks.items()))
        return replace(self, masks=(*self.masks, *new_masks.values()), precision=precision)

    def verify(
        self,
        verification: Verification = Verification(),
        *,
        files: Files | None = None,
        worker: NcnnWorker | None = None,
        runs: Future[ModelRuns] | None = None,
    ) -> VerifyReport:
        """Compare the net with ONNX Runtime on the original model; `files` are the net's, if they are written.

        `runs` are the model's, if `begin_runs` has started them. Raises VerificationError for `custom` operators,
        because ONNX Runtime cannot run them.
        """
        from onnx2ncnn_opt.verification.model import verify_net  # both runtimes

        self._require_known("the net cannot be verified")
        if files is None:
            with self.staged_in_temporary_folder() as staged:
                return self.verify(verification, files=staged, worker=worker)
        model = (runs or self.begin_runs(verification)).result()
        tail = None if self.tail is None else self.tail.data
        fixed: dict[str, Any] = {"manifest": self.manifest(), "tail": tail, "worker": worker, "runs": model}
        return verify_net(model.source, files.param, files.bin, model.options, **fixed)

    def begin_runs(self, verification: Verification) -> Future[ModelRuns]:
        """Start ONNX Runtime's runs of the model for `verify`, in a thread."""
        from onnx2ncnn_opt.runtime.ahead import begin
        from onnx2ncnn_opt.verification.model import ModelRuns

        how = replace(verification, outputs=verification.outputs or self.cut)
        return begin(partial(ModelRuns, has_tail=self.tail is not None), reference(self.source), how, self.manifest())

    @contextmanager
    def staged_in_temporary_folder(self) -> Iterator[Files]:
        """Write the files to a folder that exists during the block."""
        with temporary_folder() as folder, self.staged(Path(folder) / "net") as files:
            yield files

    def _require_known(self, consequence: str) -> None:
        if self.custom:
            raise VerificationError(f"{consequence}: {NOT_RUN}")

    def benchmark(
        self, verification: Verification = Verification(), *, files: Files | None = None, seconds: float = 2.0
    ) -> Latency:
        """Time the net and ONNX Runtime, alternating, for `seconds`: in fp32, with one thread of this machine each.

        `files` are the net's, if they are written; `verification` has the inputs. Raises RunError if a runtime fails,
        and VerificationError for `custom` operators.
        """
        from onnx2ncnn_opt.runtime.ncnn import NcnnRunner
        from onnx2ncnn_opt.runtime.ort import OrtRunner, OrtWorker
        from onnx2ncnn_opt.runtime.slots import Slot, model_feeds
        from onnx2ncnn_opt.verification.latency import in_turns
        from onnx2ncnn_opt.verification.model_runs import any_feeds

        check_options(seconds=seconds)
        self._require_known("the net cannot be timed")
        if files is None:
            with self.staged_in_temporary_folder() as staged:
                return self.benchmark(verification, files=staged, seconds=seconds)
        model, manifest = reference(self.source), self.manifest()
        feeds, seed = verification.feeds, verification.seed
        arrays = any_feeds(model, self.model, manifest, outputs=self.cut, feeds=feeds, seed=seed)
        blobs = model_feeds([Slot.of(entry) for entry in manifest.inputs], arrays)
        outputs = [entry.blob for entry in manifest.outputs]
        with OrtWorker() as worker, NcnnRunner(files.param, files.bin) as net:
            other = OrtRunner(model, outputs=self.cut, values=self.model.values, fast=True, worker=worker)
            return in_turns(partial(net.time, blobs, outputs), partial(other.time, arrays), seconds)


def lower(  # noqa: PLR0913
    model: Any,
    *,
    inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    shapes: GivenShapes | None = None,
    values: Mapping[str, Any] | None = None,
    outputs: Sequence[str] = (),
    batch_axes: Mapping[str, int | None] | None = None,
    optimize: bool = True,
    skip: Collection[str] = (),
    limit: int | None = None,
    release: int = NEWEST,
    storage: str | None = None,
    custom: Collection[str] = (),
    masks: MasksFor = True,
    images: Mapping[str, Image | str] | None = None,
    tail: str = "auto",
    append: str | None = None,
    quantized: str = "float",
    loaded: LoadedModel | None = None,
) -> Conversion:
    """Lower an ONNX model to an ncnn graph, and run the passes; run neither the model nor the net.

    `model` is a path, bytes, onnx.ModelProto, onnx_ir.Model or torch.onnx.ONNXProgram. With torch, it may also be a
    path of a .pt2 file, an ExportedProgram, or a torch.nn.Module with example `inputs` (in order or by name) and
    optional `dynamic_shapes`, as for torch.export.export.

    `shapes` binds the sizes of inputs by name: a number, a name (equal names are equal sizes), a sum of names such as
    "P+S", or None for the model's own. `values` binds whole inputs to constants: {"sr": 16000}. `outputs` are values at
    which to cut the model. `batch_axes` is the axis of each input that becomes the Mat's batch count, or None. `skip`
    names passes to skip; `limit` is the largest number of rewrites. `release` (YYYYMMDD) is the oldest ncnn that has to
    run the net. `storage` "fp16" or "bf16" stores weights in 16 bits if they lose little. `custom` operators become
    layers, such as "my.domain::MyOp=MyLayer:alpha,beta" (docs/plugins.md). `masks` gives feature masks to layers that
    fp16 certainly breaks; `Conversion.estimated` finds others. `images` are inputs that take pixels of 0..255: each has
    an `Image`, or text such as "mean=123.7,116.3,103.5:std=58.4,57.1,57.4:bgr". `tail` is one of TAILS: "only-needed"
    moves nodes at the model's end that ncnn cannot express to a tail after the net, "auto" also nodes that would be
    many layers. `append` appends the decoding of a detector's raw output to the model:
    "nms:output0:conf=0.25:iou=0.45:max=300" (docs/deploy.md). `quantized` is one of QUANTIZED: "keep" makes the
    products of a quantised model int8 layers, "float" float layers with its roundings, if it has no quantised LSTM.
    `loaded` is the model, if the caller has loaded it with the same bindings; its graph changes.

    Raises:
        ModelError: the model is broken or unsafe to open.
        UnsupportedError: ncnn cannot express some nodes; it names all of them.
        UsageError: an option is invalid.
    """
    check_options(shapes=shapes, values=values, outputs=outputs, batch_axes=batch_axes, skip=skip, limit=limit)
    check_options(images=images)
    check_option("names", "custom", custom)
    if tail not in TAILS:
        raise UsageError(f"tail has to be one of {', '.join(TAILS)}, not {tail!r:.80}")
    if quantized not in QUANTIZED:
        raise UsageError(f"quantized has to be one of {', '.join(QUANTIZED)}, not {quantized!r:.80}")
    _check_inputs(shapes or {}, batch_axes or {})
    chosen = entry_points.select(skip=skip)
    check_release(release)
    encoding = encoding_of(storage, release)
    pixels = {name: parse_image(name, image) for name, image in (images or {}).items()}
    announce("reading the model")
    source = exported(model, inputs, dynamic_shapes)
    appended = None if append is None else append_decoding(source, append, shapes)
    request = _Request(
        model=model,
        source=appended.model if appended else source,
        appended=appended,
        bindings={"shapes": shapes, "values": values, "outputs": outputs},
        batch_axes=batch_axes,
        custom=custom,
        tail=tail,
        quantized=quantized,
        images=pixels,
        chosen=chosen if optimize else [],
        limit=limit,
        release=release,
        encoding=encoding,
        masks=masks,
    )
    conversion = request.conversion(loaded)
    if conversion.model.length is None or not optimize or any(cache_pairs(conversion.graph)):
        return conversion
    return request.conversion(stepwise=False)  # no cache needs the input `length`


@dataclass(frozen=True)
class _Request:
    """A model, its ONNX source, and the checked options of `lower`; `bindings` are options of `load_model`."""

    model: Any
    source: Any
    appended: Appended | None
    bindings: Mapping[str, Any]
    batch_axes: Mapping[str, int | None] | None
    custom: Collection[str]
    tail: str
    quantized: str
    images: Mapping[str, Image]
    chosen: Sequence[Pass]
    limit: int | None
    release: int
    encoding: Encoding | None
    masks: MasksFor

    def conversion(self, loaded: LoadedModel | None = None, *, stepwise: bool = True) -> Conversion:
        """Import the model, run the passes, and `finish` the graph."""
        imported, release = self.imported(loaded, stepwise=stepwise), self.release
        take_pixels(imported, self.images)
        graph, before = imported.graph, count_layers(imported.graph)
        is_dynamic = any(isinstance(size, Sym) for port in imported.inputs for size in port.shape)  # a cache grows
        chosen = [p for p in self.chosen if is_dynamic or p.name != "fuse_kv_cache"]
        events = passes.run(graph, chosen, limit=self.limit, release=release)
        flush_subnormal_operands(graph, release)
        require_release(graph, release)
        join_cache_inputs(graph)
        # A pass may replace an output's blob, but keeps the order of outputs.
        outputs = tuple(port._replace(blob=blob) for port, blob in zip(imported.outputs, graph.outputs, strict=True))
        integers = {port.blob for port in (*imported.inputs, *outputs) if not is_float(port.dtype)}
        if self.quantized == "keep":
            centre(graph)
        finished = finish(graph, encoding=self.encoding, masks=self.masks, integers=integers)
        return Conversion(
            imported.model,
            self.source,
            graph,
            imported.inputs,
            outputs,
            events=tuple(events),
            layers_before=before,
            cut=imported.tail.cut if imported.tail else tuple(self.bindings["outputs"]),
            release=release,
            storage=finished.storage,
            custom=imported.custom,
            minimum=imported.minimum,
            cases=imported.cases,
            masks=finished.masks,
            images=self.images,
            appended=self.appended,
            tail=imported.tail,
            quantized=self.quantized,
            kept=imported.kept,
        )

    def imported(self, loaded: LoadedModel | None, *, stepwise: bool) -> Imported:
        """Import the model; load it from its source unless it is `loaded`."""
        importers, custom = entry_points.installed_ops(), parse_custom(self.custom)
        if loaded is None or importers:  # the loaded model lacks functions of importers
            opaque = {(op.domain, op.name) for op in importers} | {(op.domain, op.name) for op in custom}
            loaded = load_model(self.source, opaque=opaque, stepwise=stepwise, **self.bindings)
        if self.source is not self.model and isinstance(self.model, (str, os.PathLike)):
            sha256 = file_hash(Path(self.model))
            loaded = replace(loaded, digest=lambda: sha256)
        at_run_time = {node.op_type for node in loaded.graph if node.op_type in AT_RUN_TIME}
        # ncnn cannot round the states of an LSTM, so the roundings around it would make nothing exact.
        is_kept = (self.quantized == "keep" or AT_RUN_TIME[1] in at_run_time) and without_rounding(loaded.graph)
        for node in loaded.graph if self.quantized == "float" else ():
            node.meta.pop(INT8, None)
        announce("making layers of the operators")
        types = entry_points.layer_types()
        imported = import_model(loaded, batch_axes=self.batch_axes, types=types, custom=custom, tail=self.tail)
        if not is_kept or at_run_time or "" in imported.kept.values():
            return imported
        return replace(self, quantized="float").imported(None, stepwise=stepwise)  # no product became int8


def _check_inputs(shapes: GivenShapes, batch_axes: Mapping[str, int | None]) -> None:
    for name, sizes in shapes.items():
        check_option("list", f"shapes['{name}']", sizes)
    for name, axis in batch_axes.items():
        if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int)):
            raise UsageError(f"batch_axes['{name}'] has to be an axis or None, not {axis!r:.80}")


def reconverted(model: Path | bytes, manifest: Manifest) -> Conversion | None:
    """Convert the model again with the passes in the manifest; return None if the net would differ."""
    named = {entry.name: entry for entry in manifest.inputs if not entry.length}
    try:
        conversion = lower(
            model,
            shapes={name: entry.shape for name, entry in named.items()},
            values={value.name: value.array() for value in manifest.values},
            batch_axes={name: entry.batch_axis for name, entry in named.items()},
            images={name: entry.image for name, entry in named.items() if entry.image},
            skip=[p.name for p in entry_points.pipeline() if p.name not in manifest.passes],
            release=int(manifest.ncnn),
            tail="auto" if manifest.tail else "never",
        )
    except (ConversionError, UsageError, ValueError):  # another version's manifest may need features that this lacks
        return None
    return conversion if conversion.manifest().layers == manifest.layers else None


def unoptimised(conversion: Conversion) -> Conversion:
    """Return the model's conversion without passes, masks and 16-bit weights."""
    return lower(
        conversion.source,
        shapes=conversion.model.given,
        values=conversion.model.values,
        outputs=conversion.cut,
        batch_axes={port.name: port.batch_axis for port in conversion.inputs},
        optimize=False,
        images=conversion.images,
        custom=[op.request for op in conversion.custom],
        masks=False,
        tail="never",
        quantized=conversion.quantized,
    )


def _entry(port: Port, names: Mapping[Blob, str], caches: Mapping[Blob, Cache]) -> Entry:
    entry = Entry(port.name, names[port.blob], texts(port.shape), port.dtype.name, port.batch_axis, port.element)
    return replace(entry, cache=caches.get(port.blob), length=port.length)


def _caches(graph: Graph, ports: Sequence[Port]) -> dict[Blob, Cache]:
    """Return the caches among the net's inputs and outputs."""
    names = {port.blob: port.name for port in ports}
    caches: dict[Blob, Cache] = {}
    for layer, role, past, present in cache_pairs(graph):
        if past in names and present in names:
            caches |= dict.fromkeys((past, present), Cache(clean_name(layer.name), role, names[past], names[present]))
    return caches


def _tail_file(tail: Tail, ports: Iterable[Port]) -> TailFile:
    shapes = {**{port.name: texts(port.shape) for port in ports}, **tail.shapes}

    def entry(info: TensorInfo) -> Entry:
        shape = shapes.get(info.name, ()) if info.shape is None else texts(info.shape)
        return Entry(info.name, "", shape, info.dtype.numpy().name, None)

    tail_inputs = {value.name for value in tail.model.graph.input}
    return TailFile(
        sha256=hashlib.sha256(tail.data).hexdigest(),
        inputs=tuple(name for name in tail.cut if name in tail_inputs),
        arrays=tuple(map(entry, tail.arrays)),
        sizes=tail.sizes,
        outputs=tuple(map(entry, tail.outputs)),
        operators=tail.operators,
        reasons=tail.reasons,
    )
