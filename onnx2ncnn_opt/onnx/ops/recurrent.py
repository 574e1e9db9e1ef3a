"""LSTM, GRU and RNN: each direction's weights in ncnn's order, every item of the batch on its own.

ncnn's layers take a Mat of (steps, inputs) and give (steps, directions * hidden size), aligned in time also where they
run backwards; the last states are (directions, hidden size).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnx2ncnn_opt.ir.dim import Dim
from onnx2ncnn_opt.ir.graph import Blob
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.importer import ImportContext
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Formula, Operand, Tensor

_DIRECTIONS = {"forward": 0, "reverse": 1, "bidirectional": 2}


@dataclass(frozen=True)
class _Kind:
    """An operator: its gates in ncnn's order, by their place in ONNX's, and its default activations."""

    layer: str
    gates: tuple[int, ...]
    activations: tuple[str, ...]


_LSTM = _Kind("LSTM", (0, 2, 1, 3), ("sigmoid", "tanh", "tanh"))  # i o f c -> i f o c
_GRU = _Kind("GRU", (1, 0, 2), ("sigmoid", "tanh"))  # z r h -> r z h
_RNN = _Kind("RNN", (0,), ("tanh",))


@onnx_op("LSTM", since=7)
def lstm(
    im: ImportContext,
    x: Tensor,
    w: Array,
    r: Array,
    b: Array | None = None,
    sequence_lens: Array | None = None,
    initial_h: Operand | None = None,
    initial_c: Operand | None = None,
    p: Array | None = None,
    *,
    activation_alpha: tuple[float, ...] = (),
    activation_beta: tuple[float, ...] = (),
    activations: tuple[str, ...] = (),
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
    layout: int = 0,
) -> tuple[Tensor, ...]:
    """LSTM."""
    if input_forget:
        raise im.refuse("input_forget is 1: coupled gates")
    if p is not None and p.any():
        raise im.refuse("it has peepholes (input P)")
    _check(im, _LSTM, x, sequence_lens, activations, clip, layout)
    return _recurrent(im, _LSTM, x, w, r, b, [initial_h, initial_c], direction, layout)


@onnx_op("GRU", since=7)
def gru(
    im: ImportContext,
    x: Tensor,
    w: Array,
    r: Array,
    b: Array | None = None,
    sequence_lens: Array | None = None,
    initial_h: Operand | None = None,
    *,
    activation_alpha: tuple[float, ...] = (),
    activation_beta: tuple[float, ...] = (),
    activations: tuple[str, ...] = (),
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    linear_before_reset: int = 0,
) -> tuple[Tensor, ...]:
    """GRU, with linear_before_reset."""
    if not linear_before_reset:
        raise im.refuse(
            "linear_before_reset is 0: ncnn applies the reset gate behind the product with R",
            "PyTorch's GRU exports with 1; in Keras set reset_after=True",
        )
    _check(im, _GRU, x, sequence_lens, activations, clip, layout)
    return _recurrent(im, _GRU, x, w, r, b, [initial_h], direction, layout)


@onnx_op("RNN", since=7)
def rnn(
    im: ImportContext,
    x: Tensor,
    w: Array,
    r: Array,
    b: Array | None = None,
    sequence_lens: Array | None = None,
    initial_h: Operand | None = None,
    *,
    activation_alpha: tuple[float, ...] = (),
    activation_beta: tuple[float, ...] = (),
    activations: tuple[str, ...] = ("Tanh", "Tanh"),
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
) -> tuple[Tensor, ...]:
    """RNN with tanh."""
    _check(im, _RNN, x, sequence_lens, activations, clip, layout)
    return _recurrent(im, _RNN, x, w, r, b, [initial_h], direction, layout)


def _check(
    im: ImportContext,
    kind: _Kind,
    x: Tensor,
    sequence_lens: Array | None,
    activations: Sequence[str],
    clip: float | None,
    layout: int,
) -> None:
    if x.rank != 3:
        raise im.refuse(f"the operand has rank {x.rank}, not 3")
    names = tuple(name.lower() for name in activations)
    if names and names != kind.activations * (len(names) // len(kind.activations)):
        raise im.refuse(f"activations {', '.join(activations)}: ncnn has {', '.join(kind.activations)} only")
    if clip is not None:
        raise im.refuse(f"its gates are clipped to {clip:g}")
    steps = x.shape[1 if layout else 0]
    if sequence_lens is not None and not (sequence_lens == steps).all():
        raise im.refuse(f"the sequence_lens are not all the {steps} steps of the operand")


def _recurrent(
    im: ImportContext,
    kind: _Kind,
    x: Tensor,
    w: Array,
    r: Array,
    b: Array | None,
    states: list[Operand | None],
    direction: str,
    layout: int,
) -> tuple[Tensor, ...]:
    if direction not in _DIRECTIONS:
        raise im.refuse(f"direction {direction} is not known")
    count, gates, hidden = 2 if direction == "bidirectional" else 1, len(kind.gates), r.shape[-1]
    expected = ((count, gates * hidden, w.shape[-1]), (count, gates * hidden, hidden), (count, 2 * gates * hidden))
    for name, array, shape in zip("WRB", (w, r, b), expected, strict=True):
        if array is not None and array.shape != shape:
            raise im.refuse(f"input {name} has shape {list(array.shape)}, not {list(shape)}")
    time, batch = (1, 0) if layout else (0, 1)
    # The axes of Y are steps, directions, batch, hidden; with layout 1 batch, steps, directions, hidden.
    blobs = im.layers(
        kind.layer,
        im.mat(x, [[time], [2]], [batch]),
        *_states(im, states, (count, hidden), x.shape[batch], layout),
        weights=_weights(im, kind, w, r, b),
        outputs=1 + len(states) if any(im.is_used(1 + i) for i in range(len(states))) else 1,
        num_output=hidden,
        weight_data_size=w.size,
        direction=_DIRECTIONS[direction],
    )
    steps, items = x.shape[time], x.shape[batch]
    if layout:
        y = im.wrap(blobs[0], (items, steps, count, hidden), [[1], [2, 3]], [0], x.dtype)
        return y, *(im.wrap(blob, (items, count, hidden), [[1], [2]], [0], x.dtype) for blob in blobs[1:])
    y = im.wrap(blobs[0], (steps, count, items, hidden), [[0], [1, 3]], [2], x.dtype)
    return y, *(im.wrap(blob, (count, items, hidden), [[0], [2]], [1], x.dtype) for blob in blobs[1:])


def _weights(im: ImportContext, kind: _Kind, w: Array, r: Array, b: Array | None) -> dict[str, Array]:
    """Rows of all matrices by gates in ncnn's order; the two biases added where they are alike."""
    count, gates, hidden = len(w), len(kind.gates), r.shape[-1]
    order = list(kind.gates)
    matrices = {
        name: im.f32(array).reshape(count, gates, hidden, -1)[:, order]
        for name, array in (("weight_xc_data", w), ("weight_hc_data", r))
    }
    biases = np.zeros((count, 2, gates, hidden), np.float32)
    if b is not None:
        biases = im.f32(b).reshape(count, 2, gates, hidden)[:, :, order]
    bias = biases.sum(axis=1)
    if kind is _GRU:
        # The reset gate works between the hidden gate's two biases.
        bias = np.concatenate([bias[:, :2], biases[:, :, 2]], axis=1)
    return {**matrices, "bias_c_data": bias}


def _states(
    im: ImportContext, states: Sequence[Operand | None], shape: tuple[int, int], items: Dim, layout: int
) -> list[Blob]:
    """The initial states as Mats (directions, hidden size); none where all of them are 0."""
    count, hidden = shape
    expected = (items, count, hidden) if layout else (count, items, hidden)
    for state in states:
        if state is not None and state.shape != expected:
            raise im.refuse(f"an initial state has shape {list(state.shape)}, not {list(expected)}")
    known = [None if _is_zero(state) else state for state in states]
    if all(state is None for state in known):
        return []
    blobs = []
    for state in known:
        if state is None:
            blobs.append(im.memory(np.zeros(shape, np.float32)))
            continue
        dims, batch = ([[1], [2]], [0]) if layout else ([[0], [2]], [1])
        blobs.append(im.mat(im.tensor(state), dims, batch))
    return blobs


def _is_zero(state: Operand | None) -> bool:
    if isinstance(state, Formula):
        return state.cells.dtype != object and not state.cells.any()
    return isinstance(state, Constant) and not state.array.any()
