"""`limit_mask_fill`: masks with fill values below the range of fp16."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.attention import ATTENTION, mask_slot
from onnx2ncnn_opt.ir.codes import BinaryOp, Eltwise, Interp, Reduction, UnaryOp
from onnx2ncnn_opt.ir.dim import known
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.half import LARGEST
from onnx2ncnn_opt.ir.ranges import Ranges
from onnx2ncnn_opt.ir.shapes import assign_shapes
from onnx2ncnn_opt.ir.spec import Trait
from onnx2ncnn_opt.ir.weight import Encoding
from onnx2ncnn_opt.rewrite.rule import Edits, Replacement, attempt, graph_pass, known_shape, require

# exp of this fill is 0, and the sum of two fills is finite in fp16. Attention layers divide a mask by their scale, at
# most 1, so they get a fill nearer to 0.
_FILL = -30000.0
# At or below this fill, fill + score is the fill in fp32: the Softmax of a fully masked row is uniform.
_ABSORBING = -1e8
_UNKNOWN_SCALE = 1 / 16  # the scale of queries of width 256; most are narrower
_ROWS = {"reduce_all": 0, "keepdims": 1, "fixbug0": 1}


class _Reader(NamedTuple):
    """A layer that adds a mask to scores, or attention, and the blob to multiply by 0 in fully masked rows.

    `axis` is the axis of the Softmax, counted from the last one (-1).
    """

    layer: Layer
    plain: Blob
    mask: Blob
    axis: int


@graph_pass(exact=False, purpose="masks on phones: in fp16 the lowest float32 is -infinity, and 0 times it NaN")
def limit_mask_fill(graph: Graph) -> Edits:
    """mask * -3.4e38 ── Softmax or SDPA   ⇒   mask * -30000 ── Softmax or SDPA

    For fill values below the range of fp16 that only a Softmax reads: exp of both is 0. In a fully masked row, the old
    fill absorbs the scores. -30000 does not, so the pass multiplies the queries (or scores) of such rows by 0.
    """
    limiter = _Limiter()
    for layer in graph.layers:
        if layer.graph is graph and _fill(layer) < -LARGEST:
            yield from attempt(layer, limiter.limit, layer)


def _fill(layer: Layer) -> float:
    """Return the lowest finite number that a layer fills in; 0 if it fills in none."""
    if layer["featmask"]:
        return 0.0
    if layer.computes(BinaryOp.MUL, BinaryOp.MAX, scalar=True):
        return float(layer["b"])
    if layer.type == "Clip":
        return float(layer["min"])
    if layer.type == "MemoryData" and len(layer.outputs) == 1:
        block = layer.weights.stored("data")
        finite = block.data[np.isfinite(block.data)] if block.encoding is Encoding.FP32 else block.data[:0]
        return float(finite.min()) if finite.size else 0.0
    return 0.0


@dataclass
class _Limiter:
    """One sweep over a graph: it computes the kept rows of each mask once, and gates each consumer once."""

    ranges: Ranges = field(default_factory=Ranges)
    kept: dict[tuple[Blob, int], Blob] = field(default_factory=dict)
    gated: set[Layer] = field(default_factory=set)
    made: set[Layer] = field(default_factory=set)

    def limit(self, layer: Layer) -> Replacement | None:
        """Replace the fill value by one that fp16 can represent."""
        # Drop the rows of refused edits.
        self.kept = {key: rows for key, rows in self.kept.items() if rows.producer is not None}
        search = _Search(layer, self)
        if not search.collects(layer.output, gate=True, axis=None) or not self._is_mask(layer, search.readers):
            return None
        gate = _fill(layer) <= _ABSORBING and not _has_no_masked_row(layer)
        to_gate = [reader for reader in search.readers if reader.layer not in self.gated] if gate else []
        for user, *_ in to_gate:
            require(user.type != "MultiHeadAttention", f"the queries of {user.type} '{user.name}' are inside it")
        for blob in (blob for user, *_ in to_gate for blob in user.inputs):
            known_shape(blob)
        limited, signs = self._limited(layer, search.fill)
        takes, added = {layer: limited}, [(sign, layer) for sign in signs]
        order = {other: index for index, other in enumerate(layer.graph or ())} if len(to_gate) > 1 else {}
        # In the graph's order, because later consumers read the rows that the first one computes.
        for reader in sorted(to_gate, key=lambda reader: order.get(reader.layer, 0)):
            user, new = reader.layer, self._gate(reader, layer, search.fill)
            added += ((made, user) for made in new)
            inputs = [new[-1].output if blob is reader.plain else blob for blob in user.inputs]
            takes[user] = user.having(inputs=inputs)
            self.gated.add(takes[user])
        return Replacement(tuple(takes), takes=takes, added=added)

    def _is_mask(self, layer: Layer, readers: Collection[_Reader]) -> bool:
        """Return True if a layer writes its fill value somewhere, and a higher fill changes no other number."""
        if layer.type == "MemoryData":
            return True
        if layer.computes(BinaryOp.MUL):
            factor = self.ranges.of(layer.input)
            absorbs = bool(readers) and _fill(layer) <= _ABSORBING
            require(factor.is_integer or not absorbs or factor.low >= 0, f"'{layer.input.name}' may be below 0")
            return factor.is_integer or absorbs
        log = layer.input.producer
        if log is not None and log.type == "Log" and self._is_integer(log.input):
            return True
        return all(user.computes(BinaryOp.MIN) for user in layer.output.users)

    def _is_integer(self, blob: Blob) -> bool:
        """Return True if a blob has only integers, also if Interp (nearest) repeats them to a dynamic length."""
        producer = blob.producer
        if producer is None or self.ranges.of(blob).is_integer:
            return producer is not None
        if producer.type == "Interp" and producer["resize_type"] == Interp.NEAREST:
            return self._is_integer(producer.inputs[0])
        keeps_integers = producer.has(Trait.MOVES) or producer.computes(BinaryOp.MUL, scalar=False)
        return keeps_integers and all(map(self._is_integer, producer.inputs))

    def _limited(self, layer: Layer, fill: float) -> tuple[Layer, list[Layer]]:
        """Return the layer with `fill` in place of lower numbers, and the new layers before it."""
        if layer.type == "MemoryData":
            block = layer.weights.stored("data")
            data = np.where(np.isfinite(block.data), np.maximum(block.data, np.float32(fill)), block.data)
            return layer.having(weights={"data": data.astype(np.float32)}), []
        new = layer.having(min=fill) if layer.type == "Clip" else layer.having(b=fill)
        if not layer.computes(BinaryOp.MUL) or self.ranges.of(layer.input).is_integer:
            return new, []
        sign = self._new("UnaryOp", layer, [layer.input], op_type=UnaryOp.SIGN)  # every number except 0 masks
        return new.having(inputs=[sign.output]), [sign]

    def _gate(self, reader: _Reader, like: Layer, fill: float) -> list[Layer]:
        """Return layers that multiply `plain` by 0 in fully masked rows, and by 1 in others."""
        _, plain, mask, axis = reader
        new: list[Layer] = []
        if (mask, axis) not in self.kept:
            new.append(self._new("Reduction", like, [mask], operation=Reduction.MAX, axes=(axis,), **_ROWS))
            new.append(self._new("Threshold", like, [new[-1].output], threshold=fill / 2))
            self.kept[mask, axis] = new[-1].output
        rows = self.kept[mask, axis]
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


@dataclass
class _Search:
    """A search for the readers of a mask, down to each Softmax or attention.

    It finds the readers whose scores the layer's fill absorbs, and the fill for them.
    """

    layer: Layer
    limiter: _Limiter
    readers: list[_Reader] = field(default_factory=list)
    fill: float = _FILL

    def collects(self, mask: Blob, *, gate: bool, axis: int | None) -> bool:
        """Collect the mask's readers; return False if one leads to a layer other than Softmax or attention.

        With `gate`, layers add the mask to scores and do not select between the two. `axis` is not None after such a
        sum: a Softmax must be over this axis.
        """
        if mask.is_output or not mask.users:
            return False
        for user in mask.users:
            if user in self.limiter.made:
                continue
            slots = [slot for slot, blob in enumerate(user.inputs) if blob is mask]
            if user.type in ATTENTION:
                if user["kv_cache"] or slots != [mask_slot(user)]:
                    return False
                self.fill = max(self.fill, _FILL * _scale(user))
                if gate:
                    self.readers.append(_Reader(user, user.inputs[0], mask, -1))
            elif user.computes(BinaryOp.SUB, scalar=False) and user.inputs[0] is user.inputs[1]:
                continue  # x - x is 0 for every x: the Softmax of one element
            elif user.type == "Softmax":
                if gate and axis is not None and _softmax_axis(user) not in (axis, None):
                    return False
            elif not self._passes_on(user, mask, slots, gate=gate, axis=axis):
                return False
        return True

    def _passes_on(self, user: Layer, mask: Blob, slots: list[int], *, gate: bool, axis: int | None) -> bool:
        """Return True if a layer passes a mask on, and only Softmax or attention layers read the result."""
        repeats = user.type == "Interp" and user["resize_type"] == Interp.NEAREST and slots == [0]
        if repeats or (user.has(Trait.MOVES) and user.type != "CopyTo"):  # CopyTo overwrites a part of a row
            widths = {out.shape and out.shape[-1] for out in (mask, *user.outputs)}
            keeps_rows = axis == -1 and user.type != "Permute" and len(widths) == 1 and None not in widths
            if gate and axis is not None and not keeps_rows:
                return False
            return all(self.collects(out, gate=gate, axis=axis) for out in user.outputs)
        if len(slots) != 1 or len(user.inputs) != 2:
            return False
        other = user.inputs[1 - slots[0]]
        if user.computes(BinaryOp.MAX, BinaryOp.MIN):
            return self.collects(user.output, gate=False, axis=axis)
        if not _adds(user, slots[0]):
            return False
        needs_gate = gate and not _is_zero_where_filled(self.layer, other)
        axes = [_softmax_axis(softmax) for softmax in user.output.users if softmax.type == "Softmax"]
        axis = next((known for known in axes if known is not None), -1)
        if needs_gate and self.limiter.ranges.of(other).high > 0:
            self.readers.append(_Reader(user, other, mask, axis))
        return self.collects(user.output, gate=needs_gate, axis=axis)


def _scale(attention: Layer) -> float:
    """Return the factor of an attention layer's scores, at most 1; the layer divides the mask by it."""
    if attention["scale"]:
        return min(abs(float(attention["scale"])), 1.0)
    if attention.type == "MultiHeadAttention":
        return float((attention["embed_dim"] / attention["num_heads"]) ** -0.5)
    width = attention.inputs[0].shape[-1] if attention.inputs[0].shape else None
    return width**-0.5 if isinstance(width, int) else _UNKNOWN_SCALE


def _softmax_axis(softmax: Layer) -> int | None:
    """Return a Softmax's axis, counted from the last one (-1); None if the rank is unknown."""
    shape, axis = softmax.input.shape, int(softmax["axis"])
    return axis if axis < 0 else None if shape is None else axis - len(shape)


def _adds(layer: Layer, slot: int) -> bool:
    """Return True if a layer adds its input number `slot` to another one, without a factor."""
    if layer.type == "Eltwise":
        return bool(layer["op_type"] == Eltwise.SUM and (not len(layer["coeffs"]) or layer["coeffs"][slot] == 1))
    return layer.computes(BinaryOp.ADD, scalar=False)


def _is_zero_where_filled(fill: Layer, other: Blob) -> bool:
    """Return True if a blob is ``x * c`` and the mask is ``fill * (1 - c)``, so masked elements are 0."""
    product = other.producer
    if product is None or not product.computes(BinaryOp.MUL) or not fill.inputs:
        return False
    return any(_is_complement(fill.input, factor) or _is_complement(factor, fill.input) for factor in product.inputs)


def _is_complement(complement: Blob, blob: Blob) -> bool:
    """Return True if the first blob is 1 minus the second one."""
    layer = complement.producer
    return layer is not None and layer.computes(BinaryOp.RSUB, scalar=True) and layer["b"] == 1 and layer.input is blob


def _has_no_masked_row(layer: Layer) -> bool:
    """Return True if a mask is a constant with an unmasked element in every row."""
    if layer.type != "MemoryData" or layer.output.shape is None:
        return False
    data = layer.weights["data"].reshape(known(layer.output.shape))
    return bool((data > -LARGEST).any(axis=-1).all())
