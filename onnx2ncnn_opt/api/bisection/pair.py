"""The smallest part of a model and its net that is wrong on its own, and its files."""

import hashlib
from collections.abc import Mapping, Set
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx_ir
from google.protobuf.message import EncodeError  # type: ignore[import-untyped]

from onnx2ncnn_opt import entry_points
from onnx2ncnn_opt.api.bisection.search import FirstWrong
from onnx2ncnn_opt.api.bisection.wrong_net import WrongNet, as_integers
from onnx2ncnn_opt.errors import ModelError, RunError, UsageError, VerificationError
from onnx2ncnn_opt.ir.cut import cut
from onnx2ncnn_opt.ir.graph import Blob
from onnx2ncnn_opt.ir.permute import inverted
from onnx2ncnn_opt.ir.releases import NEWEST
from onnx2ncnn_opt.manifest import Entry, LayerCount, Manifest, Source
from onnx2ncnn_opt.onnx.edit.editor import Editor, forget_types
from onnx2ncnn_opt.onnx.edit.model import read_model, to_bytes
from onnx2ncnn_opt.onnx.read.structure import read_values, strip
from onnx2ncnn_opt.outputs import Status
from onnx2ncnn_opt.param.files import all_or_nothing, read_net, write_staged
from onnx2ncnn_opt.progress import announce
from onnx2ncnn_opt.runtime.base import Array, Failure
from onnx2ncnn_opt.runtime.slots import Slot
from onnx2ncnn_opt.system import temporary_folder
from onnx2ncnn_opt.verdict.blobs import aligned, in_order, natural, nearest, squeezed
from onnx2ncnn_opt.verdict.errors import Tolerance
from onnx2ncnn_opt.verification.model import verify_net
from onnx2ncnn_opt.verification.options import Verification
from onnx2ncnn_opt.verification.report import VerifyReport
from onnx2ncnn_opt.version import __version__


@dataclass(frozen=True)
class Counterpart:
    """The value of the model that has a blob's numbers, with its axes (without sizes of 1) in the order `axes`.

    `shape` is the blob's, batch first. `integer` says that the blob's elements are int32.
    """

    value: str
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    integer: bool


@dataclass(frozen=True)
class PairFiles:
    """The files of a pair, which `verify` takes.

    `inputs` has the model's values at the start of the part, in the layout of the net's blobs. If the net has another
    layout than the model, the model starts and ends with nodes that change it.
    """

    model: Path
    param: Path
    bin: Path
    manifest: Path
    inputs: Path

    @classmethod
    def at(cls, folder: Path) -> "PairFiles":
        """Return the files in a folder."""
        return cls(*(folder / name for name in ("part.onnx", "part.param", "part.bin", "part.json", "part.npz")))


@dataclass(frozen=True)
class Pair:
    """A written pair, the numbers of its nodes and layers, and its verification by `verify_net`."""

    files: PairFiles
    nodes: int
    layers: int
    report: VerifyReport = field(repr=False, compare=False)


@dataclass(frozen=True)
class Part:
    """A part of a net between blobs (by name) with known counterparts in the model."""

    starts: Mapping[str, Counterpart]
    end: str
    counterpart: Counterpart


def write_pair(files: PairFiles, net: WrongNet, part: Part) -> tuple[Manifest, dict[str, Array], int, int]:
    """Write the files, all or none; return the manifest, the inputs, and the counts of nodes and layers.

    Values of the model that do not depend on the start of the part become constants. Raises UsageError if the files
    cannot be written.
    """
    values = net.reference.values
    piece = _ModelPart(net.model, part, values)
    graph = read_net(net.param, net.bin, entry_points.layer_types()).graph
    blobs = {blob.name: blob for layer in graph for blob in layer.outputs}
    cut(graph, {name: blobs[name] for name in part.starts}, {part.end: blobs[part.end]})
    layers = sum(layer.type not in ("Input", "Split") for layer in graph)
    try:
        onnx_ir.external_data.load_to_model(piece.model)
        data = to_bytes(piece.model)
    except (EncodeError, ValueError) as error:
        raise UsageError(f"the part of the model is too large for one file: {error}") from error
    folder = files.model.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}") from error
    inputs = {name: array for name, _, array in piece.inputs.values()}
    with all_or_nothing(*astuple(files)) as (model_staged, param_staged, bin_staged, manifest_staged, inputs_staged):
        names = {blob.name: name for blob, name in write_staged(graph, param_staged, bin_staged).items()}
        manifest = Manifest(
            inputs=tuple(_entry(names[blob], *start) for blob, start in piece.inputs.items()),
            outputs=(_entry(names[part.end], piece.output, part.counterpart, values[part.counterpart.value]),),
            source=Source(hashlib.sha256(data).hexdigest(), piece.opset),
            tool=f"onnx2ncnn-opt {__version__}",
            ncnn=str(NEWEST),
            layers=LayerCount(layers, layers),
            passes=(),
        )
        model_staged.write_bytes(data)
        manifest_staged.write_bytes(manifest.to_json().encode())
        with inputs_staged.open("wb") as file:
            np.savez(file, **inputs)  # type: ignore[arg-type]
    return manifest, inputs, piece.count, layers


def _entry(blob: str, name: str, counterpart: Counterpart, array: Array) -> Entry:
    element = "int32" if counterpart.integer else "float32"
    return Entry(name, blob, counterpart.shape, array.dtype.name, 0, element)


class _ModelPart(Editor):
    """The part of the model, with `count` nodes: its inputs (name, counterpart, array) by blob, and its output."""

    def __init__(self, source: Path | bytes, part: Part, values: Mapping[str, Array]) -> None:
        self.model = read_model(source)
        super().__init__(self.model.graph)
        graph, counterpart, old = self.graph, part.counterpart, set(self.graph)
        self.opset = self.model.opset_imports.get("", 1)
        named = {value.name: value for value in (*graph.inputs, *(x for node in graph for x in node.outputs))}
        graph.outputs[:] = [named[counterpart.value]]
        starts = {item.value: named[item.value] for item in part.starts.values()}
        self._freeze({*starts.values()}, values)
        self.inputs: dict[str, tuple[str, Counterpart, Array]] = {}
        for value in starts.values():
            value.name = self.names.take(f"{value.name}.before")
        inputs = [self._start(blob, item, starts, values[item.value]) for blob, item in part.starts.items()]
        self.place, end = None, graph.outputs[0]
        graph.outputs[:] = [self._end(end, counterpart, values[counterpart.value])]
        strip(graph)
        graph.inputs[:] = inputs
        self.count = sum(node in old for node in graph)
        self.output = graph.outputs[0].name or ""
        forget_types(graph)

    def _freeze(self, starts: Set[onnx_ir.Value], values: Mapping[str, Array]) -> None:
        """Make constants of the values that do not depend on the starts."""
        made = [value for node in self.graph for value in node.outputs]
        dependent = set(starts)
        for node in self.graph:
            if not dependent.isdisjoint(read_values(node)):
                dependent.update(node.outputs)
        for value in (*self.graph.inputs, *made):
            name = value.name or ""
            if value not in dependent and name in values and (value.uses() or value.is_graph_output()):
                value.name = self.names.take(f"{name}.before")
                self.names.release(name)
                constant = self.initializer(np.ascontiguousarray(values[name]), name)
                onnx_ir.convenience.replace_all_uses_with(value, constant, replace_graph_outputs=True)

    def _start(
        self, blob: str, counterpart: Counterpart, starts: dict[str, onnx_ir.Value], array: Array
    ) -> onnx_ir.Value:
        """Return an input with a blob's numbers; add nodes that compute the value from it, once."""
        is_float = array.dtype.kind in "iub" and not counterpart.integer
        value = starts.pop(counterpart.value, None)
        fed = in_order(array, counterpart.axes).reshape(counterpart.shape)
        fed = fed.astype(np.float32) if is_float else fed
        is_direct = value is not None and not is_float and _is_direct(counterpart, array)
        name = counterpart.value if is_direct else self.names.take(f"{counterpart.value}.in")
        self.inputs[blob] = name, counterpart, fed
        start = read = onnx_ir.val(name, _type(fed), fed.shape)
        if value is not None:
            if not is_direct:
                read = self.node("Cast", read, to=_type(array)) if is_float else read
                read = self.node("Reshape", read, [squeezed(array.shape)[axis] for axis in counterpart.axes])
                if counterpart.axes != natural(array):
                    read = self.node("Transpose", read, perm=inverted(counterpart.axes))
                read = self.node("Reshape", read, [*array.shape])
            onnx_ir.convenience.replace_all_uses_with(value, read, replace_graph_outputs=True)
        return start

    def _end(self, value: onnx_ir.Value, counterpart: Counterpart, array: Array) -> onnx_ir.Value:
        """Return the output in the layout of the net's blob; add nodes that change the layout."""
        is_made = value.name == counterpart.value and (value.producer() or value.const_value)
        if not is_made or not _is_direct(counterpart, array):
            if counterpart.axes != natural(array):
                value = self.node("Reshape", value, [*squeezed(array.shape)])
                value = self.node("Transpose", value, perm=[*counterpart.axes])
            value = self.node("Reshape", value, [*counterpart.shape])
            value.name = self.names.take(f"{counterpart.value}.out")
            array = array.reshape(counterpart.shape)
        value.type, value.shape = onnx_ir.TensorType(_type(array)), onnx_ir.Shape(array.shape)
        return value


def _is_direct(counterpart: Counterpart, array: Array) -> bool:
    return counterpart.shape == array.shape and counterpart.axes == natural(array)


def _type(array: Array) -> onnx_ir.DataType:
    return onnx_ir.DataType.from_numpy(array.dtype)


def write_smallest_part(net: WrongNet, first: FirstWrong, folder: Path) -> Pair | None:
    """Write the smallest part of the net that is wrong on its own to a folder; return None if there is none."""
    announce("looking for the smallest part that is wrong")
    tolerance = replace(net.tolerance(exact=False), slices=False)
    ends = (blob for layer in (first.end.producer, *first.path) if layer for blob in layer.outputs)
    order = {layer: number for number, layer in enumerate(net.graph)}
    for end in ends:
        if first.run.verdicts[end].status == "right" or end.producer is None or first.end.producer is None:
            continue
        counterpart = _counterpart(net, end, first, tolerance)
        if counterpart is None or order[end.producer] < order[first.end.producer]:
            continue
        for is_whole in (False, True):
            starts = _starts(net, end, first, tolerance, is_whole=is_whole)
            pair = _written(net, folder, Part(starts, end.name, counterpart), first)
            if pair is not None:
                return pair
        return None
    return None


def _starts(
    net: WrongNet, end: Blob, first: FirstWrong, tolerance: Tolerance, *, is_whole: bool
) -> dict[str, Counterpart]:
    """Return the blobs where a part starts: the nearest right blobs before `end`, or with `is_whole` the inputs."""
    starts: dict[str, Counterpart] = {}
    pending, seen = [end], {end}
    verdicts = first.run.verdicts
    while pending:
        blob = pending.pop()
        is_start = blob.is_input or (blob is not end and not is_whole and verdicts[blob].status == "right")
        if is_start and (counterpart := _counterpart(net, blob, first, tolerance)):
            starts[blob.name] = counterpart
        elif blob.producer is not None:
            pending += [before for before in blob.producer.inputs if before not in seen]
            seen.update(blob.producer.inputs)
    return starts


def _counterpart(net: WrongNet, blob: Blob, first: FirstWrong, tolerance: Tolerance) -> Counterpart | None:
    """Return the model's value that a blob should equal; None if it is unknown."""
    run = first.run
    if blob.is_input:
        slot = next((slot for slot in run.way if slot.blob == blob.name), None)
        return None if slot is None else _fed_counterpart(slot, net.feeds[slot.name])
    verdict, result = run.verdicts[blob], run.results.get(blob.name)
    right = result if verdict.status == "right" else run.expected.get(blob)
    name = net.names.get(blob.name, verdict.value or blob.name)
    value = net.reference.values.get(name)
    if blob.is_output and blob.name in net.names and value is not None and value.size:
        return _output_counterpart(net, blob, value, result)
    if isinstance(right, np.ndarray):
        return _of_right_numbers(net, right, name, tolerance)
    if value is None or not value.size:
        return None
    if isinstance(result, np.ndarray) and result.size == value.size:
        return Counterpart(name, nearest(result, value), result.shape, as_integers(result).dtype == np.int32)
    return Counterpart(name, natural(value), _unbatched(value), False)


def _of_right_numbers(net: WrongNet, right: Array, name: str, tolerance: Tolerance) -> Counterpart | None:
    """Return the model's value that equals a right blob: the value called `name`, or any other."""
    if right.dtype not in (np.float32, np.int32):
        return None
    numbers = as_integers(right)
    value = net.reference.values.get(name)
    if value is not None and value.size == right.size:
        difference, axes = aligned(numbers, value, tolerance)
        if difference.ok:
            return Counterpart(name, axes, right.shape, numbers.dtype == np.int32)
    match = net.reference.same_numbers(numbers, tolerance)
    return Counterpart(match[0], match[1], right.shape, numbers.dtype == np.int32) if match else None


def _output_counterpart(net: WrongNet, blob: Blob, value: Array, result: Array | Failure | None) -> Counterpart:
    """Return the model's value of an output; blob and value must have the same order of axes."""
    entry = next((e for e in net.manifest.outputs if e.blob == blob.name), None) if net.manifest else None
    if entry is not None:
        counterpart = _fed_counterpart(Slot.of(entry), value)
        return replace(counterpart, integer=entry.element == "int32")
    name = net.names[blob.name]
    if isinstance(result, np.ndarray) and squeezed(result.shape) == squeezed(value.shape):
        return Counterpart(name, natural(value), result.shape, as_integers(result).dtype == np.int32)
    return Counterpart(name, natural(value), _unbatched(value), False)


def _written(net: WrongNet, folder: Path, part: Part, first: FirstWrong) -> Pair | None:
    """Write the files of a part; return None if the part is right, or has another fault than the net."""
    with temporary_folder() as name:
        staged = PairFiles.at(Path(name))
        try:
            manifest, inputs, _, _ = write_pair(staged, net, part)
            how = Verification(
                feeds=inputs, on=net.verification.on, modes=(net.mode,), timeout=net.verification.timeout
            )
            files = (staged.model, staged.param, staged.bin)
            report = verify_net(*files, how, manifest=manifest, worker=net.worker)
        except (ModelError, RunError, UsageError, VerificationError):
            return None
    result = first.run.results.get(part.end)
    kinds: tuple[Status, ...] = ("mismatch", "nan") if isinstance(result, np.ndarray) else ("missing", "crashed")
    if isinstance(result, np.ndarray) and result.shape != part.counterpart.shape:
        kinds = ("shape",)
    if report.outputs[0].status not in kinds:
        return None
    written = PairFiles.at(folder)
    _, _, nodes, layers = write_pair(written, net, part)
    return Pair(written, nodes, layers, report)


def _fed_counterpart(slot: Slot, array: Array) -> Counterpart:
    """Return the counterpart of an input or output of the net; `array` is the model's value."""
    order = list(range(array.ndim))
    if slot.batch_axis is not None:
        order.insert(0, order.pop(slot.batch_axis))
    shape = (*(() if slot.batch_axis is not None else (1,)), *(array.shape[axis] for axis in order)) or (1, 1)
    kept = [axis for axis in order if array.shape[axis] != 1]
    return Counterpart(slot.name, tuple(sorted(kept).index(axis) for axis in kept), shape, array.dtype.kind in "iub")


def _unbatched(value: Array) -> tuple[int, ...]:
    """Return the shape of a blob for a value: a batch of 1, then the value's sizes other than 1."""
    return (1, *(squeezed(value.shape) or (1,)))
