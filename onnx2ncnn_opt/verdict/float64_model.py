"""A model in float64, whose rounding errors are negligible."""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx_ir

from onnx2ncnn_opt.errors import RunError
from onnx2ncnn_opt.ir.half import ABSORBING
from onnx2ncnn_opt.onnx.edit.editor import FLOATS, Editor, Operand, forget_types, is_float
from onnx2ncnn_opt.onnx.edit.model import read_model, to_bytes

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
_STATES = ("onnx2ncnn_opt.state", "onnx2ncnn_opt.cell")  # inputs of a step
_PRODUCTS = "onnx2ncnn_opt.products"  # inputs times weights
_END = np.iinfo(np.int64).max
_MAX_PRODUCTS = 32  # of a convolution: fewer products need more memory, and ONNX Runtime is slow with many nodes
_Values: TypeAlias = Sequence[onnx_ir.Value | None]


class InDouble(Editor):
    """The model in float64 as `data`, cut at `outputs` if given, and the number of its `weights`.

    Inputs keep their types; float outputs become float64, and those that are inputs are left out. Convolutions, average
    pooling and LRN, which ONNX Runtime does not have in float64, become products and sums of slices. Other operators
    without float64 run in float32. Raises RunError with the reason for a model that cannot be rewritten.
    """

    def __init__(self, model: Path | bytes, outputs: Sequence[str] = ()) -> None:
        rewritten = read_model(model, outputs, typed=True, upgraded=True)
        graph = rewritten.graph
        if next(iter(graph.subgraphs()), None) is not None:
            raise RunError("a model with branches or loops is not rewritten")
        super().__init__(graph)
        self._opset = rewritten.opset_imports.get("", 1)
        self.weights = sum(value.const_value.size for value in graph.initializers.values() if value.const_value)
        self._double: dict[onnx_ir.Value, onnx_ir.Value] = {}  # of inputs and weights
        graph.outputs[:] = [value for value in graph.outputs if value.producer() or not is_float(value)]
        for node in list(graph):
            self.place = node
            for old, new in zip(node.outputs, self._added(node), strict=False):
                assert new is not None
                new.type, new.shape = old.type, old.shape
                self.replace(old, new)
            graph.remove(node, safe=True)
        forget_types(graph)
        for value in graph.outputs:
            value.type = onnx_ir.TensorType(onnx_ir.DataType.DOUBLE) if is_float(value) else None
        self.data = to_bytes(rewritten)

    def _in_double(self, value: onnx_ir.Value | None) -> onnx_ir.Value | None:
        if value is None or value.producer() or not is_float(value):
            return value
        if value not in self._double:
            self._double[value] = self.node("Cast", value, to=onnx_ir.DataType.DOUBLE)
        return self._double[value]

    def _added(self, node: onnx_ir.Node) -> _Values:
        """Add a node of the model, in float64 if ONNX Runtime has the operator in float64; return its outputs."""
        inputs = [self._in_double(value) for value in node.inputs]
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        kind = "" if node.domain else node.op_type
        rewrites = {"AveragePool": self._average, "Conv": self._convolution, "GlobalAveragePool": self._mean}
        rewrites |= {"LRN": self._local_response, "Add": self._sum}
        rewrites |= dict.fromkeys(_GATES, self._recurrent)
        if kind in rewrites and (results := rewrites[kind](node, inputs, attributes)):
            return results
        if kind == "Sigmoid":
            return [self._sigmoid(inputs[0])]
        if not any(map(is_float, (*node.inputs, *node.outputs))):
            return self.copy(node)
        if kind in DOUBLE and self._opset >= _SINCE.get(kind, 0):
            if node.op_type == "GroupNormalization" and self._opset >= 21:
                attributes.setdefault("stash_type", onnx_ir.DataType.FLOAT)
            keys = [key for key in ("to", "dtype", "stash_type") if attributes.get(key) in FLOATS]
            node.attributes.update({key: onnx_ir.AttrInt64(key, onnx_ir.DataType.DOUBLE) for key in keys})
            return self.copy(node, inputs)
        single = [
            self.node("Cast", double, to=value.dtype) if value is not None and is_float(value) else value
            for value, double in zip(node.inputs, inputs, strict=True)
        ]
        outputs = self.copy(node, single)
        return [self.node("Cast", x, to=onnx_ir.DataType.DOUBLE) if x.name and is_float(x) else x for x in outputs]

    def _sum(self, node: onnx_ir.Node, inputs: _Values, attributes: dict[str, Any]) -> _Values:
        """Add a sum, in float32 if it is large: there masks absorb scores. Return nothing for integers."""
        if not is_float(node.inputs[0]):
            return ()
        total = self.node("Add", *inputs)
        single = self.node("Cast", self.node("Cast", total, to=onnx_ir.DataType.FLOAT), to=onnx_ir.DataType.DOUBLE)
        is_large = self.node("Greater", self.node("Abs", total), np.array(ABSORBING))
        return [self.node("Where", is_large, single, total)]

    def _convolution(self, node: onnx_ir.Node, inputs: _Values, attributes: dict[str, Any]) -> _Values:
        """Add a convolution as products of a few kernel columns each; return nothing for unknown padding."""
        weight = node.inputs[1]
        shape = weight.const_value.shape.numpy() if weight is not None and weight.const_value else ()
        if not shape or not _has_pads(attributes):
            return ()
        groups, last = attributes.get("group", 1), len(shape) - 1
        kernel = self.node("Reshape", inputs[1], [groups, shape[0] // groups, shape[1], *shape[2:]])
        x = self._padded(inputs[0], last - 1, attributes)
        width, total = -(-math.prod(shape[2:]) // _MAX_PRODUCTS), None
        for start, end, columns in self._columns(x, shape[2:], width, attributes):
            rows = shape[1] * math.prod(np.subtract(end, start))
            part = self.node("Slice", kernel, start, end, [*range(3, last + 2)])
            matrix = self.node("Reshape", part, [groups, shape[0] // groups, rows])
            part = self.node("MatMul", matrix, self.node("Reshape", columns, [0, groups, rows, -1]))
            total = part if total is None else self.node("Add", total, part)
        sizes = self.node("Slice", self.node("Shape", columns), [1 - last], [_END])
        sizes = self.node("Concat", [0, shape[0]], sizes, axis=0)
        result = self.node("Reshape", total, sizes)
        if len(inputs) > 2 and inputs[2] is not None:
            result = self.node("Add", result, self.node("Reshape", inputs[2], [shape[0], *(1 for _ in shape[2:])]))
        return [result]

    def _average(self, node: onnx_ir.Node, inputs: _Values, attributes: dict[str, Any]) -> _Values:
        """Add an average pooling as a sum of slices; return nothing if windows have different divisors."""
        counts_pads = attributes.get("count_include_pad") or not any(attributes.get("pads", ()))
        if attributes.get("ceil_mode") or not counts_pads or not _has_pads(attributes):
            return ()
        kernel = attributes["kernel_shape"]
        x = self._padded(inputs[0], len(kernel), attributes)
        taps = [tap for _, tap in self._taps(x, kernel, attributes)]
        return [self.node("Div", self.node("Sum", *taps), np.array(float(len(taps))))]

    def _recurrent(self, node: onnx_ir.Node, inputs: _Values, attributes: dict[str, Any]) -> _Values:
        """Add a GRU, LSTM or RNN as a Scan for each direction; return nothing for rare options."""
        gates, size = _GATES[node.op_type], attributes.get("hidden_size")
        direction = attributes.get("direction", "forward")
        data, weights, recurrent, bias, lengths, state, cell, peephole = (*inputs, *[None] * 8)[:8]
        rare = {"activations", "input_forget", "layout"}
        if size is None or lengths is not None or peephole is not None or attributes.keys() & rare:
            return ()
        count, rows = 1 + (direction == "bidirectional"), gates * size
        initials = [state, cell][: 1 + (gates == _GATES["LSTM"])]
        if None in initials:
            batch = self.node("Slice", self.node("Shape", data), [1], [2])
            sizes = self.node("Concat", [count], batch, [size], axis=0)
            zeros = self.node("Expand", np.zeros(1), sizes)
            initials = [zeros if initial is None else initial for initial in initials]
        results: list[list[onnx_ir.Value]] = [[] for _ in range(1 + len(initials))]  # the sequence, and the last states
        for number in range(count):
            both = np.zeros((count, 2 * rows)) if bias is None else bias
            own = [self.node("Gather", x, np.array(number)) for x in (weights, recurrent, both)]
            matrix, own_recurrent = (self.node("Transpose", name, perm=[1, 0]) for name in own[:2])
            products = self.node("Add", self.node("MatMul", data, matrix), self._part(own[2], 0, rows))
            first = [self.node("Gather", initial, np.array(number)) for initial in initials]
            recurrent_bias = self._part(own[2], rows, 2 * rows)
            starts = [onnx_ir.val(f"{name}.{number}") for name in (*_STATES[: len(first)], _PRODUCTS)]
            body = onnx_ir.Graph(starts, [], nodes=[], name="step")
            with self.within(body):
                states = self._step(gates, own_recurrent, recurrent_bias, starts, attributes)
                body.outputs.extend((*states, self.node("Identity", states[0])))
            for value in body.outputs:  # ONNX Runtime wants these shapes, and cannot infer them from unknown ranks
                value.type, value.shape = onnx_ir.TensorType(onnx_ir.DataType.DOUBLE), onnx_ir.Shape([None, size])
            is_reversed = [int(direction == "reverse" or number == 1)]
            options: dict[str, Any] = dict.fromkeys(("scan_input_directions", "scan_output_directions"), is_reversed)
            options |= {"body": body, "num_scan_inputs": 1}
            *last, sequence = self.nodes("Scan", [*first, products], options, len(body.outputs))
            results[0].append(self.node("Reshape", sequence, [0, 1, -1, size]))
            for parts, state in zip(results[1:], last, strict=True):
                parts.append(self.node("Reshape", state, [1, -1, size]))
        return [self.node("Concat", *parts, axis=axis) for parts, axis in zip(results, (1, 0, 0), strict=False)]

    def _step(
        self, gates: int, recurrent: Operand, bias: Operand, starts: Sequence[onnx_ir.Value], attributes: dict[str, Any]
    ) -> list[onnx_ir.Value]:
        """Add one step of a GRU, LSTM or RNN; return the new states."""
        before, *cells, products = starts
        size, bound = attributes["hidden_size"], attributes.get("clip", 0.0)

        def gate(x: Operand, first: int, count: int = 1) -> onnx_ir.Value:
            return self._part(x, first * size, (first + count) * size)

        def clipped_sum(a: Operand, b: Operand) -> onnx_ir.Value:
            total = self.node("Add", a, b)
            return self.node("Clip", total, np.array(-bound), np.array(bound)) if bound else total

        product = self.node("Add", self.node("MatMul", before, recurrent), bias)
        if gates == _GATES["RNN"]:
            return [self.node("Tanh", clipped_sum(products, product))]
        if gates == _GATES["LSTM"]:
            sums = clipped_sum(products, product)
            input, output, forget = (self._sigmoid(gate(sums, k)) for k in range(3))
            new = self.node("Mul", input, self.node("Tanh", gate(sums, 3)))
            cell = self.node("Add", self.node("Mul", forget, *cells), new)
            return [self.node("Mul", output, self.node("Tanh", cell)), cell]
        both = self._sigmoid(clipped_sum(gate(products, 0, 2), gate(product, 0, 2)))
        update, reset = gate(both, 0), gate(both, 1)
        if attributes.get("linear_before_reset"):
            inner = self.node("Mul", reset, gate(product, 2))
        else:
            kept = self.node("MatMul", self.node("Mul", reset, before), gate(recurrent, 2))
            inner = self.node("Add", kept, gate(bias, 2))
        new = self.node("Tanh", clipped_sum(gate(products, 2), inner))
        return [self.node("Add", new, self.node("Mul", update, self.node("Sub", before, new)))]

    def _part(self, x: Operand, start: int, end: int) -> onnx_ir.Value:
        """Add a slice of the last axis."""
        return self.node("Slice", x, [start], [end], [-1])

    def _sigmoid(self, x: onnx_ir.Value | None) -> onnx_ir.Value:
        """Add a sigmoid; ONNX Runtime's own cancels digits near 1, and is 0 for -37."""
        shifted = self.node("Add", self.node("Exp", self.node("Neg", x)), np.array(1.0))
        return self.node("Reciprocal", shifted)

    def _mean(self, node: onnx_ir.Node, inputs: _Values, attributes: dict[str, Any]) -> _Values:
        """Add the mean over all axes except the first two; return nothing if the rank is unknown."""
        axes = list(range(2, _rank(node)))
        if axes and self._opset < 18:
            return [self.node("ReduceMean", inputs[0], axes=axes)]
        return [self.node("ReduceMean", inputs[0], axes)] if axes else ()

    def _local_response(self, node: onnx_ir.Node, inputs: _Values, attributes: dict[str, Any]) -> _Values:
        """Add a local response normalization as a sum of slices; return nothing if the rank is unknown."""
        size, rank = attributes["size"], _rank(node)
        if not rank:
            return ()
        rest = [0] * (rank - 2)
        alpha, beta, bias = (attributes.get(*pair) for pair in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0)))
        pads = [0, size // 2, *rest, 0, size // 2, *rest]
        squares = self.node("Pad", self.node("Mul", inputs[0], inputs[0]), pads)
        ends = [index + 1 - size or _END for index in range(size)]
        total = self.node("Sum", *(self.node("Slice", squares, [index], [end], [1]) for index, end in enumerate(ends)))
        base = self.node("Add", self.node("Mul", total, np.array(alpha / size)), np.array(bias))
        return [self.node("Div", inputs[0], self.node("Pow", base, np.array(beta)))]

    def _padded(self, x: Operand, rank: int, attributes: dict[str, Any]) -> Operand:
        """Add zero padding of the last `rank` axes."""
        pads = list(attributes.get("pads", ()))
        return self.node("Pad", x, [0, 0, *pads[:rank], 0, 0, *pads[rank:]]) if any(pads) else x

    def _columns(
        self, x: Operand, kernel: Sequence[int], width: int, attributes: dict[str, Any]
    ) -> Iterator[tuple[list[int], list[int], Operand]]:
        """Add im2col for each `width` kernel columns; yield their start, their end, and their inputs."""
        if width == 1:
            for offset, tap in self._taps(x, kernel, attributes):
                yield [*offset], [index + 1 for index in offset], tap
            return
        rank, last = len(kernel), len(kernel) + 1
        stride, dilation = (attributes.get(key, [1] * rank)[-1] for key in ("strides", "dilations"))
        size = self.node("Reshape", self.node("Slice", self.node("Shape", x), [last], [last + 1]), [])
        end = self.node("Sub", size, np.array((kernel[-1] - 1) * dilation))
        positions = self.node("Range", np.array(0), end, np.array(stride))
        for offset, rows in self._taps(x, kernel[:-1], attributes):
            for start in range(0, kernel[-1], width):
                columns = np.arange(start, min(start + width, kernel[-1]))
                indices = self.node("Add", columns[:, None] * dilation, positions)
                gathered = self.node("Gather", rows, indices, axis=last)
                permuted = self.node("Transpose", gathered, perm=[0, 1, last, *range(2, last), last + 1])
                yield [*offset, start], [*(index + 1 for index in offset), start + len(columns)], permuted

    def _taps(
        self, x: Operand, kernel: Sequence[int], attributes: dict[str, Any]
    ) -> Iterator[tuple[tuple[int, ...], Operand]]:
        """Add a Slice for each kernel element, with its inputs at all positions; yield both."""
        rank, keys = len(kernel), ("strides", "dilations")
        steps, dilations = (np.array(attributes.get(key, [1] * rank)[:rank], np.int64) for key in keys)
        for offset in product(*map(range, kernel)):
            starts = np.array(offset, np.int64) * dilations
            lasts = starts + (1 - np.array(kernel, np.int64)) * dilations
            ends = np.where(lasts == 0, _END, lasts)
            yield offset, self.node("Slice", x, starts, ends, [*range(2, 2 + rank)], steps) if kernel else x


def _has_pads(attributes: dict[str, Any]) -> bool:
    """Return True if a node's padding does not depend on the input's size."""
    return attributes.get("auto_pad", "NOTSET") in ("NOTSET", "VALID")


def _rank(node: onnx_ir.Node) -> int:
    """Return the rank of a node's first input, 0 if it is unknown."""
    shape = None if node.inputs[0] is None else node.inputs[0].shape
    return 0 if shape is None else len(shape)
