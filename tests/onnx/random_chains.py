"""Random ONNX models: chains of view, movement and arithmetic operators on tensors of rank 1 to 6."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MOST_ELEMENTS = 4096

Shape = tuple[int, ...]


@dataclass
class Chain:
    """A model under construction; `shapes` holds every tensor made so far."""

    rng: np.random.Generator
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)

    def pick(self) -> str:
        """A tensor to go on with, rather a late one."""
        names = list(self.shapes)
        return names[max(int(i) for i in self.rng.integers(len(names), size=2))]

    def constant(self, array: Any) -> str:
        """An initializer."""
        name = f"k{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def ints(self, *values: int) -> str:
        """An initializer of integers."""
        return self.constant(np.array(values, np.int64))

    def floats(self, shape: Shape) -> str:
        """An initializer of random floats."""
        return self.constant(self.rng.standard_normal(shape).astype(np.float32))

    def node(self, operator: str, inputs: list[str], *shapes: Shape, **attributes: Any) -> None:
        """Append a node whose outputs have these shapes."""
        names = [f"t{len(self.shapes) + i}" for i in range(len(shapes))]
        self.nodes.append(helper.make_node(operator, inputs, names, name=f"n{len(self.nodes)}", **attributes))
        self.shapes.update(zip(names, shapes, strict=True))

    def chance(self, probability: float) -> bool:
        """True so often."""
        return bool(self.rng.random() < probability)

    def axis(self, rank: int) -> int:
        """An axis, sometimes counted from the end."""
        axis = int(self.rng.integers(rank))
        return axis - rank if self.chance(0.3) else axis


def reshape(chain: Chain, x: str) -> None:
    """Reshape to a random factorisation, sometimes with -1 or 0."""
    shape = chain.shapes[x]
    rank = int(chain.rng.integers(1, 7))
    target = [1] * rank
    for factor in _factors(math.prod(shape)):
        target[int(chain.rng.integers(rank))] *= factor
    written = list(target)
    if chain.chance(0.3):
        written[int(chain.rng.integers(rank))] = -1
    for i in range(min(rank, len(shape))):
        if written[i] == shape[i] and chain.chance(0.2):
            written[i] = 0
    chain.node("Reshape", [x, chain.ints(*written)], tuple(target))


def _factors(number: int) -> list[int]:
    factors = []
    for prime in (2, 3, 5, 7):
        while number % prime == 0:
            factors.append(prime)
            number //= prime
    return [*factors, number]


def transpose(chain: Chain, x: str) -> None:
    """Transpose by a random permutation."""
    shape = chain.shapes[x]
    perm = [int(p) for p in chain.rng.permutation(len(shape))]
    chain.node("Transpose", [x], tuple(shape[p] for p in perm), perm=perm)


def unsqueeze(chain: Chain, x: str) -> None:
    """Unsqueeze up to rank 6."""
    shape = chain.shapes[x]
    if len(shape) >= 6:
        return
    axis = int(chain.rng.integers(len(shape) + 1))
    target = (*shape[:axis], 1, *shape[axis:])
    written = axis - len(target) if chain.chance(0.3) else axis
    chain.node("Unsqueeze", [x, chain.ints(written)], target)


def squeeze(chain: Chain, x: str) -> None:
    """Squeeze axes of size 1."""
    shape = chain.shapes[x]
    gone = [i for i, size in enumerate(shape) if size == 1 and chain.chance(0.7)]
    if gone and len(gone) < len(shape):
        target = tuple(size for i, size in enumerate(shape) if i not in gone)
        chain.node("Squeeze", [x, chain.ints(*gone)], target)


def slice_(chain: Chain, x: str) -> None:
    """Slice one axis with any step."""
    shape = chain.shapes[x]
    axis = chain.axis(len(shape))
    size = shape[axis]
    step = int(chain.rng.choice([1, 1, 1, 2, 3, -1, -2]))
    first, last = sorted(int(i) for i in chain.rng.integers(0, size, size=2))
    start, end = (first, last + 1) if step > 0 else (last, first - 1 if first else -(2**31))
    if step > 0 and chain.chance(0.3):
        end = 2**31 - 1
    count = len(range(*slice(start, end, step).indices(size)))
    written = start - size if chain.chance(0.3) else start
    target = list(shape)
    target[axis] = count
    inputs = [x, *(chain.ints(v) for v in (written, end, axis, step))]
    chain.node("Slice", inputs, tuple(target))


def concat(chain: Chain, x: str) -> None:
    """Concat with itself, with another tensor or with a constant that fits."""
    shape = chain.shapes[x]
    axis = chain.axis(len(shape))
    real = axis % len(shape)
    others = [
        name
        for name, other in chain.shapes.items()
        if len(other) == len(shape)
        and all(a == b for i, (a, b) in enumerate(zip(shape, other, strict=True)) if i != real)
    ]
    operands = [x, others[int(chain.rng.integers(len(others)))]]
    if chain.chance(0.3):
        extra = (*shape[:real], int(chain.rng.integers(1, 4)), *shape[real + 1 :])
        name = chain.floats(extra)
        operands.insert(int(chain.rng.integers(3)), name)
        total = extra[real]
    else:
        total = 0
    total += sum(chain.shapes[name][real] for name in operands if name in chain.shapes)
    target = (*shape[:real], total, *shape[real + 1 :])
    if math.prod(target) <= MOST_ELEMENTS:
        chain.node("Concat", operands, target, axis=axis)


def split(chain: Chain, x: str) -> None:
    """Split an axis in two."""
    shape = chain.shapes[x]
    axis = chain.axis(len(shape))
    size = shape[axis]
    if size < 2:
        return
    first = int(chain.rng.integers(1, size))
    real = axis % len(shape)
    targets = [(*shape[:real], part, *shape[real + 1 :]) for part in (first, size - first)]
    chain.node("Split", [x, chain.ints(first, size - first)], *targets, axis=axis)


def pad(chain: Chain, x: str) -> None:
    """Pad by a constant, by the edge or by reflection."""
    shape = chain.shapes[x]
    mode = str(chain.rng.choice(["constant", "edge", "reflect"]))
    most = [min(2, size - 1) if mode == "reflect" else 2 for size in shape]
    pads = [
        int(chain.rng.integers(-1 if shape[i] > 3 else 0, m + 1)) if chain.chance(0.4) else 0
        for i, m in enumerate(most)
    ]
    pads += [int(chain.rng.integers(0, m + 1)) if chain.chance(0.4) else 0 for m in most]
    rank = len(shape)
    target = tuple(size + pads[i] + pads[rank + i] for i, size in enumerate(shape))
    value = [chain.constant(np.float32(chain.rng.integers(-3, 4)))] if mode == "constant" else []
    if math.prod(target) <= MOST_ELEMENTS:
        chain.node("Pad", [x, chain.ints(*pads), *value], target, mode=mode)


def gather(chain: Chain, x: str) -> None:
    """Gather by constant indices of rank 0 to 2."""
    shape = chain.shapes[x]
    axis = chain.axis(len(shape))
    real = axis % len(shape)
    size = shape[axis]
    form = [(), (1,), (3,), (2, 2)][int(chain.rng.integers(4))]
    indices = chain.rng.integers(-size, size, size=form)
    target = (*shape[:real], *form, *shape[real + 1 :])
    if target and len(target) <= 6 and math.prod(target) <= MOST_ELEMENTS:
        chain.node("Gather", [x, chain.constant(np.asarray(indices, np.int64))], target, axis=axis)


def expand(chain: Chain, x: str) -> None:
    """Expand axes of size 1 and add new ones."""
    shape = chain.shapes[x]
    target = [int(chain.rng.integers(1, 4)) if size == 1 and chain.chance(0.6) else size for size in shape]
    if len(target) < 6 and chain.chance(0.3):
        target.insert(0, int(chain.rng.integers(1, 4)))
    written = [
        1 if size == shape[-(len(target) - i)] and chain.chance(0.3) else size
        for i, size in enumerate(target)
        if len(target) - i <= len(shape)
    ]
    written = [*target[: len(target) - len(shape)], *written]
    if math.prod(target) <= MOST_ELEMENTS:
        chain.node("Expand", [x, chain.ints(*written)], tuple(target))


def tile(chain: Chain, x: str) -> None:
    """Tile some axes."""
    shape = chain.shapes[x]
    repeats = [int(chain.rng.integers(1, 4)) if chain.chance(0.4) else 1 for _ in shape]
    target = tuple(size * n for size, n in zip(shape, repeats, strict=True))
    if math.prod(target) <= MOST_ELEMENTS:
        chain.node("Tile", [x, chain.ints(*repeats)], target)


def flatten(chain: Chain, x: str) -> None:
    """Flatten at any axis."""
    shape = chain.shapes[x]
    axis = int(chain.rng.integers(-len(shape), len(shape) + 1))
    real = axis + len(shape) if axis < 0 else axis
    chain.node("Flatten", [x], (math.prod(shape[:real]), math.prod(shape[real:])), axis=axis)


def unary(chain: Chain, x: str) -> None:
    """A function of one tensor that no rounding can hide in."""
    operator = str(chain.rng.choice(["Relu", "Neg", "Abs"]))
    chain.node(operator, [x], chain.shapes[x])


def binary(chain: Chain, x: str) -> None:
    """A function of two tensors that broadcast, or of a tensor and a constant."""
    shape = chain.shapes[x]
    operator = str(chain.rng.choice(["Add", "Mul", "Sub", "Max", "Min"]))
    if chain.chance(0.5):
        fits = [(name, _broadcast(shape, other)) for name, other in chain.shapes.items()]
        found = [(name, target) for name, target in fits if target and math.prod(target) <= MOST_ELEMENTS]
        other, target = found[int(chain.rng.integers(len(found)))]
        assert target is not None
    else:
        cut = shape[int(chain.rng.integers(len(shape) + 1)) :]
        form = tuple(1 if chain.chance(0.4) else size for size in cut)
        other, target = chain.floats(form), shape
    operands = [x, other] if chain.chance(0.5) else [other, x]
    chain.node(operator, operands, target)


def _broadcast(a: Shape, b: Shape) -> Shape | None:
    try:
        return tuple(np.broadcast_shapes(a, b))
    except ValueError:
        return None


def matmul(chain: Chain, x: str) -> None:
    """MatMul with a constant matrix, with its own transpose, or with another tensor."""
    shape = chain.shapes[x]
    if chain.chance(0.4):
        columns = int(chain.rng.integers(1, shape[-1] + 1))
        chain.node("MatMul", [x, chain.floats((shape[-1], columns))], (*shape[:-1], columns))
        return
    if len(shape) < 2:
        return
    if math.prod((*shape[:-1], shape[-2])) > MOST_ELEMENTS:
        return
    perm = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
    name = f"t{len(chain.shapes)}"
    chain.node("Transpose", [x], tuple(shape[p] for p in perm), perm=perm)
    chain.node("MatMul", [x, name], (*shape[:-1], shape[-2]))


def reduce(chain: Chain, x: str) -> None:
    """A reduction over some axes."""
    shape = chain.shapes[x]
    operator = str(chain.rng.choice(["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2"]))
    axes = [i for i in range(len(shape)) if chain.chance(0.4)]
    keep = int(chain.chance(0.5))
    if not axes or (not keep and len(axes) == len(shape)):
        return
    target = tuple(1 if i in axes else size for i, size in enumerate(shape) if keep or i not in axes)
    chain.node(operator, [x, chain.ints(*axes)], target, keepdims=keep)


def softmax(chain: Chain, x: str) -> None:
    """Softmax along any axis."""
    chain.node("Softmax", [x], chain.shapes[x], axis=chain.axis(len(chain.shapes[x])))


def _window(chain: Chain, size: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Kernel, stride and pads of one axis that fit, and the size that comes out; each in a list."""
    kernel = int(chain.rng.integers(1, min(3, size) + 1))
    stride = int(chain.rng.integers(1, 3))
    begin, end = (int(chain.rng.integers(0, kernel)) for _ in range(2))
    return [kernel], [stride], [begin, end], [(size + begin + end - kernel) // stride + 1]


def _windows(chain: Chain, sizes: Shape) -> tuple[list[int], list[int], list[int], list[int]]:
    """As `_window`, for all spatial axes; pads as ONNX orders them."""
    each = [_window(chain, size) for size in sizes]
    kernel, stride, pads, out = ([number for window in each for number in window[i]] for i in range(4))
    return kernel, stride, pads[::2] + pads[1::2], out


def convolve(chain: Chain, x: str) -> None:
    """Conv with random groups, windows and bias."""
    shape = chain.shapes[x]
    if not 3 <= len(shape) <= 5:
        return
    kernel, stride, pads, out = _windows(chain, shape[2:])
    channels = shape[1]
    group = int(chain.rng.choice([g for g in range(1, channels + 1) if channels % g == 0]))
    outputs = group * int(chain.rng.integers(1, 4))
    weight = chain.floats((outputs, channels // group, *kernel))
    bias = [chain.floats((outputs,))] if chain.chance(0.5) else []
    target = (shape[0], outputs, *out)
    chain.node("Conv", [x, weight, *bias], target, strides=stride, pads=pads, group=group)


def deconvolve(chain: Chain, x: str) -> None:
    """ConvTranspose with random groups, windows and output_padding."""
    shape = chain.shapes[x]
    if not 3 <= len(shape) <= 5:
        return
    kernel, stride, pads, _ = _windows(chain, shape[2:])
    n = len(kernel)
    extra = [int(chain.rng.integers(0, s)) for s in stride]
    out = [(size - 1) * stride[i] + kernel[i] + extra[i] - pads[i] - pads[n + i] for i, size in enumerate(shape[2:])]
    group = int(chain.rng.choice([g for g in range(1, shape[1] + 1) if shape[1] % g == 0]))
    outputs = int(chain.rng.integers(1, 4))
    target = (shape[0], outputs * group, *out)
    if min(out) < 1 or math.prod(target) > MOST_ELEMENTS:
        return
    weight = chain.floats((shape[1], outputs, *kernel))
    attributes = {"strides": stride, "pads": pads, "group": group, "output_padding": extra}
    chain.node("ConvTranspose", [x, weight], target, **attributes)


def pool(chain: Chain, x: str) -> None:
    """MaxPool or AveragePool, sometimes rounding up."""
    shape = chain.shapes[x]
    if not 3 <= len(shape) <= 5:
        return
    kernel, stride, pads, out = _windows(chain, shape[2:])
    attributes: dict[str, Any] = {"kernel_shape": kernel, "strides": stride, "pads": pads}
    n = len(kernel)
    if chain.chance(0.4):
        attributes["ceil_mode"] = 1
        for i, size in enumerate(shape[2:]):
            span = size + pads[i] + pads[n + i] - kernel[i]
            count = -(-span // stride[i]) + 1
            out[i] = count - ((count - 1) * stride[i] >= size + pads[i])
    if chain.chance(0.5):
        chain.node("MaxPool", [x], (*shape[:2], *out), **attributes)
    else:
        counted = int(chain.rng.integers(2))
        chain.node("AveragePool", [x], (*shape[:2], *out), count_include_pad=counted, **attributes)


def normalize(chain: Chain, x: str) -> None:
    """One of the normalisations with constant statistics or scales; the epsilon keeps it from blowing up rounding."""
    shape = chain.shapes[x]
    kind = str(chain.rng.choice(["BatchNormalization", "InstanceNormalization", "LayerNormalization"]))
    if kind == "LayerNormalization":
        axis = int(chain.rng.integers(len(shape)))
        scales = [chain.floats(shape[axis:]) for _ in range(2)]
        chain.node(kind, [x, *scales], shape, axis=axis, epsilon=0.1)
        return
    if not 3 <= len(shape) <= 5:
        return
    scales = [chain.floats((shape[1],)) for _ in range(2)]
    if kind == "BatchNormalization":
        scales += [chain.floats((shape[1],)), chain.constant(chain.rng.uniform(0.5, 2, shape[1]).astype(np.float32))]
    chain.node(kind, [x, *scales], shape, epsilon=0.1)


def activate(chain: Chain, x: str) -> None:
    """A function of one tensor."""
    operator = str(chain.rng.choice(["Sigmoid", "Tanh", "HardSwish", "Elu", "Softplus", "Gelu", "LogSoftmax"]))
    chain.node(operator, [x], chain.shapes[x])


def slope(chain: Chain, x: str) -> None:
    """PRelu by slopes of any shape that broadcasts."""
    shape = chain.shapes[x]
    cut = shape[int(chain.rng.integers(len(shape))) :]
    form = tuple(1 if chain.chance(0.5) else size for size in cut)
    chain.node("PRelu", [x, chain.floats(form)], shape)


def resize(chain: Chain, x: str) -> None:
    """Resize of some axes in any mode."""
    shape = chain.shapes[x]
    target = tuple(
        int(chain.rng.integers(1, 2 * size + 1)) if i >= len(shape) - 2 and chain.chance(0.6) else size
        for i, size in enumerate(shape)
    )
    mode = str(chain.rng.choice(["nearest", "linear", "cubic"] if len(shape) == 4 else ["nearest"]))
    coordinates = str(chain.rng.choice(["half_pixel", "align_corners", "asymmetric"]))
    if math.prod(target) <= MOST_ELEMENTS and (mode != "cubic" or target[:2] == shape[:2]):
        sizes = chain.ints(*target)
        attributes = {"mode": mode, "coordinate_transformation_mode": coordinates}
        chain.node("Resize", [x, "", "", sizes], target, **attributes)


def global_pool(chain: Chain, x: str) -> None:
    """A global pooling."""
    shape = chain.shapes[x]
    if 3 <= len(shape) <= 5:
        operator = str(chain.rng.choice(["GlobalAveragePool", "GlobalMaxPool"]))
        chain.node(operator, [x], (*shape[:2], *(1,) * (len(shape) - 2)))


def _inner(chain: Chain, operator: str, inputs: list[str], **attributes: Any) -> str:
    """A node whose output, of whatever shape and type, is used by the next one only."""
    name = f"i{len(chain.nodes)}"
    chain.nodes.append(helper.make_node(operator, inputs, [name], name=f"n{len(chain.nodes)}", **attributes))
    return name


def select(chain: Chain, x: str) -> None:
    """Where by a comparison; operands broadcast."""
    shape = chain.shapes[x]
    a, b = (chain.floats(tuple(1 if chain.chance(0.3) else size for size in shape)) for _ in range(2))
    operator = str(chain.rng.choice(["Greater", "Less", "GreaterOrEqual", "LessOrEqual", "Equal"]))
    condition = _inner(chain, operator, [x, a])
    if chain.chance(0.3):
        condition = _inner(chain, "Not", [condition])
    if chain.chance(0.3):
        other = _inner(chain, "Less", [b, x])
        condition = _inner(chain, str(chain.rng.choice(["And", "Or", "Xor"])), [condition, other])
    operands = [[x, b], [b, x], [b, a]][int(chain.rng.integers(3))]
    chain.node("Where", [condition, *operands], shape)


def largest(chain: Chain, x: str) -> None:
    """ArgMax and its like, as numbers."""
    shape = chain.shapes[x]
    axis = chain.axis(len(shape))
    if chain.chance(0.3):
        chain.node("Hardmax", [x], shape, axis=axis)
        return
    operator = str(chain.rng.choice(["ArgMax", "ArgMin"]))
    place = _inner(chain, operator, [x], axis=axis, select_last_index=int(chain.rng.integers(2)))
    target = list(shape)
    target[axis] = 1
    chain.node("Cast", [place], tuple(target), to=TensorProto.FLOAT)


def accumulate(chain: Chain, x: str) -> None:
    """CumSum along any axis."""
    shape = chain.shapes[x]
    flags = {name: int(chain.rng.integers(2)) for name in ("exclusive", "reverse")}
    chain.node("CumSum", [x, chain.constant(np.array(chain.axis(len(shape)), np.int64))], shape, **flags)


def place(chain: Chain, x: str) -> None:
    """GatherElements, GatherND, ScatterND or ScatterElements with constant indices."""
    shape = chain.shapes[x]
    kind = int(chain.rng.integers(4))
    axis = int(chain.rng.integers(len(shape)))
    if kind == 0:
        form = tuple(int(chain.rng.integers(1, size + 1)) for size in shape)
        indices = chain.rng.integers(-shape[axis], shape[axis], form)
        if math.prod(form) <= 64:
            chain.node("GatherElements", [x, chain.constant(indices.astype(np.int64))], form, axis=axis)
        return
    depth = int(chain.rng.integers(1, len(shape) + 1))
    rows = int(chain.rng.integers(1, 4))
    indices = np.stack([chain.rng.permutation(np.resize(np.arange(size), rows)) for size in shape[:depth]], axis=-1)
    if kind == 1:
        chain.node("GatherND", [x, chain.constant(indices.astype(np.int64))], (rows, *shape[depth:]))
    elif len(np.unique(indices, axis=0)) == rows:
        updates = chain.floats((rows, *shape[depth:]))
        chain.node("ScatterND", [x, chain.constant(indices.astype(np.int64)), updates], shape)


def mask(chain: Chain, x: str) -> None:
    """Trilu of the last two axes."""
    shape = chain.shapes[x]
    if len(shape) >= 2:
        diagonal = chain.constant(np.array(chain.rng.integers(-2, 3), np.int64))
        chain.node("Trilu", [x, diagonal], shape, upper=int(chain.rng.integers(2)))


def normal(chain: Chain, x: str) -> None:
    """LpNormalization, MeanVarianceNormalization, RMSNormalization or GroupNormalization."""
    shape = chain.shapes[x]
    kind = int(chain.rng.integers(3))
    if kind == 0:
        axis = chain.axis(len(shape))
        if shape[axis] > 1:  # of one number it makes 1 or -1, and ties where ncnn's division rounds otherwise
            chain.node("LpNormalization", [x], shape, axis=axis, p=int(chain.rng.integers(1, 3)))
    elif kind == 1:
        axis = int(chain.rng.integers(len(shape)))
        chain.node("RMSNormalization", [x, chain.floats(shape[axis:])], shape, axis=axis, epsilon=0.1)
    elif 3 <= len(shape) <= 5:
        groups = int(chain.rng.choice([g for g in range(1, shape[1] + 1) if shape[1] % g == 0]))
        scales = [chain.floats((shape[1],)) for _ in range(2)]
        chain.node("GroupNormalization", [x, *scales], shape, num_groups=groups, epsilon=0.1)


def contract(chain: Chain, x: str) -> None:
    """Einsum over random letters with a constant."""
    shape = chain.shapes[x]
    if len(shape) > 5:
        return
    letters = "abcde"[: len(shape)]
    shared = [letter for letter in letters if chain.chance(0.5)]
    sizes = dict(zip(letters, shape, strict=True)) | {"z": int(chain.rng.integers(1, 4))}
    second = [str(letter) for letter in chain.rng.permutation([*shared, "z"])]
    kept = [letter for letter in letters if letter not in shared or chain.chance(0.5)]
    result = [str(letter) for letter in chain.rng.permutation([*kept, "z"])]
    equation = f"{letters},{''.join(second)}->{''.join(result)}"
    target = tuple(sizes[letter] for letter in result)
    if math.prod(target) <= MOST_ELEMENTS:
        operand = chain.floats(tuple(sizes[letter] for letter in second))
        chain.node("Einsum", [x, operand], target, equation=equation)


def enlarge(chain: Chain, x: str) -> None:
    """Resize of images by whole scales."""
    shape = chain.shapes[x]
    if len(shape) != 4:
        return
    factors = [int(chain.rng.integers(1, 3)) for _ in range(2)]
    target = (*shape[:2], shape[2] * factors[0], shape[3] * factors[1])
    if math.prod(target) <= MOST_ELEMENTS:
        scales = chain.constant(np.array([1, 1, *factors], np.float32))
        mode = str(chain.rng.choice(["nearest", "linear", "cubic"]))
        chain.node("Resize", [x, "", scales], target, mode=mode)


def cut(chain: Chain, x: str) -> None:
    """Slice by bounds that mean something for any size."""
    shape = chain.shapes[x]
    axis = int(chain.rng.integers(len(shape)))
    size = shape[axis]
    if size < 3:
        return
    last = 2**31 - 1
    start, end, step = [(1, last, 1), (1, last, 2), (0, -1, 1), (0, 2, 1), (-2, last, 1), (1, -1, 1)][
        int(chain.rng.integers(6))
    ]
    target = list(shape)
    target[axis] = len(range(*slice(start, end, step).indices(size)))
    chain.node("Slice", [x, *(chain.ints(v) for v in (start, end, axis, step))], tuple(target))


def merge(chain: Chain, x: str) -> None:
    """Reshape that keeps the first axes and merges the others."""
    shape = chain.shapes[x]
    if len(shape) >= 3:
        kept = int(chain.rng.integers(1, len(shape) - 1))
        chain.node("Reshape", [x, chain.ints(*(0,) * kept, -1)], (*shape[:kept], math.prod(shape[kept:])))


Step = Callable[[Chain, str], None]

VIEWS: tuple[Step, ...] = (reshape, reshape, transpose, transpose, unsqueeze, squeeze, flatten)
MOVES: tuple[Step, ...] = (*VIEWS, slice_, concat, split, pad, gather, expand, tile)
# unary only takes signs, so the numbers stay those of the input
MOVEMENT: tuple[Step, ...] = (*MOVES, unary)
ARITHMETIC: tuple[Step, ...] = (*MOVES, unary, binary, binary, matmul, reduce, softmax)
# What a convolutional network is made of, on images of one to three dimensions.
IMAGES: tuple[Step, ...] = (
    *(convolve, convolve, deconvolve, pool, normalize, activate, slope, resize, global_pool),
    *(transpose, reshape, slice_, concat, pad, binary, unary),
)
ASSORTED: tuple[Step, ...] = (
    *(select, select, largest, accumulate, place, mask, normal, contract, slope),
    *(transpose, reshape, unsqueeze, slice_, concat, binary, reduce),
)
# What works for any size.
OPEN: tuple[Step, ...] = (
    *(convolve, convolve, deconvolve, pool, normalize, activate, slope, enlarge, global_pool, softmax, reduce, matmul),
    *(transpose, cut, merge, concat, split, pad, binary, binary, unary, flatten, unsqueeze, squeeze),
)
# The shape of an input as the model says it, and two that it may have.
OPEN_SHAPES: tuple[tuple[tuple[str | int, ...], Shape, Shape], ...] = (
    (("N", 3, "H", "W"), (1, 3, 6, 5), (2, 3, 9, 7)),
    ((1, 3, "H", "W"), (1, 3, 6, 5), (1, 3, 9, 8)),
    (("N", "L", 4), (1, 6, 4), (3, 9, 4)),
    ((1, "L", 4), (1, 6, 4), (1, 3, 4)),
    (("N", 3, 6, 5), (2, 3, 6, 5), (3, 3, 6, 5)),
)


def open_model(seed: int, length: int) -> tuple[onnx.ModelProto, tuple[Shape, Shape]]:
    """A model whose input ``x`` has open sizes, and two shapes for it; the second may make it invalid."""
    chain = Chain(np.random.default_rng(seed))
    declared, *shapes = OPEN_SHAPES[seed % len(OPEN_SHAPES)]
    chain.shapes["x"] = shapes[0]
    while len(chain.nodes) < length:
        OPEN[int(chain.rng.integers(len(OPEN)))](chain, chain.pick())
    used = {name for node in chain.nodes for name in node.input}
    outputs = [name for name in chain.shapes if name not in used and len(chain.shapes[name]) <= 4]
    graph = helper.make_graph(
        chain.nodes,
        "open",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, declared)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * len(chain.shapes[name])) for name in outputs],
        chain.initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    return model, (shapes[0], shapes[1])


def random_model(seed: int, steps: tuple[Step, ...], length: int) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """A model of up to `length` nodes, and its inputs; its outputs are the last tensor and sometimes another one."""
    rng = np.random.default_rng(seed)
    chain = Chain(rng)
    inputs = {}
    for i in range(int(rng.integers(1, 3))):
        rank = int(rng.integers(1, 6))
        shape = tuple(int(rng.choice([1, 2, 3, 4, 5, 6])) for _ in range(rank))
        if rank > 1 and (rng.random() < 0.4 or math.prod(shape) > MOST_ELEMENTS):
            shape = (1, *shape[1:])
        chain.shapes[f"x{i}"] = shape
        inputs[f"x{i}"] = rng.standard_normal(shape).astype(np.float32)
    while len(chain.nodes) < length:
        steps[int(rng.integers(len(steps)))](chain, chain.pick())
    made = [name for name in chain.shapes if name not in inputs]
    used = {name for node in chain.nodes for name in node.input}
    outputs = [name for name in made if name not in used]
    if rng.random() < 0.3:
        outputs.append(made[int(rng.integers(len(made)))])
    outputs = [_deliverable(chain, name) for name in dict.fromkeys(outputs)]
    graph = helper.make_graph(
        chain.nodes,
        "chain",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape) for name, array in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, chain.shapes[name]) for name in outputs],
        chain.initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    return model, inputs


def _deliverable(chain: Chain, name: str) -> str:
    """The tensor in a rank that a Mat can have."""
    shape = chain.shapes[name]
    if len(shape) <= 4:
        return name
    chain.node("Flatten", [name], (math.prod(shape[:3]), math.prod(shape[3:])), axis=3)
    return chain.nodes[-1].output[0]
