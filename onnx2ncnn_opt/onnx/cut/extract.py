"""Extraction of a model's last nodes: as a tail with the model without them, or for a net that selects rows itself."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir
from onnx import helper, numpy_helper

from onnx2ncnn_opt.errors import ModelError, RunError
from onnx2ncnn_opt.ir.dim import Dim, Shape, is_fixed, names_in, texts
from onnx2ncnn_opt.ir.reached import reached
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.manifest import size_input
from onnx2ncnn_opt.onnx.edit.editor import Editor
from onnx2ncnn_opt.onnx.edit.model import to_bytes
from onnx2ncnn_opt.onnx.read import structure
from onnx2ncnn_opt.onnx.read.binding import InputInfo, TensorInfo
from onnx2ncnn_opt.onnx.read.load import LoadedModel
from onnx2ncnn_opt.onnx.value import Constant, Item, Operand, Tensor
from onnx2ncnn_opt.tail.program import Program
from onnx2ncnn_opt.tail.reader import read_tail
from onnx2ncnn_opt.tail.table import EXACT, table_of

_IR_VERSION = 8  # the oldest one that suffices
_FLOATS = (onnx_ir.DataType.FLOAT, onnx_ir.DataType.FLOAT16, onnx_ir.DataType.DOUBLE)


class Sizes(NamedTuple):
    """A value that a tail reads: integers that depend on dynamic dimensions."""

    cells: Sequence[Dim]
    shape: Shape
    dtype: np.dtype[Any]


@dataclass(frozen=True, eq=False)
class Tail:
    """The nodes after a net.

    `cut` are the net's outputs: values that the tail reads, and outputs of the model. `arrays` are inputs of the model
    that the tail reads. `sizes` are expressions of dynamic dimensions, each an input of one element (see
    `manifest.size_input`). `outputs` are all outputs of the model. `reasons` list the nodes that cannot be in the net.
    """

    model: onnx.ModelProto
    cut: tuple[str, ...]
    arrays: tuple[InputInfo, ...]
    sizes: tuple[str, ...]
    outputs: tuple[TensorInfo, ...]
    reasons: tuple[str, ...]

    @cached_property
    def data(self) -> bytes:
        """The content of its file."""
        return bytes(self.model.SerializeToString(deterministic=True))

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int | str | None, ...]]:
        """The inferred shapes of outputs; an unknown size is None."""
        try:
            outputs = onnx.shape_inference.infer_shapes(self.model, data_prop=True).graph.output
        except (onnx.shape_inference.InferenceError, RuntimeError):  # a declared shape is wrong
            return {}
        tensors = {value.name: value.type.tensor_type for value in outputs}
        return {
            name: tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim)
            for name, tensor in tensors.items()
        }

    @property
    def operators(self) -> tuple[str, ...]:
        """The operators of its nodes."""
        return tuple(dict.fromkeys(node.op_type for node in self.model.graph.node))

    def without(self, model: LoadedModel) -> LoadedModel:
        """Return the model without the tail; the graph is changed in place."""
        declared = {info.name: info for info in model.outputs}
        structure.cut(model.graph, self.cut)
        left = {value.name for value in model.graph.inputs}
        inputs = tuple(info for info in model.inputs if info.name in left)
        read = {value.name: onnx_ir.DataType(value.type.tensor_type.elem_type) for value in self.model.graph.input}
        outputs = tuple(declared.get(name) or TensorInfo(name, read[name], None) for name in self.cut)
        return replace(model, inputs=inputs, outputs=outputs, cut=self.cut)


def selecting(model: LoadedModel, values: Mapping[str, Item | None]) -> LoadedModel | None:
    """Return a copy of a model that has `SelectRows` in the place of its end, and candidates as further outputs.

    `values` are those of the model's import. Return None if the model selects nothing, or in another way.
    """
    after = set[onnx_ir.Node]()
    for node in model.graph:
        if node.op_type == "NonZero" or any(value.producer() in after for value in structure.read_values(node)):
            after.add(node)
    ends = [value for value in model.graph.outputs if value.producer() in after]

    # No layer may have the result of a node that moves numbers, and the last bits of scores decide the best class.
    def before(value: onnx_ir.Value) -> Iterable[onnx_ir.Value]:
        node = value.producer()
        return structure.read_values(node) if node and (node in after or node.op_type in EXACT) else ()

    found = {*reached(ends, before)}
    read = [x for node in model.graph for x in node.outputs if x in found and not [*before(x)]]  # in ncnn's order
    items = {x.name or "": y for x in read if isinstance(y := values.get(x.name or ""), Tensor) and is_fixed(y.shape)}
    if len(items) < len(read) or len(ends) != 1:
        return None
    try:
        table = table_of(nodes_between(model, items, structure.names_of(ends)))
    except (ModelError, RunError, ValueError, KeyError):  # a tail cannot have the nodes, or see `table_of`
        return None
    graph = model.graph.clone()
    inner, editor = {value.name: value for node in graph for value in node.outputs}, Editor(graph)
    end = inner[ends[0].name]
    last = editor.place = end.producer()
    for name, array in table.fixed.items():
        editor.replace(inner[name], editor.initializer(array))
    options = {"most": table.most, "iou": table.iou, "conf": table.conf}
    [best] = editor.nodes(structure.ROWS, [inner[name] for name in table.read], options, domain=structure.OWN)
    editor.replace(end, editor.node("Reshape", best, [*table.shape]))
    graph.remove(filter(None, [last, *(inner[name].producer() for name in table.fixed)]), safe=True)
    further = (TensorInfo(name, onnx_ir.DataType.UNDEFINED, None) for name in items)
    return replace(model, graph=graph, outputs=(*model.outputs, *further))


def nodes_between(model: LoadedModel, items: Mapping[str, Any], outputs: Sequence[str]) -> Program:
    """Return the nodes between `items`, values with type and shape, and outputs; ModelError if no tail has them."""
    graph = model.graph.clone()
    structure.cut(graph, outputs)
    graph.inputs.clear()
    for old in [value for node in graph for value in node.outputs if value.name in items]:
        item = items[old.name or ""]
        new = onnx_ir.val(old.name, onnx_ir.DataType.from_numpy(np.dtype(np.dtype(item.dtype).type)), item.shape)
        onnx_ir.convenience.replace_all_uses_with(old, new)
        graph.inputs.append(new)
    structure.strip(graph)
    return read_tail(to_bytes(graph))


def label(node: onnx_ir.Node) -> str:
    """Return the name of a node in messages."""
    return node.name or next((value.name for value in node.outputs if value.name), node.op_type)


def extract_tail(
    model: LoadedModel,
    nodes: Sequence[onnx_ir.Node],
    read: Mapping[str, Constant | Sizes | InputInfo | Tensor],
    others: Mapping[str, Item | None],
    reasons: tuple[str, ...],
) -> Tail:
    """Return the tail of these sorted nodes and the values that they read.

    `others` are outputs of the model that the net computes and these nodes do not read.
    """
    made = {value.name for node in nodes for value in node.outputs}
    arrays = [info for info in read.values() if isinstance(info, InputInfo)]
    values = {name: x for name, x in read.items() if isinstance(x, Tensor)}
    constants = {name: x.array for name, x in read.items() if isinstance(x, Constant)}
    sizes = {name: x for name, x in read.items() if isinstance(x, Sizes)}
    before = {value.name: value for node in model.graph for value in node.outputs}
    of_net = {name: x for name, x in {**values, **others}.items() if isinstance(x, Operand)}
    types = {name: _type_of(x, before.get(name)) for name, x in of_net.items()}
    dynamic = [cell for x in sizes.values() for cell in x.cells if not isinstance(cell, int)]
    tensors = (before.get(name) for name, x in of_net.items() if isinstance(x, Tensor))
    own = {value.name for value in reached(filter(None, tensors), _operands)}
    known = names_in(size for info in model.inputs if info.name in own or info in arrays for size in info.shape)
    for info in model.inputs:
        if names_in(dynamic) & names_in(info.shape) - known:  # for its sizes alone
            arrays.append(info)
            known |= names_in(info.shape)
    expressions = tuple(dict.fromkeys(map(str, dynamic)))
    first = [node for name, x in sizes.items() for node in _joined(name, x, constants)]
    inputs = [
        *(_info(info.name, int(info.dtype), info.shape) for info in arrays),
        *(_info(name, int(types[name]), x.shape) for name, x in values.items()),
        *(_info(size_input(text), onnx.TensorProto.INT64, (1,)) for text in expressions),
    ]
    outputs = [_info(info.name, int(info.dtype), info.shape) for info in model.outputs if info.name in made]
    weights = [numpy_helper.from_array(np.asarray(array, order="C"), name) for name, array in constants.items()]
    last = map(onnx_ir.serde.serialize_node, nodes)
    graph = helper.make_graph([*first, *last], "tail", inputs, outputs, weights)
    opset = helper.make_opsetid("", model.opsets.get("", 1))
    proto = helper.make_model(graph, opset_imports=[opset], ir_version=_IR_VERSION)
    return Tail(proto, (*values, *others), tuple(arrays), expressions, _typed(model.outputs, proto, types), reasons)


def _joined(name: str, sizes: Sizes, constants: dict[str, Array]) -> list[onnx.NodeProto]:
    """Return the nodes that make a value of its cells, and add their constants."""
    cells = {size_input(str(cell)): cell for cell in sizes.cells}
    constants.update((part, np.array([cell], np.int64)) for part, cell in cells.items() if isinstance(cell, int))
    parts, shape, whole = f"{name}.parts", f"{name}.shape", f"{name}.whole"
    constants[shape] = np.array(sizes.shape, np.int64)
    return [
        helper.make_node("Concat", [size_input(str(cell)) for cell in sizes.cells], [parts], axis=0),
        helper.make_node("Reshape", [parts, shape], [whole]),
        helper.make_node("Cast", [whole], [name], to=helper.np_dtype_to_tensor_dtype(sizes.dtype)),
    ]


def _typed(
    outputs: tuple[TensorInfo, ...], proto: onnx.ModelProto, of_net: dict[str, onnx_ir.DataType]
) -> tuple[TensorInfo, ...]:
    """Return outputs with the inferred types if one declares none, as inner values; set them in the model, too."""
    if all(info.dtype != onnx_ir.DataType.UNDEFINED for info in outputs):
        return outputs
    inferred = {v.name: v.type for v in onnx.shape_inference.infer_shapes(proto, data_prop=True).graph.output}
    for value in proto.graph.output:
        value.type.CopyFrom(inferred[value.name])
    types = {name: onnx_ir.DataType(kind.tensor_type.elem_type) for name, kind in inferred.items()} | of_net
    return tuple(replace(info, dtype=types.get(info.name, info.dtype)) for info in outputs)


def _type_of(x: Operand, value: onnx_ir.Value | None) -> onnx_ir.DataType:
    """Return the element type of a value in the model: of floats, which the net holds as float32, the nearest known."""
    own, starts = onnx_ir.DataType.from_numpy(np.dtype(x.dtype.type)), [value] if value is not None else []
    if own is not onnx_ir.DataType.FLOAT:
        return own
    before = reached(starts, lambda v: () if _declared(v) else _operands(v))
    return next((kind for kind in map(_declared, before) if kind in _FLOATS), own)


def _operands(value: onnx_ir.Value) -> Iterable[onnx_ir.Value]:
    node = value.producer()
    return () if node is None else structure.read_values(node)


def _declared(value: onnx_ir.Value) -> onnx_ir.DataType | None:
    """Return the type of a value that a Cast, the graph or a constant states."""
    node = value.producer()
    if node is not None and node.op_type == "Cast":
        return onnx_ir.DataType(node.attributes["to"].as_int())
    return value.dtype


def _info(name: str, element: int, shape: Shape | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, element, None if shape is None else texts(shape))
