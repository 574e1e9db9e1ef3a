"""Gather, Scatter and OneHot. An index out of range is an error."""

from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from onnx2ncnn_opt.tail.operators.checks import axis_of, sized, wrapped
from onnx2ncnn_opt.tail.registry import I, L, M, N, T, tail_op

Reduction: TypeAlias = Literal["none", "add", "mul", "max", "min"]


@tail_op(r"""
template<class T, class I> bool Gather(Tail& t, View& y, const View& x, const View& indices, i64 axis) {
    int a;
    View list;
    i64 shape[16];
    if (!axis_of(a, axis, x.rank) || !dense<I>(t, list, indices))
        return false;
    i64* const end = std::copy(indices.shape, indices.shape + indices.rank, std::copy(x.shape, x.shape + a, shape));
    std::copy(x.shape + a + 1, x.shape + x.rank, end);
    if (!make<T>(t, y, x.rank - 1 + indices.rank, shape))
        return false;
    View from = x, to = y;
    from.rank = to.rank = x.rank - 1;
    for (int d = 0; d < from.rank; d++) {
        from.shape[d] = to.shape[d] = x.shape[d + (d >= a)];
        from.stride[d] = x.stride[d + (d >= a)];
        to.stride[d] = y.stride[d < a ? d : d + indices.rank];
    }
    const i64 step = product(x.shape + a + 1, x.shape + x.rank) * i64(sizeof(T)), n = count(list);
    for (i64 k = 0; k < n; k++, to.at += step) {
        i64 i = i64(at<I>(t, list)[k]);
        if (!wrap(i, x.shape[a]))
            return false;
        from.at = x.at + i * x.stride[a] * i64(sizeof(T));
        assign<T>(t, to, from);
    }
    return true;
}
""")
def gather(x: T, indices: I, *, axis: int = 0) -> T:
    """Take slices of an axis."""
    axis = axis_of(axis, x.ndim)
    sized(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    return np.take(x, wrapped(indices, x.shape[axis]), axis)


@tail_op(r"""
template<class T, class I> bool GatherElements(Tail& t, View& y, const View& x, const View& indices, i64 axis) {
    Loop l;
    int a;
    bool right = true;
    if (!places(l, a, axis, x, indices, indices) || !make<T>(t, y, x.rank, indices.shape))
        return false;
    T* r = at<T>(t, y);
    l.each([&](i64 i, i64 j, i64) {
        i64 k = i64(at<I>(t, indices)[i]);
        right = right && wrap(k, x.shape[a]);
        *r++ = right ? at<T>(t, x)[j + k * x.stride[a]] : T(0);
    });
    return right;
}
""")
def gather_elements(x: T, indices: I, *, axis: int = 0) -> T:
    """Take elements; the indices replace their positions along one axis."""
    return x[places(x, indices, axis)]


@tail_op(
    r"""
template<class T, class I>
bool ScatterElements(Tail& t, View& y, const View& x, const View& indices, const View& updates, i64 axis,
                     const char* how) {
    Loop l;
    int a;
    bool right = updates.rank == x.rank && std::equal(updates.shape, updates.shape + x.rank, indices.shape);
    if (!right || !copy<T>(t, y, x) || !places(l, a, axis, y, indices, updates))
        return false;
    l.each([&](i64 i, i64 j, i64 u) {
        i64 k = i64(at<I>(t, indices)[i]);
        right = right && wrap(k, x.shape[a]);
        T& r = at<T>(t, y)[right ? j + k * y.stride[a] : 0];
        r = right ? merged(r, at<T>(t, updates)[u], how[1]) : r;
    });
    return right;
}
""",
    "ScatterElements",
    "Scatter",
)
def scatter_elements(x: T, indices: I, updates: T, *, axis: int = 0, reduction: Reduction = "none") -> T:
    """Write elements; the indices replace their positions along one axis, and the last write of a position wins."""
    if updates.shape != indices.shape:
        raise ValueError(f"updates of the shape {updates.shape} for indices of {indices.shape}")
    return scattered(x, places(x, indices, axis), updates, reduction)


@tail_op(r"""
template<class T> bool GatherND(Tail& t, View& y, const View& x, const View& indices, i64 batch) {
    View list;
    const int b = int(batch), lead = indices.rank - 1;
    const i64 n = lead >= 0 ? indices.shape[lead] + b : 9;
    if (batch < 0 || batch > lead || n > x.rank || !std::equal(x.shape, x.shape + b, indices.shape) ||
        !dense<i64>(t, list, indices))
        return false;
    i64 shape[16];
    std::copy(x.shape + n, x.shape + x.rank, std::copy(indices.shape, indices.shape + lead, shape));
    if (!make<T>(t, y, lead + x.rank - int(n), shape))
        return false;
    const i64 rows = product(indices.shape, indices.shape + lead);
    const i64 each = product(indices.shape + b, indices.shape + lead);
    View from = x, to = y;
    lay_out(to, x.rank - int(n), x.shape + n);
    from.rank = to.rank;
    std::copy(x.shape + n, x.shape + x.rank, from.shape);
    std::copy(x.stride + n, x.stride + x.rank, from.stride);
    for (i64 r = 0; r < rows; r++, to.at += count(to) * i64(sizeof(T))) {
        from.at = x.at;
        for (i64 d = b, rest = r / each; d-- > 0; rest /= x.shape[d])
            from.at += rest % x.shape[d] * x.stride[d] * i64(sizeof(T));
        for (i64 d = b; d < n; d++) {
            i64 i = at<i64>(t, list)[r * (n - b) + d - b];
            if (!wrap(i, x.shape[d]))
                return false;
            from.at += i * x.stride[d] * i64(sizeof(T));
        }
        assign<T>(t, to, from);
    }
    return true;
}
""")
def gather_nd(x: T, indices: L, *, batch_dims: int = 0) -> T:
    """Take slices at tuples of indices."""
    count = batch_dims + indices.shape[-1]
    if count > x.ndim or batch_dims >= indices.ndim or x.shape[:batch_dims] != indices.shape[:batch_dims]:
        raise ValueError(f"indices of the shape {indices.shape} into {x.shape}")
    sized(*indices.shape[:-1], *x.shape[count:])
    where: list[Any] = [*np.indices(indices.shape[:-1], sparse=True)[:batch_dims]]
    where += [wrapped(indices[..., i - batch_dims], x.shape[i]) for i in range(batch_dims, count)]
    return np.broadcast_to(x[tuple(where)], (*indices.shape[:-1], *x.shape[count:]))


@tail_op(r"""
template<class T>
bool ScatterND(Tail& t, View& y, const View& x, const View& indices, const View& updates, const char* how) {
    View list, values;
    const int lead = indices.rank - 1;
    const i64 n = lead >= 0 ? indices.shape[lead] : 9;
    if (n > x.rank || updates.rank != lead + x.rank - n ||
        !std::equal(x.shape + n, x.shape + x.rank, updates.shape + lead) ||
        !std::equal(updates.shape, updates.shape + lead, indices.shape) || !dense<i64>(t, list, indices) ||
        !dense<T>(t, values, updates) || !copy<T>(t, y, x))
        return false;
    const i64 rows = product(indices.shape, indices.shape + lead);
    View to = y;
    lay_out(to, x.rank - int(n), x.shape + n);
    lay_out(values, x.rank - int(n), x.shape + n);
    for (i64 r = 0; r < rows; r++, values.at += count(to) * i64(sizeof(T))) {
        to.at = y.at;
        for (i64 d = 0; d < n; d++) {
            i64 i = at<i64>(t, list)[r * n + d];
            if (!wrap(i, x.shape[d]))
                return false;
            to.at += i * y.stride[d] * i64(sizeof(T));
        }
        assign<T>(t, to, values, how[1]);
    }
    return true;
}
""")
def scatter_nd(x: T, indices: L, updates: T, *, reduction: Reduction = "none") -> T:
    """Write slices at tuples of indices; the last write of a position wins."""
    count = indices.shape[-1]
    if count > x.ndim or updates.shape != indices.shape[:-1] + x.shape[count:]:
        raise ValueError(f"updates of the shape {updates.shape} at indices of {indices.shape} in {x.shape}")
    where = tuple(wrapped(indices[..., i], x.shape[i]) for i in range(count))
    return scattered(x, where, updates, reduction)


@tail_op(r"""
template<class N, class M, class T>
bool OneHot(Tail& t, View& y, const View& indices, const View& depth, const View& values, i64 axis) {
    int a;
    M classes;
    View list;
    i64 shape[9];
    if (!axis_of(a, axis, indices.rank + 1) || !one(t, depth, classes) || values.rank != 1 || values.shape[0] != 2 ||
        !dense<N>(t, list, indices))
        return false;
    i64* const end = std::copy(list.shape, list.shape + a, shape);
    const i64 n = *end = To<i64>::from(classes);
    std::copy(list.shape + a, list.shape + list.rank, end + 1);
    if (!make<T>(t, y, list.rank + 1, shape))
        return false;
    const T off = at<T>(t, values)[0], on = at<T>(t, values)[values.stride[0]];
    const i64 inner = product(list.shape + a, list.shape + list.rank), all = count(list);
    T* const r = at<T>(t, y);
    std::fill(r, r + count(y), off);
    for (i64 k = 0; k < all; k++) {
        i64 i = To<i64>::from(at<N>(t, list)[k]);
        if (wrap(i, n))
            r[(k / inner * n + i) * inner + k % inner] = on;
    }
    return true;
}
""")
def one_hot(indices: N, depth: M, values: T, *, axis: int = -1) -> T:
    """Return values[1] at the indices and values[0] elsewhere."""
    axis = axis_of(axis, indices.ndim + 1)
    size = int(depth.reshape(()))
    if values.shape != (2,):
        raise ValueError(f"values of the shape {values.shape}")
    sized(*indices.shape, size)
    at = np.expand_dims(indices.astype(np.int64), axis)
    at = np.where(at < 0, at + size, at)
    classes = np.arange(size).reshape([-1] + [1] * (indices.ndim - axis))
    return np.asarray(np.where(classes == at, values[1], values[0]))


def places(x: NDArray[Any], indices: NDArray[Any], axis: int) -> tuple[NDArray[np.int64], ...]:
    """Return the positions of elements as indices along all axes."""
    axis = axis_of(axis, x.ndim)
    if indices.ndim != x.ndim or any(
        a > b for i, (a, b) in enumerate(zip(indices.shape, x.shape, strict=True)) if i != axis
    ):
        raise ValueError(f"indices of the shape {indices.shape} into {x.shape}")
    grid: list[NDArray[np.int64]] = [*np.indices(indices.shape, sparse=True)]
    grid[axis] = wrapped(indices, x.shape[axis])
    return tuple(grid)


def scattered(x: NDArray[Any], where: tuple[Any, ...], updates: NDArray[Any], reduction: str) -> NDArray[Any]:
    """Return a copy of x with the updates in order."""
    y = x.copy()
    if reduction == "none":
        y[where] = updates
    else:
        ufuncs: dict[str, Any] = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
        ufuncs[reduction].at(y, where, updates)
        if reduction in ("max", "min"):
            y[where] += y.dtype.type(0)  # CPUs choose between 0 and -0 in different ways
    return y
