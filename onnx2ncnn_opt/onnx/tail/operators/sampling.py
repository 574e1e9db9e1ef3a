"""RoiAlign, on small inputs."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from onnx2ncnn_opt.onnx.tail.operators.checks import sized
from onnx2ncnn_opt.onnx.tail.registry import F, L, tail_op


@tail_op("RoiAlign", cpp="", older={16: {"coordinate_transformation_mode": "output_half_pixel"}})
def roi_align(
    x: F,
    rois: F,
    batch_indices: L,
    *,
    mode: Literal["avg", "max"] = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
    coordinate_transformation_mode: Literal["half_pixel", "output_half_pixel"] = "half_pixel",
) -> F:
    """Average samples of regions, or take the largest part of one, computed in float64."""
    if x.ndim != 4 or rois.shape != (*batch_indices.shape, 4):
        raise ValueError(f"regions of the shape {rois.shape} of images {batch_indices.shape} in {x.shape}")
    if np.any((batch_indices < 0) | (batch_indices >= len(x))):
        raise ValueError(f"an image that is not below {len(x)}")
    y = np.zeros(sized(len(rois), x.shape[1], output_height, output_width), x.dtype)
    aligned = coordinate_transformation_mode == "half_pixel"
    for n, image in enumerate(batch_indices):
        left, top, right, bottom = rois[n].astype(np.float64) * spatial_scale - 0.5 * aligned
        columns = samples(left, right, x.shape[3], output_width, sampling_ratio, aligned)
        rows = samples(top, bottom, x.shape[2], output_height, sampling_ratio, aligned)
        pixels = x[image].astype(np.float64)
        parts = [
            pixels[:, i[:, None, :, None], j[None, :, None, :]] * (v[:, None, :, None] * w[None, :, None, :])
            for i, v in rows
            for j, w in columns
        ]
        if mode == "max":
            y[n] = np.max(parts, axis=(0, 4, 5))
        else:
            summed = ((parts[0] + parts[1]) + parts[2]) + parts[3]
            y[n] = np.cumsum(summed.reshape(*summed.shape[:3], -1), axis=-1)[..., -1] / max(summed[0, 0, 0].size, 1)
    return y


def samples(
    low: float, high: float, size: int, bins: int, ratio: int, aligned: bool
) -> list[tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """Return the two pixels next to each sample of each bin along an axis, and their weights."""
    length = high - low if aligned else max(high - low, 1.0)
    count = ratio if ratio > 0 else int(np.ceil(length / bins))
    at = low + np.arange(bins)[:, None] * (length / bins) + (np.arange(count) + 0.5) * (length / bins) / count
    inside = (at >= -1) & (at <= size)
    at = np.where(at > 0, at, 0)
    first = np.where(at < size - 1, at, size - 1).astype(np.int64)
    part = np.where(first < size - 1, at - first, 0)
    second = np.minimum(first + 1, size - 1)
    return [(first, (1 - part) * inside), (second, part * inside)]
