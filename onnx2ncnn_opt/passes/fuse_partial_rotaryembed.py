from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.codes import GemmC
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.shapes import assign_shapes
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.passes._constants import constant_array, is_constant, with_data
from onnx2ncnn_opt.passes._gemm import has_c, linear_of
from onnx2ncnn_opt.passes._trace import Region, Sizes, find_region, trace
from onnx2ncnn_opt.passes._views import before_views, end_of, view_layers
from onnx2ncnn_opt.passes.fuse_multiheadattention import Chain, chain_from, columns_of
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import Replacement, known_shape, layer_pass, needed, require

_ROTARY = op("RotaryEmbed", interleaved=0)


class _Part(NamedTuple):
    """Queries or keys: rows of a Gemm, of which the layers of the region rotate a part; `end` goes to the attention."""

    chain: Chain  # from the Gemm to the rows
    region: Region
    rotary: Layer
    end: Blob

    @property
    def gemm(self) -> Layer:
        """The Gemm that computes the rows."""
        return self.chain.source.known_producer


@layer_pass(op("SDPA", int8_scale_term=0), exact=False, purpose="GPT-NeoX and Phi, which rotate a part of each head")
def fuse_partial_rotaryembed(sdpa: Layer) -> Replacement | None:
    """q, k ── Gemm ── Slice ── RotaryEmbed ── Concat ── SDPA   ⇒   q, k ── Gemm ── RotaryEmbed ── SDPA

    Products of queries and keys do not depend on the order of their columns. So the pass sorts the Gemms' columns: the
    halves of the rotated part go to the front of the row's halves. Other columns get a cosine of 1 and a sine of 0.
    """
    if not all(before_views(blob).made_by("Concat") for blob in sdpa.inputs[:2]):
        return None
    order = {layer: i for i, layer in enumerate(sdpa.graph or ())}
    parts = [part for blob in sdpa.inputs[:2] if (part := _part(blob, order)) is not None]
    if len(parts) != 2:
        return None
    for part in parts:
        path = [*(layer.inputs[0] for layer in part.chain.layers), *part.region.blobs]
        used = next((blob for blob in path if blob.uses != 1 or blob.is_output), None)
        require(used is None, f"'{used and used.name}' is also needed elsewhere")
    sizes = Sizes(blob for part in parts for blob in (*part.chain.blobs, *part.region.blobs))
    orders = {part.gemm: np.arange(part.gemm["constantN"]) for part in parts}
    rows = [_sorted_row(part, sizes, orders[part.gemm]) for part in parts]
    require(rows[0][1] == rows[1][1], "queries and keys are cut in different ways")
    # Blobs with sorted columns get other names, because tools compare blobs with the model's values of their names.
    reads, added = dict[Blob, Blob](), list[tuple[Layer, Layer | None]]()
    sources = dict.fromkeys((*orders, *(layer for part in parts for layer in part.chain.layers)))
    for layer in sources:
        new = _sorted_columns(layer, orders[layer]) if layer in orders else layer
        inputs = [reads.get(blob, blob) for blob in layer.inputs]
        reads |= {blob: Blob(f"{blob.name}_sorted", blob.shape, blob.batch) for blob in layer.outputs}
        added.append((new.having(inputs=inputs, outputs=[reads[blob] for blob in layer.outputs]), layer))
    for part, (places, _), blob in zip(parts, rows, sdpa.inputs, strict=False):
        made = _rotated(part, reads[part.region.source], places, sizes)
        reads[blob] = made[-1].output
        added += ((layer, sdpa) for layer in made)
    removed = dict.fromkeys((*sources, *(layer for part in parts for layer in part.region.layers)))
    return Replacement(tuple(removed), added=added, reads=reads)


def _part(blob: Blob, order: Mapping[Layer, int]) -> _Part | None:
    region = find_region(blob.known_producer, order, lambda layer: layer.inputs[1] if _ROTARY.fits(layer) else None)
    chain = chain_from(region.source, ("Gemm",)) if region is not None else None
    if region is None or chain is None or chain.rows is not None or len(region.tables) != 1:
        return None
    [rotary] = region.tables
    return _Part(chain, region, rotary, blob)


def _sorted_row(part: _Part, sizes: Sizes, order: Array) -> tuple[Array, list[int]]:
    """Sort the Gemm's columns of a part in `order`; refused if the rotation does not see the Gemm's rows as rows.

    Return the places of the part in the blob that was cut, and the new order of the columns of a head.
    """
    source, layers, (rotary,) = part.region.source, part.region.layers, part.region.tables
    whole = trace(source, rotary.inputs[0], layers[: layers.index(rotary)], sizes)[0].elements
    marks = np.arange(2, whole.shape[-1] + 2).reshape(1, 1, -1)
    [(places, marked)] = trace(source, part.end, layers, sizes, lambda _: marks)
    require((marked == marked[:1, :1]).all(), "the heads are cut in different ways")
    elements = part.chain.elements(sizes).reshape(-1)
    for index in (whole, places):
        require(index.ndim == 3, "the rotation is not one of heads")
        columns = columns_of(*np.divmod(elements[index], len(order)), "rotation")
    count, width = whole.shape[-1], places.shape[-1]
    require(count % 2 == width % 2 == 0, "a part has an odd size")
    by_mark = np.argsort(marked[0, 0], kind="stable")  # the columns that are not rotated come first
    others, turned = by_mark[: width - count], by_mark[width - count :]
    halves = np.concatenate(
        [side for pair in zip(np.split(turned, 2), np.split(others, 2), strict=True) for side in pair]
    )
    order[columns] = order[columns[:, halves]]
    return places, halves.tolist()


def _rotated(part: _Part, source: Blob, places: Array, sizes: Sizes) -> list[Layer]:
    """Return the layers from the blob that was cut, with sorted columns, to the rotation of whole rows."""
    name = f"{part.rotary.output.name}_sorted"
    steps = needed(sizes.views(source, places), "the rows are not a view of a blob")
    made = view_layers(source, steps, like=[part.rotary])
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
