"""`fuse_lstm`, `fuse_gru`, `fuse_rnn`: unrolled steps become one recurrent layer.

The pass traces every step to its arithmetic (`_cells`, `_pieces`), for any layers: gates are matrices times inputs,
and states are sums of products. Two steps belong to one chain if the second reads the state of the first, and all of
their weights are equal.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.dim import Shape
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.reached import reached
from onnx2ncnn_opt.ir.shapes import assign_shapes
from onnx2ncnn_opt.ir.view import Regroup
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.passes._cells import CellStep, Matcher, gru_step, lstm_step, rnn_step
from onnx2ncnn_opt.passes._constants import stored
from onnx2ncnn_opt.passes._pieces import Linear, NoMatch, Piece, TraceCache, Tracer, count
from onnx2ncnn_opt.passes._views import end_of, view_layers
from onnx2ncnn_opt.rewrite.rule import Edits, Replacement, attempt, fixed_size, graph_pass, require

_LEAST_STEPS = 2
_ROOTS = ("BinaryOp", "TanH", "InnerProduct", "Gemm", "MatMul")  # the last layers of steps
# An exporter may add up biases itself, with other last bits.
_TOLERANCE = 1e-6


class ChainStep(NamedTuple):
    """A step of a chain, with its inputs and the hidden state before; None for zeros."""

    step: CellStep
    inputs: tuple[Piece, ...]
    before: Piece | None


# ---- chains


def _chains(steps: Mapping[Piece, CellStep]) -> Iterator[list[ChainStep]]:
    """Yield chains of steps with equal weights; each step reads the states of the previous one."""
    before: dict[Piece, Piece] = {}
    used: set[Piece] = set()
    for step in steps.values():
        states = [piece for piece in step.sources if piece in steps and _continues(steps[piece], step)]
        if len(states) == 1 and states[0] not in used:
            before[step.hidden] = states[0]
            used.add(states[0])
    for last in steps.values():
        if last.hidden in used or last.hidden not in before:
            continue
        link = _last(last, before[last.hidden])
        chain = [] if link is None else [link]
        while link is not None and link.before is not None and before.get(link.step.hidden) == link.before:
            link = _previous(steps[link.before], link)
            if link is not None:
                chain.insert(0, link)
        if len(chain) >= _LEAST_STEPS:
            yield chain


def _continues(step: CellStep, following: CellStep) -> bool:
    """Return True if the following step reads the cell of this step; a GRU's cell is its state."""
    if step.cell is not None:
        a, b = step.projection, following.projection
        return following.cell_before == step.cell and (a is b if a is None or b is None else np.array_equal(a, b))
    return len(step.gates) == 1 or following.cell_before == step.hidden


def _last(step: CellStep, state: Piece) -> ChainStep | None:
    """Return the last step of a chain, which reads a known hidden state."""
    inputs = tuple(piece for piece in step.sources if piece != state)
    if not inputs or state.size != step.size or None in step.gates:
        return None
    return ChainStep(step, inputs, state) if _is_ncnn_gru(step, inputs, state) else None


def _is_ncnn_gru(step: CellStep, inputs: Sequence[Piece], state: Piece | None) -> bool:
    """Return True if the parts of a GRU read the same operands as in ncnn; True for other cells."""
    if step.cell is not None or len(step.gates) == 1:
        return True
    outer, inner = step.gates[2:]
    assert outer is not None
    if step.cell_before != state or (state is not None and (state in outer.matrices or None in step.gates)):
        return False
    return inner is None or not any(piece in inner.matrices for piece in inputs)


def _previous(step: CellStep, following: ChainStep) -> ChainStep | None:
    """Return the step before a chain's step, its sources sorted into inputs and state; None if weights differ."""
    model, state = following.step, following.before
    assert state is not None
    if step.size != model.size or not all(map(_is_offset_equal, step.gates, model.gates)):
        return None
    inner = model.gates[-1]
    if step.gates[-1] is None and inner is not None and inner.offset.any():
        return None  # without a state, the reset gate of a GRU still multiplies this bias
    remaining = [*step.sources]
    inputs: list[Piece] = []
    for target in following.inputs:
        source = next((piece for piece in remaining if _has_equal_matrices(step, piece, model, target)), None)
        if source is None:
            return None
        remaining.remove(source)
        inputs.append(source)
    if len(remaining) > 1 or any(not _has_equal_matrices(step, piece, model, state) for piece in remaining):
        return None
    before = remaining[0] if remaining else None
    return ChainStep(step, tuple(inputs), before) if _is_ncnn_gru(step, inputs, before) else None


def _is_offset_equal(gate: Linear | None, model: Linear | None) -> bool:
    """Return True if a gate has the bias of its model; a gate that is None has no effect."""
    assert model is not None
    if gate is None:
        return True
    return bool(np.abs(gate.offset - model.offset).max() <= _TOLERANCE * max(1.0, np.abs(model.offset).max()))


def _has_equal_matrices(step: CellStep, piece: Piece, model: CellStep, target: Piece) -> bool:
    """Return True if equal matrices multiply `piece` in the gates of a step, and `target` in those of its model."""
    if piece.size != target.size:
        return False
    gates = [(gate, other) for gate, other in zip(step.gates, model.gates, strict=True) if gate and other]
    matrices = ((gate.matrices.get(piece), other.matrices.get(target)) for gate, other in gates)
    return all(a is b if a is None or b is None else np.array_equal(a, b) for a, b in matrices)


# ---- the layer


def _fuse(graph: Graph, kind: str, matcher: Matcher) -> Edits:
    if not any(layer.type == "TanH" for layer in graph):  # every cell has one
        return
    attempted: set[Piece] = set()
    cache = TraceCache()
    changed = True
    while changed:
        changed = False
        for chain in _chains(_steps(graph, matcher, cache)):
            last = chain[-1].step.hidden
            if last in attempted:
                continue
            attempted.add(last)
            root = last.layer
            yield from attempt(root, _replaced, graph, kind, chain)
            changed = root.graph is not graph
            if changed:
                break  # other chains may begin or end at removed blobs


def _steps(graph: Graph, matcher: Matcher, cache: TraceCache) -> dict[Piece, CellStep]:
    steps = {}
    for layer in graph.layers:
        if layer.type not in _ROOTS or layer["featmask"] or layer.output.shape is None:
            continue
        tracer = Tracer(cache)
        try:
            step = matcher(Piece(layer.output, 0, count(layer.output)), tracer)
        except NoMatch:
            continue
        steps[step.hidden] = step._replace(layers=frozenset({layer, *tracer.visited}))
    return steps


def _replaced(graph: Graph, kind: str, chain: Sequence[ChainStep]) -> Replacement:
    """Return the edit that replaces the chain by one recurrent layer."""
    last, dead = chain[-1].step, _dead(chain)
    cell = last.cell.blob if last.cell is not None else None
    states = [chain[0].before] if cell is None else [chain[0].before, chain[0].step.cell_before]
    order = {layer: index for index, layer in enumerate(graph)}
    after = _last_source(chain, states, dead, order)
    backwards = _is_backwards(chain)
    links = chain[::-1] if backwards else chain
    weights = _weights(kind, chain[-1])
    size, cells = weights["weight_xc_data"].size, last.size if last.cell is None else last.cell.size
    params = {"num_output": last.size, "weight_data_size": size, "direction": int(backwards)}
    params |= {"hidden_size": cells} if last.projection is not None else {}
    new = _NewLayers(last.hidden.layer)
    columns = [new.sequence([link.inputs[i] for link in links]) for i in range(len(chain[0].inputs))]
    inputs = [columns[0] if len(columns) == 1 else new.layer("Concat", columns, axis=1)]
    if any(state is not None for state in states):
        sizes = last.size, cells
        inputs += [new.zeros(n) if x is None else new.sequence([x]) for x, n in zip(states, sizes, strict=False)]
    rows = {row: link.step.hidden.blob for row, link in enumerate(links) if _is_used(link.step.hidden.blob, dead)}
    is_last_only = [*rows.values()] == [last.hidden.blob]
    is_cell_used = cell is not None and _is_used(cell, dead)
    outputs = 1 + len(states) if is_cell_used or is_last_only else 1
    y, *ends = new.layers(Layer(kind, last.hidden.layer.name, inputs, (), params, weights), outputs)
    reads = {last.hidden.blob: ends[0]} if is_last_only else new.rows(y, rows)
    if cell is not None and is_cell_used:
        reads[cell] = ends[1]
    reads = {old: new.view(blob, old.shape or ()) for old, blob in reads.items()}
    anchor = next((old for old, index in order.items() if index == after + 1), None)
    removed = tuple(sorted(dead, key=lambda old: order[old]))
    return Replacement(removed, added=[(layer, anchor) for layer in new.made], reads=reads)


def _last_source(
    chain: Sequence[ChainStep], states: Sequence[Piece | None], dead: set[Layer], order: Mapping[Layer, int]
) -> int:
    """Return the position of the last layer that the recurrent layer reads; refused if it cannot follow that one."""
    cells = [link.step.cell for link in chain if link.step.cell is not None]
    require(all(cell.layer in dead for cell in cells[:-1]), "a cell is needed before the last step")
    results = [*(link.step.hidden.blob for link in chain), *(cell.blob for cell in cells[-1:])]
    sources = [piece for link in chain for piece in link.inputs] + [state for state in states if state is not None]
    batches = {blob.batch for blob in results[: len(chain)]} | {piece.blob.batch for piece in sources}
    require(len(batches) == 1, "the inputs of the steps have different batches")
    after = max(order[piece.layer] for piece in sources)
    readers = [user for blob in results for user in blob.users if user not in dead]
    require(all(order[user] > after for user in readers), "a step is needed before all inputs are known")
    is_independent = not any(piece.layer in dead for piece in sources) and not _depends(sources, chain)
    require(is_independent, "an input of a step depends on an earlier step")
    return after


class _NewLayers:
    """A list of new layers with the name of another layer."""

    def __init__(self, like: Layer) -> None:
        self._like = like
        self.made: list[Layer] = []

    def layers(self, layer: Layer, outputs: int) -> tuple[Blob, ...]:
        """Append a layer and return its output blobs."""
        batch = layer.inputs[0].batch if layer.inputs else 1
        layer.outputs = tuple(Blob(self._like.outputs[0].name, None, batch) for _ in range(outputs))
        assign_shapes(layer)
        self.made.append(layer)
        return layer.outputs

    def layer(self, kind: str, inputs: Sequence[Blob], **params: object) -> Blob:
        """Append a layer with one output, and return the output."""
        return self.layers(Layer(kind, self._like.name, inputs, (), params), 1)[0]

    def view(self, blob: Blob, shape: Shape) -> Blob:
        """Return the blob in another shape."""
        views = view_layers(blob, (Regroup(shape),) if blob.shape != shape else (), like=[self._like])
        self.made += views
        return end_of(blob, views)

    def sequence(self, pieces: Sequence[Piece]) -> Blob:
        """Return a matrix whose rows are pieces of equal size."""
        blob, size, start = pieces[0].blob, pieces[0].size, pieces[0].start
        total = count(blob)
        if all(piece == Piece(blob, start + i * size, start + (i + 1) * size) for i, piece in enumerate(pieces)):
            if len(pieces) * size == total:
                return self.view(blob, (len(pieces), size))
            if total % size == 0 == start % size:
                first = start // size
                rows = self.view(blob, (total // size, size))
                return self.layer("Crop", [rows], starts=(first,), ends=(first + len(pieces),), axes=(0,))
        if len(pieces) > 1:
            return self.layer("Concat", [self.sequence([piece]) for piece in pieces], axis=0)
        run = self.view(blob, (total,))
        return self.view(self.layer("Crop", [run], starts=(start,), ends=(start + size,), axes=(0,)), (1, size))

    def zeros(self, size: int) -> Blob:
        """Return a state of zeros."""
        data = np.zeros(size, np.float32)
        return self.layers(Layer("MemoryData", self._like.name, (), (), {"w": size, "h": 1}, {"data": data}), 1)[0]

    def rows(self, y: Blob, blobs: Mapping[int, Blob]) -> dict[Blob, Blob]:
        """Return the row of `y` that replaces each blob, by the blob; the keys of `blobs` are row numbers."""
        steps = fixed_size(y, 0)
        parts: Mapping[int, Blob]
        if len(blobs) == steps:
            layer = Layer("Slice", self._like.name, [y], (), {"slices": (1,) * steps, "axis": 0})
            parts = dict(enumerate(self.layers(layer, steps)))
        else:
            parts = {row: self.layer("Crop", [y], starts=(row,), ends=(row + 1,), axes=(0,)) for row in blobs}
        return {blob: parts[row] for row, blob in blobs.items()}


def _dead(chain: Sequence[ChainStep]) -> set[Layer]:
    """Return the layers that become unused when one layer produces the states."""
    remaining = list(frozenset().union(*(link.step.layers for link in chain)))
    last = chain[-1].step
    replaced = {link.step.hidden.blob for link in chain} | ({last.cell.blob} if last.cell is not None else set())
    dead: set[Layer] = set()
    while True:
        more = [layer for layer in remaining if all(b in replaced or not _is_used(b, dead) for b in layer.outputs)]
        if not more:
            return dead
        dead.update(more)
        remaining = [layer for layer in remaining if layer not in dead]


def _is_used(blob: Blob, dead: set[Layer]) -> bool:
    return blob.is_output or any(user not in dead for user in blob.users)


def _depends(pieces: Sequence[Piece], chain: Sequence[ChainStep]) -> bool:
    """Return True if pieces are computed from a state of the chain."""
    steps = {link.step.hidden.layer for link in chain}
    above = reached([piece.blob for piece in pieces], lambda blob: blob.producer.inputs if blob.producer else ())
    return any(blob.producer in steps for blob in above)


def _is_backwards(chain: Sequence[ChainStep]) -> bool:
    """Return True if the steps process a sequence from its end."""
    pieces = [link.inputs[0] for link in chain]
    return all(a.blob is b.blob and a.start == b.stop for a, b in pairwise(pieces))


def _weights(kind: str, link: ChainStep) -> dict[str, Array]:
    """Return the weights of ncnn's layer, in its order of gates."""
    gates = [gate for gate in link.step.gates if gate is not None]
    size, projection = len(gates[0].offset), link.step.projection
    assert link.before is not None
    before = link.before

    def matrix(gate: Linear, piece: Piece) -> Array:
        return gate.matrices.get(piece, np.zeros((size, piece.size)))

    # A GRU's third gate is split: `outer` has the matrix of the inputs, `inner` that of the state.
    outer, inner = (gates[:3], [*gates[:2], gates[3]]) if kind == "GRU" else (gates, gates)
    weights = {
        "weight_xc_data": np.stack([np.hstack([matrix(gate, piece) for piece in link.inputs]) for gate in outer]),
        "bias_c_data": np.stack([gate.offset for gate in gates]),
        "weight_hc_data": np.stack([matrix(gate, before) for gate in inner]),
    } | ({} if projection is None else {"weight_hr_data": projection})
    return {name: stored(link.step.hidden.layer, name, array) for name, array in weights.items()}


@graph_pass(exact=False, purpose="loops over cells, from Keras, torch and their exporters' Loop and Scan")
def fuse_lstm(graph: Graph) -> Edits:
    """x₁, h₀, c₀ ── gates, products ── h₁, c₁ ── ... ── h, c   ⇒   x, h₀, c₀ ── LSTM ── h, c"""
    yield from _fuse(graph, "LSTM", lstm_step)


@graph_pass(exact=False, purpose="loops over cells, from Keras, torch and their exporters' Loop and Scan")
def fuse_gru(graph: Graph) -> Edits:
    """x₁, h₀ ── gates, products ── h₁ ── ... ── h   ⇒   x, h₀ ── GRU ── h"""
    yield from _fuse(graph, "GRU", gru_step)


@graph_pass(exact=False, purpose="loops over cells, from Keras, torch and their exporters' Loop and Scan")
def fuse_rnn(graph: Graph) -> Edits:
    """x₁, h₀ ── TanH of a sum ── h₁ ── ... ── h   ⇒   x, h₀ ── RNN ── h"""
    yield from _fuse(graph, "RNN", rnn_step)
