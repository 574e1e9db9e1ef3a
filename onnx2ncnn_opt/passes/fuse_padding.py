"""`fuse_padding_*`: merge a Padding into the pads of the next layer."""

from typing import Any

from onnx2ncnn_opt.ir.codes import Padding, PadMode, Pooling
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.ranges import Ranges
from onnx2ncnn_opt.ir.windows import SIDES, axes_of, pads_of
from onnx2ncnn_opt.passes._families import CONVOLUTIONS
from onnx2ncnn_opt.passes._fold import require_own_weights
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import known_shape, require, rewrite

PADDING = op("Padding", "padding", type=Padding.CONSTANT, per_channel_pad_data_size=0)
_MERGED = frozenset({Padding.CONSTANT, Padding.REPLICATE})
_POOLINGS = ("Pooling", "Pooling1D", "Pooling3D")
# Models pad with this number instead of minus infinity.
_LOWEST = -3.4e38


def _sides(axes: str) -> list[str]:
    return [side for axis in axes for side in SIDES[axis]]


def require_no_cropping(padding: Layer) -> None:
    """Refuse a Padding with a negative size: it removes elements."""
    require(all(padding[side] >= 0 for side in _sides("hwd")), f"'{padding.name}' crops")


@rewrite(
    op("Padding", "outer", type=_MERGED, per_channel_pad_data_size=0)(
        op("Padding", "inner", type=_MERGED, per_channel_pad_data_size=0)("x")
    ),
    exact=True,
    purpose="models of Keras; one layer less",
)
def fuse_padding_padding(x: Blob, outer: Layer, inner: Layer) -> Layer:
    """x ── Padding ── Padding ──   ⇒   x ── Padding ──

    Both must pad with the same constant, or replicate the edge.
    """
    same = outer["type"] == inner["type"] and (outer["type"] == Padding.REPLICATE or outer["value"] == inner["value"])
    require(same, f"'{outer.name}' and '{inner.name}' pad with different numbers")
    for padding in (outer, inner):
        require_no_cropping(padding)
    sides: dict[str, Any] = {side: outer[side] + inner[side] or None for side in _sides("hwd")}
    return outer.having(inputs=[x], **sides)


def _widened(layer: Layer, padding: Layer) -> dict[str, Any]:
    """Return the pads of a convolution or pooling plus the sizes of the Padding before it."""
    sides = _sides(axes_of(layer))
    known_shape(padding.input, len(axes_of(layer)) + 1)
    require_no_cropping(padding)
    pads_channels = any(padding[side] for side in _sides("hwd") if side not in sides)
    require(not pads_channels, f"'{padding.name}' pads the channels")
    own = {side: layer[f"pad_{side}"] for side in sides}
    require(min(own.values()) >= 0, f"the padding of '{layer.name}' depends on its input's size")
    return {f"pad_{side}": own[side] + padding[side] for side in sides}


@rewrite(
    op(CONVOLUTIONS, "layer")(PADDING("x")),
    exact=True,
    purpose="models of TensorFlow, and causal convolutions; one layer less",
)
def fuse_padding_convolution(x: Blob, layer: Layer, padding: Layer) -> Layer:
    """x ── Padding (constant) ── Convolution ──   ⇒   x ── Convolution ──"""
    require_own_weights(layer)
    pads = _widened(layer, padding)
    same = not any(pads_of(layer)) or layer["pad_value"] == padding["value"]
    require(same, f"'{layer.name}' pads with another value")
    return layer.having(inputs=[x], pad_value=padding["value"] or None, **pads)


@rewrite(
    op(_POOLINGS, "pool", global_pooling=0, adaptive_pooling=0)(PADDING("x")),
    exact=False,
    purpose="models of Keras, which pad before they pool",
)
def fuse_padding_pooling(x: Blob, pool: Layer, padding: Layer) -> Layer:
    """x ── Padding (constant) ── Pooling ──   ⇒   x ── Pooling ──

    For averages that count padded zeros, and for maxima if x has no number below the padded value.
    """
    require(
        pool["pad_mode"] in (PadMode.FULL, PadMode.VALID), f"the padding of '{pool.name}' depends on its input's size"
    )
    pads = _widened(pool, padding)
    tails = [_tail(pool, axis) for axis in axes_of(pool)]
    value = padding["value"]
    if pool["pooling_type"] != Pooling.MAX:
        require(value == 0, f"'{pool.name}' pads with zeros")
        uncounted = not pool["avgpool_count_include_pad"] and (any(pads_of(pool)) or any(tails))
        require(not uncounted, f"'{pool.name}' does not count its own padding")
        return pool.having(inputs=[x], avgpool_count_include_pad=1, **pads)
    require(value <= max(Ranges().of(x).low, _LOWEST), f"'{x.name}' may have numbers below {value:g}")
    for axis, tail in zip(axes_of(pool), tails, strict=True):
        before, after = (pads[f"pad_{side}"] for side in SIDES[axis])
        inside = max(before, after + tail) < pool[f"kernel_{axis}"]
        require(inside, f"windows of '{pool.name}' may be all padding")
    return pool.having(inputs=[x], **pads)


def _tail(pool: Layer, axis: str) -> int:
    """Return the elements that ncnn pads after an axis to complete its last window; an upper bound if it is dynamic."""
    stride: int = pool[f"stride_{axis}"]
    if pool["pad_mode"] == PadMode.VALID or stride == 1:
        return 0
    size = pool.input.known_shape[{"w": -1, "h": -2, "d": -3}[axis]]
    before, after = (pool[f"pad_{side}"] for side in SIDES[axis])
    if not isinstance(size, int):
        return stride - 1
    return int(-(size + before + after - pool[f"kernel_{axis}"]) % stride)
