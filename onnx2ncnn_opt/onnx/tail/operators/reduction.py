"""Reductions. Floats are added in float64, in order, and rounded once: C++ then gives the same bits."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx2ncnn_opt.onnx.tail.operators.checks import axes_of, axis_of
from onnx2ncnn_opt.onnx.tail.registry import F, Ints, N, T, tail_op


@tail_op(
    "ReduceMax",
    cpp=r"""
template<class T> struct Largest {
    typedef T Acc;
    static T start() { return extreme<T>(false, false); }
    static void step(T& a, T v, i64) { a = (v > a) | (v != v) ? v : a; }
    static T end(T a, i64) { return T(a + 0); }
};
template<class T> bool ReduceMax(Tail& t, View& y, const View& x, const Ints& axes, i64 keepdims, i64 noop) {
    return reduce<T, T>(t, y, x, axes, keepdims, noop, Largest<T>());
}
""",
)
def reduce_max(x: T, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> T:
    """Return the largest elements; NaN wins."""
    lowest = -np.inf if x.dtype.kind == "f" else 0 if x.dtype.kind == "b" else np.iinfo(x.dtype).min
    return reduced(np.maximum, x, lowest, axes, keepdims, noop_with_empty_axes)


@tail_op(
    "ReduceMin",
    cpp=r"""
template<class T> struct Smallest {
    typedef T Acc;
    static T start() { return extreme<T>(true, false); }
    static void step(T& a, T v, i64) { a = (v < a) | (v != v) ? v : a; }
    static T end(T a, i64) { return T(a + 0); }
};
template<class T> bool ReduceMin(Tail& t, View& y, const View& x, const Ints& axes, i64 keepdims, i64 noop) {
    return reduce<T, T>(t, y, x, axes, keepdims, noop, Smallest<T>());
}
""",
)
def reduce_min(x: T, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> T:
    """Return the smallest elements; NaN wins."""
    highest = np.inf if x.dtype.kind == "f" else 1 if x.dtype.kind == "b" else np.iinfo(x.dtype).max
    return reduced(np.minimum, x, highest, axes, keepdims, noop_with_empty_axes)


@tail_op(
    "ReduceSum",
    cpp=r"""
template<class T> bool ReduceSum(Tail& t, View& y, const View& x, const Ints& axes, i64 keepdims, i64 noop) {
    return reduce<T, T>(t, y, x, axes, keepdims, noop, Sum<T, false>());
}
""",
    is_inexact=True,
)
def reduce_sum(x: N, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> N:
    """Return the sums."""
    return reduced(np.add, x, 0, axes, keepdims, noop_with_empty_axes)


@tail_op(
    "ReduceProd",
    cpp=r"""
template<class T> struct Product {
    typedef typename Wide<T>::A Acc;
    static Acc start() { return 1; }
    static void step(Acc& a, T v, i64) { a *= Acc(v); }
    static T end(Acc a, i64) { return T(a + 0); }
};
template<class T> bool ReduceProd(Tail& t, View& y, const View& x, const Ints& axes, i64 keepdims, i64 noop) {
    return reduce<T, T>(t, y, x, axes, keepdims, noop, Product<T>());
}
""",
)
def reduce_prod(x: N, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> N:
    """Return the products."""
    return reduced(np.multiply, x, 1, axes, keepdims, noop_with_empty_axes)


@tail_op(
    "ReduceMean",
    cpp=r"""
template<class T> bool ReduceMean(Tail& t, View& y, const View& x, const Ints& axes, i64 keepdims, i64 noop) {
    return reduce<T, T>(t, y, x, axes, keepdims, noop, Sum<T, true>());
}
""",
    is_inexact=True,
)
def reduce_mean(x: N, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> N:
    """Return the means; those of integers are cut, those of nothing are 0."""
    if not axes and noop_with_empty_axes:
        return x
    total = reduced(np.add, x.astype(np.float64 if x.dtype.kind == "f" else x.dtype), 0, axes, keepdims, 0)
    count = x.size // max(total.size, 1) or 1
    if x.dtype.kind == "f":
        return np.asarray(total / count, x.dtype)
    total = total.astype(np.int64)
    return np.asarray((total - np.fmod(total, count)) // count, x.dtype)


@tail_op(
    "Softmax",
    cpp=r"""
template<class F> bool Softmax(Tail& t, View& y, const View& x, i64 axis, i64 joint) {
    int a;
    if (!axis_of(a, axis, x.rank) || !copy<F>(t, y, x))
        return false;
    const i64 n = joint ? product(x.shape + a, x.shape + x.rank) : x.shape[a], outer = product(x.shape, x.shape + a);
    const i64 inner = joint ? 1 : product(x.shape + a + 1, x.shape + x.rank);
    for (i64 r = 0; r < outer * inner; r++) {
        F* const p = at<F>(t, y) + r / inner * n * inner + r % inner;
        double largest = -INFINITY, sum = 0;
        for (i64 q = 0; q < n; q++)
            largest = p[q * inner] > largest || p[q * inner] != p[q * inner] ? double(p[q * inner]) : largest;
        for (i64 q = 0; q < n; q++)
            sum += std::exp(double(p[q * inner]) - largest);
        for (i64 q = 0; q < n; q++)
            p[q * inner] = F(std::exp(double(p[q * inner]) - largest) / sum);
    }
    return true;
}
""",
    is_inexact=True,
    older={13: {"axis": 1, "joint": 1}},
)
def softmax(x: F, *, axis: int = -1, joint: int = 0) -> F:
    """Return exp(x) over its sum along an axis; `joint`: along it and all axes after it, as before opset 13."""
    axis = axis_of(axis, x.ndim)
    size = int(np.prod(x.shape[axis:])) if joint else x.shape[axis]
    wide = x.astype(np.float64).reshape(int(np.prod(x.shape[:axis])), size, -1 if x.size else 0)
    powers = np.exp(wide - np.max(wide, axis=1, keepdims=True, initial=-np.inf))
    return np.asarray(powers / reduced(np.add, powers, 0, [1], 1, 0), x.dtype).reshape(x.shape)


@tail_op(
    "CumSum",
    cpp=r"""
template<class N> bool CumSum(Tail& t, View& y, const View& x, const Ints& axis, i64 exclusive, i64 reverse) {
    int a;
    if (axis.count != 1 || !axis_of(a, axis.v[0], x.rank) || !copy<N>(t, y, x))
        return false;
    const i64 n = x.shape[a], inner = y.stride[a], rows = n ? count(x) / n : 0;
    for (i64 r = 0; r < rows; r++) {
        N* const p = at<N>(t, y) + r / inner * n * inner + r % inner;
        typename Wide<N>::A sum = 0;
        for (i64 q = 0; q < n; q++) {
            N& v = p[(reverse ? n - 1 - q : q) * inner];
            const typename Wide<N>::A before = sum;
            sum += typename Wide<N>::A(v);
            v = N(exclusive ? before : sum);
        }
    }
    return true;
}
""",
)
def cum_sum(x: N, axis: Ints, *, exclusive: int = 0, reverse: int = 0) -> N:
    """Return the sums up to each element."""
    along = np.moveaxis(x, axis_of(axis[0], x.ndim), -1)
    along = along[..., ::-1] if reverse else along
    wide = np.cumsum(along, axis=-1, dtype=np.float64 if x.dtype.kind == "f" else x.dtype) + x.dtype.type(0)
    if exclusive:
        wide = np.concatenate([np.zeros_like(wide[..., :1]), wide[..., :-1]], axis=-1)
    return np.moveaxis((wide[..., ::-1] if reverse else wide).astype(x.dtype), -1, axis_of(axis[0], x.ndim))


def reduced(
    ufunc: np.ufunc, x: NDArray[Any], first: float, axes: list[int] | None, keepdims: int, noop: int
) -> NDArray[Any]:
    """Return the results of a function of two numbers along axes (all if there are none), beginning with `first`."""
    if not axes and noop:
        return x
    chosen = tuple(sorted(axes_of(axes, x.ndim) if axes else range(x.ndim)))
    kept = tuple(axis for axis in range(x.ndim) if axis not in chosen)
    if x.dtype.kind == "f" and ufunc in (np.add, np.multiply):
        ends = [x.shape[axis] for axis in kept]
        rows = np.transpose(x, chosen + kept).reshape(int(np.prod([x.shape[axis] for axis in chosen])), *ends)
        start = np.full((1, *ends), first, np.float64)
        y = np.expand_dims(ufunc.accumulate(np.concatenate([start, rows]), axis=0)[-1], chosen)
    else:
        y = ufunc.reduce(x, axis=chosen, initial=x.dtype.type(first), keepdims=True, dtype=x.dtype)
    return np.asarray(y + 0 if keepdims else np.squeeze(y + 0, chosen), x.dtype)
