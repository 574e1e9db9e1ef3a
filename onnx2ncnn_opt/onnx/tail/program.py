"""A tail, the nodes after the net: read from an ONNX file and run with NumPy only."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import Parameter
from itertools import count
from typing import Any, Literal, NamedTuple, TypeAlias, get_args, get_origin

import numpy as np
from numpy.typing import NDArray

import onnx2ncnn_opt.onnx.tail.operators  # noqa: F401
from onnx2ncnn_opt.errors import ModelError, RunError, UsageError
from onnx2ncnn_opt.ir.names import NamePool
from onnx2ncnn_opt.onnx.read.embedded import Malformed
from onnx2ncnn_opt.onnx.tail.registry import TAIL_OPS, TailOp
from onnx2ncnn_opt.onnx.tail.wire import Message, attribute, tensor, type_name

_MOST_ELEMENTS = 2**30  # of all results together
_OLDEST = 7  # opset
_DEEPEST = 8  # axes of a tensor, and If nodes around a node
# Errors of NumPy and the operators for invalid arguments.
_ERRORS = (ValueError, IndexError, TypeError, KeyError, OverflowError, ZeroDivisionError, MemoryError)


Inexact: TypeAlias = Callable[[NDArray[Any], NDArray[Any] | None], NDArray[Any]]


class Port(NamedTuple):
    """An input or output; a size is a number, a symbol or unknown."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype} [{', '.join('?' if size is None else str(size) for size in self.shape)}]"


@dataclass(frozen=True)
class Node:
    """One operator; an input "" is absent, an output "" is not needed.

    It runs only if the conditions of the Ifs around it have the values in `guards`.
    """

    operator: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    guards: tuple[tuple[str, bool], ...] = ()

    def __str__(self) -> str:
        return f"{self.operator} '{self.name}'"

    @property
    def op(self) -> TailOp:
        """The entry in the table of operators."""
        return TAIL_OPS[self.operator]


@dataclass(frozen=True)
class Program:
    """Topologically sorted nodes with known types."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    constants: Mapping[str, NDArray[Any]]
    nodes: tuple[Node, ...]

    @classmethod
    def read(cls, data: bytes) -> "Program":
        """Return the tail in an ONNX file. Raises ModelError if it is damaged, or is not a tail."""
        try:
            program = _read(Message(bytes(data)))
        except (Malformed, UnicodeDecodeError) as error:
            raise ModelError("the tail is damaged, or is not an ONNX file; convert the model again") from error
        _ = program.types  # checks every node
        return program

    @cached_property
    def types(self) -> Mapping[str, str]:
        """The element type of each value. Raises ModelError if nodes do not match."""
        types = {name: array.dtype.name for name, array in self.constants.items()}
        for port in self.inputs:
            _define(types, port.name, port.dtype, "the tail's inputs")
        for node in self.nodes:
            for name in (*node.inputs, *(name for name, _ in node.guards)):
                if name and name not in types:
                    raise ModelError(f"tail: {node}: no node before it computes its input '{name}'")
            letters = self.letters(node, types)
            for name, dtype in zip(node.outputs, node.op.result_types(letters, len(node.outputs)), strict=True):
                if name:
                    _define(types, name, dtype, str(node))
        for port in self.outputs:
            if types.get(port.name) != port.dtype:
                raise ModelError(
                    f"tail: output '{port.name}' is {port.dtype}, and is computed as {types.get(port.name)}"
                )
        return types

    def letters(self, node: Node, types: Mapping[str, str]) -> Mapping[str, str]:
        """Return the element type of each letter in the schema of a node's operator."""
        with _located(str(node)):
            return node.op.types(
                [types[name] if name else None for name in node.inputs], node.attributes, len(node.outputs)
            )

    def run(self, arrays: Mapping[str, NDArray[Any]], inexact: Inexact | None = None) -> dict[str, NDArray[Any]]:
        """Return the outputs by name. Raises UsageError for invalid arrays, RunError if a node fails.

        `inexact` is applied to results of functions such as exp, and of Cast, and their first input; it adds errors.
        """
        values = {**self.constants, **dict(self._checked(arrays))}
        total = 0
        with np.errstate(all="ignore"):
            for node in self.nodes:
                if not all(values[name].all() == holds for name, holds in node.guards):
                    continue
                try:
                    inputs = [values.get(name) for name in node.inputs]
                    results = node.op.run(inputs, node.attributes)
                    if inexact is not None and (node.op.is_inexact or node.operator == "Cast"):
                        results = [inexact(result, inputs[0]) for result in results]
                    total += sum(result.size for result in results)
                    if total > _MOST_ELEMENTS or any(result.ndim > _DEEPEST for result in results):
                        raise ValueError(f"results of {[result.shape for result in results]}, {total} elements in all")
                except _ERRORS as error:
                    raise RunError(f"tail: {node}: {type(error).__name__}: {error}") from error
                values |= zip(node.outputs, results, strict=False)
        return {
            port.name: np.ascontiguousarray(values[port.name]).reshape(values[port.name].shape) for port in self.outputs
        }

    def _checked(self, arrays: Mapping[str, NDArray[Any]]) -> Iterator[tuple[str, NDArray[Any]]]:
        sizes: dict[str, int] = {}
        for name, dtype, shape in self.inputs:
            if name not in arrays:
                raise UsageError(f"tail: there is no array for the input '{name}'")
            array = np.asarray(arrays[name])
            fits = len(shape) == array.ndim and all(
                dim is None or size == (sizes.setdefault(dim, size) if isinstance(dim, str) else dim)
                for dim, size in zip(shape, array.shape, strict=True)
            )
            if array.dtype.name != dtype or not fits:
                actual = f"{array.dtype} {list(array.shape)}"
                raise UsageError(f"tail: input '{name}' is {dtype} {list(shape)}, and the array is {actual}")
            yield name, array


@contextmanager
def _located(where: str) -> Iterator[None]:
    """Turn errors of a part of the file into ModelErrors that say where it is."""
    try:
        yield
    except (ValueError, IndexError) as error:
        raise ModelError(f"tail: {where}: {error}") from error


def _define(types: dict[str, str], name: str, dtype: str, where: str) -> None:
    if name in types:
        raise ModelError(f"tail: {where}: '{name}' is defined twice")
    types[name] = dtype


def _read(model: Message) -> Program:
    graph = model.one(7)
    opsets = [item.integer(2) for item in model.messages(8) if item.text(1) in ("", "ai.onnx")]
    opset = max(opsets, default=0)
    if opset < _OLDEST:
        raise ModelError(f"tail: opset {opset} is older than {_OLDEST}")
    constants: dict[str, NDArray[Any]] = {}
    nodes = list(_nodes(graph, opset, constants, {}, (), count(1)))
    inputs = [_port(item) for item in graph.messages(11) if item.text(1) not in constants]
    return Program(tuple(inputs), tuple(map(_port, graph.messages(12))), constants, tuple(nodes))


def _port(value: Message) -> Port:
    name, kind = value.text(1), value.one(2).one(1)
    with _located(f"'{name}'"):
        dtype = type_name(kind.integer(1))
    dims = kind.one(2).messages(1)
    if len(dims) > _DEEPEST:
        raise ModelError(f"tail: '{name}' has {len(dims)} axes; at most {_DEEPEST} are possible")
    return Port(name, dtype, tuple(dim.text(2) or (dim.integer(1) if dim.ints(1) else None) for dim in dims))


def _nodes(
    graph: Message,
    opset: int,
    constants: dict[str, NDArray[Any]],
    names: Mapping[str, str],
    guards: tuple[tuple[str, bool], ...],
    numbers: Iterator[int],
) -> Iterator[Node]:
    """Yield the nodes of a graph; the nodes in branches of an If come before it.

    `names` are new names of values in branches. Constants become entries of `constants`.
    """
    for item in graph.messages(5):
        with _located(f"constant '{item.text(8)}'"):
            constants[names.get(item.text(8), item.text(8))] = tensor(item)
    for item in graph.messages(1):
        node, domain = _node(item, names, guards), item.text(7)
        inputs, outputs = node.inputs, node.outputs
        if domain not in ("", "ai.onnx"):
            raise ModelError(f"tail: {node}: the operator is not known in a tail")
        if node.operator == "Constant":
            with _located(str(node)):
                [constants[outputs[0]]] = [_array(attribute(part)) for part in item.messages(5)]
        elif node.operator != "If":
            yield _upgraded(node, item, opset, constants)
        else:
            if len(guards) == _DEEPEST or len(inputs) != 1:
                raise ModelError(f"tail: {node}: it has {len(inputs)} inputs, and {len(guards)} others around it")
            graphs = {part.text(1): part.one(6) for part in item.messages(5)}
            results = []
            for key, holds in (("then_branch", True), ("else_branch", False)):
                branch, number = graphs.get(key, Message(b"")), next(numbers)
                own = [item.text(8) for item in branch.messages(5)]
                own += [name for inner in branch.messages(1) for name in inner.texts(2) if name]
                scope = {**names, **{name: f"{name}\0{number}" for name in own}}
                yield from _nodes(branch, opset, constants, scope, (*guards, (inputs[0], holds)), numbers)
                results.append([scope.get(port.text(1), port.text(1)) for port in branch.messages(12)])
            if not len(results[0]) == len(results[1]) == len(outputs):
                raise ModelError(f"tail: {node}: its branches have {len(results[0])} and {len(results[1])} outputs")
            for output, *chosen in zip(outputs, *results, strict=True):
                yield replace(node, inputs=(*inputs, *chosen), outputs=(output,))


def _node(item: Message, names: Mapping[str, str], guards: tuple[tuple[str, bool], ...]) -> Node:
    """Return a node without its attributes."""
    inputs, outputs = (tuple(names.get(x, x) for x in item.texts(field)) for field in (1, 2))
    return Node(item.text(4), item.text(3) or "".join(item.texts(2)[:1]), inputs, outputs, {}, guards)


def _array(value: Any) -> NDArray[Any]:
    """Return an attribute as a tensor."""
    array = np.asarray(value)
    return array if isinstance(value, np.ndarray) or array.dtype != np.float64 else array.astype(np.float32)


def _upgraded(node: Node, item: Message, opset: int, constants: dict[str, NDArray[Any]]) -> Node:
    """Return a node in the form of the newest opset: attributes that are inputs there become constants."""
    inputs, name, where = node.inputs, node.name, f"tail: {node}"
    if node.operator not in TAIL_OPS:
        raise ModelError(f"{where}: the operator is not known in a tail")
    op = node.op
    attributes: dict[str, Any] = {"num_outputs": len(node.outputs)} if "num_outputs" in op.attributes else {}
    for since, defaults in op.older.items():
        attributes |= defaults if opset < since else {}
    for part in item.messages(5):
        key = part.text(1)
        index = next((i for i, item in enumerate(op.inputs) if item.name == key), None)
        with _located(f"{node}: attribute {key}"):
            value = attribute(part)
            if index is None:
                attributes[key] = _checked(op, key, value)
                continue
        constant = NamePool(constants).take(f"{name}.{key}")
        constants[constant] = _array(value)
        inputs = (*inputs, *[""] * (index + 1 - len(inputs)))
        inputs = (*inputs[:index], constant, *inputs[index + 1 :])
    for key, (_, default) in op.attributes.items():
        if key not in attributes and default is Parameter.empty:
            raise ModelError(f"{where}: it has no attribute {key}")
    return replace(node, inputs=inputs, attributes=attributes)


def _checked(op: TailOp, key: str, value: Any) -> Any:
    """Return the value of an attribute for the operator's function. Raises ValueError if it is not supported."""
    if key not in op.attributes:
        raise ValueError("the operator has no such attribute in a tail")
    hint = op.attributes[key][0]
    if key == "to" and isinstance(value, int):
        return type_name(value)
    if get_origin(hint) is Literal:
        fits = value in get_args(hint)
    else:
        kinds = [get_origin(kind) or kind for kind in get_args(hint) or [hint]]
        fits = type(value) in (kinds if get_origin(hint) is not list else [list])
    if not fits:
        raise ValueError(f"{value!r:.80} is not possible in a tail")
    return value
