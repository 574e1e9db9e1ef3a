"""Steps of random models: each proposes one node, or a few that belong together, with any operands that it finds."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from testing.random_models import Builder, NoFit, RandomModel, Shape, Step, build

FIRST = range(1, 7)
IMAGES_RANKS = range(3, 6)
END = 2**31 - 1

_SMOOTH = (
    *("Sigmoid", "Tanh", "HardSwish", "HardSigmoid", "Elu", "Softplus", "Gelu", "Erf", "Exp", "Sin", "Cos", "Atan"),
    *("LeakyRelu", "Selu", "Celu", "Mish", "Softsign", "Sqrt", "Log", "Reciprocal", "Asinh", "Sinh", "ThresholdedRelu"),
)
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
    b.node("Squeeze", x, *([b.ints(*gone)] if gone else []))


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
    around = (*shape[:real], *shape[real + 1 :])
    fits = b.named(
        lambda a: a.dtype == dtype and a.ndim == len(shape) and np.delete(a.shape, real).tolist() == [*around]
    )
    operands = [x, *(b.choice(fits) for _ in range(b.number(1, 2)))]
    if dtype == np.float32 and b.chance(0.3):
        operands[b.number(1, len(operands) - 1)] = b.floats((*shape[:real], b.number(1, 3), *shape[real + 1 :]))
    b.node("Concat", *_any_order(b, *operands), axis=axis)


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
        return
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


def depth_to_space(b: Builder) -> None:
    """DepthToSpace or SpaceToDepth."""
    mode = b.choice(({"mode": "DCR"}, {"mode": "CRD"}, None))
    operator = "DepthToSpace" if mode else "SpaceToDepth"
    b.node(operator, b.pick("f", (4,)), blocksize=2, **(mode or {}))


# Arithmetic


def _any_of(operators: Sequence[str], kinds: str = "f", ranks: Sequence[int] = range(7)) -> Step:
    """Return the step that applies one of these functions of one tensor."""
    return lambda b: b.node(b.choice(operators), b.pick(kinds, ranks))


sign = _any_of(("Relu", "Neg", "Abs"))  # cannot hide rounding
unary = _any_of(_SMOOTH)
stepped = _any_of(("Floor", "Ceil", "Round", "Sign", "Shrink", "IsNaN", "IsInf"))
global_pool = _any_of(("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"), ranks=IMAGES_RANKS)


def clip(b: Builder) -> None:
    """Clip with one bound or two."""
    low, high = (b.constant(np.float32(v)) for v in sorted(b.rng.uniform(-1, 1, 2)))
    b.node("Clip", b.pick("f"), *b.choice(((low,), (low, high), ("", high))))


def _beside(b: Builder, x: str, kinds: str = "f") -> str:
    """Return another tensor, or a constant, that broadcasts with x."""
    shape, dtype = b.shape(x), b.values[x][0].dtype
    if b.chance(0.5):
        return str(b.choice(b.named(lambda a: a.dtype == dtype and _broadcasts(shape, a.shape))))
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
        partners = b.named(lambda a: bool(a.ndim) and a.shape[max(a.ndim - 2, 0)] == shape[-1])
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
    rank = len(b.shape(x))
    axes = [i - b.choice((0, 0, rank)) for i in range(rank) if b.chance(0.4)]
    b.reduce(b.choice(_REDUCTIONS), x, axes, **({"keepdims": b.number(0, 1)} if b.chance(0.8) else {}))


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
    b.node("CumSum", x, b.scalar(b.axis(len(b.shape(x)))), exclusive=b.number(0, 1), reverse=b.number(0, 1))


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
    b.node("OneHot", x, b.scalar(b.number(2, 5)), values, axis=b.axis(len(b.shape(x)) + 1))


def mask(b: Builder) -> None:
    """Trilu of the last two axes."""
    b.node("Trilu", b.pick("fi", range(2, 7)), b.scalar(b.number(-2, 2)), upper=b.number(0, 1))


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
    return b.node("Gather", b.node("Shape", x), b.scalar(axis))


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
    b.node("Expand", x, b.node("Shape", b.choice(b.named(lambda a: _broadcasts(b.shape(x), a.shape)))))


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
    row = b.node("Range", b.scalar(0), _size(b, x, b.axis(len(b.shape(x)))), b.scalar(1))
    b.node("Cast", row, to=TensorProto.FLOAT)


def fill(b: Builder) -> None:
    """ConstantOfShape."""
    shape = b.node("Shape", b.pick("f", FIRST))
    b.node("ConstantOfShape", shape, value=helper.make_tensor("", TensorProto.FLOAT, [1], [b.number(1, 3)]))


# What models are made of


def recur(
    b: Builder, x: str = "", time: int = 0, first: Callable[[Builder, Shape, str, int], str | None] | None = None
) -> str:
    """Add an LSTM, GRU or RNN without some of its optional inputs; return one of its outputs.

    Axis `time` of x has the steps; `first` makes initial states of a shape, like a tensor with the batch at an axis.
    """
    x = x or b.pick("f", (3,))
    if time == 1:
        x = b.node("Transpose", x, perm=[1, 0, 2])
    length, batch, width = b.shape(x)
    operator, gates = b.choice((("LSTM", 4), ("GRU", 3), ("RNN", 1)))
    direction = b.choice(("forward", "reverse", "bidirectional"))
    ways, hidden, states = 1 + (direction == "bidirectional"), b.number(1, 5), 2 if operator == "LSTM" else 1
    inputs = [x, b.floats((ways, gates * hidden, width)), b.floats((ways, gates * hidden, hidden))]
    inputs.append(b.floats((ways, 2 * gates * hidden)) if b.chance(0.6) else "")
    is_short = b.chance(0.2) and all(a.shape == b.values[x][0].shape for a in b.values[x])
    inputs.append(b.constant(b.rng.integers(1, length + 1, batch).astype(np.int32)) if is_short else "")
    form = (ways, batch, hidden)
    if first is not None:
        inputs += [first(b, form, x, 1) or "" for _ in range(states)]
    else:
        inputs += [b.operand(form) if b.chance(0.3) else "" for _ in range(states)]
    if operator == "LSTM" and b.chance(0.1):
        inputs.append(b.floats((ways, 3 * hidden)))
    after = {"linear_before_reset": b.number(0, 1)} if operator == "GRU" else {}
    if b.chance(0.1):
        after["clip"] = b.choice((0.5, 1.0))
    y, *ends = b.many(1 + states, operator, *inputs, hidden_size=hidden, direction=direction, **after)
    b.hidden.update(end for end in ends if b.chance(0.5))
    if first is None and b.chance(0.5):
        return y
    if b.chance(0.2):
        return b.node("Squeeze", ends[0], b.ints(0)) if ways == 1 else ends[0]
    rows = b.node("Reshape", b.node("Transpose", y, perm=[0, 2, 1, 3]), b.ints(0, 0, -1))
    return b.node("Transpose", rows, perm=[1, 0, 2]) if time == 1 else rows


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
        w, bias = b.floats((width, heads * deep)), b.floats((heads * deep,))
        rows = b.write("<MatMul(x, w)|MatMul(x, w) + bias>", x=source, w=w, bias=bias)
        split_ = b.node("Reshape", rows, b.ints(*(0,) * axis, *((-1,) if axis < 2 else (0,)), heads, deep))
        return b.node("Transpose", split_, perm=forth)

    query, key, value = project(x), project(other), project(other)
    turned = b.node("Transpose", key, perm=[*range(axis + 1), axis + 2, axis + 1])
    scores = b.write(f"MatMul(<q|q|q * {deep**-0.5}>, t)<|| * {deep**-0.5}| / {deep**0.5}>", q=query, t=turned)
    if b.chance(0.4):
        shape = b.shape(scores)
        scores = b.node("Add", scores, b.operand(b.choice((shape, shape[-2:], (1, *shape[-2:]), (1, shape[-1])))))
    mixed = b.node("Transpose", b.write("MatMul(Softmax(s, axis=-1), v)", s=scores, v=value), perm=forth)
    b.node("Reshape", mixed, b.ints(*(0,) * (axis + 1), heads * deep))


_FUNCTIONS = (
    *("<x * Sigmoid(x)|Sigmoid(x) * x>", "x * Clip(x + 3, 0, 6) / 6", "Clip(x + 3, 0, 6) / 6"),
    *("x * (Erf(x / 1.4142135) + 1) * 0.5", "x * 0.5 * (Tanh((x + x ** 3 * 0.044715) * 0.7978846) + 1)"),
    *("x * Tanh(Softplus(x))", "x * Sigmoid(GlobalAveragePool(x))", "normal", "rms"),
)


def gate(b: Builder) -> None:
    """Write out a function in terms of others, or a normalisation along some axis, as exporters do."""
    x = b.pick("f", FIRST)
    kind = b.choice(_FUNCTIONS)
    if kind not in ("normal", "rms"):
        b.write(kind, x=x)
        return
    axes = [b.choice((-1, -1, 1, b.axis(len(b.shape(x)))))]
    c = b.node("Sub", x, b.reduce("ReduceMean", x, axes)) if kind == "normal" else x
    v = b.reduce("ReduceMean", b.write("<c ** 2|c * c>", c=c), axes)
    y = b.write("r = Sqrt(v + 0.1); <c / r|c * Reciprocal(r)>", c=c, v=v)
    if b.chance(0.5):
        b.write("y * scale + bias", y=y, scale=_beside(b, y), bias=_beside(b, y))


# Guards: what would be NaN or infinite is not picked, or never computed. y is x, or another tensor that broadcasts.
_PARTIAL = "<Sqrt(a)|Log(a)|Reciprocal(a)|a ** <0.5|-1|-0.5|1.5|3>|<a|1> / a>"  # not finite everywhere
_CONDITION = "<Greater(x, 0)|Less(0, x)|GreaterOrEqual(x, 0)|Not(Equal(x, 0))|Not(Less(x, 0))>"
_LESS = "<Less|LessOrEqual>"


def _guard(*alternatives: str) -> Step:
    """Return the step that writes out one of these formulas."""

    def step(b: Builder) -> None:
        x = b.pick()
        b.guarded(b.choice(alternatives), x=x, y=b.choice((x, _beside(b, x))), z=_beside(b, x))

    return step


# A Where over a function that is not finite everywhere; its argument may be made safe as well.
guard = _guard(f"c = {_CONDITION}; a = <x|x|x|Where(c, x, 1)|Where(c, x, 1)>; Where(c, {_PARTIAL}, <<0|1|-1|0.5>|x>)")
# NaN and infinities are replaced, one after the other, or NaN alone.
no_nan = _guard(f"a = x; n = {_PARTIAL}; n = Where(IsNaN(n), 0, n); <Where(IsInf(n), <0|2|100>, n)|Clip(n, -10, 10)>")
# By possible zeros: the divisor, the quotient, or both are replaced; or a small number keeps the divisor off 0.
safe_divide = _guard(
    *("x / Max(Abs(y), <0.01|0.5>)", "x / (y * y + 0.01)", "x / Where(Equal(y, 0), 1, y)"),
    "Where(Equal(y, 0), <0|1>, x / y)",
    "c = Equal(y, 0); Where(c, <0|1>, x / Where(c, 1, y))",
)
# 0 where x is 0; or the entropy of x.
xlogy = _guard("p = x * Log(<Abs(y)|Abs(y)|y>); f = Where(Equal(x, 0), 0, p); <f|f|Where(IsNaN(f), 0, f)>")
# Smooth L1 and Huber, focal loss and cross entropy, element by element.
_SHARE = "s = Sigmoid(x); s = <s|Clip(s, 0.001, 0.999)>; h = Where(Greater(z, 0), s, 1 - s)"
loss = _guard(
    *(f"d = Abs(x - z); Where({_LESS}(d, {k}), d * d * {0.5 / k}, d - {0.5 * k})" for k in (1.0, 0.5, 2.0)),
    *(f"d = Abs(x - z); Where({_LESS}(d, {k}), d * d * 0.5, (d - {0.5 * k}) * {k})" for k in (1.0, 0.5, 2.0)),
    *(f"{_SHARE}; Neg(Log(h))", f"{_SHARE}; (1 - h) ** <2|1.5> * Neg(Log(h))") * 3,
)

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
