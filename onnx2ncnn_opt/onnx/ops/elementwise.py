"""Operators of two or more tensors with broadcasting, Identity, and casts."""

from functools import reduce

import numpy as np
import onnx_ir

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.onnx import items
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import add, binary, maximum, minimum, mul
from onnx2ncnn_opt.onnx.lower.functional.cast import cast_to, wrapped_around
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Item, Operand, Tensor, Value

onnx_op("Add", since=7, integers=True, axes="each", folds=True)(add)
onnx_op("Mul", since=7, integers=True, axes="each", folds=True)(mul)
onnx_op("Max", integers=True, selects=True, axes="each", folds=True, errors="none")(maximum)
onnx_op("Min", integers=True, selects=True, axes="each", folds=True, errors="none")(minimum)


@onnx_op("Sub", since=7, integers=True, axes="each", folds=True)
def sub(im: ImportContext, a: Operand, b: Operand) -> Value:
    """BinaryOp sub."""
    if a.dtype.kind == "u" and a.dtype.itemsize >= 4:
        reason = f"a difference of {a.dtype}, which wraps below 0 to more than float32 holds"
        raise im.refuse(reason, "cast to int64 before")
    return wrapped_around(im, binary(im, BinaryOp.SUB, a, b))


@onnx_op("Sum", axes="each", folds=True)
def sum_(im: ImportContext, *xs: Value) -> Value:
    """Chain BinaryOp add."""
    return reduce(lambda a, b: binary(im, BinaryOp.ADD, a, b), xs)


@onnx_op("Mean", axes="each", folds=True)
def mean(im: ImportContext, *xs: Value) -> Value:
    """Chain BinaryOp add, and divide by the number of operands."""
    return binary(im, BinaryOp.DIV, sum_(im, *xs), Constant(np.array(len(xs), np.float32)))


@onnx_op("Scaler", domain="ai.onnx.ml", integers=True, axes="same", items=items.from_axis(1), errors="input")
def scaler(im: ImportContext, x: Tensor, *, offset: tuple[float, ...] = (), scale: tuple[float, ...] = ()) -> Tensor:
    """BinaryOp sub and mul, with a number for each feature (axis 1 of two), or one for all."""
    if {len(offset), len(scale)} != {1} and not (x.rank == 2 and len(offset) == len(scale) == x.shape[1]):
        shape = list(map(str, x.shape))
        raise im.refuse(f"{len(offset)} offsets and {len(scale)} factors of {shape}", "use Sub and Mul")
    offsets, factors = (Constant(np.array(numbers, np.float32)) for numbers in (offset, scale))
    shifted = binary(im, BinaryOp.SUB, cast_to(im, x, np.dtype(np.float32)), offsets)
    return binary(im, BinaryOp.MUL, shifted, factors)


@onnx_op("Identity", integers=True, moves=(0,), axes="each", folds=True)
def identity(im: ImportContext, x: Item) -> Item:
    """Nothing."""
    return x


@onnx_op("Cast", since=6, integers=True, moves=(0,), jumps=True, axes="each", folds=True)
def cast(im: ImportContext, x: Tensor, *, to: int, saturate: int = 1, round_mode: str = "up") -> Tensor:
    """Nothing between floats; Dequantize from integers, UnaryOp trunc to integers, Threshold to bool.

    Integers of 8 and 16 bits wrap around as in ONNX.
    """
    numeric = {int(kind) for kind in onnx_ir.DataType} - {onnx_ir.DataType.UNDEFINED, onnx_ir.DataType.STRING}
    if to not in numeric:
        raise im.refuse(f"a cast to element type {to}", "cast to a type of numbers or bools")
    return cast_to(im, x, onnx_ir.DataType(to).numpy())


@onnx_op("CastLike", since=15, integers=True, axes="each", folds=True)
def cast_like(im: ImportContext, x: Value, target: Value, *, saturate: int = 1, round_mode: str = "up") -> Value:
    """Cast to the type of the target."""
    if isinstance(x, Constant):
        return Constant(x.array.astype(target.dtype))
    return cast_to(im, x, target.dtype)
