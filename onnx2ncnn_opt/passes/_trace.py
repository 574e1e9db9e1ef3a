"""A trace of elements: which elements of a source, times which factors, add up to each element of a later blob.

The trace follows layers that only move, negate, scale or add elements, or multiply them by a table. So every spelling
of the same moves gives the same trace. Numbers stand for dynamic sizes (`Sizes`).
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, PadMode, UnaryOp
from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym, product, substituted
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.view import Regroup, Reorder
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.passes._constants import is_constant
from onnx2ncnn_opt.passes._crops import starts_of
from onnx2ncnn_opt.passes._linear import factor, times
from onnx2ncnn_opt.passes._views import Steps, shortest, step_of, steps_to
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import Refused, known_shape, needed, require

PRODUCT = op("BinaryOp", op_type=BinaryOp.MUL, with_scalar=0)
SUM = op("BinaryOp", op_type=frozenset({BinaryOp.ADD, BinaryOp.SUB}), with_scalar=0)
NEGATION = op("UnaryOp", op_type=UnaryOp.NEG)
SCALING = times("x")
_WINDOW = ("pad_left", "pad_right", "pad_top", "pad_bottom", "global_pooling", "adaptive_pooling")
# A slice with steps: every n-th row and column.
_STRIDED = op(
    "Pooling",
    where=lambda pool: not any(pool[name] for name in _WINDOW),
    kernel_w=1,
    kernel_h=1,
    pad_mode=PadMode.VALID,
)
_PARTS = {
    "Concat": {"axis"},
    "Slice": {"slices", "axis"},
    "Crop": {"starts", "ends", "axes", "starts_expr", "ends_expr", "axes_expr"},
}
NO_ELEMENT = -1
# The longest spelling of a rotation that exporters write has 22 layers.
_MOST_LAYERS = 32
_PRIMES = (11, 13, 17, 19, 23, 29, 31)
_MULTIPLES = tuple(11 * prime for prime in (2, 3, 5, 7, 11, 13, 17))  # so are their sums and differences

Numbers: TypeAlias = Callable[[Blob], Array]
"""Returns the numbers of a table, the operand of a product; it may raise Refused."""


class Sizes:
    """Numbers in place of dynamic sizes. Fixed sizes have no multiple of one, so a number shows its dynamic factors."""

    def __init__(self, blobs: Iterable[Blob]) -> None:
        sizes = dict.fromkeys(size for blob in blobs for size in known_shape(blob))
        dynamic = [size for size in sizes if isinstance(size, Sym)]
        parts = sorted({part for size in dynamic for parts in size.terms for part in parts}, key=str)
        # Fixed sizes, and the numbers of heads and parts that passes multiply them by.
        fixed = prod((210**8, *(size for size in sizes if isinstance(size, int))))
        for values in (*(_PRIMES[start:] for start in range(len(_PRIMES) - len(parts) + 1)), _MULTIPLES):
            self._parts = dict(zip(parts, values, strict=False))
            self._sizes = {self.number(size): size for size in dynamic}
            numbers = [*self._sizes, *self._parts.values()]
            if len(self._sizes) == len(dynamic) and all(fixed % number for number in numbers):
                return
        raise Refused("no numbers can stand for the dynamic sizes")

    def number(self, size: Dim) -> int:
        """Return a size in numbers."""
        number = substituted(size, self._parts)
        if not isinstance(number, int) or number <= 0:
            raise Refused("a size is not known")
        return number

    def shape(self, blob: Blob) -> tuple[int, ...]:
        """Return the shape of a blob in numbers."""
        return tuple(map(self.number, known_shape(blob)))

    def size(self, number: Dim) -> Dim:
        """Return the size that a number stands for."""
        assert isinstance(number, int)
        if number in self._sizes:
            return self._sizes[number]
        factor = next((factor for factor in sorted(self._sizes, reverse=True) if number % factor == 0), None)
        return self._sizes[factor] * self.size(number // factor) if factor else number

    def sizes(self, shape: Shape) -> Shape:
        """Return the sizes that numbers stand for."""
        return tuple(map(self.size, shape))

    def steps(self, source: Blob, steps: Steps | None) -> Steps | None:
        """Return steps with the sizes that their numbers stand for; None if a Reshape has several dynamic sizes.

        None, too, if a product of fixed sizes was taken for a dynamic one: then the number of elements differs.
        """
        if steps is None:
            return None
        steps = tuple(Regroup(self.sizes(s.dims)) if isinstance(s, Regroup) else s for s in steps)
        shapes, whole = [s.dims for s in steps if isinstance(s, Regroup)], product(known_shape(source))
        fits = all(sum(isinstance(size, Sym) for size in dims) <= 1 and product(dims) == whole for dims in shapes)
        return steps if fits else None

    def views(self, source: Blob, elements: Array) -> Steps | None:
        """Return the fewest steps from the source to a blob of these elements; None if it is not a view."""
        steps = steps_to(elements, self.shape(source))
        return None if steps is None else self.steps(source, shortest(self.shape(source), steps))


class Region(NamedTuple):
    """The layers from a source to a root, in order, which only move, multiply and add, and the products' tables."""

    source: Blob
    layers: tuple[Layer, ...]
    tables: Mapping[Layer, Blob]

    @property
    def blobs(self) -> list[Blob]:
        """The source and all blobs that the layers compute."""
        return [self.source, *(blob for layer in self.layers for blob in layer.outputs)]


def find_region(
    root: Layer, order: Mapping[Layer, int], table_of: Callable[[Layer], Blob | None] | None = None
) -> Region | None:
    """Return the layers that compute `root` from the nearest blob; with `table_of` they multiply by tables.

    None if one of them does not only move, multiply and add, or if other layers read its result.
    """
    layers: list[Layer] = []
    tables: dict[Layer, Blob] = {}
    front = {root.output}
    while len(front) > 1 or not (tables if table_of else layers):
        producers = (blob.producer for blob in front if blob.producer is not None)
        layer = max(producers, key=lambda producer: order.get(producer, -1))
        table = table_of(layer) if table_of else None
        if len(layers) == _MOST_LAYERS or not _is_linear(layer, table):
            return None
        for blob in layer.outputs:
            private = not blob.is_output and all(user in layers for user in blob.users)
            if layer is not root and not private:
                return None
        layers.append(layer)
        if table is not None:
            tables[layer] = table
        front.difference_update(layer.outputs)
        rotates = table is not None and not PRODUCT.fits(layer)
        front.update(layer.inputs[:1] if rotates else (blob for blob in layer.inputs if blob is not table))
    return Region(front.pop(), tuple(layers[::-1]), tables)


def _is_linear(layer: Layer, table: Blob | None) -> bool:
    """Return True if the elements of a layer's result are sums of its operand's elements times known factors."""
    if table is not None or PRODUCT.fits(layer):
        return table is not None
    return bool(layer.inputs) and not any(map(is_constant, layer.inputs)) and can_trace(layer)


class Term(NamedTuple):
    """One addend of every element of a blob: the index of an element of the source, and its factor."""

    elements: Array
    factors: Array


def can_trace(layer: Layer) -> bool:
    """Return True if a layer, except a `PRODUCT`, only moves, negates, scales or adds elements."""
    if layer.type in _PARTS:
        return layer.params.keys() <= _PARTS[layer.type]
    others = (SUM, NEGATION, SCALING, _STRIDED)
    return step_of(layer) is not None or any(other.fits(layer) for other in others)


def trace(source: Blob, end: Blob, layers: Iterable[Layer], sizes: Sizes, numbers: Numbers | None = None) -> list[Term]:
    """Return the terms, elements of `source`, that add up to each element of a blob that the layers lead to.

    `numbers` are those of the tables, if there are any.
    """
    shape = sizes.shape(source)
    elements = np.arange(prod(shape), dtype=np.int32).reshape(shape)
    terms = {source: [Term(elements, np.ones(shape, np.float32))]}
    for layer in layers:
        operands = [terms[blob] for blob in layer.inputs if blob in terms]
        tables = [numbers(blob) for blob in layer.inputs if blob not in terms] if numbers else []
        for blob in layer.outputs:
            terms[blob] = _of_layer(layer, blob, operands, tables, sizes)
            require(len(terms[blob]) <= 2, f"'{blob.name}' is made of more than two parts")
    return terms[end]


def _of_layer(layer: Layer, blob: Blob, operands: list[list[Term]], tables: list[Array], sizes: Sizes) -> list[Term]:
    """Return the terms of an output of a layer, from those of its operands, and the table of a product."""
    first, *others = operands
    if SUM.fits(layer):
        require(layer.inputs[0].shape == layer.inputs[1].shape, f"'{layer.name}' broadcasts")
        return [*first, *(_times(others[0], -1.0) if layer["op_type"] == BinaryOp.SUB else others[0])]
    if PRODUCT.fits(layer) or layer.type == "RotaryEmbed":
        return _times(first, _broadcastable(tables[0], sizes.shape(blob)))
    if NEGATION.fits(layer) or SCALING.fits(layer):
        return _times(first, factor_of(layer))
    if layer.type == "Concat":
        parts = zip_longest(*operands)  # a part may have less terms
        none = [Term(np.full_like(t.elements, NO_ELEMENT), np.zeros_like(t.factors)) for t, *_ in operands]
        padded = ([t or other for t, other in zip(part, none, strict=True)] for part in parts)
        return [Term(*(np.concatenate(arrays, layer["axis"]) for arrays in zip(*t, strict=True))) for t in padded]
    return [Term(*(moved(layer, blob, values, sizes) for values in term)) for term in first]


def factor_of(layer: Layer) -> float:
    """Return the factor of a layer that may scale or negate its input; 1 for others."""
    return -1.0 if NEGATION.fits(layer) else factor(layer) if SCALING.fits(layer) else 1.0


def _times(terms: list[Term], factors: Array | float) -> list[Term]:
    with np.errstate(over="ignore"):
        scaled = [Term(term.elements, (term.factors * factors).astype(np.float32)) for term in terms]
    require(all(term.factors.shape == term.elements.shape for term in scaled), "a factor broadcasts")
    require(all(np.isfinite(term.factors).all() for term in scaled), "a factor would overflow")
    return scaled


def _broadcastable(table: Array, sizes: tuple[int, ...]) -> Array:
    """Return a table aligned with the outermost axes of the other operand, as ncnn does."""
    require(table.ndim == len(sizes) or 1 < table.ndim < len(sizes), "a table may belong to several axes")
    return table.reshape(*table.shape, *(1,) * (len(sizes) - table.ndim))


def moved(layer: Layer, blob: Blob, values: Array, sizes: Sizes) -> Array:
    """Return the values of the output `blob` of a layer that moves elements, from those of its input."""
    shape = sizes.shape(blob)
    values = _moved(layer, blob, values, shape, sizes)
    require(values.shape == shape, f"the numbers for dynamic sizes do not fit '{layer.name}'")
    return values


def _moved(layer: Layer, blob: Blob, values: Array, shape: tuple[int, ...], sizes: Sizes) -> Array:
    step = step_of(layer)
    if step is not None:
        fits = isinstance(step, Regroup) and values.size == prod(shape)
        return values.reshape(shape) if fits else values.transpose(step.perm) if isinstance(step, Reorder) else values
    if layer.type == "Tile":
        values = values.reshape((1,) * (len(shape) - values.ndim) + values.shape)
        return np.tile(values, [size // old for size, old in zip(shape, values.shape, strict=True)])
    if layer.type == "Pooling":
        require(values.ndim == 3, f"'{layer.name}' takes no image")
        return values[:, :: layer["stride_h"], :: layer["stride_w"]]
    if layer.type == "Crop":
        firsts = needed(starts_of(layer), f"the range of '{layer.name}' is unknown")
        starts = {axis: sizes.number(first) if first else 0 for axis, first in firsts.items()}
    else:
        axis = layer["axis"] % values.ndim
        before = layer.outputs[: layer.outputs.index(blob)]
        starts = {axis: sum(sizes.shape(other)[axis] for other in before)}
    return values[tuple(slice(starts.get(a, 0), starts.get(a, 0) + size) for a, size in enumerate(shape))]
