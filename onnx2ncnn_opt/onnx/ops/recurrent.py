"""LSTM, GRU and RNN: each direction's weights in ncnn's order, each item of the batch on its own.

ncnn's layers read a Mat of (steps, inputs), and output (steps, directions * hidden size), aligned in time for both
directions; the last states are (directions, hidden size).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, Direction
from onnx2ncnn_opt.ir.dim import Shape, known, shape_text
from onnx2ncnn_opt.ir.graph import Blob
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.edit.quantized import dequantised
from onnx2ncnn_opt.onnx.fold.cells import as_symbolic
from onnx2ncnn_opt.onnx.items import NodeView, require
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import binary, number
from onnx2ncnn_opt.onnx.lower.functional.cast import as_float
from onnx2ncnn_opt.onnx.lower.functional.concat import concat
from onnx2ncnn_opt.onnx.lower.functional.crop import crop
from onnx2ncnn_opt.onnx.lower.functional.logic import equals, one_minus, threshold
from onnx2ncnn_opt.onnx.lower.functional.reduce import reduce
from onnx2ncnn_opt.onnx.lower.functional.rnn import Attributes, Unrolled, is_zero
from onnx2ncnn_opt.onnx.lower.functional.symbolic_tensor import arange
from onnx2ncnn_opt.onnx.registry import MICROSOFT, onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Operand, SymbolicTensor, Tensor, Value

_DIRECTIONS = {direction.name.lower(): direction for direction in Direction}


class _Kind(NamedTuple):
    """An operator: ncnn's layer, ONNX's index of each of its gates, and the default activations."""

    layer: str
    gates: tuple[int, ...]
    activations: tuple[str, ...]


class _Inputs(NamedTuple):
    """The inputs that the three operators share."""

    x: Tensor
    w: Value
    r: Value
    b: Value | None = None
    sequence_lens: Operand | None = None
    initial_h: Operand | None = None


# Beyond the length of a sequence, this number is a further input, with a weight for each gate in ncnn's order. It keeps
# the cell of an LSTM (it closes the input gate and opens the forget gate), and the state of a GRU (the update gate).
_CLOSES = 1e4
_HOLDS = {"LSTM": (-1, 1, 0, 0), "GRU": (0, 1, 0)}
_LSTM = _Kind("LSTM", (0, 2, 1, 3), ("sigmoid", "tanh", "tanh"))  # i o f c -> i f o c
_GRU = _Kind("GRU", (1, 0, 2), ("sigmoid", "tanh"))  # z r h -> r z h
_RNN = _Kind("RNN", (0,), ("tanh",))


def _states(node: NodeView) -> tuple[int, ...]:
    """Apply the rule of recurrent operators: the operand, the initial states and the results have a batch axis."""
    outer, outputs = (0, (0, 0, 0)) if node.number("layout", 0) else (1, (2, 1, 1))
    initial = [i for i in (5, 6) if i < len(node.operands)]
    node.only(0, *initial)
    require({node.axis(i) for i in (0, *initial)} <= {outer, None} and node.axis(0) is not None)
    node.is_batch = True
    return outputs


@onnx_op("LSTM", since=7, integers=True, items=_states, errors="gates")
def lstm(
    im: ImportContext,
    inputs: _Inputs,
    initial_c: Operand | None = None,
    p: Value | None = None,
    *,
    activations: tuple[str, ...] = (),
    attrs: Attributes,
    input_forget: int = 0,
) -> tuple[Value, ...]:
    """LSTM; unrolled steps for peepholes, other activations, and other forms that ncnn lacks."""
    if input_forget:
        raise im.refuse("input_forget is 1: ncnn's LSTM has no coupled gates", "export it with input_forget = 0")
    if initial_c is not None and initial_c.shape[-1:] != inputs.r.shape[-1:]:
        reason = "its state and its cell differ in size: ONNX's LSTM has no projection, and torch wrote a part of it"
        raise im.refuse(reason, "convert the .pt2 file of torch.export.save")
    node = _Node(im, _LSTM, inputs, activations, attrs)
    if p is not None and p.shape != (node.count, 3 * inputs.r.shape[-1]):
        raise im.invalid(f"input P has shape {list(p.shape)}, not {[node.count, 3 * inputs.r.shape[-1]]}")
    states = [inputs.initial_h, initial_c]
    plain = is_zero(p)
    if plain and node.fits:
        return node.layer(states)
    return node.arranged(node.unrolled.lstm(node.steps_first, node.directions_first(states), None if plain else p))


@onnx_op("DynamicQuantizeLSTM", domain=MICROSOFT, integers=True, quantises=True)
def dynamic_quantize_lstm(
    im: ImportContext,
    x: Tensor,
    w: Array,
    r: Array,
    b: Value | None,
    sequence_lens: Operand | None,
    initial_h: Operand | None,
    initial_c: Operand | None,
    p: Value | None,
    w_scale: Array,
    w_zero_point: Array,
    r_scale: Array,
    r_zero_point: Array,
    *,
    activations: tuple[str, ...] = (),
    attrs: Attributes,
    input_forget: int = 0,
) -> tuple[Value, ...]:
    """LSTM of dequantised weights; operand and states are not rounded, but ONNX Runtime rounds them."""
    weights = Constant(dequantised(w, w_scale, w_zero_point)), Constant(dequantised(r, r_scale, r_zero_point)), b
    attributes: Any = {"activations": activations, "attrs": attrs, "input_forget": input_forget}
    return lstm(im, _Inputs(x, *weights, sequence_lens, initial_h), initial_c, p, **attributes)


@onnx_op("GRU", since=7, integers=True, items=_states, errors="gates")
def gru(
    im: ImportContext,
    inputs: _Inputs,
    *,
    activations: tuple[str, ...] = (),
    attrs: Attributes,
    linear_before_reset: int = 0,
) -> tuple[Value, ...]:
    """GRU; unrolled steps without linear_before_reset, and for other activations."""
    node, states = _Node(im, _GRU, inputs, activations, attrs), [inputs.initial_h]
    if linear_before_reset and node.fits:
        return node.layer(states)
    return node.arranged(node.unrolled.gru(node.steps_first, node.directions_first(states), linear_before_reset))


@onnx_op("RNN", since=7, integers=True, items=_states, errors="gates")
def rnn(
    im: ImportContext, inputs: _Inputs, *, activations: tuple[str, ...] = ("Tanh", "Tanh"), attrs: Attributes
) -> tuple[Value, ...]:
    """RNN with tanh; unrolled steps for other activations."""
    node, states = _Node(im, _RNN, inputs, activations, attrs), [inputs.initial_h]
    if node.fits:
        return node.layer(states)
    return node.arranged(node.unrolled.rnn(node.steps_first, node.directions_first(states)))


@dataclass(frozen=True, eq=False)
class _Node:
    """A node of one of the three operators, and both methods to compute it."""

    im: ImportContext
    kind: _Kind
    inputs: _Inputs
    activations: tuple[str, ...]
    attrs: Attributes

    def __post_init__(self) -> None:
        x, w, r, b, lengths, _ = self.inputs
        if x.rank != 3:
            raise self.im.invalid(f"the operand has rank {x.rank}, not 3")
        if self.attrs.direction not in _DIRECTIONS:
            raise self.im.invalid(f"direction {self.attrs.direction} is not known")
        items = self.steps_first.shape[1:2]
        if lengths is not None and lengths.shape != items:
            reason = f"sequence_lens has shape {list(lengths.shape)}, not {shape_text(items)}"
            raise self.im.invalid(reason, zip(lengths.shape, items, strict=False))
        if x.shape[2] != w.shape[-1]:
            reason = f"{w.shape[-1]} inputs for an operand of shape {shape_text(x.shape)}"
            raise self.im.invalid(reason, [(x.shape[2], w.shape[-1])])
        hidden, rows = r.shape[-1], r.shape[-1] * len(self.kind.gates)
        expected = ((self.count, rows, w.shape[-1]), (self.count, rows, hidden), (self.count, 2 * rows))
        for name, value, shape in zip("WRB", (w, r, b), expected, strict=True):
            if value is not None and value.shape != shape:
                raise self.im.invalid(f"input {name} has shape {list(value.shape)}, not {list(shape)}")

    @property
    def count(self) -> int:
        """The number of directions."""
        return 2 if self.attrs.direction == "bidirectional" else 1

    @property
    def fits(self) -> bool:
        """True if ncnn's layer supports all inputs and attributes of the node."""
        defaults = self.kind.activations * self.count
        return (
            all(value is None or isinstance(value, Constant) for value in self.inputs[1:4])
            and tuple(name.lower() for name in self.activations) in ((), defaults, self.kind.activations * 2)
            and self.attrs.clip is None
            and (self.lengths is None or (isinstance(self.lengths, Tensor) and self.kind is not _RNN))
        )

    @property
    def lengths(self) -> Value | None:
        """The lengths of the sequences; None if all are as long as the axis."""
        lengths, steps = self.inputs.sequence_lens, self.steps_first.shape[0]
        if lengths is None or isinstance(lengths, Tensor):
            return lengths
        is_even = all(length == steps for length in as_symbolic(lengths).cells.flat)
        return None if is_even else lengths if isinstance(lengths, Constant) else self.im.tensor(lengths)

    def layer(self, states: list[Operand | None]) -> tuple[Value, ...]:
        """Return the outputs of ncnn's layer; beyond a computed length, a further input closes and opens gates."""
        im, x, hidden, lengths = self.im, self.steps_first, self.inputs.r.shape[-1], self.lengths
        steps, items, _ = x.shape
        weights, fed = self._weights(), x
        if lengths is not None:
            if self.kind is _LSTM and self.attrs.direction != "forward" and not all(map(is_zero, states)):
                raise im.refuse("computed lengths, and states before the last step", "export it without states")
            row = im.tensor(im.reshape(as_float(im, im.tensor(lengths)), (1, items, 1)))
            left = binary(im, BinaryOp.SUB, row, arange(im, steps, 0, 3))  # steps up to the length
            active = threshold(im, left, 0.0)
            closes = binary(im, BinaryOp.MUL, one_minus(im, active), number(_CLOSES))
            fed, w = im.tensor(concat(im, x, closes, axis=2)), weights["weight_xc_data"]
            holds = np.reshape(_HOLDS[self.kind.layer], (1, -1, 1, 1))
            weights["weight_xc_data"] = np.concatenate([w, np.broadcast_to(np.float32(holds), (*w.shape[:3], 1))], 3)
        y, *last = im.layers(
            self.kind.layer,
            im.mat(fed, [[0], [2]], [1]),
            *self._states(states),
            weights=weights,
            outputs=1 + len(states) if any(im.is_used(1 + i) for i in range(len(states))) else 1,
            num_output=hidden,
            weight_data_size=weights["weight_xc_data"].size,
            direction=_DIRECTIONS[self.attrs.direction],
        )
        all_steps: Value = im.wrap(y, (steps, self.count, items, hidden), [[0], [1, 3]], [2], x.dtype)
        ends: list[Value] = [im.wrap(blob, (self.count, items, hidden), [[0], [2]], [1], x.dtype) for blob in last]
        if lengths is not None:
            all_steps = binary(im, BinaryOp.MUL, all_steps, im.reshape(active, (steps, 1, items, 1)))
            if self.kind is _LSTM and ends and self.attrs.direction != "reverse":  # a cell holds, but not its output
                last_step = im.reshape(equals(im, left, number(1)), (steps, 1, items, 1))
                forward = crop(im, im.tensor(all_steps), 1, 0, 1)
                ended = reduce(im, binary(im, BinaryOp.MUL, forward, last_step), "ReduceSum", (0,), 0)
                ends[0] = concat(im, ended, crop(im, im.tensor(ends[0]), 0, 1, 2), axis=0) if self.count == 2 else ended
        return self.arranged([all_steps, *ends])

    def _weights(self) -> dict[str, Array]:
        """Return the matrices with gates in ncnn's order, and the sum of both biases, except for GRU's hidden gate."""
        w, r, *b = (self.im.f32(x.array) for x in self.inputs[1:4] if isinstance(x, Constant))
        shape, order = (self.count, len(self.kind.gates), r.shape[-1]), list(self.kind.gates)
        biases = np.zeros((shape[0], 2, *shape[1:]), np.float32)
        if b:
            biases = b[0].reshape(biases.shape)[:, :, order]
        bias = biases.sum(axis=1)
        if self.kind is _GRU:
            # The reset gate applies between the hidden gate's two biases.
            bias = np.concatenate([bias[:, :2], biases[:, :, 2]], axis=1)
        rows = (array.reshape(*shape, -1)[:, order] for array in (w, r))
        return dict(zip(("weight_xc_data", "weight_hc_data", "bias_c_data"), (*rows, bias), strict=True))

    def _states(self, states: Sequence[Operand | None]) -> list[Blob]:
        """Return the initial states as Mats (directions, hidden size); empty if all of them are 0."""
        im, kept = self.im, self.directions_first(states)
        if all(state is None for state in kept):
            return []
        zeros = np.zeros(known((self.count, self.inputs.r.shape[-1])), np.float32)
        return [im.memory(zeros) if state is None else im.mat(im.tensor(state), [[0], [2]], [1]) for state in kept]

    def directions_first(self, states: Sequence[Operand | None]) -> list[Value | None]:
        """Return the initial states in layout 0, None for zeros; raise Refusal if one has a wrong shape."""
        expected: Shape = (self.count, self.steps_first.shape[1], self.inputs.r.shape[-1])
        if self.attrs.layout:
            expected = (expected[1], expected[0], expected[2])
        for state in states:
            if state is not None and state.shape != expected:
                reason = f"an initial state has shape {shape_text(state.shape)}, not {shape_text(expected)}"
                raise self.im.invalid(reason, zip(state.shape, expected, strict=False))
        nonzero = (None if is_zero(state) else state for state in states)
        values = (self.im.tensor(state) if isinstance(state, SymbolicTensor) else state for state in nonzero)
        return [None if state is None else self._transposed(state, (1, 0, 2)) for state in values]

    @property
    def unrolled(self) -> Unrolled:
        """The node with unrolled steps."""
        names = self.activations or self.kind.activations * self.count
        if len(names) < len(self.kind.activations) * self.count:
            raise self.im.invalid(f"activations {', '.join(names)} for {self.count} directions")
        lengths = self.lengths
        if isinstance(lengths, Tensor):
            hint = self.im.value_hint(4, "export it without lengths")
            raise self.im.refuse("input sequence_lens must be constant", hint)
        return Unrolled(self.im, *self.inputs[1:4], lengths.array if lengths else None, names, self.attrs)

    @property
    def steps_first(self) -> Tensor:
        """The operand in layout 0."""
        return self.inputs.x.transpose((1, 0, 2)) if self.attrs.layout else self.inputs.x

    def arranged(self, results: Sequence[Value]) -> tuple[Value, ...]:
        """Return outputs in the node's layout."""
        y, *states = results
        return self._transposed(y, (2, 0, 1, 3)), *(self._transposed(state, (1, 0, 2)) for state in states)

    def _transposed(self, x: Value, order: tuple[int, ...]) -> Value:
        return x.transpose(order) if self.attrs.layout else x
