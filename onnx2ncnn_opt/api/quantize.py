"""A model or net with int8 layers: from data, or with the scales that a quantised model has."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from onnx2ncnn_opt.api.apply_passes import PathLike
from onnx2ncnn_opt.api.convert import convert
from onnx2ncnn_opt.api.lower import Conversion, Files
from onnx2ncnn_opt.errors import UsageError, VerificationError
from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.ir.int8 import NO_SCALE, is_exact
from onnx2ncnn_opt.ir.releases import least_release
from onnx2ncnn_opt.manifest import Entry, Int8, Int8Layer, Manifest, read_manifest
from onnx2ncnn_opt.onnx.read.load import load_model
from onnx2ncnn_opt.onnx.read.quantized import Int8 as Int8Product
from onnx2ncnn_opt.onnx.read.quantized import float_model, scales_of_products
from onnx2ncnn_opt.param.files import NetFiles, all_or_nothing, bin_beside, read_graph, write_net, write_staged
from onnx2ncnn_opt.progress import announce, up_to
from onnx2ncnn_opt.quantization.data import Samples
from onnx2ncnn_opt.quantization.emit import Scales, obstacle, rows_of
from onnx2ncnn_opt.quantization.quantize import WEIGHTS, Budget, Quantized, Row, quantize_net
from onnx2ncnn_opt.quantization.thresholds import METHODS
from onnx2ncnn_opt.runtime.base import Feed
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.runtime.slots import Slot, feeds_of
from onnx2ncnn_opt.system import temporary_folder
from onnx2ncnn_opt.verification.agreement import Agreement
from onnx2ncnn_opt.verification.inputs import Draw, draw_inputs

_CONVERTED = 0.3  # of the work
_DRAWS = 8
_ROOM = 0.5  # decibels


@dataclass(frozen=True)
class Quantization:
    """An int8 net in memory. `result` has its layers and numbers; the others are those of the float net."""

    result: Quantized
    manifest: Manifest | None = None
    tail: bytes = b""
    conversion: Conversion | None = None

    @property
    def graph(self) -> Graph:
        """The int8 net."""
        return self.result.graph

    @property
    def layers(self) -> tuple[Row, ...]:
        """The layers that could be int8, and those that stay float, with the reason."""
        return self.result.layers

    def save(self, prefix: PathLike, *, keep_failed: bool = False) -> NetFiles | Files:
        """Write PREFIX.ncnn.param, .bin and .json of a model, or PREFIX.param and .bin of a net: all files or none.

        Raises VerificationError for a net that misses its budget, unless `keep_failed`.
        """
        if self.result.missed and not keep_failed:
            raise VerificationError(f"no int8 net was written: {self.result.missed}")
        if self.manifest is None:
            plain = NetFiles.at(prefix)
            write_net(self.graph, plain.param, plain.bin)
            return plain
        files = Files.of(prefix)
        with all_or_nothing(*(astuple(files) if self.tail else astuple(files)[:-1])) as (param, bin, manifest, *tail):
            write_staged(self.graph, param, bin)
            manifest.write_bytes(self.manifest.to_json().encode())
            if tail:
                tail[0].write_bytes(self.tail)
        return files


class _Feeds(Sequence[dict[str, Feed]]):
    """Samples as feeds of a net, each read when it is asked for."""

    def __init__(self, samples: Samples, slots: Sequence[Slot]) -> None:
        self._samples, self._slots = samples, slots

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: Any) -> Any:
        return feeds_of(self._slots, self._samples[index])

    def __iter__(self) -> Iterator[dict[str, Feed]]:
        return (self[i] for i in range(len(self)))


def quantize(  # noqa: PLR0913
    net: Any,
    data: Any = None,
    *,
    bin: PathLike | None = None,
    method: str = "mse",
    keep: Collection[str] = (),
    budget: Budget | str | None = None,
    every: bool = False,
    weights: str | None = None,
    table: PathLike | None = None,
    like: PathLike | None = None,
    on: str | None = None,
    **conversion: Any,
) -> Quantization:
    """Quantise an ONNX model, or an ncnn net NET.param with its weights `bin`.

    `data` is an .npz, a folder of arrays or pictures, ``module:function``, a mapping of arrays whose first axis counts
    samples, or an iterable of samples. A model is converted and verified first, with the options of `convert`, as
    `shapes` or `images`. Layers become int8 that are faster so on this machine, or `every` layer; `keep` names layers
    that stay float. With a `budget`, ``40dB`` or ``top1=0.99``, layers stay float until the outputs agree so far with
    the float net. `weights` "int8" gives a Gemm and attention one scale, "block8" one for each 64 numbers of a row; by
    default blocks, and one scale where only that is faster. A `table` of ncnn2table gives the scales of the layers that
    are in it. `like` is the .param of an earlier int8 net: its layers become int8, in its forms, and no time decides.
    Times are measured `on` a target of `Verification.on`; for an emulated one a table of kernels decides.

    A model that is quantised already (QDQ, QOperator) keeps its scales and needs no data, unless it finds them at run
    time. The float net is that of the model without its roundings, and the int8 net has to be as near to it as the
    model is in ONNX Runtime, less half a decibel.

    Raises the errors of `convert`, UsageError for data that does not fit, and RunError if ncnn cannot run the net.
    """
    if method not in METHODS:
        raise UsageError(f"method is {', '.join(METHODS)}, not {method!r:.40}")
    if weights not in (None, *WEIGHTS):
        raise UsageError(f"weights are {' or '.join(WEIGHTS)}, not {weights!r:.40}: ncnn has no fast kernels of others")
    wanted = Budget.parse(budget) if isinstance(budget, str) else budget or Budget()
    options: dict[str, Any] = {"method": method, "keep": keep, "budget": wanted, "every": every}
    options |= {"table": table, "like": like, "weights": weights, "on": on}
    with temporary_folder() as folder:
        if isinstance(net, (str, Path)) and str(net).endswith((".param", ".param.bin")):
            if given := [name for name, value in conversion.items() if value and name != "verification"]:
                raise UsageError(f"{', '.join(given)} of a conversion: there is none of a net")
            return _of_net(Path(net), bin_beside(Path(net)) if bin is None else Path(bin), data, options)
        known = _with_scales(net)
        has_scales = known is not None and any(product.input_scale for product in known.scales.values())
        if data is None and not has_scales:
            raise UsageError("quantize needs samples: give an .npz or a folder as data (--data)")
        with up_to(_CONVERTED):
            source = net if known is None else known.model
            made = convert(source, **conversion)
        if made.report is None:
            raise UsageError("quantize needs a verification of the float net")
        made.report.check()
        files, manifest = made.save(Path(folder) / "float"), made.manifest()
        samples = Samples(_drawn(made) if data is None else data, manifest.model_inputs)
        feeds = _Feeds(samples, [Slot.of(entry) for entry in manifest.inputs])
        announce("quantising")
        options["release"] = made.release
        if known is None or not has_scales:
            result = quantize_net(files.param, files.bin, feeds, **options)
        else:
            theirs, (scales, reasons) = _of_runtime(net, made, samples), _given(made.graph, known.scales)
            options |= {"given": scales, "every": True}
            if wanted == Budget():
                options["budget"] = Budget(decibels=theirs - _ROOM, other_data=False)
            result = quantize_net(files.param, files.bin, feeds, **options)
            layers = (replace(row, reason=reasons.get(row.layer, row.reason)) for row in result.layers)
            note = f"ONNX Runtime's own int8 is {theirs:.1f} dB from the float model"
            result = replace(result, layers=tuple(layers), notes=(*result.notes, note))
        manifest = read_manifest(files.manifest)
        if known is not None:
            manifest = replace(manifest, source=replace(manifest.source, sha256=load_model(net).digest()))
        return Quantization(
            result,
            replace(
                manifest,
                passes=(*manifest.passes, "quantize"),
                least_ncnn=max(manifest.least_ncnn, str(least_release(result.graph))),
                int8=_recorded(result),
            ),
            b"" if made.tail is None else made.tail.data,
            made,
        )


def _recorded(result: Quantized) -> Int8:
    """Return what was measured as the manifest has it."""
    layers = []
    for row in result.layers:
        numbers = {name: _known(getattr(row, name)) for name in ("largest", "cut", "noise", "seconds")}
        layers.append(Int8Layer(row.layer, row.type, row.form, row.bits, **numbers, reason=row.reason))
    decibels, seconds = _known(result.decibels), _known(result.seconds)
    return Int8(tuple(layers), decibels, result.top1, result.samples, seconds, result.times)


def _known(value: Any) -> Any:
    """Return None for a number, or a pair of them, that is not finite."""
    return value if np.isfinite(value).all() else None


@dataclass(frozen=True)
class _Known:
    """The float model of a quantised one, and the scales of its products by node name."""

    model: bytes
    scales: Mapping[str, Int8Product]


def _with_scales(net: Any) -> _Known | None:
    """Return the float model of a quantised one with its scales; None for a float model."""
    if not isinstance(net, (str, Path, bytes)):
        return None
    graph = load_model(net).graph
    model = float_model(graph)
    return None if model is None else _Known(model, scales_of_products(graph))


def _drawn(made: Conversion) -> list[dict[str, Any]]:
    """Return made-up inputs, as verification draws them."""
    return [draw_inputs(made.model, draw=Draw(seed, plain=True)) for seed in range(_DRAWS)]


def _given(graph: Graph, products: Mapping[str, Int8Product]) -> tuple[dict[str, Scales], dict[str, str]]:
    """Return the scales of layers, and why others have none, by layer name."""
    scales: dict[str, Scales] = {}
    reasons: dict[str, str] = {}
    for layer in graph:
        known = next((products[name] for name in layer.origin if name in products), None)
        if known is not None and (known.reason or not known.input_scale):
            reasons[layer.name] = known.reason or NO_SCALE
        elif known is not None and not obstacle(layer):
            rows, by_row = rows_of(layer), known.scales
            fits = by_row.size in (1, len(rows))  # a pass may have scaled the weights
            exact = fits and is_exact(rows, np.broadcast_to(by_row, len(rows)))
            scales[layer.name] = Scales(known.input_scale, rows=np.broadcast_to(by_row, len(rows)) if exact else None)
    return scales, reasons


def _of_runtime(net: Any, made: Conversion, samples: Samples) -> float:
    """Return how far a quantised model in ONNX Runtime is from the float model, in decibels, at its worst output."""
    outputs = [info.name for info in made.model.outputs]
    with_scales, without = (OrtRunner(source, once=True) for source in (net, made.source))
    found = Agreement()
    for arrays in samples:
        a, b = without.run_any(arrays), with_scales.run_any(arrays)
        found.add({name: a[name] for name in outputs}, b)
    for session in (with_scales, without):
        session.close()
    return found.decibels


def _of_net(param: Path, bin: Path, data: Any, options: Mapping[str, Any]) -> Quantization:
    """Quantise a net of any converter; its manifest, or the data, says which shapes its inputs have."""
    beside = param.with_name(param.name.removesuffix(".bin").removesuffix(".param") + ".json")
    if beside.is_file():
        manifest = read_manifest(beside)
        samples = Samples(data, manifest.model_inputs)
        feeds = _Feeds(samples, [Slot.of(entry) for entry in manifest.inputs])
        return Quantization(quantize_net(param, bin, feeds, **options))
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
    feeds = _Feeds(Samples(arrays, entries), [Slot.of(entry) for entry in entries])
    return Quantization(quantize_net(param, bin, feeds, **options))
