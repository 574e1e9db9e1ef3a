"""GridSample, AffineGrid, DeformConv, RoiAlign and Col2Im."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from onnx import helper

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import UnsupportedError
from testing.compared import compare_nodes, model_of


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# Differences of coordinates are multiplied by those of pixels.
REL = 3e-5

GRIDS = list(
    itertools.product(("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection"), (0, 1), (1, 2), ("f", "c"))
)


@pytest.mark.parametrize(("mode", "padding", "align", "batch", "grid"), GRIDS)
def test_grid_sample(mode: str, padding: str, align: int, batch: int, grid: str) -> None:
    seed = GRIDS.index((mode, padding, align, batch, grid))
    places = normal(seed, batch, 5, 4, 2)
    x = normal(seed + 1, batch, 3, 6, 7)
    node = helper.make_node("GridSample", ["x", "g"], ["y"], mode=mode, padding_mode=padding, align_corners=align)
    fed = grid == "f" and mode != "nearest"
    inputs, constants = ({"x": x, "g": places}, {}) if fed else ({"x": x}, {"g": places})
    compare_nodes(node, inputs, constants, opset=16, rel=REL)


@pytest.mark.parametrize(
    ("mode", "padding", "align"),
    list(itertools.product(("linear", "nearest"), ("zeros", "border", "reflection"), (0, 1))),
)
def test_grid_sample_of_volumes(mode: str, padding: str, align: int) -> None:
    node = helper.make_node("GridSample", ["x", "g"], ["y"], mode=mode, padding_mode=padding, align_corners=align)
    compare_nodes(node, {"x": normal(0, 1, 2, 4, 5, 6)}, {"g": normal(1, 1, 3, 4, 2, 3)}, opset=20, rel=REL)


@pytest.mark.parametrize(
    ("size", "align"), list(itertools.product([(1, 2, 5, 6), (2, 3, 4, 7), (1, 1, 3, 4, 5)], (0, 1)))
)
def test_affine_grid(size: tuple[int, ...], align: int) -> None:
    n = len(size) - 2
    node = helper.make_node("AffineGrid", ["t", "size"], ["y"], align_corners=align)
    compare_nodes(node, {"t": normal(0, size[0], n, n + 1)}, {"size": np.array(size)}, opset=20)


DEFORMED = list(itertools.product((1, 2), (1, 2), (1, 2), (0, 1), (True, False), (True, False)))


@pytest.mark.parametrize(("batch", "stride", "dilation", "pad", "masked", "bias"), DEFORMED)
def test_deform_conv(batch: int, stride: int, dilation: int, pad: int, masked: bool, bias: bool) -> None:
    kernel, size = (3, 2), (9, 8)
    out = [(n + 2 * pad - dilation * (k - 1) - 1) // stride + 1 for n, k in zip(size, kernel, strict=True)]
    inputs = {"x": normal(0, batch, 3, *size), "o": normal(1, batch, 12, *out)}
    if masked:
        inputs["m"] = normal(2, batch, 6, *out)
    node = helper.make_node(
        "DeformConv",
        ["x", "w", "o", "b" if bias else "", "m" if masked else ""],
        ["y"],
        strides=[stride] * 2,
        dilations=[dilation] * 2,
        pads=[pad] * 4,
        kernel_shape=kernel,
    )
    constants = {"w": normal(3, 4, 3, *kernel), "b": normal(4, 4)}
    compare_nodes(node, inputs, constants if bias else {"w": constants["w"]}, opset=19, rel=REL)


ROIS = np.array([[0, 0, 4, 4], [1.2, 2.5, 6.7, 3.1], [-1, -2, 3, 9], [5, 5, 5.2, 5.2]], np.float32)


@pytest.mark.parametrize(
    ("opset", "mode", "ratio", "scale", "count"),
    list(itertools.product((10, 16), ("half_pixel", "output_half_pixel"), (0, 2), (1.0, 0.5), (1, 4))),
)
def test_roi_align(opset: int, mode: str, ratio: int, scale: float, count: int) -> None:
    attributes = {} if opset == 10 else {"coordinate_transformation_mode": mode}
    node = helper.make_node(
        "RoiAlign",
        ["x", "r", "i"],
        ["y"],
        output_height=3,
        output_width=2,
        sampling_ratio=ratio,
        spatial_scale=scale,
        **attributes,
    )
    inputs = {"x": normal(0, 1, 3, 8, 9), "r": ROIS[:count]}
    compare_nodes(node, inputs, {"i": np.zeros(count, np.int64)}, opset=opset, rel=REL)


@pytest.mark.parametrize(
    ("opset", "mode", "ratio", "scale", "count"),
    list(itertools.product((10, 16), ("half_pixel", "output_half_pixel"), (0, 1, 2), (1.0, 0.5), (1, 4))),
)
def test_the_largest_in_constant_regions(opset: int, mode: str, ratio: int, scale: float, count: int) -> None:
    """Regions that end where they begin have no samples if these are not counted."""
    attributes = {} if opset == 10 else {"coordinate_transformation_mode": mode}
    node = helper.make_node(
        "RoiAlign",
        ["x", "r", "i"],
        ["y"],
        mode="max",
        output_height=3,
        output_width=2,
        sampling_ratio=ratio,
        spatial_scale=scale,
        **attributes,
    )
    rois = np.concatenate([ROIS[: count - 1], [[6, 6, 6, 6]]]).astype(np.float32)
    constants = {"r": rois, "i": np.arange(count) % 2}
    compare_nodes(node, {"x": normal(0, 2, 3, 8, 9)}, constants, opset=opset, rel=REL)


@pytest.mark.parametrize(
    ("image", "block", "dilation", "pad", "stride", "batch"),
    [
        ((5, 5), (1, 5), (1, 1), (0, 0, 0, 0), (1, 1), 1),
        ((6, 8), (2, 3), (1, 1), (0, 0, 0, 0), (2, 1), 2),
        ((6, 6), (2, 2), (1, 2), (1, 0, 1, 2), (1, 2), 1),
        ((4, 4), (2, 2), (1, 1), (0, 0, 0, 0), (2, 2), 3),
    ],
)
def test_col2im(image: Any, block: Any, dilation: Any, pad: Any, stride: Any, batch: int) -> None:
    count = 1
    for i in range(2):
        count *= (image[i] + pad[i] + pad[i + 2] - dilation[i] * (block[i] - 1) - 1) // stride[i] + 1
    node = helper.make_node("Col2Im", ["x", "i", "b"], ["y"], dilations=dilation, pads=pad, strides=stride)
    x = normal(0, batch, 3 * block[0] * block[1], count)
    compare_nodes(node, {"x": x}, {"i": np.array(image), "b": np.array(block)}, opset=18)


@pytest.mark.parametrize("align_corners", [0, 1])
def test_the_nearest_pixel_at_computed_coordinates(align_corners: int) -> None:
    node = helper.make_node("GridSample", ["x", "g"], ["y"], mode="nearest", align_corners=align_corners)
    inputs = {"x": normal(0, 1, 3, 8, 9), "g": normal(1, 1, 14, 14, 2)}
    compare_nodes(node, inputs, {}, opset=20)


@pytest.mark.parametrize(("group", "offset_group"), [(1, 2), (2, 1), (2, 4), (4, 2), (2, 3)])
def test_deform_conv_in_groups(group: int, offset_group: int) -> None:
    node = helper.make_node("DeformConv", ["x", "w", "o", "b"], ["y"], group=group, offset_group=offset_group)
    constants = {"w": normal(0, 8, 12 // group, 3, 3), "b": normal(1, 8)}
    inputs = {"x": normal(2, 1, 12, 7, 8), "o": normal(3, 1, 18 * offset_group, 5, 6)}
    compare_nodes(node, inputs, constants, opset=19)


@pytest.mark.parametrize(
    ("node", "inputs", "reason"),
    [
        (
            helper.make_node("RoiAlign", ["x", "r", "i"], ["y"], mode="max"),
            {"x": normal(0, 1, 3, 8, 9), "r": ROIS},
            "mode max",
        ),
        (
            helper.make_node("DeformConv", ["x", "i4", "r"], ["y"], offset_group=2),
            {"x": normal(0, 1, 1, 4, 4), "r": normal(0, 1, 4, 4, 4)},
            "2 of offsets for 1 channels",
        ),
    ],
)
def test_refused(node: Any, inputs: Any, reason: str) -> None:
    constants = {"i": np.zeros(4, np.int64), "i4": np.ones((1, 1, 1, 1), np.float32)}
    with pytest.raises(UnsupportedError) as error:
        lower(model_of([node], inputs, {k: v for k, v in constants.items() if k in node.input}, opset=20))
    assert reason in str(error.value)
