from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.codes import UnaryOp
from onnx2ncnn_opt.ir.dim import by_axis
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.shapes import assign_shapes
from onnx2ncnn_opt.ir.view import Regroup, Reorder
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.passes._constants import constant_array, is_constant
from onnx2ncnn_opt.passes._rotation import find_rotation
from onnx2ncnn_opt.passes._trace import PRODUCT, SCALING, SUM, Sizes, can_trace, moved
from onnx2ncnn_opt.passes._views import Steps, chain_above, end_of, step_of, view_layers
from onnx2ncnn_opt.passes.halve_rotary_tables import TWICE
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import Edits, Refused, Replacement, attempt, graph_pass

# The longest spelling that exporters write has 22 layers.
_MOST_LAYERS = 32
_ANGLE = op("UnaryOp", op_type=frozenset({UnaryOp.COS, UnaryOp.SIN}))
_MOST_STEPS = 8  # layers from a factor up to its cosine


@graph_pass(exact=False, purpose="language models")
def fuse_rotaryembed(graph: Graph) -> Edits:
    """x * cos + concat(-x2, x1) * sin   ⇒   RotaryEmbed(x, cos, sin)

    In every spelling, with pairs of row halves or of neighbours: the pass only compares each result element's source
    elements and factors. The factors are constants, or cosines and sines that the net computes.
    """
    order = {layer: i for i, layer in enumerate(graph)}
    for root in graph.layers:
        if root.graph is graph and (root.type == "Concat" or SUM.fits(root)):
            for edit in attempt(root, _fuse, root, order):
                if isinstance(edit, Replacement):
                    order.update(dict.fromkeys(edit.made, order[root]))
                yield edit


def _fuse(root: Layer, order: dict[Layer, int]) -> Replacement | None:
    region = _region(root, order)
    if region is None:
        return None
    source, layers, _ = region
    tables = _Tables(region, root)
    rotation = find_rotation(source, layers, tables.sizes, tables.numbers)
    if rotation is None or len(rotation.before) + len(rotation.after) + 1 >= len(layers):
        return None
    (to_cos, cos), (to_sin, sin) = tables.layers("cos", rotation.cos), tables.layers("sin", rotation.sin)
    before = view_layers(source, rotation.before, like=[root])
    inputs = [end_of(source, before), cos, sin]
    rotated = Blob(root.output.name, rotation.shape, root.output.batch)
    new = Layer("RotaryEmbed", root.name, inputs, [rotated], {"interleaved": 1} if rotation.interleaved else {})
    made = [*to_cos, *to_sin, *before, new, *view_layers(rotated, rotation.after, like=[root])]
    reads = {root.output: made[-1].output}
    return Replacement(tuple(layers), added=[(layer, root) for layer in made], reads=reads)


# ---- the layers between a blob and the sum or Concat that may be its rotation


class _Region(NamedTuple):
    """The layers from a source to the sum or Concat that may be its rotation, in order, and the products' tables."""

    source: Blob
    layers: Sequence[Layer]
    tables: Mapping[Layer, Blob]


def _region(root: Layer, order: dict[Layer, int]) -> _Region | None:
    """Return the layers that compute `root` from the nearest blob.

    None if one of them does not only move, multiply and add, or if other layers read its result.
    """
    layers: list[Layer] = []
    tables: dict[Layer, Blob] = {}
    front = {root.output}
    while len(front) > 1 or not tables:
        producers = (blob.producer for blob in front if blob.producer is not None)
        layer = max(producers, key=lambda producer: order.get(producer, -1))
        table = _table_of(layer)
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
        front.update(blob for blob in layer.inputs if blob is not table)
    return _Region(front.pop(), layers[::-1], tables)


def _table_of(layer: Layer) -> Blob | None:
    """Return the table of a product: its only constant operand, or else its only operand of cosines or sines."""
    if not PRODUCT.fits(layer):
        return None
    for is_table in (is_constant, lambda blob: _angles(blob) is not None):
        tables = [blob for blob in layer.inputs if is_table(blob)]
        if tables:
            return tables[0] if len(tables) == 1 else None
    return None


def _is_linear(layer: Layer, table: Blob | None) -> bool:
    """Return True if the elements of a layer's result are sums of its operand's elements times known factors."""
    if PRODUCT.fits(layer):
        return table is not None
    return bool(layer.inputs) and not any(map(is_constant, layer.inputs)) and can_trace(layer)


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
        elif not (is_view or layer.type == "UnaryOp" or SCALING.fits(layer)):
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


class _Tables:
    """The tables of a region: constants, and random numbers in place of tables that the net computes.

    So `find_rotation` finds the rows of all tables alike.
    """

    def __init__(self, region: _Region, root: Layer) -> None:
        self._root = root
        angles = [_angles(blob) for blob in region.tables.values() if not is_constant(blob)]
        self._tables = {table.base: table for table in angles if table is not None}
        blobs = [region.source, *(blob for layer in region.layers for blob in layer.outputs), *self._tables]
        self.sizes = Sizes(blobs)
        random = np.random.default_rng(0)
        self._numbers = {base: self._draw(table, random) for base, table in self._tables.items()}

    def _draw(self, table: _Angles, random: np.random.Generator) -> tuple[Array, Array]:
        """Return random numbers for a table, and those from which a Tile or Concat repeats each."""
        start = table.chain[0].output if table.chain else table.base
        array = random.standard_normal(self.sizes.shape(start)).astype(np.float32)
        if table.axis is None:
            return array, array
        half = array.take(range(array.shape[table.axis] // 2), table.axis)
        return self._viewed(np.concatenate([half, half], table.axis), table.chain), half

    def numbers(self, table: Blob) -> Array:
        """Return the numbers of a product's table."""
        if is_constant(table):
            return constant_array(table.known_producer)
        angles = _angles(table)
        assert angles is not None
        return self._viewed(self._numbers[angles.base][0], angles.views)

    def _viewed(self, data: Array, layers: Sequence[Layer]) -> Array:
        """Return numbers after the views among the layers."""
        for layer in layers:
            data = moved(layer, layer.output, data, self.sizes) if step_of(layer) is not None else data
        return data

    def layers(self, name: str, rows: Array) -> tuple[list[Layer], Blob]:
        """Return the layers that compute the table whose rows start with these numbers, and its blob."""
        if not self._tables:
            blob = Blob(f"{self._root.output.name}_{name}", rows.shape)
            params = by_axis(rows.shape)
            return [
                Layer("MemoryData", f"{self._root.name}_{name}", (), [blob], params, {"data": rows.reshape(-1)})
            ], blob
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
        length, (width, rest) = self.sizes.size(len(rows)), divmod(numbers.size, len(rows))
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
