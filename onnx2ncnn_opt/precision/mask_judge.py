"""The error that fp16 makes at a net's outputs with masks on its layers, from runs of the net."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from onnx2ncnn_opt.ir.codes import Reduction
from onnx2ncnn_opt.ir.cost import multiplications_of
from onnx2ncnn_opt.ir.dim import Dim, product, substituted
from onnx2ncnn_opt.ir.features import Feature
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.half import Noise, computes_in_half, function_noise
from onnx2ncnn_opt.precision.fp16_run import Estimator, Walk
from onnx2ncnn_opt.precision.half_sums import Inner
from onnx2ncnn_opt.precision.noise_shares import noise_shares
from onnx2ncnn_opt.runtime.base import Array

_ELEMENT_COST = 4.0  # multiplications that take as long as an element that is computed and written
_SATURATED = 0.02  # p * (1 - p) of a probability p that is nearly 0 or 1
_NEARER = 1.0  # log-odds that other inputs change

Masks = Mapping[Layer, Feature]
Measured: TypeAlias = Mapping[Blob, tuple[float, float]]  # errors of outputs, NaN if infinite, and largest values


def errors_of(
    walk: Walk,
    reference: Walk,
    ends: Mapping[Blob, Layer] = MappingProxyType({}),
    left_out: Collection[Blob] = (),
) -> Measured:
    """Return the errors of a run's outputs; those of saturated `ends` are measured by the scores in front of them."""
    found: dict[Blob, tuple[float, float]] = {}
    for blob, expected in reference.outputs.items():
        if expected.dtype != np.float32 or not expected.size or blob in left_out:
            continue
        known = np.isfinite(expected)
        here, there = walk.outputs[blob][known], expected[known]
        size, error = (float(np.abs(each).max(initial=0.0)) for each in (there, here - there))
        if not np.isfinite(here).all():
            error = math.nan
        if blob in ends and not math.isnan(error) and _is_saturated(expected):
            scores = ends[blob].input
            error, size = _undecided_error(ends[blob], walk.scores[scores], reference.scores[scores]), 1.0
        found[blob] = error, size
    return found


def _is_saturated(probabilities: Array) -> bool:
    """Return True if errors of scores cannot show, because all probabilities are nearly 0 or 1."""
    return bool(probabilities.max() > 0.5 and (probabilities * (1 - probabilities)).max() < _SATURATED)


def _undecided_error(end: Layer, scores: Array, expected: Array) -> float:
    """Return the error that probabilities would have if the two largest scores were equal, in units of these.

    One score has a probability of 1 / (1 + exp(-x)), whose slope is at most 1 / 4: half of the probability there.
    """
    with np.errstate(invalid="ignore"):  # scores of -infinity
        errors = scores - expected
    if end.type == "Softmax":
        axis = end["axis"] if end["axis"] < 0 else end["axis"] - len(end.input.shape or expected.shape)
        if expected.shape[axis] < 2:
            return 0.0
        best = np.argpartition(-expected, 1, axis)
        first, second = (np.take_along_axis(errors, best.take([i], axis), axis) for i in range(2))
        errors = first - second
    else:
        errors = errors[expected > 0]
    return float(np.abs(errors).max(initial=0.0, where=np.isfinite(errors))) / 2


def _nearby_error(probabilities: Array, expected: Array) -> float:
    """Return the largest error that probabilities would have if their log-odds were nearer to 0 by `_NEARER`.

    It is relative to the largest probability, which is 0.5 or more then. With odds o, the slope is o / (1 + o)^2.
    """
    less = np.minimum(expected, 1 - expected)
    odds = less / (1 - less)
    factors = 1 / np.maximum(odds, math.exp(-_NEARER))
    slopes = factors * np.square((1 + odds) / (1 + factors * odds))  # relative to the present ones
    errors = np.abs(probabilities - expected) * slopes / max(0.5, expected.max(initial=0.0))
    return float(errors.max(initial=0.0, where=np.isfinite(errors)))


def largest_error(measured: Measured) -> float:
    """Return the largest error in units of an output's largest value; NaN if one is not finite."""
    ratios = ratios_of(measured).values()
    return math.nan if any(map(math.isnan, ratios)) else max(ratios, default=0.0)


def ratios_of(measured: Measured) -> dict[Blob, float]:
    """Return the errors in units of the outputs' largest values."""
    return {blob: error / (size or 1.0) for blob, (error, size) in measured.items()}


def mean_of(several: Sequence[Measured]) -> Measured:
    """Return the root mean squares of the errors and largest values of each output."""
    columns = [np.array([*measured.values()], np.float64).reshape(-1, 2) for measured in several]
    rows = np.sqrt(np.mean(np.square(columns), axis=0)).tolist()
    return {blob: (error, size) for blob, (error, size) in zip(several[0], rows, strict=True)}


class MaskJudge:
    """The error of a net in fp16 with masks, as the estimate says; on a device in `mixed`."""

    checked = "estimated for fp16"  # the place where the net runs, for people

    def __init__(self, estimator: Estimator, integers: Collection[Blob] = (), seed: int = 0) -> None:
        """Run the net in fp32; `seed` is that of the noise in fp16.

        Outputs that are `integers` do not count if they are places of numbers that count.
        """
        self.estimator, self.graph, self._seed = estimator, estimator.graph, seed
        self._left_out = integers if estimator.choices else ()
        self._errors: dict[tuple[int, ...], Measured] = {}  # by the masks of all layers
        self._last: tuple[tuple[int, ...], Walk] | None = None
        self._nearby: dict[tuple[int, ...], float] = {}
        sizes = estimator.sizes()
        self.multiplications = {layer: _number(multiplications_of(layer) or 0, sizes) for layer in self.graph}
        self._sizes = sizes
        self.reference = estimator.run(sampled=True)  # in fp32
        self.inner: Mapping[Layer, Sequence[Inner]] = self.reference.inner

    def noise(self) -> dict[Layer, Noise]:
        """Return the errors that the arithmetic of layers makes with their present masks."""
        found: dict[Layer, Noise] = {}
        for layer in self.graph:
            if not computes_in_half(layer):
                continue
            ways = self.inner.get(layer, ())
            noise = function_noise(layer, self.reference.largest_of(layer.inputs))
            if ways:
                way = ways[-1 if layer["featmask"] & Feature.NO_WINOGRAD else 0]
                noise = Noise(way.spread, max(noise.relative, way.relative), way.places)
            if any(noise.sizes) or noise.relative:
                found[layer] = noise
        return found

    def run(self) -> Walk:
        """Return a run in fp16 with the masks that the layers have."""
        key, walk = self._key(), self.estimator.run("fp16", self.noise(), seed=self._seed)
        self._last = key, walk
        both = ((walk.outputs[blob], self.reference.outputs[blob]) for blob in self.estimator.probabilities)
        self._nearby[key] = max((_nearby_error(*arrays) for arrays in both), default=0.0)
        return walk

    def walk(self) -> Walk:
        """Return the last run in fp16 if it had the masks that the layers have, or a new one."""
        return self._last[1] if self._last and self._last[0] == self._key() else self.run()

    def _measured(self, walk: Walk) -> Measured:
        return errors_of(walk, self.reference, self.estimator.ends, self._left_out)

    def error(self, masks: Masks = MappingProxyType({})) -> float:
        """Return the largest error of an output with masks added, see `largest_error`."""
        return largest_error(self.errors(masks))

    def errors(self, masks: Masks = MappingProxyType({})) -> Measured:
        """Return the errors of the outputs with masks added."""
        with self.added(masks):
            if self._key() not in self._errors:
                self._errors[self._key()] = self._measure()
            return self._errors[self._key()]

    def _measure(self) -> Measured:
        return self._measured(self.walk())

    def shares(self, masks: Masks, powers: Array) -> tuple[dict[Layer, Array], dict[Layer, Array]]:
        """Divide powers of noise at the outputs, with masks added, among the layers, see `noise_shares`."""
        with self.added(masks):
            walk = self.walk()
            ends, known = self.estimator.ends, self.reference.outputs
            counted = self._measured(walk)
            blobs = [ends[blob].input if blob in ends and _is_saturated(known[blob]) else blob for blob in counted]
            return noise_shares(self.graph, walk, self.reference, [*zip(blobs, powers.tolist(), strict=True)])

    @contextmanager
    def added(self, masks: Masks) -> Iterator[None]:
        """Put masks on layers for a block."""
        with restored_masks(self.graph):
            for layer, features in masks.items():
                layer.params["featmask"] = layer["featmask"] | int(features)
            yield

    def _key(self) -> tuple[int, ...]:
        return tuple(layer["featmask"] for layer in self.graph)

    def cost(self, layer: Layer) -> float:
        """Return the cost of computing a layer in fp32, as multiplications."""
        elements = sum(product(blob.shape or ()) for blob in layer.outputs)
        return self.multiplications[layer] + _ELEMENT_COST * _number(elements, self._sizes)

    def price(self) -> float:
        """Return the share of the multiplications that the masks of layers keep from fp16 arithmetic."""
        masked = sum(count for layer, count in self.multiplications.items() if is_exact(layer))
        return masked / (sum(self.multiplications.values()) or 1.0)

    def rounding_share(self) -> Array:
        """Return the part of the power of noise at each output that rounding every blob to fp16 makes."""
        rounding = self._measured(self.estimator.run("fp16"))
        shares = [
            (error / max(self.errors()[blob][0], error) if error else 0.0) for blob, (error, _) in rounding.items()
        ]
        return np.square(shares)

    def nearby_error(self) -> float:
        """Return the largest error of probabilities for inputs that are a little less clear, like `error`.

        The errors of a classifier depend on its least clear row or pixel: other inputs have others.
        """
        if self._key() not in self._nearby:
            self.run()
        return self._nearby[self._key()]

    def is_undecided(self, error: float) -> bool:
        """Return True if an error may change an index, because the two largest numbers differ by less."""
        for blob in self.estimator.choices:
            numbers = self.reference.outputs[blob]
            for layer in (user for user in blob.users if user.type == "Reduction"):
                axis = [each if each < 0 else each - len(blob.shape or numbers.shape) for each in layer["axes"]]
                if len(axis) != 1 or numbers.shape[axis[0]] < 2:
                    continue
                sign = -1 if layer["operation"] == Reduction.MIN else 1
                two = np.partition(sign * numbers, (-2, -1), axis[0]).take([-2, -1], axis[0])
                if np.diff(two, axis=axis[0]).min() < error * np.abs(numbers).max():
                    return True
        return False

    def integers_differ(self, walk: Walk, integers: Collection[Blob]) -> bool:
        """Return True if an output of integers has others in a run, both as the bits of floats and as values."""
        known = self.reference.outputs
        both = [(walk.outputs[blob], known[blob]) for blob in integers if blob in known]
        return any(((a != b) & (a.view(np.int32) != b.view(np.int32))).any() for a, b in both)


def is_exact(layer: Layer) -> bool:
    """Return True if a layer's masks keep it from fp16 arithmetic."""
    return bool(layer["featmask"] & (Feature.NO_FP16_ARITHMETIC | Feature.NO_FP16_STORAGE))


def joint_error(judges: Sequence[MaskJudge]) -> float:
    """Return the largest error of an output, on average over the inputs of several judges."""
    return largest_error(mean_of([judge.errors() for judge in judges]))


def _number(dim: Dim, sizes: Mapping[str, Dim]) -> int:
    """Return a dimension at some sizes; 1 if it is not known."""
    number = substituted(dim, sizes)
    return number if isinstance(number, int) else 1


@contextmanager
def restored_masks(graph: Graph) -> Iterator[None]:
    """Restore the masks of all layers at the end of the block."""
    before = {layer: layer.params.get("featmask") for layer in graph}
    try:
        yield
    finally:
        for layer, mask in before.items():
            layer.params.pop("featmask", None)
            if mask is not None:
                layer.params["featmask"] = mask
