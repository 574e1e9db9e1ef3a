"""Operators that select elements: TopK, ArgMax, NonZero, Compress, Unique, NonMaxSuppression, If."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx2ncnn_opt.tail.operators.checks import axis_of
from onnx2ncnn_opt.tail.registry import F4, B, Ints, L, N, T, of_source, tail_op


@tail_op(r"""
template<class T> bool If(Tail& t, View& y, const View& condition, const View& a, const View& b) {
    Bool holds;
    y = one(t, condition, holds) && holds == Bool(0) ? b : a;
    return count(condition) == 1;
}
""")
def if_(condition: B, then: T, other: T) -> T:
    """Return the result of the branch whose nodes ran; `read_tail` puts these nodes before the If."""
    if condition.size != 1:
        raise ValueError(f"a condition of the shape {condition.shape}")
    return then if condition.all() else other


@tail_op(r"""
template<class N>
bool TopK(Tail& t, View& y, View& indices, const View& x, const Ints& k, i64 axis, i64 largest, i64) {
    View scratch;
    Loop l;
    int a;
    if (!axis_of(a, axis, x.rank) || k.count != 1 || k.v[0] < 0 || k.v[0] > x.shape[a])
        return false;
    i64 shape[8], n = x.shape[a], count = k.v[0], room = std::min(n, 4 * count + 64);
    std::copy(x.shape, x.shape + x.rank, shape);
    shape[a] = count;
    if (!make<N>(t, y, x.rank, shape) || !make<i64>(t, indices, x.rank, shape) || !make<Pick>(t, scratch, 1, &room))
        return false;
    for (int d = 0; d < x.rank; d++)
        if (d != a)
            l.add(x.shape[d], x.stride[d], y.stride[d], 0);
    Pick* const items = at<Pick>(t, scratch);
    const uint64_t turned = largest ? 0 : ~uint64_t(0);
    l.each([&](i64 i, i64 j, i64) {
        const N* const p = at<N>(t, x) + i;
        i64 m = 0;
        uint64_t least = 0; // an element needs a larger key than this one
        bool full = false;
        for (i64 q = 0; count && q < n; q++) {
            const Pick item = {order(p[q * x.stride[a]]) ^ turned, q};
            if (full && item.key <= least)
                continue;
            items[m++] = item;
            if (m == room && q + 1 < n) {
                std::nth_element(items, items + count - 1, items + m);
                least = items[count - 1].key, m = count, full = true;
            }
        }
        if (m > count)
            std::nth_element(items, items + count - 1, items + m);
        std::sort(items, items + count);
        for (i64 q = 0; q < count; q++) {
            at<N>(t, y)[j + q * y.stride[a]] = p[items[q].at * x.stride[a]];
            at<i64>(t, indices)[j + q * y.stride[a]] = items[q].at;
        }
    });
    return true;
}
""")
def top_k(x: N, k: Ints, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[N, L]:
    """Return the k largest or smallest elements and their indices, the lower index first; NaN is the largest."""
    axis = axis_of(axis, x.ndim)
    [count] = k
    if not 0 <= count <= x.shape[axis]:
        raise ValueError(f"k = {count} of {x.shape[axis]}")
    rows = np.moveaxis(x, axis, -1)
    if largest:
        order = rows.shape[-1] - 1 - np.argsort(rows[..., ::-1], -1, "stable")[..., ::-1]
    else:
        order = np.argsort(rows, -1, "stable")
    indices = np.moveaxis(order[..., :count], -1, axis).astype(np.int64)
    return np.take_along_axis(x, indices, axis), indices


def chosen(choose: Callable[..., Any], x: NDArray[Any], axis: int, keepdims: int, last: int) -> NDArray[Any]:
    """Return the first or last index of the element that `choose` selects."""
    axis = axis_of(axis, x.ndim)
    index = choose(np.flip(x, axis) if last else x, axis, keepdims=bool(keepdims))
    return np.asarray(x.shape[axis] - 1 - index if last else index, np.int64)


for _name, _turned in ("ArgMax", "0"), ("ArgMin", "~uint64_t(0)"):  # NaN wins
    _source = f"""def {_name}(x: N, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> L:
    return chosen(np.{_name.lower()}, x, axis, keepdims, select_last_index)
"""
    _cpp = f"""
template<class N> bool {_name}(Tail& t, View& y, const View& x, i64 axis, i64 keepdims, i64 last) {{
    return choose<N>(t, y, x, axis, keepdims, last, {_turned});
}}
"""
    of_source(_source, _cpp, globals())


@tail_op(r"""
template<class T> bool NonZero(Tail& t, View& y, const View& x) {
    View v;
    const i64 all = count(x), rank = std::max(x.rank, 1);
    i64 shape[2] = {rank, 0}, at_place = 0;
    if (!dense<T>(t, v, x))
        return false;
    for (i64 i = 0; i < all; i++)
        shape[1] += at<T>(t, v)[i] != T(0);
    if (!make<i64>(t, y, 2, shape))
        return false;
    i64* const r = at<i64>(t, y);
    for (i64 i = 0; i < all; i++)
        if (at<T>(t, v)[i] != T(0)) {
            r[at_place] = 0;
            for (i64 d = x.rank, rest = i; d-- > 0; rest /= x.shape[d])
                r[d * shape[1] + at_place] = rest % x.shape[d];
            at_place++;
        }
    return true;
}
""")
def non_zero(x: T) -> L:
    """Return the indices of elements that are not 0, one row for each axis."""
    return np.stack(np.nonzero(np.atleast_1d(x))).astype(np.int64)


@tail_op(r"""
template<class T> bool Compress(Tail& t, View& y, const View& x, const View& condition, i64 axis) {
    View v = x, mask;
    int a = 0;
    if (condition.rank != 1 || !dense<Bool>(t, mask, condition) ||
        (axis == none ? !dense<T>(t, v, x) : !axis_of(a, axis, x.rank)))
        return false;
    const i64 all = count(x);
    if (axis == none)
        lay_out(v, 1, &all);
    const i64 n = std::min(v.shape[a], condition.shape[0]);
    i64 shape[8];
    std::copy(v.shape, v.shape + v.rank, shape);
    shape[a] = n - std::count(at<Bool>(t, mask), at<Bool>(t, mask) + n, Bool(0));
    if (!make<T>(t, y, v.rank, shape))
        return false;
    View from = v, to = y;
    from.shape[a] = to.shape[a] = 1;
    for (i64 i = 0; i < n; i++)
        if (at<Bool>(t, mask)[i] != Bool(0)) {
            from.at = v.at + i * v.stride[a] * i64(sizeof(T));
            assign<T>(t, to, from);
            to.at += y.stride[a] * i64(sizeof(T));
        }
    return true;
}
""")
def compress(x: T, condition: B, *, axis: int | None = None) -> T:
    """Keep the slices, or elements, whose condition holds; a missing condition is false."""
    if condition.ndim != 1:
        raise ValueError(f"a condition of the shape {condition.shape}")
    return np.compress(condition[: x.size if axis is None else x.shape[axis]], x, axis)


@tail_op(r"""
template<class T>
bool Unique(Tail& t, View& y, View& first, View& inverse, View& counts, const View& x, i64 axis, i64 sorted) {
    View v = x, rows, scratch;
    int a = 0;
    if (axis == none ? !dense<T>(t, v, x) : !axis_of(a, axis, x.rank))
        return false;
    const i64 all = count(x);
    if (axis == none)
        lay_out(v, 1, &all);
    const i64 n = v.shape[a], m = n ? all / n : 0, room = 3 * n;
    View moved = v;
    std::rotate(moved.shape, moved.shape + a, moved.shape + a + 1);
    std::rotate(moved.stride, moved.stride + a, moved.stride + a + 1);
    if (!dense<T>(t, rows, moved) || !make<i64>(t, inverse, 1, &n) || !make<i64>(t, scratch, 1, &room))
        return false;
    const T* const p = at<T>(t, rows);
    i64 *const by_value = at<i64>(t, scratch), *const leader = by_value + n, *const firsts = leader + n, size = 0;
    for (i64 i = 0; i < n; i++)
        by_value[i] = i;
    std::sort(by_value, by_value + n, [&](i64 i, i64 j) {
        for (i64 e = 0; e < m; e++)
            if (order(p[i * m + e]) != order(p[j * m + e]))
                return order(p[i * m + e]) < order(p[j * m + e]);
        return i < j;
    });
    for (i64 k = 0; k < n; k++) {
        const i64 i = by_value[k], j = k ? by_value[k - 1] : i;
        leader[i] = k && std::equal(p + i * m, p + i * m + m, p + j * m) ? leader[j] : i;
    }
    for (i64 k = 0; k < n; k++) {
        const i64 i = sorted ? by_value[k] : k;
        if (leader[i] == i)
            firsts[size++] = i;
    }
    i64 shape[8];
    std::copy(v.shape, v.shape + v.rank, shape);
    shape[a] = size;
    if (!make<i64>(t, first, 1, &size) || !make<i64>(t, counts, 1, &size) || !make<T>(t, y, v.rank, shape))
        return false;
    i64 *const ranks = at<i64>(t, scratch), *const lead = ranks + n;
    i64 *const f = at<i64>(t, first), *const c = at<i64>(t, counts);
    std::copy(lead + n, lead + n + size, f);
    std::fill(c, c + size, 0);
    View from = v, to = y;
    from.shape[a] = to.shape[a] = 1;
    for (i64 q = 0; q < size; q++) {
        ranks[f[q]] = q;
        from.at = v.at + f[q] * v.stride[a] * i64(sizeof(T));
        to.at = y.at + q * y.stride[a] * i64(sizeof(T));
        assign<T>(t, to, from);
    }
    for (i64 i = 0; i < n; i++)
        c[at<i64>(t, inverse)[i] = ranks[lead[i]]]++;
    return true;
}
""")
def unique(x: T, *, axis: int | None = None, sorted: int = 1) -> tuple[T, L, L, L]:
    """Return the different elements or slices, their first indices, the inverse and the counts."""
    slices = x.reshape(-1) if axis is None else np.moveaxis(x, axis, 0)
    rows = slices.reshape(len(slices), -1 if slices.size else int(np.prod(slices.shape[1:])))
    order = np.lexsort((np.arange(len(rows)), *rows.T[::-1]))
    starts = np.ones(len(rows), bool)
    starts[1:] = np.any(rows[order[1:]] != rows[order[:-1]], axis=1)
    group = np.cumsum(starts) - 1
    first, counts = order[starts], np.bincount(group)
    inverse = np.empty_like(order)
    inverse[order] = group
    if not sorted:
        ranks = np.argsort(first)
        first, counts = first[ranks], counts[ranks]
        inverse = np.argsort(ranks)[inverse]
    y = slices[first] if axis is None else np.moveaxis(slices[first], 0, axis)
    return y, first.astype(np.int64), inverse.astype(np.int64), counts.astype(np.int64)


@tail_op(r"""
// A product that no compiler fuses with an addition.
inline float times(float a, float b) { return float(double(a) * double(b)); }
struct Box { float x1, y1, x2, y2, area; };
inline Box box_of(const float* p, i64 center) {
    const int x = p[1] >= p[3] ? 2 : 0, y = p[0] >= p[2] ? 2 : 0; // the smaller coordinates first
    const Box corners = {p[1 + x], p[y], p[3 - x], p[2 - y], 0};
    const Box around = {p[0] - p[2] / 2, p[1] - p[3] / 2, p[0] + p[2] / 2, p[1] + p[3] / 2, 0};
    Box box = center ? around : corners;
    box.area = times(box.x2 - box.x1, box.y2 - box.y1);
    return box;
}
inline bool overlap(const Box& a, const Box& b, float most) {
    const float x1 = a.x1 < b.x1 ? b.x1 : a.x1, x2 = b.x2 < a.x2 ? b.x2 : a.x2;
    const float y1 = a.y1 < b.y1 ? b.y1 : a.y1, y2 = b.y2 < a.y2 ? b.y2 : a.y2;
    if (x2 <= x1 || y2 <= y1)
        return false;
    const float both = times(x2 - x1, y2 - y1), either = a.area + b.area - both;
    return !(both <= 0 || a.area <= 0 || b.area <= 0 || either <= 0) && both / either > most;
}
inline bool NonMaxSuppression(Tail& t, View& y, const View& boxes, const View& scores, const Ints& limit,
                              const View& iou, const View& score, i64 center) {
    View s, flat, corners, chosen, found;
    float most = 0, least = 0;
    if (boxes.rank != 3 || scores.rank != 3 || boxes.shape[2] != 4 || boxes.shape[0] != scores.shape[0] ||
        boxes.shape[1] != scores.shape[2] || (iou.rank >= 0 && !one(t, iou, most)) ||
        (score.rank >= 0 && !one(t, score, least)) || !(most >= 0 && most <= 1) || (limit.given && limit.count < 1))
        return false;
    const i64 n = boxes.shape[1], labels = scores.shape[1];
    const i64 each = std::min(n, limit.given ? std::max<i64>(limit.v[0], 0) : 0);
    i64 shape[2] = {0, 3}, room[2] = {boxes.shape[0] * labels * each, 3};
    if (!dense<float>(t, flat, boxes) || !dense<float>(t, s, scores) || !make<Pick>(t, found, 1, &n) ||
        !make<Box>(t, corners, 1, &n) || !make<Box>(t, chosen, 1, &each) || !make<i64>(t, y, 2, room))
        return false;
    Box *const box = at<Box>(t, corners), *const kept = at<Box>(t, chosen);
    Pick* const items = at<Pick>(t, found);
    i64* r = at<i64>(t, y);
    for (i64 b = 0; b < boxes.shape[0] && each; b++) {
        for (i64 i = 0; i < n; i++)
            box[i] = box_of(at<float>(t, flat) + (b * n + i) * 4, center);
        for (i64 c = 0; c < labels; c++) {
            const float* const p = at<float>(t, s) + (b * labels + c) * n;
            i64 m = 0, count = 0;
            for (i64 i = 0; i < n; i++)
                if (score.rank < 0 || p[i] > least) {
                    const Pick item = {p[i] != p[i] ? 0 : order(p[i]), i}; // NaN last
                    items[m++] = item;
                }
            std::sort(items, items + m);
            for (i64 k = 0; k < m && count < each; k++) {
                const Box& v = box[items[k].at];
                i64 e = 0;
                while (e < count && !overlap(kept[e], v, most))
                    e++;
                if (e < count)
                    continue;
                kept[count++] = v;
                *r++ = b, *r++ = c, *r++ = items[k].at;
                shape[0]++;
            }
        }
    }
    lay_out(y, 2, shape);
    return true;
}
""")
def non_max_suppression(
    boxes: F4,
    scores: F4,
    max_output_boxes_per_class: Ints | None = None,
    iou_threshold: F4 | None = None,
    score_threshold: F4 | None = None,
    *,
    center_point_box: int = 0,
) -> L:
    """Return [batch, class, box] of boxes that overlap no box with a higher score by more than the threshold."""
    most = max_output_boxes_per_class[0] if max_output_boxes_per_class else 0
    overlap = np.float32(0) if iou_threshold is None else iou_threshold.reshape(())
    if boxes.ndim != 3 or boxes.shape[2] != 4 or scores.ndim != 3 or boxes.shape[:2] != scores.shape[::2]:
        raise ValueError(f"boxes of the shape {boxes.shape} and scores of {scores.shape}")
    if not 0 <= overlap <= 1:
        raise ValueError(f"iou_threshold = {overlap}")
    selected: list[tuple[int, int, int]] = []
    for batch, label in np.ndindex(scores.shape[:2]) if most > 0 else ():
        values = scores[batch, label]
        order = np.argsort(-values, kind="stable")
        if score_threshold is not None:
            order = order[values[order] > score_threshold.reshape(())]
        corners = corners_of(boxes[batch], center_point_box)
        count = 0
        while len(order) and count < most:
            selected.append((batch, label, int(order[0])))
            count += 1
            order = order[1:][~overlaps(corners[:, order[0]], corners[:, order[1:]], overlap)]
    return np.array(selected, np.int64).reshape(-1, 3)


def corners_of(boxes: NDArray[Any], center_point_box: int) -> NDArray[Any]:
    """Return the rows x1, y1, x2, y2 of boxes, the smaller coordinates first."""
    a, b, c, d = boxes.T
    if center_point_box:
        return np.stack([a - c / 2, b - d / 2, a + c / 2, b + d / 2])
    swapped_y, swapped_x = a >= c, b >= d
    lows = np.where(swapped_x, d, b), np.where(swapped_y, c, a)
    return np.stack([*lows, np.where(swapped_x, b, d), np.where(swapped_y, a, c)])


def overlaps(box: NDArray[Any], others: NDArray[Any], threshold: Any) -> NDArray[Any]:
    """Return True for boxes whose intersection over union with a box is above a threshold."""
    low = np.where(box[:2, None] < others[:2], others[:2], box[:2, None])
    high = np.where(others[2:] < box[2:, None], others[2:], box[2:, None])
    width, height = high - low
    shared = width * height
    area = (box[2] - box[0]) * (box[3] - box[1])
    areas = (others[2] - others[0]) * (others[3] - others[1])
    union = area + areas - shared
    disjoint = (high <= low).any(axis=0) | (shared <= 0) | (area <= 0) | (areas <= 0) | (union <= 0)
    return np.asarray(~disjoint & (shared / union > threshold))
