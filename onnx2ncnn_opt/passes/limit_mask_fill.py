"""`limit_mask_fill`: masks with fill values that fp16 cannot add to scores."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.attention import ATTENTION, mask_slot
from onnx2ncnn_opt.ir.codes import BinaryOp, Eltwise, Interp, Reduction
from onnx2ncnn_opt.ir.dim import known
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.half import ABSORBING, LARGEST
from onnx2ncnn_opt.ir.ranges import Ranges
from onnx2ncnn_opt.ir.reached import reached
from onnx2ncnn_opt.ir.shapes import assign_shapes
from onnx2ncnn_opt.ir.spec import Trait
from onnx2ncnn_opt.ir.weight import Array, Encoding
from onnx2ncnn_opt.rewrite.rule import Edits, Replacement, attempt, graph_pass, known_shape, require

# exp of this fill is 0, and the sum of two fills is finite in fp16. Attention layers divide a mask by their scale, at
# most 1, so they get a fill nearer to 0.
_FILL = -30000.0
_ABSORBED = 2.0**-25  # of a fill: a number that their sum loses
_HIDING = -1000.0  # at or below this fill, fp16 loses the scores of a fully masked row
_UNKNOWN_SCALE = 1 / 16  # the scale of queries of width 256; most are narrower
_JOINS = (BinaryOp.ADD, BinaryOp.MAX, BinaryOp.MIN, BinaryOp.MUL)  # masks stay masks
_ROWS = {"reduce_all": 0, "keepdims": 1, "fixbug0": 1}


class _Reader(NamedTuple):
    """A layer that adds a mask to numbers, or attention, and the blob to multiply by 0 in fully masked rows.

    The mask is the one before layers added any numbers. `axis` is that of the Softmax, counted from the last one (-1).
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

    Other masks keep their fills, which may be several that absorb each other. The pass subtracts the largest number of
    each row, which does not change its Softmax. In a fully masked row it is a fill such as -1e4, where fp16 has no
    digits left for scores.
    """
    ranges = Ranges()
    for layer in graph.layers:
        is_limit = layer.type == "Clip" or layer.computes(BinaryOp.MAX)
        acts = not is_limit or (_fill(layer) < -LARGEST and ranges.of(layer.inputs[0]).low < _fill(layer))
        if layer.graph is graph and _fill(layer) <= _HIDING and acts:
            yield from attempt(layer, _Masks([layer], ranges).limited)


def _fill(layer: Layer) -> float:
    """Return the lowest finite number that a layer fills in; 0 if it fills in none."""
    if layer["featmask"]:
        return 0.0
    if layer.computes(BinaryOp.MUL, BinaryOp.MAX, scalar=True):
        return float(layer["b"])
    if layer.type in ("Clip", "Eltwise"):
        return float(layer["min"] if layer.type == "Clip" else min(layer["coeffs"], default=0.0))
    numbers = _numbers(layer)
    return float(numbers.min(initial=0.0, where=np.isfinite(numbers)))


def _numbers(layer: Layer) -> Array:
    """Return the numbers of a MemoryData in 32 bits; none for other layers."""
    block = layer.weights.stored("data") if layer.type == "MemoryData" and len(layer.outputs) == 1 else None
    return block.data if block is not None and block.encoding is Encoding.FP32 else np.zeros(0, np.float32)


@dataclass
class _Masks:
    """One edit: masks of the same scores, the layers that fill them, and the layers that add them to numbers."""

    fills: list[Layer]
    ranges: Ranges
    readers: list[_Reader] = field(default_factory=list)
    joined: set[Blob] = field(default_factory=set)  # made of several masks
    fill: float = _FILL  # the new one
    added: list[tuple[Layer, Layer | None]] = field(default_factory=list)  # the new layers, and those that follow them
    made: dict[Any, Blob] = field(default_factory=dict)  # the outputs of new layers

    def limited(self) -> Replacement | None:
        """Replace the fill values by one that fp16 can represent, or subtract the largest number of each row."""
        # The search appends the layers that fill other masks.
        if not all(self._collects(layer.output, None, -1) for layer in self.fills):
            return None
        first, fills = self.fills[0], {float(np.float32(_fill(layer))) for layer in self.fills}
        is_absorbing, is_large = min(fills) <= -ABSORBING, min(fills) < -LARGEST
        is_limited = is_large and len(fills) == 1 and all(map(self._is_mask, self.fills))
        takes = {layer: _limited(layer, self.fill) for layer in self.fills if is_limited}
        readers = self.readers if self.joined or not _has_no_masked_row(first) else []
        order = {layer: index for index, layer in enumerate(first.graph or ())} if len(readers) > 1 else {}
        # In the graph's order, because later readers use layers that are added before the first one.
        for reader in sorted(readers, key=lambda reader: order.get(reader.layer, 0)):
            user, inputs = reader.layer, dict[Blob, Blob]()
            if reader.mask in user.inputs and not (is_limited and is_absorbing):
                inputs[reader.mask] = self._shifted(reader, limits=is_large and not is_limited)
            if is_absorbing:
                inputs[reader.plain] = self._gated(reader, self.fill / 2 if is_limited else -ABSORBING)
            takes[user] = user.having(inputs=[inputs.get(blob, blob) for blob in user.inputs])
        return Replacement(tuple(takes), takes=takes, added=self.added) if takes else None

    def _collects(self, mask: Blob, base: Blob | None, axis: int) -> bool:
        """Collect the mask's readers; return False if one leads to a layer other than Softmax or attention.

        `base` is the mask before layers added numbers, if they did; then a Softmax must be over `axis`.
        """
        if mask.is_output or not mask.users:
            return False
        for user in mask.users:
            if user.type in ATTENTION:
                if user["kv_cache"] or [n for n, blob in enumerate(user.inputs) if blob is mask] != [mask_slot(user)]:
                    return False
                self.fill = max(self.fill, _FILL * _scale(user))
                self.readers.append(_Reader(user, user.inputs[0], base or mask, -1))
            elif user.computes(BinaryOp.SUB, scalar=False) and user.inputs[0] is user.inputs[1]:
                continue  # x - x is 0 for every x: the Softmax of one element
            elif user.type == "Softmax":
                if base is not None and _softmax_axis(user) not in (axis, None):
                    return False
            elif self.joined.isdisjoint(user.outputs) and not self._passes_on(user, mask, base, axis):
                return False
        return True

    def _passes_on(self, user: Layer, mask: Blob, base: Blob | None, axis: int) -> bool:
        """Return True if a layer passes a mask on, and only Softmax or attention layers read the result."""
        if user.computes(BinaryOp.MAX, scalar=True) or user.type == "Clip":  # a limit below the mask
            is_below = _fill(user) < -LARGEST and self.ranges.of(base or mask).low >= _fill(user)
            return is_below and self._collects(user.output, base, axis)
        others = [blob for blob in _terms(user) if blob is not mask]
        is_plain = all(map(self._is_plain, others))
        if mask not in _terms(user) or not (is_plain or (base is None and self._joins(user))):
            return False
        if _moves(user):
            widths = {out.shape and out.shape[-1] for out in (mask, *user.outputs)}
            keeps_rows = axis == -1 and user.type != "Permute" and len(widths) == 1 and None not in widths
            return (base is None or keeps_rows) and all(self._collects(out, base, axis) for out in user.outputs)
        if is_plain and not user.computes(BinaryOp.ADD, Eltwise.SUM):
            ends = (0, 1) if user.computes(BinaryOp.MUL) else (_HIDING, -_HIDING)
            return base is None and self.ranges.of(others[0]).within(*ends) and self._collects(user.output, None, axis)
        if is_plain:
            if len(user.inputs) != 2 or len(others) != 1 or not _adds(user, user.inputs.index(mask)):
                return False
            axes = [_softmax_axis(softmax) for softmax in user.output.users if softmax.type == "Softmax"]
            axis, base = next((known for known in axes if known is not None), -1), base or mask
            self.readers.append(_Reader(user, others[0], base, axis))
        return self._collects(user.output, base, axis)

    def _joins(self, user: Layer) -> bool:
        """Add the layers that fill the other masks that a layer reads; return False if it reads other numbers too."""
        for blob in reached(user.outputs, lambda blob: _terms(blob.producer)):
            layer = blob.producer
            is_mask = layer is not None and (layer.type in ("Log", "MemoryData") or _fill(layer) <= _HIDING)
            if not is_mask and not _terms(layer) and not self.ranges.of(blob).within(_HIDING, -_HIDING):
                return False
            is_bias = layer is not None and np.nan_to_num(_numbers(layer), neginf=0).any() and not self._is_plain(blob)
            if layer is not None and layer not in self.fills and (_fill(layer) <= _HIDING or is_bias):
                self.fills.append(layer)
        self.joined.update(user.outputs)
        return True

    def _is_plain(self, blob: Blob) -> bool:
        """Return True if a blob hides nothing: the fills absorb its numbers."""
        absorbing = (-_fill(layer) * _ABSORBED for layer in self.fills if _fill(layer) <= -ABSORBING)
        most = min(*absorbing, -_FILL * _UNKNOWN_SCALE / 2, -_HIDING)

        def large_terms(blob: Blob) -> Sequence[Blob]:
            layer = blob.producer
            computes = layer is not None and (layer.type in ("BinaryOp", "Eltwise") or layer.has(Trait.ELEMENTWISE))
            return [x for x in (layer.inputs if layer and computes else _terms(layer)) if not is_small(x)]

        def is_small(blob: Blob) -> bool:
            numbers = self.ranges.of(blob)
            return numbers.is_finite and numbers.within(-most, most)

        producers = [x.producer for x in reached([blob], large_terms) if not is_small(x) and x.producer is not None]
        return not any(layer.type in ("Log", "MemoryData") or _fill(layer) < -most for layer in producers)

    def _is_mask(self, layer: Layer) -> bool:
        """Return True if a layer writes its fill value somewhere, and a higher fill changes no other number."""
        if layer.type == "MemoryData":  # with one fill
            return len({*_numbers(layer)[_numbers(layer) <= _HIDING].tolist(), -np.inf}) == 2
        if layer.computes(BinaryOp.MUL):
            return self.ranges.of(layer.input).is_integer
        log = layer.inputs[0].made_by("Log") if layer.type != "Eltwise" else None
        return log is not None and self._is_integer(log.input)

    def _is_integer(self, blob: Blob) -> bool:
        """Return True if a blob has only integers, also if Interp (nearest) repeats them to a dynamic length."""
        producer = blob.producer
        if producer is None or self.ranges.of(blob).is_integer:
            return producer is not None
        keeps_integers = _moves(producer) or producer.computes(BinaryOp.MUL, scalar=False)
        return keeps_integers and all(map(self._is_integer, _terms(producer)))

    def _shifted(self, reader: _Reader, *, limits: bool) -> Blob:
        """Return the mask minus the largest number of each row, no lower than the new fill if fp16 `limits` it."""
        rows = self._add(reader, "Reduction", reader.mask, operation=Reduction.MAX, axes=(reader.axis,), **_ROWS)
        shifted = self._add(reader, "BinaryOp", reader.mask, rows, op_type=BinaryOp.SUB)
        lowest = {"op_type": BinaryOp.MAX, "with_scalar": 1, "b": self.fill}
        return self._add(reader, "BinaryOp", shifted, **lowest) if limits else shifted

    def _gated(self, reader: _Reader, shown: float) -> Blob:
        """Return `plain` times 0 in rows whose mask has no number above `shown`."""
        user, plain, mask, axis = reader
        require(user.type != "MultiHeadAttention", f"the queries of {user.type} '{user.name}' are inside it")
        rows = self._add(reader, "Reduction", mask, operation=Reduction.MAX, axes=(axis,), **_ROWS)
        rows = self._add(reader, "Threshold", rows, threshold=shown)
        missing = len(known_shape(plain)) - len(rows.known_shape)
        require(missing >= 0, f"'{mask.name}' has more dims than '{plain.name}'")
        rows = self._add(reader, "ExpandDims", rows, axes=tuple(range(missing))) if missing else rows
        return self._add(reader, "BinaryOp", plain, rows, op_type=BinaryOp.MUL)

    def _add(self, reader: _Reader, kind: str, *inputs: Blob, **params: Any) -> Blob:
        """Add a layer before a reader, unless there is an equal one; return its output."""
        key, like = (kind, inputs, *params.items()), self.fills[0]
        if key not in self.made:
            for blob in inputs:
                known_shape(blob)
            layer = Layer(kind, f"{like.name}_rows", inputs, [Blob(f"{like.name}_rows")], params, origin=like.traced)
            assign_shapes(layer)
            self.added.append((layer, reader.layer))
            self.made[key] = layer.output
        return self.made[key]


def _limited(layer: Layer, fill: float) -> Layer:
    """Return the layer with `fill` in place of lower numbers."""
    if layer.type == "MemoryData":
        numbers = _numbers(layer)
        return layer.having(weights={"data": np.where(np.isfinite(numbers), np.maximum(numbers, fill), numbers)})
    return layer.having(min=fill) if layer.type == "Clip" else layer.having(b=fill)


def _terms(layer: Layer | None) -> Sequence[Blob]:
    """Return the operands whose numbers a layer adds, chooses or moves; none for other layers."""
    if layer is None:
        return ()
    if _moves(layer):
        return layer.inputs if layer.type == "Concat" else layer.inputs[:1]
    joins = layer.computes(Eltwise.SUM) or layer.computes(*_JOINS, scalar=False)
    return layer.inputs if joins else ()


def _moves(layer: Layer) -> bool:
    """Return True if a layer moves or repeats numbers; CopyTo overwrites a part of a row."""
    repeats = layer.type == "GridSample" or (layer.type == "Interp" and layer["resize_type"] == Interp.NEAREST)
    return repeats or (layer.has(Trait.MOVES) and layer.type != "CopyTo")


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


def _has_no_masked_row(layer: Layer) -> bool:
    """Return True if a mask is a constant with an unmasked element in every row."""
    if layer.type != "MemoryData" or layer.output.shape is None:
        return False
    data = layer.weights["data"].reshape(known(layer.output.shape))
    return bool((data > -LARGEST).any(axis=-1).all())
