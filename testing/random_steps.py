"""Steps of random models: each proposes one node, or a few that belong together, with any operands that it finds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnx import TensorProto

from testing.random_models import Builder, NoFit, RandomModel, Shape, Step, build

FIRST = range(1, 7)
IMAGES_RANKS = range(3, 6)
END = 2**31 - 1

# Functions of one tensor, by what they do to rounding.
_EXACT = ("Relu", "Neg", "Abs")
_SMOOTH = (
    *("Sigmoid", "Tanh", "HardSwish", "HardSigmoid", "Elu", "Softplus", "Gelu", "Erf", "Exp", "Sin", "Cos", "Atan"),
    *("LeakyRelu", "Selu", "Celu", "Mish", "Softsign", "Sqrt", "Log", "Reciprocal", "Asinh", "Sinh", "ThresholdedRelu"),
)
_STEPPED = ("Floor", "Ceil", "Round", "Sign", "Shrink", "IsNaN", "IsInf")
_COMPARISONS = ("Greater", "Less", "GreaterOrEqual", "LessOrEqual", "Equal")
_REDUCTIONS = (
    *("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceProd"),
    *("ReduceLogSumExp",),
)


# Views


def reshape(b: Builder) -> None:
    """Reshape to a random factorisation, sometimes with -1 or 0."""
    x = b.pick("fib")
    shape = b.shape(x)
    rank = b.number(1, 6)
    target = [1] * rank
    for factor in _factors(math.prod(shape)):
        target[b.number(0, rank - 1)] *= factor
    if b.chance(0.3):
        target[b.number(0, rank - 1)] = -1
    for i in range(min(rank, len(shape))):
        if target[i] == shape[i] and b.chance(0.3):
            target[i] = 0
    b.node("Reshape", x, b.ints(*target))


def _factors(number: int) -> list[int]:
    factors = []
    for prime in (2, 3, 5, 7):
        while number % prime == 0:
            factors.append(prime)
            number //= prime
    return [*factors, number]


def merge(b: Builder) -> None:
    """Reshape that keeps the first axes and merges the others, for any size."""
    x = b.pick("fib", range(3, 7))
    kept = b.number(1, len(b.shape(x)) - 2)
    b.node("Reshape", x, b.ints(*(0,) * kept, -1))


def transpose(b: Builder) -> None:
    """Transpose by a random permutation."""
    x = b.pick("fib", range(2, 7))
    b.node("Transpose", x, perm=[int(p) for p in b.rng.permutation(len(b.shape(x)))])


def unsqueeze(b: Builder) -> None:
    """Unsqueeze of one or two axes."""
    x = b.pick("fib", range(6))
    count = b.number(1, 2)
    rank = len(b.shape(x)) + count
    b.node("Unsqueeze", x, b.ints(*(b.axis(rank) for _ in range(count))))


def squeeze(b: Builder) -> None:
    """Squeeze axes of size 1."""
    x = b.pick("fib", FIRST)
    shape = b.shape(x)
    gone = [i - b.choice((0, 0, len(shape))) for i, size in enumerate(shape) if size == 1 and b.chance(0.7)]
    if gone:
        b.node("Squeeze", x, b.ints(*gone))
    else:
        b.node("Squeeze", x)


def flatten(b: Builder) -> None:
    """Flatten at any axis."""
    x = b.pick("fib")
    rank = len(b.shape(x))
    b.node("Flatten", x, axis=b.number(-rank, rank))


# Movement


def slice_(b: Builder) -> None:
    """Slice one or two axes with any step."""
    x = b.pick("fib", FIRST)
    shape = b.shape(x)
    axes = [int(a) for a in b.rng.permutation(len(shape))[: b.number(1, 2)]]
    bounds = [_bounds(b, shape[axis]) for axis in axes]
    rows = ([bound[i] for bound in bounds] for i in range(3))
    starts, ends, steps = (b.ints(*row) for row in rows)
    b.node("Slice", x, starts, ends, b.ints(*(a - b.choice((0, len(shape))) for a in axes)), steps)


def _bounds(b: Builder, size: int) -> tuple[int, int, int]:
    """Return start, end and step of a slice that leaves something."""
    if b.chance(0.3):  # such as mean something for any size
        rows = (1, END, 1), (1, END, 2), (0, -1, 1), (0, 2, 1), (-2, END, 1), (1, -1, 1), (-1, -END, -1)
        return rows[b.number(0, len(rows) - 1)]
    step = b.choice((1, 1, 1, 2, 3, -1, -2))
    first, last = sorted((b.number(0, size - 1), b.number(0, size - 1)))
    start, end = (first, last + 1) if step > 0 else (last, first - 1 if first else -END)
    if step > 0 and b.chance(0.3):
        end = END
    return start - size if b.chance(0.3) else start, end, step


def concat(b: Builder) -> None:
    """Concat with itself, with other tensors and with a constant that fit."""
    x = b.pick("fib", FIRST)
    shape, dtype = b.shape(x), b.values[x][0].dtype
    axis = b.axis(len(shape))
    real = axis % len(shape)
    fits = [
        name
        for name, (other, *_) in b.values.items()
        if other.dtype == dtype
        and other.ndim == len(shape)
        and all(size == shape[i] or i == real for i, size in enumerate(other.shape))
    ]
    operands = [x, *(b.choice(fits) for _ in range(b.number(1, 2)))]
    if dtype == np.float32 and b.chance(0.3):
        operands[b.number(1, len(operands) - 1)] = b.floats((*shape[:real], b.number(1, 3), *shape[real + 1 :]))
    b.node("Concat", *(operands[int(i)] for i in b.rng.permutation(len(operands))), axis=axis)


def split(b: Builder) -> None:
    """Split an axis in two or more."""
    x = b.pick("fib", FIRST)
    shape = b.shape(x)
    axis = b.axis(len(shape))
    size = shape[axis]
    if size < 2:
        raise NoFit
    if b.chance(0.3):
        count = b.number(2, min(size, 3))
        b.many(count, "Split", x, axis=axis, **({"num_outputs": count} if b.opset >= 18 else {}))
    else:
        first = b.number(1, size - 1)
        b.many(2, "Split", x, b.ints(first, size - first), axis=axis)


def pad(b: Builder) -> None:
    """Pad by a constant, by the edge, by reflection or around."""
    x = b.pick("f", FIRST)
    mode = b.choice(("constant", "constant", "edge", "reflect", "wrap"))
    pads = [b.number(-1, 2) if b.chance(0.3) else 0 for _ in range(2 * len(b.shape(x)))]
    value = [b.constant(np.float32(b.number(-3, 3)))] if mode == "constant" and b.chance(0.7) else []
    b.node("Pad", x, b.ints(*pads), *value, mode=mode)


def gather(b: Builder) -> None:
    """Gather by constant indices of rank 0 to 2."""
    x = b.pick("fib", FIRST)
    axis = b.axis(len(b.shape(x)))
    size = b.shape(x)[axis]
    indices = b.rng.integers(-size, size, size=b.choice(((), (1,), (3,), (2, 2))))
    b.node("Gather", x, b.constant(np.asarray(indices, np.int64)), axis=axis)


def gather_at(b: Builder) -> None:
    """Gather by indices that are computed, or from a constant table."""
    table = b.floats((b.number(2, 6), b.number(1, 4))) if b.chance(0.5) else b.pick("f", FIRST)
    shape = b.constants[table].shape if table in b.constants else b.shape(table)
    axis = b.axis(len(shape))
    indices = b.node("Clip", b.pick("i"), _like_int(b, 0), _like_int(b, shape[axis] - 1))
    b.node("Gather", table, indices, axis=axis)


def _like_int(b: Builder, value: int) -> str:
    return b.constant(np.array(value, b.choice((np.int64, np.int64, np.int32))))


def expand(b: Builder) -> None:
    """Expand axes of size 1 and add new ones."""
    x = b.pick("fib")
    target = [b.number(1, 3) if size == 1 and b.chance(0.6) else b.choice((1, size)) for size in b.shape(x)]
    if len(target) < 6 and b.chance(0.3):
        target.insert(0, b.number(1, 3))
    b.node("Expand", x, b.ints(*target))


def tile(b: Builder) -> None:
    """Tile some axes."""
    x = b.pick("fib", FIRST)
    b.node("Tile", x, b.ints(*(b.number(1, 3) if b.chance(0.4) else 1 for _ in b.shape(x))))


def sign(b: Builder) -> None:
    """Apply a function of one tensor that cannot hide rounding."""
    b.node(b.choice(_EXACT), b.pick("f"))


def depth_to_space(b: Builder) -> None:
    """DepthToSpace or SpaceToDepth."""
    mode = b.choice(({"mode": "DCR"}, {"mode": "CRD"}, None))
    operator = "DepthToSpace" if mode else "SpaceToDepth"
    b.node(operator, b.pick("f", (4,)), blocksize=2, **(mode or {}))


# Arithmetic


def unary(b: Builder) -> None:
    """Apply a smooth function of one tensor."""
    b.node(b.choice(_SMOOTH), b.pick("f"))


def stepped(b: Builder) -> None:
    """Apply a function of one tensor that jumps."""
    b.node(b.choice(_STEPPED), b.pick("f"))


def clip(b: Builder) -> None:
    """Clip with one bound or two."""
    low, high = (b.constant(np.float32(v)) for v in sorted(b.rng.uniform(-1, 1, 2)))
    b.node("Clip", b.pick("f"), *b.choice(((low,), (low, high), ("", high))))


def _beside(b: Builder, x: str, kinds: str = "f") -> str:
    """Return another tensor, or a constant, that broadcasts with x."""
    shape, dtype = b.shape(x), b.values[x][0].dtype
    if b.chance(0.5):
        names = [n for n, (a, *_) in b.values.items() if a.dtype == dtype and _broadcasts(shape, a.shape)]
        return str(b.choice(names))
    form = tuple(1 if b.chance(0.4) else size for size in shape[b.number(0, len(shape)) :])
    if len(form) < 5 and b.chance(0.1):
        form = (b.number(1, 3), *(1,) * (len(shape) - len(form)), *form)
    if dtype.kind == "f":
        return b.floats(form)
    return b.constant(b.rng.integers(0, 2, form).astype(dtype) if dtype.kind == "b" else _small(b, form, dtype))


def _small(b: Builder, shape: Shape, dtype: Any) -> Any:
    return np.asarray(b.rng.choice([-3, -2, -1, 1, 2, 3, 5], shape)).astype(dtype)


def _broadcasts(a: Shape, b: Shape) -> bool:
    try:
        np.broadcast_shapes(a, b)
    except ValueError:
        return False
    return True


def _any_order(b: Builder, *operands: str) -> list[str]:
    return [operands[int(i)] for i in b.rng.permutation(len(operands))]


def binary(b: Builder) -> None:
    """Apply a function of two tensors that broadcast, or of a tensor and a constant."""
    x = b.pick("f")
    operator = b.choice(("Add", "Add", "Mul", "Mul", "Sub", "Div", "Max", "Min", "Pow"))
    b.node(operator, *_any_order(b, x, _beside(b, x)))


def several(b: Builder) -> None:
    """Apply a function of three tensors."""
    x = b.pick("f")
    b.node(b.choice(("Sum", "Mean", "Max", "Min")), *_any_order(b, x, _beside(b, x), _beside(b, x)))


def slope(b: Builder) -> None:
    """PRelu by slopes of any shape that broadcasts."""
    x = b.pick("f", FIRST)
    shape = b.shape(x)
    one = 1.0 if all(array.shape == shape for array in b.values[x]) else 0.0  # they do not make x larger
    b.node("PRelu", x, b.floats(size if b.chance(one / 2) else 1 for size in shape[b.number(0, len(shape)) :]))


def matmul(b: Builder) -> None:
    """MatMul with a constant on either side, with another tensor, or with its own transpose."""
    x = b.pick("f", FIRST)
    shape = b.shape(x)
    way = b.number(0, 3)
    if way == 0:
        b.node("MatMul", x, b.floats((*shape[: b.choice((0, 0, 0, -2))], shape[-1], b.number(1, 6))))
    elif way == 1 and len(shape) > 1:
        b.node("MatMul", b.floats((b.number(1, 6), shape[-2])), x)
    elif way == 2:
        partners = [n for n, (a, *_) in b.values.items() if a.ndim and a.shape[max(a.ndim - 2, 0)] == shape[-1]]
        if not partners:
            raise NoFit
        b.node("MatMul", x, b.choice(partners))
    else:
        rank = len(shape)
        if rank < 2:
            raise NoFit
        y = b.node("Transpose", x, perm=[*range(rank - 2), rank - 1, rank - 2])
        b.node("MatMul", *_any_order(b, x, y))


def gemm(b: Builder) -> None:
    """Gemm with either operand constant or not, transposed or not."""
    x = b.pick("f", (2,))
    rows, inner = b.shape(x)
    columns = b.number(1, 6)
    flags = {"transA": b.number(0, 1), "transB": b.number(0, 1)}
    if flags["transA"]:
        rows, inner = inner, rows
    other = b.operand((columns, inner) if flags["transB"] else (inner, columns))
    bias = b.choice(((), (columns,), (1, columns), (rows, 1), (rows, columns), (1,), None))
    inputs = [x, other] if bias is None else [x, other, b.operand(bias)]
    factors = {name: b.choice((1.0, 0.5, -2.0)) for name in ("alpha", "beta")}
    b.node("Gemm", *inputs, **flags, **factors)


def reduce(b: Builder) -> None:
    """Reduce over some axes, or all."""
    x = b.pick("f")
    operator = b.choice(_REDUCTIONS)
    rank = len(b.shape(x))
    axes = [i - b.choice((0, 0, rank)) for i in range(rank) if b.chance(0.4)]
    keep = {"keepdims": b.number(0, 1)} if b.chance(0.8) else {}
    if not axes:
        b.node(operator, x, **keep)
    elif b.opset >= 18 or operator == "ReduceSum":
        b.node(operator, x, b.ints(*axes), **keep)
    else:
        b.node(operator, x, axes=axes, **keep)


def softmax(b: Builder) -> None:
    """Softmax or LogSoftmax along any axis."""
    x = b.pick("f", FIRST)
    b.node(b.choice(("Softmax", "Softmax", "LogSoftmax")), x, axis=b.axis(len(b.shape(x))))


# Images


def _windows(b: Builder, sizes: Shape) -> dict[str, Any]:
    """Return kernel, strides, dilations and pads that fit these sizes and larger ones."""
    kernel = [b.number(1, min(3, size)) for size in sizes]
    windows: dict[str, Any] = {"kernel_shape": kernel, "strides": [b.number(1, 2) for _ in sizes]}
    if b.chance(0.2):
        windows["dilations"] = [b.number(1, 2) for _ in sizes]
    if b.chance(0.2):
        return windows | {"auto_pad": b.choice(("SAME_UPPER", "SAME_LOWER", "VALID"))}
    return windows | {"pads": [b.number(0, size - 1) for _ in range(2) for size in kernel]}


def _divisor(b: Builder, number: int) -> int:
    return int(b.choice([d for d in range(1, number + 1) if number % d == 0]))


def _image(b: Builder) -> tuple[str, Shape]:
    x = b.pick("f", IMAGES_RANKS)
    return x, b.shape(x)


def convolve(b: Builder) -> None:
    """Conv with random groups, windows and bias."""
    x, shape = _image(b)
    windows = _windows(b, b.least(x)[2:])
    group = _divisor(b, shape[1])
    outputs = group * b.number(1, 4)
    weight = b.operand((outputs, shape[1] // group, *windows["kernel_shape"]))
    bias = [b.floats((outputs,))] if b.chance(0.5) else []
    b.node("Conv", x, weight, *bias, group=group, **windows)


def deconvolve(b: Builder) -> None:
    """ConvTranspose with random groups, windows and output_padding."""
    x, shape = _image(b)
    windows = _windows(b, b.least(x)[2:])
    group = _divisor(b, shape[1])
    outputs = b.number(1, 4)
    weight = b.floats((shape[1], outputs, *windows["kernel_shape"]))
    bias = [b.floats((outputs * group,))] if b.chance(0.5) else []
    extra = {"output_padding": [b.number(0, s - 1) for s in windows["strides"]]} if b.chance(0.5) else {}
    b.node("ConvTranspose", x, weight, *bias, group=group, **windows, **extra)


def pool(b: Builder) -> None:
    """MaxPool, AveragePool or LpPool, sometimes rounding up."""
    x, _ = _image(b)
    operator = b.choice(("MaxPool", "AveragePool", "LpPool"))
    windows = _windows(b, b.least(x)[2:])
    if "auto_pad" not in windows and b.chance(0.4):
        windows["ceil_mode"] = 1
    if operator == "AveragePool":
        windows["count_include_pad"] = b.number(0, 1)
    b.node(operator, x, **windows)


def global_pool(b: Builder) -> None:
    """Add a global pooling."""
    b.node(b.choice(("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")), _image(b)[0])


def normalize(b: Builder) -> None:
    """Normalise by channels; the epsilon keeps rounding errors from growing."""
    x = b.pick("f", range(2, 6))
    channels = b.shape(x)[1]
    kind = b.choice(("BatchNormalization", "BatchNormalization", "InstanceNormalization", "GroupNormalization", "LRN"))
    scales = [b.floats((channels,)) for _ in range(2)]
    if kind == "BatchNormalization":
        variance = b.constant(b.rng.uniform(0.5, 2, channels).astype(np.float32))
        b.node(kind, x, *scales, b.floats((channels,)), variance, epsilon=0.1)
    elif kind == "LRN":
        b.node(kind, x, size=b.choice((1, 3, 5)), alpha=0.5)
    else:
        groups = {"num_groups": _divisor(b, channels)} if kind[0] == "G" else {}
        b.node(kind, x, *scales, epsilon=0.1, **groups)


def layer_normalize(b: Builder) -> None:
    """Normalise over the last axes, or along one."""
    x = b.pick("f", FIRST)
    shape = b.shape(x)
    axis = b.axis(len(shape))
    rest = shape[axis % len(shape) :]
    known = [("LayerNormalization", 17), ("LayerNormalization", 17), ("RMSNormalization", 23), ("LpNormalization", 1)]
    kind = b.choice([kind for kind, since in known if b.opset >= since])  # ONNX Runtime takes them earlier
    if kind == "LpNormalization":
        b.node(kind, x, axis=axis, p=b.number(1, 2))
        return
    scales = [b.operand(rest) for _ in range(b.number(1, 2) if kind[0] == "L" else 1)]
    b.node(kind, x, *scales, axis=axis, epsilon=0.1)


def resize(b: Builder) -> None:
    """Resize of some axes in any mode, by sizes or scales."""
    x, shape = _image(b)
    mode = b.choice(("nearest", "nearest", "linear", "cubic"))
    attributes = {
        "mode": mode,
        "coordinate_transformation_mode": b.choice(("half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel")),
    }
    if mode == "nearest":
        attributes["nearest_mode"] = b.choice(("floor", "ceil", "round_prefer_floor", "round_prefer_ceil"))
    last = [i >= 2 and b.chance(0.6) for i in range(len(shape))]
    if b.chance(0.5):
        target = (b.number(1, 2 * size) if own else size for own, size in zip(last, shape, strict=True))
        b.node("Resize", x, "", "", b.ints(*target), **attributes)
    else:
        scales = b.constant(np.array([b.choice((0.5, 1.5, 2, 2, 3)) if own else 1 for own in last], np.float32))
        b.node("Resize", x, "", scales, **attributes)


def sample(b: Builder) -> None:
    """GridSample at computed indices."""
    x = b.pick("f", (4,))
    grid = b.node("Tanh", b.operand((b.shape(x)[0], b.number(1, 4), b.number(1, 4), 2)))
    mode = b.choice(("linear", "nearest", "cubic"))
    padding = b.choice(("zeros", "border", "reflection"))
    b.node("GridSample", x, grid, mode=mode, padding_mode=padding, align_corners=b.number(0, 1))


# Choices, places and orders


def select(b: Builder) -> None:
    """Add a Where by an existing condition, or by a comparison."""
    x = b.pick("f")
    condition = b.node(b.choice(_COMPARISONS), x, _beside(b, x)) if b.chance(0.6) else b.pick("b")
    b.node("Where", condition, *_any_order(b, x, _beside(b, x)))


def compare(b: Builder) -> None:
    """Compare two tensors."""
    x = b.pick("fi")
    b.node(b.choice(_COMPARISONS), *_any_order(b, x, _beside(b, x)))


def logic(b: Builder) -> None:
    """Apply a function of bools."""
    x = b.pick("b")
    if b.chance(0.3):
        b.node("Not", x)
    else:
        b.node(b.choice(("And", "Or", "Xor", "Equal")), *_any_order(b, x, _beside(b, x)))


def cast(b: Builder) -> None:
    """Cast between floats, integers and bools."""
    to = b.choice((TensorProto.FLOAT, TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL))
    b.node("Cast", b.pick("ib" if b.chance(0.6) else "fib"), to=to)


def integers(b: Builder) -> None:
    """Arithmetic of integers."""
    x = b.pick("i")
    way = b.number(0, 3)
    if way == 0:
        b.node(b.choice(("Neg", "Abs", "Sign", "Relu")), x)
    elif way == 1:
        b.node(b.choice(("Div", "Mod")), x, b.constant(_small(b, (), b.values[x][0].dtype)))
    else:
        b.node(b.choice(("Add", "Sub", "Mul", "Max", "Min", "Div", "Mod")), *_any_order(b, x, _beside(b, x)))


def largest(b: Builder) -> None:
    """ArgMax, ArgMin, Hardmax or TopK."""
    x = b.pick("f", FIRST)
    shape = b.shape(x)
    axis = b.axis(len(shape))
    kind = b.choice(("ArgMax", "ArgMin", "Hardmax", "TopK"))
    if kind == "Hardmax":
        b.node(kind, x, axis=axis)
    elif kind == "TopK":
        b.many(2, kind, x, b.ints(b.number(1, shape[axis])), axis=axis, largest=b.number(0, 1))
    else:
        b.node(kind, x, axis=axis, keepdims=b.number(0, 1), select_last_index=b.number(0, 1))


def accumulate(b: Builder) -> None:
    """CumSum along any axis."""
    x = b.pick("fi", FIRST)
    axis = b.constant(np.array(b.axis(len(b.shape(x))), np.int64))
    b.node("CumSum", x, axis, exclusive=b.number(0, 1), reverse=b.number(0, 1))


def place(b: Builder) -> None:
    """GatherElements, GatherND, ScatterElements or ScatterND with constant indices."""
    x = b.pick("f", FIRST)
    shape = b.shape(x)
    axis = b.number(0, len(shape) - 1)
    kind = b.choice(("GatherElements", "ScatterElements", "GatherND", "ScatterND"))
    if kind.endswith("Elements"):
        form = tuple(b.number(1, size) for size in shape)
        if math.prod(form) > 64:
            raise NoFit
        # each place at most once
        order = np.argsort(b.rng.random((*form[:axis], shape[axis], *form[axis + 1 :])), axis)
        indices = b.constant(order.take(range(form[axis]), axis).astype(np.int64))
        b.node(kind, x, indices, *([b.operand(form)] if kind[0] == "S" else []), axis=axis)
        return
    depth, rows = b.number(1, len(shape)), b.number(1, 3)
    places = np.stack([b.rng.permutation(np.resize(np.arange(size), rows)) for size in shape[:depth]], axis=-1)
    if len(np.unique(places, axis=0)) < rows:
        raise NoFit
    updates = [b.operand((rows, *shape[depth:]))] if kind[0] == "S" else []
    b.node(kind, x, b.constant(places.astype(np.int64)), *updates)


def one_hot(b: Builder) -> None:
    """OneHot of indices."""
    values = b.constant(np.array([b.number(-1, 1), 2], np.float32))
    x = b.pick("i", range(4))
    b.node("OneHot", x, b.constant(np.array(b.number(2, 5), np.int64)), values, axis=b.axis(len(b.shape(x)) + 1))


def mask(b: Builder) -> None:
    """Trilu of the last two axes."""
    diagonal = b.constant(np.array(b.number(-2, 2), np.int64))
    b.node("Trilu", b.pick("fi", range(2, 7)), diagonal, upper=b.number(0, 1))


def contract(b: Builder) -> None:
    """Einsum over random letters."""
    x = b.pick("f", range(1, 6))
    shape = b.shape(x)
    letters = "abcde"[: len(shape)]
    shared = [letter for letter in letters if b.chance(0.5)]
    sizes = dict(zip(letters, shape, strict=True)) | {"z": b.number(1, 3)}
    second = [str(letter) for letter in b.rng.permutation([*shared, "z"])]
    kept = [letter for letter in letters if letter not in shared or b.chance(0.5)]
    result = [str(letter) for letter in b.rng.permutation([*kept, "z"])]
    operand = b.operand(tuple(sizes[letter] for letter in second))
    b.node("Einsum", x, operand, equation=f"{letters},{''.join(second)}->{''.join(result)}")


# Shapes that are computed


def shape_of(b: Builder) -> None:
    """Read a shape, or one size of it."""
    x = b.pick("fib", FIRST)
    if b.chance(0.5):
        b.node("Shape", x)
    else:
        _size(b, x, b.axis(len(b.shape(x))))


def _size(b: Builder, x: str, axis: int) -> str:
    """Return a size as a scalar or a row of one."""
    return b.node("Gather", b.node("Shape", x), b.constant(np.array(axis, np.int64)))


def reshape_by_sizes(b: Builder) -> None:
    """Reshape by sizes that are read from the tensor, multiplied and put together."""
    x = b.pick("f", range(1, 6))
    rank = len(b.shape(x))
    parts = []
    axis = 0
    while axis < rank:
        size = _size(b, x, axis)
        axis += 1
        if axis < rank and b.chance(0.4):
            size = b.node("Mul", size, _size(b, x, axis))
            axis += 1
        parts.append(b.node("Unsqueeze", size, b.ints(0)))
    if b.chance(0.5):
        parts[b.number(0, len(parts) - 1)] = b.ints(-1)
    if b.chance(0.3):
        parts.insert(b.number(0, len(parts)), b.ints(1))
    b.node("Reshape", x, b.node("Concat", *parts, axis=0) if len(parts) > 1 else parts[0])


def expand_as(b: Builder) -> None:
    """Expand to another tensor's shape."""
    x = b.pick("f")
    names = [name for name, (a, *_) in b.values.items() if _broadcasts(b.shape(x), a.shape)]
    b.node("Expand", x, b.node("Shape", b.choice(names)))


def cut_at_size(b: Builder) -> None:
    """Slice up to a part of another size."""
    x = b.pick("f", FIRST)
    axis = b.number(0, len(b.shape(x)) - 1)
    size = b.node("Unsqueeze", _size(b, x, axis), b.ints(0))
    half = b.node("Div", size, b.ints(2))
    bounds = b.choice(((half, b.ints(END)), (b.ints(0), half), (b.ints(0), b.node("Sub", size, b.ints(1)))))
    b.node("Slice", x, *bounds, b.ints(axis))


def count(b: Builder) -> None:
    """Range over a size, as positions are made."""
    x = b.pick("f", FIRST)
    zero, one = (b.constant(np.array(v, np.int64)) for v in (0, 1))
    row = b.node("Range", zero, _size(b, x, b.axis(len(b.shape(x)))), one)
    b.node("Cast", row, to=TensorProto.FLOAT)


def fill(b: Builder) -> None:
    """ConstantOfShape."""
    shape = b.node("Shape", b.pick("f", FIRST))
    b.node("ConstantOfShape", shape, value=_scalar(b.number(1, 3)))


def _scalar(value: float) -> TensorProto:
    return TensorProto(dims=[1], data_type=TensorProto.FLOAT, float_data=[value])


# What models are made of


def recur(b: Builder) -> None:
    """LSTM, GRU or RNN in any direction, with or without biases and first states."""
    x = b.pick("f", (3,))
    _, batch, width = b.shape(x)
    operator, gates = b.choice((("LSTM", 4), ("GRU", 3), ("RNN", 1)))
    direction = b.choice(("forward", "reverse", "bidirectional"))
    ways, hidden = 1 + (direction == "bidirectional"), b.number(1, 4)
    inputs = [x, b.floats((ways, gates * hidden, width)), b.floats((ways, gates * hidden, hidden))]
    has_bias, has_state = b.chance(0.7), b.chance(0.3)
    inputs.append(b.floats((ways, 2 * gates * hidden)) if has_bias else "")
    if has_state:
        inputs += ["", *(b.operand((ways, batch, hidden)) for _ in range(2 if operator == "LSTM" else 1))]
    after = {"linear_before_reset": b.number(0, 1)} if operator == "GRU" else {}
    outputs = b.number(1, 3 if operator == "LSTM" else 2)
    y, *_ = b.many(outputs, operator, *inputs, hidden_size=hidden, direction=direction, **after)
    if b.chance(0.5):
        together = b.node("Transpose", y, perm=[0, 2, 1, 3])
        b.node("Reshape", together, b.ints(0, 0, -1))


def attend(b: Builder) -> None:
    """Attention of several heads over rows of features, as exporters write it."""
    x = b.pick("f", (2, 3))
    *batch, _, width = b.shape(x)
    heads, deep = b.number(1, 3), b.number(1, 4)
    other = b.operand((*batch, b.number(1, 6), width)) if b.chance(0.2) else x
    if other in b.constants:
        raise NoFit
    axis = len(batch)
    forth = [*range(axis), axis + 1, axis, axis + 2]

    def project(source: str) -> str:
        rows = b.node("MatMul", source, b.floats((width, heads * deep)))
        if b.chance(0.5):
            rows = b.node("Add", rows, b.floats((heads * deep,)))
        split_ = b.node("Reshape", rows, b.ints(*(0,) * axis, *((-1,) if axis < 2 else (0,)), heads, deep))
        return b.node("Transpose", split_, perm=forth)

    query, key, value = project(x), project(other), project(other)
    turned = b.node("Transpose", key, perm=[*range(axis + 1), axis + 2, axis + 1])
    scale = b.constant(np.float32(deep**-0.5))
    if b.chance(0.3):
        query = b.node("Mul", query, scale)
    scores = b.node("MatMul", query, turned)
    if b.chance(0.5):
        scores = b.node(*b.choice((("Mul", scores, scale), ("Div", scores, b.constant(np.float32(deep**0.5))))))
    if b.chance(0.4):
        shape = b.shape(scores)
        scores = b.node("Add", scores, b.operand(b.choice((shape, shape[-2:], (1, *shape[-2:]), (1, shape[-1])))))
    weights = b.node("Softmax", scores, axis=-1)
    mixed = b.node("Transpose", b.node("MatMul", weights, value), perm=forth)
    b.node("Reshape", mixed, b.ints(*(0,) * (axis + 1), heads * deep))


def gate(b: Builder) -> None:
    """Write out a function in terms of others, as exporters do."""
    x = b.pick("f", FIRST)

    def number(value: float) -> str:
        return b.constant(np.float32(value))

    kind = b.choice(("swish", "hardswish", "hardsigmoid", "gelu", "tanh gelu", "mish", "squeeze", "normal", "rms"))
    if kind == "swish":
        b.node("Mul", *_any_order(b, x, b.node("Sigmoid", x)))
    elif kind in ("hardswish", "hardsigmoid"):
        relu6 = b.node("Clip", b.node("Add", x, number(3)), number(0), number(6))
        b.node("Div", b.node("Mul", x, relu6) if kind == "hardswish" else relu6, number(6))
    elif kind == "gelu":
        erf = b.node("Erf", b.node("Div", x, number(math.sqrt(2))))
        b.node("Mul", b.node("Mul", x, b.node("Add", erf, number(1))), number(0.5))
    elif kind == "tanh gelu":
        cube = b.node("Mul", b.node("Pow", x, number(3)), number(0.044715))
        inner = b.node("Tanh", b.node("Mul", b.node("Add", x, cube), number(math.sqrt(2 / math.pi))))
        b.node("Mul", b.node("Mul", x, number(0.5)), b.node("Add", inner, number(1)))
    elif kind == "mish":
        b.node("Mul", x, b.node("Tanh", b.node("Softplus", x)))
    elif kind == "squeeze":
        b.node("Mul", x, b.node("Sigmoid", b.node("GlobalAveragePool", x)))
    else:
        _written_out(b, x, is_centred=kind == "normal")


def _written_out(b: Builder, x: str, *, is_centred: bool) -> None:
    """Normalise along some axis."""
    axis = b.choice((-1, -1, 1, b.axis(len(b.shape(x)))))
    axes: dict[str, Any] = {"axes": [axis]} if b.opset < 18 else {}
    given = [b.ints(axis)] if b.opset >= 18 else []
    centred = b.node("Sub", x, b.node("ReduceMean", x, *given, **axes)) if is_centred else x
    square = b.node("Pow", centred, b.constant(np.float32(2))) if b.chance(0.5) else b.node("Mul", centred, centred)
    spread = b.node("ReduceMean", square, *given, **axes)
    root = b.node("Sqrt", b.node("Add", spread, b.constant(np.float32(0.1))))
    y = b.node("Div", centred, root) if b.chance(0.5) else b.node("Mul", centred, b.node("Reciprocal", root))
    if b.chance(0.5):
        y = b.node("Mul", y, _beside(b, y))
        b.node("Add", y, _beside(b, y))


# Guards: what would be NaN or infinite is not picked, or never computed

_PARTIAL = ("Sqrt", "Log", "Reciprocal", "Pow", "Div")  # functions that are not finite everywhere


def _partial(b: Builder, x: str) -> str:
    kind = b.choice(_PARTIAL)
    if kind == "Pow":
        return b.node("Pow", x, b.constant(np.float32(b.choice((0.5, -1, -0.5, 1.5, 3)))))
    if kind == "Div":
        return b.node("Div", b.choice((x, b.constant(np.float32(1)))), x)
    return b.node(kind, x)


def _number(b: Builder, value: float) -> str:
    return b.constant(np.float32(value))


def _condition(b: Builder, x: str) -> str:
    """Return a condition: x is above 0, or is not 0."""
    zero = _number(b, 0)
    kind = b.choice(("Greater", "Less", "GreaterOrEqual", "not Equal", "not Less"))
    if kind.startswith("not"):
        return b.node("Not", b.node(kind.split()[1], x, zero))
    return b.node("Less", zero, x) if kind == "Less" else b.node(kind, x, zero)


def guard(b: Builder) -> None:
    """Add a Where over a function that is not finite everywhere; its argument may be made safe as well."""
    x = b.pick()

    def make() -> str:
        picked = _condition(b, x)
        y = _partial(b, b.node("Where", picked, x, _number(b, 1)) if b.chance(0.4) else x)
        other = b.choice((_number(b, b.choice((0, 1, -1, 0.5))), x))
        return b.node("Where", picked, y, other)

    b.guarded(make)


def no_nan(b: Builder) -> None:
    """nan_to_num: NaN and infinities replaced, one after the other or NaN alone."""
    x = b.pick()

    def make() -> str:
        y = _partial(b, x)
        y = b.node("Where", b.node("IsNaN", y), _number(b, 0), y)
        if b.chance(0.5):
            return b.node("Where", b.node("IsInf", y), _number(b, b.choice((0, 2, 100))), y)
        return b.node("Clip", y, _number(b, -10), _number(b, 10))

    b.guarded(make)


def safe_divide(b: Builder) -> None:
    """Divide by possible zeros: replace divisor, quotient, or both; or keep the divisor off 0 by a small number."""
    x = b.pick()
    d = b.choice((x, _beside(b, x)))

    def make() -> str:
        zero = b.node("Equal", d, _number(b, 0))
        kind = b.choice(("divisor", "quotient", "both", "max", "sum"))
        if kind == "max":
            return b.node("Div", x, b.node("Max", b.node("Abs", d), _number(b, b.choice((0.01, 0.5)))))
        if kind == "sum":
            return b.node("Div", x, b.node("Add", b.node("Mul", d, d), _number(b, 0.01)))
        by = b.node("Where", zero, _number(b, 1), d) if kind != "quotient" else d
        y = b.node("Div", x, by)
        return y if kind == "divisor" else b.node("Where", zero, _number(b, b.choice((0, 1))), y)

    b.guarded(make)


def xlogy(b: Builder) -> None:
    """x * log(y), 0 where x is 0; or the entropy of x."""
    x = b.pick()
    y = b.choice((x, _beside(b, x)))

    def make() -> str:
        product = b.node("Mul", x, b.node("Log", b.node("Abs", y) if b.chance(0.7) else y))
        found = b.node("Where", b.node("Equal", x, _number(b, 0)), _number(b, 0), product)
        return b.node("Where", b.node("IsNaN", found), _number(b, 0), found) if b.chance(0.3) else found

    b.guarded(make)


def loss(b: Builder) -> None:
    """Smooth L1, Huber, focal loss and cross entropy, element by element."""
    x = b.pick()
    target = _beside(b, x)

    def make() -> str:
        kind = b.choice(("smooth l1", "huber", "focal", "entropy"))
        if kind in ("smooth l1", "huber"):
            distance = b.node("Abs", b.node("Sub", x, target))
            delta = b.choice((1.0, 0.5, 2.0))
            square = b.node(
                "Mul", b.node("Mul", distance, distance), _number(b, 0.5 / (delta if kind == "smooth l1" else 1))
            )
            line = b.node("Sub", distance, _number(b, 0.5 * delta))
            line = line if kind == "smooth l1" else b.node("Mul", line, _number(b, delta))
            return b.node("Where", b.node(b.choice(("Less", "LessOrEqual")), distance, _number(b, delta)), square, line)
        share = b.node("Sigmoid", x)
        if b.chance(0.5):
            share = b.node("Clip", share, _number(b, 0.001), _number(b, 0.999))
        rest = b.node("Sub", _number(b, 1), share)
        hit = b.node("Where", b.node("Greater", target, _number(b, 0)), share, rest)
        entropy = b.node("Neg", b.node("Log", hit))
        if kind == "entropy":
            return entropy
        return b.node("Mul", b.node("Pow", b.node("Sub", _number(b, 1), hit), _number(b, b.choice((2, 1.5)))), entropy)

    b.guarded(make)


GUARDS: tuple[Step, ...] = (guard, guard, no_nan, safe_divide, xlogy, loss)
VIEWS: tuple[Step, ...] = (reshape, reshape, transpose, transpose, unsqueeze, squeeze, flatten)
MOVES: tuple[Step, ...] = (*VIEWS, slice_, concat, split, pad, gather, expand, tile, depth_to_space)
# `sign` changes no number otherwise, so that all are the input's
MOVEMENT: tuple[Step, ...] = (*MOVES, sign)
ARITHMETIC: tuple[Step, ...] = (*MOVES, sign, binary, binary, matmul, reduce, softmax)
# What a convolutional network is made of, on images of one to three dimensions.
IMAGES: tuple[Step, ...] = (
    *(convolve, convolve, deconvolve, pool, normalize, unary, slope, resize, global_pool, layer_normalize),
    *(transpose, reshape, slice_, concat, pad, binary, sign, clip, gate),
)
EVERYTHING: tuple[Step, ...] = (
    *(reshape, merge, transpose, unsqueeze, squeeze, flatten),
    *(slice_, concat, split, pad, gather, gather_at, expand, tile, depth_to_space),
    *(unary, stepped, clip, binary, binary, several, slope, matmul, gemm, reduce, softmax),
    *(convolve, deconvolve, pool, global_pool, normalize, layer_normalize, resize, sample),
    *(select, compare, logic, cast, integers, largest, accumulate, place, one_hot, mask, contract),
    *(shape_of, reshape_by_sizes, expand_as, cut_at_size, count, fill),
    *(recur, attend, gate),
    *GUARDS,
)


def random_model(seed: int, number: int, *, is_open: bool | None = None) -> RandomModel:
    """Return model `number` of a seed, with few kinds of steps, so that they meet often; every third has dynamic sizes.

    Every fifth is of guards, mostly over rows of any length.
    """
    rng = np.random.default_rng([seed, number])
    guarded = (*GUARDS, *GUARDS, unary, binary, *MOVES)
    kinds = (IMAGES, ARITHMETIC, EVERYTHING, EVERYTHING, guarded)[number // 3 % 5]
    steps = [steps[int(i)] for steps in (kinds, EVERYTHING) for i in rng.permutation(len(steps))[:9]]
    length, opset = int(rng.integers(3, 16)), int(rng.choice([13, 17, 18, 20, 23, 23]))
    given = number % 3 == 0 if is_open is None else is_open
    rows = 0.7 if kinds is guarded else 0.15
    return build(rng, steps, length, opset=opset, kinds="fffffffffffffflib", is_open=given, rows=rows)
