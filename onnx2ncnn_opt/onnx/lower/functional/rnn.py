"""LSTM, GRU and RNN with unrolled steps, up to a limit: for computed weights, peepholes and other forms ncnn lacks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.dim import known
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.activation import softplus, softsign
from onnx2ncnn_opt.onnx.lower.functional.binary import added, binary, number
from onnx2ncnn_opt.onnx.lower.functional.concat import concat
from onnx2ncnn_opt.onnx.lower.functional.crop import split
from onnx2ncnn_opt.onnx.lower.functional.gather import gather
from onnx2ncnn_opt.onnx.lower.functional.matmul import matmul
from onnx2ncnn_opt.onnx.lower.functional.views import transposed
from onnx2ncnn_opt.onnx.lower.memory_budget import MOST_STEPS
from onnx2ncnn_opt.onnx.value import Constant, Operand, SymbolicTensor, Tensor, Value

_Function = Callable[..., Value]
# Takes a direction, the input's products, and the states.
_Step = Callable[[int, list[Value], list[Value]], list[Value]]

# The function of a tensor and parameters, and the parameters' defaults.
_ACTIVATIONS: dict[str, tuple[_Function, tuple[float, ...]]] = {
    "relu": (lambda im, x: im.unary(x, "ReLU"), ()),
    "tanh": (lambda im, x: im.unary(x, "TanH"), ()),
    "sigmoid": (lambda im, x: im.unary(x, "Sigmoid"), ()),
    "softsign": (softsign, ()),
    "softplus": (softplus, ()),
    "leakyrelu": (lambda im, x, alpha: im.unary(x, "ReLU", slope=alpha), (0.01,)),
    "elu": (lambda im, x, alpha: im.unary(x, "ELU", alpha=alpha), (1.0,)),
    "hardsigmoid": (lambda im, x, alpha, beta: im.unary(x, "HardSigmoid", alpha=alpha, beta=beta), (0.2, 0.5)),
    "affine": (
        lambda im, x, alpha, beta: binary(im, BinaryOp.ADD, binary(im, BinaryOp.MUL, x, number(alpha)), number(beta)),
        (1.0, 0.0),
    ),
}


class Attributes(NamedTuple):
    """The attributes that LSTM, GRU and RNN share."""

    activation_alpha: tuple[float, ...] = ()
    activation_beta: tuple[float, ...] = ()
    clip: float | None = None
    direction: str = "forward"
    hidden_size: int | None = None
    layout: int = 0


@dataclass(frozen=True, eq=False)
class Unrolled:
    """The weights and attributes of a node with unrolled steps."""

    im: ImportContext
    w: Value  # [directions, gates * hidden, inputs]
    r: Value  # [directions, gates * hidden, hidden]
    b: Value | None  # [directions, 2 * gates * hidden]
    lengths: Array | None  # of the batch's items
    activations: Sequence[str]
    attrs: Attributes

    @property
    def hidden(self) -> int:
        """The size of a state."""
        return self.im.fixed(self.r.shape[-1:], "a state of dynamic size")[0]

    def lstm(self, x: Tensor, states: Sequence[Value | None], p: Value | None) -> tuple[Value, ...]:
        """Return the outputs of an LSTM, with peepholes `p` [directions, 3 * hidden]."""
        im = self.im

        def step(direction: int, products: list[Value], before: list[Value]) -> list[Value]:
            h, c = before
            f, g, out = self._functions[3 * direction : 3 * direction + 3]
            recurrent = self._products(h, direction)
            peep = [None] * 3 if p is None else self._parts(_part(im, p, direction))
            sums = [_total(im, *pair) for pair in zip(products, recurrent, strict=True)]
            i = self._gate(f, sums[0], _times(im, peep[0], c))
            forget = self._gate(f, sums[2], _times(im, peep[2], c))
            new = _total(im, _times(im, forget, c), binary(im, BinaryOp.MUL, i, self._gate(g, sums[3])))
            o = self._gate(f, sums[1], _times(im, peep[1], new))
            return [binary(im, BinaryOp.MUL, o, out(im.tensor(new))), new]

        return self._run(x, states, self._bias(), step)

    def gru(self, x: Tensor, states: Sequence[Value | None], linear_before_reset: int) -> tuple[Value, ...]:
        """Return the outputs of a GRU."""
        im = self.im

        def step(direction: int, products: list[Value], before: list[Value]) -> list[Value]:
            (h,) = before
            f, g = self._functions[2 * direction : 2 * direction + 2]
            r = self._parts(_part(im, self.r, direction), 0)
            z = self._gate(f, products[0], _product(im, h, r[0]))
            reset = self._gate(f, products[1], _product(im, h, r[1]))
            if linear_before_reset:
                inner = self._parts(_part(im, self.b, direction))[5] if self.b is not None else None
                recurrent = _times(im, reset, added(im, _product(im, h, r[2]), inner))
            else:
                recurrent = _product(im, _times(im, reset, h), r[2])
            new = self._gate(g, products[2], recurrent)
            kept = binary(im, BinaryOp.RSUB, z, number(1))
            return [_total(im, binary(im, BinaryOp.MUL, kept, new), _times(im, z, h))]

        return self._run(x, states, self._bias(2 if linear_before_reset else 3), step)

    def rnn(self, x: Tensor, states: Sequence[Value | None]) -> tuple[Value, ...]:
        """Return the outputs of an RNN."""

        def step(direction: int, products: list[Value], before: list[Value]) -> list[Value]:
            return [self._gate(self._functions[direction], products[0], *self._products(before[0], direction))]

        return self._run(x, states, self._bias(), step)

    @cached_property
    def _functions(self) -> list[Callable[[Tensor], Value]]:
        """The activation functions; each one with an alpha or beta uses the next value of the list."""
        lists = iter(self.attrs.activation_alpha), iter(self.attrs.activation_beta)
        return [self._function(name.lower(), lists) for name in self.activations]

    def _function(self, name: str, lists: Sequence[Iterator[float]]) -> Callable[[Tensor], Value]:
        if name not in _ACTIVATIONS:
            raise self.im.refuse(f"activation {name}", "use one of ONNX's activations of LSTM, GRU and RNN")
        function, defaults = _ACTIVATIONS[name]
        params = [next(values, default) for values, default in zip(lists, defaults, strict=False)]
        return lambda x: function(self.im, x, *params)

    def _gate(self, function: Callable[[Tensor], Value], *terms: Value | None) -> Value:
        """Apply an activation to the clipped sum of the terms."""
        x = self.im.tensor(_total(self.im, *terms))
        clip = self.attrs.clip
        return function(x if clip is None else self.im.unary(x, "Clip", min=-clip, max=clip))

    def _bias(self, inner: int | None = None) -> Value | None:
        """Return the biases of W, [directions, gates * hidden], plus those of R for the first `inner` gates."""
        if self.b is None:
            return None
        pieces = self._parts(self.b)
        half = len(pieces) // 2
        both = [_total(self.im, *pair) for pair in zip(pieces[:half], pieces[half:][:inner], strict=False)]
        return concat(self.im, *both, *pieces[len(both) : half], axis=1)

    def _products(self, state: Value, direction: int) -> list[Value | None]:
        """Return a state times each gate's matrix; None for a state of zeros."""
        product = _product(self.im, state, _part(self.im, self.r, direction))
        return [None] * (known(self.r.shape[1:])[0] // self.hidden) if product is None else [*self._parts(product)]

    def _parts(self, x: Value, axis: int = -1) -> list[Value]:
        """Split an axis into parts of the size of a state."""
        [length] = known([x.shape[axis]])
        return list(split(self.im, x, axis, (self.hidden,) * (length // self.hidden)))

    def _run(self, x: Tensor, states: Sequence[Value | None], b: Value | None, step: _Step) -> tuple[Value, ...]:
        """Return Y [steps, directions, batch, hidden] and the last states [directions, batch, hidden]."""
        im = self.im
        count, items = im.fixed(x.shape[:2], "a cell that ncnn lacks, with a dynamic number of steps or batch")
        backwards = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[self.attrs.direction]
        if (steps := count * len(backwards)) > MOST_STEPS:
            reason = f"{steps} steps one after the other, more than {MOST_STEPS}"
            raise im.refuse(reason, "feed the sequence in shorter parts")
        zeros = Constant(np.zeros((items, self.hidden), np.float32))
        outputs, ends = [], []
        for direction, backward in enumerate(backwards):
            products: Value = matmul(im, x, transposed(_part(im, self.w, direction)))
            if b is not None:
                products = binary(im, BinaryOp.ADD, products, _part(im, b, direction))
            rows = [im.reshape(t, (items, t.shape[-1])) for t in split(im, im.tensor(products), 0, (1,) * count)]
            current = [zeros if state is None else _part(im, state, direction) for state in states]
            results: list[Value] = []
            for t in reversed(range(count)) if backward else range(count):
                active = None if self.lengths is None else (self.lengths > t).astype(np.float32).reshape(items, 1)
                new = step(direction, self._parts(rows[t]), current)
                current = [_kept(im, active, a, b) for a, b in zip(new, current, strict=True)]
                results.append(im.reshape(_kept(im, active, new[0], zeros), (1, 1, items, self.hidden)))
            outputs.append(concat(im, *(reversed(results) if backward else results), axis=0))
            ends.append([im.reshape(state, (1, items, self.hidden)) for state in current])
        return concat(im, *outputs, axis=1), *(concat(im, *states, axis=0) for states in zip(*ends, strict=True))


def _kept(im: ImportContext, active: Array | None, new: Value, old: Value) -> Value:
    """Return the new state of items whose sequence has this step, and the old state of the others."""
    if active is None or active.all():
        return new
    if not active.any():
        return old
    return _total(im, binary(im, BinaryOp.MUL, new, Constant(active)), _times(im, Constant(1 - active), old))


def _part(im: ImportContext, x: Value, direction: int) -> Value:
    """Return the part of a direction; directions are the first axis."""
    return Constant(x.array[direction]) if isinstance(x, Constant) else gather(im, x, Constant(np.array(direction)))


def is_zero(x: Operand | None) -> bool:
    """Return True for an operand that is absent, or has only zeros."""
    if isinstance(x, SymbolicTensor):
        return x.cells.dtype != object and not x.cells.any()
    return x is None or (isinstance(x, Constant) and not x.array.any())


def _total(im: ImportContext, *terms: Value | None) -> Value:
    """Return the sum of the terms that are not None."""
    total = reduce(partial(added, im), terms)
    assert total is not None
    return total


def _times(im: ImportContext, a: Value | None, b: Value | None) -> Value | None:
    """Return a * b; None if one of them is 0."""
    return None if a is None or b is None or is_zero(a) or is_zero(b) else binary(im, BinaryOp.MUL, a, b)


def _product(im: ImportContext, state: Value | None, r: Value) -> Value | None:
    """state @ r.T; None for a state of zeros."""
    return None if state is None or is_zero(state) else matmul(im, im.tensor(state), transposed(r))
