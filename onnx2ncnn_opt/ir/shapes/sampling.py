"""Resizing, sampling, and rearranging between channels and space."""

from fractions import Fraction

import numpy as np

from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.shapes.registry import Output, equal, evaluated, fail, named_sizes, need_rank, parts, shape_of


@shape_of("Interp")
def interp(layer: Layer, x: Shape, *others: Shape) -> Output:
    """Return (c, output_h, output_w); a 2-D blob is resized along w only, a 1-D one is spread out over h and w.

    The size comes from an expression, a second blob or the parameters, or is input * scale, rounded down.
    """
    need_rank(layer, x, 1, 2, 3)
    sizes = _interp_sizes(layer, x, others)
    if sizes is None:
        return None
    if len(x) == 2:
        return x[0], sizes[1]
    return x[0], *sizes


def _interp_sizes(layer: Layer, x: Shape, others: tuple[Shape, ...]) -> tuple[Dim, Dim] | None:
    """Return (height, width)."""
    sizes = named_sizes(x) if len(x) > 1 else {"h": 1, "w": 1}
    if layer["size_expr"]:
        values = evaluated(layer, "size_expr")
        if values is None:
            return None
        if len(values) > 2:
            fail(layer, f"size_expr has {len(values)} sizes")
        return (values[1] if len(values) == 2 else sizes["h"]), values[0]
    if layer["dynamic_target_size"]:
        if not others:
            fail(layer, "with dynamic_target_size the size is that of a second input")
        target = named_sizes(others[0])
        return target["h"], target["w"]
    if layer["output_height"] and layer["output_width"]:
        return layer["output_height"], layer["output_width"]
    height, width = _scaled(sizes["h"], layer["height_scale"]), _scaled(sizes["w"], layer["width_scale"])
    return None if height is None or width is None else (height, width)


def _scaled(size: Dim, scale: float) -> Dim | None:
    """Return int(size * scale) in float32, as ncnn computes it; a symbol needs a scale that is a simple fraction."""
    if not isinstance(size, Sym):
        return int(np.float32(size) * np.float32(scale))
    ratio = Fraction(scale).limit_denominator(64)
    if ratio <= 0 or np.float32(ratio.numerator / ratio.denominator) != np.float32(scale):
        return None
    return size * ratio.numerator // ratio.denominator


@shape_of("PixelShuffle")
def pixel_shuffle(layer: Layer, x: Shape) -> Shape:
    """Return (c / r^2, h * r, w * r)."""
    need_rank(layer, x, 3)
    factor = layer["upscale_factor"]
    return parts(layer, x[0], factor * factor, "channels"), x[1] * factor, x[2] * factor


@shape_of("Reorg")
def reorg(layer: Layer, x: Shape) -> Shape:
    """Return (c * s^2, h / s, w / s)."""
    need_rank(layer, x, 3)
    stride = layer["stride"]
    return x[0] * stride * stride, parts(layer, x[1], stride, "height"), parts(layer, x[2], stride, "width")


@shape_of("ShuffleChannel")
def shuffle_channel(layer: Layer, x: Shape) -> Shape:
    """Return the input's shape."""
    need_rank(layer, x, 3, 4)
    parts(layer, x[0], layer["group"], "channels")
    return x


@shape_of("GridSample")
def grid_sample(layer: Layer, x: Shape, grid: Shape) -> Shape:
    """Return (c, sizes of the grid).

    The grid's coordinates are its innermost axis, or its outermost one with permute_fusion.
    """
    need_rank(layer, x, 3, 4)
    need_rank(layer, grid, len(x))
    coordinates, sizes = (grid[0], grid[1:]) if layer["permute_fusion"] else (grid[-1], grid[:-1])
    equal(layer, coordinates, len(x) - 1, "the coordinates in the grid and the axes to sample")
    return x[0], *sizes


@shape_of("ROIAlign", "ROIPooling", "PSROIPooling", unknown_inputs=True)
def roi_pooling(layer: Layer, x: Shape | None, roi: Shape | None) -> Output:
    """Return (c, pooled_height, pooled_width) of one region; its corners are the second input's first 4 elements."""
    if x is None:
        return None
    need_rank(layer, x, 3)
    sizes = layer["pooled_height"], layer["pooled_width"]
    if layer.type != "PSROIPooling":
        return x[0], *sizes
    equal(layer, x[0], layer["output_dim"] * sizes[0] * sizes[1], "the channels and output_dim * pooled sizes")
    return layer["output_dim"], *sizes


@shape_of("PriorBox")
def prior_box(layer: Layer, x: Shape, image: Shape | None = None) -> Shape:
    """Return (2, 4 * boxes), boxes and variances; (4 * boxes) without an image and max_sizes."""
    need_rank(layer, x, 3)
    smallest, largest, ratios = (len(layer[name]) for name in ("min_sizes", "max_sizes", "aspect_ratios"))
    sized = layer["image_width"] != -233 and layer["image_height"] != -233
    cells = x[1] * x[2]
    if image is None and not sized:
        if largest:
            fail(layer, "it needs the image as a second input, or its sizes")
        return (cells * (4 * (smallest - 1 + ratios)),)
    boxes = smallest * (1 + ratios * (2 if layer["flip"] else 1)) + largest
    return 2, cells * (4 * boxes)
