"""Facts about a blob's numbers, from the layers that compute it: bounds, integers, NaN and infinity.

Elements of graph inputs are unconstrained. Layers that mix elements (a convolution, a product, a normalisation) are
assumed to return finite numbers below 1e20, because a NaN in an operand spreads in the model too. Elementwise functions
have rules: they return NaN or infinity outside their domain, and propagate them. Overflow of large results is ignored.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.codes import Activation, BinaryOp, Eltwise, Interp, Padding, Reduction, SamplePadding, UnaryOp
from onnx2ncnn_opt.ir.detections import sorted_indices
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.spec import Trait
from onnx2ncnn_opt.ir.weight import Array

_INF = math.inf
EXP_LIMIT = 88.0  # from 89 on, exp is infinite in float32
_MOST_LAYERS = 200  # per query; blobs further up are UNKNOWN


class Range(NamedTuple):
    """Bounds of all elements that are numbers, and whether there may be NaN or infinity.

    An infinite bound is unknown; `may_be_inf` says that an element may be infinite. `is_integer` is True for integers.
    """

    low: float = -_INF
    high: float = _INF
    may_be_nan: bool = True
    may_be_inf: bool = True
    is_integer: bool = False

    @property
    def is_finite(self) -> bool:
        """True if every element is an ordinary number."""
        return not self.may_be_nan and not self.may_be_inf

    def has(self, number: float) -> bool:
        """Return whether an element may be this number, by the bounds."""
        return self.low <= number <= self.high

    def within(self, low: float, high: float) -> bool:
        """Return whether every element that is a number is between two bounds."""
        return low <= self.low and self.high <= high


UNKNOWN = Range()
ORDINARY = Range(-1e20, 1e20, may_be_nan=False, may_be_inf=False)
_BIT = Range(0, 1, False, False, True)
_ZERO = Range(0, 0, False, False, True)


def of_numbers(array: Array) -> Range:
    """Return the range of known numbers."""
    nan, inf = bool(np.isnan(array).any()), bool(np.isinf(array).any())
    numbers = array[~np.isnan(array)] if nan else array
    if not numbers.size:
        return Range(may_be_nan=nan, may_be_inf=False)
    is_integer = not nan and not inf and bool((numbers == np.floor(numbers)).all())
    return Range(float(numbers.min()), float(numbers.max()), nan, inf, is_integer)


def _scalar(number: float) -> Range:
    return of_numbers(np.array([number], np.float32))


class Ranges:
    """The ranges of blobs. Each is computed once, so an instance is valid as long as no layer changes."""

    def __init__(self) -> None:
        self._known: dict[Blob, Range] = {}

    def of(self, blob: Blob) -> Range:
        """Return the range of a blob's elements."""
        stack, visited = [blob], 0
        while stack:
            top = stack[-1]
            if top in self._known:
                stack.pop()
                continue
            layer = top.producer
            operands = _operands(layer) if layer is not None and _rule_of(layer) is not None else ()
            missing = [operand for operand in operands if operand not in self._known]
            visited += 1
            if missing and visited <= _MOST_LAYERS:
                stack += missing
            elif missing:
                return self._known.get(blob, UNKNOWN)
            else:
                ranges = [self._known[operand] for operand in operands]
                self._known[top] = UNKNOWN if layer is None else through(layer, ranges)
                stack.pop()
        return self._known[blob]


def through(layer: Layer, inputs: Sequence[Range]) -> Range:
    """Return the range of a layer's outputs for operands of these ranges."""
    rule = _rule_of(layer)
    if rule is None and layer.is_custom:
        return UNKNOWN
    result = rule(layer, *inputs) if rule is not None else ORDINARY
    if layer.spec is not None and layer.spec.has_activation and layer["activation_type"]:
        result = _activated(layer, result)
    is_bounded = result.low > -_INF and result.high < _INF
    return result._replace(may_be_inf=False) if is_bounded else result


_SIZED = frozenset({"Crop", "Reshape"})  # layers that read only the sizes of their further inputs


def _operands(layer: Layer) -> Sequence[Blob]:
    """Return the blobs that limit a layer's numbers: its inputs, or the boxes of a sort for its column of indices."""
    boxes = sorted_indices(layer)
    return layer.inputs if boxes is None else (boxes,)


def _rule_of(layer: Layer) -> Callable[..., Range] | None:
    """Return the function from a layer's input ranges to its output range; None for layers without a rule."""
    if layer.type in _RULES:
        return _RULES[layer.type]
    if layer.has(Trait.MOVES):
        return lambda layer, *inputs: union(*inputs[: 1 if layer.type in _SIZED else None])
    if layer.spec is not None and layer.spec.bounds is not None:
        low, high = layer.spec.bounds
        return lambda layer, *inputs: Range(low, high, any(x.may_be_nan for x in inputs), may_be_inf=False)
    return None


def union(*ranges: Range) -> Range:
    """Return the smallest range that contains all of these."""
    return Range(
        min(x.low for x in ranges),
        max(x.high for x in ranges),
        any(x.may_be_nan for x in ranges),
        any(x.may_be_inf for x in ranges),
        all(x.is_integer for x in ranges),
    )


# ---- arithmetic of two operands


def _sum(a: Range, b: Range) -> Range:
    differ = any(x.may_be_inf and y.may_be_inf and x.high == _INF and y.low == -_INF for x, y in ((a, b), (b, a)))
    return _both(a, b, a.low + b.low, a.high + b.high, nan=differ)


def _negative(x: Range) -> Range:
    return x._replace(low=-x.high, high=-x.low)


def _unknown(*inputs: Range) -> Range:
    return UNKNOWN


def _both(a: Range, b: Range, low: float, high: float, *, nan: bool = False) -> Range:
    return Range(
        -_INF if math.isnan(low) else low,
        _INF if math.isnan(high) else high,
        a.may_be_nan or b.may_be_nan or nan,
        a.may_be_inf or b.may_be_inf,
        a.is_integer and b.is_integer,
    )


def _product(a: Range, b: Range) -> Range:
    corners = [0.0 if 0 in (x, y) else x * y for x in (a.low, a.high) for y in (b.low, b.high)]
    vanishes = (a.may_be_inf and b.has(0)) or (b.may_be_inf and a.has(0))
    return _both(a, b, min(corners), max(corners), nan=vanishes)


def _quotient(a: Range, b: Range) -> Range:
    if b.has(0) or b.may_be_inf:
        return Range(may_be_nan=True)
    return _product(a, b._replace(low=1 / b.high, high=1 / b.low))._replace(is_integer=False)


def _largest(a: Range, b: Range) -> Range:
    return _both(a, b, max(a.low, b.low), max(a.high, b.high))


def _power(a: Range, b: Range) -> Range:
    if b.low == b.high and not b.may_be_inf and (a.low > 0 or (a.low >= 0 and b.low > 0)):
        return Range(0, _INF, a.may_be_nan, a.may_be_inf)
    return UNKNOWN


_BINARY: Mapping[int, Callable[[Range, Range], Range]] = {  # by op_type
    BinaryOp.ADD: _sum,
    BinaryOp.SUB: lambda a, b: _sum(a, _negative(b)),
    BinaryOp.MUL: _product,
    BinaryOp.DIV: _quotient,
    BinaryOp.MAX: _largest,
    BinaryOp.MIN: lambda a, b: _both(a, b, min(a.low, b.low), min(a.high, b.high)),
    BinaryOp.POW: _power,
    BinaryOp.RSUB: lambda a, b: _sum(b, _negative(a)),
    BinaryOp.RDIV: lambda a, b: _quotient(b, a),
    BinaryOp.LOGADDEXP: lambda a, b: _sum(_largest(a, b), Range(0, 1, a.may_be_inf and b.may_be_inf, False)),
    BinaryOp.RPOW: lambda a, b: _power(b, a),
    **dict.fromkeys((BinaryOp.ATAN2, BinaryOp.RATAN2), lambda a, b: _bounded(-math.pi, math.pi)(union(a, b))),
}


def _is_between(layer: Layer) -> bool:
    """Return True for a Threshold minus another one with a higher limit: 1 between the limits, 0 elsewhere."""
    tests = [blob.producer for blob in layer.inputs]
    low, high = tests if layer.computes(BinaryOp.SUB, scalar=False) else (None, None)
    if low is None or high is None or {low.type, high.type} != {"Threshold"}:
        return False
    return low.input is high.input and low["threshold"] <= high["threshold"]


def _binary(layer: Layer, *inputs: Range) -> Range:
    if _is_between(layer):
        return _BIT
    b = _scalar(layer["b"]) if layer["with_scalar"] else inputs[1]
    result = _BINARY.get(layer["op_type"], _unknown)(inputs[0], b)
    is_square = layer.computes(BinaryOp.MUL) and len(layer.inputs) == 2 and layer.inputs[0] is layer.inputs[1]
    return result._replace(low=0.0) if is_square else result


def _eltwise(layer: Layer, *inputs: Range) -> Range:
    if layer["op_type"] in (Eltwise.PROD, Eltwise.MAX):
        return reduce(_product if layer["op_type"] == Eltwise.PROD else _largest, inputs)
    coeffs = layer["coeffs"] if len(layer["coeffs"]) else [1.0] * len(inputs)
    terms = (_product(x, _scalar(coeff)) for x, coeff in zip(inputs, coeffs, strict=True))
    return reduce(_sum, terms, _ZERO)


# ---- functions of one operand


def _bounded(low: float, high: float) -> Callable[[Range], Range]:
    """Return the rule for a function whose results lie between two bounds for all numbers."""
    return lambda x: Range(low, high, x.may_be_nan, False)


def _in_domain(low: float, high: float, result: Range) -> Callable[[Range], Range]:
    """Return the rule for a function that is finite between two bounds, and NaN or infinite elsewhere."""

    def rule(x: Range) -> Range:
        if x.within(low, high) and not x.may_be_inf:
            return result._replace(may_be_nan=x.may_be_nan, may_be_inf=False)
        return result._replace(may_be_nan=True, may_be_inf=True)

    return rule


def _monotonic(function: Callable[[float], float], x: Range) -> Range:
    return x._replace(low=function(x.low), high=function(x.high), is_integer=False)


def _rounded(function: Callable[[float], float]) -> Callable[[Range], Range]:
    def rule(x: Range) -> Range:
        low, high = (n if math.isinf(n) else float(function(n)) for n in (x.low, x.high))
        return x._replace(low=low, high=high, is_integer=x.is_integer or x.is_finite)

    return rule


def _abs(x: Range) -> Range:
    return x._replace(low=max(x.low, -x.high, 0.0), high=max(-x.low, x.high))


def _sqrt(x: Range) -> Range:
    if x.low < 0:
        return Range(0, _INF, True, x.may_be_inf)
    return _monotonic(math.sqrt, x)


def _exp(x: Range) -> Range:
    overflows = x.high > EXP_LIMIT
    low = 0.0 if x.low < -EXP_LIMIT else math.exp(min(x.low, EXP_LIMIT))
    return Range(low, _INF if overflows else math.exp(x.high), x.may_be_nan, overflows)


def _log(x: Range, base: float = math.e) -> Range:
    if x.low > 0:
        return _monotonic(lambda n: _INF if math.isinf(n) else math.log(n, base), x)
    high = _INF if math.isinf(x.high) or x.high <= 0 else math.log(x.high, base)
    return Range(-_INF, high, x.may_be_nan or x.low < 0, True)


def _exponential(x: Range) -> Range:
    """Return the range of sinh and cosh."""
    return Range(may_be_nan=x.may_be_nan, may_be_inf=not x.within(-EXP_LIMIT, EXP_LIMIT))


def _finite_if_input_is(x: Range) -> Range:
    """Return the range of a function that is finite for finite operands."""
    return Range(may_be_nan=x.may_be_nan, may_be_inf=x.may_be_inf)


def _nan_at_infinity(x: Range) -> Range:
    """Return the range of a function that is finite, except that infinities may give NaN."""
    return Range(may_be_nan=x.may_be_nan or x.may_be_inf, may_be_inf=x.may_be_inf)


_HALF_PI = math.pi / 2
_BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))
_TINY = float(np.finfo(np.float32).tiny)
_FUNCTIONS: Mapping[int, Callable[[Range], Range]] = {
    UnaryOp.ABS: _abs,
    UnaryOp.NEG: _negative,
    UnaryOp.FLOOR: _rounded(math.floor),
    UnaryOp.CEIL: _rounded(math.ceil),
    UnaryOp.SQUARE: lambda x: _product(_abs(x), _abs(x))._replace(low=_abs(x).low ** 2),
    UnaryOp.SQRT: _sqrt,
    UnaryOp.RSQRT: _in_domain(_TINY, _INF, Range(0, _INF)),
    UnaryOp.EXP: _exp,
    UnaryOp.LOG: _log,
    UnaryOp.SIN: _bounded(-1, 1),
    UnaryOp.COS: _bounded(-1, 1),
    UnaryOp.TAN: _nan_at_infinity,
    UnaryOp.ASIN: _in_domain(-1, 1, Range(-_HALF_PI, _HALF_PI)),
    UnaryOp.ACOS: _in_domain(-1, 1, Range(0, math.pi)),
    UnaryOp.ATAN: _bounded(-_HALF_PI, _HALF_PI),
    UnaryOp.RECIPROCAL: lambda x: _quotient(Range(1, 1, False, False, True), x),
    UnaryOp.TANH: _bounded(-1, 1),
    UnaryOp.LOG10: lambda x: _log(x, 10),
    UnaryOp.ROUND: _rounded(round),
    UnaryOp.TRUNC: _rounded(math.trunc),
    UnaryOp.SIGN: lambda x: Range(float(np.sign(x.low)), float(np.sign(x.high)), x.may_be_nan, False, True),
    UnaryOp.EXPM1: lambda x: _sum(_exp(x), Range(-1, -1, False, False)),
    UnaryOp.SINH: _exponential,
    UnaryOp.ASINH: _finite_if_input_is,
    UnaryOp.COSH: _exponential,
    UnaryOp.ACOSH: _in_domain(1, _INF, Range(0, _INF)),
    UnaryOp.ATANH: _in_domain(-_BELOW_ONE, _BELOW_ONE, Range()),
    UnaryOp.LOG1P: lambda x: _log(_sum(x, Range(1, 1, False, False))),
}


def _positive(x: Range) -> Range:
    return x._replace(low=max(x.low, 0.0), high=max(x.high, 0.0))


def _relu(layer: Layer, x: Range) -> Range:
    slope = layer["slope"]
    if slope == 0:
        return _positive(x)
    return x._replace(low=min(x.low, x.low * slope), is_integer=False) if 0 < slope <= 1 else _finite_if_input_is(x)


def clipped(x: Range, low: float, high: float) -> Range:
    """Return the range cut to these bounds; infinities become the bounds."""
    least, most = (min(max(bound, low), high) for bound in (x.low, x.high))
    return x._replace(low=least, high=most, may_be_inf=False, is_integer=x.is_integer and low == int(low))


def _shifted(layer: Layer, x: Range) -> Range:
    scale, shift = (_scalar(layer[name]) for name in ("scale", "shift"))
    return _sum(_product(x, scale), shift)


def _scale(layer: Layer, x: Range, *factors: Range) -> Range:
    product = _product(x, *(factors or [of_numbers(layer.weights["scale_data"])]))
    return _sum(product, of_numbers(layer.weights["bias_data"])) if layer["bias_term"] else product


def _power_layer(layer: Layer, x: Range) -> Range:
    exponent, base = layer["power"], _shifted(layer, x)
    if exponent > 0 and float(exponent).is_integer():
        return _finite_if_input_is(base)
    return _power(base, Range(exponent, exponent, False, False))


def _dequantize(layer: Layer, x: Range) -> Range:
    plain = layer["scale_data_size"] == 1 and not layer["bias_data_size"] and layer.weights["scale_data"][0] == 1
    return ORDINARY._replace(is_integer=bool(plain))


def _cumulative_sum(layer: Layer, x: Range) -> Range:
    return ORDINARY._replace(low=x.low if x.low >= 0 else ORDINARY.low, is_integer=x.is_integer)


_NEVER_NEGATIVE = (Reduction.ASUM, Reduction.SUMSQ, Reduction.L1, Reduction.L2)
_KEEPS_SIGN = (Reduction.SUM, Reduction.MEAN, Reduction.PROD)


def _reduction(layer: Layer, x: Range) -> Range:
    kind = layer["operation"]
    if kind in (Reduction.MAX, Reduction.MIN):
        return x
    nan = x.may_be_nan or x.may_be_inf
    if kind == Reduction.MEAN and layer["coeff"] == 1:
        return Range(x.low, x.high, nan, x.may_be_inf)
    never_negative = kind in _NEVER_NEGATIVE or (kind in _KEEPS_SIGN and x.low >= 0)
    is_integer = kind == Reduction.SUM and layer["coeff"] == 1 and x.is_integer
    result = Range(may_be_nan=nan, may_be_inf=x.may_be_inf, is_integer=is_integer)
    return result._replace(low=0.0) if never_negative and layer["coeff"] > 0 else result


def _padding(layer: Layer, x: Range) -> Range:
    if layer["type"] != Padding.CONSTANT:
        return x
    if layer["per_channel_pad_data_size"]:
        return union(x, of_numbers(layer.weights["per_channel_pad_data"]))
    return union(x, _scalar(layer["value"]))


def _pooling(layer: Layer, x: Range) -> Range:
    """Return the range of a pooling: a mean mixes elements, a maximum is one of them."""
    is_mixed = layer["pooling_type"] == 1
    return Range(min(x.low, 0.0), max(x.high, 0.0), x.may_be_nan and not is_mixed, x.may_be_inf and not is_mixed)


def _activated(layer: Layer, x: Range) -> Range:
    """Return the range after a fused activation; it is finite for finite numbers."""
    kind, params = layer["activation_type"], layer["activation_params"]
    if kind == Activation.RELU:
        return _positive(x)
    if kind == Activation.CLIP and len(params) >= 2:
        return clipped(x, float(params[0]), float(params[1]))
    return _bounded(0, 1)(x) if kind == Activation.SIGMOID else _finite_if_input_is(x)


def _of(function: Callable[[Range], Range]) -> Callable[..., Range]:
    return lambda layer, x: function(x)


_FINITE_IF_INPUT_IS = ("PReLU", "ELU", "SELU", "CELU", "Shrink", "Bias", "BatchNorm", "Cast")
_NAN_AT_INFINITY = ("GELU", "Swish", "Mish", "HardSwish", "BNLL")  # infinity times 0, or minus itself

_RULES: Mapping[str, Callable[..., Range]] = {
    "Input": lambda layer: UNKNOWN,
    "MemoryData": lambda layer: of_numbers(layer.weights["data"]),
    "Dequantize": _dequantize,
    "Threshold": lambda layer, x: _BIT,
    "BinaryOp": _binary,
    "Eltwise": _eltwise,
    "UnaryOp": lambda layer, x: _FUNCTIONS.get(layer["op_type"], _unknown)(x),
    "AbsVal": _of(_abs),
    "ReLU": _relu,
    "Clip": lambda layer, x: clipped(x, float(layer["min"]), float(layer["max"])),
    "Exp": lambda layer, x: _exp(_shifted(layer, x)) if layer["base"] == -1 else Range(0, _INF, x.may_be_nan, True),
    "Log": lambda layer, x: _log(_shifted(layer, x)) if layer["base"] == -1 else UNKNOWN,
    "Power": _power_layer,
    "Scale": _scale,
    "Softmax": lambda layer, x: Range(0, 1, not x.is_finite, False),
    "Softplus": _of(lambda x: Range(0, _INF, x.may_be_nan, x.high > EXP_LIMIT)),
    "Reduction": _reduction,
    "CumulativeSum": _cumulative_sum,
    "Dropout": lambda layer, x: _product(x, _scalar(layer["scale"])),
    "Padding": _padding,
    "Pooling": _pooling,
    "GridSample": lambda layer, x, grid: union(x, _ZERO) if layer["padding_mode"] == SamplePadding.ZEROS else x,
    # A second input of Interp gives only sizes.
    "Interp": lambda layer, x, *sizes: x if layer["resize_type"] == Interp.NEAREST else _finite_if_input_is(x),
    **dict.fromkeys(_FINITE_IF_INPUT_IS, lambda layer, *inputs: union(*map(_finite_if_input_is, inputs))),
    **dict.fromkeys(_NAN_AT_INFINITY, _of(_nan_at_infinity)),
}
