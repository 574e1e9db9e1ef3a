"""Casts between integers, bools and floats.

Floats of any width are float32 in ncnn. Integers and bools are int32 as inputs of the net; layers compute them as
float32, with a dtype that records this (`held_as_float`).
"""

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.ir.features import FP32, Feature
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.value import BOOL, Constant, Tensor, Value, held_as_float, is_float, is_held_as_float

FLT_MIN, FLT_MAX = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
# Without fp16 arithmetic, and fp16 or bf16 storage, which would read the bits as floats. Without Vulkan, which in fp16
# reads them as floats on their way to the GPU, whatever the layer's mask is.
_ON_CPU = int(FP32 | Feature.NO_BF16_STORAGE)
_FLOAT = np.dtype(np.float32)
_NARROW = 4  # bytes: smaller integers wrap around at numbers that float32 represents exactly
LARGEST_EXACT = 2**24


def cast_to(im: ImportContext, x: Tensor, target: np.dtype[np.generic]) -> Tensor:
    """Cast a tensor with ONNX's rounding; raise Refusal if float32 cannot represent the numbers."""
    if target == np.bool_:
        return x if x.dtype == np.bool_ else nonzero(im, x).of_type(BOOL)
    if is_float(target) and target.itemsize >= 2:
        return as_float(im, x).of_type(target)
    if target.kind in "iu" and is_float(x.dtype):
        whole = im.layer("UnaryOp", x.blob, op_type=UnaryOp.TRUNC)
        return wrapped_around(im, Tensor(whole, x.view, held_as_float(target)))
    # A negative number in a wide unsigned type is too large for float32.
    is_lost = x.dtype.kind == "i" and target.kind == "u" and target.itemsize >= _NARROW
    if target.kind in "iu" and x.dtype.kind in "iub" and not is_lost:
        if x.dtype == np.bool_ or np.can_cast(x.dtype, target) or target.itemsize >= _NARROW:
            return x.of_type(held_as_float(target) if is_held_as_float(x.dtype) else target)
        return wrapped_around(im, as_float(im, x).of_type(held_as_float(target)))
    raise im.refuse(f"ncnn cannot cast {x.dtype} to {target} at run time", "cast to float32, int32 or bool instead")


def wrapped_around(im: ImportContext, x: Tensor) -> Tensor:
    """Wrap numbers of 8 and 16 bits around at the bounds of their type: 300 becomes 44 in uint8."""
    if x.dtype.itemsize >= _NARROW or x.dtype.kind not in "iu":
        return x
    span = 2.0 ** (8 * x.dtype.itemsize)
    low = -span / 2 if x.dtype.kind == "i" else 0.0
    above = im.apply(x, BinaryOp.SUB, low) if low else x
    overflows = im.apply(im.apply(above, BinaryOp.MUL, 1 / span), UnaryOp.FLOOR)
    excess = im.apply(overflows, BinaryOp.MUL, span)
    return im.like(x, im.layer("BinaryOp", x.blob, excess.blob, op_type=BinaryOp.SUB))


def as_float(im: ImportContext, x: Tensor) -> Tensor:
    """Return the numbers of a tensor of any type as float32; integers are rounded beyond 2**24, as ONNX does."""
    if is_float(x.dtype):
        return x
    if is_held_as_float(x.dtype):
        return x.of_type(_FLOAT)
    if x.dtype.kind not in "iub":
        raise im.refuse(f"ncnn cannot read {x.dtype}", "cast it to float32 in the model")
    scale = {"scale_data": np.ones(1, np.float32)}
    return Tensor(im.layer("Dequantize", x.blob, weights=scale, scale_data_size=1, featmask=_ON_CPU), x.view, _FLOAT)


def as_numbers(im: ImportContext, x: Tensor) -> Tensor:
    """Return the tensor with elements that ncnn can compare: int32 inputs become float32."""
    if is_float(x.dtype) or is_held_as_float(x.dtype):
        return x
    return as_float(im, x).of_type(held_as_float(x.dtype))


def number_value(im: ImportContext, x: Value) -> Value:
    """Return an operand of any type as float32, without changing its ONNX type; see `as_numbers` and `float_value`."""
    return as_numbers(im, x) if isinstance(x, Tensor) else float_value(im, x)


def float_value(im: ImportContext, x: Value) -> Value:
    """Return an operand of any type as floats. Different numbers stay different."""
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
    """Return 1 where the number is not 0, else 0."""
    if is_float(x.dtype):
        return im.apply(is_zero(im, x), BinaryOp.RSUB, 1.0)
    return im.unary(im.apply(as_float(im, x), UnaryOp.ABS), "Threshold", threshold=0.5)


def is_zero(im: ImportContext, x: Tensor) -> Tensor:
    """Return 1 where a number is 0, else 0, also for NaN."""
    return im.unary(im.apply(im.apply(x, UnaryOp.ABS), UnaryOp.NEG), "Threshold", threshold=-FLT_MIN)
