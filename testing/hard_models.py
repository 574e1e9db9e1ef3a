"""Models that are hard to verify: right nets of them look wrong to a judge that compares numbers only.

Saturated scores, ties, tiny variances, long sums, 8 bits, float16, chaos, and decisions by the last bit.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from testing.models import serialized

Model = tuple[str, Mapping[str, Any]]  # a graph, and its weights
SEEDS = 25  # models of each family


def _normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Any:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def _ints(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


def saturated(rng: np.random.Generator, seed: int) -> Model:
    """Return a detector's head: convolutions, a Sigmoid, and the best scores with their places."""
    size, classes, best = 8 * int(rng.integers(1, 5)), int(rng.integers(1, 4)), int(rng.integers(5, 40))
    weights = {
        "w": _normal(rng, 8, 3, 3, 3, scale=rng.uniform(0.2, 1.5)),
        "v": _normal(rng, classes, 8, 1, 1, scale=rng.uniform(0.2, 1.5)),
        "flat": _ints(1, -1),
        "k": _ints(best),
        "wide": _ints(size),
    }
    ends = (
        ("xs = Mod(i, wide) ys = Div(i, wide)", "int64[1,K] xs, int64[1,K] ys"),
        ("t = Identity(i)", "int64[1,K] t"),
        ("t = ArgMax<axis = 1>(s)", "int64[1,A,H,W] t"),
        ("p = MaxPool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(s) e = Equal(p, s) t = Where(e, s, zero)", ""),
    )
    nodes, outputs = ends[seed % 4]
    return (
        f"(float[1,3,{size},{size}] x) => (float[1,K] best, {outputs or f'float[1,{classes},{size},{size}] t'}) "
        "<float zero = {0}> { a = Conv<pads = [1, 1, 1, 1]>(x, w) b = Relu(a) l = Conv(b, v) s = Sigmoid(l) "
        f"f = Reshape(s, flat) best, i = TopK(f, k) {nodes} }}",
        weights,
    )


def tied(rng: np.random.Generator, seed: int) -> Model:
    """Return a model with choices among sums that are mathematically equal, or computed to a few levels."""
    rows, count, levels = int(rng.integers(2, 9)), int(rng.integers(6, 40)), float(rng.integers(1, 6))
    twice = _normal(rng, 12, count)
    twice[:, count // 2 :] = twice[:, : count - count // 2]
    ends = (
        "i = ArgMax<axis = 1, keepdims = 0>(s)",
        "i = ArgMin<axis = 1, keepdims = 0, select_last_index = 1>(s)",
        "v, t = TopK(s, k) i = Cast<to = 6>(t)",
        "v, t = TopK(s, k) c = Gather<axis = 0>(table, t) i = Cast<to = 6>(c)",
        "m = ReduceMax<axes = [1]>(s) e = Equal(s, m) i = Cast<to = 6>(e)",
    )
    kind = seed % 5
    dtype = "int64" if kind < 2 else "int32"
    sums = "m0 = MatMul(x, w) " + ("s = Identity(m0)" if seed % 2 else "m1 = Mul(m0, n) r = Round(m1) s = Div(r, n)")
    return (
        f"(float[{rows},12] x) => ({dtype}[A{',B' if kind >= 2 else ''}] i) <float n = {{{levels}}}> "
        f"{{ {sums} {ends[kind]} }}",
        {"w": twice, "k": _ints(3), "table": rng.permutation(count).astype(np.float32)},
    )


def tiny_variances(rng: np.random.Generator, seed: int) -> Model:
    """Return a model with normalisations of numbers that hardly differ."""
    offset, scale = 10.0 ** rng.integers(0, 4), 10.0 ** -rng.integers(0, 4)
    nodes = (
        "y = LayerNormalization<axis = -1>(b, g, h)",
        "y = InstanceNormalization(b, e, f)",
        "m = ReduceMean<axes = [2, 3]>(b) c = Sub(b, m) q = Mul(c, c) v = ReduceMean<axes = [2, 3]>(q) "
        "u = Add(v, eps) d = Sqrt(u) y = Div(c, d)",
        "m = ReduceMean<axes = [1]>(b) c = Sub(b, m) n = ReduceL2<axes = [1]>(c) u = Add(n, eps) y = Div(c, u)",
        "m = ReduceMean<axes = [-1]>(b) c = Sub(b, m) q = Mul(c, c) v = ReduceMean<axes = [-1]>(q) u = Add(v, eps) "
        "d = Sqrt(u) z = Div(c, d) y = Mul(z, g)",
    )[seed % 5]
    weights = {"g": _normal(rng, 16), "h": _normal(rng, 16), "e": _normal(rng, 6), "f": _normal(rng, 6)}
    numbers = f"float s = {{{scale}}}, float o = {{{offset}}}, float eps = {{1e-5}}"
    return (
        f"(float[1,6,8,16] x) => (float[1,6,8,16] y) <{numbers}> {{ a = Mul(x, s) b = Add(a, o) {nodes} }}",
        weights,
    )


def long_sums(rng: np.random.Generator, seed: int) -> Model:
    """Return a model with sums of thousands of terms that cancel."""
    count = int(rng.integers(500, 6000))
    nodes = (
        "y = MatMul(x, w)",
        "a = CumSum(x, one) y = MatMul(a, w)",
        "a = Add(x, o) b = ReduceSum(a, one) y = Sub(b, t)",
        "a = Exp(x) b = ReduceMean<axes = [1]>(a) c = Log(b) y = Sub(c, l)",
        "a = Abs(x) b = MatMul(a, p) y = Sub(b, q)",
    )[seed % 5]
    positive = np.abs(_normal(rng, count, 8))
    weights = {
        "w": _normal(rng, count, 8),
        "p": positive,
        "q": positive.sum(0) * np.float32(0.8),
        "one": _ints(1)[0] if seed % 5 == 1 else _ints(1),
        "t": np.float32(count * 100),
        "o": np.float32(100),
        "l": np.float32(0.5),
    }
    return (f"(float[3,{count}] x) => (float[3,N] y) {{ {nodes} }}", weights)


def quantised(rng: np.random.Generator, seed: int) -> Model:
    """Return a model with convolutions that have 8 bits before and after each, or with products of integers."""
    if seed % 4 == 3:
        weights = {"w": rng.integers(-128, 128, (48, 24)).astype(np.int8), "s": np.float32(0.01)}
        integers = "q, qs, qz = DynamicQuantizeLinear(x) m = MatMulInteger(q, w, qz) f = Cast<to = 1>(m) y = Mul(f, s)"
        return (f"(float[5,48] x) => (float[5,24] y) {{ {integers} }}", weights)
    depth, channels = int(rng.integers(1, 9)), 8
    nodes: list[str] = []
    weights = {"z": np.uint8(128), "zs": np.int8(0)}
    last = "x"
    for number in range(depth):
        floats = _normal(rng, channels, channels, 3, 3, scale=0.15)
        step = np.abs(floats).max() / 127
        weights |= {f"w{number}": np.rint(floats / step).astype(np.int8), f"ws{number}": np.float32(step)}
        weights[f"s{number}"] = np.float32(rng.uniform(0.01, 0.04))
        nodes.append(
            f"q{number} = QuantizeLinear({last}, s{number}, z) d{number} = DequantizeLinear(q{number}, s{number}, z) "
            f"f{number} = DequantizeLinear(w{number}, ws{number}, zs) "
            f"c{number} = Conv<pads = [1, 1, 1, 1]>(d{number}, f{number}) r{number} = Relu(c{number})"
        )
        last = f"r{number}"
    nodes.append(f"q = QuantizeLinear({last}, s0, z) y = DequantizeLinear(q, s0, z)")
    return (f"(float[1,8,12,12] x) => (float[1,8,12,12] y) {{ {' '.join(nodes)} }}", weights)


def float16(rng: np.random.Generator, seed: int) -> Model:
    """Return a model whose weights and numbers are float16."""
    inner = (
        "a = MatMul(h, w) b = Relu(a) y = MatMul(b, v)",
        "a = MatMul(h, w) b = Softmax<axis = -1>(a) y = MatMul(b, v)",
        "a = MatMul(h, w) b = Sigmoid(a) c = Mul(a, b) y = MatMul(c, v)",
        "a = MatMul(h, w) m = ReduceMean<axes = [-1]>(a) c = Sub(a, m) b = Mul(c, c) y = MatMul(b, v)",
    )[seed % 4]
    weights = {name: _normal(rng, 32, 32, scale=0.3).astype(np.float16) for name in ("w", "v")}
    if seed % 8 >= 4:
        return (f"(float16[4,32] x) => (float16[4,32] y) {{ h = Identity(x) {inner} }}", weights)
    nodes = f"h = Cast<to = 10>(x) {inner} z = Cast<to = 1>(y)"
    return (f"(float[4,32] x) => (float[4,32] z) {{ {nodes} }}", weights)


def chaotic(rng: np.random.Generator, seed: int) -> Model:
    """Return a model with loops that double an error at each step."""
    gain = rng.uniform(0.5, 1.0)
    if seed % 4 < 3:
        name, gates, options = (("RNN", 1, ""), ("GRU", 3, ", linear_before_reset = 1"), ("LSTM", 4, ""))[seed % 4]
        steps = int(rng.integers(20, 60)) if name == "RNN" else int(rng.integers(40, 120))
        weights = {
            "w": _normal(rng, 1, gates * 16, 16),
            "r": _normal(rng, 1, gates * 16, 16, scale=gain),
            "b": _normal(rng, 1, gates * 32, scale=0.3),
        }
        call = f"{name}<hidden_size = 16{options}>(x, w, r, b)"
        return (f"(float[{steps},1,16] x) => (float[{steps},1,1,16] y) {{ y = {call} }}", weights)
    steps = int(rng.integers(5, 30))
    nodes = " ".join(f"m{n} = Sub(one, a{n}) p{n} = Mul(a{n}, m{n}) a{n + 1} = Mul(p{n}, k)" for n in range(steps))
    factor = 3 + gain
    return (
        f"(float[1,64] x) => (float[1,64] y) <float one = {{1}}, float k = {{{factor}}}> "
        f"{{ a0 = Sigmoid(x) {nodes} y = Identity(a{steps}) }}",
        {},
    )


def decided(rng: np.random.Generator, seed: int) -> Model:
    """Return a model whose last bit decides: the nearest pixel, the largest element, or a whole number."""
    kinds = (
        "o = Conv<pads = [1, 1, 1, 1]>(x, g) t = Transpose<perm = [0, 2, 3, 1]>(o) h = Tanh(t) "
        'y = GridSample<mode = "nearest", align_corners = 0>(x, h)',
        "o = Conv<pads = [1, 1, 1, 1]>(x, w) i = ArgMax<axis = 1>(o) y = Cast<to = 1>(i)",
        "o = Conv<pads = [1, 1, 1, 1]>(x, w) r = Round(o) y = Conv<pads = [1, 1, 1, 1]>(r, v)",
        "o = Conv<pads = [1, 1, 1, 1]>(x, w) f = Floor(o) r = Sub(o, f) y = Mul(r, r)",
        "o = Conv<pads = [1, 1, 1, 1]>(x, w) c = Greater(o, z) m = Cast<to = 1>(c) y = Conv<pads = [1, 1, 1, 1]>(m, v)",
    )
    weights = {
        "g": _normal(rng, 2, 3, 3, 3, scale=rng.uniform(0.05, 0.4)),
        "w": _normal(rng, 6, 3, 3, 3, scale=rng.uniform(0.2, 2)),
        "v": _normal(rng, 4, 6, 3, 3),
        "z": np.float32(rng.uniform(-1, 1)),
    }
    return (f"(float[1,3,16,16] x) => (float[1,C,16,16] y) {{ {kinds[seed % 5]} }}", weights)


FAMILIES: Mapping[str, Callable[[np.random.Generator, int], Model]] = {
    family.__name__: family
    for family in (saturated, tied, tiny_variances, long_sums, quantised, float16, chaotic, decided)
}


def hard_model(family: str, seed: int) -> bytes:
    """Return the model of a family and a seed."""
    graph, weights = FAMILIES[family](np.random.default_rng([list(FAMILIES).index(family), seed]), seed)
    return serialized(graph, 17, **weights)
