"""Constant operands (MemoryData) as ncnn broadcasts them, and the data of new constants."""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from onnx2ncnn_opt.ir.dim import by_axis
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.weight import Array, Encoding
from onnx2ncnn_opt.rewrite.rule import known_shape, require


def is_constant(blob: Blob) -> bool:
    """Return True if a MemoryData produces the blob."""
    return blob.made_by("MemoryData") is not None


def is_stored_in_32_bits(blob: Blob) -> bool:
    """Return True if a MemoryData with floats of 32 bits produces the blob, and no other."""
    layer = blob.made_by("MemoryData")
    return layer is not None and len(layer.outputs) == 1 and layer.weights.stored("data").encoding is Encoding.FP32


def with_data(const: Layer, data: Array) -> Layer:
    """Return a MemoryData with other data, of the dtype of the stored data, and with its shape."""
    sizes: dict[str, Any] = dict.fromkeys("whdc") | by_axis(data.shape)
    block = replace(const.weights.stored("data"), data=np.ascontiguousarray(data).reshape(-1))
    return const.having(**sizes, weights={"data": block})


def constant_array(const: Layer) -> Array:
    """Return a MemoryData's numbers in float64, in the shape of its blob; refused if they are not finite floats."""
    require("data" in const.weights and const.weights.stored("data").is_float, f"'{const.name}' holds no floats")
    require(not (const["d"] and not const["c"]), f"'{const.name}' has d without c")
    sizes = (const["c"], const["d"], const["h"], const["w"])
    data = const.weights["data"].reshape([size for size in sizes if size]).astype(np.float64)
    require(np.isfinite(data).all(), f"'{const.name}' holds values that are not finite")
    return data


def element_count(const: Layer) -> int:
    """Return the number of values of a MemoryData."""
    return math.prod(max(int(const[size]), 1) for size in "whdc")


def is_uniform(const: Layer) -> bool:
    """Return True if all values of a MemoryData are the same float."""
    if "data" not in const.weights or not const.weights.stored("data").is_float:
        return False
    data = const.weights["data"]
    return bool(data.size and data.flat[0] == data.flat[-1] and (data == data.flat[0]).all())


def scalar(const: Layer, x: Blob) -> float:
    """Return the value of an `is_uniform` operand of `x`; refused if it changes the shape of `x`."""
    data = constant_array(const)
    _require_no_higher_rank(data, const, x)
    return float(data.flat[0])


def per_channel(const: Layer, x: Blob, channels: int) -> Array:
    """Return a constant operand of `x` as one value for each of the `channels` slices of the outermost axis.

    ncnn aligns a 1-D operand with the outermost axis if it has that size, and other lower ranks with the outer axes.
    """
    data = constant_array(const)
    if data.shape == (channels,):
        return data
    _require_no_higher_rank(data, const, x)
    if data.size == 1:
        return np.full(channels, data.reshape(()))
    outermost = data.ndim > 1 and data.shape[0] == channels == data.size
    require(outermost, f"'{const.name}' of shape {data.shape} is not one value for each of {channels} channels")
    return data.reshape(channels)


def per_column(const: Layer, x: Blob, columns: int) -> Array:
    """Return a constant operand of a 2-D `x` of shape (rows, columns) as one value for each column."""
    data = constant_array(const)
    shape = known_shape(x)
    _require_no_higher_rank(data, const, x)
    if data.size == 1:
        return np.full(columns, data.reshape(()))
    if data.ndim == 1:
        # ncnn aligns a 1-D operand with the rows if it has their number, even if it has the number of columns.
        rows = shape[0]
        require(isinstance(rows, int) and rows != data.size, f"'{const.name}' may be one value for each row")
    fits = data.shape in ((columns,), (1, columns))
    require(fits, f"'{const.name}' of shape {data.shape} is not one value for each of {columns} columns")
    return data.reshape(columns)


def _require_no_higher_rank(data: Array, const: Layer, x: Blob) -> None:
    if data.ndim > 1:
        require(data.ndim <= len(known_shape(x)), f"'{const.name}' has more dimensions than '{x.name}'")


def finite_float32(value: float) -> bool:
    """Return True if a number is finite in float32, as a .param file needs it."""
    return abs(value) <= float(np.finfo(np.float32).max)


def stored(layer: Layer, name: str, values: Array) -> Array:
    """Return new weights of a layer as float32; refused if one would overflow."""
    with np.errstate(over="ignore"):
        data = values.astype(np.float32)
    require(np.isfinite(data).all(), f"{layer.type} '{layer.name}': {name} would overflow")
    return data


def scaled(layer: Layer, name: str, values: Array, factors: Array) -> Array:
    """Return a layer's weights times factors that broadcast to them, as float32; refused if one would overflow."""
    product = np.empty(values.shape, np.float32)
    with np.errstate(over="ignore"):
        # NumPy uses a small buffer: a large weight in float64 would take twice its memory.
        np.multiply(values, factors, out=product, dtype=np.float64, casting="same_kind")
    return stored(layer, name, product)
