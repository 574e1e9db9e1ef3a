"""Elementwise functions of one tensor, which run on a Mat in any layout."""

from typing import Any

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.ir.view import MAX_DIMS
from onnx2ncnn_opt.ir.weight import Array, one_of_equal_slices
from onnx2ncnn_opt.onnx.fold.cells import as_constant
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.activation import clip, softplus, softsign
from onnx2ncnn_opt.onnx.lower.functional.binary import binary
from onnx2ncnn_opt.onnx.lower.functional.cast import FLT_MAX, as_numbers, wrapped_around
from onnx2ncnn_opt.onnx.registry import Errors, onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Operand, SymbolicTensor, Tensor, Value

# UnaryOps with the same name in ONNX and ncnn.
_UNARY = (
    *("Abs", "Neg", "Floor", "Ceil", "Sqrt", "Exp", "Sin", "Cos", "Tan", "Asin", "Acos", "Atan"),
    *("Round", "Sign", "Sinh", "Asinh", "Cosh", "Atanh"),  # Round is half to even in both
)
# ONNX operator without attributes -> ncnn layer and its parameters.
_PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "Relu": ("ReLU", {}),
    "Sigmoid": ("Sigmoid", {}),
    "Tanh": ("TanH", {}),
    "Mish": ("Mish", {}),
    "Erf": ("Erf", {}),
    "HardSwish": ("HardSwish", {"alpha": 1 / 6, "beta": 0.5}),
    **{name: ("UnaryOp", {"op_type": UnaryOp[name.upper()]}) for name in _UNARY},
}
_OF_INTEGERS = ("Relu", "Abs", "Neg", "Sign")
_JUMPING = ("Ceil", "Floor", "Round", "Sign")
_KEEPING_ZEROS = ("Abs", "Neg", "Sqrt")  # 0 exactly for 0
_ERRORS: dict[str, Errors] = {
    **dict.fromkeys(("Abs", "Neg", "Relu", "Sign"), "none"),
    **dict.fromkeys(("Asinh", "Atanh", "HardSwish", "Mish", "Tanh"), "one"),
    "Tan": "input",
}
_NOT_FOLDED = ("HardSwish", "Mish")
# Intervals in which functions are defined, and not steep.
_DOMAINS = {"Acos": (-0.9, 0.9), "Asin": (-0.9, 0.9), "Atanh": (-0.9, 0.9), "Sqrt": (0.0, 4.0)}


def _register_plain(name: str, layer: str, params: dict[str, Any]) -> None:
    def plain(im: ImportContext, x: Tensor) -> Tensor:
        return wrapped_around(im, im.unary(as_numbers(im, x), layer, **params))

    code = params.get("op_type")
    plain.__doc__ = f"{layer}." if code is None else f"{layer} {code.name.lower()}."
    onnx_op(
        name,
        integers=name in _OF_INTEGERS,
        axes="each",
        domains={0: _DOMAINS[name]} if name in _DOMAINS else None,
        jumps=name in _JUMPING,
        keeps_zeros=name in _KEEPING_ZEROS,
        errors=_ERRORS.get(name, "result"),
        folds=name not in _NOT_FOLDED,
    )(plain)


for _name, (_layer, _params) in _PLAIN.items():
    _register_plain(_name, _layer, _params)


@onnx_op("Acosh", axes="each", domains={0: (1.1, 4.0)}, folds=True)
def acosh(im: ImportContext, x: Tensor) -> Tensor:
    """Log(x + sqrt(x - 1) * sqrt(x + 1)): UnaryOp acosh returns -87 instead of NaN for x < 1 on x86."""
    roots = [im.apply(im.apply(x, BinaryOp.ADD, one), UnaryOp.SQRT).blob for one in (-1.0, 1.0)]
    product = im.layer("BinaryOp", *roots, op_type=BinaryOp.MUL)
    return im.unary(im.like(x, im.layer("BinaryOp", x.blob, product, op_type=BinaryOp.ADD)), "Log")


@onnx_op("Log", axes="each", domains={0: (0.1, 4.0)}, folds=True)
def log(im: ImportContext, x: Tensor) -> Tensor:
    """Log; log(1 + exp(x)) becomes softplus(x), and log(sigmoid(x)) becomes -softplus(-x).

    exp overflows in float32 at 89, in fp16 at 11; Sigmoid underflows at -104 and -17.
    """
    if (sigmoid := x.blob.made_by("Sigmoid")) is not None:
        negative = im.apply(im.like(x, sigmoid.input), UnaryOp.NEG)
        return im.apply(softplus(im, negative), UnaryOp.NEG)
    total = x.blob.computed_by(BinaryOp.ADD, scalar=True)
    exp = total.input.computed_by(UnaryOp.EXP) if total is not None and total["b"] == 1 else None
    if exp is not None:
        return softplus(im, im.like(x, exp.input))
    return im.unary(x, "Log")  # UnaryOp log returns NaN for 0


@onnx_op("LeakyRelu", axes="each", folds=True)
def leaky_relu(im: ImportContext, x: Tensor, *, alpha: float = 0.01) -> Tensor:
    """ReLU with slope."""
    return im.unary(x, "ReLU", slope=alpha)


@onnx_op("PRelu", batch=0, axes="each", folds=True)
def prelu(im: ImportContext, x: Tensor, slope: Value) -> Value:
    """PReLU, for one slope or one per channel (axis 1); else ReLU(x) + slope * min(x, 0)."""
    if isinstance(slope, Constant):
        slope = Constant(one_of_equal_slices(slope.array, range(slope.rank)))  # exporters expand slopes
    # The slope broadcasts to x, aligned to the right; for a PReLU layer only the channel axis may be longer than 1.
    shape = (1,) * (x.rank - slope.rank) + slope.shape
    if isinstance(slope, Constant) and slope.array.size == 1:
        return im.unary(x, "PReLU", {"slope_data": slope.array.reshape(1)}, num_slope=1)
    if isinstance(slope, Constant) and 2 <= x.rank <= MAX_DIMS + 1 and slope.array.size == shape[1]:
        weights = {"slope_data": slope.array.reshape(-1)}
        dims = im.channel_dims(x)
        blob = im.layer("PReLU", im.mat(x, dims, [0]), num_slope=slope.array.size, weights=weights)
        return im.wrap(blob, x.shape, dims, [0])
    negative = im.apply(x, BinaryOp.MIN, 0.0)
    return binary(im, BinaryOp.ADD, im.unary(x, "ReLU"), binary(im, BinaryOp.MUL, negative, slope))


@onnx_op("Elu", axes="each", folds=True, errors="one")
def elu(im: ImportContext, x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """ELU."""
    return im.unary(x, "ELU", alpha=alpha)


@onnx_op("Celu", axes="each", folds=True, errors="one")
def celu(im: ImportContext, x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """CELU."""
    return im.unary(x, "CELU", alpha=alpha)


@onnx_op("Selu", axes="each", folds=True, errors="one")
def selu(
    im: ImportContext, x: Tensor, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875
) -> Tensor:
    """SELU."""
    params: dict[str, Any] = {"alpha": alpha, "lambda": gamma}
    return im.unary(x, "SELU", **params)


@onnx_op("HardSigmoid", axes="each", folds=True)
def hard_sigmoid(im: ImportContext, x: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    """HardSigmoid."""
    return im.unary(x, "HardSigmoid", alpha=alpha, beta=beta)


@onnx_op("Gelu", since=20, axes="each", errors="one")
def gelu(im: ImportContext, x: Tensor, *, approximate: str = "none") -> Tensor:
    """GELU, exact or with tanh."""
    return im.unary(x, "GELU", fast_gelu=int(approximate == "tanh"))


@onnx_op("Swish", since=24, axes="each")
def swish(im: ImportContext, x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """Swish; x * sigmoid(alpha * x) if alpha is not 1."""
    if alpha == 1.0:
        return im.unary(x, "Swish")
    gate = im.unary(im.apply(x, BinaryOp.MUL, alpha), "Sigmoid")
    return im.like(x, im.layer("BinaryOp", x.blob, gate.blob, op_type=BinaryOp.MUL))


@onnx_op("SwiGLU", since=28, axes="each")
def swiglu(im: ImportContext, a: Tensor, b: Value, *, alpha: float = 1.0) -> Value:
    """Swish and BinaryOp mul."""
    return binary(im, BinaryOp.MUL, swish(im, a, alpha=alpha), b)


onnx_op("Softsign", axes="each", folds=True)(softsign)
onnx_op("Softplus", axes="each", folds=True, errors="one")(softplus)


@onnx_op("ThresholdedRelu", axes="each", folds=True)
def thresholded_relu(im: ImportContext, x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """ReLU(Shrink(x)); max(x, alpha) * (x > alpha) if alpha is negative."""
    if alpha >= 0:
        return im.unary(im.unary(x, "Shrink", lambd=alpha), "ReLU")
    gate = im.unary(x, "Threshold", threshold=alpha)
    bounded = im.apply(x, BinaryOp.MAX, alpha)
    return im.like(x, im.layer("BinaryOp", bounded.blob, gate.blob, op_type=BinaryOp.MUL))


@onnx_op("Shrink", axes="each")
def shrink(im: ImportContext, x: Tensor, *, bias: float = 0.0, lambd: float = 0.5) -> Tensor:
    """Shrink."""
    return im.unary(x, "Shrink", bias=bias, lambd=lambd)


@onnx_op("Clip", selects=True, axes="each", folds=True, errors="none")
def clip6(im: ImportContext, x: Tensor, *, min: float = -FLT_MAX, max: float = FLT_MAX) -> Tensor:
    """Clip; the bounds are attributes before opset 11."""
    return clip(im, x, min, max)


@onnx_op("Clip", since=11, integers=True, selects=True, axes="each", folds=True, errors="none")
def clip11(im: ImportContext, x: Tensor, min: Value | None = None, max: Value | None = None) -> Value:
    """Clip, or ReLU for its bounds; BinaryOp max and min for computed bounds."""
    x = as_numbers(im, x)
    low = -FLT_MAX if min is None else min.scalar if isinstance(min, Constant) else None
    high = FLT_MAX if max is None else max.scalar if isinstance(max, Constant) else None
    if low is not None and high is not None:
        return clip(im, x, low, high)
    bounded: Value = x
    if min is not None:
        bounded = binary(im, BinaryOp.MAX, bounded, min)
    return bounded if max is None else binary(im, BinaryOp.MIN, bounded, max)


@onnx_op("Dropout", axes="each")
@onnx_op("Dropout", since=10, axes="each")
def dropout7(im: ImportContext, x: Value, *, ratio: float = 0.5) -> tuple[Value, Operand]:
    """Nothing at inference; the mask is 0, as in ONNX Runtime."""
    return x, _all(x, np.zeros((), x.dtype if im.opset < 10 else np.bool_))


@onnx_op("Dropout", since=12, axes="each")
def dropout12(
    im: ImportContext,
    x: Value,
    ratio: Value | None = None,
    training_mode: Array | None = None,
    *,
    seed: int | None = None,
) -> tuple[Value, Operand]:
    """Nothing at inference; the mask is 1. Refused if the model was exported in training mode."""
    keeps_all = isinstance(ratio, Constant) and ratio.scalar == 0
    if training_mode is not None and training_mode.any() and not keeps_all:
        raise im.refuse("training_mode is true", "export the model in eval mode")
    return x, _all(x, np.ones((), np.bool_))


def _all(x: Value, number: Array) -> Operand:
    """Return a tensor of the operand's shape, filled with a number."""
    return as_constant(SymbolicTensor(number.reshape((1,) * x.rank), x.shape, number.dtype))
