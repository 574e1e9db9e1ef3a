"""Converting a model or net to int8 layers, with scales from data or from a quantised model."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from onnx2ncnn_opt.api.convert import convert
from onnx2ncnn_opt.api.lower import Conversion, Files
from onnx2ncnn_opt.api.options import ConvertOptions
from onnx2ncnn_opt.errors import UsageError, VerificationError
from onnx2ncnn_opt.inputs.draws import Draw, draw_inputs
from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.ir.int8 import NO_SCALE, is_exact, rows_of
from onnx2ncnn_opt.ir.releases import least_release
from onnx2ncnn_opt.manifest import Entry, Int8, Int8Layer, Manifest, read_manifest
from onnx2ncnn_opt.onnx.edit.quantized import Int8 as Int8Product
from onnx2ncnn_opt.onnx.edit.quantized import float_model, scales_of_products
from onnx2ncnn_opt.onnx.read.load import load_model
from onnx2ncnn_opt.param.files import NetFiles, PathLike, bin_beside, read_graph, write_net, write_staged
from onnx2ncnn_opt.progress import announce
from onnx2ncnn_opt.quantization.data import Samples
from onnx2ncnn_opt.quantization.emit import Scales, obstacle
from onnx2ncnn_opt.quantization.quantize import Budget, Options, Quantized, quantize_net
from onnx2ncnn_opt.runtime.base import Feed
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.runtime.slots import Slot, feeds_of
from onnx2ncnn_opt.system import temporary_folder
from onnx2ncnn_opt.verification.sqnr import Agreement

_DRAWS = 8
_TOLERANCE = 0.5  # decibels that the int8 net may be worse than ONNX Runtime's int8


@dataclass(frozen=True)
class Quantization:
    """An int8 net in memory. `result` has its graph and measurements; the other fields describe the float net."""

    result: Quantized
    manifest: Manifest | None = None
    conversion: Conversion | None = None

    @property
    def graph(self) -> Graph:
        """The int8 net."""
        return self.result.graph

    @property
    def layers(self) -> tuple[Int8Layer, ...]:
        """The layers that could be int8; those that stay float have the reason."""
        return self.result.layers

    def save(self, prefix: PathLike, *, keep_failed: bool = False) -> NetFiles | Files:
        """Write PREFIX.ncnn.param, .bin and .json for a model, or PREFIX.param and .bin for a net: all files or none.

        Raises VerificationError for a net that misses its budget, unless `keep_failed`.
        """
        if self.result.missed and not keep_failed:
            raise VerificationError(f"no int8 net was written: {self.result.missed}")
        if self.manifest is None or self.conversion is None:
            plain = NetFiles.at(prefix)
            write_net(self.graph, plain.param, plain.bin)
            return plain
        with self.conversion.staging(prefix) as files:
            write_staged(self.graph, files.param, files.bin)
            files.manifest.write_bytes(self.manifest.to_json().encode())
        return Files.of(prefix)


@dataclass(frozen=True)
class _Feeds(Sequence[dict[str, Feed]]):
    """Samples as feeds of a net, each read at access."""

    samples: Samples
    entries: Sequence[Entry]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: Any) -> Any:
        return feeds_of([Slot.of(entry) for entry in self.entries], self.samples[index])


def quantize(
    net: Any,
    data: Any = None,
    *,
    bin: PathLike | None = None,
    keep: Collection[str] = (),
    budget: Budget | str | None = None,
    every: bool = False,
    weights: str | None = None,
    like: PathLike | None = None,
    on: str | None = None,
    conversion: ConvertOptions = ConvertOptions(),
) -> Quantization:
    """Quantise an ONNX model, or an ncnn net NET.param with its weights `bin`.

    `data` is an .npz, a folder of arrays or pictures, ``module:function``, a mapping of arrays whose first axis counts
    samples, or an iterable of samples. A model is first converted and verified with the options `conversion`. Layers
    that are faster in int8 on this machine become int8, or `every` layer; `keep` names layers that stay float. A
    `budget`, ``40dB`` or ``top1=0.99``, is the required agreement with the float net: layers become float again until
    it is met. `weights` "int8" gives a Gemm and attention one scale, "block8" one for each 64 numbers of a row; the
    default is blocks, or one scale if only that is faster. `like` is
    the .param of an earlier int8 net: the same layers get the same forms, without measuring times. Times are measured
    `on` a target (`Verification.on`); an emulated one has no times, and needs `every` or `like`.

    A model that is quantised already (QDQ, QOperator) keeps its scales and needs no data, unless it computes scales at
    run time. The float net is the model without its roundings. The int8 net may be half a decibel farther from it than
    the model in ONNX Runtime is.

    Raises the errors of `convert`, UsageError for data that does not fit, and RunError if ncnn cannot run the net.
    """
    options = Options(keep, every=every, weights=weights, like=like, on=on)
    options = replace(options, budget=Budget.parse(budget) if isinstance(budget, str) else budget or Budget())
    net = Path(net) if isinstance(net, str) else net
    with temporary_folder() as folder:
        if isinstance(net, Path) and net.name.endswith((".param", ".param.bin")):
            pairs = {x.name: (getattr(conversion, x.name) or None, x.default or None) for x in fields(conversion)}
            if given := [name for name, (value, default) in pairs.items() if value != default]:
                raise UsageError(f"{', '.join(given)} of a conversion: there is none of a net")
            return _of_net(net, bin_beside(net) if bin is None else Path(bin), data, options)
        return _of_model(net, data, options, conversion, Path(folder) / "float")


def _of_model(net: Any, data: Any, options: Options, conversion: ConvertOptions, prefix: Path) -> Quantization:
    """Quantise a model; its float net is in files with this prefix meanwhile."""
    float_source, products = _without_quantisation(net)
    has_scales = any(product.input_scale for product in products.values())
    if data is None and not has_scales:
        raise UsageError("quantize needs samples: give an .npz or a folder as data (--data)")
    float_net = convert(net if float_source is None else float_source, conversion)
    if float_net.report is None:
        raise UsageError("quantize needs a verification of the float net")
    float_net.report.check()
    files, manifest = float_net.save(prefix), float_net.manifest()
    if data is None:  # random inputs, as verification draws them
        data = [draw_inputs(float_net.model, draw=Draw(seed, plain=True)) for seed in range(_DRAWS)]
    samples = Samples(data, manifest.model_inputs)
    announce("quantising")
    notes: list[str] = []
    given: Mapping[str, Scales | str] | None = None
    if has_scales:
        decibels = _runtime_decibels(net, float_net, samples)
        notes = [f"ONNX Runtime's own int8 is {decibels:.1f} dB from the float model"]
        given = _model_scales(float_net.graph, products)
        options = replace(options, every=True)
        if options.budget == Budget():
            options = replace(options, budget=Budget(decibels=decibels - _TOLERANCE, other_data=False))
    feeds = _Feeds(samples, manifest.inputs)
    result = quantize_net(files.param, files.bin, feeds, options, given=given, release=float_net.options.release)
    result = replace(result, notes=(*result.notes, *notes))
    if float_source is not None:
        manifest = replace(manifest, source=replace(manifest.source, sha256=load_model(net).digest()))
    manifest = replace(
        manifest,
        passes=(*manifest.passes, "quantize"),
        least_ncnn=max(manifest.least_ncnn, str(least_release(result.graph))),
        int8=Int8(
            result.layers,
            _finite(result.decibels),
            result.top1,
            result.samples,
            _finite(result.seconds),
            result.times,
        ),
    )
    return Quantization(result, manifest, float_net)


def _finite(value: Any) -> Any:
    """Return a number or a pair of numbers; None if it is not finite."""
    return value if np.isfinite(value).all() else None


def _without_quantisation(net: Any) -> tuple[bytes | None, Mapping[str, Int8Product]]:
    """Return the float model of a quantised model, and the scales of its products by node; None for other models."""
    graph = load_model(net).graph if isinstance(net, (Path, bytes)) else None
    model = None if graph is None else float_model(graph)
    return model, {} if graph is None or model is None else scales_of_products(graph)


def _model_scales(graph: Graph, products: Mapping[str, Int8Product]) -> dict[str, Scales | str]:
    """Return the model's scales of layers by name, or the reason why there are none."""
    found: dict[str, Scales | str] = {}
    for layer in graph:
        item = next((products[name] for name in layer.origin if name in products), None)
        if item is not None and (item.reason or not item.input_scale):
            found[layer.name] = item.reason or NO_SCALE
        elif item is not None and not obstacle(layer):
            rows, by_row = rows_of(layer), item.scales
            fits = by_row.size in (1, len(rows))  # a pass may have scaled the weights
            exact = fits and is_exact(rows, np.broadcast_to(by_row, len(rows)))
            found[layer.name] = Scales(item.input_scale, rows=np.broadcast_to(by_row, len(rows)) if exact else None)
    return found


def _runtime_decibels(net: Any, float_net: Conversion, samples: Samples) -> float:
    """Return the decibels from the float model to the quantised model, both in ONNX Runtime, at the worst output."""
    outputs = [info.name for info in float_net.model.outputs]
    with_scales, without = (OrtRunner(source, once=True) for source in (net, float_net.source))
    agreement = Agreement()
    for arrays in samples:
        a, b = without.run_any(arrays), with_scales.run_any(arrays)
        agreement.add({name: a[name] for name in outputs}, b)
    for session in (with_scales, without):
        session.close()
    return agreement.decibels


def _of_net(param: Path, bin: Path, data: Any, options: Options) -> Quantization:
    """Quantise a net of any converter; the shapes of its inputs come from its manifest or from the data."""
    if (path := bin_beside(param).with_suffix(".json")).is_file():
        manifest = read_manifest(path)
        feeds = _Feeds(Samples(data, manifest.model_inputs), manifest.inputs)
        return Quantization(quantize_net(param, bin, feeds, options))
    blobs = [blob.name for blob in read_graph(param).inputs]
    source = np.load(data) if isinstance(data, (str, Path)) and str(data).endswith(".npz") else data
    if not isinstance(source, Mapping):
        raise UsageError(f"{param} has no manifest; give an .npz with arrays {', '.join(blobs)}, the first axis counts")
    arrays = {name: np.asarray(source[name]) for name in source}
    entries = [
        Entry(name, name, (None,) * (array.ndim - 1), "int32" if array.dtype.kind in "iub" else "float32", None)
        for name, array in arrays.items()
        if name in blobs
    ]
    if {entry.name for entry in entries} != set(blobs):
        raise UsageError(f"the net has the inputs {', '.join(blobs)}; given are {', '.join(arrays) or 'none'}")
    feeds = _Feeds(Samples(arrays, entries), entries)
    return Quantization(quantize_net(param, bin, feeds, options))
