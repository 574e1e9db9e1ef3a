"""A description of a model or a net; this writes no files and runs neither runtime."""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir

from onnx2ncnn_opt import entry_points
from onnx2ncnn_opt.api.convert import convert
from onnx2ncnn_opt.api.net_shapes import infer_net, manifest_of
from onnx2ncnn_opt.errors import Unsupported, UnsupportedError, UsageError, check_options
from onnx2ncnn_opt.ir.cost import multiplications, parameters
from onnx2ncnn_opt.ir.dim import Sym, texts
from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.ir.memory import most_items, peak_memory
from onnx2ncnn_opt.ir.releases import least_release
from onnx2ncnn_opt.manifest import Entry, mixture
from onnx2ncnn_opt.onnx.read.binding import TensorInfo
from onnx2ncnn_opt.onnx.read.exported import exported
from onnx2ncnn_opt.onnx.read.given import GivenShapes
from onnx2ncnn_opt.onnx.read.load import load_model
from onnx2ncnn_opt.param.files import bin_beside, read_graph
from onnx2ncnn_opt.param.splits import count_layers, list_layers


@dataclass(frozen=True)
class Binding:
    """An input or output: its name, type (numpy's name) and shape; for a net with NET.json, the model's.

    A dynamic dimension is a string; type and shape are None if unknown.
    """

    name: str
    dtype: str | None
    shape: tuple[int | str, ...] | None


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """The facts about a file.

    `format` is "onnx", "pt2" or "param". `operators` counts the model's operators, or the net's layers. `refused` are
    nodes that ncnn cannot compute, `advice` says how to convert without them, or that the files of a net are a mixture.
    `parameters` counts elements and `weights` bytes of the constants (None if the net's .bin is missing). The other
    fields describe the net, and are None without one: its number of `layers`, the operators of its `tail`, the
    multiply-adds of a run (`macs`), the bytes of blobs in memory at once (`peak_memory`), and the oldest release that
    runs it (`least_ncnn`). `macs` and `peak_memory` are None if they depend on a dynamic size.
    """

    file: str
    format: str
    producer: str | None = None
    opset: int | None = None
    inputs: tuple[Binding, ...]
    outputs: tuple[Binding, ...]
    dynamic: tuple[str, ...]
    operators: Mapping[str, int]
    refused: tuple[Unsupported, ...] = ()
    advice: str = ""
    parameters: int
    weights: int | None
    layers: int | None = None
    tail: tuple[str, ...] = ()
    macs: int | None = None
    peak_memory: int | None = None
    least_ncnn: int | None = None

    def __repr__(self) -> str:
        layers = f"{len(self.refused)} nodes refused" if self.layers is None else f"{self.layers} layers"
        return f"Inspection({self.file}: {self.parameters} parameters, {layers})"


def inspect(
    path: str | os.PathLike[str], *, shapes: GivenShapes | None = None, values: Mapping[str, Any] | None = None
) -> Inspection:
    """Describe an .onnx, .pt2 or .param file; `shapes` and `values` bind inputs, as for `convert`.

    Raises ModelError, ParamError and UsageError like `convert` and `optimize`; refused nodes are no error.
    """
    check_options(path=path, shapes=shapes, values=values)
    file = Path(path)
    if file.suffix == ".param" or file.name.endswith(".param.bin"):
        return _net(file, shapes or {}, values)
    return _model(file, shapes, values)


def _model(path: Path, shapes: GivenShapes | None, values: Mapping[str, Any] | None) -> Inspection:
    source = exported(path)
    entry_points.installed_ops()
    model = load_model(source, shapes=shapes, values=values)
    net: dict[str, Any]
    try:
        conversion = convert(source, shapes=shapes, values=values, verification=None)
    except UnsupportedError as error:
        outputs, net = tuple(map(_of_info, model.outputs)), {"refused": error.nodes, "advice": error.advice}
    else:
        outputs = tuple(map(_of_entry, conversion.manifest().model_outputs))
        net = {"tail": conversion.tail.operators if conversion.tail else (), **_costs(conversion.graph)}
    constants = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    operators = Counter(f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in model.graph)
    dims = (dim for info in model.inputs for dim in info.shape if isinstance(dim, Sym))
    return Inspection(
        file=os.fspath(path),
        format="onnx" if source is path else "pt2",
        producer=model.producer,
        opset=model.opsets.get("", 1),
        inputs=tuple(map(_of_info, model.inputs)),
        outputs=outputs,
        dynamic=tuple(dict.fromkeys(name for dim in dims for name in sorted(dim.names()))),
        operators=dict(operators.most_common()),
        parameters=sum(tensor.size for tensor in constants),
        weights=sum(tensor.nbytes for tensor in constants),
        **net,
    )


def _net(path: Path, shapes: GivenShapes, values: Mapping[str, Any] | None) -> Inspection:
    if values:
        raise UsageError("values are for models; a net has no inputs that could become constants")
    numbers = {name: [size for size in sizes if isinstance(size, int)] for name, sizes in shapes.items()}
    if any(len(numbers[name]) < len(sizes) for name, sizes in shapes.items()):
        raise UsageError("sizes of a net's inputs are numbers")
    graph = read_graph(path, entry_points.layer_types())
    infer_net(graph, numbers)
    weights = bin_beside(path)
    manifest = None if shapes else manifest_of(path, graph)
    if manifest is None:
        inputs, outputs = (
            tuple(Binding(blob.name, None, None if blob.shape is None else texts(blob.shape)) for blob in blobs)
            for blobs in (graph.inputs, graph.outputs)
        )
    else:
        inputs, outputs = (tuple(map(_of_entry, es)) for es in (manifest.model_inputs, manifest.model_outputs))
    open_sizes = (size for entry in inputs for size in entry.shape or () if isinstance(size, str) and size != "?")
    return Inspection(
        file=os.fspath(path),
        format="param",
        inputs=inputs,
        outputs=outputs,
        dynamic=tuple(dict.fromkeys(open_sizes)),
        operators=dict(Counter(line.type for line in list_layers(graph).lines).most_common()),
        advice=mixture(manifest, path, weights),
        parameters=parameters(graph),
        weights=weights.stat().st_size if weights.is_file() else None,
        tail=manifest.tail.operators if manifest and manifest.tail else (),
        **_costs(graph),
    )


def _of_entry(entry: Entry) -> Binding:
    return Binding(entry.name, entry.dtype, tuple("?" if size is None else size for size in entry.shape))


def _costs(graph: Graph) -> dict[str, Any]:
    memory, items = peak_memory(graph), most_items(graph)
    return {
        "layers": count_layers(graph),
        "macs": multiplications(graph),
        "peak_memory": None if memory.unknown or items is None else memory.peak * items,
        "least_ncnn": least_release(graph),
    }


def _of_info(info: TensorInfo) -> Binding:
    dtype = None if info.dtype is onnx_ir.DataType.UNDEFINED else info.dtype.numpy().name
    return Binding(info.name, dtype, None if info.shape is None else texts(info.shape))
