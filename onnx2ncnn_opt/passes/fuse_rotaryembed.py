from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, PadMode, UnaryOp
from onnx2ncnn_opt.ir.dim import Dim, Shape, known, named, symbol
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.view import Regroup, Reorder
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.passes._constants import constant_array, is_constant
from onnx2ncnn_opt.passes._linear import factor, times
from onnx2ncnn_opt.passes._views import (
    Steps,
    chain_above,
    end_of,
    in_layout,
    inverse,
    is_writable,
    moved,
    sample_sizes,
    shortest,
    step_of,
    steps_to,
    view_layers,
)
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import Miss, Refused, Replacement, attempt, graph_pass, known_shape, needed, require

_NEGATION = op("UnaryOp", op_type=UnaryOp.NEG)
_SCALING = times("x")
_PRODUCT = op("BinaryOp", op_type=BinaryOp.MUL, with_scalar=0)
_SUM = op("BinaryOp", op_type=frozenset({BinaryOp.ADD, BinaryOp.SUB}), with_scalar=0)
_WINDOW = ("pad_left", "pad_right", "pad_top", "pad_bottom", "global_pooling", "adaptive_pooling")
# Every n-th row and column: how a slice with a step is written.
_STRIDED = op(
    "Pooling",
    where=lambda pool: not any(pool[name] for name in _WINDOW),
    kernel_w=1,
    kernel_h=1,
    pad_mode=PadMode.VALID,
)
_PARTS = {"Concat": {"axis"}, "Slice": {"slices", "axis"}, "Crop": {"starts", "ends", "axes"}}
# The longest spelling that exporters write has 22 layers.
_MOST_LAYERS = 32
# Products of two blobs, each with the one that is no part of the rotated blob.
Tables: TypeAlias = Mapping[Layer, Blob]


class _Term(NamedTuple):
    """One addend of every element of a blob: the number of an element of the source, and its factor."""

    elements: Array
    by: Array


class _Rotation(NamedTuple):
    """RotaryEmbed's tables, the shape that it works on, and the views before and after it."""

    cos: Array
    sin: Array
    interleaved: bool
    shape: Shape
    way_in: Steps
    way_out: Steps


@graph_pass(exact=False, purpose="language models")
def fuse_rotaryembed(graph: Graph) -> Iterator[Replacement | Miss]:
    """x * cos + concat(-x2, x1) * sin   ⇒   RotaryEmbed(x, cos, sin)

    In every spelling, with the halves of a row or its neighbours as pairs: only the elements count that every
    element of the result is made of, and the factors. Those are constants, or elements of tables that the net computes.
    """
    order = {layer: i for i, layer in enumerate(graph)}
    for root in graph.layers:
        if root.graph is graph and (root.type == "Concat" or _SUM.fits(root)):
            for edit in attempt(root, _fuse, root, order):
                if isinstance(edit, Replacement):
                    order.update(dict.fromkeys(edit.made, order[root]))
                yield edit


def _fuse(root: Layer, order: dict[Layer, int]) -> Replacement | None:
    tables = _tables(root)
    region = _region(root, order, tables)
    if region is None:
        return None
    source, layers = region
    try:
        sizes = sample_sizes(known_shape(blob) for layer in layers for blob in (*layer.inputs, *layer.outputs))
        trace = _Trace(source, tables, sizes)
        terms = trace.terms(root.output)
    except Refused:
        return None
    rotation = _rotation(terms, trace.shape(root.output), trace.shape(source))
    if rotation is None or len(rotation.way_in) + len(rotation.way_out) + 1 >= len(layers):
        return None
    made: list[Layer] = []
    cos, sin = (trace.table(root, name, data, made) for name, data in (("cos", rotation.cos), ("sin", rotation.sin)))
    before = view_layers(source, trace.dynamic(rotation.way_in), like=[root])
    params = {"interleaved": 1} if rotation.interleaved else {}
    new = Layer("RotaryEmbed", root.name, [end_of(source, before), cos, sin], (), params)
    new.outputs = (Blob(root.output.name, trace.dynamic_shape(rotation.shape), root.output.batch),)
    made += [*before, new, *view_layers(new.output, trace.dynamic(rotation.way_out), like=[root])]
    reads = {root.output: made[-1].output}
    return Replacement(tuple(reversed(layers)), added=[(layer, root) for layer in made], reads=reads)


def _table(root: Layer, name: str, data: Array) -> Layer:
    blob = Blob(f"{root.output.name}_{name}", data.shape)
    params = {"h": data.shape[0], "w": data.shape[1]}
    return Layer("MemoryData", f"{root.name}_{name}", (), [blob], params, {"data": data.reshape(-1)})


# ---- the layers between a blob and the sum or Concat that may be its rotation


def _tables(root: Layer) -> dict[Layer, Blob]:
    """Return the products of two blobs that lead to `root`, each with the one that is no part of the rotated blob.

    That is the one which is made of other blobs than all the products have in common.
    """
    products: list[Layer] = []
    _sources(root.output, products)
    sources = {layer: [_sources(blob, []) for blob in layer.inputs] for layer in products}
    common = set.intersection(*(a | b for a, b in sources.values())) if products else set()
    found = {}
    for layer, sides in sources.items():
        others = [blob for blob, side in zip(layer.inputs, sides, strict=True) if side.isdisjoint(common)]
        if len(others) == 1:
            found[layer] = others[0]
    return found


def _sources(blob: Blob, products: list[Layer]) -> set[Blob]:
    """Return the blobs that linear layers make a blob of; products of two blobs end the way, and are added."""
    found, left, seen = set(), [blob], {blob}
    while left:
        read = left.pop()
        layer = read.producer
        if layer is None or len(seen) > _MOST_LAYERS or not (layer.inputs and _is_linear(layer, {layer: read})):
            found.add(read)
        elif _PRODUCT.fits(layer) and not any(map(is_constant, layer.inputs)):
            products.append(layer)
            found.add(read)
        else:
            left += [b for b in dict.fromkeys(layer.inputs) if b not in seen and not is_constant(b)]
            seen.update(layer.inputs)
    return found


def _region(root: Layer, order: dict[Layer, int], tables: Tables) -> tuple[Blob, list[Layer]] | None:
    """Return the nearest blob that all of `root` is made of, and the layers from there on, the last one first.

    Return None if one of them does anything else than move, multiply and add, or has a result that others need.
    """
    layers: list[Layer] = []
    front = {root.output}
    while len(front) > 1 or not any(map(_PRODUCT.fits, layers)):
        layer = max((b.producer for b in front if b.producer is not None), key=lambda maker: order.get(maker, -1))
        if len(layers) == _MOST_LAYERS or not _is_linear(layer, tables):
            return None
        for blob in layer.outputs:
            private = not blob.is_output and all(user in layers for user in blob.users)
            if layer is not root and not private:
                return None
        layers.append(layer)
        front.difference_update(layer.outputs)
        front.update(blob for blob in layer.inputs if not is_constant(blob) and blob is not tables.get(layer))
    return front.pop(), layers


def _is_linear(layer: Layer, tables: Tables) -> bool:
    """Return True if a layer makes its elements from others in a way that `_Trace` knows."""
    if not layer.inputs:
        return False
    constants = sum(map(is_constant, layer.inputs))
    if _PRODUCT.fits(layer):
        return constants == 1 or layer in tables
    if constants:
        return False
    if layer.type in _PARTS:
        return layer.params.keys() <= _PARTS[layer.type]
    others = (_SUM, _NEGATION, _SCALING, _STRIDED)
    return step_of(layer) is not None or any(other.fits(layer) for other in others)


# ---- the terms of every element


@dataclass(eq=False)
class _Trace:
    """The elements of `source` in each blob; `sizes` stand for dynamic dimensions."""

    source: Blob
    tables: Tables
    sizes: Mapping[str, int]
    _terms: dict[Blob, list[_Term]] = field(default_factory=dict)
    _numbers: dict[Blob, Array] = field(default_factory=dict)

    def shape(self, blob: Blob) -> tuple[int, ...]:
        """Return the shape of a blob, with samples for dynamic dimensions."""
        shape = known_shape(blob)
        is_plain = all(isinstance(size, int) or len(size.terms) == 1 for size in shape)
        require(is_plain, f"'{blob.name}' has a dynamic dimension that is a sum")
        return known(named(shape, self.sizes))

    def dynamic_shape(self, sizes: Shape) -> Shape:
        """Return the dynamic dimensions that samples stand for."""
        found = []
        for size in known(sizes):
            total: Dim = size
            for name, prime in self.sizes.items():
                if isinstance(total, int) and total % prime == 0:
                    total = symbol(name) * (total // prime)
            found.append(total)
        return tuple(found)

    def dynamic(self, steps: Steps) -> Steps:
        """Return steps with dynamic dimensions."""
        found = tuple(Regroup(self.dynamic_shape(s.dims)) if isinstance(s, Regroup) else s for s in steps)
        require(all(is_writable(step) for step in found), "the rows cannot be stored one after the other")
        return found

    def terms(self, blob: Blob) -> list[_Term]:
        """Return the terms, elements of the source, that add up to each element of a blob."""
        if blob not in self._terms:
            if blob is self.source:
                sizes = self.shape(blob)
                ones = np.ones(sizes, np.float32)
                terms = [_Term(np.arange(prod(sizes), dtype=np.int32).reshape(sizes), ones)]
            else:
                terms = self._of_layer(blob)
            require(len(terms) <= 2, f"'{blob.name}' is made of more than two parts")
            self._terms[blob] = terms
        return self._terms[blob]

    def _of_layer(self, blob: Blob) -> list[_Term]:
        layer = blob.producer
        assert layer is not None
        table = self.tables.get(layer)
        (first, *others) = [self.terms(b) for b in layer.inputs if not is_constant(b) and b is not table]
        if _SUM.fits(layer):
            second = _times(others[0], -1.0) if layer["op_type"] == BinaryOp.SUB else others[0]
            require(layer.inputs[0].shape == layer.inputs[1].shape, f"'{layer.name}' broadcasts")
            return [*first, *second]
        if _NEGATION.fits(layer):
            return _times(first, -1.0)
        if _PRODUCT.fits(layer):
            constants = (b.producer for b in layer.inputs if b.producer is not None and is_constant(b))
            by = constant_array(next(constants)).astype(np.float32) if table is None else self.numbers(table)
            return _times(first, _beside(layer, by, self.shape(blob)))
        if _SCALING.fits(layer):
            return _times(first, factor(layer))
        if layer.type == "Concat":
            require(all(len(terms) == len(first) for terms in others), f"'{layer.name}' joins sums and single elements")
            return [
                _Term(*(np.concatenate(p, layer["axis"]) for p in zip(*t, strict=True)))
                for t in zip(first, *others, strict=True)
            ]
        return [_Term(*(self._moved(layer, blob, values) for values in term)) for term in first]

    def _moved(self, layer: Layer, blob: Blob, values: Array) -> Array:
        """Return the values of a layer's input as its output `blob` has them."""
        step = step_of(layer)
        if step is not None:
            return in_layout(values, (step,), self.sizes)
        if layer.type == "Pooling":
            require(values.ndim == 3, f"'{layer.name}' takes no image")
            return values[:, :: layer["stride_h"], :: layer["stride_w"]]
        if layer.type != "Crop":
            return moved(layer, blob, values)
        axes = [axis % values.ndim for axis in layer["axes"]]
        require(len(axes) == len(layer["starts"]), f"the axes of '{layer.name}' are not all named")
        starts = {a: s + (s < 0) * values.shape[a] for a, s in zip(axes, layer["starts"], strict=True)}
        require(min(starts.values()) >= 0, f"'{layer.name}' starts before its input")
        sizes = self.shape(blob)
        return values[tuple(slice(starts.get(a, 0), starts.get(a, 0) + size) for a, size in enumerate(sizes))]

    # ---- tables that the net computes: each of their elements has a number of its own

    def numbers(self, blob: Blob) -> Array:
        """Return a number for each element of a table; elements with equal numbers are equal in every run."""
        if blob not in self._numbers:
            self._numbers[blob] = self._numbered(blob)
        return self._numbers[blob]

    def _numbered(self, blob: Blob) -> Array:
        layer, sizes = blob.producer, self.shape(blob)
        if layer is not None and layer.inputs and all(b.shape is not None for b in layer.inputs):
            if layer.type == "Concat":
                return np.concatenate([self.numbers(b) for b in layer.inputs], layer["axis"])
            if layer.type in ("Slice", "Crop") and len(layer.inputs) == 1:
                return self._moved(layer, blob, self.numbers(layer.input))
            if step_of(layer) is not None:
                return self._moved(layer, blob, self.numbers(layer.input))
            if len(layer.inputs) == 1 and layer.type in ("UnaryOp", "BinaryOp"):
                values = self.numbers(layer.input)
                kind = sum(ord(c) << (i % 7) for i, c in enumerate(str(sorted(map(str, layer.params.items())))))
                return -values if _NEGATION.fits(layer) else np.modf(values * 7919.37 + kind * 0.6180339887)[0] + 1.0
        first = len(self._numbers) + 1
        return np.random.default_rng(first).random(sizes) + 1.0

    def table(self, root: Layer, name: str, data: Array, made: list[Layer]) -> Blob:
        """Return a table of a row for each row of the rotated blob, with its cosines or sines first."""
        if not self.tables:
            made.append(_table(root, name, data))
            return made[-1].output
        ends = dict.fromkeys(self.tables.values())
        above = (layer.input for blob in ends for layer in chain_above(blob))
        blobs = dict.fromkeys((*ends, *above))
        ways = [(steps, blob) for blob in blobs if (steps := _way_to(data, self.numbers(blob))) is not None]
        way = min(ways, key=lambda way: len(way[0]), default=None)
        steps, blob = needed(way, f"no blob has the {name} of each row next to each other")
        layers = view_layers(blob, self.dynamic(steps), like=[root])
        made += layers
        return end_of(blob, layers)


def _way_to(data: Array, numbers: Array) -> Steps | None:
    """Return the steps from a blob to rows that begin with those of `data`; None if they are not in it."""
    rows, width = data.shape
    if numbers.size % rows:
        return None
    sizes = (rows, numbers.size // rows)
    ways: list[tuple[Steps, Array]] = [((), numbers)] if numbers.shape == sizes else []
    ways.append(((Regroup(sizes),), numbers.reshape(sizes)))
    ways.append(((Regroup(sizes[::-1]), Reorder((1, 0))), numbers.reshape(sizes[::-1]).T))
    for steps, table in ways:
        if np.array_equal(table[:, :width], data):
            return steps[1:] if steps and steps[0] == Regroup(numbers.shape) else steps
    return None


def _times(terms: list[_Term], by: Array | float) -> list[_Term]:
    with np.errstate(over="ignore"):
        found = [_Term(term.elements, np.asarray(term.by * by)) for term in terms]
    require(all(term.by.shape == term.elements.shape for term in found), "a factor broadcasts")
    require(all(np.isfinite(term.by).all() for term in found), "a factor would overflow")
    return found


def _beside(layer: Layer, by: Array, sizes: tuple[int, ...]) -> Array:
    """Return a factor, broadcast along the axes of the other operand as ncnn does it: from the outermost on."""
    require(by.ndim == len(sizes) or 1 < by.ndim < len(sizes), f"a factor of '{layer.name}' may belong to several axes")
    return by.reshape(*by.shape, *(1,) * (len(sizes) - by.ndim))


# ---- whether that is a rotation


def _rotation(terms: Sequence[_Term], result: tuple[int, ...], source: tuple[int, ...]) -> _Rotation | None:
    """Return the rotation of a blob that terms of `result` are; None if it is none, refused if RotaryEmbed lacks it."""
    for lead, half, interleaved in _layouts(result):
        shape, pair = ((*lead, half, 2), -1) if interleaved else ((*lead, 2, half), -2)
        sides = [[_Term(*(v.reshape(shape).take(i, pair) for v in term)) for term in terms] for i in (0, 1)]
        for a, b in product(*((side, side[::-1]) for side in sides)):
            if len(terms) == 2 and _is_rotated(a, b):
                elements = np.stack((a[0].elements, b[0].elements), pair)
                return _arranged(elements, a[0].by, -a[1].by, interleaved, source, result)
    return None


def _layouts(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int, bool]]:
    """Yield possible places of pairs: the axes before, the number of pairs of a row, and whether in neighbours."""
    *lead, width = shape
    if lead and lead[-1] == 2:
        yield (*lead[:-1],), width, False
    if lead and width == 2:
        yield (*lead[:-1],), lead[-1], True
    if width % 2 == 0:
        yield (*lead,), width // 2, False
        yield (*lead,), width // 2, True


def _is_rotated(a: Sequence[_Term], b: Sequence[_Term]) -> bool:
    """Return True if a is x * cos - y * sin, and b is y * cos + x * sin."""
    (x, cos), (y, minus_sin) = a
    (y2, cos2), (x2, sin) = b
    pairs = ((x, x2), (y, y2), (cos, cos2), (minus_sin, -sin))
    return all(np.array_equal(one, other) for one, other in pairs)


def _arranged(
    elements: Array, cos: Array, sin: Array, interleaved: bool, source: tuple[int, ...], result: tuple[int, ...]
) -> _Rotation:
    """Return the rotation with its rows after the heads: those axes along which the tables do not change."""
    lead = cos.shape[:-1]
    varying = [a for a in range(len(lead)) if any((t != t.take([0], a)).any() for t in (cos, sin))]
    require(len(varying) <= 1, "the heads are rotated in different ways")
    rows = varying or [len(lead) - 1] if lead else []
    heads = [a for a in range(len(lead)) if a not in rows]
    order = (*heads, *rows)
    elements = elements.transpose(*order, len(lead), len(lead) + 1)
    count, length, width = prod(lead[a] for a in heads), prod(lead[a] for a in rows), 2 * cos.shape[-1]
    shape = (count, length, width) if count > 1 else (length, width)
    tables = [t.transpose(*order, len(lead)).reshape(count, length, -1)[0] for t in (cos, sin)]
    collected = needed(steps_to(elements, source), "the rotated elements are not a view of a blob")
    scattered = "the rows cannot be stored one after the other"
    way_in = needed(shortest(source, (*collected, Regroup(shape))), scattered)
    lead_out = (*(lead[a] for a in order), width)
    back = inverse((*lead, width), (Reorder((*order, len(lead))),)) if order != tuple(range(len(lead))) else ()
    way_out = needed(shortest(shape, (Regroup(lead_out), *back, Regroup(result))), scattered)
    return _Rotation(tables[0], tables[1], interleaved, shape, way_in, way_out)
