"""`fuse_padding_<family>`: padding with a constant, done by the convolution itself."""

from __future__ import annotations

from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.passes._families import WEIGHTED, Family
from onnx2ncnn_opt.passes._fold import require_own_weights
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import Rewrite, require, rewrite

_CONSTANT = 0
# Padding's parameter for each side of a convolution, by the rank of its blobs; the axis that is left are the channels.
_WIDTH = {"left": "pad_left", "right": "pad_right"}
_HEIGHT = {"top": "pad_top", "bottom": "pad_bottom"}
_DEPTH = {"front": "pad_front", "behind": "pad_behind"}
_SIDES = {2: _WIDTH, 3: _WIDTH | _HEIGHT, 4: _WIDTH | _HEIGHT | _DEPTH}


def _rank(convolution: Layer) -> int:
    """The rank of the blobs that a convolution takes."""
    return 2 if convolution.type.endswith("1D") else 4 if convolution.type.endswith("3D") else 3


def _fuse(family: Family) -> Rewrite:
    @rewrite(
        op(family.types, "layer")(op("Padding", "padding", type=_CONSTANT, per_channel_pad_data_size=0)("x")),
        exact=True,
        name=f"fuse_padding_{family.name}",
        summary=f"x ── Padding (constant) ── {family.type} ──   ⇒   x ── {family.type} ──",
        kept="models of TensorFlow, and causal convolutions; one layer less",
    )
    def fuse(layer: Layer, padding: Layer) -> Layer:
        require_own_weights(layer)
        sides = _SIDES[_rank(layer)]
        (blob,) = padding.inputs
        require(blob.shape is not None, f"the shape of '{blob.name}' is unknown")
        assert blob.shape is not None
        require(len(blob.shape) == _rank(layer), f"{layer.type} '{layer.name}' takes blobs of another rank")
        crops = any(padding[side] < 0 for side in _SIDES[4])
        require(not crops, f"'{padding.name}' crops")
        beside = any(padding[side] for side in _SIDES[4] if side not in sides)
        require(not beside, f"'{padding.name}' pads the channels")
        own = {pad: layer[pad] for pad in sides.values()}
        require(min(own.values()) >= 0, f"the padding of '{layer.name}' depends on its input's size")
        same = not any(own.values()) or layer["pad_value"] == padding["value"]
        require(same, f"'{layer.name}' pads with another value")
        pads = {pad: own[pad] + padding[side] for side, pad in sides.items()}
        return layer.having(inputs=[blob], pad_value=padding["value"] or None, **pads)

    return fuse


PASSES = tuple(_fuse(family) for family in WEIGHTED if family.name.startswith("convolution"))
