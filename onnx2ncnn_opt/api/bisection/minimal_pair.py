"""Files of the smallest part of a model, and of the same part of its net, that show the net's fault."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Set
from dataclasses import astuple, dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir
from google.protobuf.message import EncodeError  # type: ignore[import-untyped]

from onnx2ncnn_opt import entry_points
from onnx2ncnn_opt.api.bisection.wrong_net import WrongNet
from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.cut import cut
from onnx2ncnn_opt.ir.permute import inverted
from onnx2ncnn_opt.ir.releases import NEWEST
from onnx2ncnn_opt.manifest import Entry, LayerCount, Manifest, Source
from onnx2ncnn_opt.onnx.edit.editor import Editor, forget_types
from onnx2ncnn_opt.onnx.edit.model import read_model, to_bytes
from onnx2ncnn_opt.onnx.read.structure import read_values, strip
from onnx2ncnn_opt.param.files import all_or_nothing, read_net, write_staged
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.verdict.blobs import in_order, natural, squeezed
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
    def at(cls, folder: Path) -> PairFiles:
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
