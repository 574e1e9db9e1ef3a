"""RoiAlign of small inputs."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from onnx2ncnn_opt.tail.operators.checks import sized
from onnx2ncnn_opt.tail.registry import F, L, tail_op


@tail_op(
    r"""
struct Sample { i64 at[2]; double weight[2]; };
inline Sample sample(double low, double length, i64 size, i64 bins, i64 count, i64 i) {
    double at = low + double(i / count) * (length / double(bins));
    at += (double(i % count) + 0.5) * (length / double(bins)) / double(count);
    const bool inside = at >= -1 && at <= double(size);
    at = at > 0 ? at : 0;
    at = at < double(size - 1) ? at : double(size - 1);
    const i64 first = i64(at);
    const double part = first < size - 1 ? at - double(first) : 0;
    const Sample s = {{first, std::min(first + 1, size - 1)}, {inside ? 1 - part : 0, inside ? part : 0}};
    return s;
}
template<class F>
bool RoiAlign(Tail& t, View& y, const View& x, const View& rois, const View& images, const char* mode, i64 height,
              i64 width, i64 ratio, double scale, const char* coordinates) {
    const i64 size[2] = {x.shape[2], x.shape[3]}, bins[2] = {height, width}, n = rois.shape[0];
    const bool aligned = coordinates[0] == 'h';
    View pixels = x, list, regions, scratch[2];
    const i64 shape[] = {n, x.shape[1], height, width};
    if (x.rank != 4 || rois.rank != 2 || images.rank != 1 || rois.shape[1] != 4 || images.shape[0] != n ||
        !dense<F>(t, pixels, x) || !dense<F>(t, regions, rois) || !dense<i64>(t, list, images) ||
        !make<F>(t, y, 4, shape))
        return false;
    F* (*const to)(Tail&, const View&) = at<F>;
    const size_t used = t.used;
    for (i64 k = 0, o = 0; k < n; k++, t.used = used) {
        const i64 image = at<i64>(t, list)[k];
        i64 all[5] = {x.shape[1], height, width, 0, 0};
        for (int d = 0; d < 2; d++) {
            const F* const region = to(t, regions) + k * 4;
            const double low = double(region[1 - d]) * scale - (aligned ? 0.5 : 0);
            const double way = double(region[3 - d]) * scale - (aligned ? 0.5 : 0) - low;
            const double length = aligned || !(way < 1) ? way : 1;
            const double count = ratio > 0 ? double(ratio) : std::ceil(length / double(bins[d]));
            if (!(count <= 268435456.))
                return false;
            all[3 + d] = i64(std::max(count, 0.));
            const i64 samples = bins[d] * all[3 + d];
            if (!make<Sample>(t, scratch[d], 1, &samples) || (samples && !size[d]))
                return false;
            for (i64 i = 0; i < samples; i++)
                at<Sample>(t, scratch[d])[i] = sample(low, length, size[d], bins[d], all[3 + d], i);
        }
        if (image < 0 || image >= x.shape[0] || !fits(5, all))
            return false;
        const Sample *const rows = at<Sample>(t, scratch[0]), *const columns = at<Sample>(t, scratch[1]);
        for (i64 e = 0; e < x.shape[1] * height * width; e++) {
            const F* const p = to(t, pixels) + (image * x.shape[1] + e / (height * width)) * size[0] * size[1];
            double sum = 0, largest = all[3] && all[4] ? -INFINITY : 0;
            for (i64 s = 0; s < all[3] * all[4]; s++) {
                const Sample& r = rows[e / width % height * all[3] + s / all[4]];
                const Sample& c = columns[e % width * all[4] + s % all[4]];
                double v[4], four = 0;
                for (int q = 0; q < 4; q++) {
                    v[q] = double(p[r.at[q / 2] * size[1] + c.at[q % 2]]) * (r.weight[q / 2] * c.weight[q % 2]);
                    four = q ? four + v[q] : v[0];
                    largest = v[q] > largest || v[q] != v[q] ? v[q] : largest;
                }
                sum = s ? sum + four : four;
            }
            to(t, y)[o++] = F(mode[0] == 'm' ? largest + 0 : sum / double(std::max<i64>(all[3] * all[4], 1)));
        }
    }
    return true;
}
""",
    older={16: {"coordinate_transformation_mode": "output_half_pixel"}},
)
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
    """Average the samples of regions, or take the largest weighted pixel, computed in float64."""
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
        sized(*y.shape[1:], rows[0][0].shape[1], columns[0][0].shape[1])
        if not rows[0][0].size * columns[0][0].size:
            continue
        pixels = x[image].astype(np.float64)
        parts = [
            pixels[:, i[:, None, :, None], j[None, :, None, :]] * (v[:, None, :, None] * w[None, :, None, :])
            for i, v in rows
            for j, w in columns
        ]
        if mode == "max":
            y[n] = np.max(parts, axis=(0, 4, 5)) + 0
        else:
            summed = (((parts[0] + parts[1]) + parts[2]) + parts[3]).reshape(*y.shape[1:], -1)
            y[n] = np.cumsum(summed, axis=-1)[..., -1] / summed.shape[-1]
    return y


def samples(
    low: float, high: float, size: int, bins: int, ratio: int, aligned: bool
) -> list[tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """Return the two pixels next to each sample of each bin along an axis, and their weights."""
    length = high - low if aligned else max(high - low, 1.0)
    count = ratio if ratio > 0 else max(int(np.ceil(length / bins)), 0)
    sized(bins, count)
    at = low + np.arange(bins)[:, None] * (length / bins) + (np.arange(count) + 0.5) * (length / bins) / count
    inside = (at >= -1) & (at <= size)
    at = np.where(at > 0, at, 0)
    first = np.where(at < size - 1, at, size - 1).astype(np.int64)
    part = np.where(first < size - 1, at - first, 0)
    second = np.minimum(first + 1, size - 1)
    return [(first, (1 - part) * inside), (second, part * inside)]
