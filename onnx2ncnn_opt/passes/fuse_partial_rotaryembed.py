from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.codes import GemmC
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.shapes import assign_shapes
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.passes._constants import constant_array, is_constant, with_data
from onnx2ncnn_opt.passes._gemm import has_c, linear_of
from onnx2ncnn_opt.passes._trace import Sizes, moved
from onnx2ncnn_opt.passes._views import chain_above, end_of, shortest, steps_to, view_layers
from onnx2ncnn_opt.passes.fuse_multiheadattention import Chain, chain_from, columns_of
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import Replacement, known_shape, layer_pass, needed, require

_ROTARY = op("RotaryEmbed", interleaved=0)


class _Part(NamedTuple):
    """Queries or keys: a Slice cuts each row, one piece is rotated, and a Concat joins both; with the views between."""

    chain: Chain  # from the Gemm to the row
    cut: Layer
    rotary: Layer
    join: Layer
    before: tuple[Layer, ...]  # from the Slice to the rotation
    after: tuple[Layer, ...]  # from the rotation to the Concat
    other: tuple[Layer, ...]  # from the Slice to the Concat
    end: tuple[Layer, ...]

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers that a rotation of whole rows replaces."""
        return (self.cut, *self.before, self.rotary, *self.after, *self.other, self.join, *self.end)

    @property
    def blobs(self) -> list[Blob]:
        """All blobs from the Gemm on."""
        return [*self.chain.blobs, *(blob for layer in self.layers for blob in layer.outputs)]

    @property
    def gemm(self) -> Layer:
        """The Gemm that computes the rows."""
        return self.chain.source.known_producer

    @property
    def pieces(self) -> list[Blob]:
        """The outputs of the Slice, the rotated one first."""
        rotated = self.before[0].input if self.before else self.rotary.inputs[0]
        return sorted(self.cut.outputs, key=lambda blob: blob is not rotated)


@layer_pass(op("SDPA", int8_scale_term=0), exact=False, purpose="GPT-NeoX and Phi, which rotate a part of each head")
def fuse_partial_rotaryembed(sdpa: Layer) -> Replacement | None:
    """q, k ── Gemm ── Slice ── RotaryEmbed ── Concat ── SDPA   ⇒   q, k ── Gemm ── RotaryEmbed ── SDPA

    Products of queries and keys do not depend on the order of their columns. So the pass sorts the Gemms' columns: the
    halves of the rotated part go to the front of the row's halves. Other columns get a cosine of 1 and a sine of 0.
    """
    parts = [part for blob in sdpa.inputs[:2] if (part := _part(blob)) is not None]
    if len(parts) != 2:
        return None
    for part in parts:
        path = [*(layer.inputs[0] for layer in part.chain.layers), part.chain.end, *part.blobs[len(part.chain.blobs) :]]
        used = next((blob for blob in path if blob.uses != 1 or blob.is_output), None)
        require(used is None, f"'{used and used.name}' is also needed elsewhere")
    sizes = Sizes(blob for part in parts for blob in part.blobs)
    orders = {part.gemm: np.arange(part.gemm["constantN"]) for part in parts}
    rows = [_sorted_row(part, sizes, orders[part.gemm]) for part in parts]
    require(rows[0].halves == rows[1].halves, "queries and keys are cut in different ways")
    # Blobs with sorted columns get other names, because tools compare blobs with the model's values of their names.
    reads, added = dict[Blob, Blob](), list[tuple[Layer, Layer | None]]()
    sources = dict.fromkeys((*orders, *(layer for part in parts for layer in part.chain.layers)))
    for layer in sources:
        new = _sorted_columns(layer, orders[layer]) if layer in orders else layer
        inputs = [reads.get(blob, blob) for blob in layer.inputs]
        reads |= {blob: Blob(f"{blob.name}_sorted", blob.shape, blob.batch) for blob in layer.outputs}
        added.append((new.having(inputs=inputs, outputs=[reads[blob] for blob in layer.outputs]), layer))
    for part, row, blob in zip(parts, rows, sdpa.inputs, strict=False):
        made = _rotated(part, reads[part.cut.input], row.places, sizes)
        reads[blob] = made[-1].output
        added += ((layer, sdpa) for layer in made)
    removed = dict.fromkeys((*sources, *(layer for part in parts for layer in part.layers)))
    return Replacement(tuple(removed), added=added, reads=reads)


def _part(blob: Blob) -> _Part | None:
    end = chain_above(blob)
    join = (end[0].input if end else blob).producer
    if join is None or join.type != "Concat" or len(join.inputs) != 2:
        return None
    sides = [chain_above(piece) for piece in join.inputs]
    tops = [views[0].input if views else piece for views, piece in zip(sides, join.inputs, strict=True)]
    rotated = [i for i, top in enumerate(tops) if top.producer is not None and _ROTARY.fits(top.producer)]
    if len(rotated) != 1:
        return None
    [i] = rotated
    rotary, rest = tops[i].known_producer, tops[1 - i]
    before = chain_above(rotary.inputs[0])
    cut = rest.producer
    start = before[0].input if before else rotary.inputs[0]
    if cut is None or cut.type != "Slice" or len(cut.outputs) != 2 or {start, rest} != set(cut.outputs):
        return None
    chain = chain_from(cut.input, ("Gemm",))
    if chain is None or chain.rows is not None:
        return None
    return _Part(chain, cut, rotary, join, before, sides[i], sides[1 - i], end)


class _Row(NamedTuple):
    """The places of queries or keys in the blob that was cut, and the new order of the columns of a head."""

    places: Array
    halves: list[int]


def _sorted_row(part: _Part, sizes: Sizes, order: Array) -> _Row:
    """Sort the Gemm's columns of a part in `order`; refused if the rotation does not see the Gemm's rows as rows."""

    def through(values: Array, layers: Iterable[Layer]) -> Array:
        for layer in layers:
            values = moved(layer, layer.output, values, sizes)
        return values

    def joined(first: Array, second: Array) -> Array:
        sides = [through(first, part.after), through(second, part.other)]
        is_last = part.join.inputs[0] is end_of(part.pieces[1], part.other)
        return through(np.concatenate(sides[::-1] if is_last else sides, part.join["axis"]), part.end)

    shape = sizes.shape(part.cut.input)
    whole = np.arange(prod(shape)).reshape(shape)
    rotated, rest = (moved(part.cut, piece, whole, sizes) for piece in part.pieces)
    rotated = through(rotated, part.before)
    require(rotated.ndim == 3, "the rotation is not one of heads")
    places = joined(rotated, rest)
    marks = joined(np.broadcast_to(np.arange(1, rotated.shape[-1] + 1), rotated.shape), np.zeros_like(rest))
    require((marks == marks[:1, :1]).all(), "the heads are cut in different ways")
    elements = part.chain.elements(sizes).reshape(-1)
    for index in (rotated, places):
        columns = columns_of(*np.divmod(elements[index], len(order)), "rotation")
    count, width = rotated.shape[-1], places.shape[-1]
    require(count % 2 == width % 2 == 0, "a part has an odd size")
    by_mark = np.argsort(marks[0, 0], kind="stable")  # the columns that are not rotated come first
    others, turned = by_mark[: width - count], by_mark[width - count :]
    halves = np.concatenate(
        [side for pair in zip(np.split(turned, 2), np.split(others, 2), strict=True) for side in pair]
    )
    order[columns] = order[columns[:, halves]]
    return _Row(places, halves.tolist())


def _rotated(part: _Part, source: Blob, places: Array, sizes: Sizes) -> list[Layer]:
    """Return the layers from the blob that was cut, with sorted columns, to the rotation of whole rows."""
    shape, name = sizes.shape(part.cut.input), f"{part.rotary.output.name}_sorted"
    steps = steps_to(places, shape)
    short = None if steps is None else sizes.steps(source, shortest(shape, steps))
    made = view_layers(source, needed(short, "the rows are not a view of a blob"), like=[part.rotary])
    count, inputs = known_shape(part.rotary.output)[-1], [end_of(source, made)]
    margin = (places.shape[-1] - sizes.number(count)) // 2
    for table, kind in zip(part.rotary.inputs[1:], ("cos", "sin"), strict=True):
        require(known_shape(table)[-1] == sizes.number(count) // 2, f"'{table.name}' has other columns than the pairs")
        wide, value = Blob(f"{name}_{kind}", None, table.batch), float(kind == "cos")
        if is_constant(table):
            data = np.pad(constant_array(table.known_producer), ((0, 0), (0, margin)), constant_values=value)
            made.append(with_data(table.known_producer, data.astype(np.float32)).having(outputs=[wide]))
            made[-1].name = wide.name
        else:
            params = {"right": margin, "value": value}
            made.append(Layer("Padding", wide.name, [table], [wide], params).without_defaults())
        assign_shapes(made[-1])
        inputs.append(wide)
    rotary = part.rotary.having(inputs=inputs, outputs=[Blob(name, None, source.batch)])
    assign_shapes(rotary)
    return [*made, rotary]


def _sorted_columns(gemm: Layer, order: Array) -> Layer:
    """Return a Gemm with its columns in another order."""
    linear_of(gemm)  # refuses other forms
    n, k = gemm["constantN"], gemm["constantK"]
    b = gemm.weights.stored("B_data")
    data = b.data.reshape(n, k)[order] if gemm["transB"] else b.data.reshape(k, n)[:, order]
    weights = {"B_data": replace(b, data=np.ascontiguousarray(data).reshape(b.data.shape))}
    if has_c(gemm) and gemm["constant_broadcast_type_C"] == GemmC.N:
        c = gemm.weights.stored("C_data")
        weights["C_data"] = replace(c, data=c.data.reshape(-1)[order].reshape(c.data.shape))
    return gemm.having(weights=weights)
