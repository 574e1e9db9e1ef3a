from collections.abc import Sequence
from itertools import accumulate
from math import prod
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
from onnx2ncnn_opt.passes._trace import PRODUCT, SCALING, SUM, Region, Sizes, find_region, moved
from onnx2ncnn_opt.passes._views import Steps, chain_above, end_of, step_of, view_layers
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import Edits, Refused, Replacement, attempt, graph_pass

_ANGLE = op("UnaryOp", op_type=frozenset({UnaryOp.COS, UnaryOp.SIN}))
_MOST_STEPS = 8  # layers from a factor up to its cosine
_MOVES = frozenset({"Concat", "Crop", "Interp", "Padding", "Slice", "Tile"})  # of a table, after its cosine


@graph_pass(exact=False, purpose="language models")
def fuse_rotaryembed(graph: Graph) -> Edits:
    """x * cos + concat(-x2, x1) * sin   ⇒   RotaryEmbed(x, cos, sin)

    In every spelling, with pairs of row halves or of neighbours: the pass only compares each result element's source
    elements and factors. The factors are constants, or cosines and sines that the net computes. Rows and columns that
    are not rotated, before or after the others, get a cosine of 1 and a sine of 0.
    """
    order = {layer: i for i, layer in enumerate(graph)}
    for root in reversed(graph.layers):  # so a Concat with rows or columns that are not rotated comes first
        if root.graph is graph and (root.type == "Concat" or SUM.fits(root)):
            for edit in attempt(root, _fuse, root, order):
                if isinstance(edit, Replacement):
                    order.update(dict.fromkeys(edit.made, order[root]))
                yield edit


def _fuse(root: Layer, order: dict[Layer, int]) -> Replacement | None:
    region = find_region(root, order, _table_of)
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


def _table_of(layer: Layer) -> Blob | None:
    """Return the table of a product: its only constant operand, or else its only operand of cosines or sines."""
    if not PRODUCT.fits(layer):
        return None
    for is_table in (is_constant, lambda blob: _angles(blob) is not None):
        tables = [blob for blob in layer.inputs if is_table(blob)]
        if tables:
            return tables[0] if len(tables) == 1 else None
    return None


# ---- tables that the net computes, and dynamic sizes


class _Angles(NamedTuple):
    """A table of cosines or sines that the net computes, and the views from it to a product.

    `chain` has the layers from a Tile or Concat that repeats each angle along an axis to the table.
    """

    base: Blob
    views: tuple[Layer, ...]
    axis: int = 0
    chain: tuple[Layer, ...] = ()

    @property
    def source(self) -> Blob:
        """The angles before they are repeated; the table itself without a chain."""
        return self.chain[0].inputs[0] if self.chain else self.base

    def once(self) -> list[Layer]:
        """Return copies of the chain's functions that read the source."""
        source, made = self.source, list[Layer]()
        for layer in (layer for layer in self.chain[1:] if step_of(layer) is None):
            once = Blob(f"{layer.output.name}_once", batch=layer.output.batch)
            made.append(layer.having(inputs=[source], outputs=[once]))
            assign_shapes(made[-1])
            source = once
        return made


def _angles(blob: Blob) -> _Angles | None:
    """Return the table of a factor; None if neither a cosine or sine nor a repeat of angles computes it."""
    views = chain_above(blob)
    base = views[0].input if views else blob
    layer, chain, is_angle, is_plain = base.producer, list[Layer](), False, True
    while layer is not None and layer.inputs and len(chain) < _MOST_STEPS:
        chain.insert(0, layer)
        axis = _repeated(layer) if is_plain else None
        if axis is not None:
            return _Angles(base, views, axis, tuple(chain))
        is_angle = is_angle or _ANGLE.fits(layer)
        is_plain = is_plain and (step_of(layer) is not None or layer.type == "UnaryOp" or SCALING.fits(layer))
        if not is_plain and layer.type not in _MOVES:
            break
        layer = layer.inputs[0].producer
    return _Angles(base, views) if is_angle and base.shape is not None else None


def _repeated(layer: Layer) -> int | None:
    """Return the axis along which a Tile or Concat repeats its input once; None for other layers."""
    before, after = layer.inputs[0].shape or (), layer.outputs[0].shape or ()
    is_twice = layer.type == "Concat" and layer.inputs == (layer.inputs[0],) * 2
    if not (layer.type == "Tile" or is_twice) or len(before) != len(after):
        return None
    axes = [axis for axis, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    return axes[0] if len(axes) == 1 and after[axes[0]] == 2 * before[axes[0]] else None


class _Tables:
    """The tables of a region: constants, and different numbers in place of tables that the net computes.

    So `find_rotation` finds the rows of all tables alike.
    """

    def __init__(self, region: Region, root: Layer) -> None:
        self._root = root
        angles = [_angles(blob) for blob in region.tables.values() if not is_constant(blob)]
        self._tables = {table.base: table for table in angles if table is not None}
        sources = [table.source for table in self._tables.values()]
        self.sizes = Sizes([*region.blobs, *self._tables, *sources])
        counts = [0, *accumulate(prod(self.sizes.shape(source)) for source in sources)]
        named = zip(self._tables.items(), counts, strict=False)
        self._numbers = {base: self._number(table, count) for (base, table), count in named}

    def _number(self, table: _Angles, start: int) -> tuple[Array, Array]:
        """Return numbers for a table, and those that are each there once."""
        shape = self.sizes.shape(table.source)
        once = (1 / (np.pi + start + np.arange(prod(shape)))).astype(np.float32).reshape(shape)
        repeated = np.concatenate([once, once], table.axis) if table.chain else once
        return self._viewed(repeated, table.chain[1:]), once

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
            blob, data = Blob(f"{self._root.output.name}_{name}", rows.shape), {"data": rows.reshape(-1)}
            return [Layer("MemoryData", f"{self._root.name}_{name}", (), [blob], by_axis(rows.shape), data)], blob
        neutral = float(name == "cos")  # of rows and columns that are not rotated
        margins = _margins(rows != neutral)
        inner = rows[margins["top"] : len(rows) - margins["bottom"], : rows.shape[1] - margins["right"]]
        for base, table in self._tables.items():
            once = table.once()
            source = end_of(table.source, once)
            steps = self._steps_to(inner, self._numbers[base][1], source)
            if steps is not None:
                layers = view_layers(source, steps, like=[self._root])
                if inner.shape != rows.shape:
                    ends = [end_of(source, layers)], [Blob("", None, source.batch)]
                    layers.append(Layer("Padding", "", *ends, {**margins, "value": neutral}).without_defaults())
                    assign_shapes(layers[-1])
                for i, layer in enumerate(layers):
                    layer.name = f"{self._root.name}_{name}{i}"
                    layer.output.name = f"{self._root.output.name}_{name}{i}"
                return [*once, *layers], end_of(source, layers)
        raise Refused(f"the table of '{name}' has its rows in another order")

    def _steps_to(self, rows: Array, numbers: Array, source: Blob) -> Steps | None:
        """Return the steps from a blob with these numbers to a table whose rows start with `rows`; None without any."""
        count, rest = divmod(numbers.size, len(rows))
        if rest:
            return None
        length, width = self.sizes.sizes((len(rows), count))
        for shape, table in (
            ((length, width), numbers.reshape(-1, count)),
            ((width, length), numbers.reshape(count, -1).T),
        ):
            if np.array_equal(table[:, : rows.shape[1]], rows):
                steps: Steps = () if shape == source.shape else (Regroup(shape),)
                return steps if shape == (length, width) else (*steps, Reorder((1, 0)))
        return None


def _margins(inner: Array) -> dict[str, int]:
    """Return the numbers of rows and columns around the elements that are True, as parameters of a Padding."""
    rows, columns = (np.flatnonzero(inner.any(axis)) for axis in (1, 0))
    if not rows.size:
        return dict.fromkeys(("top", "bottom", "right"), 0)
    return {
        "top": int(rows[0]),
        "bottom": len(inner) - 1 - int(rows[-1]),
        "right": inner.shape[1] - 1 - int(columns[-1]),
    }
