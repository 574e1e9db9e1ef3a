"""Random models of recurrent cells: nodes with missing parts, and cells that are written out step by step.

A written cell may lack gates, biases, the initial state, and in its first step all that reads a state. Sometimes one
step has another number than the others, so that the steps form no chain.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from testing.random_models import Builder, NoFit, RandomModel, add_input, completed
from testing.random_steps import MOVES, recur, unary

State = list[str | None]
Cell = Callable[[str, State], State]


@dataclass
class Parts:
    """The constants of a written cell; `changed` are those that one step replaces."""

    b: Builder
    changed: dict[str, str] = field(default_factory=dict)
    made: list[str] = field(default_factory=list)

    def matrix(self, *shape: int) -> str:
        """Return a constant of all steps."""
        name = self.b.constant((self.b.rng.standard_normal(shape) / 2).astype(np.float32))
        self.made.append(name)
        return name

    def bias(self, size: int) -> str:
        """Return a bias, empty if the cell has none there."""
        return self.matrix(size) if self.b.chance(0.6) else ""

    def change(self) -> None:
        """Give the next steps another number in one constant."""
        name = self.b.choice(self.made)
        other = self.b.constants[name].copy()
        other.flat[self.b.number(0, other.size - 1)] += np.float32(0.5)
        self.changed = {name: self.b.constant(other)}

    def dense(self, x: str, matrix: str, bias: str, *, is_gemm: bool) -> str:
        """Return the product with a constant, plus a bias."""
        matrix, bias = self.changed.get(matrix, matrix), self.changed.get(bias, bias)
        if is_gemm:
            return self.b.node("Gemm", x, matrix, *([bias] if bias else []))
        product = self.b.node("MatMul", x, matrix)
        return self.b.node("Add", product, bias) if bias else product


def _sum(parts: Parts, width: int, hidden: int, size: int) -> Callable[[str, str | None], str]:
    """Return W @ x + U @ h + b, as two products or as one of the concatenated operands."""
    b = parts.b
    w, u, outer, inner = parts.matrix(width, size), parts.matrix(hidden, size), parts.bias(size), parts.bias(size)
    is_gemm, is_one, keeps = b.chance(0.4), b.chance(0.3), b.chance(0.5)
    whole = parts.matrix(width + hidden, size) if is_one else ""
    alone = b.constant(b.constants[whole][:width]) if is_one else w

    def make(x: str, h: str | None) -> str:
        if is_one and h is not None:
            return parts.dense(b.node("Concat", x, h, axis=1), whole, outer, is_gemm=is_gemm)
        product = parts.dense(x, alone, outer, is_gemm=is_gemm)
        if h is None:
            return b.node("Add", product, parts.changed.get(inner, inner)) if inner and keeps else product
        return b.node("Add", product, parts.dense(h, u, inner, is_gemm=is_gemm))

    return make


def _gates(parts: Parts, count: int, width: int, hidden: int) -> Callable[[str, str | None], list[str]]:
    """Return the sums of some gates, as one product that is split, or as one product each."""
    is_split = count > 1 and parts.b.chance(0.5)
    sums = [_sum(parts, width, hidden, hidden * (count if is_split else 1)) for _ in range(1 if is_split else count)]
    lengths = parts.b.ints(*(hidden,) * count)

    def make(x: str, h: str | None) -> list[str]:
        found = [each(x, h) for each in sums]
        return parts.b.many(count, "Split", found[0], lengths, axis=1) if is_split else found

    return make


def _lstm(parts: Parts, width: int, hidden: int) -> Cell:
    """Return an LSTM; any gate may be missing, or coupled with another one."""
    b = parts.b
    is_input, is_output, is_tanh = b.chance(0.8), b.chance(0.8), b.chance(0.8)
    forget = b.choice(("own", "own", "own", "coupled", "none"))
    gates = _gates(parts, 2 + is_output + (forget == "own"), width, hidden)
    one = b.scalar(1.0)
    kept = {"own": "Sigmoid(f) * old + new", "coupled": "(one - i) * old + new", "none": "old + new"}[forget]

    def make(x: str, states: State) -> State:
        h, before = states
        first, g, *rest = gates(x, h)
        i = b.node("Sigmoid", first)
        c = b.write("i * Tanh(g)" if is_input else "Tanh(g)", i=i, g=g)
        if before is not None:
            c = b.write(kept, f=rest[0] if rest else "", i=i, one=one, old=before, new=c)
        seen = b.node("Tanh", c) if is_tanh else c
        return [b.write("Sigmoid(o) * seen", o=rest[-1], seen=seen) if is_output else seen, c]

    return make


def _gru(parts: Parts, width: int, hidden: int) -> Cell:
    """Return a GRU with the reset gate before or after the product, or none, and any form of the new state."""
    b = parts.b
    reset = b.choice(("after", "after", "before", "none"))
    first, later = b.choice(
        (
            ("(one - z) * n", "(one - z) * n + z * h"),
            ("n - n * z", "n - n * z + z * h"),
            ("(one - z) * n", "n + z * (h - n)"),
            ("z * n", "z * n + (one - z) * h"),
        )
    )
    gates, outer = _gates(parts, 2, width, hidden), _gates(parts, 1, width, hidden)
    u, inner, keeps, is_gemm = parts.matrix(hidden, hidden), parts.bias(hidden), b.chance(0.5), b.chance(0.4)
    one = b.scalar(1.0)

    def make(x: str, states: State) -> State:
        (h,) = states
        z, r = (b.node("Sigmoid", each) for each in gates(x, h))
        (new,) = outer(x, h if reset == "none" else None)
        if reset != "none" and h is not None:
            product = parts.dense(b.node("Mul", r, h) if reset == "before" else h, u, inner, is_gemm=is_gemm)
            new = b.node("Add", new, b.node("Mul", r, product) if reset == "after" else product)
        elif reset == "after" and inner and keeps:
            new = b.node("Add", new, b.node("Mul", r, parts.changed.get(inner, inner)))
        return [b.write(first if h is None else later, one=one, z=z, n=b.node("Tanh", new), h=h or "")]

    return make


def _rnn(parts: Parts, width: int, hidden: int) -> Cell:
    """Return a plain cell."""
    gate, function = _gates(parts, 1, width, hidden), parts.b.choice(("Tanh", "Tanh", "Relu", "Sigmoid"))
    return lambda x, states: [parts.b.node(function, gate(x, states[0])[0])]


def _state(b: Builder, shape: tuple[int, ...], like: str, axis: int) -> str | None:
    """Return an initial state: none, zeros, a constant, an input, or zeros of the batch's size."""
    kind = b.choice(("none", "none", "zeros", "constant", "input", "shape"))
    items = b.inputs["x0"][axis] if like == "x0" else None
    if kind == "none":
        return None
    if kind == "shape":
        size = b.node("Gather", b.node("Shape", like), b.ints(axis), axis=0)
        parts = [size if at == len(shape) - 2 else b.ints(shape[at]) for at in range(len(shape))]
        return b.node("Expand", b.constant(np.zeros((1,) * len(shape), np.float32)), b.node("Concat", *parts, axis=0))
    if kind == "input" and items is not None:
        runs = [array.shape[axis] for array in b.values[like]]
        declared = (*shape[:-2], items, shape[-1])
        return add_input(b, declared, {items: runs} if isinstance(items, str) else {}, runs=len(runs))
    one = (*shape[:-2], 1, shape[-1]) if len(shape) < 3 else shape
    return b.constant(np.zeros(one, np.float32)) if kind == "zeros" else b.floats(one)


def written(b: Builder, x: str, time: int) -> str:
    """Write out a cell over the steps of an axis; return the last state, or all."""
    length, width, hidden = b.shape(x)[time], b.shape(x)[2], b.number(1, 5)
    if any(array.shape[time] != length for array in b.values[x]):
        raise NoFit
    parts = Parts(b)
    make, count = b.choice(((_lstm, 2), (_gru, 1), (_gru, 1), (_rnn, 1)))
    cell = make(parts, width, hidden)
    states: State = [_state(b, (b.shape(x)[1 - time], hidden), x, 1 - time)] * count
    rows = b.many(length, "Split", x, b.ints(*(1,) * length), axis=time) if length > 1 and b.chance(0.5) else []
    order = range(length)[:: b.choice((1, 1, -1))]
    unlike = b.number(0, length - 1) if b.chance(0.15) else None
    hs = []
    for at in order:
        row = b.node("Squeeze", rows[at], b.ints(time)) if rows else b.node("Gather", x, b.scalar(at), axis=time)
        if at == unlike:
            parts.change()
        states = cell(row, states)
        parts.changed = {}
        hs.append(str(states[0]))
    kind = b.choice(("all", "last", "some"))
    if kind == "last" or length == 1:
        return hs[-1]
    chosen = hs if kind == "all" else [hs[b.number(0, length - 1)], hs[-1]]
    return b.node("Concat", *(b.node("Unsqueeze", h, b.ints(time)) for h in chosen), axis=time)


def node(b: Builder, x: str, time: int) -> str:
    """Add a recurrent node with any kind of initial states."""
    return recur(b, x, time, _state)


def random_cells(seed: int, number: int) -> RandomModel:
    """Return model `number` of a seed: one or two cells; the sizes of every third are dynamic, if the cells allow."""
    rng = np.random.default_rng([seed, number, 1])
    while True:
        b = Builder(rng, int(rng.choice([13, 17, 18, 23])))
        time, form, is_open = b.number(0, 1), b.choice((written, written, node)), number % 3 == 0
        shape: list[int | str] = [b.number(1, 5) for _ in range(3)]
        sizes = {name: [int(n) for n in rng.permutation(5)[:3] + 1] for name in ("batch", "steps")}
        if is_open:
            shape[1 - time] = "batch"
            if form is node and b.chance(0.5):
                shape[time] = "steps"
        x = add_input(b, tuple(shape), sizes, runs=3 if is_open else 1)
        try:
            y = form(b, x, time)
            if len(b.shape(y)) == 3 and b.chance(0.4):
                b.choice((written, node))(b, y, time)
        except NoFit:
            if not b.nodes:
                continue
        for _ in b.steps((*MOVES, unary), b.number(0, 2)):
            pass
        return completed(b)
