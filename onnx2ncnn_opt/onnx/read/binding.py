"""The declared shapes of graph inputs and outputs, and the sizes and values that the caller binds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import onnx_ir

from onnx2ncnn_opt.errors import ModelError, UsageError
from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym, named, names_in, shape_text, substituted, symbol
from onnx2ncnn_opt.ir.names import NamePool
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.read.given import Equations, GivenShapes, given_size, listed_sizes

LARGEST_VALUE = 2**26  # elements; a larger array is not a flag or threshold


Info = TypeVar("Info", bound="TensorInfo")


@dataclass(frozen=True)
class TensorInfo:
    """A graph input or output; `shape` includes the batch, and is None if the model declares none.

    Do not rely on symbols in an output's shape: torch gives axes of different sizes the same name.
    """

    name: str
    dtype: onnx_ir.DataType
    shape: Shape | None

    def bound(self: Info, sizes: Mapping[str, Dim]) -> Info:
        """Return the input or output with numbers or other names for dynamic dimensions."""
        return self if self.shape is None else replace(self, shape=named(self.shape, sizes))

    def __str__(self) -> str:
        shape = "unknown shape" if self.shape is None else shape_text(self.shape)
        return f"{self.name}: {self.dtype.name.lower()}{shape}"


@dataclass(frozen=True)
class InputInfo(TensorInfo):
    """A graph input, whose rank is always known."""

    shape: Shape


@dataclass(frozen=True)
class LengthInfo(InputInfo):
    """An input that only the net has: a row as long as the inputs `past` and `ids` together have tokens."""

    ids: str
    past: str


def bind(
    inputs: Sequence[onnx_ir.Value],
    outputs: Sequence[onnx_ir.Value],
    shapes: GivenShapes,
    sizes: Mapping[str, int] | None = None,
    named: Iterable[str] = (),
) -> tuple[tuple[InputInfo, ...], tuple[TensorInfo, ...]]:
    """Return inputs and outputs in which the sizes of `shapes` replace symbols, everywhere by the same value.

    Other sizes stay symbols, with the caller's name, the model's name, or a new name of input name and axis. `sizes`
    are symbols that are bound already, `named` other names that have to be inputs. Raises ModelError if an input is not
    a tensor or has no shape, UsageError if `shapes` contradict the model or each other.
    """
    dims = (dim for value in (*inputs, *outputs) for dim in value.shape or ())
    pool = NamePool(dim.value for dim in dims if not isinstance(dim, int) and dim.value)
    declared = [_declared(value, "input", pool) for value in inputs]
    infos = {info.name: info for info in declared}
    for name in (*shapes, *named):
        if name not in infos:
            raise UsageError(f"no input is called '{name}'; {_listing(declared)}")
    for name, given in shapes.items():
        if infos[name].shape is None:
            names = [pool.take(f"{name}_{i}") for i in range(len(given))]
            infos[name] = replace(infos[name], shape=tuple(map(symbol, names)))
    equations = Equations(sizes or {})
    symbols = {str(dim): dim for info in declared for dim in info.shape or () if isinstance(dim, Sym)}
    for name, dim in symbols.items():  # torch writes 2*h beside a size called h
        factor, _, base = name.partition("*")
        if factor.isdigit() and base in symbols:
            equations.equate(dim, int(factor) * symbols[base])
    _equate(infos, shapes, equations, declared, pool)
    bound, results = [], []
    for info in infos.values():
        if info.shape is None:
            raise ModelError(f"input '{info.name}' declares no shape; give one, e.g. --shape {info.name}:1,3,224,224")
        shape = tuple(map(equations.resolved, info.shape))
        if large := [size for size in shape if isinstance(size, int) and size >= 2**31]:
            raise ModelError(f"input '{info.name}' has the size {large[0]}; sizes in ncnn are less than 2^31")
        bound.append(InputInfo(info.name, info.dtype, shape))
    for value in outputs:
        info = _declared(value, "output", pool)
        results.append(replace(info, shape=info.shape and tuple(map(equations.resolved, info.shape))))
    return tuple(bound), tuple(results)


def _equate(
    infos: Mapping[str, TensorInfo],
    shapes: GivenShapes,
    equations: Equations,
    listed: Iterable[TensorInfo],
    pool: NamePool,
) -> None:
    """Make every given size equal to the declared one; raise UsageError for the first impossible equation.

    In ``16*H`` for a size that the model calls H, H is a new name.
    """
    symbols = {str(dim): dim for info in infos.values() for dim in info.shape or () if isinstance(dim, Sym)}
    pending = []
    for name, sizes in shapes.items():
        where = f"shape {listed_sizes(sizes)} given for input '{name}'"
        shape = infos[name].shape or ()
        given = [given_size(size, symbols, where) for size in sizes]
        if len(given) != len(shape):
            raise UsageError(f"{where} has {len(given)} sizes, the model wants {len(shape)}; {_listing(listed)}")
        pairs = enumerate(zip(shape, given, strict=True))
        pending += [(where, axis, dim, size) for axis, (dim, size) in pairs if size is not None]
    own = {str(dim) for *_, dim, size in pending if dim != size and str(dim) in names_in([size])}
    new = {name: symbol(pool.take(name)) for name in sorted(own)}
    pending = [(where, axis, dim, substituted(size, new)) for where, axis, dim, size in pending]
    # An equation with several unknowns may need the solutions of others first.
    while pending:
        left = [equation for equation in pending if not equations.equate(equation[2], equation[3])]
        if len(left) == len(pending):
            where, axis, dim, size = left[0]
            if isinstance(dim, int):
                problem = f"axis {axis} is {dim} in the model, not {equations.resolved(size)}"
            else:
                problem = f"size '{dim}' cannot be both {equations.resolved(dim)} and {equations.resolved(size)}"
            raise UsageError(f"{where}: {problem}; {_listing(listed)}")
        pending = left


def _declared(value: onnx_ir.Value, kind: str, pool: NamePool) -> TensorInfo:
    assert value.name
    dims = None if value.shape is None else enumerate(value.shape)
    shape = None if dims is None else tuple(_dim(dim, f"{value.name}_{axis}", pool) for axis, dim in dims)
    return TensorInfo(value.name, _dtype(value, kind), shape)


def _dim(dim: int | onnx_ir.SymbolicDim, fallback: str, pool: NamePool) -> Dim:
    if isinstance(dim, int):
        return dim if dim >= 0 else symbol(pool.take(fallback))  # some exporters write -1 for "any"
    name = dim.value or pool.take(fallback)
    return int(name) if name.isascii() and name.isdigit() else symbol(name)


def _dtype(value: onnx_ir.Value, kind: str) -> onnx_ir.DataType:
    if not isinstance(value.type, onnx_ir.TensorType):
        if value.type is None and kind == "output":
            return onnx_ir.DataType.UNDEFINED
        raise ModelError(f"{kind} '{value.name}' is of type {value.type or 'unknown'}; only tensors are supported")
    if value.type.dtype is onnx_ir.DataType.UNDEFINED and kind == "input":
        raise ModelError(f"input '{value.name}' declares no element type")
    return value.type.dtype


def _listing(inputs: Iterable[TensorInfo]) -> str:
    return "inputs are: " + "; ".join(map(str, inputs))


def bind_values(
    graph: onnx_ir.Graph, values: Mapping[str, Any], shapes: GivenShapes
) -> tuple[dict[str, Array], dict[str, int]]:
    """Turn inputs into constants before anything folds; return their arrays, and the values of their symbolic sizes.

    A value is a number, a bool, or an array (nested lists). A flat array with the same number of elements is reshaped,
    a single number fills the input. `shapes` are the caller's sizes of inputs. The value replaces an input's default
    (an initializer of its name). Raises UsageError if a value names no input, or does not fit its type or shape.
    """
    arrays = {name: _array(name, value) for name, value in values.items()}
    declared = {value.name: value.shape for value in graph.inputs}
    own = {name: x.shape for name, x in arrays.items() if x.size > 1 and _may_have(declared.get(name), x.shape)}
    inputs, _ = bind(graph.inputs, (), {**own, **shapes}, named=arrays)
    bound: dict[str, Array] = {}
    sizes: dict[str, int] = {}
    for value, info in zip(list(graph.inputs), inputs, strict=True):
        if info.name not in arrays:
            continue
        bound[info.name] = array = _shaped(arrays[info.name], info).astype(_typed(arrays[info.name], info))
        pairs = zip(value.shape or (), array.shape, strict=False)
        sizes |= {dim.value: size for dim, size in pairs if not isinstance(dim, int) and dim.value is not None}
        graph.inputs.remove(value)
        value.const_value = onnx_ir.Tensor(array, dtype=info.dtype, name=info.name)
        graph.initializers[info.name] = value
    return bound, sizes


def _array(name: str, value: Any) -> Array:
    try:
        array = np.asarray(value)
    except ValueError as error:  # lists of different lengths
        raise UsageError(f"the value of input '{name}' is not an array: {error}") from None
    if array.dtype.kind not in "biuf" or array.size == 0:
        raise UsageError(f"the value of input '{name}' has to be a number, a bool or a list of them, not {value!r:.80}")
    return array


def _may_have(declared: onnx_ir.Shape | None, shape: tuple[int, ...]) -> bool:
    dims = shape if declared is None else declared
    pairs = zip(dims, shape, strict=False)
    return len(dims) == len(shape) and all(n == m for n, m in pairs if isinstance(n, int) and n >= 0)


def _shaped(array: Array, info: InputInfo) -> Array:
    """Return the array reshaped or broadcast to the input's shape."""
    shape = tuple(size for size in info.shape if isinstance(size, int))
    if len(shape) < len(info.shape):
        names = ", ".join(str(size) for size in info.shape if isinstance(size, Sym))
        raise UsageError(f"{info} cannot be bound to a value while its size {names} is dynamic; bind it with --shape")
    if math.prod(shape) > LARGEST_VALUE:
        raise UsageError(f"{info} is too large to be bound to a value")
    if array.size == math.prod(shape):
        return array.reshape(shape)
    if array.size > 1:
        raise UsageError(f"the value of {info} has shape {list(array.shape)}")
    return np.full(shape, array.reshape(-1)[0])


def _typed(array: Array, info: InputInfo) -> np.dtype[Any]:
    """Return the input's type; raise UsageError if it cannot represent the value."""
    dtype = np.dtype(info.dtype.numpy())
    if dtype.kind in "biu":
        low, high = (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
        fits = all(math.isfinite(x) and low <= x <= high and x == int(x) for x in array.reshape(-1).tolist())
    elif dtype.kind == "f" or info.dtype is onnx_ir.DataType.BFLOAT16:
        with np.errstate(over="ignore"):
            fits = not (np.isinf(array.astype(dtype).astype(np.float64)) & np.isfinite(array)).any()
    else:
        raise UsageError(f"{info} is of a type that cannot be bound to a value")
    if not fits:
        raise UsageError(f"{info} cannot hold the value {array.tolist()!r:.80}")
    return dtype
