"""A tail, the nodes after the net, run with NumPy only."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

import onnx2ncnn_opt.tail.operators  # noqa: F401
from onnx2ncnn_opt.errors import ModelError, RunError, UsageError
from onnx2ncnn_opt.manifest import fits
from onnx2ncnn_opt.tail.registry import TAIL_OPS, TailOp

_MOST_ELEMENTS = 2**30  # of all results together
DEEPEST = 8  # axes of a tensor, and If nodes around a node
# Errors of NumPy and the operators for invalid arguments.
_ERRORS = (ValueError, IndexError, TypeError, KeyError, OverflowError, ZeroDivisionError, MemoryError)


class Port(NamedTuple):
    """An input or output; a size is a number, a symbol or unknown."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype} [{', '.join('?' if size is None else str(size) for size in self.shape)}]"


class Node(NamedTuple):
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


Checked: TypeAlias = Callable[[Node, Sequence[NDArray[Any] | None], list[NDArray[Any]]], list[NDArray[Any]]]


@dataclass(frozen=True)
class Program:
    """Topologically sorted nodes with known types."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    constants: Mapping[str, NDArray[Any]]
    nodes: tuple[Node, ...]

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
        with located(str(node)):
            return node.op.types(
                [types[name] if name else None for name in node.inputs], node.attributes, len(node.outputs)
            )

    def run(self, arrays: Mapping[str, NDArray[Any]], checked: Checked | None = None) -> dict[str, NDArray[Any]]:
        """Return the outputs by name. Raises UsageError for invalid arrays, RunError if a node fails.

        `checked` gets each node with its inputs and results, and returns the results for the next nodes.
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
                    results = results if checked is None else checked(node, inputs, results)
                    total += sum(result.size for result in results)
                    if total > _MOST_ELEMENTS or any(result.ndim > DEEPEST for result in results):
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
            if array.dtype.name != dtype or not fits(array.shape, shape, sizes):
                actual = f"{array.dtype} {list(array.shape)}"
                raise UsageError(f"tail: input '{name}' is {dtype} {list(shape)}, and the array is {actual}")
            yield name, array


@contextmanager
def located(where: str) -> Iterator[None]:
    """Turn errors of a part of the file into ModelErrors that say where it is."""
    try:
        yield
    except _ERRORS as error:
        raise ModelError(f"tail: {where}: {error}") from error


def _define(types: dict[str, str], name: str, dtype: str, where: str) -> None:
    if name in types:
        raise ModelError(f"tail: {where}: '{name}' is defined twice")
    types[name] = dtype
