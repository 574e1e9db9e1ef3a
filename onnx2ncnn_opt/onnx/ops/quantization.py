"""Operators of quantised tensors, of ONNX and of com.microsoft, which ONNX Runtime's quantiser writes."""

from typing import NamedTuple, TypeAlias

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx import items
from onnx2ncnn_opt.onnx.items import ItemsMixed, NodeView
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.activation import flattened, softmax
from onnx2ncnn_opt.onnx.lower.functional.binary import binary, number
from onnx2ncnn_opt.onnx.lower.functional.concat import concat
from onnx2ncnn_opt.onnx.lower.functional.conv import conv
from onnx2ncnn_opt.onnx.lower.functional.gather import gather
from onnx2ncnn_opt.onnx.lower.functional.matmul import BLOCK_SIZES, ProductAttributes, linear, linear_of_blocks, matmul
from onnx2ncnn_opt.onnx.lower.functional.pool import average_pool, global_average_pool
from onnx2ncnn_opt.onnx.lower.functional.quantize import (
    broadcastable,
    centred,
    dequantize_linear,
    dynamic_quantize_linear,
    int_matmul,
    per_row,
    quantize_linear,
    quantized,
    scaling,
    type_of,
)
from onnx2ncnn_opt.onnx.lower.functional.window import ConvAttributes, PoolAttributes
from onnx2ncnn_opt.onnx.registry import INT8_ACCURACY, MICROSOFT, onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Tensor, Value, held_as_float

Zero: TypeAlias = Value | None
"""A zero point; None is 0."""


class _Quantised(NamedTuple):
    """The three inputs of a quantised tensor."""

    numbers: Value
    scale: Value
    zero_point: Value


class _Scaled(NamedTuple):
    """The inputs of a quantised tensor with an optional zero point."""

    numbers: Value
    scale: Value
    zero_point: Zero


onnx_op("QuantizeLinear", since=10, integers=True, divisor=1, quantises=True, axes="each", folds=True)(quantize_linear)
onnx_op("QuantizeLinear", domain=MICROSOFT, integers=True, divisor=1, quantises=True, axes="each")(quantize_linear)
onnx_op("DequantizeLinear", since=10, integers=True, axes="each", folds=True)(dequantize_linear)
onnx_op("DequantizeLinear", domain=MICROSOFT, integers=True, axes="each")(dequantize_linear)
onnx_op("DynamicQuantizeLinear", since=11, quantises=True)(dynamic_quantize_linear)


@onnx_op("MatMulInteger", since=10, integers=True, items=items.product_of(0, 1))
def matmul_integer(
    im: ImportContext, a: Value, b: Value, a_zero_point: Zero = None, b_zero_point: Zero = None
) -> Value:
    """MatMul of integers as floats; sums beyond 2**24 are rounded."""
    return _whole(int_matmul(im, a, a_zero_point, b, b_zero_point))


@onnx_op("ConvInteger", since=10, batch=0, integers=True)
def conv_integer(
    im: ImportContext,
    x: Value,
    w: Value,
    x_zero_point: Zero = None,
    w_zero_point: Zero = None,
    *,
    attrs: ConvAttributes,
) -> Value:
    """Convolution of integers as floats; sums beyond 2**24 are rounded."""
    return _whole(conv(im, im.tensor(centred(im, x, x_zero_point)), _kernel(im, w, w_zero_point), attrs=attrs))


@onnx_op("QLinearConv", since=10, batch=0, integers=True, quantises=True)
def qlinear_conv(
    im: ImportContext,
    x: _Quantised,
    w: _Quantised,
    y_scale: Value,
    y_zero_point: Value,
    b: Array | None = None,
    *,
    attrs: ConvAttributes,
) -> Value:
    """Convolution of integers as floats, and the layers of QuantizeLinear."""
    bias = None if b is None else Constant(b.astype(np.float32))
    kernel = _kernel(im, w.numbers, w.zero_point)
    sums = conv(im, im.tensor(centred(im, x.numbers, x.zero_point)), kernel, bias, attrs=attrs)
    return _requantised(im, sums, x.scale, broadcastable(im, sums, w.scale, 1), y_scale, y_zero_point)


@onnx_op("QLinearMatMul", since=10, integers=True, quantises=True, items=items.product_of(0, 3))
def qlinear_matmul(im: ImportContext, a: _Quantised, b: _Quantised, y_scale: Value, y_zero_point: Value) -> Value:
    """MatMul of integers as floats, and the layers of QuantizeLinear."""
    sums = int_matmul(im, a.numbers, a.zero_point, b.numbers, b.zero_point)
    scale, new_scale, zero = (per_row(im, a.numbers, param) for param in (a.scale, y_scale, y_zero_point))
    return _requantised(im, sums, scale, b.scale, new_scale, zero)


def _requantised(im: ImportContext, x: Value, a_scale: Value, b_scale: Value, y_scale: Value, y_zero: Zero) -> Value:
    """Return products of quantised numbers, which are in units of both scales, as quantised numbers."""
    factor = scaling(im, BinaryOp.DIV, scaling(im, BinaryOp.MUL, a_scale, b_scale), y_scale)
    return quantized(im, binary(im, BinaryOp.MUL, x, factor), y_zero, type_of(y_zero))


def _kernel(im: ImportContext, w: Value, zero_point: Zero) -> Value:
    """Return the weight of a convolution minus its zero point, which may be per kernel."""
    return centred(im, w, None if zero_point is None else broadcastable(im, w, zero_point, 0))


def _whole(x: Value) -> Value:
    """Return a result as an integer tensor."""
    return x.of_type(held_as_float(np.dtype(np.int32))) if isinstance(x, Tensor) else x


@onnx_op("QLinearAdd", domain=MICROSOFT, integers=True, quantises=True)
def qlinear_add(im: ImportContext, a: _Scaled, b: _Scaled, c_scale: Value, c_zero_point: Zero = None) -> Value:
    """BinaryOp add between DequantizeLinear and QuantizeLinear."""
    total = binary(im, BinaryOp.ADD, dequantize_linear(im, *a), dequantize_linear(im, *b))
    return quantize_linear(im, total, c_scale, c_zero_point)


@onnx_op("QLinearMul", domain=MICROSOFT, integers=True, quantises=True)
def qlinear_mul(im: ImportContext, a: _Scaled, b: _Scaled, c_scale: Value, c_zero_point: Zero = None) -> Value:
    """BinaryOp mul of integers as floats, and the layers of QuantizeLinear."""
    products = binary(im, BinaryOp.MUL, centred(im, a.numbers, a.zero_point), centred(im, b.numbers, b.zero_point))
    return _requantised(im, products, a.scale, b.scale, c_scale, c_zero_point)


def _floats(im: ImportContext, x: _Quantised | _Scaled) -> Tensor:
    return im.tensor(dequantize_linear(im, *x))


@onnx_op("QLinearSigmoid", domain=MICROSOFT, integers=True, quantises=True, axes="each")
def qlinear_sigmoid(im: ImportContext, x: _Scaled, y_scale: Value, y_zero_point: Zero = None) -> Value:
    """Sigmoid between DequantizeLinear and QuantizeLinear."""
    return quantize_linear(im, im.unary(_floats(im, x), "Sigmoid"), y_scale, y_zero_point)


@onnx_op("QLinearLeakyRelu", domain=MICROSOFT, integers=True, quantises=True, axes="each")
def qlinear_leaky_relu(
    im: ImportContext, x: _Scaled, y_scale: Value, y_zero_point: Zero = None, *, alpha: float = 0.01
) -> Value:
    """ReLU with slope between DequantizeLinear and QuantizeLinear."""
    return quantize_linear(im, im.unary(_floats(im, x), "ReLU", slope=alpha), y_scale, y_zero_point)


@onnx_op("QLinearSoftmax", domain=MICROSOFT, integers=True, quantises=True, axes="same")
def qlinear_softmax(
    im: ImportContext, x: _Scaled, y_scale: Value, y_zero_point: Value, *, axis: int = -1, opset: int
) -> Value:
    """Softmax between DequantizeLinear and QuantizeLinear."""
    floats = _floats(im, x)
    y = softmax(im, floats, axis) if opset >= 13 else flattened(im, floats, axis, softmax)
    return quantize_linear(im, y, y_scale, y_zero_point)


@onnx_op("QLinearGlobalAveragePool", domain=MICROSOFT, batch=0, integers=True, quantises=True)
def qlinear_global_average_pool(
    im: ImportContext, x: _Quantised, y_scale: Value, y_zero_point: Value, *, channels_last: int = 0
) -> Value:
    """GlobalAveragePool between DequantizeLinear and QuantizeLinear."""
    if channels_last:
        raise im.refuse("channels_last is 1: ncnn has channels first", "quantise the model with channels first")
    return quantize_linear(im, global_average_pool(im, _floats(im, x)), y_scale, y_zero_point)


@onnx_op("QLinearAveragePool", domain=MICROSOFT, batch=0, integers=True, quantises=True)
def qlinear_average_pool(
    im: ImportContext,
    x: _Scaled,
    y_scale: Value,
    y_zero_point: Zero = None,
    *,
    attrs: PoolAttributes,
    channels_last: int = 0,
    count_include_pad: int = 0,
) -> Value:
    """AveragePool between DequantizeLinear and QuantizeLinear."""
    if channels_last:
        raise im.refuse("channels_last is 1: ncnn has channels first", "quantise the model with channels first")
    y = average_pool(im, _floats(im, x), attrs=attrs, count_include_pad=count_include_pad)
    return quantize_linear(im, y, y_scale, y_zero_point)


@onnx_op("QLinearConcat", domain=MICROSOFT, integers=True, quantises=True)
def qlinear_concat(im: ImportContext, y_scale: Value, y_zero_point: Value, *xs: Value, axis: int) -> Value:
    """Concat between DequantizeLinear and QuantizeLinear."""
    parts = (dequantize_linear(im, *xs[i : i + 3]) for i in range(0, len(xs), 3))
    return quantize_linear(im, concat(im, *parts, axis=axis), y_scale, y_zero_point)


@onnx_op("QGemm", domain=MICROSOFT, integers=True, quantises=True)
def qgemm(
    im: ImportContext,
    a: _Quantised,
    b: _Quantised,
    c: Array | None = None,
    y_scale: Value | None = None,
    y_zero_point: Zero = None,
    *,
    attrs: ProductAttributes,
) -> Value:
    """Gemm of integers as floats, and the layers of QuantizeLinear if the result has a scale."""
    left, right = attrs.matrices(a.numbers, b.numbers)
    sums: Value = matmul(im, centred(im, left, a.zero_point), centred(im, right, b.zero_point))
    if c is not None:
        sums = binary(im, BinaryOp.ADD, sums, Constant(c.astype(np.float32)))
    scale = scaling(im, BinaryOp.MUL, number(attrs.alpha), a.scale)
    if y_scale is None:
        return binary(im, BinaryOp.MUL, sums, scaling(im, BinaryOp.MUL, scale, b.scale))
    return _requantised(im, sums, scale, b.scale, y_scale, y_zero_point)


@onnx_op("MatMulIntegerToFloat", domain=MICROSOFT, integers=True)
def matmul_integer_to_float(
    im: ImportContext,
    a: Value,
    b: Value,
    a_scale: Value,
    b_scale: Value,
    a_zero_point: Zero = None,
    b_zero_point: Zero = None,
    bias: Value | None = None,
) -> Value:
    """MatMul of integers as floats, times the scales."""
    sums = int_matmul(im, a, a_zero_point, b, b_zero_point)
    result = binary(im, BinaryOp.MUL, sums, scaling(im, BinaryOp.MUL, per_row(im, a, a_scale), b_scale))
    return result if bias is None else binary(im, BinaryOp.ADD, result, bias)


@onnx_op("DynamicQuantizeMatMul", domain=MICROSOFT, integers=True, quantises=True)
def dynamic_quantize_matmul(
    im: ImportContext, a: Tensor, b: Value, b_scale: Value, b_zero_point: Zero = None, bias: Value | None = None
) -> Value:
    """DynamicQuantizeLinear and MatMulIntegerToFloat."""
    quantised, scale, zero = dynamic_quantize_linear(im, a)
    return matmul_integer_to_float(im, quantised, b, scale, b_scale, zero, b_zero_point, bias)


@onnx_op("MatMulNBits", domain=MICROSOFT, quantises=True, items=items.from_axis(-1))
def matmul_nbits(
    im: ImportContext,
    a: Tensor,
    b: Array,
    scales: Array,
    zero_points: Array | None = None,
    g_idx: Array | None = None,
    bias: Value | None = None,
    *,
    K: int,
    N: int,
    accuracy_level: int = 0,
    bits: int = 4,
    block_size: int,
    weight_prepacked: int = 0,
) -> Value:
    """Gemm of 8-bit blocks if the model allows int8 arithmetic; else InnerProduct or Gemm of the dequantised weight."""
    if g_idx is not None or weight_prepacked or bits not in (2, 4, 8):
        raise im.refuse(f"{bits} bits: only 2, 4 and 8, without g_idx and weight_prepacked", "quantise it without them")
    blocks = -(-K // block_size)
    if b.size * 8 != N * blocks * block_size * bits or scales.size != N * blocks:
        raise im.invalid(f"a weight of shape {list(b.shape)} and scales of shape {list(scales.shape)}")
    zeros: Array = np.full((N, blocks), 2 ** (bits - 1), np.float32)
    if zero_points is not None and zero_points.dtype == np.uint8:
        zeros = _unpacked(zero_points.reshape(N, -1), bits)[:, :blocks]
    elif zero_points is not None:
        zeros = im.f32(zero_points).reshape(N, blocks)
    centres = _unpacked(b.reshape(N, blocks, -1), bits) - zeros[..., None]
    factors = im.f32(scales).reshape(N, blocks)
    y = None
    if accuracy_level == INT8_ACCURACY:
        y = _int8_product(im, a, centres.reshape(N, -1)[:, :K], factors, block_size)
    if y is None:
        y = linear(im, a, np.ascontiguousarray((centres * factors[..., None]).reshape(N, -1)[:, :K]))
    return y if bias is None else binary(im, BinaryOp.ADD, y, bias)


def _int8_product(im: ImportContext, a: Tensor, numbers: Array, scales: Array, size: int) -> Tensor | None:
    """Return ``a @ numbers.T`` for blocks of a `size`, which may be halved; None if ncnn has no such Gemm."""
    while size > BLOCK_SIZES[-1] and numbers.shape[1] % size == 0:
        scales, size = np.repeat(scales, 2, 1), size // 2
    whole = numbers.astype(np.int8)
    fits = size in BLOCK_SIZES and (whole == numbers).all() and scales.all()
    return linear_of_blocks(im, a, whole, scales, size) if fits else None


def _looked_up(node: NodeView) -> int:
    node.only(1)
    axis = node.axis(1)
    if axis is None or node.number("gather_axis", 0):
        raise ItemsMixed
    return axis


@onnx_op("GatherBlockQuantized", domain=MICROSOFT, integers=True, indexes={1: 0}, items=_looked_up)
def gather_block_quantized(
    im: ImportContext,
    data: Array,
    indices: Value,
    scales: Array,
    zero_points: Array | None = None,
    *,
    bits: int = 4,
    block_size: int = 128,
    gather_axis: int = 0,
    quantize_axis: int = 1,
) -> Value:
    """Gather from the dequantised table."""
    if data.dtype.name.startswith("float"):
        raise im.refuse(f"a table of {data.dtype.name}", "quantise it to 4 or 8 bits")
    zeros: Array = np.zeros(()) if zero_points is None else zero_points.astype(np.float32)
    if data.dtype == np.uint8:
        data = _unpacked(data, bits)
        centre = np.array(2 ** (bits - 1), np.float32)
        zeros = centre if zero_points is None else _unpacked(zero_points, bits)[..., : scales.shape[-1]]
    axis = im.axis(quantize_axis, data.ndim)
    whole = range(data.shape[axis])
    factors, centres = (np.repeat(np.broadcast_to(x, scales.shape), block_size, axis) for x in (im.f32(scales), zeros))
    table = (data.astype(np.float32) - centres.take(whole, axis)) * factors.take(whole, axis)
    return gather(im, Constant(table), indices, axis=gather_axis)


def _unpacked(packed: Array, bits: int) -> Array:
    """Unpack the numbers in each byte along the last axis, the lowest bits first."""
    parts = (packed[..., None] >> np.arange(0, 8, bits, dtype=np.uint8)) & np.uint8(2**bits - 1)
    return parts.reshape(*packed.shape[:-1], -1).astype(np.float32)
