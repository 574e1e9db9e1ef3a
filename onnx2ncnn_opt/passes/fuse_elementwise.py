from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.passes._enclosure import Enclosure
from onnx2ncnn_opt.passes._functions import applied, function_of
from onnx2ncnn_opt.rewrite.rule import Miss, Replacement, attempt, graph_pass

# A layer that is found stands for two at least, and the longest spelling that is known has 16.
_MOST_LAYERS = 20
# Of layers of one operand each: tanh(x) as 2 * sigmoid(2 * x) - 1 has seven. Longer spellings read something twice.
_MOST_IN_CHAIN = 8
_LEAST_RANGE = 2.0**-6  # of an activation's values, in units of the largest
# Models write constants like sqrt(2 / pi) with six digits and more.
_TOLERANCE = 1e-5
# Who computes with larger ones may mean to round; in fp16 they leave no digits.
_LARGEST_NUMBER = 64.0
_UNBOUNDED = 1e38
# Who adds or bounds by a number so near to a round one means to keep a logarithm or a quotient after it finite.
_GUARD, _ROUND = 2.0**-12, 64
_LARGEST = float(np.finfo(np.float32).max)
# Of 1 + x with a small x, in float64.
_ROUNDING = 1e-14
# What rounding in float32 may change, on either side of what is the same otherwise.
_FLOAT32 = 1e-4
# Of a proof: cells at a time, and times that a cell is halved.
_MOST_CELLS, _MOST_HALVINGS = 2**15, 60

_PROBE = 2.0**-10
_SAMPLE, _ROUGH = 2.5, 1e-3  # a number, and how far off is no such activation for certain
# The squares of larger numbers overflow.
_FAR = 2.0**62
_POWERS = 2 ** np.linspace(-100, 62, 400)
_COARSE = np.concatenate([[-1.0, 1.0, 0.0, -_PROBE, _PROBE, -_FAR, _FAR], np.linspace(-9, 9, 37)])
# Where a proof begins: no cell has 0 inside, beside which errors count in relation to x.
_ENDS = np.concatenate([-(2.0 ** np.arange(62, -51, -1)), [0.0], 2.0 ** np.arange(-50, 63)])
_FINE = np.concatenate([-_POWERS, _POWERS, np.arange(-24, 24, 1 / 128), np.arange(-1024, 1024, 1 / 16)])


@graph_pass(exact=False, purpose="activations written by hand, in whatever way")
def fuse_elementwise(graph: Graph) -> Iterator[Replacement | Miss]:
    """several layers that make each number of one number of x   ⇒   the activation that gives the same

    The activation's parameters follow from the layers' values at a few points. That both are the same is seen at
    40,000 points, and then proved in between, from -2^62 to 2^62 (where squares overflow): interval arithmetic bounds
    what the difference, its slope and its curvature can be anywhere in a cell between two points, and cells are halved
    until that is within twice the tolerance, or the pass gives up. A kink, a pole or a spike, however narrow, is in
    some cell, whose bound it exceeds. Layers that round in float32 what they make are left alone. So is what adds a
    small number against zeros, however little it does. Not CELU and Softplus, which ncnn computes no faster than
    their parts.
    """
    kinds = _Kinds()
    for root in graph.layers:
        if root.graph is graph and kinds.of(root) is not None:
            yield from attempt(root, _fuse, root, kinds)


def _fuse(root: Layer, kinds: _Kinds) -> Replacement | None:
    for source, layers, steps in _regions(root, kinds):
        found = _activation(steps)
        if found is not None:
            new = Layer(found.type, root.name, [source], (), found.params)
            return Replacement(tuple(reversed(layers)), takes={root: new})
    return None


class _Kind(NamedTuple):
    """A layer apart from its blobs."""

    type: str
    params: tuple[tuple[str, Any], ...]


class _Kinds:
    """The kinds of layers that make every element of one of each operand, with numbers of a usual size."""

    def __init__(self) -> None:
        self._found: dict[Layer, _Kind | None] = {}

    def of(self, layer: Layer) -> _Kind | None:
        """The kind of a layer; None for others."""
        if layer not in self._found:
            self._found[layer] = _kind(layer) if _is_plain(layer) else None
        return self._found[layer]

    def step(self, layer: Layer, numbers: dict[Blob, int]) -> _Step:
        """The step of such a layer; blobs are numbered as they come."""
        kind = self.of(layer)
        assert kind is not None
        output, *inputs = (numbers.setdefault(blob, len(numbers)) for blob in (layer.output, *layer.inputs))
        return _Step(kind, tuple(inputs), output)


def _kind(layer: Layer) -> _Kind:
    known = ((str(name), value) for name, value in layer.params.items() if name not in ("featmask", "shape_hints"))
    params = ((name, tuple(value) if isinstance(value, (list, tuple)) else value) for name, value in known)
    return _Kind(layer.type, tuple(sorted(params)))


@lru_cache(maxsize=1024)
def _function(kind: _Kind, operands: int) -> Callable[..., Any]:
    found = function_of(Layer(kind.type, "", [Blob("")] * operands, (), dict(kind.params)))
    assert found is not None
    return found


class _Step(NamedTuple):
    """A layer apart from its net: its kind, and the numbers that stand for its blobs."""

    kind: _Kind
    inputs: tuple[int, ...]
    output: int

    @property
    def function(self) -> Callable[..., Any]:
        """What it makes of its operands."""
        return _function(self.kind, len(self.inputs))


class _Steps(NamedTuple):
    """Layers that make one number of another; the last one comes first, and `source` is the number of its operand."""

    steps: tuple[_Step, ...]
    source: int

    def __call__(self, x: Any, rounded: Callable[[Any], Any] = lambda values: values) -> Any:
        """What they make of arrays or enclosures; `rounded` is applied to the result of each."""
        found = {self.source: x}
        for step in reversed(self.steps):
            found[step.output] = rounded(applied(step.function, *(found[number] for number in step.inputs)))
        return found[self.steps[0].output]


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
    adds = (
        layer.type == "BinaryOp"
        and layer["with_scalar"]
        and layer["op_type"] in (BinaryOp.ADD, BinaryOp.SUB, BinaryOp.RSUB, BinaryOp.MAX, BinaryOp.MIN)
    )
    return (layer["b"],) if adds else ()


def _is_guard(number: float) -> bool:
    if not abs(number) < _UNBOUNDED:  # NaN, too
        return False
    return 0 < abs(number - round(number * _ROUND) / _ROUND) < _GUARD


def _coefficients(layer: Layer) -> Sequence[float]:
    return layer["coeffs"] if layer.type == "Eltwise" else ()


def _regions(root: Layer, kinds: _Kinds) -> Iterator[tuple[Blob, Sequence[Layer], _Steps]]:
    """Each blob that all of `root` is made of, the nearest first, with the layers from there on, the last one first."""
    layers: dict[Layer, None] = {}
    numbers: dict[Blob, int] = {}
    steps: list[_Step] = []
    front: dict[Blob, None] = {}
    layer: Layer | None = root
    while layer is not None:
        layers[layer] = None
        steps.append(kinds.step(layer, numbers))
        front.pop(layer.output, None)
        front.update(dict.fromkeys(layer.inputs))
        if len(front) == 1 and len(layers) > 1:
            source = next(iter(front))
            yield source, tuple(layers), _Steps(tuple(steps), numbers[source])
        is_chain = all(len(step.inputs) == 1 for step in steps)
        if len(layers) == (_MOST_IN_CHAIN if is_chain else _MOST_LAYERS):
            return
        layer = next((blob.producer for blob in front if _is_inner(blob, layers, kinds)), None)


def _is_inner(blob: Blob, layers: Mapping[Layer, None], kinds: _Kinds) -> bool:
    """Whether a blob is made by such a layer, and needed by these layers only."""
    layer = blob.producer
    is_plain = layer is not None and kinds.of(layer) is not None
    return is_plain and not blob.is_output and all(user in layers for user in blob.users)


@lru_cache(maxsize=1024)
def _activation(steps: _Steps) -> Layer | None:
    """The activation that makes of each number what the layers make of it; asked once for all equal ones."""
    coarse = steps(_COARSE)
    low, high = np.fmin.reduce(coarse), np.fmax.reduce(coarse)
    # What is one and the same for all numbers asks for NaN, and nearly the same is within the tolerance of anything.
    if np.array_equal(coarse, _COARSE) or high - low <= _LEAST_RANGE * max(abs(low), abs(high)):
        return None
    fine: Array | None = None
    for layer in _guesses(coarse):
        fine = steps(_FINE) if fine is None else fine
        if _agree(layer, _FINE, fine) and not _rounds(steps, fine) and _is_proved(steps, layer):
            return layer
    return None


def _agree(activation: Layer, x: Array, values: Array) -> bool:
    wanted = _made(activation, x)
    return bool(_is_near(values, wanted, x).all())


def _is_near(values: Array, wanted: Array, x: Array) -> Array:
    return np.asarray((values == wanted) | (np.abs(values - wanted) <= _allowed(x, wanted)))


def _made(activation: Layer, x: Any) -> Any:
    function = function_of(activation)
    assert function is not None
    return applied(function, x)


def _allowed(x: Array, wanted: Array) -> Array:
    """How far from the activation's values others may be."""
    return np.asarray(_TOLERANCE * np.maximum(np.abs(wanted), np.minimum(np.abs(x), 1)) + _ROUNDING)


def _rounds(steps: _Steps, values: Array) -> bool:
    """Whether float32 makes something else of the layers than their formulas say."""
    rounded = steps(_FINE.astype(np.float32).astype(np.float64), lambda x: x.astype(np.float32).astype(np.float64))
    same = (rounded == values) | (np.isnan(rounded) & np.isnan(values))
    return not bool((same | (np.abs(rounded - values) <= _FLOAT32 * np.maximum(np.abs(values), 1))).all())


def _is_proved(steps: _Steps, activation: Layer) -> bool:
    """Whether layers and activation differ by no more than twice the tolerance between the points, too."""
    lo, hi = _ENDS[:-1], _ENDS[1:]
    for _ in range(_MOST_HALVINGS):
        left = ~_is_within(steps, activation, lo, hi)
        lo, hi = lo[left], hi[left]
        if not lo.size or 2 * lo.size > _MOST_CELLS:
            break
        middle = (lo + hi) / 2
        lo, hi = np.concatenate([lo, middle]), np.concatenate([middle, hi])
    return not lo.size


def _is_within(steps: _Steps, activation: Layer, lo: Array, hi: Array) -> Array:
    """In which cells the difference is surely small."""
    cell = Enclosure.of(lo, hi)
    given, wanted = steps(cell), _made(activation, cell)
    difference = given - wanted
    least = np.where(wanted.value.straddles, 0.0, np.minimum(np.abs(wanted.value.lo), np.abs(wanted.value.hi)))
    allowed = 2 * _allowed(np.minimum(np.abs(lo), np.abs(hi)), np.where(np.isinf(least), 0.0, least))
    ends = [(steps(x), _made(activation, x)) for x in (lo, hi)]
    errors = np.max([np.where(a == b, 0.0, np.abs(a - b)) for a, b in ends], axis=0)
    width = hi - lo
    straight = errors + width * difference.slope.largest
    curved = errors + width**2 / 8 * difference.bend.largest
    equal = (given.value.lo == wanted.value.hi) & (given.value.hi == wanted.value.lo)  # infinite, both of them
    return np.asarray(equal | (np.fmin(np.fmin(difference.value.largest, straight), curved) <= allowed))


@cache
def _fixed() -> tuple[list[Layer], Array]:
    """Activations without parameters, and their values at the first points, a row each."""
    layers = [Layer(type, type) for type in ("AbsVal", "Sigmoid", "TanH", "Swish", "GELU", "Mish")]
    layers.append(Layer("GELU", "GELU", (), (), {"fast_gelu": 1}))
    return layers, np.stack([_made(layer, _COARSE) for layer in layers])


def _guesses(coarse: Array) -> Iterator[Layer]:
    """Activations that are near at the first points, with the parameters that follow from some of these."""
    layers, wanted = _fixed()
    yield from (layers[i] for i in np.flatnonzero(_is_near(coarse, wanted, _COARSE).all(axis=1)))
    yield from (layer for layer in _fitted(coarse) if _agree(layer, _COARSE, coarse))


def _fitted(coarse: Array) -> Iterator[Layer]:
    at = dict(zip(_COARSE.tolist(), coarse.tolist(), strict=True))
    bottom, top = at[-1.0] / math.expm1(-1), at[1.0]
    rise, middle = (at[_PROBE] - at[-_PROBE]) / (2 * _PROBE), at[0.0]
    ratio, other = at[_PROBE] / _PROBE, -at[-_PROBE] / _PROBE
    steepness, centre = (ratio - other) / (2 * _PROBE), (ratio + other) / 2
    low, high = at[-_FAR], at[_FAR]
    if abs(top - 1) < _ROUGH:
        yield from _having("ReLU", slope=0.0 - at[-1.0])
        yield from _having("ELU", alpha=bottom)
    if abs(min(max(_SAMPLE, low), high) - at[_SAMPLE]) < _ROUGH * _SAMPLE:
        yield from _having("Clip", min=-_LARGEST if low <= -_FAR else low, max=_LARGEST if high >= _FAR else high)
    if bottom * top > 0 and abs(high / _FAR - top) < _ROUGH * top:
        yield from _having("SELU", alpha=bottom / top, **{"lambda": top})
    if rise > 0 and abs(high - 1) < _ROUGH and abs(low) < _ROUGH:
        yield from _having("HardSigmoid", alpha=rise, beta=middle)
    if steepness > 0 and abs(middle) < _ROUGH and abs(low) < _ROUGH:
        yield from _having("HardSwish", alpha=steepness, beta=centre)


def _having(type: str, **params: float) -> Iterator[Layer]:
    with np.errstate(over="ignore"):
        rounded = {name: float(np.float32(value)) for name, value in params.items()}
    if all(math.isfinite(value) for value in rounded.values()):
        yield Layer(type, type, (), (), rounded)
