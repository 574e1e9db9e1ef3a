"""Elementwise operators with broadcasting: most are one row of a table with NumPy and C++ code."""

import re
from string import Template

import numpy as np

from onnx2ncnn_opt.tail.registry import B, F, M, N, of_source, tail_op

# Operator, its schema, NumPy, and C++ for elements. In C++, W is the computation's type: float, double or uint64_t.
_PLAIN = """
Add            | N, N -> N | a + b                               | W(a) + W(b)
Sub            | N, N -> N | a - b                               | W(a) - W(b)
Mul            | N, N -> N | a * b                               | W(a) * W(b)
Neg            | N -> N    | -a                                  | -W(a)
Abs            | N -> N    | np.abs(a)                           | a <= T(0) ? W(0) - W(a) : W(a)
Relu           | N -> N    | np.where(a < 0, a.dtype.type(0), a) | a < T(0) ? W(0) : W(a)
Sign           | N -> N    | np.sign(a)                          | a > T(0) ? W(1) : a < T(0) ? W(-1) : W(a * a)
Floor          | F -> F    | np.floor(a)                         | std::floor(W(a))
Ceil           | F -> F    | np.ceil(a)                          | std::ceil(W(a))
Round          | F -> F    | np.rint(a)                          | std::rint(W(a))
Equal          | T, T -> B | a == b                              | a == b
Less           | N, N -> B | a < b                               | a < b
LessOrEqual    | N, N -> B | a <= b                              | a <= b
Greater        | N, N -> B | a > b                               | a > b
GreaterOrEqual | N, N -> B | a >= b                              | a >= b
And            | P, P -> P | a & b                               | a && b
Or             | P, P -> P | a \\| b                              | a || b
Xor            | P, P -> P | a ^ b                               | a != b
Not            | P -> P    | ~a                                  | !a
IsNaN          | F -> B    | np.isnan(a)                         | a != a
Where          | B, T, T -> T | np.where(a, b, c)                | a ? b : c
"""
# Operators that are computed in double and rounded once.
_WIDE = """
Sqrt       | np.sqrt(a)          | std::sqrt(a)
Exp        | np.exp(a)           | std::exp(a)
Log        | np.log(a)           | std::log(a)
Sin        | np.sin(a)           | std::sin(a)
Cos        | np.cos(a)           | std::cos(a)
Atan       | np.arctan(a)        | std::atan(a)
Tanh       | np.tanh(a)          | std::tanh(a)
Sigmoid    | 1 / (1 + np.exp(-a)) | 1 / (1 + std::exp(-a))
Reciprocal | 1 / a               | 1 / a
"""


_CPP = Template("""
template<class T> struct ${name}_ {
    typedef $w W;
    $result operator()($parameters) const { return $result($cpp); }
};
template<class T> bool $name(Tail& t, View& y, $views) {
    return map<$types>(t, y, $arguments, ${name}_<T>());
}
""")


def _make(name: str, schema: str, numpy: str, cpp: str, *, wide: bool) -> None:
    inputs, result = schema.split(" -> ")
    kinds = inputs.split(", ")
    function = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "_", name).lower() + "_"
    lines = ["    dtype, a = a.dtype, a.astype(np.float64)"] if wide else []
    lines.append(f"    return ({numpy}).astype(dtype)" if wide else f"    return {numpy}")
    declared = ", ".join(map("{}: {}".format, "abc", kinds))
    source = "\n".join([f"def {function}({declared}) -> {result}:", *lines, ""])
    three = [*kinds, *kinds[-1:] * (3 - len(kinds))]
    types = ["Bool" if kind == "B" else "T" for kind in (result, *three)]
    names = ["abc"[min(i, len(kinds) - 1)] for i in range(3)]
    cpp = _CPP.substitute(
        name=name,
        w="double" if wide else "typename Wide<T>::W",
        result=types[0],
        cpp=re.sub(r"\ba\b", "W(a)", cpp) if wide else cpp,
        parameters=", ".join(
            f"{kind} {'abc'[i] if i < len(kinds) else ''}".strip() for i, kind in enumerate(types[1:])
        ),
        views=", ".join(f"const View& {'abc'[i]}" for i in range(len(kinds))),
        types=", ".join(types),
        arguments=", ".join(names),
    )
    of_source(source, cpp, globals(), broadcasts=True)


for _line in _PLAIN.strip().splitlines():
    _make(*(part.strip().replace("\\|", "|") for part in re.split(r"(?<!\\)\|", _line, maxsplit=3)), wide=False)
for _line in _WIDE.strip().splitlines():
    _name, _numpy, _cpp = (part.strip() for part in _line.split("|"))
    _make(_name, "F -> F", _numpy, _cpp, wide=True)


for _name, _compare in ("Max", ">="), ("Min", "<="):  # NaN wins
    _source = f"""def {_name}(*xs: N) -> N:
    y = xs[0]
    for x in xs[1:]:
        y = np.where((y {_compare} x) | (y != y), y, x)
    return y
"""
    _cpp = f"""
template<class N> struct {_name}_ {{ N operator()(N a, N b, N) const {{ return a {_compare} b || a != a ? a : b; }} }};
template<class N> bool {_name}(Tail& t, View& y, int n, const View* x) {{ return fold<N>(t, y, n, x, {_name}_<N>()); }}
"""
    of_source(_source, _cpp, globals(), broadcasts=True)


@tail_op(
    r"""
template<class N> struct Limit {
    N low, high;
    bool has_low, has_high;
    N operator()(N x, N a, N b) const {
        const N l = has_low ? a : low, h = has_high ? b : high, y = x < l ? l : x;
        return y > h ? h : y;
    }
};
template<class N> bool Clip(Tail& t, View& y, const View& x, const View& low, const View& high) {
    const Limit<N> limit = {extreme<N>(false, true), extreme<N>(true, true), low.rank >= 0, high.rank >= 0};
    return map<N, N, N, N>(t, y, x, limit.has_low ? low : x, limit.has_high ? high : x, limit);
}
""",
    broadcasts=True,
)
def clip(x: N, min: N | None = None, max: N | None = None) -> N:
    """Limit elements; without a limit, infinity becomes the largest number."""
    limits = np.finfo(x.dtype) if x.dtype.kind == "f" else np.iinfo(x.dtype)
    low = x.dtype.type(limits.min) if min is None else min
    high = x.dtype.type(limits.max) if max is None else max
    y = np.where(x < low, low, x)
    return np.where(y > high, high, y)


# An integer divided by 0 is an error.
_DIVIDE = Template("""
template<class N> struct ${name}_ {
    bool* right;
    i64 fmod;
    N operator()(N a, N b, N) const {
        typedef typename Wide<N>::W W;
        const bool is_integer = std::numeric_limits<W>::is_integer;
        *right = *right && !(is_integer && b == N(0));
        return *right ? divided_$name(a, b, fmod, W()) : N(0);
    }
};
template<class N> bool $name(Tail& t, View& y, const View& a, const View& b$parameter) {
    bool right = true;
    const ${name}_<N> f = {&right, $argument};
    return map<N, N, N, N>(t, y, a, b, b, f) && right;
}
""")


@tail_op(
    r"""
template<class T> T divided_Div(T a, T b, i64, uint64_t) {
    return T(b == T(-1) && T(-1) < T(0) ? 0 - uint64_t(a) : uint64_t(a / b));
}
template<class T, class W> T divided_Div(T a, T b, i64, W) { return T(W(a) / W(b)); }
"""
    + _DIVIDE.substitute(name="Div", parameter="", argument="0"),
    broadcasts=True,
)
def div(a: N, b: N) -> N:
    """Divide; integers round towards 0."""
    if a.dtype.kind == "f":
        return a / b
    if not np.all(b):
        raise ValueError("an integer divided by 0")
    return (a - np.fmod(a, b)) // b


@tail_op(
    r"""
template<class T> T divided_Mod(T a, T b, i64 fmod, uint64_t) {
    const T r = b == T(-1) && T(-1) < T(0) ? T(0) : T(a % b);
    return fmod || r == T(0) || (r < T(0)) == (b < T(0)) ? r : T(r + b);
}
template<class T, class W> T divided_Mod(T a, T b, i64 fmod, W) {
    const W r = std::fmod(W(a), W(b));
    return T(fmod ? r : r == 0 ? std::copysign(W(0), W(b)) : (r < 0) == (W(b) < 0) ? r : r + W(b));
}
"""
    + _DIVIDE.substitute(name="Mod", parameter=", i64 fmod", argument="fmod"),
    broadcasts=True,
)
def mod(a: N, b: N, *, fmod: int = 0) -> N:
    """Return the remainder, with the sign of a if `fmod`, else of b."""
    if a.dtype.kind != "f" and a.size and not np.all(b):
        raise ValueError("an integer divided by 0")
    return np.fmod(a, b) if fmod else np.mod(a, b)


@tail_op(
    r"""
template<class N, class M> struct Power {
    N operator()(N a, M b, N) const { return To<N>::from(std::pow(double(a), double(b))); }
};
template<class N, class M> bool Pow(Tail& t, View& y, const View& a, const View& b) {
    return map<N, N, M, N>(t, y, a, b, a, Power<N, M>());
}
""",
    broadcasts=True,
)
def pow_(a: N, b: M) -> N:
    """Return a to the power of b, computed in float64."""
    y = np.power(a.astype(np.float64), b.astype(np.float64))
    if a.dtype.kind == "f":
        return y.astype(a.dtype)
    wide = np.int64 if a.dtype.itemsize == 8 else np.int32
    low = float(np.iinfo(wide).min)
    return np.where((y > low) & (y < -low), y, low).astype(wide).astype(a.dtype)


@tail_op(
    r"""
template<class F> struct Infinite {
    bool negative, positive;
    Bool operator()(F a, F, F) const { return Bool(std::isinf(double(a)) && (a > F(0) ? positive : negative)); }
};
template<class F> bool IsInf(Tail& t, View& y, const View& x, i64 negative, i64 positive) {
    const Infinite<F> f = {negative != 0, positive != 0};
    return map<Bool, F, F, F>(t, y, x, x, x, f);
}
""",
    broadcasts=True,
)
def is_inf(x: F, *, detect_negative: int = 1, detect_positive: int = 1) -> B:
    """Return True for infinity with a detected sign."""
    return np.isinf(x) & (((x > 0) & bool(detect_positive)) | ((x < 0) & bool(detect_negative)))
