import math
from functools import reduce
from typing import NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.dim import by_axis, is_fixed, known
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.kernels import cost, surplus_of_attention
from onnx2ncnn_opt.ir.spec import Trait
from onnx2ncnn_opt.ir.view import Regroup, step_layer
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.passes._constants import stored
from onnx2ncnn_opt.passes._fold import one_factor
from onnx2ncnn_opt.passes._gemm import Linear, linear_of
from onnx2ncnn_opt.passes._linear import factor
from onnx2ncnn_opt.passes._trace import Sizes, can_trace, factor_of, trace
from onnx2ncnn_opt.passes.fuse_sdpa import SDPA, attention
from onnx2ncnn_opt.rewrite.edit import require_private
from onnx2ncnn_opt.rewrite.pattern import matches, op
from onnx2ncnn_opt.rewrite.rule import Replacement, fixed_shape, fixed_size, known_shape, layer_pass, needed, require

_PRODUCTS = tuple(attention())
_ROOT = op("Gemm", where=lambda gemm: len(gemm.inputs) == 1)
_LONGEST = 12  # layers between attention and a projection


class _Core(NamedTuple):
    """Attention without projections: its blobs are (heads, length, size) or, for one head, (length, size)."""

    q: Blob
    k: Blob
    v: Blob
    mask: Blob | None
    scale: float
    layers: tuple[Layer, ...]
    gate: Blob | None = None  # the factor of the queries: a column with one number in all rows


class Chain(NamedTuple):
    """The layers between two blobs, which only move elements or multiply them, and a factor of each row."""

    source: Blob
    end: Blob
    layers: tuple[Layer, ...]
    rows: Blob | None

    @property
    def blobs(self) -> list[Blob]:
        """The blobs on the way."""
        return [self.source, *(blob for layer in self.layers for blob in layer.outputs)]

    @property
    def factor(self) -> float:
        """The factor of all elements."""
        return reduce(one_factor, map(factor_of, self.layers), 1.0)

    def elements(self, sizes: Sizes) -> Array:
        """Return the index in the source of each element of the blob."""
        return trace(self.source, self.end, self.layers, sizes, lambda rows: np.ones(sizes.shape(rows)))[0].elements

    def by_head(self, sizes: Sizes) -> Array:
        """Return the elements as (heads, length, size)."""
        index = self.elements(sizes)
        require(index.ndim in (2, 3), "the blobs are not one matrix for each head")
        return index.reshape((1,) * (3 - index.ndim) + index.shape)


@layer_pass(_ROOT, exact=False, purpose="one layer instead of twelve, which ncnn can also quantise and run on a GPU")
def fuse_multiheadattention(root: Layer) -> Replacement | None:
    """x ── Gemm, split heads ── SDPA ── merge heads ── Gemm ──   ⇒   x ── MultiHeadAttention ──

    For every way to split and merge heads: the pass only traces each element to a column of the Gemm. Queries, keys and
    values may be parts of one Gemm. If one number multiplies all queries (0 for fully masked keys, by limit_mask_fill),
    the pass multiplies the keys' operand instead. Because of the keys' bias, that changes all scores of a query by the
    same number, which Softmax ignores. If factors multiply the rows of the result (move_nan_check_after_attention), the
    last Gemm's bias is added after them. With so many queries and keys that SDPA is faster, views included, it stays.
    """
    merged = chain_from(root.input, ("SDPA", "MatMul"))
    core = _core(merged.source.known_producer) if merged is not None else None
    if merged is None or core is None:
        return None
    require(merged.factor == 1, "the result of the attention is multiplied by a number")
    qkv = tuple(_projection(blob) for blob in (core.q, core.k, core.v))
    gemms = [chain.source.known_producer for chain in qkv]
    layers = dict.fromkeys([*merged.layers, *core.layers, *(layer for c in qkv for layer in c.layers), *gemms, root])
    require_private(tuple(layers), root.outputs)
    if SDPA.fits(core.layers[0]):
        views = [layer for layer in layers if layer not in core.layers and layer.type != "Gemm"]
        surplus = surplus_of_attention(core.q.known_shape[:-1], core.k.known_shape[-2])
        require(surplus < cost(views), "SDPA is faster for so many queries and keys")
    made, new = list[Layer](), _attention(root, core, merged, qkv)
    if core.gate is not None:
        require(merged.rows is None, "both the queries and the result are multiplied")
        x, gate = gemms[1].input, core.gate
        fits = x.shape is not None and (gate.known_shape[-2:], gate.batch) == ((x.shape[0], 1), x.batch)
        require(fits, f"'{gate.name}' does not have one number for each key")
        made = [_column(gate, root)] if len(gate.known_shape) > 2 else []
        out, factors = Blob(f"{x.name}_gate", x.shape, x.batch), made[0].output if made else gate
        made.append(Layer("BinaryOp", f"{root.name}_gate", [x, factors], [out], {"op_type": BinaryOp.MUL}))
        new = new.having(inputs=[gemms[0].input, out, gemms[2].input, new.inputs[-1]])
    elif merged.rows is not None:
        *made, new = _times_rows(new, root, merged.rows)
    return Replacement(tuple(layers), takes={root: new}, added=[(layer, root) for layer in made])


def _times_rows(attention: Layer, root: Layer, rows: Blob) -> list[Layer]:
    """Return the attention without its last bias, times a factor of each row, plus the bias."""
    y, bias = root.output, attention.weights["out_bias_data"]
    attention.weights["out_bias_data"] = np.zeros_like(bias)
    plain, gated = (Blob(f"{y.name}_{name}", y.shape, y.batch) for name in ("plain", "gated"))
    column = _column(rows, root)
    added = Blob(f"{y.name}_bias", (1, len(bias)))  # ncnn would align one axis with the rows if it has their number
    attention.outputs = (plain,)
    return [
        attention,
        column,
        Layer("BinaryOp", f"{root.name}_gated", [plain, column.output], [gated], {"op_type": BinaryOp.MUL}),
        Layer("MemoryData", added.name, [], [added], by_axis((1, len(bias))), {"data": bias}),
        Layer("BinaryOp", f"{root.name}_bias", [gated, added], (), {"op_type": BinaryOp.ADD}),
    ]


def _column(rows: Blob, root: Layer) -> Layer:
    """Return the view of the factors of rows as a matrix."""
    column = Blob(f"{rows.name}_rows", (rows.known_shape[-2], 1), rows.batch)
    return Layer("Reshape", f"{root.name}_rows", [rows], [column], step_layer(Regroup(column.known_shape))[1])


def _projection(blob: Blob) -> Chain:
    reason = f"'{blob.name}' does not consist of a Gemm's columns, moved by views"
    chain = needed(chain_from(blob, ("Gemm",)), reason)
    require(chain.rows is None, f"'{blob.name}' has a factor for each row")
    rows = known_shape(chain.source, 2)[chain.source.known_producer["output_transpose"]]
    require(blob.known_shape[-2:-1] == (rows,), "not all rows go into the attention")
    return chain


def _attention(root: Layer, core: _Core, merged: Chain, qkv: tuple[Chain, ...]) -> Layer:
    sizes = Sizes(blob for chain in (merged, *qkv) for blob in chain.blobs)
    shapes = {(1, *chain.end.known_shape)[-3::2] for chain in qkv}
    same = len(shapes) == 1 and all(map(is_fixed, shapes))
    require(same, "keys or values have other heads than the queries")
    heads, size = known(shapes.pop())
    q, k, v = qkv
    linears = [selected(chain, sizes) for chain in qkv]
    last = _last_linear(root, merged, sizes, (heads, size))
    widths = [linear.weight.shape[1] for linear in linears]
    require(last.weight.shape[0] == widths[0], "the result does not have the width of the queries")
    require(v.factor == 1, "the values are multiplied by a number")
    params = {
        "embed_dim": heads * size,
        "num_heads": heads,
        "weight_data_size": heads * size * widths[0],
        "kdim": widths[1],
        "vdim": widths[2],
    }
    inputs = [chain.source.known_producer.input for chain in qkv]
    blobs = inputs[: 1 if len(set(inputs)) == 1 else 2 if inputs[1] is inputs[2] else 3]
    if core.mask is not None:
        params["attn_mask"] = 1
        blobs.append(core.mask)
    scale = core.scale * q.factor * k.factor
    if not np.isclose(scale * size**0.5, 1, rtol=1e-6):  # older releases compute with this one
        params["scale"] = scale
    new = Layer("MultiHeadAttention", root.name, blobs, (), params)
    for name, linear in zip(("q", "k", "v", "out"), (*linears, last), strict=True):
        for kind, values in linear._asdict().items():
            weight = f"{name}_{kind}_data"
            new.weights[weight] = stored(new, weight, values).reshape(-1)
    return new


def _last_linear(root: Layer, merged: Chain, sizes: Sizes, heads: tuple[int, int]) -> Linear:
    """Return the last Gemm, with its columns in the order of the heads."""
    last = linear_of(root)
    columns = _merged_columns(merged.elements(sizes), *heads)
    require(last.weight.shape[1] == math.prod(heads), "the last Gemm reads only a part of the attention")
    weight = np.empty_like(last.weight)
    weight[:, columns] = last.weight
    return Linear(weight, last.bias)


# ---- attention itself


def _core(layer: Layer) -> _Core | None:
    if SDPA.fits(layer):
        q, k, v, *mask = layer.inputs
        scale = layer["scale"] or 1 / float(fixed_size(q, -1)) ** 0.5
        core = _Core(q, k, v, mask[0] if mask else None, scale, (layer,))
        return _without_gate(core) if mask else core
    for pattern in _PRODUCTS:
        for match in matches(pattern, layer):
            captures = match.captures
            product, scaling = captures["product"], captures.get("scale")
            assert isinstance(product, Layer)
            q, k, v = product.inputs[0], product.inputs[1], layer.inputs[1]
            plain = product["transB"] and not layer["transB"] and all(len(b.shape or ()) == 2 for b in (q, k, v))
            if plain and "mask" not in captures:
                scale = factor(scaling) if isinstance(scaling, Layer) else 1.0
                return _Core(q, k, v, None, scale, match.layers)
    return None


def _without_gate(core: _Core) -> _Core:
    """Return the attention before a column of equal numbers multiplies its queries, and the column as gate."""
    product = core.q.computed_by(BinaryOp.MUL, scalar=False)
    if product is None:
        return core
    plain, gate = product.inputs
    if plain.shape is None or plain.shape != core.q.shape or len(gate.shape or ()) != len(plain.shape):
        return core
    gate = view.input if (view := gate.made_by("ExpandDims")) is not None else gate
    return core._replace(q=plain, gate=gate, layers=(*core.layers, product)) if _has_equal_rows(gate) else core


def _has_equal_rows(blob: Blob, depth: int = 12) -> bool:
    """Return True if all rows of a matrix are proven equal."""
    layer, shape = blob.producer, blob.shape
    if layer is None or shape is None or len(shape) < 2 or any(size != 1 for size in shape[:-2]) or not depth:
        return False
    source = layer.input.producer if layer.type == "Reshape" else layer
    repeats_number = source is not None and source.type == "Interp" and source.inputs[0].shape == (1,)
    if shape[-2] == 1 or repeats_number:
        return True
    if layer.type == "MemoryData":
        rows = layer.weights["data"].reshape(fixed_shape(blob))
        return bool((rows == rows[..., :1, :]).all())
    if layer.has(Trait.VIEW) and layer.type != "Permute":
        if layer.input.shape is None or layer.input.shape[-2:] != shape[-2:]:
            return False
    elif layer.type == "Reduction":
        if layer["reduce_all"] or not layer["keepdims"] or list(layer["axes"]) != [-1]:
            return False
    elif layer.type != "BinaryOp" and not layer.has(Trait.ELEMENTWISE):
        return False
    return all(_has_equal_rows(operand, depth - 1) for operand in layer.inputs)


# ---- between attention and projections


def chain_from(blob: Blob, types: tuple[str, ...]) -> Chain | None:
    """Follow a blob up through moves and factors to the layer (of `types`) that computed its elements."""
    layers, rows, end = list[Layer](), None, blob
    while (layer := blob.producer) is not None and not (layer.type in types and len(layer.outputs) == 1):
        factors = _factors_of_rows(layer)
        if len(layers) == _LONGEST or (rows if factors else len(layer.inputs) != 1 or not can_trace(layer)):
            return None
        layers.insert(0, layer)
        blob, rows = layer.inputs[0], factors or rows
    return None if layer is None else Chain(blob, end, tuple(layers), rows)


def _factors_of_rows(layer: Layer) -> Blob | None:
    """Return the factor of each row that a layer multiplies by, if it is the same for all heads."""
    if not layer.computes(BinaryOp.MUL, scalar=False):
        return None
    x, factors = layer.inputs
    sizes, shape = factors.shape or (), layer.output.shape or ()
    fits = x.shape == shape and len(sizes) == len(shape) == 3 and sizes in ((1, 1, 1), (1, shape[1], 1))
    return factors if fits and factors.batch == layer.output.batch else None


def selected(chain: Chain, sizes: Sizes) -> Linear:
    """Return the rows of a Gemm's weights that compute the traced elements, head by head."""
    gemm = chain.source.known_producer
    weight, bias = linear_of(gemm.having(output_transpose=None))
    index = np.divmod(chain.by_head(sizes), sizes.shape(chain.source)[1])
    columns = columns_of(*index[::-1] if gemm["output_transpose"] else index, "attention").reshape(-1)
    return Linear(weight[columns], bias[columns])


def columns_of(rows: Array, columns: Array, before: str) -> Array:
    """Return the columns (heads, size) of elements (heads, length, size); refused unless a head has whole columns."""
    is_mixed = (rows != np.arange(rows.shape[1])[:, None]).any() or (columns != columns[:, :1]).any()
    require(not is_mixed, f"rows and columns are mixed before the {before}")
    return np.asarray(columns[:, 0])


def _merged_columns(index: Array, heads: int, size: int) -> Array:
    """Return the position (head, element) in the attention's result for each column that the last Gemm reads."""
    require(index.ndim == 2, "the last Gemm does not read a matrix")
    length = index.shape[0]
    head, rest = np.divmod(index, length * size)
    row, element = np.divmod(rest, size)
    require((row == np.arange(length)[:, None]).all(), "rows and columns are mixed after the attention")
    columns = head * size + element
    require((columns == columns[:1]).all(), "the heads are merged in different ways")
    require(len(set(columns[0].tolist())) == heads * size, "the last Gemm reads only a part of the attention")
    return np.asarray(columns[0])
