"""Inputs that are bound to a value: they become constants of the graph before anything folds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.dim import Sym
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.read.binding import InputInfo, bind
from onnx2ncnn_opt.onnx.read.given import GivenShapes

LARGEST_VALUE = 2**26  # elements; a larger array is not a flag or threshold


def bind_values(
    graph: onnx_ir.Graph, values: Mapping[str, Any], shapes: GivenShapes
) -> tuple[dict[str, Array], dict[str, int]]:
    """Turn inputs into constants; returns their arrays, and what became of the symbols in their shapes.

    A value is a number, a bool, or an array (nested lists) of the input's shape. A flat one of as many elements takes
    the input's shape, a single number fills it. `shapes` are the caller's sizes of inputs. An input with a default (an
    initializer of its name) loses it.

    Raises:
        UsageError: `values` names no input, or a value does not fit the input's type or shape.
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
        array = _shaped(arrays[info.name], info).astype(_typed(arrays[info.name], info))
        for dim, size in zip(value.shape or (), array.shape, strict=False):
            if not isinstance(dim, int) and dim.value is not None:
                sizes[dim.value] = size
        bound[info.name] = array
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
    if declared is None:
        return True
    return len(declared) == len(shape) and all(
        dim == size for dim, size in zip(declared, shape, strict=True) if isinstance(dim, int) and dim >= 0
    )


def _shaped(array: Array, info: InputInfo) -> Array:
    """Return the array in the input's shape."""
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
    """Return the input's type, if it holds the value."""
    dtype = np.dtype(info.dtype.numpy())
    if dtype.kind in "biu":
        low, high = (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
        fits = all(low <= x <= high and x == int(x) for x in array.reshape(-1).tolist() if math.isfinite(x))
        fits = fits and bool(np.isfinite(array).all())
    elif dtype.kind == "f" or info.dtype is onnx_ir.DataType.BFLOAT16:
        with np.errstate(over="ignore"):
            fits = not (np.isinf(array.astype(dtype).astype(np.float64)) & np.isfinite(array)).any()
    else:
        raise UsageError(f"{info} is of a type that cannot be bound to a value")
    if not fits:
        raise UsageError(f"{info} cannot hold the value {array.tolist()!r:.80}")
    return dtype
