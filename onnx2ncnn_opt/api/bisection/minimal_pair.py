"""Files of the smallest part of a model, and of the same part of its net, that show the net's fault."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import EncodeError  # type: ignore[import-untyped]
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import load_external_data_for_tensor

from onnx2ncnn_opt import entry_points
from onnx2ncnn_opt.api.bisection.wrong_net import WrongNet
from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.cut import cut
from onnx2ncnn_opt.ir.names import NamePool
from onnx2ncnn_opt.ir.permute import inverted
from onnx2ncnn_opt.ir.releases import NEWEST
from onnx2ncnn_opt.manifest import Entry, LayerCount, Manifest, Source
from onnx2ncnn_opt.param.files import all_or_nothing, read_net, write_staged
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.runtime.ort import cut_model, reads
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
        data = piece.proto.SerializeToString()
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
    return manifest, inputs, piece.nodes, layers


def _entry(blob: str, name: str, counterpart: Counterpart, array: Array) -> Entry:
    element = "int32" if counterpart.integer else "float32"
    return Entry(name, blob, counterpart.shape, array.dtype.name, 0, element)


class _ModelPart:
    """The part of the model; `inputs` are its inputs (name, counterpart, array) by blob, `output` is its output."""

    def __init__(self, model: Path | bytes, part: Part, values: Mapping[str, Array]) -> None:
        folder = None if isinstance(model, bytes) else model.absolute().parent
        self.proto = onnx.ModelProto.FromString(model if isinstance(model, bytes) else model.read_bytes())
        graph, end = self.proto.graph, part.counterpart
        self.opset = next((entry.version for entry in self.proto.opset_import if not entry.domain), 1)
        self._names = NamePool(name for node in graph.node for name in (*node.input, *node.output))
        self._before: list[onnx.NodeProto] = []
        self._after: list[onnx.NodeProto] = []
        self._shapes: list[TensorProto] = []
        starts = {counterpart.value for counterpart in part.starts.values()}
        frozen = self._constant(end.value, starts, values)
        cut_model(self.proto, [end.value], folder, {*starts, *frozen})
        self.nodes = len(graph.node)
        self.inputs = self._inputs(part.starts, values)
        self.output = self._end(end, values[end.value], starts)
        self._set_initializers(end.value, starts, frozen, values, folder)
        self._set_ports(end, values[end.value])
        nodes = [*self._before, *graph.node, *self._after]
        del graph.node[:]
        graph.node.extend(nodes)

    def _inputs(
        self, starts: Mapping[str, Counterpart], values: Mapping[str, Array]
    ) -> dict[str, tuple[str, Counterpart, Array]]:
        """Return the inputs with the numbers of the blobs at the start."""
        inputs: dict[str, tuple[str, Counterpart, Array]] = {}
        produced: set[str] = set()
        for blob, counterpart in starts.items():
            array = values[counterpart.value]
            name = self._start(counterpart, array, produced)
            fed = in_order(array, counterpart.axes).reshape(counterpart.shape)
            is_float = array.dtype.kind in "iub" and not counterpart.integer
            inputs[blob] = (name, counterpart, fed.astype(np.float32) if is_float else fed)
            produced.add(counterpart.value)
        return inputs

    def _set_initializers(
        self, end: str, starts: set[str], frozen: set[str], values: Mapping[str, Array], folder: Path | None
    ) -> None:
        """Keep the initializers that the nodes read, with their external data; add `frozen` values."""
        graph = self.proto.graph
        read = {name for node in graph.node for name in reads(node)}
        kept = [tensor for tensor in graph.initializer if tensor.name in read and tensor.name not in starts]
        for tensor in kept:
            if tensor.data_location == TensorProto.EXTERNAL:
                load_external_data_for_tensor(tensor, os.fspath(folder or ""))
                tensor.data_location = TensorProto.DEFAULT
        missing = (read | {end}) - {tensor.name for tensor in kept}
        made = [numpy_helper.from_array(np.ascontiguousarray(values[name]), name) for name in sorted(frozen & missing)]
        del graph.initializer[:]
        graph.initializer.extend([*kept, *made, *self._shapes])

    def _set_ports(self, end: Counterpart, result: Array) -> None:
        """Declare the part's inputs and output in place of the model's."""
        graph = self.proto.graph
        del graph.input[:], graph.output[:], graph.value_info[:]
        for name, _, array in self.inputs.values():
            graph.input.append(helper.make_tensor_value_info(name, _type(array), array.shape))
        shape = end.shape if self.output != end.value else result.shape
        graph.output.append(helper.make_tensor_value_info(self.output, _type(result), shape))

    def _constant(self, end: str, starts: set[str], values: Mapping[str, Array]) -> set[str]:
        """Return the values that nodes between the starts and the end read and that do not depend on the starts."""
        nodes = self.proto.graph.node
        dependent = set(starts)
        for node in nodes:
            if any(name in dependent for name in reads(node)):
                dependent.update(name for name in node.output if name)
        needed, frozen = {end}, set[str]()
        for node in reversed(nodes):
            if not needed & set(node.output) - starts:
                continue
            if dependent.isdisjoint(node.output) and all(name in values for name in node.output if name):
                frozen.update(name for name in node.output if name)
            else:
                needed.update(reads(node))
        inputs = {value.name for value in self.proto.graph.input} - starts
        return frozen | {name for name in inputs & needed if name in values}

    def _start(self, counterpart: Counterpart, array: Array, produced: set[str]) -> str:
        """Return the name of an input with a blob's numbers; add nodes that compute the value from it, once."""
        is_float = array.dtype.kind in "iub" and not counterpart.integer
        if counterpart.value not in produced and not is_float and _is_direct(counterpart, array):
            return counterpart.value
        name = self._names.take(f"{counterpart.value}.in")
        if counterpart.value not in produced:
            read = name
            if is_float:
                read = self._add(self._before, "Cast", [read], to=_type(array))
            inner = tuple(squeezed(array.shape)[axis] for axis in counterpart.axes)
            read = self._reshaped(self._before, read, inner)
            if counterpart.axes != natural(array):
                read = self._add(self._before, "Transpose", [read], perm=inverted(counterpart.axes))
            self._reshaped(self._before, read, array.shape, counterpart.value)
        return name

    def _end(self, counterpart: Counterpart, array: Array, starts: set[str]) -> str:
        """Return the name of the output in the layout of the net's blob; add nodes that change the layout."""
        if _is_direct(counterpart, array) and counterpart.value not in starts:
            return counterpart.value
        read = counterpart.value
        if counterpart.axes != natural(array):
            read = self._reshaped(self._after, read, squeezed(array.shape))
            read = self._add(self._after, "Transpose", [read], perm=list(counterpart.axes))
        return self._reshaped(self._after, read, counterpart.shape, self._names.take(f"{counterpart.value}.out"))

    def _reshaped(self, nodes: list[onnx.NodeProto], read: str, shape: Sequence[int], name: str | None = None) -> str:
        sizes = self._names.take("shape")
        self._shapes.append(numpy_helper.from_array(np.array(shape, np.int64), sizes))
        return self._add(nodes, "Reshape", [read, sizes], name)

    def _add(
        self, nodes: list[onnx.NodeProto], operator: str, inputs: list[str], name: str | None = None, **attributes: Any
    ) -> str:
        name = name or self._names.take("layout")
        nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        return name


def _is_direct(counterpart: Counterpart, array: Array) -> bool:
    return counterpart.shape == array.shape and counterpart.axes == natural(array)


def _type(array: Array) -> int:
    return helper.np_dtype_to_tensor_dtype(array.dtype)
