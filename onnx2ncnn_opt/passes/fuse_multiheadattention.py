import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.dim import by_axis, is_fixed
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.kernels import cost, surplus_of_attention
from onnx2ncnn_opt.ir.spec import Trait
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.passes._constants import stored
from onnx2ncnn_opt.passes._fold import one_factor
from onnx2ncnn_opt.passes._gemm import Linear, linear_of
from onnx2ncnn_opt.passes._linear import factor, times
from onnx2ncnn_opt.passes._views import moved, step_of
from onnx2ncnn_opt.passes.fuse_sdpa import SDPA, attention
from onnx2ncnn_opt.rewrite.edit import require_private
from onnx2ncnn_opt.rewrite.pattern import matches, op
from onnx2ncnn_opt.rewrite.rule import Replacement, fixed_shape, fixed_size, layer_pass, needed, require

_SCALING = times("x")
_PRODUCTS = tuple(attention())
_ROOT = op("Gemm", where=lambda gemm: len(gemm.inputs) == 1)


class _Core(NamedTuple):
    """Attention without projections: its blobs are (heads, length, size) or, for one head, (length, size)."""

    q: Blob
    k: Blob
    v: Blob
    mask: Blob | None
    scale: float
    layers: tuple[Layer, ...]
    gate: Blob | None = None  # the factor of the queries: a column with one number in all rows


@dataclass
class _Trace:
    """The origin of a blob's elements: `index` has their indices in `source`; `layers` are the layers between."""

    source: Blob
    index: Array
    factor: float = 1.0
    layers: list[Layer] = field(default_factory=list)
    rows: Blob | None = None  # a factor of each row

    @property
    def producer(self) -> Layer:
        """The layer that computed the elements."""
        return self.source.known_producer

    @property
    def by_head(self) -> Array:
        """The index as (heads, length, size)."""
        require(self.index.ndim in (2, 3), "the blobs are not one matrix for each head")
        return self.index.reshape((1,) * (3 - self.index.ndim) + self.index.shape)


@layer_pass(_ROOT, exact=False, purpose="one layer instead of twelve, which ncnn can also quantise and run on a GPU")
def fuse_multiheadattention(root: Layer) -> Replacement | None:
    """x ── Gemm, split heads ── SDPA ── merge heads ── Gemm ──   ⇒   x ── MultiHeadAttention ──

    For every way to split and merge heads: the pass only traces each element to a column of the Gemm. Queries, keys and
    values may be parts of one Gemm. If one number multiplies all queries (0 for fully masked keys, by limit_mask_fill),
    the pass multiplies the keys' operand instead. Because of the keys' bias, that changes all scores of a query by the
    same number, which Softmax ignores. If factors multiply the rows of the result (move_nan_check_after_attention), the
    last Gemm's bias is added after them. With so many queries and keys that SDPA is faster, views included, it stays.
    """
    merged = _trace(root.input, ("SDPA", "MatMul"))
    core = _core(merged.producer) if merged is not None else None
    if merged is None or core is None:
        return None
    require(merged.factor == 1, "the result of the attention is multiplied by a number")
    q, k, v = (_projection(blob) for blob in (core.q, core.k, core.v))
    gemms = [trace.producer for trace in (q, k, v)]
    layers = dict.fromkeys([*merged.layers, *core.layers, *q.layers, *k.layers, *v.layers, *gemms, root])
    require_private(tuple(layers), root.outputs)
    if SDPA.fits(core.layers[0]):
        scores = math.prod(fixed_shape(core.q)[:-1]) * fixed_size(core.k, -2)
        views = [layer for layer in layers if layer not in core.layers and layer.type != "Gemm"]
        require(surplus_of_attention(scores) < cost(views), "SDPA is faster for so many queries and keys")
    made, new = list[Layer](), _attention(root, core, merged, (q, k, v))
    if core.gate is not None:
        require(merged.rows is None, "both the queries and the result are multiplied")
        x, gate = gemms[1].input, core.gate
        fits = x.shape is not None and (gate.shape, gate.batch) == ((x.shape[0], 1), x.batch)
        require(fits, f"'{gate.name}' does not have one number for each key")
        out = Blob(f"{x.name}_gate", x.shape, x.batch)
        made = [Layer("BinaryOp", f"{root.name}_gate", [x, gate], [out], {"op_type": BinaryOp.MUL})]
        new = new.having(inputs=[gemms[0].input, out, gemms[2].input, new.inputs[-1]])
    elif merged.rows is not None:
        *made, new = _times_rows(new, root, merged.rows)
    return Replacement(tuple(layers), takes={root: new}, added=[(layer, root) for layer in made])


def _times_rows(attention: Layer, root: Layer, rows: Blob) -> list[Layer]:
    """Return the attention without its last bias, times a factor of each row, plus the bias."""
    y, bias = root.output, attention.weights["out_bias_data"]
    attention.weights["out_bias_data"] = np.zeros_like(bias)
    plain, gated = (Blob(f"{y.name}_{name}", y.shape, y.batch) for name in ("plain", "gated"))
    column = Blob(f"{rows.name}_rows", (fixed_size(rows, -2), 1), rows.batch)
    added = Blob(f"{y.name}_bias", (len(bias),))
    attention.outputs = (plain,)
    return [
        attention,
        Layer("Reshape", f"{root.name}_rows", [rows], [column], by_axis(fixed_shape(column))),
        Layer("BinaryOp", f"{root.name}_gated", [plain, column], [gated], {"op_type": BinaryOp.MUL}),
        Layer("MemoryData", added.name, [], [added], by_axis((len(bias),)), {"data": bias}),
        Layer("BinaryOp", f"{root.name}_bias", [gated, added], (), {"op_type": BinaryOp.ADD}),
    ]


def _projection(blob: Blob) -> _Trace:
    reason = f"'{blob.name}' does not consist of a Gemm's columns, moved by views of known sizes"
    trace = needed(_trace(blob, ("Gemm",)), reason)
    require(trace.rows is None, f"'{blob.name}' has a factor for each row")
    return trace


def _attention(root: Layer, core: _Core, merged: _Trace, qkv: tuple[_Trace, ...]) -> Layer:
    linears = [_selected(trace) for trace in qkv]
    q, k, v = qkv
    heads, size = q.by_head.shape[::2]
    require(
        k.by_head.shape[::2] == v.by_head.shape[::2] == (heads, size),
        "keys or values have other heads than the queries",
    )
    last = _last_linear(root, merged, heads, size)
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
    inputs = [trace.producer.input for trace in qkv]
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


def _last_linear(root: Layer, merged: _Trace, heads: int, size: int) -> Linear:
    """Return the last Gemm, with its columns in the order of the heads."""
    last = linear_of(root)
    columns = _merged_columns(merged, heads, size)
    require(last.weight.shape[1] == heads * size, "the last Gemm reads only a part of the attention")
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
    product = core.q.producer
    if product is None or not product.computes(BinaryOp.MUL, scalar=False):
        return core
    plain, gate = product.inputs
    view = gate.producer
    if view is None or view.type != "ExpandDims" or plain.shape != core.q.shape or not _has_equal_rows(view.input):
        return core
    return core._replace(q=plain, gate=view.input, layers=(*core.layers, product))


def _has_equal_rows(blob: Blob, depth: int = 12) -> bool:
    """Return True if all rows of a matrix are proven equal."""
    layer, shape = blob.producer, blob.shape
    if layer is None or shape is None or len(shape) < 2 or any(size != 1 for size in shape[:-2]) or not depth:
        return False
    if shape[-2] == 1:
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


def _trace(blob: Blob, types: tuple[str, ...], depth: int = 12) -> _Trace | None:
    """Follow a blob up through views, Slices and factors to the layer (of `types`) that computed its elements."""
    layer = blob.producer
    if layer is None or not is_fixed(blob.shape) or not depth:
        return None
    if layer.type in types and len(layer.outputs) == 1:
        sizes = fixed_shape(blob)
        return _Trace(blob, np.arange(int(np.prod(sizes)), dtype=np.int32).reshape(sizes))
    factors, is_scaling = _factors_of_rows(layer), _SCALING.fits(layer)
    is_move = len(layer.inputs) == 1 and (step_of(layer) is not None or layer.type == "Slice")
    above = _trace(layer.inputs[0], types, depth - 1) if factors or is_scaling or is_move else None
    if above is None or (factors and above.rows):
        return None
    above.layers.append(layer)
    if factors:
        above.rows = factors
    elif is_scaling:
        above.factor = one_factor(above.factor, factor(layer))
    else:
        above.index = moved(layer, blob, above.index)
    return above


def _factors_of_rows(layer: Layer) -> Blob | None:
    """Return the factor of each row that a layer multiplies by, if it is the same for all heads."""
    if not layer.computes(BinaryOp.MUL, scalar=False) or not is_fixed(layer.output.shape):
        return None
    x, factors = layer.inputs
    sizes, shape = factors.shape or (), fixed_shape(layer.output)
    fits = x.shape == shape and len(sizes) == len(shape) == 3 and sizes in ((1, 1, 1), (1, shape[1], 1))
    return factors if fits and factors.batch == layer.output.batch else None


def _selected(trace: _Trace) -> Linear:
    """Return the rows of a Gemm's weights that compute the traced elements, head by head."""
    weight, bias = linear_of(trace.producer)
    index = trace.by_head
    columns = index[:, 0] % len(weight)
    length = index.shape[1]
    rows = np.arange(length, dtype=np.int32)[None, :, None]
    require(fixed_size(trace.source, 0) == length, "not all rows go into the attention")
    expected = rows * len(weight) + columns[:, None, :]
    require(np.array_equal(index, expected), "rows and columns are mixed before the attention")
    return Linear(weight[columns.reshape(-1)], bias[columns.reshape(-1)])


def _merged_columns(merged: _Trace, heads: int, size: int) -> Array:
    """Return the position (head, element) in the attention's result for each column that the last Gemm reads."""
    index = merged.index
    require(index.ndim == 2, "the last Gemm does not read a matrix")
    length = index.shape[0]
    head, rest = np.divmod(index, length * size)
    row, element = np.divmod(rest, size)
    require((row == np.arange(length)[:, None]).all(), "rows and columns are mixed after the attention")
    columns = head * size + element
    require((columns == columns[:1]).all(), "the heads are merged in different ways")
    require(len(set(columns[0].tolist())) == heads * size, "the last Gemm reads only a part of the attention")
    return np.asarray(columns[0])
