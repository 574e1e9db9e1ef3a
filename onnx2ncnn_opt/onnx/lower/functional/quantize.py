"""Quantised tensors, stored as float32 numbers of the same values, and arithmetic on them.

Quantisation does not make this net faster, but the net computes the quantised model's results. Integers up to 2**24,
their sums and products are exact in float32; larger ones are rounded.
"""

import numpy as np
import onnx_ir

from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import arithmetic, binary, number
from onnx2ncnn_opt.onnx.lower.functional.cast import as_float, float_value
from onnx2ncnn_opt.onnx.lower.functional.crop import crop
from onnx2ncnn_opt.onnx.lower.functional.division import divide_by_whole, divided
from onnx2ncnn_opt.onnx.lower.functional.matmul import matmul
from onnx2ncnn_opt.onnx.lower.functional.reduce import reduce
from onnx2ncnn_opt.onnx.lower.functional.views import repeated
from onnx2ncnn_opt.onnx.value import Constant, Tensor, Value, held_as_float

# The quantised types and their numbers.
_RANGES = {f"uint{bits}": (0, 2**bits - 1) for bits in (2, 4, 8, 16)}
_RANGES |= {f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (2, 4, 8, 16)}
_UINT8: np.dtype[np.generic] = np.dtype(np.uint8)


def quantize_linear(
    im: ImportContext,
    x: Value,
    y_scale: Value,
    y_zero_point: Value | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
    saturate: int = 1,
) -> Tensor:
    """BinaryOp mul, Clip and UnaryOp round; BinaryOp add for the zero point."""
    dtype = onnx_ir.DataType(output_dtype).numpy() if output_dtype else type_of(y_zero_point)
    scale = broadcastable(im, x, y_scale, axis, block_size)
    zero = None if y_zero_point is None else broadcastable(im, x, y_zero_point, axis, block_size)
    return quantized(im, _divided(im, as_float(im, im.tensor(x)), scale), zero, dtype)


def dequantize_linear(
    im: ImportContext,
    x: Value,
    x_scale: Value,
    x_zero_point: Value | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Value:
    """BinaryOp sub for the zero point, and mul."""
    scale = broadcastable(im, x, x_scale, axis, block_size)
    zero = None if x_zero_point is None else broadcastable(im, x, x_zero_point, axis, block_size)
    return scaling(im, BinaryOp.MUL, centred(im, x, zero), scale)


def dynamic_quantize_linear(im: ImportContext, x: Tensor) -> tuple[Value, ...]:
    """Reductions for the range, then the layers of QuantizeLinear to uint8."""
    low = binary(im, BinaryOp.MIN, reduce(im, x, "ReduceMin", None, 0), number(0))
    high = binary(im, BinaryOp.MAX, reduce(im, x, "ReduceMax", None, 0), number(0))
    width = im.tensor(divide_by_whole(im, binary(im, BinaryOp.SUB, high, low), number(255)))
    empty = binary(im, BinaryOp.SUB, number(1), im.unary(width, "Threshold", threshold=0.0))
    scale = binary(im, BinaryOp.ADD, width, empty)  # a tensor of zeros has the scale 1
    lowest = binary(im, BinaryOp.SUB, number(0), binary(im, BinaryOp.DIV, low, scale))
    zero = im.apply(im.unary(lowest, "Clip", min=0.0, max=255.0), UnaryOp.ROUND).of_type(held_as_float(_UINT8))
    return quantized(im, divided(im, x, scale), zero, _UINT8), scale, zero


def broadcastable(im: ImportContext, x: Value, param: Value, axis: int, block: int = 0) -> Value:
    """Return a scale or zero point, which is per tensor, per axis or per block, in a shape that broadcasts with x."""
    if all(size == 1 for size in param.shape):
        return im.reshape(param, ())
    axis = im.axis(axis, x.rank)
    if param.rank == 1 and not block:
        return im.reshape(param, (*param.shape, *(1,) * (x.rank - axis - 1)))
    size = x.shape[axis]
    if not block or param.rank != x.rank or not isinstance(size, int):
        raise im.invalid(f"a scale or zero point of shape {list(param.shape)} for an operand of shape {list(x.shape)}")
    if isinstance(param, Constant):
        return Constant(np.repeat(param.array, block, axis).take(range(size), axis))
    before, after = param.shape[: axis + 1], param.shape[axis + 1 :]
    column = im.tensor(im.reshape(param, (*before, 1, *after)))
    blocks = repeated(im, column, [block if i == axis + 1 else 1 for i in range(column.rank)])
    return crop(im, im.tensor(im.reshape(blocks, (*before[:-1], before[-1] * block, *after))), axis, 0, size)


def type_of(zero_point: Value | None) -> np.dtype[np.generic]:
    """Return the type of a quantised tensor, which is the type of its zero point."""
    return _UINT8 if zero_point is None else zero_point.dtype


def quantized(im: ImportContext, x: Value, zero_point: Value | None, dtype: np.dtype[np.generic]) -> Tensor:
    """Round numbers in units of the scale, add the zero point, and clip to the type's range."""
    if dtype.name not in _RANGES:
        reason = f"quantised to {dtype.name}: ncnn computes in integers and floats only"
        raise im.refuse(reason, "quantise to int8 or uint8")
    low, high = _RANGES[dtype.name]
    x, zero = im.tensor(x), number(0) if zero_point is None else float_value(im, zero_point)
    if isinstance(zero, Constant) and (zero.array == zero.array.flat[0]).all():
        # Clip first: then a pass cancels the zero point added here with the one that DequantizeLinear subtracts.
        shift = float(zero.array.flat[0])
        x = im.apply(im.unary(x, "Clip", min=low - shift, max=high - shift), UnaryOp.ROUND)
        if shift:
            x = im.apply(x, BinaryOp.ADD, shift)
    else:
        x = binary(im, BinaryOp.ADD, im.apply(x, UnaryOp.ROUND), zero)
        x = im.unary(x, "Clip", min=float(low), max=float(high))
    return x.of_type(held_as_float(dtype))


def _divided(im: ImportContext, x: Tensor, scale: Value) -> Value:
    """Compute x / scale. On some machines, ncnn's division is wrong in the last bit, even for 0.5 / 1."""
    if isinstance(scale, Constant):
        with np.errstate(divide="ignore", over="ignore"):
            factor = 1 / im.f32(scale.array)
        if not np.isfinite(factor).all():
            raise im.refuse("a scale of 0", "quantise the model with scales above 0")
        return binary(im, BinaryOp.MUL, x, Constant(factor))
    return divided(im, x, scale)


def centred(im: ImportContext, x: Value, zero_point: Value | None) -> Value:
    """Return integers minus their zero point, as floats."""
    x = float_value(im, x)
    zero = number(0) if zero_point is None else float_value(im, zero_point)
    if isinstance(zero, Constant) and not zero.array.any():
        return x
    return arithmetic(im, BinaryOp.SUB, x, zero)


def scaling(im: ImportContext, op_type: BinaryOp, a: Value, b: Value) -> Value:
    """Compute a * b or a / b; for two constants of any type, the result is a float32 constant."""
    return arithmetic(im, op_type, *(Constant(im.f32(x.array)) if isinstance(x, Constant) else x for x in (a, b)))


def int_matmul(im: ImportContext, a: Value, a_zero_point: Value | None, b: Value, b_zero_point: Value | None) -> Tensor:
    """MatMul of quantised tensors, in units of their scales."""
    rows = None if a_zero_point is None else per_row(im, a, a_zero_point)
    return matmul(im, centred(im, a, rows), centred(im, b, b_zero_point))


def per_row(im: ImportContext, a: Value, param: Value) -> Value:
    """Return the left matrix's scale or zero point, which is per tensor or per row, in a shape that broadcasts."""
    return im.reshape(param, (*param.shape, 1)) if param.rank == 1 < a.rank else param
