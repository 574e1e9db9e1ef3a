from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.passes._fold import ADD, RSUB, SUB
from onnx2ncnn_opt.passes._functions import MAX, MIN, applied, function_of
from onnx2ncnn_opt.rewrite.rule import Miss, Replacement, attempt, graph_pass

# A layer that is found stands for two at least, and the longest spelling that is known has 16.
_MOST_LAYERS = 20
# Models write constants like sqrt(2 / pi) with six digits and more.
_TOLERANCE = 1e-5
# With numbers no larger than this, nothing can happen that is too narrow for the places below, or beyond them.
_LARGEST_NUMBER = 64.0
_UNBOUNDED = 1e38
# Who adds or bounds by a number so near to a round one means to keep a logarithm or a quotient behind it finite.
_GUARD, _ROUND = 2.0**-12, 64
_LARGEST = float(np.finfo(np.float32).max)
# What stands for "from 0 on" where a layer knows "above" only.
_SMALLEST = 1e-37

# Of 1 + x with a small x, in float64.
_ROUNDING = 1e-14

_PROBE = 2.0**-10
# The squares of larger numbers overflow.
_FAR = 2.0**62
_POWERS = 2 ** np.linspace(-100, 62, 400)
_COARSE = np.concatenate([[-1.0, 1.0, 0.0, -_PROBE, _PROBE, -_FAR, _FAR], np.linspace(-9, 9, 37)])
_FINE = np.concatenate([-_POWERS, _POWERS, np.arange(-24, 24, 1 / 128), np.arange(-1024, 1024, 1 / 16)])


@graph_pass(exact=False, kept="activations written by hand, in whatever way")
def fuse_elementwise(graph: Graph) -> Iterator[Replacement | Miss]:
    """several layers that make each number of one number of x   ⇒   the activation that gives the same

    They are calculated at 40,000 places and up to where squares overflow, and so is the activation, whose parameters
    follow from a few of them: only what is the same everywhere is replaced, with what overflows before. Nothing is that
    has a small number against zeros, however little it does. Not CELU and Softplus, which ncnn calculates no faster
    than their parts.
    """
    for root in graph.layers:
        if root.graph is graph and _is_plain(root):
            yield from attempt(root, _fuse, root)


def _fuse(root: Layer) -> Replacement | None:
    for source, layers in _regions(root):
        found = _activation(source, layers)
        if found is not None:
            new = Layer(found.type, root.name, [source], (), found.params)
            return Replacement(tuple(reversed(layers)), takes={root: new})
    return None


def _is_plain(layer: Layer) -> bool:
    """Whether a layer makes every element of one of each operand, with numbers of a usual size."""
    if function_of(layer) is None or not layer.inputs:
        return False
    if any(map(_is_guard, _steps(layer))):
        return False
    if layer.type == "Clip":
        return all(abs(bound) <= _LARGEST_NUMBER or abs(bound) >= _UNBOUNDED for bound in (layer["min"], layer["max"]))
    numbers = [value for value in layer.params.values() if isinstance(value, float)] + [*_coefficients(layer)]
    return all(abs(number) <= _LARGEST_NUMBER for number in numbers) and all(isinstance(n, str) for n in layer.params)


def _steps(layer: Layer) -> Sequence[float]:
    """The numbers that a layer adds or bounds by."""
    if layer.type == "Clip":
        return layer["min"], layer["max"]
    adds = layer.type == "BinaryOp" and layer["with_scalar"] and layer["op_type"] in (ADD, SUB, RSUB, MAX, MIN)
    return (layer["b"],) if adds else ()


def _is_guard(number: float) -> bool:
    if not abs(number) < _UNBOUNDED:  # NaN, too
        return False
    return 0 < abs(number - round(number * _ROUND) / _ROUND) < _GUARD


def _coefficients(layer: Layer) -> Sequence[float]:
    return layer["coeffs"] if layer.type == "Eltwise" else ()


def _regions(root: Layer) -> Iterator[tuple[Blob, list[Layer]]]:
    """Each blob that all of `root` is made of, the nearest first, with the layers from there on, the last one first."""
    layers = [root]
    front = dict.fromkeys(root.inputs)
    while len(layers) < _MOST_LAYERS:
        if len(front) == 1 and len(layers) > 1:
            yield next(iter(front)), list(layers)
        inner = next((blob for blob in front if _is_inner(blob, layers)), None)
        if inner is None:
            return
        assert inner.producer is not None
        del front[inner]
        layers.append(inner.producer)
        front.update(dict.fromkeys(inner.producer.inputs))


def _is_inner(blob: Blob, layers: Sequence[Layer]) -> bool:
    """Whether a blob is made by such a layer, and needed by these layers only."""
    layer = blob.producer
    return layer is not None and _is_plain(layer) and not blob.is_output and all(user in layers for user in blob.users)


def _activation(source: Blob, layers: Sequence[Layer]) -> Layer | None:
    """The activation that makes of each number what the layers make of it."""
    coarse = _values(source, layers, _COARSE)
    if coarse is None or np.array_equal(coarse, _COARSE):
        return None
    at = dict(zip(_COARSE.tolist(), coarse.tolist(), strict=True))
    fine: Array | None = None
    for layer in _guesses(at, layers):
        if not _agree(layer, _COARSE, coarse):
            continue
        fine = _values(source, layers, _FINE) if fine is None else fine
        if fine is not None and _agree(layer, _FINE, fine):
            return layer
    return None


def _values(source: Blob, layers: Sequence[Layer], x: Array) -> Array | None:
    """What the layers make of numbers; None where they jump at another number than 0."""
    found = {source: x}
    for layer in reversed(layers):
        operands = [found[blob] for blob in layer.inputs]
        if layer.type == "Threshold":
            at_zero = abs(layer["threshold"]) < _SMALLEST and np.array_equal(np.abs(operands[0]), np.abs(x))
            if not at_zero:
                return None
        function = function_of(layer)
        assert function is not None
        found[layer.output] = applied(function, *operands)
    return found[layers[0].output]


def _agree(activation: Layer, x: Array, values: Array) -> bool:
    function = function_of(activation)
    assert function is not None
    wanted = applied(function, x)
    bound = _TOLERANCE * np.maximum(np.abs(wanted), np.minimum(np.abs(x), 1)) + _ROUNDING
    return bool(((values == wanted) | (np.abs(values - wanted) <= bound)).all())


def _guesses(at: dict[float, float], layers: Sequence[Layer]) -> Iterator[Layer]:
    """Activations with the parameters that follow from values at a few places."""
    for type in ("AbsVal", "Sigmoid", "TanH", "Swish", "GELU", "Mish"):
        yield Layer(type, type)
    yield Layer("GELU", "GELU", (), (), {"fast_gelu": 1})
    bottom, top = at[-1.0] / math.expm1(-1), at[1.0]
    rise, middle = (at[_PROBE] - at[-_PROBE]) / (2 * _PROBE), at[0.0]
    ratio, other = at[_PROBE] / _PROBE, -at[-_PROBE] / _PROBE
    steepness, centre = (ratio - other) / (2 * _PROBE), (ratio + other) / 2
    yield from _having("ReLU", slope=0.0 - at[-1.0])
    low, high = at[-_FAR], at[_FAR]
    yield from _having("Clip", min=-_LARGEST if low <= -_FAR else low, max=_LARGEST if high >= _FAR else high)
    yield from _having("ELU", alpha=bottom)
    if bottom * top > 0:
        yield from _having("SELU", alpha=bottom / top, **{"lambda": top})
    if rise > 0:
        yield from _having("HardSigmoid", alpha=rise, beta=middle)
    if steepness > 0:
        yield from _having("HardSwish", alpha=steepness, beta=centre)


def _having(type: str, **params: float) -> Iterator[Layer]:
    with np.errstate(over="ignore"):
        rounded = {name: float(np.float32(value)) for name, value in params.items()}
    if all(math.isfinite(value) for value in rounded.values()):
        yield Layer(type, type, (), (), rounded)
