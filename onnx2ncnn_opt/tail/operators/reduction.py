"""Reductions. Floats are added in float64, in order, and rounded once, so C++ computes the same bits."""

import re
from string import Template
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx2ncnn_opt.tail.operators.checks import axes_of, axis_of
from onnx2ncnn_opt.tail.registry import F, Ints, N, of_source, tail_op

# Operator, its type, NumPy; in C++ the accumulator, its start, the step for a number v, and the result for n numbers.
_REDUCE = """
ReduceMax  | T | reduced(np.maximum, x, end_of(x.dtype, 0), ...) | T | extreme<T>(false, false) | ((v > a)|(v != v)) ? v : a | a + 0
ReduceMin  | T | reduced(np.minimum, x, end_of(x.dtype, 1), ...) | T | extreme<T>(true, false)  | ((v < a)|(v != v)) ? v : a | a + 0
ReduceSum  | N | reduced(np.add, x, 0, ...)                      | A | 0                        | a + A(v)                   | a
ReduceProd | N | reduced(np.multiply, x, 1, ...)                 | A | 1                        | a * A(v)                   | a + 0
ReduceMean | N | mean(x, ...)                                    | A | 0                        | a + A(v)                   | mean<T>(a, n)
"""  # noqa: E501
_CPP = Template("""
template<class T> struct ${name}_ {
    typedef typename Wide<T>::A A;
    typedef $acc Acc;
    static Acc start() { return $start; }
    static void step(Acc& a, T v, i64) { a = $step; }
    static T end(Acc a, i64 n) { return (void)n, T($end); }
};
template<class T> bool $name(Tail& t, View& y, const View& x, const Ints& axes, i64 keepdims, i64 noop) {
    return reduce<T, T>(t, y, x, axes, keepdims, noop, ${name}_<T>());
}
""")


def reduced(
    ufunc: np.ufunc, x: NDArray[Any], first: float, axes: list[int] | None, keepdims: int, noop: int
) -> NDArray[Any]:
    """Reduce along axes (by default all) with a function of two numbers, beginning with `first`."""
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


def end_of(dtype: np.dtype[Any], high: int) -> float:
    """Return the lowest or highest number of a type."""
    if dtype.kind == "f":
        return np.inf if high else -np.inf
    return high if dtype.kind == "b" else np.iinfo(dtype).max if high else np.iinfo(dtype).min


def mean(x: NDArray[Any], axes: list[int] | None, keepdims: int, noop: int) -> NDArray[Any]:
    """Return the means; they are truncated for integers, and 0 for no elements."""
    if not axes and noop:
        return x
    total = reduced(np.add, x.astype(np.float64 if x.dtype.kind == "f" else x.dtype), 0, axes, keepdims, 0)
    count = x.size // max(total.size, 1) or 1
    if x.dtype.kind == "f":
        return np.asarray(total / count, x.dtype)
    total = total.astype(np.int64)
    return np.asarray((total - np.fmod(total, count)) // count, x.dtype)


for _line in _REDUCE.strip().splitlines():
    _name, _kind, _numpy, *_parts = re.split(r"\s+\|\s+", _line)
    _acc, _start, _step, _end = _parts
    of_source(
        f"def {_name}(x: {_kind}, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> "
        f"{_kind}:\n    return {_numpy.replace('...', 'axes, keepdims, noop_with_empty_axes')}\n",
        _CPP.substitute(name=_name, acc=_acc, start=_start, step=_step, end=_end),
        globals(),
    )


@tail_op(
    r"""
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
    older={13: {"axis": 1, "joint": 1}},
)
def softmax(x: F, *, axis: int = -1, joint: int = 0) -> F:
    """Return exp(x) / sum(exp(x)) along an axis; with `joint`, along it and all later axes, as before opset 13."""
    axis = axis_of(axis, x.ndim)
    size = int(np.prod(x.shape[axis:])) if joint else x.shape[axis]
    wide = x.astype(np.float64).reshape(int(np.prod(x.shape[:axis])), size, -1 if x.size else 0)
    powers = np.exp(wide - np.max(wide, axis=1, keepdims=True, initial=-np.inf))
    return np.asarray(powers / reduced(np.add, powers, 0, [1], 1, 0), x.dtype).reshape(x.shape)


@tail_op(r"""
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
""")
def cum_sum(x: N, axis: Ints, *, exclusive: int = 0, reverse: int = 0) -> N:
    """Return the sums up to each element."""
    along = np.moveaxis(x, axis_of(axis[0], x.ndim), -1)
    along = along[..., ::-1] if reverse else along
    wide = np.cumsum(along, axis=-1, dtype=np.float64 if x.dtype.kind == "f" else x.dtype) + x.dtype.type(0)
    if exclusive:
        wide = np.concatenate([np.zeros_like(wide[..., :1]), wide[..., :-1]], axis=-1)
    return np.moveaxis((wide[..., ::-1] if reverse else wide).astype(x.dtype), -1, axis_of(axis[0], x.ndim))
