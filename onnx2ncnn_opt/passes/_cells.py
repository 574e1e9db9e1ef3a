"""Cells of recurrent layers: match one step of an LSTM, a GRU or an RNN by its arithmetic."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.passes._pieces import Linear, NoMatch, Piece, Tracer, count, expect

_T = TypeVar("_T")


class CellStep(NamedTuple):
    """One step: its states, and its gates in ncnn's order; None for a gate that multiplies a state of zeros.

    The last one of a GRU's four is the factor of the reset gate.
    """

    hidden: Piece
    gates: tuple[Linear | None, ...]
    cell: Piece | None = None
    cell_before: Piece | None = None
    layers: frozenset[Layer] = frozenset()
    projection: Array | None = None  # the matrix of an LSTM that multiplies its state

    @property
    def size(self) -> int:
        """The size of a state."""
        return self.hidden.size

    @property
    def sources(self) -> tuple[Piece, ...]:
        """The pieces that the gates are computed from."""
        return tuple(dict.fromkeys(piece for gate in self.gates if gate for piece in gate.matrices))


Matcher = Callable[[Piece, Tracer], CellStep]
"""Returns the step whose hidden state is a piece; raises NoMatch if it computes something else."""


def lstm_step(hidden: Piece, tracer: Tracer) -> CellStep:
    """Match h = sigmoid(o) * tanh(c), c = sigmoid(f) * c' + sigmoid(i) * tanh(g), or a matrix times this h."""
    state, projection = hidden, None
    if hidden.layer.type != "BinaryOp":
        operand = hidden.layer.inputs[0]
        product = tracer.source(Piece(operand, 0, count(operand))).layer
        expect(product.computes(BinaryOp.MUL, scalar=False) and hidden.size == hidden.blob.known_shape[-1])
        whole = tracer.linear(hidden)
        expect(len(whole.matrices) == 1 and not whole.factors and not whole.offset.any())
        [(state, projection)] = whole.matrices.items()
    expect(state.layer.computes(BinaryOp.MUL, scalar=False))
    o, c = _split_gate(_single_term(tracer.products(state)))
    cell = tracer.source(tracer.operand(c, "TanH"))
    sums = tracer.products(cell)
    pairs = sorted(map(_split_gate, sums), key=lambda pair: pair[1].layer.type != "TanH")
    expect(1 <= len(pairs) <= 2 and all(factor == 1 for factor in sums.values()))
    (i, g), (forget, before) = pairs[0], pairs[1] if len(pairs) > 1 else (None, None)
    kinds = ((i, "Sigmoid"), (forget, "Sigmoid"), (o, "Sigmoid"), (g, "TanH"))
    gates = [None if piece is None else tracer.linear(tracer.operand(piece, kind)) for piece, kind in kinds]
    return CellStep(hidden, tuple(map(_require_no_factors, gates)), cell, before, projection=projection)


def gru_step(hidden: Piece, tracer: Tracer) -> CellStep:
    """Match h = (1 - z) * n + z * h' with z a sigmoid and n = tanh(x + sigmoid(r) * (U @ h' + b))."""
    expect(hidden.layer.type == "BinaryOp" and not hidden.layer["with_scalar"])
    terms = tracer.products(hidden)
    single = [next(iter(product)) for product in terms if len(product) == 1]
    expect(len(single) == 1 and 2 <= len(terms) <= 3)
    first = single[0]
    pairs = [product for product in terms if len(product) == 2]
    # first - first * z + second * z; first is n, or the state before if the net uses 1 - z instead of z.
    negative = [product for product in pairs if terms[product] == -1 and first in product]
    positive = [product for product in pairs if terms[product] == 1 and first not in product]
    expect(terms[frozenset([first])] == 1 and len(negative) == 1 and len(negative) + len(positive) == len(pairs))
    (z,) = negative[0] - {first}
    second = next(iter(positive[0] - {z})) if positive else None
    expect(not positive or z in positive[0])
    mirrored = first.layer.type != "TanH"
    new, before = (second, first) if mirrored else (first, second)
    if new is None:
        raise NoMatch
    update = tracer.linear(tracer.operand(z, "Sigmoid"))
    if mirrored:
        update = update.scaled(-1.0)
    whole = tracer.linear(tracer.operand(new, "TanH"))
    reset = inner = None
    if whole.factors:
        reset, inner = _reset(tracer, _single_term(whole.factors))
    outer = Linear(whole.offset, whole.matrices)
    gates = (_require_no_factors(reset), _require_no_factors(update), outer, _require_no_factors(inner))
    return CellStep(hidden, gates, None, before)


def _reset(tracer: Tracer, product: Piece) -> tuple[Linear, Linear]:
    """Return the two factors of sigmoid(r) * (U @ h' + b)."""
    layer = product.layer
    expect(layer.computes(BinaryOp.MUL, scalar=False))
    expect(all(count(blob) == count(product.blob) for blob in layer.inputs))
    tracer.visited.add(layer)
    sides = [product.of(blob) for blob in layer.inputs]
    gate, other = _split_gate(frozenset(map(tracer.source, sides)))
    return tracer.linear(tracer.operand(gate, "Sigmoid")), tracer.linear(other)


def rnn_step(hidden: Piece, tracer: Tracer) -> CellStep:
    """Match h = tanh(W @ x + U @ h' + b)."""
    expect(hidden.layer.type == "TanH")
    return CellStep(hidden, (_require_no_factors(tracer.linear(tracer.operand(hidden, "TanH"))),))


def _single_term(terms: Mapping[_T, float]) -> _T:
    """Return the only term of a sum; its factor must be 1."""
    expect([*terms.values()] == [1.0])
    return next(iter(terms))


def _require_no_factors(gate: Linear | None) -> Linear | None:
    expect(gate is None or not gate.factors)
    return gate


def _split_gate(product: frozenset[Piece]) -> tuple[Piece, Piece]:
    """Return the sigmoid and the other factor of a product of two."""
    gates = [piece for piece in product if piece.layer.type == "Sigmoid"]
    expect(len(product) == 2 and len(gates) == 1)
    (other,) = product - {gates[0]}
    return gates[0], other
