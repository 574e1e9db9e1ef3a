"""Integers and bools read as floats, and floats as integers.

Floats of any width are float32 in ncnn. Integers and bools that are fed to the net are int32; those that the net itself
computes are held as float32, under a type that says so.
"""

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.ir.features import FP32, Feature
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.value import BOOL, Constant, Tensor, Value, held_as_float, is_float, is_held_as_float

FLT_MIN, FLT_MAX = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
# No fp16 arithmetic, no fp16 or bf16 storage, which would take the bits for floats; and no Vulkan, which in fp16 takes
# them for floats on their way to the GPU, with any mask of the layer.
_ON_CPU = int(FP32 | Feature.NO_BF16_STORAGE)
_FLOAT = np.dtype(np.float32)
_NARROW = 4  # bytes: integers of fewer wrap around within float32's integers
LARGEST_EXACT = 2**24


def cast_to(im: ImportContext, x: Tensor, target: np.dtype[np.generic]) -> Tensor:
    """Return the tensor as one of another type, with ONNX's rounding; refused if float32 would lose numbers."""
    if target == np.bool_:
        return x if x.dtype == np.bool_ else Tensor(nonzero(im, x).blob, x.view, BOOL)
    if is_float(target) and target.itemsize >= 2:
        return Tensor(as_float(im, x).blob, x.view, target)
    if target.kind in "iu" and is_float(x.dtype):
        whole = im.layer("UnaryOp", x.blob, op_type=UnaryOp.TRUNC)
        return turned_over(im, Tensor(whole, x.view, held_as_float(target)))
    # From below 0 to a wide unsigned type, numbers become such that float32 cannot hold.
    is_lost = x.dtype.kind == "i" and target.kind == "u" and target.itemsize >= _NARROW
    if target.kind in "iu" and x.dtype.kind in "iub" and not is_lost:
        if x.dtype == np.bool_ or np.can_cast(x.dtype, target) or target.itemsize >= _NARROW:
            return Tensor(x.blob, x.view, held_as_float(target) if is_held_as_float(x.dtype) else target)
        return turned_over(im, Tensor(as_float(im, x).blob, x.view, held_as_float(target)))
    raise im.refuse(f"ncnn cannot cast {x.dtype} to {target} at run time", "cast to float32, int32 or bool instead")


def turned_over(im: ImportContext, x: Tensor) -> Tensor:
    """Return whole numbers as their integer type has them: 8 and 16 bits wrap around at its bounds."""
    if x.dtype.itemsize >= _NARROW or x.dtype.kind not in "iu":
        return x
    span = 2.0 ** (8 * x.dtype.itemsize)
    low = -span / 2 if x.dtype.kind == "i" else 0.0
    above = im.apply(x, BinaryOp.SUB, low) if low else x
    turns = im.apply(im.apply(above, BinaryOp.MUL, 1 / span), UnaryOp.FLOOR)
    turns = im.apply(turns, BinaryOp.MUL, span)
    return im.like(x, im.layer("BinaryOp", x.blob, turns.blob, op_type=BinaryOp.SUB))


def as_float(im: ImportContext, x: Tensor) -> Tensor:
    """Return the numbers of a tensor of any type as float32; integers are rounded beyond 2**24, as ONNX does."""
    if is_float(x.dtype):
        return x
    if is_held_as_float(x.dtype):
        return Tensor(x.blob, x.view, _FLOAT)
    if x.dtype.kind not in "iub":
        raise im.refuse(f"ncnn cannot read {x.dtype}", "cast it to float32 in the model")
    scale = {"scale_data": np.ones(1, np.float32)}
    return Tensor(im.layer("Dequantize", x.blob, weights=scale, scale_data_size=1, featmask=_ON_CPU), x.view, _FLOAT)


def as_numbers(im: ImportContext, x: Tensor) -> Tensor:
    """Return the tensor with numbers that ncnn can compare: integers that were fed become float32."""
    if is_float(x.dtype) or is_held_as_float(x.dtype):
        return x
    return Tensor(as_float(im, x).blob, x.view, held_as_float(x.dtype))


def number_value(im: ImportContext, x: Value) -> Value:
    """Return an operand of any type with numbers that ncnn can compute with; see `as_numbers` and `float_value`."""
    return as_numbers(im, x) if isinstance(x, Tensor) else float_value(im, x)


def float_value(im: ImportContext, x: Value) -> Value:
    """Return an operand of any type as floats that are equal if and only if the operand's numbers are."""
    return as_float(im, x) if isinstance(x, Tensor) else Constant(float_array(im, x.array))


def float_array(im: ImportContext, array: Array) -> Array:
    """Return a constant as float32, as `float_value` does."""
    if is_float(array.dtype):
        return im.f32(array)
    if np.abs(array.astype(np.float64)).max(initial=0) > LARGEST_EXACT:
        reason = "an integer constant is larger than 2**24, which float32 does not hold exactly"
        raise im.refuse(reason, "compute with smaller integers, or outside ncnn")
    return im.f32(array.astype(np.float32))


def nonzero(im: ImportContext, x: Tensor) -> Tensor:
    """1 where the number is not 0, else 0."""
    if is_float(x.dtype):
        return im.apply(is_zero(im, x), BinaryOp.RSUB, 1.0)
    return im.unary(im.apply(as_float(im, x), UnaryOp.ABS), "Threshold", threshold=0.5)


def is_zero(im: ImportContext, x: Tensor) -> Tensor:
    """1 where a number is 0 (NaN is not), else 0."""
    return im.unary(im.apply(im.apply(x, UnaryOp.ABS), UnaryOp.NEG), "Threshold", threshold=-FLT_MIN)
