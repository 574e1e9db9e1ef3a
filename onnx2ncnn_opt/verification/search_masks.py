"""The cheapest masks with which fp16 is enough for a net, found by running it.

Layers that overflow come first. Then the search measures the noise that layers in fp16 make at the outputs: the powers
of the noise of layers add up, so masks are chosen from one number for each layer. `find_masks` measures by the
estimate, `mixed` on devices as well.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from onnx2ncnn_opt.ir.cost import multiplications_of
from onnx2ncnn_opt.ir.dim import Dim, Sym, product
from onnx2ncnn_opt.ir.features import FP32, Device, Feature, MasksFor
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.half import (
    INFINITE,
    INPUT_MARGIN,
    LARGEST,
    SMALLEST,
    Noise,
    function_noise,
    winograd_tile,
)
from onnx2ncnn_opt.progress import announce
from onnx2ncnn_opt.rewrite.prove_masks import SOURCES, Mask, is_wanted
from onnx2ncnn_opt.runtime.base import Array, Feed
from onnx2ncnn_opt.verification import inputs
from onnx2ncnn_opt.verification.estimate import Estimator, Walk, most_ordinary
from onnx2ncnn_opt.verification.inputs import DATA, Draw
from onnx2ncnn_opt.verification.knapsack import cheapest
from onnx2ncnn_opt.verification.options import EFFORTS, Effort
from onnx2ncnn_opt.verification.tolerance import parts

# The error of an output that fp16 may make, in units of its largest value; ...
BUDGET = 2e-2
# ... masks aim at these shares of it, because devices get other inputs and have other kernels, if that takes at most
# such a share of the multiplications; and at more, if it would take many.
_MANY = 0.2
_DOUBT = 1.5  # times the estimate is found on devices with other inputs
_AIMS = (0.5, _MANY / 2), (1 / _DOUBT, _MANY), (1.0, _MANY)
_AIM = _AIMS[0][0]
_WIDE, _GROWTH = 5.0, 1.2
_WORTH = 0.8  # of the error, to which masks that do not keep the budget have to bring it down
# Rounding every blob to fp16 makes errors that no mask undoes. So many times these are allowed.
_LEAST_ROUNDINGS, _ROUNDINGS, _ROUNDINGS_WIDE, _ROUNDINGS_ALLOWED = 1.5, 2.0, 3.0, 4.0
_MOST_ROUNDS = 8
# The runs to measure groups of layers: of nets up to a cost of `MaskJudge.cost`, at least, and between two attempts.
_RUNS, _COST, _LEAST_RUNS, _HALVINGS = 16, 8e9, 4, 4
_VAGUE = 0.2  # a difference that is so small in units of the minuend is measured instead
_HOPEFUL = 1.25  # times the budget is an error on the first input that others may make up for
# To find the sum of the powers that may stay, which is so many times as large each time.
_ATTEMPTS, _SHRINK, _MOST_SHRINK = 4, 0.6, 0.2
_NEGLIGIBLE = 0.05  # of the allowed noise: groups of so little are not divided
# The time that a convolution takes longer without winograd, in units of that for fp16 arithmetic.
_NO_WINOGRAD_COST = 0.25
_ELEMENT_COST = 4.0  # multiplications that take as long as an element that is computed and written
# Elements of all blobs, up to which several inputs run with several noises; and two inputs from such a share of the
# budget on. The errors of few outputs are what they are by chance: two inputs run with several noises.
_TINY_NET, _CLOSE = 2**16, ((2**20, 0.1), (2**25, _AIM / 2))
_INPUTS, _NOISES, _FEW_NUMBERS = 4, 2, 64
_SATURATED = 0.02  # p * (1 - p) of a probability p that is nearly 0 or 1
_LIKE_NOTHING = 1e-5  # the noise of layers of which nothing is known, in units of their largest value

FULL = Feature.NO_FP16_ARITHMETIC | Feature.NO_WINOGRAD
Masks = Mapping[Layer, Feature]


@dataclass(frozen=True)
class Precision:
    """The effect of fp16 on a net with its masks, estimated."""

    error: float  # the largest, in units of an output's largest value; NaN if one is finite in fp32 only
    allowed: float = BUDGET  # the error up to which fp16 does what it can
    integers_differ: bool = False  # an output of integers has others
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
        large = f"with inputs 8 times as large {self.overflow} overflows" if self.overflow else ""
        return [text for text in (self.closer, large) if text]

    @property
    def summary(self) -> str:
        """The error, and the advice if it is large."""
        text = f"off by up to {self.error:.1e} of an output's largest value"
        if math.isnan(self.error):
            text = "NaN or infinity in an output"
        elif self.integers_differ:
            text = "an output has other integers"
        if not self.ok:
            text += "; compute it in fp32 on devices" + ("" if self.closer else ", or see `mixed`")
        elif self.error > BUDGET:
            text += ", as rounding its blobs makes it; compute it in fp32 on devices if that is too much"
        elif self.may_exceed:
            text += f", with other inputs perhaps {BUDGET:g}; compute it in fp32 on devices if that is too much"
        return text

    @property
    def may_exceed(self) -> bool:
        """True if devices may be off by more than BUDGET, because the estimate is that inexact."""
        return not self.ok or self.error * _DOUBT > BUDGET


Measured: TypeAlias = Sequence[tuple[float, float]]  # the error of each output, NaN if infinite, and its largest value


def errors_of(
    walk: Walk,
    reference: Walk,
    ends: Mapping[Blob, Layer] = MappingProxyType({}),
    left_out: Collection[Blob] = (),
) -> Measured:
    """Return the errors of a run's outputs; those of saturated `ends` are measured by the scores in front of them."""
    found: list[tuple[float, float]] = []
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
        found.append((error, size))
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
    ratios = [error / (size or 1.0) for error, size in measured]
    return math.nan if any(map(math.isnan, ratios)) else max(ratios, default=0.0)


def error_of(walk: Walk, reference: Walk) -> float:
    """Return the largest error of a run's outputs, in units of an output's largest value; NaN if one is not finite."""
    return largest_error(errors_of(walk, reference))


def _mean(several: Sequence[Measured]) -> Measured:
    """Return the root mean squares of the errors and largest values of each output."""
    columns = [np.array(measured, np.float64).reshape(-1, 2) for measured in several]
    return [(float(error), float(size)) for error, size in np.sqrt(np.mean(np.square(columns), axis=0))]


class MaskJudge:
    """The error of a net in fp16 with masks, as the estimate says; on a device in `mixed`."""

    checked = "estimated for fp16"  # the place where the net runs, for people

    def __init__(self, estimator: Estimator, integers: Collection[Blob] = (), runs: int = 1) -> None:
        """Run the net in fp32. In fp16 it has so many `runs`, each with other noise.

        Outputs that are `integers` do not count if they are places of numbers that count.
        """
        self.estimator, self.graph, self.runs = estimator, estimator.graph, runs
        self._left_out = integers if estimator.choices else ()
        self.reference = estimator.run(sampled=True)  # in fp32
        self.inner = self.reference.inner
        self.fixed: Masks = {}  # masks besides those that are tried
        self._errors: dict[tuple[int, ...], Measured] = {}  # by the runs, and the masks of all layers
        sizes = estimator.sizes()
        self.multiplications = {layer: _number(multiplications_of(layer) or 0, sizes) for layer in self.graph}
        shapes = {layer: [blob.shape or () for blob in layer.outputs] for layer in self.graph}
        self.elements = {layer: _number(sum(map(product, shapes[layer])), sizes) for layer in self.graph}

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

    def run(self) -> Walk:
        """Return a run in fp16 with the masks that the layers have."""
        noise = self.noise()
        walks = [self.estimator.run("fp16", noise, seed=seed) for seed in range(self.runs)]
        self._errors[self._key()] = _mean([*map(self._measured, walks)])
        return walks[0]

    def _measured(self, walk: Walk) -> Measured:
        return errors_of(walk, self.reference, self.estimator.ends, self._left_out)

    def error(self, masks: Masks = MappingProxyType({})) -> float:
        """Return the largest error of an output with masks added, see `largest_error`."""
        return largest_error(self.errors(masks))

    def errors(self, masks: Masks = MappingProxyType({})) -> Measured:
        """Return the errors of the outputs with masks added."""
        with restored_masks(self.graph):
            for layer, features in (*masks.items(), *self.fixed.items()):
                layer.params["featmask"] = layer["featmask"] | int(features)
            if self._key() not in self._errors:
                self.run()
            return self._errors[self._key()]

    def _key(self) -> tuple[int, ...]:
        return (self.runs, *(layer["featmask"] for layer in self.graph))

    def layers(self) -> list[Layer]:
        """Return the layers whose arithmetic in fp16 makes errors."""
        return list(self.noise())

    def power(self, layers: Collection[Layer]) -> float:
        """Return the square of the error of an output if only these layers compute in fp16."""
        noise = self.noise()
        alone = {layer: noise[layer] for layer in layers if layer in noise}
        return largest_error(self._measured(self.estimator.run(noise=alone))) ** 2

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

    def integers_differ(self, walk: Walk, integers: Collection[Blob]) -> bool:
        """Return True if an output of integers has others in a run, both as the bits of floats and as values."""
        known = self.reference.outputs
        both = [(walk.outputs[blob], known[blob]) for blob in integers if blob in known]
        return any(((a != b) & (a.view(np.int32) != b.view(np.int32))).any() for a, b in both)


def joint_error(judges: Sequence[MaskJudge], masks: Masks = MappingProxyType({})) -> float:
    """Return the error of a net on the inputs of several judges: one of them alone may make an output nearly 0."""
    return largest_error(_mean([judge.errors(masks) for judge in judges]))


def _most_telling_first(judges: Sequence[MaskJudge]) -> list[MaskJudge]:
    """Return the judges; the first has the largest error of the output that is worst for all of them."""
    ratios = [error / (size or 1.0) for error, size in _mean([judge.errors() for judge in judges])]
    worst = int(np.argmax(ratios)) if ratios else 0
    return sorted(judges, key=lambda judge: -judge.errors()[worst][0] if ratios else 0.0)


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
        more = _INPUTS if elements < _TINY_NET else int(has_few or not error < share * allowed)
        runs = _NOISES if has_few or elements < _TINY_NET else 1
        judge.runs = runs
        judges += (MaskJudge(estimator, integers, runs) for estimator in islice(given, more))
        judges = _most_telling_first(judges)
        judge, error = judges[0], joint_error(judges)
        is_much = error > (budget or BUDGET * _AIM)
        rounding = largest_error(_mean([each.rounding() for each in judges])) if is_much else math.nan
        if not math.isnan(rounding):
            allowed = max(allowed, _ROUNDINGS_ALLOWED * rounding)
            if masks:
                closer = _mask_errors(judges, found, budget, rounding, EFFORTS[effort][1])
                error = joint_error(judges)
        differ = bool(integers) and any(each.integers_differ(each.run(), integers) for each in judges)
        overflow = _overflow(large, judge) if large else ""
        return found, Precision(error, allowed, differ, judge.price(), closer, overflow)


def _overflow(large: Estimator, judge: MaskJudge) -> str:
    """Return the first layer that makes a NaN or an infinity of large inputs, and not in fp32."""
    walk = large.run("fp16", judge.noise())
    if not any(walk.special.values()):
        return ""
    reference = large.run()
    for layer in large.graph:
        if any(walk.special.get(blob, 0) > reference.special.get(blob, 0) for blob in layer.outputs):
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


def _mask_errors(
    judges: Sequence[MaskJudge], found: _Found, budget: float | None, rounding: float, effort: float
) -> str:
    """Mask the layers that make too large an error; return a note on a smaller budget and its price.

    A given budget is kept at any price. Otherwise it is half of BUDGET, BUDGET, or more, depending on the prices.
    """
    judge, groups, closer = judges[0], NoiseGroups(judges[0]), ""
    target = max(budget or BUDGET, _ROUNDINGS * rounding)
    least = max(target * _AIM, _LEAST_ROUNDINGS * rounding)
    goals = [(max(target * share, least), most) for share, most in _AIMS] if budget is None else []
    most_runs = effort * max(min(_RUNS, _RUNS * _COST / sum(map(judge.cost, judge.graph))), _LEAST_RUNS)
    while not (kept := _affordable(judges, groups.powers(), goals[:1], 1)) and groups.runs < most_runs:
        halved = [groups.halve(_NEGLIGIBLE * least**2) for _ in range(_HALVINGS)]
        if not halved[0]:
            break
    powers = groups.powers()
    if kept := kept or _affordable(judges, powers, goals):
        aim, masks, room = kept
        if aim > least:
            price = judge.price(_masks_within(judge, powers, room * (least / aim) ** 2))
            closer = f"--budget {least:.0e} would take {price:.0%} of the multiplications"
    else:
        masks, room, _ = cheapest_masks(judges, powers, target)
        if budget is None and judge.price(masks) > _MANY:
            closer = f"--budget {target:.0e} would take {judge.price(masks):.0%} of the multiplications"
            masks = _masks_in_reason(judges, powers, room, max(_WIDE * BUDGET, _ROUNDINGS_WIDE * rounding))
    for layer, features in masks.items():
        how = judge.inner[layer][0].how if layer in judge.inner else "its steps"
        reason = f"{how} in fp16 make errors of {powers[layer] ** 0.5:.1e} of an output"
        found.add(layer, features, reason, judge.reference.largest_of(layer.outputs))
    return closer


def _affordable(
    judges: Sequence[MaskJudge],
    powers: Mapping[Layer, float],
    goals: Iterable[tuple[float, float]],
    attempts: int = _ATTEMPTS,
) -> tuple[float, dict[Layer, Feature], float] | None:
    """Return the first goal that masks reach at its highest price, with these masks, and the noise that they leave."""
    for goal, most in goals:
        if judges[0].price(_masks_within(judges[0], powers, goal**2)) <= most:
            masks, room, is_enough = cheapest_masks(judges, powers, goal, attempts)
            if is_enough and judges[0].price(masks) <= most:
                return goal, masks, room
    return None


def _masks_in_reason(
    judges: Sequence[MaskJudge], powers: Mapping[Layer, float], room: float, wide: float
) -> dict[Layer, Feature]:
    """Return masks that leave more noise than `room`, so that they do not cost too much, if they are of any use.

    An error of more than `wide` justifies any cost.
    """
    while (masks := _masks_within(judges[0], powers, room)) and judges[0].price(masks) > _MANY and room < 1:
        room *= _GROWTH
    error = joint_error(judges, masks)
    if error > wide:
        return cheapest_masks(judges, powers, wide)[0]
    return masks if error <= _WORTH * joint_error(judges) else {}


class NoiseGroups:
    """Groups of layers, and the power of each group's noise at the outputs, the square of their error.

    Within a group the powers of layers are taken for proportional to the squares of their own relative noise.
    """

    def __init__(self, judge: MaskJudge) -> None:
        self._judge, noise = judge, judge.noise()
        self._relative: dict[Layer, float] = {}
        for layer in judge.layers():
            if layer not in judge.fixed:
                sizes, own = noise.get(layer, Noise())
                size = max(judge.reference.largest_of(layer.outputs), SMALLEST)
                self._relative[layer] = (max(sizes, default=0.0) / size) ** 2 + own**2 + _LIKE_NOTHING**2
        order = sorted(self._relative, key=self._relative.__getitem__, reverse=True)
        self._groups = [(judge.power(order), order)] if order else []
        self.runs = 1

    def halve(self, negligible: float) -> bool:
        """Halve the group of the largest power; return False if all groups are negligible or of one layer."""
        power, group = max(self._groups, key=lambda each: each[0] * (len(each[1]) > 1), default=(0.0, []))
        if len(group) < 2 or power <= negligible:
            return False
        announce(f"the noise of {len(group)} layers in fp16")
        self._groups.remove((power, group))
        sums = np.cumsum([self._relative[layer] for layer in group])
        half = min(int(np.searchsorted(sums, sums[-1] / 2)) + 1, len(group) - 1)  # those with half of the weight
        first = self._judge.power(group[:half])
        is_vague = power - first < _VAGUE * power
        rest = self._judge.power(group[half:]) if is_vague else power - first
        self._groups += [(first, group[:half]), (rest, group[half:])]
        self.runs += 1 + is_vague
        return True

    def powers(self) -> dict[Layer, float]:
        """Return the power of each layer alone."""
        weights = [(power / sum(self._relative[layer] for layer in group), group) for power, group in self._groups]
        return {layer: self._relative[layer] * weight for weight, group in weights for layer in group}


def cheapest_masks(
    judges: Sequence[MaskJudge], powers: Mapping[Layer, float], target: float, attempts: int = _ATTEMPTS
) -> tuple[dict[Layer, Feature], float, bool]:
    """Return masks of small cost that keep the error of a net within `target`, or nearly so.

    The sum of powers that they leave follows: it may be `target` squared, and becomes smaller until the error fits,
    because powers add up only roughly. After so many attempts the masks are those that come nearest to it; the last
    result says whether they do.
    """
    room, error = target**2, math.inf
    for attempt in range(attempts):
        room *= max(_SHRINK * min((target / error) ** 2, 1.0), _MOST_SHRINK) if attempt else 1.0
        masks = _masks_within(judges[0], powers, room)
        error = judges[0].error(masks)
        if error <= _HOPEFUL * target:
            error = joint_error(judges, masks)
        if error <= target:
            break
    return masks, room, error <= target


_Step: TypeAlias = tuple[float, Layer, Feature, float]


def _steps(judge: MaskJudge, powers: Mapping[Layer, float]) -> list[_Step]:
    """Return the ways to mask layers, for `cheapest`."""
    steps: list[_Step] = []
    for layer, power in powers.items():
        cost = judge.cost(layer)
        if winograd_tile(layer):
            ways = [way.error for way in judge.inner.get(layer, ())]
            plain = power * (ways[-1] / ways[0]) ** 2 if ways and ways[0] else power
            ratio = (power - plain) / (_NO_WINOGRAD_COST * cost)
            steps.append((ratio, layer, Feature.NO_WINOGRAD, plain))
            steps.append((min(plain / cost, ratio), layer, FULL, 0.0))
        else:
            steps.append((power / cost, layer, Feature.NO_FP16_ARITHMETIC, 0.0))
    return steps


def _masks_within(judge: MaskJudge, powers: Mapping[Layer, float], room: float) -> dict[Layer, Feature]:
    """Return the masks of small cost that leave noise of `room` at most."""

    def cost(layer: Layer, features: Feature) -> float:
        return judge.cost(layer) * (_NO_WINOGRAD_COST if features == Feature.NO_WINOGRAD else 1.0)

    return cheapest(powers, _steps(judge, powers), cost, room)
