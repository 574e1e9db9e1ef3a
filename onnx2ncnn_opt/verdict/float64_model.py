"""A model in float64, whose rounding errors are negligible."""

import math
from collections.abc import Iterator, Sequence
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnx2ncnn_opt.errors import RunError
from onnx2ncnn_opt.ir.half import ABSORBING
from onnx2ncnn_opt.onnx.read.early import expanded
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.runtime.ort import read_model

FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)

# Operators that ONNX Runtime 1.32 has in float64 on the CPU; tests/verdict/test_double.py tries them.
_DOUBLE_NAMES = """
    Abs Add ArgMax ArgMin BatchNormalization Cast Ceil Celu Clip Concat Cos CumSum DFT DepthToSpace Div Dropout Einsum
    Equal Exp Expand EyeLike Flatten Floor Gather GatherElements GatherND Gemm Greater GreaterOrEqual GridSample
    GroupNormalization Identity IsInf IsNaN LayerNormalization Less LessOrEqual Log LogSoftmax LpNormalization
    MatMul Max MaxPool Min Mod Mul Neg Pad Pow RMSNormalization Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum
    ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape ReverseSequence
    Round STFT ScatterElements ScatterND Shape Shrink Sign Sin Size Slice Softmax SpaceToDepth Split Sqrt Squeeze Sub
    Sum Swish Tanh Tile TopK Transpose Trilu Unsqueeze Where
"""
DOUBLE = frozenset(_DOUBLE_NAMES.split())
_SINCE = {"GridSample": 20}  # the opset of the first version with float64
_GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}  # ONNX Runtime has these in float32 only
_STATE, _CELL = "onnx2ncnn_opt.state", "onnx2ncnn_opt.cell"  # inputs of a step
_PRODUCTS = "onnx2ncnn_opt.products"  # inputs times weights
_OLDEST_OPSET = 11  # Range exists, and Slice and Pad have their numbers as inputs
_WANTED_OPSET = 13  # Clip has float64
_END = np.iinfo(np.int64).max
_MAX_PRODUCTS = 32  # of a convolution: fewer products need more memory, and ONNX Runtime is slow with many nodes


class NodeWriter:
    """The nodes of a rewritten model, and its new `constants` without duplicates, which load faster."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[tuple[object, ...], TensorProto] = {}
        self._numbers = count()

    def node(self, operator: str, *inputs: str | list[int] | Array, out: str = "", **attributes: Any) -> str:
        """Add a node with one output, and return the output's name; integers and arrays become constants."""
        names = [value if isinstance(value, str) else self.constant(value) for value in inputs]
        name = out or f"onnx2ncnn_opt.{next(self._numbers)}"
        self.nodes.append(helper.make_node(operator, names, [name], **attributes))
        return name

    def constant(self, value: list[int] | Array) -> str:
        """Add a constant, and return its name; a list becomes int64."""
        array = np.array(value, np.int64) if isinstance(value, list) else value
        key = array.dtype, array.shape, array.tobytes()
        if key not in self.constants:
            self.constants[key] = numpy_helper.from_array(array, f"onnx2ncnn_opt.constant.{len(self.constants)}")
        return self.constants[key].name


class InDouble(NodeWriter):
    """The model in float64 as `data`, cut at `outputs` if given, and the number of its `weights`.

    Inputs keep their types; float outputs become float64, and those that are inputs are left out. Convolutions, average
    pooling and LRN, which ONNX Runtime does not have in float64, become products and sums of slices. Other operators
    without float64 run in float32. Raises RunError with the reason for a model that cannot be rewritten.
    """

    def __init__(self, model: Path | bytes, outputs: Sequence[str] = ()) -> None:
        super().__init__()
        proto = upgraded(read_model(model, outputs))
        self._opset = _opset(proto)
        if any(attribute.HasField("g") for node in proto.graph.node for attribute in node.attribute):
            raise RunError("a model with branches or loops is not rewritten")
        inferred = inferred_values(proto)
        self._types = element_types(proto, inferred)
        self._ranks = {
            v.name: len(v.type.tensor_type.shape.dim) for v in inferred if v.type.tensor_type.HasField("shape")
        }
        self._shapes = {tensor.name: tuple(tensor.dims) for tensor in proto.graph.initializer}
        self.weights = sum(map(math.prod, self._shapes.values()))
        self._double: dict[str, str] = {}
        for value in (*proto.graph.input, *proto.graph.initializer):
            if self._types.get(value.name) in FLOATS and value.name not in self._double:
                self._double[value.name] = self.node("Cast", value.name, to=TensorProto.DOUBLE)
        for node in proto.graph.node:
            self._add(node)
        del proto.graph.node[:], proto.graph.value_info[:]
        proto.graph.node.extend(self.nodes)
        proto.graph.initializer.extend(self.constants.values())
        computed = [value for value in proto.graph.output if value.name not in self._double]
        for value in computed:
            if self._types.get(value.name) in FLOATS:
                value.type.tensor_type.elem_type = TensorProto.DOUBLE
            else:
                value.ClearField("type")
        del proto.graph.output[:]
        proto.graph.output.extend(computed)
        self.data = bytes(proto.SerializeToString())

    def _add(self, node: onnx.NodeProto) -> None:
        """Add a node of the model, in float64 if ONNX Runtime has the operator in float64."""
        inputs = [self._double.get(name, name) for name in node.input]
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        kind = "" if node.domain else node.op_type
        rewrites = {"AveragePool": self._average, "Conv": self._convolution, "GlobalAveragePool": self._mean}
        rewrites |= {"LRN": self._local_response, "Add": self._sum}
        rewrites |= dict.fromkeys(_GATES, self._recurrent)
        if kind in rewrites and rewrites[kind](node, inputs, attributes):
            return
        if kind == "Sigmoid":
            self._sigmoid(inputs[0], node.output[0])
            return
        has_floats = any(self._types.get(name) in FLOATS for name in (*node.input, *node.output))
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        if not has_floats or (kind in DOUBLE and self._opset >= _SINCE.get(kind, 0)):
            copy.input[:] = inputs
            for attribute in copy.attribute:
                if attribute.name in ("to", "dtype", "stash_type") and attribute.i in FLOATS:
                    attribute.i = TensorProto.DOUBLE
            if node.op_type == "GroupNormalization" and self._opset >= 21 and "stash_type" not in attributes:
                copy.attribute.append(helper.make_attribute("stash_type", TensorProto.DOUBLE))  # the default is 1
            self.nodes.append(copy)
            return
        copy.input[:] = [
            self.node("Cast", double, to=self._types[name]) if self._types.get(name) in FLOATS else double
            for name, double in zip(node.input, inputs, strict=True)
        ]
        floats = [name for name in node.output if self._types.get(name) in FLOATS]
        copy.output[:] = [f"{name}.single" if name in floats else name for name in node.output]
        self.nodes.append(copy)
        for name in floats:
            self.node("Cast", f"{name}.single", out=name, to=TensorProto.DOUBLE)

    def _sum(self, node: onnx.NodeProto, inputs: list[str], attributes: dict[str, Any]) -> bool:
        """Add a sum, in float32 if it is large: there masks absorb scores. Return False for integers."""
        if self._types.get(node.input[0]) not in FLOATS:
            return False
        total = self.node("Add", *inputs)
        single = self.node("Cast", self.node("Cast", total, to=TensorProto.FLOAT), to=TensorProto.DOUBLE)
        is_large = self.node("Greater", self.node("Abs", total), np.array(ABSORBING))
        self.node("Where", is_large, single, total, out=node.output[0])
        return True

    def _convolution(self, node: onnx.NodeProto, inputs: list[str], attributes: dict[str, Any]) -> bool:
        """Add a convolution as products of a few kernel columns each; return False for unknown padding."""
        shape = self._shapes.get(node.input[1])
        if not shape or not _has_pads(attributes):
            return False
        groups, last = attributes.get("group", 1), len(shape) - 1
        kernel = self.node("Reshape", inputs[1], [groups, shape[0] // groups, shape[1], *shape[2:]])
        name = self._padded(inputs[0], last - 1, attributes)
        width, total = -(-math.prod(shape[2:]) // _MAX_PRODUCTS), ""
        for start, end, columns in self._columns(name, shape[2:], width, attributes):
            rows = shape[1] * math.prod(np.subtract(end, start))
            weight = self.node("Slice", kernel, start, end, [*range(3, last + 2)])
            matrix = self.node("Reshape", weight, [groups, shape[0] // groups, rows])
            part = self.node("MatMul", matrix, self.node("Reshape", columns, [0, groups, rows, -1]))
            total = self.node("Add", total, part) if total else part
        sizes = self.node("Slice", self.node("Shape", columns), [1 - last], [_END])
        sizes = self.node("Concat", [0, shape[0]], sizes, axis=0)
        has_bias = len(inputs) > 2 and bool(inputs[2])
        result = self.node("Reshape", total, sizes, out="" if has_bias else node.output[0])
        if has_bias:
            bias = self.node("Reshape", inputs[2], [shape[0], *(1 for _ in shape[2:])])
            self.node("Add", result, bias, out=node.output[0])
        return True

    def _average(self, node: onnx.NodeProto, inputs: list[str], attributes: dict[str, Any]) -> bool:
        """Add an average pooling as a sum of slices; return False if windows have different divisors."""
        counts_pads = attributes.get("count_include_pad") or not any(attributes.get("pads", ()))
        if attributes.get("ceil_mode") or not counts_pads or not _has_pads(attributes):
            return False
        kernel = attributes["kernel_shape"]
        name = self._padded(inputs[0], len(kernel), attributes)
        taps = [tap for _, tap in self._taps(name, kernel, attributes)]
        self.node("Div", self.node("Sum", *taps), np.array(float(len(taps))), out=node.output[0])
        return True

    def _recurrent(self, node: onnx.NodeProto, inputs: list[str], attributes: dict[str, Any]) -> bool:
        """Add a GRU, LSTM or RNN as a Scan for each direction; return False for rare options."""
        gates, size = _GATES[node.op_type], attributes.get("hidden_size")
        direction = attributes.get("direction", b"forward")
        data, weights, recurrent, bias, lengths, state, cell, peephole = (*inputs, *[""] * 8)[:8]
        rare = {"activations", "input_forget", "layout"}
        if size is None or lengths or peephole or attributes.keys() & rare:
            return False
        count, rows, bound = 1 + (direction == b"bidirectional"), gates * size, attributes.get("clip", 0.0)
        if not bias:
            bias = self.constant(np.zeros((count, 2 * rows)))
        initials = [state, cell][: 1 + (gates == _GATES["LSTM"])]
        if not all(initials):
            batch = self.node("Slice", self.node("Shape", data), [1], [2])
            sizes = self.node("Concat", [count], batch, [size], axis=0)
            zeros = self.node("Expand", np.zeros(1), sizes)
            initials = [initial or zeros for initial in initials]
        results: list[list[str]] = [[] for _ in range(1 + len(initials))]  # the sequence, and the last states
        for number in range(count):
            own = [self.node("Gather", name, np.array(number)) for name in (weights, recurrent, bias)]
            matrix, own_recurrent = (self.node("Transpose", name, perm=[1, 0]) for name in own[:2])
            products = self.node("Add", self.node("MatMul", data, matrix), self._part(own[2], 0, rows))
            first = [self.node("Gather", initial, np.array(number)) for initial in initials]
            outer, self.nodes = self.nodes, []
            is_linear = bool(attributes.get("linear_before_reset"))
            recurrent_bias = self._part(own[2], rows, 2 * rows)
            states = self._step(gates, size, own_recurrent, recurrent_bias, bound, is_linear=is_linear)
            copy = self.node("Identity", states[0])
            starts = [onnx.ValueInfoProto(name=name) for name in (*(_STATE, _CELL)[: len(first)], _PRODUCTS)]
            # ONNX Runtime wants these shapes, and cannot infer them from operands of unknown rank.
            ends = [helper.make_tensor_value_info(name, TensorProto.DOUBLE, [None, size]) for name in (*states, copy)]
            body, self.nodes = helper.make_graph(self.nodes, "step", starts, ends), outer
            is_reversed = [int(direction == b"reverse" or number == 1)]
            *last, sequence = [f"{name}.{number}" for name in (*states, copy)]
            directions: dict[str, Any] = dict.fromkeys(("scan_input_directions", "scan_output_directions"), is_reversed)
            scan = helper.make_node(
                "Scan", [*first, products], [*last, sequence], body=body, num_scan_inputs=1, **directions
            )
            self.nodes.append(scan)
            results[0].append(self.node("Reshape", sequence, [0, 1, -1, size]))
            for parts, name in zip(results[1:], last, strict=True):
                parts.append(self.node("Reshape", name, [1, -1, size]))
        for parts, axis, out in zip(results, (1, 0, 0), node.output, strict=False):
            if out:
                self.node("Concat", *parts, axis=axis, out=out)
        return True

    def _step(self, gates: int, size: int, recurrent: str, bias: str, bound: float, *, is_linear: bool) -> list[str]:
        """Add one step of a GRU, LSTM or RNN; return the new states. A `bound` other than 0 clips the sums."""

        def clipped_sum(a: str, b: str) -> str:
            total = self.node("Add", a, b)
            return self.node("Clip", total, np.array(-bound), np.array(bound)) if bound else total

        product = self.node("Add", self.node("MatMul", _STATE, recurrent), bias)
        if gates == _GATES["RNN"]:
            return [self.node("Tanh", clipped_sum(_PRODUCTS, product))]
        if gates == _GATES["LSTM"]:
            sums = clipped_sum(_PRODUCTS, product)
            input, output, forget = (self._sigmoid(self._part(sums, k * size, (k + 1) * size)) for k in range(3))
            new = self.node("Mul", input, self.node("Tanh", self._part(sums, 3 * size, 4 * size)))
            cell = self.node("Add", self.node("Mul", forget, _CELL), new)
            return [self.node("Mul", output, self.node("Tanh", cell)), cell]
        gate_sums = clipped_sum(*(self._part(name, 0, 2 * size) for name in (_PRODUCTS, product)))
        both = self._sigmoid(gate_sums)
        update, reset = self._part(both, 0, size), self._part(both, size, 2 * size)
        if is_linear:
            inner = self.node("Mul", reset, self._part(product, 2 * size, 3 * size))
        else:
            kept = self.node("MatMul", self.node("Mul", reset, _STATE), self._part(recurrent, 2 * size, 3 * size))
            inner = self.node("Add", kept, self._part(bias, 2 * size, 3 * size))
        new = self.node("Tanh", clipped_sum(self._part(_PRODUCTS, 2 * size, 3 * size), inner))
        return [self.node("Add", new, self.node("Mul", update, self.node("Sub", _STATE, new)))]

    def _part(self, name: str, start: int, end: int) -> str:
        """Add a slice of the last axis."""
        return self.node("Slice", name, [start], [end], [-1])

    def _sigmoid(self, name: str, out: str = "") -> str:
        """Add a sigmoid; ONNX Runtime's own cancels digits near 1, and is 0 for -37."""
        shifted = self.node("Add", self.node("Exp", self.node("Neg", name)), np.array(1.0))
        return self.node("Reciprocal", shifted, out=out)

    def _mean(self, node: onnx.NodeProto, inputs: list[str], attributes: dict[str, Any]) -> bool:
        """Add the mean over all axes except the first two; return False if the rank is unknown."""
        axes = list(range(2, self._ranks.get(node.input[0], 0)))
        if axes and self._opset < 18:
            self.node("ReduceMean", inputs[0], out=node.output[0], axes=axes)
        elif axes:
            self.node("ReduceMean", inputs[0], axes, out=node.output[0])
        return bool(axes)

    def _local_response(self, node: onnx.NodeProto, inputs: list[str], attributes: dict[str, Any]) -> bool:
        """Add a local response normalization as a sum of slices; return False if the rank is unknown."""
        size, rank = attributes["size"], self._ranks.get(node.input[0], 0)
        if not rank:
            return False
        rest = [0] * (rank - 2)
        alpha, beta, bias = (attributes.get(*pair) for pair in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0)))
        pads = [0, size // 2, *rest, 0, size // 2, *rest]
        squares = self.node("Pad", self.node("Mul", inputs[0], inputs[0]), pads)
        ends = [index + 1 - size or _END for index in range(size)]
        total = self.node("Sum", *(self.node("Slice", squares, [index], [end], [1]) for index, end in enumerate(ends)))
        base = self.node("Add", self.node("Mul", total, np.array(alpha / size)), np.array(bias))
        self.node("Div", inputs[0], self.node("Pow", base, np.array(beta)), out=node.output[0])
        return True

    def _padded(self, name: str, rank: int, attributes: dict[str, Any]) -> str:
        """Add zero padding of the last `rank` axes."""
        pads = list(attributes.get("pads", ()))
        return self.node("Pad", name, [0, 0, *pads[:rank], 0, 0, *pads[rank:]]) if any(pads) else name

    def _columns(
        self, name: str, kernel: Sequence[int], width: int, attributes: dict[str, Any]
    ) -> Iterator[tuple[list[int], list[int], str]]:
        """Add im2col for each `width` kernel columns; yield their start, their end, and their inputs."""
        if width == 1:
            for offset, tap in self._taps(name, kernel, attributes):
                yield [*offset], [index + 1 for index in offset], tap
            return
        rank, last = len(kernel), len(kernel) + 1
        stride, dilation = (attributes.get(key, [1] * rank)[-1] for key in ("strides", "dilations"))
        size = self.node("Reshape", self.node("Slice", self.node("Shape", name), [last], [last + 1]), [])
        end = self.node("Sub", size, np.array((kernel[-1] - 1) * dilation))
        positions = self.node("Range", np.array(0), end, np.array(stride))
        for offset, rows in self._taps(name, kernel[:-1], attributes):
            for start in range(0, kernel[-1], width):
                columns = np.arange(start, min(start + width, kernel[-1]))
                indices = self.node("Add", columns[:, None] * dilation, positions)
                gathered = self.node("Gather", rows, indices, axis=last)
                permuted = self.node("Transpose", gathered, perm=[0, 1, last, *range(2, last), last + 1])
                yield [*offset, start], [*(index + 1 for index in offset), start + len(columns)], permuted

    def _taps(
        self, name: str, kernel: Sequence[int], attributes: dict[str, Any]
    ) -> Iterator[tuple[tuple[int, ...], str]]:
        """Add a Slice for each kernel element, with its inputs at all positions; yield both."""
        rank, keys = len(kernel), ("strides", "dilations")
        steps, dilations = (np.array(attributes.get(key, [1] * rank)[:rank], np.int64) for key in keys)
        for offset in product(*map(range, kernel)):
            starts = np.array(offset, np.int64) * dilations
            lasts = starts + (1 - np.array(kernel, np.int64)) * dilations
            ends = np.where(lasts == 0, _END, lasts)
            yield offset, self.node("Slice", name, starts, ends, [*range(2, 2 + rank)], steps) if kernel else name


def _has_pads(attributes: dict[str, Any]) -> bool:
    """Return True if a node's padding does not depend on the input's size."""
    return attributes.get("auto_pad", b"NOTSET") in (b"NOTSET", b"VALID")


def upgraded(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model in an opset that rewritten models can use; RunError if ONNX cannot convert it."""
    proto = expanded(proto)
    opset = _opset(proto)
    if opset >= _WANTED_OPSET:
        return proto
    try:
        proto = onnx.version_converter.convert_version(proto, _WANTED_OPSET)
    except (onnx.version_converter.ConvertError, RuntimeError) as error:
        if opset >= _OLDEST_OPSET:
            return proto
        raise RunError(f"opset {opset} cannot be converted to {_WANTED_OPSET}: {error}") from error
    for node in proto.graph.node:
        if node.op_type == "Resize" and opset < 11:  # ONNX's conversion changes its coordinates
            modes = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
            others = [attribute for attribute in node.attribute if attribute.name not in modes]
            del node.attribute[:]
            node.attribute.extend((*others, *(helper.make_attribute(name, mode) for name, mode in modes.items())))
    return proto


def _opset(proto: onnx.ModelProto) -> int:
    return next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), 1)


def inferred_values(proto: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Return the types and shapes that ONNX infers for the values of a model's graph."""
    inferred = onnx.ModelProto()
    inferred.CopyFrom(proto)
    for tensor in inferred.graph.initializer:  # to avoid another copy of the weights
        if len(tensor.raw_data) > 1024:
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value="none")
    graph = onnx.shape_inference.infer_shapes(inferred).graph
    return [*graph.input, *graph.output, *graph.value_info]


def element_types(proto: onnx.ModelProto, inferred: Sequence[onnx.ValueInfoProto]) -> dict[str, int]:
    """Return the element types of initializers, and of other values if ONNX can infer them."""
    types = {value.name: value.type.tensor_type.elem_type for value in inferred}
    return types | {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
