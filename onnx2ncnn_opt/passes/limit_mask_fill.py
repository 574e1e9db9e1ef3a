"""`limit_mask_fill`: masks whose low numbers fp16 does not hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, Eltwise, Reduction, UnaryOp
from onnx2ncnn_opt.ir.dim import known
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.ranges import Ranges
from onnx2ncnn_opt.ir.shapes import assign_shapes
from onnx2ncnn_opt.ir.spec import Trait
from onnx2ncnn_opt.ir.weight import Encoding
from onnx2ncnn_opt.rewrite.rule import Miss, Replacement, attempt, graph_pass, known_shape, require

# The largest number of fp16.
_LARGEST = 65504.0
# Low enough for exp to give 0, and the sum of two of them is a number in fp16. Attention layers divide a mask by their
# scale, so that it is less there.
_FILL = -30000.0
# From here on, a score that is added to the fill leaves no trace in fp32: a row that is masked as a whole is uniform.
_ABSORBING = -1e8
_SDPA_MASK = 3
_UNKNOWN_SCALE = 1 / 16  # for queries of a width of 256, which few have
_ROWS = {"reduce_all": 0, "axes": (-1,), "keepdims": 1, "fixbug0": 1}


@dataclass
class _Readers:
    """What a mask is added to, in sums (which input is the mask) and in attention layers; the fill that these take."""

    sums: list[tuple[Layer, Blob]] = field(default_factory=list)
    attentions: list[Layer] = field(default_factory=list)
    fill: float = _FILL


@graph_pass(exact=False, purpose="masks on phones: in fp16 the lowest float32 is -infinity, and 0 times it NaN")
def limit_mask_fill(graph: Graph) -> Iterator[Replacement | Miss]:
    """mask * -3.4e38 ── Softmax or SDPA   ⇒   mask * -30000 ── Softmax or SDPA

    For numbers below those of fp16 that only a Softmax reads: exp makes 0 of both. Such a number swallows the scores of
    a row that is masked as a whole; with -30000 instead, the queries (or scores) of these rows become 0.
    """
    limiter = _Limiter()
    for layer in graph.layers:
        if layer.graph is graph and _fill(layer) < -_LARGEST:
            yield from attempt(layer, limiter.limit, layer)


def _fill(layer: Layer) -> float:
    """The lowest finite number that a layer fills in; 0 where it does not."""
    if layer["featmask"]:
        return 0.0
    if layer.type == "BinaryOp" and layer["with_scalar"] and layer["op_type"] in (BinaryOp.MUL, BinaryOp.MAX):
        return float(layer["b"])
    if layer.type == "Clip":
        return float(layer["min"])
    if layer.type == "MemoryData" and len(layer.outputs) == 1:
        block = layer.weights.stored("data")
        finite = block.data[np.isfinite(block.data)] if block.encoding is Encoding.FP32 else block.data[:0]
        return float(finite.min()) if finite.size else 0.0
    return 0.0


class _Limiter:
    """One sweep: the rows of each mask are looked at once, and every reader is changed once."""

    def __init__(self) -> None:
        self.ranges = Ranges()
        self.kept: dict[Blob, Blob] = {}
        self.gated: set[Layer] = set()
        self.made: set[Layer] = set()

    def limit(self, layer: Layer) -> Replacement | None:
        """Fill in a number that fp16 holds."""
        self.kept = {
            mask: rows for mask, rows in self.kept.items() if rows.producer is not None
        }  # of edits not refused
        readers = _Readers()
        if not self._collect(layer, layer.output, readers, gate=True, summed=False) or not self._masks(layer, readers):
            return None
        gate = _fill(layer) <= _ABSORBING and not _leaves_some_of_every_row(layer)
        sums = [(each, mask) for each, mask in readers.sums if each not in self.gated] if gate else []
        attentions = [each for each in readers.attentions if each not in self.gated] if gate else []
        for each in attentions:
            require(each.type == "SDPA", f"the queries of {each.type} '{each.name}' are inside it")
        for blob in (*(b for each, _ in sums for b in each.inputs), *(b for each in attentions for b in each.inputs)):
            known_shape(blob)
        limited, signs = self._limited(layer, readers.fill)
        takes, added = {layer: limited}, [(sign, layer) for sign in signs]
        gates = [(each, each.inputs[each.inputs[0] is mask], mask) for each, mask in sums]
        gates += [(each, each.inputs[0], each.inputs[_SDPA_MASK]) for each in attentions]
        order = {each: at for at, each in enumerate(layer.graph or ())} if len(gates) > 1 else {}
        # What the first one makes of a mask the later ones read.
        for each, plain, mask in sorted(gates, key=lambda gate: order.get(gate[0], 0)):
            new = self._gate(each, plain, mask, layer, readers.fill)
            added += ((made, each) for made in new)
            inputs = [new[-1].output if blob is plain else blob for blob in each.inputs]
            takes[each] = each.having(inputs=inputs)
            self.gated.add(takes[each])
        return Replacement(tuple(takes), takes=takes, added=added)

    def _masks(self, layer: Layer, readers: _Readers) -> bool:
        """Whether a layer fills its number in somewhere, and has no business with numbers between it and others."""
        if layer.type == "MemoryData":
            return True
        if _is_product(layer):
            factor, added = self.ranges.of(layer.input), bool(readers.sums or readers.attentions)
            above_all = added and _fill(layer) <= _ABSORBING
            require(factor.is_whole or not above_all or factor.low >= 0, f"'{layer.input.name}' may be below 0")
            return factor.is_whole or above_all
        log = layer.input.producer
        if log is not None and log.type == "Log" and self.ranges.of(log.input).is_whole:
            return True
        return all(user.type == "BinaryOp" and user["op_type"] == BinaryOp.MIN for user in layer.output.users)

    def _collect(self, fill: Layer, mask: Blob, readers: _Readers, *, gate: bool, summed: bool) -> bool:
        """Find what reads a mask; False where anything else than a Softmax does.

        With `gate`, the mask is added to scores, and not chosen instead of them; `summed` says that it was, above.
        """
        if mask.is_output or not mask.users:
            return False
        for user in mask.users:
            if user in self.made:
                continue
            at = [position for position, blob in enumerate(user.inputs) if blob is mask]
            if user.type in ("SDPA", "MultiHeadAttention"):
                position = _SDPA_MASK if user.type == "SDPA" else len(user.inputs) - 1
                if not user["attn_mask"] or user["kv_cache"] or at != [position]:
                    return False
                readers.fill = max(readers.fill, _FILL * _scale(user))
                if gate:
                    readers.attentions.append(user)
            elif _is_difference_from_itself(user):
                continue  # 0 of any number: a Softmax of one element
            elif user.type == "Softmax":
                if gate and summed and mask.shape is not None and user["axis"] not in (-1, len(mask.shape) - 1):
                    return False
            else:
                inside = self._passes(fill, user, mask, at, readers, gate=gate, summed=summed)
                if not inside:
                    return False
        return True

    def _passes(
        self, fill: Layer, user: Layer, mask: Blob, at: list[int], readers: _Readers, *, gate: bool, summed: bool
    ) -> bool:
        """Whether a layer hands a mask on, and only a Softmax reads what it makes of it."""
        if user.has(Trait.MOVES) and user.type != "CopyTo":  # which writes over a part of a row
            keeps_rows = user.type != "Permute" and all(
                mask.shape is not None and out.shape is not None and out.shape[-1] == mask.shape[-1]
                for out in user.outputs
            )
            if gate and summed and not keeps_rows:
                return False
            return all(self._collect(fill, out, readers, gate=gate, summed=summed) for out in user.outputs)
        if len(at) != 1 or len(user.inputs) != 2:
            return False
        other = user.inputs[1 - at[0]]
        if user.type == "BinaryOp" and user["op_type"] in (BinaryOp.MAX, BinaryOp.MIN):
            return self._collect(fill, user.output, readers, gate=False, summed=summed)
        if not _adds(user, at[0]):
            return False
        chosen = gate and not _is_zero_where_filled(fill, other)
        if chosen and self.ranges.of(other).high > 0:
            readers.sums.append((user, mask))
        return self._collect(fill, user.output, readers, gate=chosen, summed=True)

    def _limited(self, layer: Layer, fill: float) -> tuple[Layer, list[Layer]]:
        """The layer with the fill instead of lower numbers, and what it reads instead of its input."""
        if layer.type == "MemoryData":
            block = layer.weights.stored("data")
            data = np.where(np.isfinite(block.data), np.maximum(block.data, np.float32(fill)), block.data)
            return layer.having(weights={"data": data.astype(np.float32)}), []
        new = layer.having(min=fill) if layer.type == "Clip" else layer.having(b=fill)
        if not _is_product(layer) or self.ranges.of(layer.input).is_whole:
            return new, []
        sign = self._new("UnaryOp", layer, [layer.input], op_type=UnaryOp.SIGN)  # any number but 0 masks
        return new.having(inputs=[sign.output]), [sign]

    def _gate(self, reader: Layer, plain: Blob, mask: Blob, like: Layer, fill: float) -> list[Layer]:
        """What a mask is added to, times 0 in rows that are masked as a whole."""
        new: list[Layer] = []
        if mask not in self.kept:
            new.append(self._new("Reduction", like, [mask], operation=Reduction.MAX, **_ROWS))
            new.append(self._new("Threshold", like, [new[-1].output], threshold=fill / 2))
            self.kept[mask] = new[-1].output
        rows = self.kept[mask]
        missing = len(plain.known_shape) - len(rows.known_shape)
        if missing > 0:
            new.append(self._new("ExpandDims", like, [rows], axes=tuple(range(missing))))
            rows = new[-1].output
        new.append(self._new("BinaryOp", like, [plain, rows], op_type=BinaryOp.MUL))
        return new

    def _new(self, kind: str, like: Layer, inputs: Sequence[Blob], **params: Any) -> Layer:
        name = f"{like.name}_rows"
        layer = Layer(kind, name, inputs, [Blob(name)], params, origin=like.traced)
        assign_shapes(layer)
        self.made.add(layer)
        return layer


def _scale(attention: Layer) -> float:
    """What an attention layer multiplies its scores by, and has to divide the mask by before; at most 1."""
    if attention["scale"]:
        return min(abs(float(attention["scale"])), 1.0)
    if attention.type == "MultiHeadAttention":
        return float((attention["embed_dim"] / attention["num_heads"]) ** -0.5)
    width = attention.inputs[0].shape[-1] if attention.inputs[0].shape else None
    return width**-0.5 if isinstance(width, int) else _UNKNOWN_SCALE


def _is_product(layer: Layer) -> bool:
    return layer.type == "BinaryOp" and bool(layer["op_type"] == BinaryOp.MUL)


def _is_difference_from_itself(layer: Layer) -> bool:
    if layer.type != "BinaryOp" or layer["op_type"] != BinaryOp.SUB or layer["with_scalar"]:
        return False
    return layer.inputs[0] is layer.inputs[1]


def _adds(layer: Layer, at: int) -> bool:
    """Whether a layer adds the blob that is its input number `at` to another."""
    if layer.type == "Eltwise":
        return bool(layer["op_type"] == Eltwise.SUM and (not len(layer["coeffs"]) or layer["coeffs"][at] == 1))
    return layer.type == "BinaryOp" and bool(layer["op_type"] == BinaryOp.ADD and not layer["with_scalar"])


def _is_zero_where_filled(fill: Layer, other: Blob) -> bool:
    """Whether a blob is ``x * c``, where the fill multiplies ``1 - c``."""
    product = other.producer
    if product is None or product.type != "BinaryOp" or product["op_type"] != BinaryOp.MUL or not fill.inputs:
        return False
    return any(_is_rest(fill.input, factor) or _is_rest(factor, fill.input) for factor in product.inputs)


def _is_rest(rest: Blob, blob: Blob) -> bool:
    """Whether one blob is 1 minus the other."""
    layer = rest.producer
    if layer is None or layer.type != "BinaryOp" or not layer["with_scalar"] or layer["b"] != 1:
        return False
    return bool(layer["op_type"] == BinaryOp.RSUB and layer.input is blob)


def _leaves_some_of_every_row(layer: Layer) -> bool:
    """Whether a mask is a constant that masks no row as a whole."""
    if layer.type != "MemoryData" or layer.output.shape is None:
        return False
    data = layer.weights["data"].reshape(known(layer.output.shape))
    return bool((data > -_LARGEST).any(axis=-1).all())
