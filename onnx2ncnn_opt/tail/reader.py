"""Reader of a tail's ONNX file. It needs onnx, so only nets with a tail import it."""

from collections.abc import Iterator, Mapping
from inspect import Parameter
from itertools import count
from typing import Any, Literal, get_args, get_origin

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from onnx2ncnn_opt.errors import ModelError
from onnx2ncnn_opt.ir.names import NamePool
from onnx2ncnn_opt.tail.program import DEEPEST, Node, Port, Program, located
from onnx2ncnn_opt.tail.registry import ALL, TAIL_OPS, TailOp

_OLDEST = 7  # opset
_DAMAGED = "the tail is damaged, or is not an ONNX file; convert the model again"


def read_tail(data: bytes) -> Program:
    """Return the tail in an ONNX file. Raises ModelError if it is damaged, or is not a tail."""
    try:
        model = onnx.ModelProto.FromString(bytes(data))
    except DecodeError as error:
        raise ModelError(_DAMAGED) from error
    opset = max((item.version for item in model.opset_import if item.domain in ("", "ai.onnx")), default=0)
    if opset < _OLDEST:
        raise ModelError(f"tail: opset {opset} is older than {_OLDEST}")
    constants: dict[str, NDArray[Any]] = {}
    nodes = tuple(_nodes(model.graph, opset, constants, {}, (), count(1)))
    inputs = tuple(_port(item) for item in model.graph.input if item.name not in constants)
    program = Program(inputs, tuple(map(_port, model.graph.output)), constants, nodes)
    _ = program.types  # checks every node
    return program


def _name(text: str) -> str:
    """Return a name of the file. `_nodes` uses zero bytes in new names, and protobuf returns invalid UTF-8 as bytes."""
    if not isinstance(text, str) or "\0" in text:
        raise ModelError(_DAMAGED)
    return text


def _port(value: onnx.ValueInfoProto) -> Port:
    kind, dims = value.type.tensor_type, value.type.tensor_type.shape.dim
    with located(f"'{value.name}'"):
        dtype = _type_name(kind.elem_type)
    if len(dims) > DEEPEST:
        raise ModelError(f"tail: '{value.name}' has {len(dims)} axes; at most {DEEPEST} are possible")
    sizes = (dim.dim_param or (dim.dim_value if dim.HasField("dim_value") else None) for dim in dims)
    return Port(_name(value.name), dtype, tuple(sizes))


def _type_name(number: int) -> str:
    """Return numpy's name of an element type. Raises ValueError for types that tails lack."""
    if number in helper.get_all_tensor_dtypes() and (name := helper.tensor_dtype_to_np_dtype(number).name) in ALL:
        return name
    raise ValueError(f"element type {number} is not known in a tail")


def _tensor(tensor: onnx.TensorProto) -> NDArray[Any]:
    """Return a tensor. Raises ValueError if its data do not match its shape, or are outside of the file."""
    if tensor.external_data or tensor.data_location != onnx.TensorProto.DEFAULT:
        raise ValueError("its data are outside of the file")
    _type_name(tensor.data_type)
    if min(tensor.dims, default=0) < 0 or len(tensor.dims) > DEEPEST:
        raise ValueError(f"it has the shape {list(tensor.dims)}")
    array = np.array(numpy_helper.to_array(tensor))
    return array if array.dtype.kind != "b" else array.view(np.uint8) != 0


def _value(attribute: onnx.AttributeProto) -> Any:
    value = helper.get_attribute_value(attribute)
    return _tensor(value) if isinstance(value, onnx.TensorProto) else value.decode() if type(value) is bytes else value


def _array(value: Any) -> NDArray[Any]:
    """Return an attribute as a tensor. Raises ValueError for graphs and other kinds that tails lack."""
    array = np.asarray(value)
    if array.dtype.name not in ALL:
        raise ValueError("it is of a kind that no tail has")
    return array if isinstance(value, np.ndarray) or array.dtype != np.float64 else array.astype(np.float32)


def _nodes(
    graph: onnx.GraphProto,
    opset: int,
    constants: dict[str, NDArray[Any]],
    names: Mapping[str, str],
    guards: tuple[tuple[str, bool], ...],
    numbers: Iterator[int],
) -> Iterator[Node]:
    """Yield the nodes of a graph; the nodes in branches of an If come before it.

    `names` are new names of values in branches. Constants become entries of `constants`.
    """
    for tensor in graph.initializer:
        with located(f"constant '{tensor.name}'"):
            constants[names.get(tensor.name, _name(tensor.name))] = _tensor(tensor)
    for item in graph.node:
        inputs, outputs = (tuple(names.get(x, _name(x)) for x in side) for side in (item.input, item.output))
        node = Node(item.op_type, item.name or "".join(item.output[:1]), inputs, outputs, {}, guards)
        if item.domain not in ("", "ai.onnx"):
            raise ModelError(f"tail: {node}: the operator is not known in a tail")
        if node.operator == "Constant":
            with located(str(node)):
                [constants[outputs[0]]] = [_array(_value(part)) for part in item.attribute]
        elif node.operator != "If":
            yield _upgraded(node, item, opset, constants)
        else:
            if len(guards) == DEEPEST or len(inputs) != 1:
                raise ModelError(f"tail: {node}: it has {len(inputs)} inputs, and {len(guards)} others around it")
            graphs = {part.name: part.g for part in item.attribute}
            results = []
            for key, holds in (("then_branch", True), ("else_branch", False)):
                branch, number = graphs.get(key, onnx.GraphProto()), next(numbers)
                own = [tensor.name for tensor in branch.initializer]
                own += [name for inner in branch.node for name in inner.output if name]
                scope = {**names, **{name: f"{_name(name)}\0{number}" for name in own}}
                yield from _nodes(branch, opset, constants, scope, (*guards, (inputs[0], holds)), numbers)
                results.append([scope.get(port.name, _name(port.name)) for port in branch.output])
            if not len(results[0]) == len(results[1]) == len(outputs):
                raise ModelError(f"tail: {node}: its branches have {len(results[0])} and {len(results[1])} outputs")
            for output, *chosen in zip(outputs, *results, strict=True):
                yield node._replace(inputs=(*inputs, *chosen), outputs=(output,))


def _upgraded(node: Node, item: onnx.NodeProto, opset: int, constants: dict[str, NDArray[Any]]) -> Node:
    """Return a node in the form of the newest opset: attributes that are inputs there become constants."""
    inputs, name, where = node.inputs, node.name, f"tail: {node}"
    if node.operator not in TAIL_OPS:
        raise ModelError(f"{where}: the operator is not known in a tail")
    op = node.op
    attributes: dict[str, Any] = {"num_outputs": len(node.outputs)} if "num_outputs" in op.attributes else {}
    for since, defaults in op.older.items():
        attributes |= defaults if opset < since else {}
    for part in item.attribute:
        index = next((i for i, item in enumerate(op.inputs) if item.name == part.name), None)
        with located(f"{node}: attribute {part.name}"):
            value = _value(part)
            if index is None:
                attributes[part.name] = _checked(op, part.name, value)
                continue
            constant = NamePool(constants).take(f"{name}.{part.name}")
            constants[constant] = _array(value)
        inputs = (*inputs, *[""] * (index + 1 - len(inputs)))
        inputs = (*inputs[:index], constant, *inputs[index + 1 :])
    for key, (_, default) in op.attributes.items():
        if key not in attributes and default is Parameter.empty:
            raise ModelError(f"{where}: it has no attribute {key}")
    return node._replace(inputs=inputs, attributes=attributes)


def _checked(op: TailOp, key: str, value: Any) -> Any:
    """Return the value of an attribute for the operator's function. Raises ValueError if it is not supported."""
    if key not in op.attributes:
        raise ValueError("the operator has no such attribute in a tail")
    hint = op.attributes[key][0]
    if key == "to" and isinstance(value, int):
        return _type_name(value)
    if get_origin(hint) is Literal:
        fits = value in get_args(hint)
    else:
        kinds = [get_origin(kind) or kind for kind in get_args(hint) or [hint]]
        fits = type(value) in (kinds if get_origin(hint) is not list else [list])
    if not fits:
        raise ValueError(f"{value!r:.80} is not possible in a tail")
    return value
