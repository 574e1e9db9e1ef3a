"""The declared shapes of graph inputs and outputs, and the sizes that the caller binds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir

from onnx2ncnn_opt.errors import ModelError, UsageError
from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym, shape_text, symbol
from onnx2ncnn_opt.onnx.read.given import Equations, GivenShapes, given_size


@dataclass(frozen=True)
class TensorInfo:
    """A graph input or output; `shape` is ONNX's, batch included.

    Of an output it is what the exporter wrote: None if nothing, and symbols are not to be relied on (torch gives
    axes of different sizes the same name).
    """

    name: str
    dtype: onnx_ir.DataType
    shape: Shape | None

    def __str__(self) -> str:
        shape = "unknown shape" if self.shape is None else shape_text(self.shape)
        return f"{self.name}: {self.dtype.name.lower()}{shape}"


@dataclass(frozen=True)
class InputInfo(TensorInfo):
    """A graph input, whose rank is always known."""

    shape: Shape


def bind(
    inputs: Sequence[onnx_ir.Value],
    outputs: Sequence[onnx_ir.Value],
    shapes: GivenShapes,
    sizes: Mapping[str, int] | None = None,
    named: Iterable[str] = (),
) -> tuple[tuple[InputInfo, ...], tuple[TensorInfo, ...]]:
    """Return inputs and outputs with the sizes of `shapes` for symbols, the same value wherever a symbol occurs.

    Sizes left open stay symbols: by the name that the caller gives them, else the model, else by a new one made of
    input name and axis. `sizes` are symbols that are bound already, `named` other names that have to be inputs.

    Raises:
        ModelError: an input is not a tensor, or has no shape and none was given.
        UsageError: `shapes` names no input, or disagrees with the model or with itself.
    """
    taken = {dim.value for value in (*inputs, *outputs) for dim in value.shape or () if not isinstance(dim, int)}
    declared = [TensorInfo(_name(value), _dtype(value, "input"), _shape(value, taken)) for value in inputs]
    known = {info.name: info for info in declared}
    for name in (*shapes, *named):
        if name not in known:
            raise UsageError(f"no input is called '{name}'; {_listing(declared)}")
    for name, given in shapes.items():
        if known[name].shape is None:
            known[name] = replace(
                known[name], shape=tuple(symbol(_fresh(f"{name}_{i}", taken)) for i in range(len(given)))
            )
    equations = Equations(sizes or {})
    _equate(known, shapes, equations, declared)
    bound = []
    for info in known.values():
        if info.shape is None:
            raise ModelError(f"input '{info.name}' declares no shape; give one, e.g. --shape {info.name}:1,3,224,224")
        bound.append(InputInfo(info.name, info.dtype, tuple(map(equations.resolved, info.shape))))
    results = []
    for value in outputs:
        shape = _shape(value, taken)
        shape = None if shape is None else tuple(map(equations.resolved, shape))
        results.append(TensorInfo(_name(value), _dtype(value, "output"), shape))
    return tuple(bound), tuple(results)


def _equate(
    known: Mapping[str, TensorInfo], shapes: GivenShapes, equations: Equations, listed: Iterable[TensorInfo]
) -> None:
    """Let every given size be the declared one; UsageError for the first that cannot."""
    symbols = {str(dim): dim for info in known.values() for dim in info.shape or () if isinstance(dim, Sym)}
    pending = []
    for name, sizes in shapes.items():
        where = f"shape {','.join('?' if size is None else str(size) for size in sizes)} given for input '{name}'"
        shape = known[name].shape or ()
        meant = [given_size(size, symbols, where) for size in sizes]
        if len(meant) != len(shape):
            raise UsageError(f"{where} has {len(meant)} sizes, the model wants {len(shape)}; {_listing(listed)}")
        pending += [
            (where, axis, dim, size)
            for axis, (dim, size) in enumerate(zip(shape, meant, strict=True))
            if size is not None
        ]
    # An equation of several names may have to wait for what others say of these.
    while pending:
        left = [equation for equation in pending if not equations.equate(equation[2], equation[3])]
        if len(left) == len(pending):
            where, axis, dim, size = left[0]
            if isinstance(dim, int):
                raise UsageError(
                    f"{where}: axis {axis} is {dim} in the model, not {equations.resolved(size)}; {_listing(listed)}"
                )
            both = f"{equations.resolved(dim)} and {equations.resolved(size)}"
            raise UsageError(f"{where}: size '{dim}' cannot be both {both}; {_listing(listed)}")
        pending = left


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
    return symbol(_fresh(fallback, taken))


def _fresh(name: str, taken: set[str | None]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


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
