from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, PadMode, UnaryOp
from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym, by_axis, names_in, substituted
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.shapes import assign_shapes
from onnx2ncnn_opt.ir.view import Regroup, Reorder
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.passes._constants import constant_array, is_constant
from onnx2ncnn_opt.passes._linear import factor, times
from onnx2ncnn_opt.passes._views import (
    Steps,
    chain_above,
    end_of,
    inverse,
    moved,
    shortest,
    step_of,
    steps_to,
    view_layers,
)
from onnx2ncnn_opt.passes.halve_rotary_tables import TWICE
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import (
    Edits,
    Refused,
    Replacement,
    attempt,
    fixed_shape,
    graph_pass,
    known_shape,
    needed,
    require,
)

_NEGATION = op("UnaryOp", op_type=UnaryOp.NEG)
_SCALING = times("x")
_PRODUCT = op("BinaryOp", op_type=BinaryOp.MUL, with_scalar=0)
_SUM = op("BinaryOp", op_type=frozenset({BinaryOp.ADD, BinaryOp.SUB}), with_scalar=0)
_WINDOW = ("pad_left", "pad_right", "pad_top", "pad_bottom", "global_pooling", "adaptive_pooling")
# A slice with steps: every n-th row and column.
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
_ANGLE = op("UnaryOp", op_type=frozenset({UnaryOp.COS, UnaryOp.SIN}))
_MOST_STEPS = 8  # layers from a factor up to its cosine
_PRIMES = (11, 13, 17, 19)


class _Term(NamedTuple):
    """One addend of every element of a blob: the index of an element of the source, and its factor."""

    elements: Array
    factors: Array


class _Rotation(NamedTuple):
    """RotaryEmbed's tables, the shape of its operand, and the views before and after it."""

    cos: Array
    sin: Array
    interleaved: bool
    shape: Shape
    before: Steps
    after: Steps


@graph_pass(exact=False, purpose="language models")
def fuse_rotaryembed(graph: Graph) -> Edits:
    """x * cos + concat(-x2, x1) * sin   ⇒   RotaryEmbed(x, cos, sin)

    In every spelling, with pairs of row halves or of neighbours: the pass only compares each result element's source
    elements and factors. The factors are constants, or cosines and sines that the net computes.
    """
    order = {layer: i for i, layer in enumerate(graph)}
    for root in graph.layers:
        if root.graph is graph and (root.type == "Concat" or _SUM.fits(root)):
            for edit in attempt(root, _fuse, root, order):
                if isinstance(edit, Replacement):
                    order.update(dict.fromkeys(edit.made, order[root]))
                yield edit


def _fuse(root: Layer, order: dict[Layer, int]) -> Replacement | None:
    region = _region(root, order)
    if region is None:
        return None
    source, layers = region
    sample = _Sample(source, layers) if _is_computed(source, layers) else None
    rotation = sample.rotation() if sample else _rotation(source, layers)
    if rotation is None or len(rotation.before) + len(rotation.after) + 1 >= len(layers):
        return None
    make_table = sample.table if sample else partial(_constant_table, root)
    (to_cos, cos), (to_sin, sin) = make_table("cos", rotation.cos), make_table("sin", rotation.sin)
    before = view_layers(source, rotation.before, like=[root])
    inputs = [end_of(source, before), cos, sin]
    rotated = Blob(root.output.name, rotation.shape, root.output.batch)
    new = Layer("RotaryEmbed", root.name, inputs, [rotated], {"interleaved": 1} if rotation.interleaved else {})
    made = [*to_cos, *to_sin, *before, new, *view_layers(rotated, rotation.after, like=[root])]
    reads = {root.output: made[-1].output}
    return Replacement(tuple(layers), added=[(layer, root) for layer in made], reads=reads)


def _constant_table(root: Layer, name: str, data: Array) -> tuple[list[Layer], Blob]:
    """Return a MemoryData with a table, and its blob."""
    blob = Blob(f"{root.output.name}_{name}", data.shape)
    params = by_axis(data.shape)
    return [Layer("MemoryData", f"{root.name}_{name}", (), [blob], params, {"data": data.reshape(-1)})], blob


# ---- the layers between a blob and the sum or Concat that may be its rotation


def _region(root: Layer, order: dict[Layer, int]) -> tuple[Blob, list[Layer]] | None:
    """Return the nearest blob from which `root` is computed, and the layers from there on, in their order.

    None if one of them does not only move, multiply and add, or if other layers read its result.
    """
    layers: list[Layer] = []
    front = {root.output}
    while len(front) > 1 or not any(map(_PRODUCT.fits, layers)):
        producers = (blob.producer for blob in front if blob.producer is not None)
        layer = max(producers, key=lambda producer: order.get(producer, -1))
        if len(layers) == _MOST_LAYERS or not _is_linear(layer):
            return None
        for blob in layer.outputs:
            private = not blob.is_output and all(user in layers for user in blob.users)
            if layer is not root and not private:
                return None
        layers.append(layer)
        front.difference_update(layer.outputs)
        table = _factor_of(layer)
        front.update(blob for blob in layer.inputs if blob is not table)
    return front.pop(), layers[::-1]


def _factor_of(layer: Layer) -> Blob | None:
    """Return the factor of a product: its only constant operand, or else its only table."""
    if not _PRODUCT.fits(layer):
        return None
    for is_factor in (is_constant, lambda blob: _angles(blob) is not None):
        factors = [blob for blob in layer.inputs if is_factor(blob)]
        if factors:
            return factors[0] if len(factors) == 1 else None
    return None


def _is_linear(layer: Layer) -> bool:
    """Return True if `_terms` can express the elements of a layer's result."""
    if not layer.inputs:
        return False
    if _PRODUCT.fits(layer):
        return _factor_of(layer) is not None
    if any(map(is_constant, layer.inputs)):
        return False
    if layer.type in _PARTS:
        return layer.params.keys() <= _PARTS[layer.type]
    others = (_SUM, _NEGATION, _SCALING, _STRIDED)
    return step_of(layer) is not None or any(other.fits(layer) for other in others)


# ---- tables that the net computes, and dynamic sizes


class _Angles(NamedTuple):
    """A computed table of cosines or sines, the axis along which its halves are equal, and the views to a product.

    `chain` has the layers from the Tile that repeats each angle to the table; only interleaved tables have a Tile.
    """

    base: Blob
    axis: int | None
    views: tuple[Layer, ...]
    chain: tuple[Layer, ...] = ()

    def once(self) -> list[Layer]:
        """Return copies of the functions after the Tile that read the Tile's input, so each angle is there once."""
        source, made = self.chain[0].input, list[Layer]()
        for layer in (layer for layer in self.chain[1:] if step_of(layer) is None):
            once = Blob(f"{layer.output.name}_once", batch=layer.output.batch)
            made.append(layer.having(inputs=[source], outputs=[once]))
            assign_shapes(made[-1])
            source = once
        return made


def _angles(blob: Blob) -> _Angles | None:
    """Return the table of a factor; None if neither a cosine or sine nor a Tile of two computes it."""
    views = chain_above(blob)
    base = views[0].input if views else blob
    layer, axis, is_angle, chain = base.producer, None, False, list[Layer]()
    is_viewed = False  # before a view, only a Tile is accepted
    while layer is not None and layer.inputs and len(chain) < _MOST_STEPS:
        chain.insert(0, layer)
        if axis is None and (pair := _pair(layer)) is not None:
            return _Angles(base, pair, views, tuple(chain))
        is_view = step_of(layer) is not None
        is_viewed = is_viewed or is_view
        if TWICE.fits(layer) and axis is None and not is_viewed:
            axis = layer["axis"] % len(layer.output.known_shape)
        elif _ANGLE.fits(layer):
            is_angle = is_angle or not is_viewed
        elif not (is_view or layer.type == "UnaryOp" or _SCALING.fits(layer)):
            break
        layer = layer.inputs[0].producer
    return _Angles(base, axis, views) if is_angle and base.shape is not None else None


def _pair(layer: Layer) -> int | None:
    """Return the axis along which a Tile repeats a single number; None for other layers."""
    if layer.type != "Tile" or len(layer.input.shape or ()) != len(layer.output.shape or ()):
        return None
    sizes = zip(layer.input.known_shape, layer.output.known_shape, strict=True)
    other = [(axis, pair) for axis, pair in enumerate(sizes) if pair[0] != pair[1]]
    return other[0][0] if len(other) == 1 and other[0][1] == (1, 2) else None


def _is_computed(source: Blob, layers: Sequence[Layer]) -> bool:
    """Return True if a table is computed, or a size is dynamic."""
    blobs = (source, *(blob for layer in layers for blob in layer.outputs))
    dynamic = any(not isinstance(size, int) for blob in blobs for size in blob.shape or ())
    return dynamic or any((table := _factor_of(layer)) is not None and not is_constant(table) for layer in layers)


class _Primes:
    """Primes in place of dynamic sizes. None divides another size, so a number shows which sizes are its factors."""

    def __init__(self, sizes: Sequence[Dim]) -> None:
        dynamic = dict.fromkeys(size for size in sizes if isinstance(size, Sym))
        names = sorted(names_in(dynamic))
        require(len(names) <= len(_PRIMES), "too many sizes are dynamic")
        self._primes = dict(zip(names, _PRIMES, strict=False))
        fixed = [size for size in sizes if isinstance(size, int)]
        require(not any(size % prime == 0 for size in fixed for prime in self._primes.values()), "a size is a prime")
        self._sizes = {self._number(size): size for size in dynamic}
        require(len(self._sizes) == len(dynamic), "sizes are alike")

    def _number(self, size: Dim) -> int:
        number = substituted(size, self._primes)
        if not isinstance(number, int) or number <= 0:
            raise Refused("a size is not known")
        return number

    def shape(self, blob: Blob) -> tuple[int, ...]:
        """Return the shape of a blob in numbers."""
        return tuple(map(self._number, known_shape(blob)))

    def size(self, number: Dim) -> Dim:
        """Return the size that a number stands for."""
        assert isinstance(number, int)
        if number in self._sizes:
            return self._sizes[number]
        return next((dim * (number // of_dim) for of_dim, dim in self._sizes.items() if number % of_dim == 0), number)

    def steps(self, steps: Steps) -> Steps:
        """Return steps with the sizes that their numbers stand for."""
        return tuple(Regroup(tuple(map(self.size, s.dims))) if isinstance(s, Regroup) else s for s in steps)


class _Sample:
    """A copy of the layers of a rotation, with primes for dynamic sizes and random numbers for computed tables.

    `_rotation` then finds the views and the rows of the tables as for constants.
    """

    def __init__(self, source: Blob, layers: Sequence[Layer]) -> None:
        self._source, self._layers, self._root = source, layers, layers[-1]
        factors = (table for layer in layers if (table := _factor_of(layer)) is not None)
        self._tables = {angles.base: angles for angles in map(_angles, factors) if angles is not None}
        blobs = [source, *(blob for layer in layers for blob in layer.outputs), *self._tables]
        self._primes = _Primes([size for blob in blobs for size in known_shape(blob)])
        random = np.random.default_rng(0)
        self._numbers = {base: self._draw(table, random) for base, table in self._tables.items()}

    def _draw(self, table: _Angles, random: np.random.Generator) -> tuple[Array, Array]:
        """Return random numbers for a table, and those from which a Tile or Concat repeats each."""
        start = table.chain[0].output if table.chain else table.base
        array = random.standard_normal(self._primes.shape(start)).astype(np.float32)
        if table.axis is None:
            return array, array
        half = array.take(range(array.shape[table.axis] // 2), table.axis)
        return self._viewed(np.concatenate([half, half], table.axis), table.chain), half

    def rotation(self) -> _Rotation | None:
        """Return the rotation with dynamic sizes in its shapes, and the random numbers of its tables."""
        graph, copies = Graph(), dict[Blob, Blob]()

        def copy(blob: Blob) -> Blob:
            copies[blob] = Blob(blob.name, self._primes.shape(blob), blob.batch)
            return copies[blob]

        copy(self._source)
        for table in (table for layer in self._layers if (table := _factor_of(layer)) is not None):
            if table not in copies:
                constant = table.producer if is_constant(table) else None
                data = self._table(table) if constant is None else constant_array(constant)
                weights = {"data": data.reshape(-1)}
                graph.add(Layer("MemoryData", table.name, (), [copy(table)], by_axis(data.shape), weights))
        layers = []
        for layer in self._layers:
            inputs = [copies[blob] for blob in layer.inputs]
            layers.append(layer.having(inputs=inputs, outputs=map(copy, layer.outputs)))
        rotation = _rotation(copies[self._source], layers)
        if rotation is None:
            return None
        before, after = map(self._primes.steps, (rotation.before, rotation.after))
        return rotation._replace(shape=tuple(map(self._primes.size, rotation.shape)), before=before, after=after)

    def _table(self, blob: Blob) -> Array:
        angles = _angles(blob)
        assert angles is not None
        return self._viewed(self._numbers[angles.base][0], angles.views)

    def _viewed(self, data: Array, layers: Sequence[Layer]) -> Array:
        """Return numbers after the views among the layers."""
        for layer in layers:
            step = step_of(layer)
            if step is not None:
                shape = self._primes.shape(layer.output)
                data = data.transpose(step.perm) if isinstance(step, Reorder) else data.reshape(shape)
        return data

    def table(self, name: str, rows: Array) -> tuple[list[Layer], Blob]:
        """Return the layers from a computed table to one whose rows start with these numbers, and its blob."""
        for base, table in self._tables.items():
            numbers, half = self._numbers[base]
            once = table.once() if table.chain else []
            source = end_of(table.chain[0].input, once) if table.chain else base
            steps = self._steps_to(rows, half if table.chain else numbers, source)
            if steps is not None:
                layers = view_layers(source, steps, like=[self._root])
                for i, layer in enumerate(layers):
                    layer.name = f"{self._root.name}_{name}{i}"
                    layer.output.name = f"{self._root.output.name}_{name}{i}"
                return [*once, *layers], end_of(source, layers)
        raise Refused(f"the table of '{name}' has its rows in another order")

    def _steps_to(self, rows: Array, numbers: Array, source: Blob) -> Steps | None:
        """Return the steps from a blob with these numbers to a table whose rows start with `rows`; None without any."""
        length, (width, rest) = self._primes.size(len(rows)), divmod(numbers.size, len(rows))
        if rest:
            return None
        for shape, table in (
            ((length, width), numbers.reshape(-1, width)),
            ((width, length), numbers.reshape(width, -1).T),
        ):
            if np.array_equal(table[:, : rows.shape[1]], rows):
                steps: Steps = () if shape == source.shape else (Regroup(shape),)
                return steps if shape == (length, width) else (*steps, Reorder((1, 0)))
        return None


# ---- the terms of every element


def _terms(source: Blob, layers: Sequence[Layer]) -> list[_Term]:
    """Return the terms, elements of `source`, that add up to each element of the last layer's result."""
    sizes = fixed_shape(source)
    elements = np.arange(prod(sizes), dtype=np.int32).reshape(sizes)
    terms = {source: [_Term(elements, np.ones(sizes, np.float32))]}
    for layer in layers:
        operands = [terms[blob] for blob in layer.inputs if blob in terms]
        for blob in layer.outputs:
            terms[blob] = _of_layer(layer, blob, operands)
            require(len(terms[blob]) <= 2, f"'{blob.name}' is made of more than two parts")
    return terms[layers[-1].output]


def _of_layer(layer: Layer, blob: Blob, operands: list[list[_Term]]) -> list[_Term]:
    """Return the terms of an output of a layer, from those of its operands."""
    first, *others = operands
    if _SUM.fits(layer):
        require(layer.inputs[0].shape == layer.inputs[1].shape, f"'{layer.name}' broadcasts")
        return [*first, *(_times(others[0], -1.0) if layer["op_type"] == BinaryOp.SUB else others[0])]
    if _NEGATION.fits(layer):
        return _times(first, -1.0)
    if _PRODUCT.fits(layer):
        constant = next(b.producer for b in layer.inputs if b.producer is not None and is_constant(b))
        return _times(first, _broadcastable(constant, fixed_shape(blob)))
    if _SCALING.fits(layer):
        return _times(first, factor(layer))
    if layer.type == "Concat":
        require(all(len(terms) == len(first) for terms in others), f"'{layer.name}' joins sums and single elements")
        return [
            _Term(*(np.concatenate(arrays, layer["axis"]) for arrays in zip(*t, strict=True)))
            for t in zip(*operands, strict=True)
        ]
    return [_Term(*(_moved(layer, blob, values) for values in term)) for term in first]


def _times(terms: list[_Term], factors: Array | float) -> list[_Term]:
    with np.errstate(over="ignore"):
        scaled = [_Term(term.elements, (term.factors * factors).astype(np.float32)) for term in terms]
    require(all(term.factors.shape == term.elements.shape for term in scaled), "a factor broadcasts")
    require(all(np.isfinite(term.factors).all() for term in scaled), "a factor would overflow")
    return scaled


def _broadcastable(constant: Layer, sizes: tuple[int, ...]) -> Array:
    """Return a constant operand aligned with the outermost axes of the other operand, as ncnn does."""
    data = constant_array(constant)
    require(data.ndim == len(sizes) or 1 < data.ndim < len(sizes), f"'{constant.name}' may belong to several axes")
    return data.reshape(*data.shape, *(1,) * (len(sizes) - data.ndim))


def _moved(layer: Layer, blob: Blob, values: Array) -> Array:
    """Return the values of a layer's output `blob`, from those of its input."""
    if layer.type != "Pooling":
        return moved(layer, blob, values)
    require(values.ndim == 3, f"'{layer.name}' takes no image")
    return values[:, :: layer["stride_h"], :: layer["stride_w"]]


# ---- the test for a rotation


def _rotation(source: Blob, layers: Sequence[Layer]) -> _Rotation | None:
    """Return the rotation of `source` that layers compute, else None; refused if RotaryEmbed cannot compute it."""
    try:
        terms = _terms(source, layers)
    except Refused:
        return None
    result = fixed_shape(layers[-1].output)
    for lead, half, interleaved in _layouts(result) if len(terms) == 2 else ():
        shape, pair = ((*lead, half, 2), -1) if interleaved else ((*lead, 2, half), -2)
        sides = [[_Term(*(v.reshape(shape).take(i, pair) for v in term)) for term in terms] for i in (0, 1)]
        for a, b in product(*((side, side[::-1]) for side in sides)):
            if _is_rotated(a, b):
                elements = np.stack((a[0].elements, b[0].elements), pair)
                cos, sin = a[0].factors, -a[1].factors
                return _arranged(elements, cos, sin, interleaved, fixed_shape(source), result)
    return None


def _layouts(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int, bool]]:
    """Yield possible layouts of pairs: the axes before, the pairs of a row, and whether neighbours are pairs."""
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
    return all(np.array_equal(left, right) for left, right in pairs)


def _arranged(
    elements: Array, cos: Array, sin: Array, interleaved: bool, source: tuple[int, ...], result: tuple[int, ...]
) -> _Rotation:
    """Return the rotation with its rows after the heads, the axes along which the tables are constant."""
    lead = cos.shape[:-1]
    varying = [a for a in range(len(lead)) if any((t != t.take([0], a)).any() for t in (cos, sin))]
    require(len(varying) <= 1, "the heads are rotated in different ways")
    rows = varying or [len(lead) - 1] if lead else []
    heads = [a for a in range(len(lead)) if a not in rows]
    order = (*heads, *rows)
    elements = elements.transpose(*order, len(lead), len(lead) + 1)
    count, length, width = prod(lead[a] for a in heads), prod(lead[a] for a in rows), 2 * cos.shape[-1]
    shape = (count, length, width)  # ncnn's Vulkan rotates packed rows of a 2-D blob with another row's angles
    tables = [t.transpose(*order, len(lead)).reshape(count, length, -1)[0] for t in (cos, sin)]
    collected = needed(steps_to(elements, source), "the rotated elements are not a view of a blob")
    scattered = "the rows cannot be stored one after the other"
    before = needed(shortest(source, (*collected, Regroup(shape))), scattered)
    lead_out = (*(lead[a] for a in order), width)
    back = inverse((*lead, width), (Reorder((*order, len(lead))),)) if order != tuple(range(len(lead))) else ()
    after = needed(shortest(shape, (Regroup(lead_out), *back, Regroup(result))), scattered)
    return _Rotation(tables[0], tables[1], interleaved, shape, before, after)
