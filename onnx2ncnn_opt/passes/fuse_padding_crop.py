from __future__ import annotations

from typing import Any

from onnx2ncnn_opt.ir.dim import AXES
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._crops import cropped, ranges
from onnx2ncnn_opt.passes.fuse_padding import SIDES, require_no_cropping
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import known_shape, require, rewrite


@rewrite(
    op("Crop", "crop")(op("Padding", "padding", per_channel_pad_data_size=0)("x")),
    exact=True,
    purpose="padding for whole windows that is cut off again, and shifts of images",
)
def fuse_padding_crop(x: Blob, crop: Layer, padding: Layer) -> Layer | Blob:
    """x ── Padding ── Crop ──   ⇒   x ── Padding, Crop, or nothing ──

    What the Crop takes away is not added at all.
    """
    kept, shape = ranges(crop), known_shape(x)
    require(kept is not None, "what a Crop keeps is not known")
    assert kept is not None
    require_no_cropping(padding)
    sides = SIDES | {"c" if len(shape) == 3 else "d": ("front", "behind")}
    left: dict[str, int] = {}
    inside: dict[int, tuple[int, int]] = {}
    for i, axis in enumerate(AXES[len(shape)]):
        before, after = (padding[side] for side in sides[axis]) if axis in sides else (0, 0)
        if i in kept:
            size = shape[i]
            assert isinstance(size, int)
            start, end = kept[i][0] - before, kept[i][1] - before
            if start > 0 or end < size:
                inside[i] = start, end
            before, after = max(-start, 0), max(end - size, 0)
        if axis in sides:
            left |= dict(zip(sides[axis], (before, after), strict=True))
    require(not inside or not any(left.values()), f"'{crop.name}' takes more away than '{padding.name}' has added")
    if inside:
        return cropped(crop, x, inside)
    if not any(left.values()):
        return x
    sides_left: dict[str, Any] = {side: size or None for side, size in left.items()}
    return padding.having(inputs=[x], **sides_left)
