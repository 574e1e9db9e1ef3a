"""The declared shapes of graph inputs and outputs, and the sizes that the caller binds."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir

from onnx2ncnn_opt.errors import ModelError, UsageError
from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym, symbol

LARGEST_SIZE = 2**31 - 1  # ncnn counts in int


@dataclass(frozen=True)
class TensorInfo:
    """A graph input or output; `shape` is ONNX's, batch included.

    Of an output it is what the exporter wrote: None where nothing, and symbols are not to be relied on (torch gives
    axes of different sizes the same name).
    """

    name: str
    dtype: onnx_ir.DataType
    shape: Shape | None

    def __str__(self) -> str:
        shape = "unknown shape" if self.shape is None else "[" + ", ".join(map(str, self.shape)) + "]"
        return f"{self.name}: {self.dtype.name.lower()}{shape}"


@dataclass(frozen=True)
class InputInfo(TensorInfo):
    """A graph input, whose rank is always known."""

    shape: Shape


def bind(
    inputs: Sequence[onnx_ir.Value],
    outputs: Sequence[onnx_ir.Value],
    shapes: Mapping[str, Sequence[int]],
    sizes: Mapping[str, int] | None = None,
    named: Iterable[str] = (),
) -> tuple[tuple[InputInfo, ...], tuple[TensorInfo, ...]]:
    """Inputs and outputs with the sizes of `shapes` in place of symbols, the same value wherever a symbol occurs.

    Sizes left open stay symbols: by the name the model gives them, else by a new one made of input name and axis.
    `sizes` are symbols that are bound already, `named` other names that have to be inputs.

    Raises:
        ModelError: an input is no tensor, or has no shape and none was given.
        UsageError: `shapes` names no input, or disagrees with the model or with itself.
    """
    taken = {dim.value for value in (*inputs, *outputs) for dim in value.shape or () if not isinstance(dim, int)}
    declared = [TensorInfo(_name(value), _dtype(value, "input"), _shape(value, taken)) for value in inputs]
    known = {info.name: info for info in declared}
    for name in (*shapes, *named):
        if name not in known:
            raise UsageError(f"no input is called '{name}'; {_listing(declared)}")
    values = dict(sizes or {})
    for name, given in shapes.items():
        _match(known[name], given, values, declared)
    bound = []
    for info in declared:
        shape = tuple(shapes[info.name]) if info.name in shapes else info.shape
        if shape is None:
            raise ModelError(f"input '{info.name}' declares no shape; give one, e.g. --shape {info.name}:1,3,224,224")
        bound.append(InputInfo(info.name, info.dtype, _substitute(shape, values)))
    results = []
    for value in outputs:
        shape = _shape(value, taken)
        shape = None if shape is None else _substitute(shape, values)
        results.append(TensorInfo(_name(value), _dtype(value, "output"), shape))
    return tuple(bound), tuple(results)


_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Dim]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def parsed_size(text: str, sizes: Mapping[str, Dim]) -> Dim | None:
    """A size that is said in others, as torch says it: ``((h + 1)//2)``. None where one of those is not known."""
    if text in sizes:
        return sizes[text]
    try:
        return _parsed(ast.parse(text, mode="eval").body, sizes)
    except SyntaxError:
        return None


def _parsed(tree: ast.expr, sizes: Mapping[str, Dim]) -> Dim | None:
    if isinstance(tree, ast.Name):
        return sizes.get(tree.id)
    if isinstance(tree, ast.Constant):
        return tree.value if type(tree.value) is int else None
    if not isinstance(tree, ast.BinOp) or type(tree.op) not in _OPERATORS:
        return None
    a, b = _parsed(tree.left, sizes), _parsed(tree.right, sizes)
    if a is None or b is None or (isinstance(tree.op, ast.FloorDiv) and b == 0):
        return None
    return _OPERATORS[type(tree.op)](a, b)


def _match(info: TensorInfo, sizes: Sequence[int], values: dict[str, int], inputs: Iterable[TensorInfo]) -> None:
    """Check the sizes given for one input, and note what its symbols become."""
    given = f"shape {','.join(map(str, sizes))} given for input '{info.name}'"
    for size in sizes:
        if not 0 < size <= LARGEST_SIZE:
            raise UsageError(f"{given}: {size} is no possible size")
    if info.shape is None:
        return
    if len(sizes) != len(info.shape):
        raise UsageError(f"{given} has {len(sizes)} sizes, the model wants {len(info.shape)}; {_listing(inputs)}")
    for axis, (dim, size) in enumerate(zip(info.shape, sizes, strict=True)):
        if isinstance(dim, Sym):
            before = values.setdefault(str(dim), size)
            if before != size:
                raise UsageError(f"{given}: size '{dim}' cannot be both {before} and {size}; {_listing(inputs)}")
        elif dim != size:
            raise UsageError(f"{given}: axis {axis} is {dim} in the model, not {size}; {_listing(inputs)}")


def _substitute(shape: Shape, values: Mapping[str, int]) -> Shape:
    return tuple(dim.subs(values) if isinstance(dim, Sym) else dim for dim in shape)


def _shape(value: onnx_ir.Value, taken: set[str | None]) -> Shape | None:
    if value.shape is None:
        return None
    return tuple(_dim(dim, f"{value.name}_{axis}", taken) for axis, dim in enumerate(value.shape))


def _dim(dim: int | onnx_ir.SymbolicDim, fallback: str, taken: set[str | None]) -> Dim:
    if isinstance(dim, int):
        size: int | str | None = dim if dim >= 0 else None  # some exporters write -1 for "any"
    else:
        size = dim.value
    if isinstance(size, str) and size.isascii() and size.isdigit():
        return int(size)
    if size:
        return symbol(size) if isinstance(size, str) else size
    if size == 0:
        return 0
    while fallback in taken:
        fallback += "_"
    taken.add(fallback)
    return symbol(fallback)


def _dtype(value: onnx_ir.Value, kind: str) -> onnx_ir.DataType:
    if not isinstance(value.type, onnx_ir.TensorType):
        if value.type is None and kind == "output":
            return onnx_ir.DataType.UNDEFINED
        raise ModelError(f"{kind} '{value.name}' is of type {value.type or 'unknown'}; only tensors are supported")
    if value.type.dtype is onnx_ir.DataType.UNDEFINED and kind == "input":
        raise ModelError(f"input '{value.name}' declares no element type")
    return value.type.dtype


def _name(value: onnx_ir.Value) -> str:
    assert value.name
    return value.name


def _listing(inputs: Iterable[TensorInfo]) -> str:
    return "inputs are: " + "; ".join(map(str, inputs))
