"""The Python interface: convert a model, look at its graph, verify it, save it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx2ncnn_opt import entry_points, passes
from onnx2ncnn_opt.errors import (
    ConversionError,
    Error,
    Unsupported,
    UnsupportedError,
    UsageError,
    VerificationError,
    check_option,
    check_options,
)
from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym
from onnx2ncnn_opt.ir.graph import Blob, Graph
from onnx2ncnn_opt.ir.releases import NEWEST, check_release, least_release, too_new
from onnx2ncnn_opt.manifest import Bound, Image, LayerCount, Manifest, Masked, Source, Tensor, file_hash
from onnx2ncnn_opt.onnx.custom import CustomOp, parse_custom
from onnx2ncnn_opt.onnx.importer import Port, import_model
from onnx2ncnn_opt.onnx.read.exported import exported, reference
from onnx2ncnn_opt.onnx.read.given import GivenShapes
from onnx2ncnn_opt.onnx.read.load import LoadedModel, load_model
from onnx2ncnn_opt.onnx.value import is_float
from onnx2ncnn_opt.param.files import NetFiles, all_or_nothing, write_staged
from onnx2ncnn_opt.param.names import clean_name
from onnx2ncnn_opt.param.splits import count_layers, list_layers
from onnx2ncnn_opt.param.storage import ROUNDING, Storage, encoding_of, plan_storage
from onnx2ncnn_opt.preprocessing import parse_image, take_pixels
from onnx2ncnn_opt.rewrite.events import Event, Rewritten
from onnx2ncnn_opt.rewrite.masks import Mask, added_inputs, prove_masks, put_masks
from onnx2ncnn_opt.version import __version__

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Unpack

    from onnx2ncnn_opt.outputs import Latency
    from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
    from onnx2ncnn_opt.verification.inputs import Feeds
    from onnx2ncnn_opt.verification.masks import Precision
    from onnx2ncnn_opt.verification.verify import VerifyOptions, VerifyReport

NOT_RUN = "what custom operators compute is not known here"


@dataclass(frozen=True)
class Files(NetFiles):
    """The files of a net, and its manifest."""

    manifest: Path

    @classmethod
    def of(cls, prefix: str | os.PathLike[str]) -> Files:
        """PREFIX.ncnn.param, PREFIX.ncnn.bin and PREFIX.ncnn.json."""
        base = f"{os.fspath(prefix)}.ncnn"
        net = NetFiles.at(base)
        return cls(net.param, net.bin, Path(f"{base}.json"))


@dataclass(frozen=True, eq=False)
class Conversion(Rewritten):
    """A converted model, in memory.

    `graph` is the ncnn graph after the passes, `inputs` and `outputs` say how the model's arrays go in and out,
    `events` what the passes did and what they nearly did. `layers_before` counts the layers that would have been
    written without passes. `custom` says which operators became layers of their own, and what their parameters are.
    `minimum` are dynamic dimensions that must not be smaller. `masks` are the layers that fp16 is not enough for, and
    `precision` is what fp16 does to the net, if that was estimated. `images` are the inputs that take pixels.
    """

    model: LoadedModel
    source: Any
    graph: Graph
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    events: tuple[Event, ...]
    layers_before: int
    cut: tuple[str, ...] = ()
    release: int = NEWEST
    storage: Storage | None = None
    custom: tuple[CustomOp, ...] = ()
    minimum: Mapping[Dim, int] = field(default_factory=dict)
    masks: tuple[Mask, ...] = ()
    precision: Precision | None = None
    images: Mapping[str, Image] = field(default_factory=dict)

    def __repr__(self) -> str:
        shapes = "; ".join(f"{p.name} [{', '.join(map(str, p.shape))}]" for p in (*self.inputs, *self.outputs))
        return f"Conversion({self.model.name}: {self.layers_before} -> {count_layers(self.graph)} layers, {shapes})"

    @property
    def fed_masks(self) -> list[str]:
        """The inputs that are added to scores, by name."""
        added = added_inputs(self.graph)
        return [port.name for port in self.inputs if port.blob in added]

    def manifest(self, names: Mapping[Blob, str] | None = None) -> Manifest:
        """What PREFIX.ncnn.json says; `names` are the blobs' names in the .param file where they differ."""
        listing = list_layers(self.graph)
        known = names or listing.names
        return Manifest(
            inputs=tuple(replace(_entry(p, known), image=self.images.get(p.name)) for p in self.inputs),
            outputs=tuple(_entry(port, known) for port in self.outputs),
            source=Source(self.model.source_sha256, self.model.opsets.get("", 1)),
            tool=f"onnx2ncnn-opt {__version__}",
            ncnn=str(self.release),
            layers=LayerCount(self.layers_before, len(listing.lines)),
            passes=tuple(dict.fromkeys(event.pass_name for event in self.applied)),
            values=tuple(Bound.of(name, array) for name, array in self.model.values.items()),
            masks=tuple(Masked(clean_name(m.layer), int(m.features), m.reason, m.largest) for m in self.masks),
            minimum={str(size): least for size, least in self.minimum.items()},
            least_ncnn=str(least_release(self.graph)),
        )

    @contextmanager
    def staged(self, prefix: str | os.PathLike[str]) -> Iterator[Files]:
        """The files under temporary names, which are renamed when the block ends without an error."""
        files = Files.of(prefix)
        with all_or_nothing(files.param, files.bin, files.manifest) as (param, bin, manifest):
            names = write_staged(self.graph, param, bin)
            manifest.write_text(self.manifest(names).to_json())
            yield Files(param, bin, manifest)

    def save(self, prefix: str | os.PathLike[str]) -> Files:
        """Write PREFIX.ncnn.param, PREFIX.ncnn.bin and PREFIX.ncnn.json: all of them, or none."""
        check_options(prefix=prefix)
        with self.staged(prefix):
            pass
        return Files.of(prefix)

    def estimated(
        self,
        *,
        feeds: Feeds | None = None,
        seed: int = 0,
        masks: bool = True,
        worker: NcnnWorker | None = None,
    ) -> Conversion:
        """The conversion after ncnn has run the net as if in fp16: with the `masks` that it needs, and `precision`.

        `feeds` are the inputs by ONNX name, or an .npz file of them; ordinary and large ones are drawn from `seed`
        otherwise. `worker` is a process to use again. Raises RunError where ncnn cannot run the net, and
        VerificationError where that is not known of `custom` operators.
        """
        from onnx2ncnn_opt.runtime.base import Feed  # both runtimes
        from onnx2ncnn_opt.verification.estimate import Estimator
        from onnx2ncnn_opt.verification.inputs import draws
        from onnx2ncnn_opt.verification.masks import find_masks, measure
        from onnx2ncnn_opt.verification.runs import any_feeds, drawn_feeds

        check_options(seed=seed)
        if self.custom:
            raise VerificationError(f"nothing can be estimated: {NOT_RUN}")
        source, manifest = reference(self.source), self.manifest()
        if feeds is None:
            wanted = draws(seed, is_small=False)
            fed = drawn_feeds(source, self.model, manifest, wanted, outputs=self.cut)
        else:
            fed = [any_feeds(source, self.model, manifest, outputs=self.cut, feeds=feeds)]
        runs: list[dict[Blob, Feed]] = []
        for given in fed:
            pixels = {name: image.pixels(given[name]) for name, image in self.images.items()}
            runs.append({port.blob: Feed({**given, **pixels}[port.name], port.batch_axis) for port in self.inputs})
        integers = {port.blob for port in self.outputs if not is_float(port.dtype)}
        with Estimator(self.graph, runs[0], worker=worker) as estimator:
            estimators = [estimator.on(run) for run in runs]
            if not masks:
                return replace(self, precision=measure(*estimators, integers=integers))
            found, precision = find_masks(*estimators, integers=integers)
        put_masks(self.graph, ((layer, mask.features) for layer, mask in found.items()))
        return replace(self, masks=(*self.masks, *found.values()), precision=precision)

    def verify(self, **options: Unpack[VerifyOptions]) -> VerifyReport:
        """Compare the net with ONNX Runtime on the original model; options as `verify_net` takes them.

        Raises VerificationError where there is nothing to compare with: nobody here can run `custom` operators.
        """
        with tempfile.TemporaryDirectory(prefix="onnx2ncnn-opt-") as folder:
            files = self.save(Path(folder) / "net")
            return self.verify_files(files, **options)

    def verify_files(self, files: Files, **options: Unpack[VerifyOptions]) -> VerifyReport:
        """As `verify`, for files that are written already."""
        from onnx2ncnn_opt.verification.compare import with_rounding
        from onnx2ncnn_opt.verification.comparison import tolerance_of  # both runtimes
        from onnx2ncnn_opt.verification.verify import verify_net

        if self.custom:
            raise VerificationError(f"the net cannot be verified: {NOT_RUN}")

        options = {"outputs": self.cut, **options}
        if self.storage is not None and "tolerance" not in options:
            usual = tolerance_of(self.model)
            options["tolerance"] = with_rounding(ROUNDING[self.storage.encoding], self.storage.depth, usual)
        return verify_net(reference(self.source), files.param, files.bin, manifest=self.manifest(), **options)

    def benchmark(
        self,
        files: Files | None = None,
        *,
        feeds: Feeds | None = None,
        seed: int = 0,
        seconds: float = 2.0,
    ) -> Latency:
        """Time the net beside ONNX Runtime: one thread of this machine each, in fp32, in turns, for some `seconds`.

        `files` are those of the net, if they are written already; `feeds` and `seed` are as for `estimated`. Raises
        RunError where either cannot run it, and VerificationError for `custom` operators.
        """
        from onnx2ncnn_opt.runtime.ncnn import NcnnRunner
        from onnx2ncnn_opt.runtime.ort import OrtRunner, OrtWorker
        from onnx2ncnn_opt.runtime.slots import Slot, model_feeds
        from onnx2ncnn_opt.verification.latency import in_turns
        from onnx2ncnn_opt.verification.runs import any_feeds

        check_options(seconds=seconds)
        if self.custom:
            raise VerificationError(f"the net cannot be timed: {NOT_RUN}")
        if files is None:
            with tempfile.TemporaryDirectory(prefix="onnx2ncnn-opt-") as folder:
                saved = self.save(Path(folder) / "net")
                return self.benchmark(saved, feeds=feeds, seed=seed, seconds=seconds)
        model, manifest = reference(self.source), self.manifest()
        given = any_feeds(model, self.model, manifest, outputs=self.cut, feeds=feeds, seed=seed)
        blobs = model_feeds([Slot.of(entry) for entry in manifest.inputs], given)
        outputs = [entry.blob for entry in manifest.outputs]
        worker = OrtWorker()
        try:
            other = OrtRunner(model, outputs=self.cut, values=self.model.values, fast=True, worker=worker)
            with NcnnRunner(files.param, files.bin) as net:
                return in_turns(partial(net.time, blobs, outputs), partial(other.time, given), seconds)
        finally:
            worker.close()


def convert(
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
    masks: bool = True,
    images: Mapping[str, Image | str] | None = None,
    step: Callable[[str], None] = lambda text: None,
) -> Conversion:
    """Convert an ONNX model to an ncnn graph.

    `model` is a path, bytes, onnx.ModelProto, onnx_ir.Model or torch.onnx.ONNXProgram; or, where torch is installed, a
    path of a .pt2 file, a torch.export.ExportedProgram, or a torch.nn.Module with example `inputs` (in order or by
    name) and perhaps `dynamic_shapes`, as torch.export.export takes them. `shapes` binds the sizes of inputs by name: a
    number, a name (equal names are equal sizes), a sum of names such as "P+S", or None for what the model says; dynamic
    dimensions that stay are dynamic in the net too. `values` binds whole inputs to a number, bool or array, which
    become constants: {"sr": 16000}. `outputs` are values to convert up to, instead of the model's outputs. `batch_axes`
    says for inputs by name which axis is the Mat's batch count, None for none. `skip` names passes to leave out,
    `limit` stops after so many rewrites. `release` (YYYYMMDD) is the oldest ncnn that has to run the net. `storage`
    "fp16" or "bf16" stores weights in 16 bits where they survive it. `custom` names operators that become layers of
    their own, like "my.domain::MyOp=MyLayer:alpha,beta" (see docs/plugins.md). `masks` gives feature masks to layers
    that fp16 is certainly not enough for; `Conversion.estimated` finds the others. `images` are inputs by name that the
    net is to take as pixels of 0..255, with what the model wants done to them: an `Image`, or text such as
    "mean=123.7,116.3,103.5:std=58.4,57.1,57.4:bgr". `step` is told what is being done.

    Raises:
        ModelError: the model is broken or unsafe to open.
        UnsupportedError: ncnn cannot express some nodes; it names all of them.
        UsageError: `shapes`, `values`, `outputs`, `batch_axes`, `skip`, `storage`, `custom` or `images` do not fit.
    """
    check_options(shapes=shapes, values=values, outputs=outputs, batch_axes=batch_axes, skip=skip, limit=limit)
    check_options(images=images, step=step)
    check_option("names", "custom", custom)
    for name, sizes in (shapes or {}).items():
        check_option("list", f"shapes['{name}']", sizes)
    for name, axis in (batch_axes or {}).items():
        if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int)):
            raise UsageError(f"batch_axes['{name}'] has to be an axis or None, not {axis!r:.80}")
    chosen = entry_points.select(skip=skip)
    check_release(release)
    encoding = encoding_of(storage, release)
    requested = parse_custom(custom)
    entry_points.installed_ops()
    step("reading the model")
    source = exported(model, inputs, dynamic_shapes)
    loaded = load_model(
        source, shapes=shapes, values=values, outputs=outputs, opaque={(op.domain, op.name) for op in requested}
    )
    if source is not model and isinstance(model, (str, os.PathLike)):
        sha256 = file_hash(Path(model))
        loaded = replace(loaded, digest=lambda: sha256)
    step("making layers of the operators")
    imported = import_model(loaded, batch_axes=batch_axes, types=entry_points.layer_types(), custom=requested)
    wanted = {name: parse_image(name, image) for name, image in (images or {}).items()}
    take_pixels(imported, wanted)
    before = count_layers(imported.graph)
    events = passes.run(imported.graph, chosen, limit=limit, release=release, step=step) if optimize else []
    _require_release(imported.graph, release)
    plan = plan_storage(imported.graph, encoding) if encoding else None
    if plan:
        plan.apply()
    # A pass may put another blob in an output's place, but keeps their order.
    ports = zip(imported.outputs, imported.graph.outputs, strict=True)
    results = tuple(port._replace(blob=blob) for port, blob in ports)
    integers = {port.blob for port in (*imported.inputs, *results) if not is_float(port.dtype)}
    proved = prove_masks(imported.graph, integers=integers) if masks else {}
    put_masks(imported.graph, ((layer, mask.features) for layer, mask in proved.items()))
    return Conversion(
        model=loaded,
        source=source,
        graph=imported.graph,
        inputs=imported.inputs,
        outputs=results,
        events=tuple(events),
        layers_before=before,
        cut=tuple(outputs),
        release=release,
        storage=plan,
        custom=imported.custom,
        masks=tuple(proved.values()),
        minimum=imported.minimum,
        images=wanted,
    )


def reconverted(model: Path | bytes, manifest: Manifest) -> Conversion | None:
    """The model converted anew with the passes that the manifest names; None where it would not be the same net."""
    named = {entry.name: entry for entry in manifest.inputs}
    try:
        conversion = convert(
            model,
            shapes={name: entry.shape for name, entry in named.items()},
            values={value.name: value.array() for value in manifest.values},
            batch_axes={name: entry.batch_axis for name, entry in named.items()},
            images={name: entry.image for name, entry in named.items() if entry.image},
            skip=[p.name for p in entry_points.pipeline() if p.name not in manifest.passes],
            release=int(manifest.ncnn),
        )
    except (ConversionError, UsageError, ValueError):  # another version's manifest may ask for what this one has not
        return None
    return conversion if conversion.manifest().layers == manifest.layers else None


def unoptimised(conversion: Conversion) -> Conversion:
    """The model converted as it was, without passes and without 16 bit weights."""
    return convert(
        conversion.source,
        shapes=conversion.model.given,
        values=conversion.model.values,
        outputs=conversion.cut,
        batch_axes={port.name: port.batch_axis for port in conversion.inputs},
        optimize=False,
        images=conversion.images,
        custom=[op.request for op in conversion.custom],
        masks=False,
    )


def cost_of_dynamic(conversion: Conversion, *, ran_at: Mapping[str, int] | None = None, **options: Any) -> list[str]:
    """What it costs that dimensions are dynamic, and how to fix them: a line for the batch, and one for the others.

    There is no line where it costs no layer, nor for a batch that is no part of the net. The model is converted once
    more with a batch of one, and once with the sizes of the others that it `ran_at`, each with the `options` that
    `convert` had.
    """
    fixed: dict[str, Dim] = {}
    free = {p.free_batch for p in conversion.inputs}
    first = {str(p.shape[0]) for p in conversion.inputs if len(p.shape) > 1 and isinstance(p.shape[0], Sym)}
    batch = dict.fromkeys(sorted(first - free), 1)
    names = {name for p in conversion.inputs for size in p.shape if isinstance(size, Sym) for name in size.names()}
    names -= free
    others = {name: size for name, size in (ran_at or {}).items() if name in names - set(batch)}
    if not batch and not others:
        return []
    lines, layers = [], count_layers(conversion.graph)
    for sizes in [each for each in (batch, others) if each]:
        fixed |= sizes
        shapes = {
            port.name: [size.subs(fixed) if isinstance(size, Sym) else size for size in port.shape]
            for port in conversion.inputs
            if any(isinstance(size, Sym) and not size.names().isdisjoint(fixed) for size in port.shape)
        }
        try:
            other = convert(conversion.source, shapes={**conversion.model.given, **shapes}, **options)
            count = count_layers(other.graph)
        except Error:  # they cannot be fixed so
            continue
        cost, layers = layers - count, count
        if cost > 0:
            more = "1 layer" if cost == 1 else f"{cost} layers"
            verb, them = ("is", "it") if len(sizes) == 1 else ("are", "them")
            ports = [port for port in conversion.inputs if port.name in shapes]
            known = conversion.model.given
            given = " ".join(_shape_option(p, shapes[p.name], is_given=p.name in known) for p in ports)
            how = given if sizes is batch else f"your sizes, as in {given}"
            lines.append(f"{', '.join(sizes)} {verb} dynamic, which costs {more}; fix {them} with {how}")
    return lines


def _shape_option(port: Port, sizes: Sequence[Dim], *, is_given: bool) -> str:
    """What binds an input to these sizes, ``?`` where they are the model's; instead of a shape that `is_given`."""
    known = zip(sizes, port.shape, strict=True)
    texts = ("?" if size == before and not is_given else str(size).replace(" ", "") for size, before in known)
    return f"--shape {port.name}:{','.join(texts)}"


def _require_release(graph: Graph, release: int) -> None:
    nodes = [
        Unsupported(", ".join(layer.origin) or layer.name, layer.type, reason)
        for layer in graph
        if (reason := too_new(layer, release)) is not None
    ]
    if nodes:
        raise UnsupportedError(nodes)


def _entry(port: Port, names: Mapping[Blob, str]) -> Tensor:
    return Tensor(port.name, names[port.blob], _sizes(port.shape), _dtype(port.dtype), port.batch_axis, port.element)


def _sizes(shape: Shape) -> tuple[int | str | None, ...]:
    return tuple(size if isinstance(size, int) else str(size) for size in shape)


def _dtype(dtype: np.dtype[np.generic]) -> str:
    return dtype.name
