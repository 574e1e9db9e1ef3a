"""Trace how a piece of a blob is computed: through moves, as a sum of linear maps or of products.

A piece is a run of a blob's elements in memory order. A trace is exact for each element, so two pieces with the same
terms are equal for all inputs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, islice
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.ir.dim import is_fixed, known
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.passes._constants import is_constant
from onnx2ncnn_opt.passes._crops import part
from onnx2ncnn_opt.passes._gemm import linear_of
from onnx2ncnn_opt.passes._linear import SIGNS, factor
from onnx2ncnn_opt.passes._views import VIEWS, step_of
from onnx2ncnn_opt.rewrite.rule import Refused

_MOST_TERMS = 8
_MOST_LAYERS = 300  # in the trace of a step
_MOST_MOVES = 64  # blobs in the search for the uses of a state
_DEEPEST = 8  # nested sums in a gate; deeper ones are not gates


class NoMatch(Exception):
    """A piece is not computed in the expected way; the matcher tries the next layer and reports nothing."""


def expect(condition: object) -> None:
    """Raise NoMatch unless the condition holds."""
    if not condition:
        raise NoMatch


class Piece(NamedTuple):
    """The elements from `start` to `stop` of a blob."""

    blob: Blob
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    @property
    def layer(self) -> Layer:
        """The producer of the blob."""
        return self.blob.known_producer

    def of(self, blob: Blob) -> Piece:
        """Return the same elements of another blob."""
        return Piece(blob, self.start, self.stop)


@dataclass
class Linear:
    """``sum(matrix @ piece) + sum(factor * piece) + offset``; a matrix is (size, piece.size)."""

    offset: Array
    matrices: dict[Piece, Array] = field(default_factory=dict)
    factors: dict[Piece, float] = field(default_factory=dict)

    def scaled(self, scale: Array | float) -> Linear:
        """Return the product with a number, or with one number for each element if there are no factors."""
        if self.factors and not isinstance(scale, float):
            raise NoMatch
        if isinstance(scale, float) and scale == 1:
            return self  # without a copy of each matrix
        rows = scale if isinstance(scale, float) else scale[:, None]
        matrices = {piece: matrix * rows for piece, matrix in self.matrices.items()}
        factors = {piece: float(np.mean(scale)) * factor for piece, factor in self.factors.items()}
        return Linear(self.offset * scale, matrices, factors)

    def plus(self, other: Linear) -> Linear:
        """Return the sum of both."""
        result = Linear(self.offset + other.offset, dict(self.matrices), dict(self.factors))
        for piece, matrix in other.matrices.items():
            result.matrices[piece] = result.matrices[piece] + matrix if piece in result.matrices else matrix
        for piece, scale in other.factors.items():
            result.factors[piece] = result.factors.get(piece, 0.0) + scale
        return result


Products: TypeAlias = Mapping[frozenset[Piece], float]
"""A sum of products of different pieces, each with its factor; the empty product is the number 1."""


def count(blob: Blob) -> int:
    """Return the number of elements of a blob; NoMatch if that is not fixed."""
    if not is_fixed(blob.shape):
        raise NoMatch
    return prod(blob.shape)


class TraceCache:
    """Facts about layers, shared by all traces."""

    def __init__(self) -> None:
        # Results of `_matrix`, by the layer or constant that holds it, and whether a MatMul transposes it.
        self.matrices: dict[tuple[Layer | None, int], tuple[Array, Array] | None] = {}
        self.cut = cache(_cut)


class Tracer:
    """Traces pieces; `visited` are the layers of the trace. A trace stops at layers with a feature mask."""

    def __init__(self, cache: TraceCache) -> None:
        self.visited: set[Layer] = set()
        self._cache = cache
        self._budget = _MOST_LAYERS

    def source(self, piece: Piece) -> Piece:
        """Return the computed piece that moves copied to this piece; NoMatch if there are several."""
        sources = self.sources(piece)
        expect(len(sources) == 1)
        return sources[0]

    def sources(self, piece: Piece) -> tuple[Piece, ...]:
        """Return the computed pieces that moves copied to this piece, in order."""
        layer = piece.layer
        self._budget -= 1
        expect(self._budget >= 0)
        if layer["featmask"] or not layer.inputs:
            return (piece,)
        moved = _before_move(piece, self._cache.cut)
        if moved is None:
            return (piece,)
        self.visited.add(layer)
        joined: list[Piece] = []
        for source in (source for before in moved for source in self.sources(before)):
            if joined and joined[-1].blob is source.blob and joined[-1].stop == source.start:
                joined[-1] = Piece(source.blob, joined[-1].start, source.stop)
            else:
                joined.append(source)
        return tuple(joined)

    def operand(self, piece: Piece, kind: str) -> Piece:
        """Return the operand of the elementwise layer of this kind that computes a piece; NoMatch for others."""
        piece = self.source(piece)
        layer = piece.layer
        expect(layer.type == kind and not layer["featmask"])
        self.visited.add(layer)
        return piece.of(layer.input)

    def linear(self, piece: Piece, depth: int = 0) -> Linear:
        """Return a piece as a sum of linear maps of other pieces, each through at most one matrix."""
        expect(depth <= _DEEPEST)
        piece = self.source(piece)
        layer = piece.layer
        result = None
        if layer["featmask"]:
            pass
        elif layer.type == "MemoryData":
            return Linear(_constant(piece))
        elif layer.type == "BinaryOp":
            result = self._of_binary(piece, depth + 1)
        elif layer.type in ("InnerProduct", "Gemm", "MatMul"):
            result = self._of_matrix(piece)
        if result is None:
            return Linear(np.zeros(piece.size), {}, {piece: 1.0})
        self.visited.add(layer)
        return result

    def _of_matrix(self, piece: Piece) -> Linear | None:
        layer, matrices = piece.layer, self._cache.matrices
        key = (layer.inputs[1].producer, layer["transB"]) if layer.type == "MatMul" else (layer, 0)
        if key not in matrices:
            matrices[key] = _matrix(layer)
        matrix = matrices[key]
        if matrix is None:
            return None
        weight, bias = matrix
        rows, columns = weight.shape
        row, start = divmod(piece.start, rows)
        stop = start + piece.size
        expect(stop <= rows)
        result = Linear(bias[start:stop].astype(np.float64))
        used = 0
        for source in self.sources(Piece(layer.inputs[0], row * columns, (row + 1) * columns)):
            block = weight[start:stop, used : used + source.size]
            used += source.size
            if source.layer.type == "MemoryData":
                result.offset = result.offset + block.astype(np.float64) @ _constant(source)
            else:
                result = result.plus(Linear(np.zeros(piece.size), {source: block}))
        return result

    def _of_binary(self, piece: Piece, depth: int) -> Linear | None:
        layer, operands = piece.layer, _operands(piece)
        kind = layer["op_type"]
        if kind in SIGNS:
            sides = [self.linear(x, depth) if isinstance(x, Piece) else Linear(x) for x in operands]
            a, b = (side.scaled(sign) for side, sign in zip(sides, SIGNS[kind], strict=True))
            return a.plus(b)
        if layer["with_scalar"]:
            scales = kind == BinaryOp.MUL or (kind == BinaryOp.DIV and layer["b"])
            return self.linear(piece.of(layer.input), depth).scaled(factor(layer)) if scales else None
        numbers = [x for x in operands if not isinstance(x, Piece)]
        others = [x for x in operands if isinstance(x, Piece)]
        if kind != BinaryOp.MUL or len(numbers) != 1:
            return None
        try:
            return self.linear(others[0], depth).scaled(numbers[0])
        except NoMatch:
            return None

    def products(self, piece: Piece, depth: int = 0) -> Products:
        """Return a piece as a sum of products; a blob that `is_state` is one factor, except at depth 0."""
        expect(depth <= _DEEPEST)
        piece = self.source(piece)
        layer = piece.layer
        whole: Products = {frozenset([piece]): 1.0}
        if layer.type == "MemoryData":
            values = _constant(piece)
            if (values != values[0]).any():
                return whole
            return _number(float(values[0]))
        if layer["featmask"] or (depth and is_state(piece.blob)):
            return whole
        if layer.computes(UnaryOp.NEG):
            self.visited.add(layer)
            return _times({frozenset(): -1.0}, self.products(piece.of(layer.input), depth + 1))
        if not layer.computes(BinaryOp.ADD, BinaryOp.SUB, BinaryOp.MUL, BinaryOp.RSUB):
            return whole
        self.visited.add(layer)
        sides: list[Products] = []
        for operand in _operands(piece):
            if isinstance(operand, Piece):
                sides.append(self.products(operand, depth + 1))
            else:
                expect((operand == operand[0]).all())
                sides.append(_number(float(operand[0])))
        if layer["op_type"] == BinaryOp.MUL:
            return _times(*sides)
        return _sum(sides, SIGNS[layer["op_type"]])


def is_state(blob: Blob) -> bool:
    """Return True if a matrix or a TanH reads a blob, as with the states of recurrent layers.

    Return True, too, if the search takes too long.
    """
    pending, seen = [blob], {blob}
    while pending:
        if len(seen) > _MOST_MOVES:
            return True
        for user in pending.pop().users:
            if user.type in ("TanH", "InnerProduct", "Gemm", "MatMul"):
                return True
            if user.type in VIEWS or user.type in ("Concat", "Slice", "Crop"):
                pending += [output for output in user.outputs if output not in seen]
                seen.update(user.outputs)
    return False


class _Cut(NamedTuple):
    """The start of each part in the elements of a whole: of a Concat's inputs, or of the outputs of a Slice or Crop."""

    starts: tuple[int, ...]
    by_blob: Mapping[Blob, int]


def _cut(layer: Layer) -> _Cut | None:
    """Return the parts of a Concat, Slice or Crop; None if they are no runs of the whole, or sizes are unknown."""
    whole, parts = (layer.output, layer.inputs) if layer.type == "Concat" else (layer.input, layer.outputs)
    if layer.type == "Crop":
        kept = part(layer)
        if kept is None:
            return None
        axis, *places = kept[:2]
    else:
        shapes = [blob.shape for blob in parts if is_fixed(blob.shape)]
        if len(shapes) < len(parts) or len({len(shape) for shape in shapes}) != 1:
            return None
        axis = layer["axis"] % len(shapes[0])
        places = list(accumulate((shape[axis] for shape in shapes[:-1]), initial=0))
    if whole.shape is None or any(size != 1 for size in whole.shape[:axis]):
        return None
    after = whole.shape[axis + 1 :]
    if not is_fixed(after):
        return None
    starts = tuple(place * prod(after) for place in places)
    return _Cut(starts, dict(zip(parts, starts, strict=True)))


def _before_move(piece: Piece, cut_of: Callable[[Layer], _Cut | None]) -> list[Piece] | None:
    """Return the pieces that a move copies to this piece; None for other layers, and if its source is not a run."""
    layer = piece.layer
    if step_of(layer) is not None:
        moves = layer.type == "Permute" and sum(size != 1 for size in layer.input.known_shape) > 1
        return None if moves else [piece.of(layer.input)]
    cut = cut_of(layer) if layer.type in ("Slice", "Crop", "Concat") else None
    if cut is None:
        return None
    if layer.type != "Concat":
        start = cut.by_blob[piece.blob]
        return [Piece(layer.input, start + piece.start, start + piece.stop)]
    pieces = []
    first = bisect_right(cut.starts, piece.start) - 1
    for blob, start in islice(zip(layer.inputs, cut.starts, strict=True), first, None):
        if start >= piece.stop:
            break
        low, high = max(piece.start, start), min(piece.stop, start + count(blob))
        if low < high:
            pieces.append(Piece(blob, low - start, high - start))
    return pieces


def _operands(piece: Piece) -> list[Piece | Array]:
    """Return the operands of a piece of a BinaryOp's result: constants and scalars as arrays."""
    layer = piece.layer
    if layer["with_scalar"]:
        return [piece.of(layer.input), np.full(piece.size, float(layer["b"]))]
    return [_operand(layer, blob, piece) for blob in layer.inputs]


def _operand(layer: Layer, blob: Blob, piece: Piece) -> Piece | Array:
    size = count(blob)
    if size == count(piece.blob):
        return _constant(piece.of(blob)) if is_constant(blob) else piece.of(blob)
    expect(is_constant(blob))
    shape, result = blob.shape or (), layer.output.shape or ()
    if size == 1:
        return np.full(piece.size, _constant(Piece(blob, 0, 1))[0])
    # One number for each column; ncnn would align a 1-D Mat with the rows if it had their number.
    columns = result[-1]
    expect(size == columns == shape[-1] and (len(shape) == len(result) or (len(shape) == 1 and result[0] != size)))
    return _constant(Piece(blob, 0, size))[np.arange(piece.start, piece.stop) % size]


def _constant(piece: Piece) -> Array:
    stored = piece.layer.weights.stored("data")
    expect(stored.is_float)
    return piece.layer.weights["data"].reshape(-1)[piece.start : piece.stop].astype(np.float64)


def _matrix(layer: Layer) -> tuple[Array, Array] | None:
    """Return the constant matrix (outputs, inputs) that multiplies each row of a layer's first blob, and its bias."""
    if layer.type == "InnerProduct":
        if layer["activation_type"] or layer["int8_scale_term"] or not layer.weights.stored("weight_data").is_float:
            return None
        outputs = layer["num_output"]
        weight = layer.weights["weight_data"].reshape(outputs, -1)
        shape = layer.input.shape
        # If the rows of the blob have another width, ncnn reads all elements as one row.
        if shape is None or (shape[-1] != weight.shape[1] and count(layer.input) != weight.shape[1]):
            return None
        return weight, layer.weights["bias_data"] if layer["bias_term"] else np.zeros(outputs)
    if layer.type == "Gemm":
        try:
            linear = linear_of(layer)
        except Refused:
            return None
        return linear.weight, linear.bias
    b = layer.inputs[1]
    if not is_constant(b) or b.shape is None or len(b.shape) != 2:
        return None
    matrix = _constant(Piece(b, 0, count(b))).reshape(known(b.shape))
    matrix = matrix if layer["transB"] else matrix.T
    return matrix, np.zeros(len(matrix))


def _number(value: float) -> Products:
    return {frozenset(): value} if value else {}


def _times(a: Products, b: Products) -> Products:
    result: dict[frozenset[Piece], float] = {}
    for left, k in a.items():
        for right, m in b.items():
            expect(not left & right)  # no square
            result[left | right] = result.get(left | right, 0.0) + k * m
    return _bounded(result)


def _sum(sides: Sequence[Products], signs: Sequence[float]) -> Products:
    result: dict[frozenset[Piece], float] = {}
    for side, sign in zip(sides, signs, strict=True):
        for factors, k in side.items():
            result[factors] = result.get(factors, 0.0) + sign * k
    return _bounded(result)


def _bounded(terms: dict[frozenset[Piece], float]) -> Products:
    expect(len(terms) <= _MOST_TERMS)
    return {factors: k for factors, k in terms.items() if k}
