"""Conversion of a quantised graph to a float graph without rounding; its products keep the scales for int8 layers.

An 8-bit value becomes the float that it represents, clipped to its range, and operators on 8-bit values become float
operators. An operator without a float version reads a QuantizeLinear of the float. Products of 8-bit weights keep the
scales as `Int8` in their node's `meta`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import onnx_ir

from onnx2ncnn_opt.ir.int8 import LEVELS
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.edit.editor import Editor
from onnx2ncnn_opt.onnx.edit.model import to_bytes
from onnx2ncnn_opt.onnx.read.structure import attributes_of, strip

INT8 = "onnx2ncnn_opt.int8"  # the key of an `Int8` in a node's meta
_RANGES = {np.dtype(np.int8): (-128, 127), np.dtype(np.uint8): (0, 255)}
_DOMAINS = ("", "com.microsoft")
_OPSET_OF_CLIP = 11  # the first opset with limits as inputs
# Operators that only move numbers, or choose among them.
_MOVES = {"DepthToSpace", "Expand", "Flatten", "Gather", "Identity", "MaxPool", "Reshape", "Slice", "SpaceToDepth"}
_MOVES |= {"Split", "Squeeze", "Transpose", "Unsqueeze"}
# ONNX's operator for each one on 8-bit values, and the inputs that are its operands and the scale of its result. Scale
# and zero point follow each operand, a zero point the scale of the result.
_OPERATORS = {
    "QLinearAdd": ("Add", (0, 3), 6),
    "QLinearAveragePool": ("AveragePool", (0,), 3),
    "QLinearGlobalAveragePool": ("GlobalAveragePool", (0,), 3),
    "QLinearLeakyRelu": ("LeakyRelu", (0,), 3),
    "QLinearMul": ("Mul", (0, 3), 6),
    "QLinearSigmoid": ("Sigmoid", (0,), 3),
    "QLinearSoftmax": ("Softmax", (0,), 3),
}
# The same for products of inputs 0 and 3: ONNX's operator, and the inputs that are the result's scale and the bias.
_QUANTISED_PRODUCTS = {"QGemm": ("Gemm", 7, 6), "QLinearConv": ("Conv", 6, 8), "QLinearMatMul": ("MatMul", 6, None)}
AT_RUN_TIME = ("DynamicQuantizeLinear", "DynamicQuantizeLSTM")
_QUANTISE = ("QuantizeLinear", "QLinearConv", "QLinearMatMul", "QGemm", *AT_RUN_TIME)
_OF_INTEGERS = {"ConvInteger": "Conv", "MatMulInteger": "MatMul"}
_Values: TypeAlias = Sequence[onnx_ir.Value | None]
_Limits: TypeAlias = tuple[float, int, np.dtype[Any]]  # scale, zero point and its 8-bit type
_NOT_ONNX = ("channels_last", "opset")  # attributes that only ONNX Runtime's operators have
_PRODUCTS = ("Conv", "Gemm", "MatMul")


class Int8(NamedTuple):
    """The scales of a product: of its input (0 if unknown) and of its weight's rows; the reason to stay in float."""

    input_scale: float
    is_positive: bool
    scales: Array
    reason: str
    coarser: float = 1.0  # int8 step of its input / the model's step: up to 2 if the model's zero point differs


class _Quantised(NamedTuple):
    """A float value that replaces an 8-bit value."""

    value: onnx_ir.Value
    scale: float
    zero: int
    dtype: np.dtype[Any]

    @property
    def limits(self) -> tuple[float, float]:
        low, high = _RANGES[self.dtype]
        return (low - self.zero) * self.scale, (high - self.zero) * self.scale

    @property
    def is_centred(self) -> bool:
        """True if an int8 layer, with numbers from -127 to 127, has the same steps."""
        return self.zero == sum(_RANGES[self.dtype]) // 2 + 1

    @property
    def largest(self) -> float:
        low, high = self.limits
        return LEVELS * self.scale if self.is_centred else max(-low, high)


def without_rounding(graph: onnx_ir.Graph) -> bool:
    """Turn a graph into a float graph whose products have scales; return False if it quantises nothing."""
    if all(node.op_type not in _QUANTISE for node in graph):
        return False
    conversion = _FloatConversion(graph)
    for node in list(graph):
        conversion.convert(node)
    conversion.end()
    return True


def float_model(graph: onnx_ir.Graph) -> bytes | None:
    """Turn a graph into a float graph, and return its model; None if it quantises nothing."""
    return to_bytes(graph) if without_rounding(graph) else None


def scales_of_products(graph: onnx_ir.Graph) -> dict[str, Int8]:
    """Return the scales of a float graph's products by the origin of their layers, or the `reason` for none."""
    products = (node for node in graph if not node.domain and node.op_type in _PRODUCTS)
    none = Int8(0.0, False, np.ones(1, np.float32), "its weight is not quantised")
    return {node.name or node.outputs[0].name or "": node.meta.get(INT8, none) for node in products}


class _Weight(NamedTuple):
    """The scales of a constant along an axis; `is_int8` if its numbers are -127 to 127."""

    steps: Array
    axis: int
    is_int8: bool


class _FloatConversion(Editor):
    """The float values that replace 8-bit values; the nodes are converted in order."""

    suffix = "float"

    def __init__(self, graph: onnx_ir.Graph) -> None:
        super().__init__(graph)
        self._floats: dict[onnx_ir.Value, _Quantised] = {}  # by the 8-bit value
        self._known: dict[onnx_ir.Value, _Quantised] = {}  # by the float value
        self._weights: dict[onnx_ir.Value, _Weight] = {}  # by the float constant
        self._at_run_time: set[onnx_ir.Value] = set()  # products whose input the model quantises at run time
        self._methods = {
            "QuantizeLinear": self._quantize,
            "DequantizeLinear": self._dequantize,
            **dict.fromkeys(_OPERATORS, self._operator),
            "QLinearConcat": self._concat,
            **dict.fromkeys(_QUANTISED_PRODUCTS, self._product),
            **dict.fromkeys(_OF_INTEGERS, self._product_at_run_time),
            "DynamicQuantizeLSTM": self._lstm,
            **dict.fromkeys(_MOVES, self._move),
        }

    def convert(self, node: onnx_ir.Node) -> None:
        """Insert the float version of a node that has 8-bit inputs or outputs."""
        self.place = node
        method = self._methods.get(node.op_type) if node.domain in _DOMAINS else None
        if method is not None:
            method(node)

    def _quantize(self, node: onnx_ir.Node) -> None:
        x, scale, zero = (*node.inputs, None)[:3]
        limits = _limits(scale, zero)
        if x is not None and _constant(x) is None and limits is not None:
            self._clipped(x, node.outputs[0], limits)

    def _dequantize(self, node: onnx_ir.Node) -> None:
        operand = self._operand(node.inputs, axis=attributes_of(node).get("axis", 1))
        if operand is not None:
            self.replace(node.outputs[0], operand)

    def _operator(self, node: onnx_ir.Node) -> None:
        name, places, scale = _OPERATORS[node.op_type]
        operands = [self._operand(node.inputs[i : i + 3]) for i in places]
        if not attributes_of(node).get("channels_last", 0) and attributes_of(node).get("opset", 13) >= 13:
            self._result(node, name, operands, node.inputs[scale : scale + 2])

    def _concat(self, node: onnx_ir.Node) -> None:
        operands = [self._operand(node.inputs[i : i + 3]) for i in range(2, len(node.inputs), 3)]
        self._result(node, "Concat", operands, node.inputs[:2])

    def _product(self, node: onnx_ir.Node) -> None:
        kind, scale, bias_at = _QUANTISED_PRODUCTS[node.op_type]
        axis = 0 if kind == "Conv" or attributes_of(node).get("transB", 0) else -1
        x, w = self._operand(node.inputs[:3]), self._operand(node.inputs[3:6], axis=axis)
        if x is None or w is None:
            return
        operands, quantised, weight = [x, w], self._known.get(x), self._weights.get(w)
        bias = None if bias_at is None or bias_at >= len(node.inputs) else node.inputs[bias_at]
        if quantised is None or weight is None:
            if kind == "Conv" or bias is not None:
                return
        elif bias is not None:
            numbers = _constant(bias)
            if numbers is None:
                return
            steps = weight.steps if kind == "Conv" else weight.steps.astype(np.float64)
            step = np.asarray(quantised.scale * steps * attributes_of(node).get("alpha", 1.0), np.float64)
            operands.append(self.initializer((numbers * step).astype(np.float32)))
        self._result(node, kind, operands, node.inputs[scale : scale + 2])

    def _product_at_run_time(self, node: onnx_ir.Node) -> None:
        """Replace the pattern of dynamic quantisation: integer product -> Cast -> Mul by both scales.

        DynamicQuantizeLinear computes the integers, their scale and zero point; its input is the float operand.
        """
        x, w, x_zero, w_zero = (*node.inputs, None, None)[:4]
        cast = _only_reader(node.outputs[0], "Cast")
        scaled = None if cast is None else _only_reader(cast.outputs[0], "Mul")
        quantizer = None if x is None else x.producer()
        if scaled is None or quantizer is None or quantizer.op_type != "DynamicQuantizeLinear" or w is None:
            return
        scale, zero = quantizer.outputs[1:]
        both = next((value for value in scaled.inputs if value is not None and value.producer() is not cast), None)
        factors = [] if both is None or (mul := both.producer()) is None or mul.op_type != "Mul" else list(mul.inputs)
        if x_zero is not zero or len(factors) != 2 or scale not in factors:
            return
        step = factors[1 - factors.index(scale)]
        weight = None if step is None else self._weight(w, step, w_zero, 0 if node.op_type == "ConvInteger" else -1)
        if weight is not None:
            [product] = self.nodes(_OF_INTEGERS[node.op_type], [quantizer.inputs[0], weight], _attributes(node))
            self._at_run_time.add(product)
            self.replace(scaled.outputs[0], product)

    def _lstm(self, node: onnx_ir.Node) -> None:
        x, w, r, *others = node.inputs[:8]
        numbers = [_constant(value) for value in (w, *node.inputs[8:10], r, *node.inputs[10:12]) if value is not None]
        matrices = [array for array in numbers if array is not None]
        if len(matrices) == 6:
            weights = [self.initializer(dequantised(*matrices[:3])), self.initializer(dequantised(*matrices[3:]))]
            states = self.nodes("LSTM", [x, *weights, *others], _attributes(node), len(node.outputs))
            for old, new in zip(node.outputs, states, strict=True):
                self.replace(old, new)

    def _move(self, node: onnx_ir.Node) -> None:
        first, *others = node.inputs or (None,)
        x = None if first is None else self._floats.get(first)
        has_indices = node.op_type == "MaxPool" and len(node.outputs) > 1
        if x is None or has_indices or any(value in self._floats for value in others):
            return
        outputs = self.nodes(node.op_type, [x.value, *others], _attributes(node), len(node.outputs))
        for old, new in zip(node.outputs, outputs, strict=True):
            self._add(old, x._replace(value=new))

    def _result(self, node: onnx_ir.Node, kind: str, operands: _Values, scale_and_zero: _Values) -> None:
        """Add the float operator of a node; clip its result if the output has a scale, else use it as the output."""
        if any(operand is None for operand in operands):
            return
        scale, zero = (*scale_and_zero, None, None)[:2]
        limits = _limits(scale, zero)
        if scale is not None and limits is None:
            return
        [result] = self.nodes(kind, operands, _attributes(node))
        if limits is None:
            self.replace(node.outputs[0], result)
        else:
            self._clipped(result, node.outputs[0], limits)

    def _clipped(self, x: onnx_ir.Value, old: onnx_ir.Value, limits: _Limits) -> None:
        quantised = _Quantised(x, *limits)
        low, high = (np.float32(limit) for limit in quantised.limits)
        if self.graph.opset_imports.get("", 1) >= _OPSET_OF_CLIP:
            bounds = [self.initializer(np.array(bound, np.float32)) for bound in (low, high)]
            [value] = self.nodes("Clip", [x, *bounds])
        else:
            [value] = self.nodes("Clip", [x], {"min": float(low), "max": float(high)})
        self._add(old, quantised._replace(value=value))

    def _add(self, old: onnx_ir.Value, quantised: _Quantised) -> None:
        self._floats[old] = self._known[quantised.value] = quantised

    def _operand(self, inputs: _Values, axis: int = 1) -> onnx_ir.Value | None:
        """Return the float value for `inputs`, an 8-bit value with scale and zero point; a constant is dequantised."""
        value, scale, zero = (*inputs, None)[:3]
        if value is None or scale is None:
            return None
        quantised = self._floats.get(value)
        if quantised is not None:
            return quantised.value if _limits(scale, zero) == quantised[1:] else None
        return self._weight(value, scale, zero, axis)

    def _weight(
        self, value: onnx_ir.Value, scale: onnx_ir.Value, zero: onnx_ir.Value | None, axis: int
    ) -> onnx_ir.Value | None:
        numbers, steps = _constant(value), _constant(scale)
        zeros = np.zeros((), np.int8) if zero is None else _constant(zero)
        if numbers is None or steps is None or zeros is None or numbers.dtype not in _RANGES:
            return None
        if max(steps.ndim, zeros.ndim) > 1:  # blocks
            return None
        axis = axis % max(numbers.ndim, 1)
        centred = numbers.astype(np.int32) - _along(zeros.astype(np.int32), axis, numbers.ndim)
        steps = steps.astype(np.float32).reshape(-1)
        floats = centred.astype(np.float32) * _along(steps, axis, numbers.ndim)
        result = self.initializer(floats.reshape(numbers.shape).astype(np.float32))
        self._weights[result] = _Weight(steps, axis, bool(np.abs(centred).max(initial=0) <= LEVELS))
        return result

    def end(self) -> None:
        """Quantise floats for the remaining readers of 8-bit values, remove dead nodes, and set scales of products."""
        for old, quantised in self._floats.items():
            if not (old.uses() or old.is_graph_output()):
                continue
            self.place = old.producer()
            scale, zero = np.array(quantised.scale, np.float32), np.array(quantised.zero, quantised.dtype)
            [new] = self.nodes("QuantizeLinear", [quantised.value, *map(self.initializer, (scale, zero))])
            self.replace(old, new)
        strip(self.graph)
        for node in self.graph:
            if not node.domain and node.op_type in _PRODUCTS:
                self._annotate(node)
        self._drop_clips()

    def _annotate(self, node: onnx_ir.Node) -> None:
        x, w = node.inputs[:2]
        weight = None if w is None else self._weights.get(w)
        if x is None or w is None or w.shape is None or weight is None:
            return
        rows = 0 if node.op_type == "Conv" or attributes_of(node).get("transB", 0) else len(w.shape) - 1
        quantised, reason = self._known.get(x), ""
        if not weight.is_int8:
            reason = "its weight has numbers beyond -127 to 127, as zero points make them"
        elif weight.steps.size > 1 and weight.axis != rows:
            reason = "its weight has a scale for each input"
        elif quantised is None and node.outputs[0] not in self._at_run_time:
            reason = "its input is not quantised"
        with np.errstate(divide="ignore"):
            scales = np.where(weight.steps > 0, 1 / weight.steps, 1).astype(np.float32)
        input_scale = LEVELS / quantised.largest if quantised else 0.0
        coarser = quantised.largest / LEVELS / quantised.scale if quantised else 1.0
        is_positive = quantised is not None and quantised.limits[0] >= 0
        node.meta[INT8] = Int8(input_scale, is_positive, scales, reason, coarser)

    def _drop_clips(self) -> None:
        """Remove clips if all readers clip to the same range, as int8 layers do."""
        for value, quantised in self._known.items():
            clip = value.producer()
            if clip is None or clip.graph is None or clip.op_type != "Clip" or not quantised.is_centred:
                continue
            uses = [(node.meta.get(INT8), index) for node, index in value.uses()]
            if value.is_graph_output() or any(product is None or product.reason or index for product, index in uses):
                continue
            if clip.inputs[0] is not None:
                onnx_ir.convenience.replace_all_uses_with(value, clip.inputs[0])
        strip(self.graph)


def dequantised(matrix: Array, scale: Array, zero: Array) -> Array:
    """Return an LSTM's weights of DynamicQuantizeLSTM's; its scales are those of directions, or of columns."""
    scale, zero = (array.reshape(len(matrix), 1, -1).astype(np.float32) for array in (scale, zero))
    return ((matrix.astype(np.float32) - zero) * scale).transpose(0, 2, 1)


def _only_reader(value: onnx_ir.Value, op_type: str) -> onnx_ir.Node | None:
    """Return the only reader of a value, if it has this type."""
    readers = [node for node, _ in value.uses()]
    is_only = len(readers) == 1 and readers[0].op_type == op_type and not value.is_graph_output()
    return readers[0] if is_only else None


def _attributes(node: onnx_ir.Node) -> dict[str, Any]:
    """Return the attributes that ONNX's own operator has, too."""
    return {name: attribute.value for name, attribute in node.attributes.items() if name not in _NOT_ONNX}


def _constant(value: onnx_ir.Value) -> Array | None:
    """Return the array of a constant, or of QuantizeLinear of constants."""
    if value.const_value is not None:
        return np.asarray(value.const_value.numpy())
    node = value.producer()
    if node is None or node.op_type != "QuantizeLinear":
        return None
    x, scale, zero = (None if operand is None else _constant(operand) for operand in (*node.inputs, None)[:3])
    if x is None or scale is None or zero is None or zero.dtype not in _RANGES or scale.ndim > 1:
        return None
    axis = attributes_of(node).get("axis", 1) % max(x.ndim, 1)
    scale, shift = (_along(array, axis, x.ndim) for array in (scale, zero))
    numbers: Array = np.clip(np.rint(x / scale) + shift, *_RANGES[zero.dtype]).astype(zero.dtype)
    return numbers


def _along(array: Array, axis: int, rank: int) -> Array:
    """Return numbers per tensor, or along an axis, in a shape that broadcasts."""
    return array if array.size == 1 else array.reshape([-1 if i == axis else 1 for i in range(rank)])


def _limits(scale: onnx_ir.Value | None, zero: onnx_ir.Value | None) -> _Limits | None:
    """Return the limits of a quantised value; None unless a positive scale and a zero point are single constants."""
    step = None if scale is None else _constant(scale)
    point = np.zeros((), np.uint8) if zero is None else _constant(zero)
    if step is None or point is None or step.size != 1 or point.size != 1 or point.dtype not in _RANGES:
        return None
    number = float(step.reshape(-1)[0])
    return (number, int(point.reshape(-1)[0]), point.dtype) if 0 < number < np.inf else None
