"""Lowering a model to an ncnn graph in memory, and verifying and saving the graph."""

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from onnx2ncnn_opt import entry_points, passes
from onnx2ncnn_opt.api.client import METADATA, for_ultralytics, ultralytics_yaml
from onnx2ncnn_opt.api.finish import finish, name_blobs, require_release
from onnx2ncnn_opt.api.options import NEEDED, ConvertOptions, takes_options
from onnx2ncnn_opt.api.preprocessing import parse_image, take_pixels
from onnx2ncnn_opt.api.result import NetResult
from onnx2ncnn_opt.errors import ConversionError, UnsupportedError, UsageError, VerificationError
from onnx2ncnn_opt.inputs.draws import Draw, draw_inputs
from onnx2ncnn_opt.ir.attention import cache_pairs, join_cache_inputs
from onnx2ncnn_opt.ir.cost import multiplications_of
from onnx2ncnn_opt.ir.cut import computed_from
from onnx2ncnn_opt.ir.detections import after_boxes, counting, decisive, selection, sorted_indices
from onnx2ncnn_opt.ir.dim import Dim, Sym, sum_of, texts
from onnx2ncnn_opt.ir.graph import Blob, Graph
from onnx2ncnn_opt.ir.reached import reached
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
    Sort,
    Source,
    TailFile,
    file_hash,
    read_manifest,
    tail_path,
)
from onnx2ncnn_opt.onnx.custom import CustomOp, parse_custom
from onnx2ncnn_opt.onnx.cut.extract import Tail, label
from onnx2ncnn_opt.onnx.edit.append import Appended, append_decoding
from onnx2ncnn_opt.onnx.edit.quantized import AT_RUN_TIME, INT8, without_rounding
from onnx2ncnn_opt.onnx.importer import Imported, import_model
from onnx2ncnn_opt.onnx.read.binding import TensorInfo
from onnx2ncnn_opt.onnx.read.exported import exported, reference
from onnx2ncnn_opt.onnx.read.load import LoadedModel, load_model
from onnx2ncnn_opt.onnx.read.structure import OWN, SELECTION, names_of
from onnx2ncnn_opt.onnx.value import is_float
from onnx2ncnn_opt.onnx.walk import Port
from onnx2ncnn_opt.outputs import Latency
from onnx2ncnn_opt.param.files import NetFiles, PathLike, all_or_nothing, write_param
from onnx2ncnn_opt.param.names import clean_name
from onnx2ncnn_opt.param.splits import Listing, count_layers, list_layers
from onnx2ncnn_opt.param.storage import encoding_of
from onnx2ncnn_opt.progress import announce
from onnx2ncnn_opt.quantization.centre import centre
from onnx2ncnn_opt.rewrite.rule import Pass
from onnx2ncnn_opt.rewrite.square_roots import flush_subnormal_operands
from onnx2ncnn_opt.runtime.ahead import begin
from onnx2ncnn_opt.runtime.base import Array, Feed
from onnx2ncnn_opt.runtime.latency import in_turns
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.ort import OrtRunner, OrtWorker
from onnx2ncnn_opt.runtime.slots import Slot, model_feeds
from onnx2ncnn_opt.verification.model_runs import any_feeds, first_sizes
from onnx2ncnn_opt.verification.options import Verification
from onnx2ncnn_opt.verification.report import VerifyReport
from onnx2ncnn_opt.version import __version__

if TYPE_CHECKING:
    from onnx2ncnn_opt.verification.model import ModelRuns

NOT_RUN = "what custom operators compute is not known here"


@dataclass(frozen=True)
class Files(NetFiles):
    """The files of a net, its manifest, and its tail; most nets have no tail."""

    manifest: Path
    tail: Path

    @classmethod
    def of(cls, prefix: str | os.PathLike[str]) -> "Files":
        """Return the paths PREFIX.ncnn.param, PREFIX.ncnn.bin, PREFIX.ncnn.json and PREFIX.ncnn.tail.onnx."""
        base = f"{os.fspath(prefix)}.ncnn"
        net = NetFiles.at(base)
        return cls(net.param, net.bin, Path(f"{base}.json"), tail_path(net.param))


@dataclass(frozen=True, eq=False)
class Conversion(NetResult[Files]):
    """A converted model, in memory.

    `inputs` and `outputs` say how the model's arrays go in and out of `graph`. `options` are those of the conversion of
    `source`, an ONNX model. `layers_before` counts layers before the passes. `custom` are the operators that became
    custom layers. `minimum` and `cases` are the manifest's. `appended` is the model with the decoding of the option
    `append`; it is also the `source`. `equal` are names of dynamic dimensions that have to be equal, `cost` describes
    the cost of dynamic dimensions. `tail` are the nodes after the net; then `model` and `cut` end where the tail
    begins. With the option `quantized`, `kept` has, for each layer of a quantised product, the reason why it is float
    (empty: it is int8).
    """

    model: LoadedModel
    source: Any
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    options: ConvertOptions
    layers_before: int = 0
    cut: tuple[str, ...] = ()
    custom: tuple[CustomOp, ...] = ()
    minimum: Mapping[Dim, int] = field(default_factory=dict)
    cases: Collection[Dim] = ()
    images: Mapping[str, Image] = field(default_factory=dict)
    appended: Appended | None = None
    equal: tuple[tuple[str, ...], ...] = ()
    cost: tuple[str, ...] = ()
    tail: Tail | None = None
    kept: Mapping[str, str] = field(default_factory=dict)
    candidates: tuple[Port, ...] = ()

    against = "ONNX Runtime"

    def __repr__(self) -> str:
        shapes = "; ".join(f"{p.name} [{', '.join(map(str, p.shape))}]" for p in (*self.inputs, *self.outputs))
        return f"Conversion({self.model.name}: {self.layers_before} -> {count_layers(self.graph)} layers, {shapes})"

    def manifest(self, listing: Listing | None = None) -> Manifest:
        """Return the content of PREFIX.ncnn.json; `listing` has the lines of the .param, if they are known already."""
        listing = listing or list_layers(self.graph)
        caches = _caches(self.graph, (*self.inputs, *self.outputs))
        images, rows = self.images, tables(self.graph)
        after = after_boxes(self.graph)
        costs = [multiplications_of(layer) for layer in self.graph if after.isdisjoint(layer.outputs)]
        of_inputs = ((p, _entry(p, listing.names, caches)) for p in self.inputs)
        return Manifest(
            inputs=tuple(replace(e, image=images.get(p.name), table=rows.get(p.blob)) for p, e in of_inputs),
            outputs=tuple(self._output(port, listing, caches) for port in self.outputs),
            source=Source(self.model.digest(), self.model.opsets.get("", 1), self.appended and self.appended.text),
            tool=f"onnx2ncnn-opt {__version__}",
            ncnn=str(self.options.release),
            layers=LayerCount(self.layers_before, len(listing.lines)),
            passes=tuple(dict.fromkeys(event.pass_name for event in self.applied)),
            values=tuple(Bound.of(name, array) for name, array in self.model.values.items()),
            masks=tuple(Masked(clean_name(m.layer), int(m.features), *m[3:]) for m in self.masks),
            minimum={str(size): least for size, least in self.minimum.items()},
            cases=tuple(map(str, self.cases)),
            least_ncnn=str(least_release(self.graph)),
            macs="" if None in costs else str(sum_of(cost for cost in costs if cost is not None)),
            tail=None if self.tail is None else _tail_file(self.tail, self.outputs),
            sorts=tuple(self._sorts(listing)),
            candidates=tuple(self._candidates(listing)),
        )

    def _output(self, port: Port, listing: Listing, caches: Mapping[Blob, Cache]) -> Entry:
        entry, layer = _entry(port, listing.names, caches), selection(port.blob)
        if self.candidates:  # there are always as many rows
            return replace(entry, boxes=entry.blob if port.blob in after_boxes(self.graph) else None)
        return entry if layer is None else replace(entry, shape=(None, 6), boxes=listing.tops[layer.output])

    def _sorts(self, listing: Listing) -> Iterator[Sort]:
        indices = {label(node): node.outputs[1].name or "" for node in self.model.graph if node.op_type == "TopK"}
        for layer in (each for each in self.graph if sorted_indices(each) is not None):
            if layer.input.producer is None or counting(layer.input.producer):  # equal numbers are in the model's order
                continue
            names = (indices[origin] for origin in layer.origin if origin in indices)
            yield from (Sort(name, listing.tops[layer.input]) for name in names)

    def _candidates(self, listing: Listing) -> Iterator[Entry]:
        """Yield the boxes and scores from which the net selects boxes; their Mats have no batch of 1."""
        yield from (_entry(port, listing.tops, {}) for port in self.candidates)
        calls = {node.outputs[0].name: names_of(node.inputs) for node in self.model.graph if node.op_type == SELECTION}
        for port in self.outputs:
            layer = selection(port.blob)
            for name, blob in zip(calls[port.name], decisive(layer), strict=False) if layer else ():
                yield Entry(name, listing.tops[blob], texts((1, *blob.known_shape)), "float32", 0)

    def files(self, prefix: PathLike | None) -> Files:
        """Return the paths PREFIX.ncnn.param, .bin, .json and .tail.onnx."""
        return Files.of(self.model.name if prefix is None else prefix)

    @contextmanager
    def staging(self, prefix: PathLike) -> Iterator[Files]:
        """Stage the files; write the tail, what a client reads, and at last the hashes."""
        files, tail = Files.of(prefix), self.tail
        metadata = self.options.client and ultralytics_yaml(self.model.metadata, self.inputs, self.outputs)
        if metadata and (others := {*files.param.parent.glob("*.param")} - {files.param}):
            raise UsageError(f"client: ultralytics takes any net of a folder, and {min(others)} is another; remove it")
        more = [(files.tail, tail.data)] if tail else []
        more += [(files.param.with_name(METADATA), metadata.encode())] if metadata else []
        with all_or_nothing(files.param, files.bin, *(path for path, _ in more), files.manifest) as staged:
            param, bin, *parts, manifest = staged
            for part, (_, data) in zip(parts, more, strict=True):
                part.write_bytes(data)
            yield Files(param, bin, manifest, parts[0] if tail else files.tail)
            hashes = {"param": file_hash(param), "bin": file_hash(bin)}
            manifest.write_bytes(replace(read_manifest(manifest), sha256=hashes).to_json().encode())
        if tail is None:
            files.tail.unlink(missing_ok=True)  # the tail of an earlier net

    def describe(self, files: Files) -> None:
        """Write the .param and the manifest."""
        listing = write_param(self.graph, files.param)
        files.manifest.write_bytes(self.manifest(listing).to_json().encode())

    def _require_known(self, consequence: str) -> None:
        if self.custom:
            raise VerificationError(f"{consequence}: {NOT_RUN}")

    def _feeds(self, verification: Verification) -> Mapping[Blob, Feed] | Callable[[Draw], Mapping[Blob, Feed]]:
        source, manifest, given = reference(self.source), self.manifest(), verification.feeds

        def by_blob(arrays: Mapping[str, Array]) -> dict[Blob, Feed]:
            feeds = model_feeds([Slot.of(entry) for entry in manifest.inputs], arrays)
            return {port.blob: feeds[entry.blob] for port, entry in zip(self.inputs, manifest.inputs, strict=True)}

        if given is not None:
            return by_blob(any_feeds(source, self.model, manifest, outputs=self.cut, feeds=given))
        sizes = first_sizes(source, self.model, manifest, Draw(verification.seed, plain=True), outputs=self.cut)
        return lambda draw: by_blob(draw_inputs(self.model, sizes, draw=draw))

    def _verify(
        self, files: Files, verification: Verification, worker: NcnnWorker | None, runs: "Future[ModelRuns]"
    ) -> VerifyReport:
        from onnx2ncnn_opt.verification.model import verify_net  # `inspect` and --no-verify do without it

        model, tail = runs.result(), None if self.tail is None else self.tail.data
        manifest = self.manifest()  # masks have changed the names of inner blobs if these are numbers
        model.manifest = manifest.before_boxes
        fixed: dict[str, Any] = {"manifest": manifest, "tail": tail, "worker": worker, "runs": model}
        return verify_net(model.source, files.param, files.bin, model.options, **fixed)

    def begin_runs(self, verification: Verification) -> "Future[ModelRuns]":
        """Start ONNX Runtime's runs of the model for `verify`, in a thread."""
        from onnx2ncnn_opt.verification.model import ModelRuns

        how = replace(verification, outputs=verification.outputs or self.cut)
        return begin(ModelRuns, reference(self.source), how, self.manifest())

    def _time(self, files: Files, verification: Verification, seconds: float) -> Latency:
        model, manifest = reference(self.source), self.manifest()
        feeds, seed = verification.feeds, verification.seed
        arrays = any_feeds(model, self.model, manifest, outputs=self.cut, feeds=feeds, seed=seed)
        blobs = model_feeds([Slot.of(entry) for entry in manifest.inputs], arrays)
        outputs = [entry.blob for entry in manifest.outputs]
        with OrtWorker() as worker, NcnnRunner(files.param, files.bin) as net:
            other = OrtRunner(model, outputs=self.cut, values=self.model.values, fast=True, worker=worker)
            return in_turns(partial(net.time, blobs, outputs), partial(other.time, arrays), seconds)


@takes_options
def lower(model: Any, options: ConvertOptions) -> Conversion:
    """Lower an ONNX model to an ncnn graph, and run the passes; run neither the model nor the net.

    `model` is a path, bytes, onnx.ModelProto, onnx_ir.Model or torch.onnx.ONNXProgram. With torch, it may also be a
    path of a .pt2 file, an ExportedProgram, or a torch.nn.Module with example `inputs` (in order or by name) and
    optional `dynamic_shapes`, as for torch.export.export. The options are the fields of `ConvertOptions` as arguments,
    or one such object. The graph has the masks of layers that fp16 certainly breaks; `Conversion.estimated` finds
    others.

    Raises:
        ModelError: the model is broken or unsafe to open.
        UnsupportedError: ncnn cannot express some nodes; it names all of them.
        UsageError: an option is invalid.
    """
    chosen = entry_points.select(skip=options.skip)
    check_release(options.release)
    encoding = encoding_of(options.storage, options.release)
    images = {name: parse_image(name, image) for name, image in (options.images or {}).items()}
    announce("reading the model")
    source = exported(model, options.inputs, options.dynamic_shapes)
    appended = None if options.append is None else append_decoding(source, options.append, options.shapes)
    known = replace(options, prefix=None, inputs=None, dynamic_shapes=None, append=None, loaded=None, worker=None)
    known = replace(known, **NEEDED.get(options.client or options.append or "", {}))
    request = _Request(
        model=model,
        source=appended.model if appended else source,
        appended=appended,
        options=known,
        images=images,
        chosen=chosen if options.optimize else [],
        encoding=encoding,
    )
    conversion = request.conversion(options.loaded)
    if conversion.model.length is None or not options.optimize or any(cache_pairs(conversion.graph)):
        return conversion
    return request.conversion(stepwise=False)  # no cache needs the input `length`


class _Request(NamedTuple):
    """A model, its ONNX source, and the options of the conversion of the source."""

    model: Any
    source: Any
    appended: Appended | None
    options: ConvertOptions
    images: Mapping[str, Image]
    chosen: Sequence[Pass]
    encoding: Encoding | None
    selects: bool = True  # the net itself may select boxes

    def conversion(self, loaded: LoadedModel | None = None, *, stepwise: bool = True) -> Conversion:
        """Import the model, run the passes, and `finish` the graph."""
        options, release = self.options, self.options.release
        imported = self.imported(loaded, stepwise=stepwise)
        take_pixels(imported, self.images)
        graph, before = imported.graph, count_layers(imported.graph)
        is_dynamic = any(isinstance(size, Sym) for port in imported.inputs for size in port.shape)  # a cache grows
        chosen = [p for p in self.chosen if is_dynamic or p.name != "fuse_kv_cache"]
        events = passes.run(graph, chosen, limit=options.limit, release=release)
        flush_subnormal_operands(graph, release)
        require_release(graph, release)
        join_cache_inputs(graph)
        # A pass may replace an output's blob, but keeps the order of outputs.
        outputs = tuple(port._replace(blob=blob) for port, blob in zip(imported.outputs, graph.outputs, strict=True))
        integers = {port.blob for port in (*imported.inputs, *outputs) if not is_float(port.dtype)}
        if options.quantized == "keep":
            centre(graph)
        storage, masks = finish(
            graph, encoding=self.encoding, masks=options.masks, integers=integers, minimum=imported.minimum
        )
        outputs, candidates = outputs[: (n := len(outputs) - imported.candidates)], outputs[n:]
        inner = {port.blob for port in candidates}
        made = reached(
            inner and after_boxes(graph), lambda x: x.producer.inputs if x.producer and x not in inner else ()
        )
        # Rows depend on candidates alone, and these not on each other. A blob that no layer reads would be an output.
        is_free = not any(inner & computed_from(graph, [blob]) - {blob} for blob in inner)
        if any(blob.is_input for blob in made) or not is_free or not all(blob.users for blob in inner):
            return self._replace(selects=False).conversion(stepwise=stepwise)
        graph.outputs = [port.blob for port in outputs]
        of_model = [info.name for info in imported.tail.outputs] if imported.tail else [port.name for port in outputs]
        places = {port.blob: of_model.index(port.name) for port in outputs if port.name in of_model}
        name_blobs(graph, options.blob_names, places)
        return Conversion(
            imported.model,
            self.source,
            imported.inputs,
            outputs,
            options,
            graph=graph,
            integers={port.blob for port in outputs if not is_float(port.dtype)},
            events=tuple(events),
            layers_before=before,
            cut=imported.tail.cut if imported.tail else tuple(options.outputs),
            storage=storage,
            custom=imported.custom,
            minimum=imported.minimum,
            cases=imported.cases,
            masks=masks,
            images=self.images,
            appended=self.appended,
            tail=imported.tail,
            kept=imported.kept,
            candidates=candidates,
        )

    def imported(self, loaded: LoadedModel | None, *, stepwise: bool) -> Imported:
        """Import the model; load it from its source unless it is `loaded`."""
        options, importers, custom = self.options, entry_points.installed_ops(), parse_custom(self.options.custom)
        if loaded is None or importers or self.appended:  # the loaded model lacks functions of importers
            opaque = {(op.domain, op.name) for op in importers} | {(op.domain, op.name) for op in custom}
            bindings: dict[str, Any] = {x: getattr(options, x) for x in ("shapes", "values", "outputs")}
            opaque |= {(OWN, SELECTION)} if self.selects else set()
            loaded = load_model(self.source, opaque=opaque, stepwise=stepwise, **bindings)
        if self.source is not self.model and isinstance(self.model, (str, os.PathLike)):
            sha256 = file_hash(Path(self.model))
            loaded = replace(loaded, digest=lambda: sha256)
        at_run_time = {node.op_type for node in loaded.graph if node.op_type in AT_RUN_TIME}
        # ncnn cannot round the states of an LSTM, so the roundings around it would make nothing exact.
        is_kept = (options.quantized == "keep" or AT_RUN_TIME[1] in at_run_time) and without_rounding(loaded.graph)
        for node in loaded.graph if options.quantized == "float" else ():
            node.meta.pop(INT8, None)
        announce("making layers of the operators")
        axes: dict[str, Any] = {"batch_axes": options.batch_axes, "types": entry_points.layer_types()}
        if options.client:
            axes["output_axes"] = {x.name: 0 for x in loaded.outputs if x.shape and x.shape[0] == 1}
        selects = any(node.op_type == SELECTION for node in loaded.graph)
        tail = "never" if selects else options.tail
        try:
            with for_ultralytics(loaded.metadata) if options.client else nullcontext():
                imported = import_model(loaded, **axes, custom=custom, tail=tail, selects=self.selects)
        except UnsupportedError:
            if not selects:
                raise
            return self._replace(selects=False).imported(None, stepwise=stepwise)  # a tail selects the boxes, too
        if not is_kept or at_run_time or "" in imported.kept.values():
            return imported
        as_float = self._replace(options=replace(options, quantized="float"))
        return as_float.imported(None, stepwise=stepwise)  # no product became int8


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
    options = replace(
        conversion.options,
        shapes=conversion.model.given,
        values=conversion.model.values,
        outputs=conversion.cut,
        batch_axes={port.name: port.batch_axis for port in conversion.inputs},
        optimize=False,
        release=NEWEST,
        storage=None,
        masks=False,
        tail="never",
    )
    return lower(conversion.source, options)


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
