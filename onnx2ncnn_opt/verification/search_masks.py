"""The cheapest masks with which fp16 is enough for a net, found by running it.

Layers that overflow come first. Then the noise at the outputs is divided among the layers: their powers add up, so
masks are chosen from one number for each layer and output. A few runs show whether they are enough. `find_masks`
measures by the estimate, `mixed` on devices as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from onnx2ncnn_opt.ir.codes import Reduction
from onnx2ncnn_opt.ir.cost import multiplications_of
from onnx2ncnn_opt.ir.dim import Dim, Sym, product
from onnx2ncnn_opt.ir.features import FP32, Device, Feature, MasksFor
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.half import (
    INFINITE,
    INPUT_MARGIN,
    LARGEST,
    Inner,
    Noise,
    function_noise,
    winograd_tile,
)
from onnx2ncnn_opt.rewrite.prove_masks import SOURCES, Mask, is_wanted
from onnx2ncnn_opt.runtime.base import Array, Feed
from onnx2ncnn_opt.verification import inputs
from onnx2ncnn_opt.verification.estimate import Estimator, Walk, most_ordinary
from onnx2ncnn_opt.verification.inputs import DATA, Draw
from onnx2ncnn_opt.verification.knapsack import cheapest
from onnx2ncnn_opt.verification.noise_shares import Shares, noise_shares
from onnx2ncnn_opt.verification.options import EFFORTS, Effort
from onnx2ncnn_opt.verification.tolerance import parts

# The error of an output that fp16 may make, in units of its largest value; ...
BUDGET = 2e-2
# ... arithmetic may make these shares of it, because devices get other inputs and have other kernels, if masks for that
# take at most such a share of the multiplications; and more, if they would take many. Most of them have to keep it.
_MOST, _MANY, _FEW = 0.4, 0.2, 0.03
_DOUBT = 1.5  # times the estimate is found on devices with other inputs
_AIMS = (0.5, _MANY / 2), (1 / _DOUBT, _MANY), (0.75, _MANY), *((share, _MOST) for share in (1 / _DOUBT, 0.75, 0.85, 1))
_AIM = _AIMS[0][0]
_WIDE, _HALVINGS = 5.0, 6
_WORTH = 0.8  # of the error, to which masks that do not keep the budget have to bring it down
# Rounding blobs and weights to fp16 makes errors that no mask of arithmetic undoes: so many times these are allowed.
_ROUNDINGS, _ROUNDINGS_WIDE, _ROUNDINGS_ALLOWED = 1.25, 3.0, 4.0
_MOST_ROUNDS = 8
# Runs to find masks, of which each aims at so much less; and the share of an aim that layers may have at least.
_ATTEMPTS, _CAUTION, _LEAST_ROOM = 3, 0.95, 0.3
_HOPEFUL = 1.1  # times the budget is an error on the first input from which on others do not run
# The time that a convolution takes longer without winograd, in units of that for fp16 arithmetic.
_NO_WINOGRAD_COST = 0.25
_ELEMENT_COST = 4.0  # multiplications that take as long as an element that is computed and written
# Elements of all blobs, up to which several inputs run with several noises; and two inputs from such a share of the
# budget on. The errors of few outputs are what they are by chance: two inputs run with several noises.
_TINY_NET, _CLOSE = 2**16, ((2**20, 0.1), (2**25, _AIM / 2))
_INPUTS, _NOISES, _FEW_NUMBERS = 4, 2, 64
_SATURATED = 0.02  # p * (1 - p) of a probability p that is nearly 0 or 1

FULL = Feature.NO_FP16_ARITHMETIC | Feature.NO_WINOGRAD
Masks = Mapping[Layer, Feature]


@dataclass(frozen=True)
class Precision:
    """The effect of fp16 on a net with its masks, estimated."""

    error: float  # the largest, in units of an output's largest value; NaN if one is finite in fp32 only
    allowed: float = BUDGET  # the error up to which fp16 does what it can
    integers_differ: bool = False  # an output of integers has others
    is_undecided: bool = False  # an index may be another one, where two numbers are nearly equal
    price: float = 0.0  # the share of the multiplications that masks keep from fp16 arithmetic
    closer: str = ""  # a smaller budget, and its price
    overflow: str = ""  # the layer that overflows only with large inputs

    @property
    def ok(self) -> bool:
        """True if fp16 is enough for the net."""
        return self.error <= self.allowed and not self.integers_differ

    def __str__(self) -> str:
        return "; ".join((self.summary, *self.details))

    @property
    def details(self) -> list[str]:
        """The facts for -v."""
        reason = ""
        if not self.ok:
            reason = "" if self.closer else "`mixed` looks for more masks"
        elif self.error > BUDGET:
            reason = "rounding its blobs and weights makes this error, which no mask undoes"
        elif self.is_undecided:
            reason = "an index may be another one where two numbers are nearly equal"
        elif self.may_exceed:
            reason = f"with other inputs perhaps {BUDGET:g}"
        large = f"with inputs 8 times as large {self.overflow} overflows" if self.overflow else ""
        return [text for text in (reason, self.closer, large) if text]

    @property
    def summary(self) -> str:
        """The error, and the advice if it is large."""
        text = f"off by up to {self.error:.1e} of an output's largest value"
        if math.isnan(self.error):
            text = "NaN or infinity in an output"
        elif self.integers_differ:
            text = "an output has other integers"
        advice = "; compute it in fp32" if not self.ok or self.is_undecided else "; perhaps compute it in fp32"
        return text + advice * self.may_exceed

    @property
    def may_exceed(self) -> bool:
        """True if devices may be off by more than BUDGET, because the estimate is that inexact."""
        return not self.ok or self.is_undecided or self.error * _DOUBT > BUDGET


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
        actual, size, error = walk.outputs[blob], 0.0, 0.0
        for part in parts(expected.shape):
            here, known = actual[part], np.isfinite(expected[part])
            if not np.isfinite(here[known]).all():
                error = math.nan
                break
            there = expected[part][known]
            size = max(size, float(np.abs(there).max(initial=0.0)))
            error = max(error, float(np.abs(here[known] - there).max(initial=0.0)))
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


def largest_error(measured: Measured) -> float:
    """Return the largest error in units of an output's largest value; NaN if one is not finite."""
    ratios = _ratios(measured).values()
    return math.nan if any(map(math.isnan, ratios)) else max(ratios, default=0.0)


def _ratios(measured: Measured) -> dict[Blob, float]:
    """Return the errors in units of the outputs' largest values."""
    return {blob: error / (size or 1.0) for blob, (error, size) in measured.items()}


def _mean(several: Sequence[Measured]) -> Measured:
    """Return the root mean squares of the errors and largest values of each output."""
    columns = [np.array([*measured.values()], np.float64).reshape(-1, 2) for measured in several]
    rows = np.sqrt(np.mean(np.square(columns), axis=0)).tolist()
    return {blob: (error, size) for blob, (error, size) in zip(several[0], rows, strict=True)}


class MaskJudge:
    """The error of a net in fp16 with masks, as the estimate says; on a device in `mixed`."""

    checked = "estimated for fp16"  # the place where the net runs, for people

    def __init__(self, estimator: Estimator, integers: Collection[Blob] = (), other: MaskJudge | None = None) -> None:
        """Run the net in fp32. In fp16 it has so many `runs`, each with other noise: as `other` has, which ran before.

        Outputs that are `integers` do not count if they are places of numbers that count.
        """
        self.estimator, self.graph = estimator, estimator.graph
        self.runs: int = other.runs if other else 1
        self._left_out = integers if estimator.choices else ()
        self.fixed: Masks = {}  # masks besides those that are tried
        self._errors: dict[tuple[int, tuple[int, ...]], Measured] = {}  # by the seed, and the masks of all layers
        self._last: tuple[tuple[int, ...], Walk] | None = None
        self.factors: dict[Blob, float] = {}  # by which errors of outputs are other ones on average over inputs
        sizes = estimator.sizes()
        self.multiplications = {layer: _number(multiplications_of(layer) or 0, sizes) for layer in self.graph}
        shapes = {layer: [blob.shape or () for blob in layer.outputs] for layer in self.graph}
        self.elements = {layer: _number(sum(map(product, shapes[layer])), sizes) for layer in self.graph}
        is_sampled = other is None or sum(self.elements.values()) < _TINY_NET
        self.reference = estimator.run(sampled=is_sampled)  # in fp32
        known = self if is_sampled or other is None else other
        self.inner: Mapping[Layer, Sequence[Inner]] = known.reference.inner

    def noise(self) -> dict[Layer, Noise]:
        """Return the errors that the arithmetic of layers makes with their present masks."""
        found: dict[Layer, Noise] = {}
        for layer in self.graph:
            if layer["featmask"] & (Feature.NO_FP16_ARITHMETIC | Feature.NO_FP16_STORAGE):
                continue
            ways = self.inner.get(layer, ())
            noise = function_noise(layer, self.reference.largest_of(layer.inputs))
            if ways:
                noise = noise._replace(sizes=ways[-1 if layer["featmask"] & Feature.NO_WINOGRAD else 0].spread)
            if any(noise.sizes) or noise.relative:
                found[layer] = noise
        return found

    def run(self, seed: int = 0) -> Walk:
        """Return a run in fp16 with the masks that the layers have."""
        walk = self.estimator.run("fp16", self.noise(), seed=seed)
        self._errors[seed, self._key()] = self._measured(walk)
        self._last = self._key(), walk
        return walk

    def _measured(self, walk: Walk) -> Measured:
        return errors_of(walk, self.reference, self.estimator.ends, self._left_out)

    def error(self, masks: Masks = MappingProxyType({})) -> float:
        """Return the largest error of an output with masks added, see `largest_error`."""
        return largest_error(self.errors(masks))

    def errors(self, masks: Masks = MappingProxyType({})) -> Measured:
        """Return the errors of the outputs with masks added."""
        with self._added(masks):
            for seed in range(self.runs):
                if (seed, self._key()) not in self._errors:
                    self.run(seed)
            return _mean([self._errors[seed, self._key()] for seed in range(self.runs)])

    def expected(self, masks: Masks) -> float:
        """Return the largest error to be expected on average over the inputs of several judges, with masks added."""
        ratios = _ratios(self.errors(masks)).items()
        return max((ratio * self.factors.get(blob, 1.0) for blob, ratio in ratios), default=0.0)

    def shares(self, masks: Masks = MappingProxyType({})) -> Shares:
        """Return the powers of the noise of layers at the outputs, in units of these, with masks added."""
        errors = self.errors(masks)
        with self._added(masks):
            _, walk = self._last if self._last and self._last[0] == self._key() else (None, self.run())
            ends, known = self.estimator.ends, self.reference.outputs
            blobs = [ends[blob].input if blob in ends and _is_saturated(known[blob]) else blob for blob in errors]
            powers = [(ratio * self.factors.get(blob, 1.0)) ** 2 for blob, ratio in _ratios(errors).items()]
            return noise_shares(self.graph, walk, self.reference, [*zip(blobs, powers, strict=True)])

    @contextmanager
    def _added(self, masks: Masks) -> Iterator[None]:
        """Put masks on layers for a block."""
        with restored_masks(self.graph):
            for layer, features in (*masks.items(), *self.fixed.items()):
                layer.params["featmask"] = layer["featmask"] | int(features)
            yield

    def _key(self) -> tuple[int, ...]:
        return tuple(layer["featmask"] for layer in self.graph)

    def cost(self, layer: Layer) -> float:
        """Return the cost of computing a layer in fp32, as multiplications."""
        return self.multiplications[layer] + _ELEMENT_COST * self.elements[layer]

    def price(self, masks: Masks = MappingProxyType({})) -> float:
        """Return the share of the multiplications that masks keep from fp16 arithmetic, with masks added."""
        exact = Feature.NO_FP16_ARITHMETIC | Feature.NO_FP16_STORAGE
        counts = self.multiplications.items()
        masked = sum(count for layer, count in counts if (layer["featmask"] | masks.get(layer, 0)) & exact)
        return masked / (sum(self.multiplications.values()) or 1.0)

    def rounding(self) -> Measured:
        """Return the errors of the outputs if every blob is rounded to fp16."""
        return self._measured(self.estimator.run("fp16"))

    def hides_errors(self) -> bool:
        """Return True if scores may be much more inexact than an output, because a probability is large."""
        return any(self.reference.outputs[blob].max(initial=0.0) > 0.5 for blob in self.estimator.ends)

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


def joint_error(judges: Sequence[MaskJudge], masks: Masks = MappingProxyType({})) -> float:
    """Return the error of a net on the inputs of several judges: one of them alone may make an output nearly 0."""
    return largest_error(_mean([judge.errors(masks) for judge in judges]))


def _compare(judges: Sequence[MaskJudge], masks: Masks = MappingProxyType({})) -> float:
    """Return the error on the inputs of several judges; the first learns how far its own errors are from these."""
    own, mean = (
        _ratios(errors) for errors in (judges[0].errors(masks), _mean([each.errors(masks) for each in judges]))
    )
    judges[0].factors = {blob: mean[blob] / own[blob] for blob in mean if own[blob]}
    return max(mean.values(), default=0.0)


def _most_telling_first(judges: Sequence[MaskJudge]) -> list[MaskJudge]:
    """Return the judges; the first has the largest error of the output that is worst for all of them."""
    mean = _ratios(_mean([judge.errors() for judge in judges]))
    worst = max(mean, key=mean.__getitem__, default=None)
    return sorted(judges, key=lambda judge: -judge.errors()[worst][0] if worst else 0.0)


def _number(dim: Dim, sizes: Mapping[str, Dim]) -> int:
    """Return a dimension at some sizes; 1 if it is not known."""
    number = dim.subs(sizes) if isinstance(dim, Sym) else dim
    return number if isinstance(number, int) else 1


def masks_for_data(
    graph: Graph,
    feeds_of: Callable[[Draw], Mapping[Blob, Feed]],
    seed: int,
    net: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> tuple[dict[Layer, Mask], Precision]:
    """Find the masks of a net for inputs like data, which `feeds_of` draws.

    `net` are arguments of the `Estimator`; see `find_masks` for the options.
    """
    draws = [Draw(seed, plain=True, data=data) for data in DATA]
    with Estimator(graph, feeds_of(draws[0]), **net) as estimator:
        scales = [estimator, *(estimator.on(feeds_of(draw)) for draw in draws[1:])]
        number = most_ordinary(scales)
        again = (estimator.on(feeds_of(draws[number]._replace(seed=seed + more))) for more in range(1, _INPUTS))
        large = estimator.on(feeds_of(Draw(seed, inputs.LARGE)))
        return find_masks(chain([scales[number]], again), large, **options)


def find_masks(
    estimators: Iterable[Estimator],
    large: Estimator | None = None,
    *,
    integers: Collection[Blob] = (),
    budget: float | None = None,
    masks: MasksFor = True,
    effort: Effort = "normal",
) -> tuple[dict[Layer, Mask], Precision]:
    """Find the masks that a net needs in addition to its own for a budget, and its precision with them.

    The estimators are of one net, and small nets run on more of them. The first decides which layers need masks. On
    `large` inputs the net is only looked at: it may overflow there. `integers` are outputs. The layers keep the
    masks that they had: `put_masks` puts these on them. `masks` are for the wanted devices, or none. Raises RunError if
    ncnn cannot run the net.
    """
    found, closer, given = _Found(masks), "", iter(estimators)
    judge = MaskJudge(next(given), integers)
    judges = [judge]
    with restored_masks(judge.graph):
        if masks:
            _mask_large(judge, found)
        walk = judge.run()
        for _ in range(_MOST_ROUNDS if masks else 0):
            if not math.isnan(judge.error()) or not _mask_first_special(judge, walk, found):
                break
            walk = judge.run()
        error, allowed = judge.error(), budget or BUDGET
        elements = sum(judge.elements.values())
        share = next((share for size, share in _CLOSE if elements < size), math.inf)
        has_few = sum(array.size for array in judge.reference.outputs.values()) <= _FEW_NUMBERS
        is_vague = has_few or judge.hides_errors() or not error < share * allowed
        more = _INPUTS if elements < _TINY_NET else int(is_vague)
        runs = _NOISES if has_few or elements < _TINY_NET else 1
        judge.runs = runs
        judges += (MaskJudge(estimator, integers, judge) for estimator in islice(given, more))
        judges = _most_telling_first(judges)
        judge, error, rounding = judges[0], joint_error(judges), 0.0
        if masks and error > (budget or BUDGET * _AIM):
            closer, rounding = _mask_errors(judges, found, budget, EFFORTS[effort][1])
            error = joint_error(judges)
        if error > allowed:
            allowed = max(allowed, _ROUNDINGS_ALLOWED * (rounding or _rounding(judges)))
        differ = bool(integers) and any(each.integers_differ(each.run(), integers) for each in judges)
        overflow = _overflow(large) if large else ""
        is_undecided = any(each.is_undecided(error) for each in judges)
        return found, Precision(error, allowed, differ, is_undecided, judge.price(), closer, overflow)


def _overflow(large: Estimator) -> str:
    """Return the first layer in fp16 that makes numbers of large inputs that are infinite there."""
    layers = [layer for layer in large.graph if not layer["featmask"] & Feature.NO_FP16_STORAGE]
    sizes = large.largest({blob for layer in layers for blob in layer.outputs})
    for layer in layers:
        if any(sizes.get(blob, 0.0) > LARGEST for blob in layer.outputs) and layer.type not in SOURCES:
            return f"{layer.type} '{layer.name}'"
    return ""


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


class _Found(dict[Layer, Mask]):
    """The masks up to now, each put on its layer at once."""

    def __init__(self, wanted: MasksFor) -> None:
        super().__init__()
        self._wanted = wanted

    def add(
        self, layer: Layer, features: Feature, reason: str, largest: float | None, device: Device | None = None
    ) -> None:
        missing = features & ~Feature(layer["featmask"])
        if not missing or not is_wanted(device, self._wanted):
            return
        mask = Mask(layer.name, layer.type, missing, reason, largest, device)
        if known := self.get(layer):
            reason, device = f"{known.reason}; {reason}", device if device == known.device else None
            mask = known._replace(features=known.features | features, reason=reason, device=device)
        self[layer] = mask
        layer.params["featmask"] = layer["featmask"] | int(features)


def _mask_large(judge: MaskJudge, found: _Found) -> None:
    """Mask layers whose numbers are too large for fp16, in blobs or inside of layers, or nearly so."""
    for layer in judge.graph:
        if layer.type in SOURCES:
            continue
        for what, blobs in (("output", layer.outputs), ("input", layer.inputs)):
            sizes = [judge.reference.largest.get(blob, 0.0) for blob in blobs]
            size = max((size for size in sizes if LARGEST / INPUT_MARGIN < size < INFINITE), default=0.0)
            if size:
                is_over = "is" if size > LARGEST else "may become"  # with other inputs
                reason = f"its {what} {is_over} too large for fp16, which ends at {LARGEST:g}"
                found.add(layer, FP32, reason, size)
                break
    for layer, ways in judge.inner.items():
        if ways and ways[0].overflows:
            now = judge.reference.largest_of((*layer.inputs, *layer.outputs))
            reason = f"{ways[0].how} in fp16 become larger than {LARGEST:g}"
            found.add(layer, ways[0].remedy, reason, now, ways[0].device)


def _mask_first_special(judge: MaskJudge, walk: Walk, found: _Found) -> bool:
    """Mask the first layer that makes a NaN or an infinity, and its producers; return True if a mask was added."""
    for layer in judge.graph:
        if all(walk.special.get(blob, 0) <= judge.reference.special.get(blob, 0) for blob in layer.outputs):
            continue
        where, count = f"{layer.type} '{layer.name}'", len(found)
        found.add(layer, FP32, "its output is NaN or infinite in fp16", judge.reference.largest_of(layer.outputs))
        for blob in layer.inputs:
            if blob.producer and blob.producer.type not in SOURCES:
                found.add(blob.producer, FP32, f"{where} makes NaN or infinity of its output in fp16", None)
        if len(found) == count:  # it is made in 32 bits, and infinite where a layer reads it in 16
            for user in (user for blob in layer.outputs for user in blob.users):
                found.add(user, FP32, f"what it reads of {where} is infinite in fp16", None)
        return len(found) > count
    return False


def _mask_errors(judges: Sequence[MaskJudge], found: _Found, budget: float | None, effort: float) -> tuple[str, float]:
    """Mask the layers that make too large an error; return a note on a smaller budget, and the error of rounding.

    A given budget is kept at any price. Otherwise it is half of BUDGET, BUDGET, or more, depending on the prices: no
    masks undo the error of rounding, which is 0 if it does not matter.
    """
    judge, closer, attempts = judges[0], "", 1 + int(effort * (_ATTEMPTS - 1))
    _compare(judges)
    shares, rounding, target = judge.shares(), 0.0, budget or BUDGET
    for is_last in (shares.rest.max() > target**2, True):  # then rounding alone is probably too much
        if is_last:
            rounding = _rounding(judges)
        if budget is not None:
            target, aims = budget, [(max(budget, _ROUNDINGS * rounding), 1.0)]
        else:
            is_possible = _ROUNDINGS * rounding <= BUDGET
            sums = [math.hypot(share * BUDGET, rounding) for share, _ in _AIMS]
            mosts = [most if is_possible else min(most, _MANY) for _, most in _AIMS]
            aims = [(min(aim, BUDGET) if is_possible else aim, most) for aim, most in zip(sums, mosts, strict=True)]
            target = aims[-1][0]
        aim, masks, error = cheapest_masks(judges, shares, aims, attempts)
        if aim is not None or is_last:
            break
    price, least = judge.price(_masks_within(judge, shares, target)), aims[0][0]
    if aim is None and budget is None and price > _MANY:
        closer = f"--budget {target:.0e} would take {price:.0%} of the multiplications"
        if error > (wide := max(_WIDE * BUDGET, _ROUNDINGS_WIDE * rounding)):  # which justifies any cost
            _, masks, _ = cheapest_masks(judges, shares, [(wide, 1.0)], attempts)
        elif error > _WORTH * joint_error(judges):
            masks = {}
    elif aim is not None and aim > least:
        more = judge.price(_masks_within(judge, shares, least))
        closer = f"--budget {least:.0e} would take {more:.0%} of the multiplications"
        if budget is None and judge.price(masks) > _MANY:
            closer = f"a budget of {BUDGET:g} takes masks for more than {_MANY:.0%} of them; {closer}"
    for layer, features in masks.items():
        how = judge.inner[layer][0].how if layer in judge.inner else "its steps"
        reason = f"{how} in fp16 make errors of {shares.layers[layer].max() ** 0.5:.1e} of an output"
        found.add(layer, features, reason, judge.reference.largest_of(layer.outputs))
    return closer, rounding


def _rounding(judges: Sequence[MaskJudge]) -> float:
    """Return the error that rounding every blob makes."""
    return largest_error(_mean([judge.rounding() for judge in judges]))


_Tried: TypeAlias = tuple[float, dict[Layer, Feature]]


def cheapest_masks(
    judges: Sequence[MaskJudge], shares: Shares, aims: Sequence[tuple[float, float]], attempts: int = _ATTEMPTS
) -> tuple[float | None, dict[Layer, Feature], float]:
    """Return the first aim that masks reach at its highest price, these masks, and their error.

    The aim is None if they reach none; then the masks are those of the smallest error, and not for many multiplications
    if there are several aims. The shares say which masks should be enough. A run shows whether they are, and then
    `shares` become more exact, see `Shares.learn`.
    """
    judge, tried, factor = judges[0], list[_Tried](), 1.0
    for _ in range(attempts):
        fits = ((aim, _masks_within(judge, shares, aim * factor), most) for aim, most in aims)
        aim, masks = next(((aim, masks) for aim, masks, most in fits if judge.price(masks) <= most), (math.nan, {}))
        if math.isnan(aim):
            masks = _masks_in_reason(judge, shares, aims[-1][0])
        factor *= _CAUTION
        if known := [error for error, known in tried if known == masks]:
            if known[0] <= aim:
                break
            continue
        error = judge.expected(masks)
        if error <= _HOPEFUL * aim:
            error = _compare(judges, masks)
        tried.append((error, masks))
        if error <= aims[0][0] and judge.price(masks) <= _FEW:
            break
        shares.learn(judge.shares(masks), masks)
    for aim, most in aims:
        kept = [(judge.price(masks), error, masks) for error, masks in tried if error <= aim]
        price, error, masks = min(kept, key=lambda each: each[0], default=(math.inf, math.inf, {}))
        if price <= most:
            return aim, masks, error
    if len(aims) > 1:
        tried = [each for each in tried if judge.price(each[1]) <= _MANY]
        if not tried:
            masks = _masks_in_reason(judge, shares, aims[-1][0])
            tried = [(_compare(judges, masks), masks)]
    error, masks = min(tried, key=lambda each: each[0])
    return None, masks, error


def _masks_in_reason(judge: MaskJudge, shares: Shares, aim: float) -> dict[Layer, Feature]:
    """Return masks that leave an error above the aim, so that they do not cost too much."""
    best, high = dict[Layer, Feature](), math.sqrt(shares.total.max())
    for _ in range(_HALVINGS):
        middle = math.sqrt(aim * high)
        masks = _masks_within(judge, shares, middle)
        if judge.price(masks) <= _MANY:
            best, high = masks, middle
        else:
            aim = middle
    return best


_Step: TypeAlias = tuple[float, Layer, Feature, Array]


def _steps(judge: MaskJudge, powers: Mapping[Layer, Array], excess: Array) -> list[_Step]:
    """Return the ways to mask layers, for `cheapest`; only the noise at some outputs counts."""
    steps: list[_Step] = []
    for layer, power in powers.items():
        cost, loud = judge.cost(layer), float(power.max(where=excess, initial=0.0))
        ways = judge.inner.get(layer, ())
        if winograd_tile(layer):
            left = (ways[-1].error / ways[0].error) ** 2 if ways and ways[0].error else 1.0
            ratio = loud * (1 - left) / (_NO_WINOGRAD_COST * cost)
            steps.append((ratio, layer, Feature.NO_WINOGRAD, power * left))
            steps.append((min(loud * left / cost, ratio), layer, FULL, power * 0))
        else:
            features = ways[0].remedy if ways else Feature.NO_FP16_ARITHMETIC
            steps.append((loud / cost, layer, features, power * 0))
    return steps


def _masks_within(judge: MaskJudge, shares: Shares, aim: float) -> dict[Layer, Feature]:
    """Return the masks of small cost that leave an error of `aim` at most."""

    def cost(layer: Layer, features: Feature) -> float:
        return judge.cost(layer) * (_NO_WINOGRAD_COST if features == Feature.NO_WINOGRAD else 1.0)

    room = np.maximum(aim**2 - shares.rest, (_LEAST_ROOM * aim) ** 2)
    excess = sum(shares.layers.values(), np.zeros_like(room)) > room
    return cheapest(shares.layers, _steps(judge, shares.layers, excess), cost, room)
