"""Elementwise operators with broadcasting: most are one line of a table, NumPy and C++ side by side."""

import re

import numpy as np

from onnx2ncnn_opt.onnx.tail import registry
from onnx2ncnn_opt.onnx.tail.registry import B, F, M, N, tail_op

# Operator, its schema, NumPy, and C++ on elements. In C++ W is the type to compute in: float, double or uint64_t.
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
And            | B, B -> B | a & b                               | a && b
Or             | B, B -> B | a \\| b                              | a || b
Xor            | B, B -> B | a ^ b                               | a != b
Not            | B -> B    | ~a                                  | !a
IsNaN          | F -> B    | np.isnan(a)                         | a != a
Where          | B, T, T -> T | np.where(a, b, c)                | a ? b : c
"""
# The same, computed in double and rounded once.
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


def _make(name: str, schema: str, numpy: str, cpp: str, *, wide: bool) -> None:
    inputs, result = schema.split("->")
    parameters = ", ".join(f"{'abc'[i]}: {kind.strip()}" for i, kind in enumerate(inputs.split(",")))
    function = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "_", name).lower() + "_"
    lines = ["    dtype, a = a.dtype, a.astype(np.float64)"] if wide else []
    lines.append(f"    return ({numpy}).astype(dtype)" if wide else f"    return {numpy}")
    source = "\n".join([f"def {function}({parameters}) -> {result.strip()}:", *lines, ""])
    namespace = {"np": np, **vars(registry)}
    exec(source, namespace)
    tail_op(name, cpp=cpp, source=source, broadcasts=True)(namespace[function])


for _line in _PLAIN.strip().splitlines():
    _make(*(part.strip().replace("\\|", "|") for part in re.split(r"(?<!\\)\|", _line, maxsplit=3)), wide=False)
for _line in _WIDE.strip().splitlines():
    _name, _numpy, _cpp = (part.strip() for part in _line.split("|"))
    _make(_name, "F -> F", _numpy, _cpp, wide=True)


@tail_op("Max", cpp="", broadcasts=True)
def max_(*xs: N) -> N:
    """Return the larger elements; NaN wins."""
    y = xs[0]
    for x in xs[1:]:
        y = np.where((y >= x) | (y != y), y, x)
    return y


@tail_op("Min", cpp="", broadcasts=True)
def min_(*xs: N) -> N:
    """Return the smaller elements; NaN wins."""
    y = xs[0]
    for x in xs[1:]:
        y = np.where((y <= x) | (y != y), y, x)
    return y


@tail_op("Clip", cpp="", broadcasts=True)
def clip(x: N, min: N | None = None, max: N | None = None) -> N:
    """Limit elements; infinity becomes the largest number where there is no limit."""
    limits = np.finfo(x.dtype) if x.dtype.kind == "f" else np.iinfo(x.dtype)
    low = x.dtype.type(limits.min) if min is None else min
    high = x.dtype.type(limits.max) if max is None else max
    y = np.where(x < low, low, x)
    return np.where(y > high, high, y)


@tail_op("Div", cpp="", broadcasts=True)
def div(a: N, b: N) -> N:
    """Divide; integers are cut towards 0."""
    if a.dtype.kind == "f":
        return a / b
    if not np.all(b):
        raise ValueError("an integer divided by 0")
    return (a - np.fmod(a, b)) // b


@tail_op("Mod", cpp="", broadcasts=True)
def mod(a: N, b: N, *, fmod: int = 0) -> N:
    """Return the remainder, with the sign of a if `fmod`, or of b."""
    if a.dtype.kind != "f" and not np.all(b):
        raise ValueError("an integer divided by 0")
    return np.fmod(a, b) if fmod else np.mod(a, b)


@tail_op("Pow", cpp="", broadcasts=True)
def pow_(a: N, b: M) -> N:
    """Return a to the power of b, computed in float64."""
    y = np.power(a.astype(np.float64), b.astype(np.float64))
    if a.dtype.kind == "f":
        return y.astype(a.dtype)
    wide = np.int64 if a.dtype.itemsize == 8 else np.int32
    low = float(np.iinfo(wide).min)
    return np.where((y > low) & (y < -low), y, low).astype(wide).astype(a.dtype)


@tail_op("IsInf", cpp="", broadcasts=True)
def is_inf(x: F, *, detect_negative: int = 1, detect_positive: int = 1) -> B:
    """Return True for infinity of the signs that are looked for."""
    return np.isinf(x) & (((x > 0) & bool(detect_positive)) | ((x < 0) & bool(detect_negative)))
