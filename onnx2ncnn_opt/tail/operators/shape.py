"""Operators that create, move or cast elements without computing."""

from typing import Literal

import numpy as np

from onnx2ncnn_opt.tail.operators.checks import axes_of, axis_of, sized, slice_indices
from onnx2ncnn_opt.tail.registry import Ints, L, N, T, To, V, tail_op


@tail_op(r"""
template<class T> bool Identity(Tail&, View& y, const View& x) { return y = x, true; }
""")
def identity(x: T) -> T:
    """Return the input."""
    return x


@tail_op(r"""
template<class T> bool Transpose(Tail&, View& y, const View& x, const Ints& perm) {
    y = x;
    for (int d = 0, a; d < x.rank; y.shape[d] = x.shape[a], y.stride[d] = x.stride[a], d++)
        if (!axis_of(a, perm.given ? perm.v[d] : x.rank - 1 - d, x.rank) || (perm.given && perm.count != x.rank))
            return false;
    return true;
}
""")
def transpose(x: T, *, perm: list[int] | None = None) -> T:
    """Permute the axes."""
    return np.transpose(x, perm)


@tail_op(r"""
template<class T> bool Reshape(Tail& t, View& y, const View& x, const Ints& shape, i64 allowzero) {
    i64 s[8];
    int rest = -1;
    for (int d = 0; d < shape.count; d++) {
        if (d == 8 || shape.v[d] < -1 || (shape.v[d] < 0 && rest >= 0) || (!shape.v[d] && !allowzero && d >= x.rank))
            return false;
        s[d] = shape.v[d] || allowzero ? shape.v[d] : x.shape[d];
        rest = s[d] < 0 ? d : rest;
        s[d] = s[d] < 0 ? 1 : s[d];
    }
    if (!fits(shape.count, s) || !dense<T>(t, y, x))
        return false;
    const i64 known = product(s, s + shape.count), all = count(x);
    if (rest >= 0 && known)
        s[rest] = all / known;
    lay_out(y, shape.count, s);
    return count(y) == all && (rest < 0 || known);
}
""")
def reshape(x: T, shape: Ints, *, allowzero: int = 0) -> T:
    """Reshape; 0 keeps a size, and -1 is inferred."""
    if min(shape, default=0) < -1:
        raise ValueError(f"the shape {shape}")
    return x.reshape(shape if allowzero else [size or x.shape[axis] for axis, size in enumerate(shape)])


@tail_op(r"""
template<class T> bool Flatten(Tail& t, View& y, const View& x, i64 axis) {
    int a = x.rank;
    if ((axis != x.rank && !axis_of(a, axis, x.rank)) || !dense<T>(t, y, x))
        return false;
    const i64 shape[] = {product(x.shape, x.shape + a), product(x.shape + a, x.shape + x.rank)};
    lay_out(y, 2, shape);
    return true;
}
""")
def flatten(x: T, *, axis: int = 1) -> T:
    """Reshape to a matrix: merge the axes before `axis`, and the others."""
    axis = axis_of(axis, x.ndim) if axis != x.ndim else axis
    rows = int(np.prod(x.shape[:axis]))
    return x.reshape(rows, int(np.prod(x.shape[axis:])))


@tail_op(r"""
template<class T> bool Squeeze(Tail&, View& y, const View& x, const Ints& axes) {
    bool gone[8] = {false}, right = marked(gone, axes, x.rank);
    y = x;
    y.rank = 0;
    for (int d = 0; d < x.rank; d++) {
        right = right && (!gone[d] || x.shape[d] == 1);
        if (axes.given ? !gone[d] : x.shape[d] != 1)
            y.shape[y.rank] = x.shape[d], y.stride[y.rank++] = x.stride[d];
    }
    return right;
}
""")
def squeeze(x: T, axes: Ints | None = None) -> T:
    """Drop axes of size 1."""
    return np.squeeze(x, None if axes is None else tuple(axes))


@tail_op(r"""
template<class T> bool Unsqueeze(Tail&, View& y, const View& x, const Ints& axes) {
    bool added[8] = {false};
    y = x;
    y.rank = x.rank + axes.count;
    if (y.rank > 8 || !marked(added, axes, y.rank))
        return false;
    for (int d = 0, e = 0; d < y.rank; e += !added[d], d++)
        y.shape[d] = added[d] ? 1 : x.shape[e], y.stride[d] = added[d] ? 0 : x.stride[e];
    return true;
}
""")
def unsqueeze(x: T, axes: Ints) -> T:
    """Add axes of size 1."""
    return np.expand_dims(x, tuple(axes))


@tail_op(r"""
template<class T> bool Expand(Tail&, View& y, const View& x, const Ints& shape) {
    i64 s[8];
    int rank = 0;
    if (shape.count > 8)
        return false;
    widen(rank, s, x.rank, x.shape);
    widen(rank, s, shape.count, shape.v);
    for (int d = 1; d <= shape.count; d++)
        if (shape.v[shape.count - d] != 1 && shape.v[shape.count - d] != s[8 - d])
            return false;
    return fits(rank, s + 8 - rank) && spread(y, x, rank, s + 8 - rank);
}
""")
def expand(x: T, shape: Ints) -> T:
    """Broadcast to a shape."""
    return np.broadcast_to(x, sized(*np.broadcast_shapes(x.shape, tuple(shape))))


@tail_op(r"""
template<class T>
bool Slice(Tail&, View& y, const View& x, const Ints& starts, const Ints& ends, const Ints& axes, const Ints& steps) {
    int a[8];
    if (!axes_of(a, starts.count, axes, x.rank) || starts.count != ends.count ||
        (steps.given && steps.count != starts.count))
        return false;
    y = x;
    for (int i = 0; i < starts.count; i++) {
        const i64 n = x.shape[a[i]], k = steps.given ? std::max(steps.v[i], -std::numeric_limits<i64>::max()) : 1;
        const bool all = k < 0 && (ends.v[i] == none || ends.v[i] == 2147483647); // to the beginning
        i64 s[2] = {starts.v[i], all ? -n - 1 : ends.v[i]};
        if (k == 0)
            return false;
        for (int e = 0; e < 2; e++)
            s[e] = std::min(std::max<i64>(s[e] < 0 ? s[e] + n : s[e], k < 0 ? -e : 0), k < 0 ? n - 1 : n);
        const i64 way = k > 0 ? s[1] - s[0] : s[0] - s[1], size = way > 0 ? (way - 1) / (k > 0 ? k : -k) + 1 : 0;
        y.shape[a[i]] = size;
        y.stride[a[i]] *= size > 1 ? k : 1;
        y.at += size ? s[0] * x.stride[a[i]] * i64(sizeof(T)) : 0;
    }
    return true;
}
""")
def slice_(x: T, starts: Ints, ends: Ints, axes: Ints | None = None, steps: Ints | None = None) -> T:
    """Slice axes."""
    cuts = [slice(None)] * x.ndim
    chosen = axes_of(range(len(starts)) if axes is None else axes, x.ndim)
    for start, end, axis, step in zip(starts, ends, chosen, steps or [1] * len(starts), strict=True):
        indices = slice_indices(x.shape[axis], start, end, step)
        cuts[axis] = slice(indices.start, indices.stop if indices.stop >= 0 else None, step)
    return x[tuple(cuts)]


@tail_op(r"""
template<class T> bool Split(Tail&, View* y, const View& x, const Ints& sizes, i64 axis, i64 n) {
    int a;
    i64 at = 0;
    if (!axis_of(a, axis, x.rank) || (sizes.given && sizes.count != n))
        return false;
    const i64 part = (x.shape[a] + n - 1) / n;
    for (i64 i = 0; i < n; at += y[i++].shape[a]) {
        y[i] = x;
        y[i].shape[a] = sizes.given ? sizes.v[i] : std::min(part, x.shape[a] - at);
        y[i].at += at * x.stride[a] * i64(sizeof(T));
        if (y[i].shape[a] < 0 || y[i].shape[a] > x.shape[a] - at)
            return false;
    }
    return at == x.shape[a];
}
""")
def split(x: T, split: Ints | None = None, *, axis: int = 0, num_outputs: int) -> list[T]:
    """Split an axis into parts of the sizes `split`, by default of equal sizes."""
    axis = axis_of(axis, x.ndim)
    size = x.shape[axis]
    part = -(-size // num_outputs)
    sizes = [min(part, max(size - i * part, 0)) for i in range(num_outputs)] if split is None else split
    if len(sizes) != num_outputs or min(sizes) < 0 or sum(sizes) != size:
        raise ValueError(f"parts of the sizes {sizes} from {size}")
    return np.split(x, np.cumsum(sizes)[:-1], axis)


@tail_op(r"""
template<class T> bool Concat(Tail& t, View& y, int n, const View* x, i64 axis) {
    int a;
    View part = x[0];
    if (!axis_of(a, axis, part.rank))
        return false;
    for (int i = 1; i < n; i++) {
        for (int d = 0; d < part.rank; d++)
            if (x[i].rank != part.rank || (d != a && x[i].shape[d] != part.shape[d]))
                return false;
        part.shape[a] += x[i].shape[a];
    }
    if (!make<T>(t, y, part.rank, part.shape))
        return false;
    part = y;
    for (int i = 0; i < n; part.at += part.shape[a] * part.stride[a] * i64(sizeof(T)), i++) {
        part.shape[a] = x[i].shape[a];
        assign<T>(t, part, x[i]);
    }
    return true;
}
""")
def concat(*xs: T, axis: int) -> T:
    """Concatenate tensors along an axis."""
    axis = axis_of(axis, xs[0].ndim)
    sized(*xs[0].shape[:axis], sum(x.shape[axis] for x in xs), *xs[0].shape[axis + 1 :])
    return np.concatenate(xs, axis)


@tail_op(r"""
template<class T> bool Tile(Tail& t, View& y, const View& x, const Ints& repeats) {
    i64 shape[8];
    for (int d = 0; d < x.rank; shape[d] = x.shape[d] * repeats.v[d], d++)
        if (repeats.count != x.rank || repeats.v[d] < 0 || repeats.v[d] > 268435456)
            return false;
    if (repeats.count != x.rank || !make<T>(t, y, x.rank, shape))
        return false;
    T* const r = at<T>(t, y);
    const i64 all = count(y);
    for (i64 i = 0; i < all; i++) {
        i64 from = 0;
        for (i64 d = x.rank, rest = i; d-- > 0; rest /= shape[d])
            from += rest % shape[d] % x.shape[d] * x.stride[d];
        r[i] = at<T>(t, x)[from];
    }
    return true;
}
""")
def tile(x: T, repeats: Ints) -> T:
    """Repeat along each axis."""
    for count in repeats:
        sized(count)
    sized(*(size * count for size, count in zip(x.shape, repeats, strict=True)))
    return np.tile(x, repeats)


@tail_op(r"""
template<class T>
bool Pad(Tail& t, View& y, const View& x, const Ints& pads, const View& value, const Ints& axes) {
    View from = x, to;
    T fill = T(0);
    int a[8];
    const int n = axes.given ? axes.count : x.rank;
    i64 shape[8], first[8] = {0};
    std::copy(x.shape, x.shape + x.rank, shape);
    if (!axes_of(a, n, axes, x.rank) || pads.count != 2 * n || (value.rank >= 0 && !one(t, value, fill)))
        return false;
    for (int i = 0; i < n; i++) {
        const i64 most = 268435456, before = pads.v[i], after = pads.v[i + n];
        if (std::max(before, after) > most || std::min(before, after) < -most)
            return false;
        first[a[i]] = std::max<i64>(before, 0);
        shape[a[i]] += before + after;
        from.shape[a[i]] += std::min<i64>(before, 0) + std::min<i64>(after, 0);
        from.at -= std::min<i64>(before, 0) * x.stride[a[i]] * i64(sizeof(T));
        if (from.shape[a[i]] < 0)
            return false;
    }
    if (!make<T>(t, y, x.rank, shape))
        return false;
    std::fill(at<T>(t, y), at<T>(t, y) + count(y), fill);
    to = y;
    for (int d = 0; d < x.rank; d++)
        to.at += first[d] * y.stride[d] * i64(sizeof(T)), to.shape[d] = from.shape[d];
    assign<T>(t, to, from);
    return true;
}
""")
def pad(
    x: T, pads: Ints, value: T | None = None, axes: Ints | None = None, *, mode: Literal["constant"] = "constant"
) -> T:
    """Pad a tensor with a constant; negative pads crop."""
    chosen = axes_of(range(x.ndim) if axes is None else axes, x.ndim)
    ends = np.zeros((2, x.ndim), np.int64)
    ends[:, chosen] = np.reshape(pads, (2, len(chosen)))
    sized(*(x.shape + ends.sum(axis=0)).tolist())
    sized(*(x.shape + np.minimum(ends, 0).sum(axis=0)).tolist())
    edges = zip(x.shape, *ends.tolist(), strict=True)
    cut = x[tuple(slice(max(-first, 0), size - max(-last, 0)) for size, first, last in edges)]
    ends, fill = np.maximum(ends, 0), 0 if value is None else value.reshape(())
    return np.pad(cut, ends.T, constant_values=fill) if x.ndim else x


@tail_op(r"""
template<class T> bool Shape(Tail& t, View& y, const View& x, i64 start, i64 end) {
    const i64 n = x.rank, s = std::min(std::max<i64>(start < 0 ? start + n : start, 0), n);
    const i64 e = std::min(std::max<i64>(end < 0 ? end + n : end, 0), n), size = std::max<i64>(e - s, 0);
    if (!make<i64>(t, y, 1, &size))
        return false;
    std::copy(x.shape + s, x.shape + s + size, at<i64>(t, y));
    return true;
}
""")
def shape(x: T, *, start: int = 0, end: int | None = None) -> L:
    """Return the shape."""
    return np.array(x.shape[start:end], np.int64)


@tail_op(r"""
template<class T> bool Size(Tail& t, View& y, const View& x) {
    return make<i64>(t, y, 0, NULL) && (*at<i64>(t, y) = count(x), true);
}
""")
def size(x: T) -> L:
    """Return the number of elements."""
    return np.array(x.size, np.int64)


@tail_op(r"""
template<class V> bool ConstantOfShape(Tail& t, View& y, const Ints& shape, const View& value) {
    V fill = V(0);
    if ((value.rank >= 0 && !one(t, value, fill)) || shape.count > 8 || !make<V>(t, y, shape.count, shape.v))
        return false;
    std::fill(at<V>(t, y), at<V>(t, y) + count(y), fill);
    return true;
}
""")
def constant_of_shape(shape: Ints, value: V | None = None) -> V:
    """Fill a shape with a value."""
    return np.full(sized(*shape), np.float32(0) if value is None else value.reshape(()))


@tail_op(r"""
inline double steps(double, double, double step, double way) { return step == 0 ? NAN : std::ceil(way / step); }
inline double steps(uint64_t first, uint64_t last, uint64_t step, uint64_t way) {
    const bool down = i64(step) < 0;
    if (step == 0 || first == last || down != (i64(last) < i64(first)))
        return step == 0 ? NAN : 0;
    return double(((down ? 0 - way : way) - 1) / (down ? 0 - step : step)) + 1;
}
template<class N> bool Range(Tail& t, View& y, const View& start, const View& limit, const View& delta) {
    typedef typename Wide<N>::W W;
    typedef typename Wide<N>::A A;
    N first, last, step;
    if (!one(t, start, first) || !one(t, limit, last) || !one(t, delta, step))
        return false;
    const double n = steps(A(first), A(last), A(step), A(N(W(last) - W(first))));
    const i64 size = n <= 268435456. ? i64(std::max(n, 0.)) : -1;
    if (!make<N>(t, y, 1, &size))
        return false;
    for (i64 i = 0; i < size; i++, first = N(W(first) + W(step)))
        at<N>(t, y)[i] = first;
    return true;
}
""")
def range_(start: N, limit: N, delta: N) -> N:
    """Count from start to limit; floats are added up one by one, as in ONNX Runtime."""
    first, step = start.reshape(()).item(), delta.reshape(()).item()
    if start.dtype.kind == "f":
        count = float(np.ceil(np.float64(limit.reshape(()) - start.reshape(())) / step))
    else:
        count = -((first - limit.reshape(()).item()) // step)
    if not step or not count <= 2**28:
        raise ValueError(f"a result of {count} elements")
    y = np.full(int(max(count, 0)), step, start.dtype)
    y[:1] = first
    return np.add.accumulate(y, dtype=start.dtype)


@tail_op(r"""
template<class T, class R> struct Casting { R operator()(T a, T, T) const { return To<R>::from(a); } };
template<class T, class R> bool Cast(Tail& t, View& y, const View& x) {
    return map<R, T, T, T>(t, y, x, x, x, Casting<T, R>());
}
""")
def cast(x: T, *, to: str, saturate: int = 1, round_mode: str = "up") -> To:
    """Cast; floats outside of an integer type's range become its lowest number, as on x86."""
    if x.dtype.kind != "f" or np.dtype(to).kind not in "iu":
        return x.astype(to)
    wide = np.int64 if to in ("int64", "uint64", "uint32") else np.int32
    low = float(np.iinfo(wide).min)
    y = x.astype(np.float64)
    return np.where((y > low) & (y < -low), y, low).astype(wide).astype(to)


@tail_op(r"""
template<class T> bool Trilu(Tail& t, View& y, const View& x, const View& k, i64 upper) {
    i64 diagonal = 0;
    if (x.rank < 2 || (k.rank >= 0 && !one(t, k, diagonal)) || !copy<T>(t, y, x))
        return false;
    const i64 rows = y.shape[y.rank - 2], columns = y.shape[y.rank - 1], all = count(y);
    T* const p = at<T>(t, y);
    for (i64 i = 0; i < all; i++) {
        const i64 place = i % columns - i / columns % rows;
        if (upper ? place < diagonal : place > diagonal)
            p[i] = T(0);
    }
    return true;
}
""")
def trilu(x: T, k: L | None = None, *, upper: int = 1) -> T:
    """Return x with zeros below the k-th diagonal of the last two axes, or above it."""
    diagonal = 0 if k is None else int(k.reshape(()))
    return np.asarray(np.triu(x, diagonal) if upper else np.tril(x, diagonal))
