"""The cheapest masks with which fp16 is enough for a net, found by running it.

Layers that overflow come first. Then the search measures the noise that layers in fp16 make at the outputs: the powers
of the noise of layers add up, so masks are chosen from one number for each layer. `find_masks` measures by the
estimate, `mixed` on devices as well.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from onnx2ncnn_opt.runtime.base import Feed
from onnx2ncnn_opt.verification import inputs
from onnx2ncnn_opt.verification.estimate import Estimator, Walk, most_ordinary
from onnx2ncnn_opt.verification.inputs import DATA, Draw
from onnx2ncnn_opt.verification.knapsack import cheapest
from onnx2ncnn_opt.verification.options import EFFORTS, Effort
from onnx2ncnn_opt.verification.tolerance import parts

# The error of an output that fp16 may make, in units of its largest value; ...
BUDGET = 2e-2
# ... masks aim at less, because devices get other inputs and have other kernels, if that takes few multiplications; and
# at more, if it would take many.
_AIM, _FEW = 0.5, 0.1
_WIDE, _MANY, _GROWTH = 2.5, 0.2, 1.2
_WORTH = 0.8  # of the error, to which masks that do not keep the budget have to bring it down
# Rounding every blob to fp16 makes errors that no mask undoes. So many times these are allowed.
_ROUNDINGS, _ROUNDINGS_WIDE, _ROUNDINGS_ALLOWED = 2.0, 3.0, 4.0
_MOST_ROUNDS = 8
# The runs to measure groups of layers: of nets up to a cost of `MaskJudge.cost`, at least, and between two attempts.
_RUNS, _COST, _LEAST_RUNS, _HALVINGS = 24, 8e9, 4, 4
_VAGUE = 0.2  # a difference that is so small in units of the minuend is measured instead
_ATTEMPTS, _SHRINK = 3, 0.5  # to find the sum of the powers that may stay, which is so many times as large each time
_NEGLIGIBLE = 0.05  # of the allowed noise: groups of so little are not divided
# The time that a convolution takes longer without winograd, in units of that for fp16 arithmetic.
_NO_WINOGRAD_COST = 0.25
_ELEMENT_COST = 4.0  # multiplications that take as long as an element that is computed and written
_SMALL_NET, _LARGE_NET = 2**20, 2**25  # elements of all blobs, up to which two inputs run always, or near the budget
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
        return text


def error_of(walk: Walk, reference: Walk) -> float:
    """Return the largest error of a run's outputs, in units of an output's largest value; NaN if one is not finite."""
    worst = 0.0
    for blob, expected in reference.outputs.items():
        if expected.dtype != np.float32 or not expected.size:
            continue
        actual, size, error = walk.outputs[blob], 0.0, 0.0
        for part in parts(expected.shape):
            here, known = actual[part], np.isfinite(expected[part])
            if not np.isfinite(here[known]).all():
                return math.nan
            there = expected[part][known]
            size = max(size, float(np.abs(there).max(initial=0.0)))
            error = max(error, float(np.abs(here[known] - there).max(initial=0.0)))
        worst = max(worst, error / (size or 1.0))
    return worst


class MaskJudge:
    """The error of a net in fp16 with masks, as the estimate says; on a device in `mixed`."""

    checked = "estimated for fp16"  # the place where the net runs, for people

    def __init__(self, estimator: Estimator) -> None:
        self.estimator, self.graph = estimator, estimator.graph
        self.reference = estimator.run(sampled=True)  # in fp32
        self.inner = self.reference.inner
        self.fixed: Masks = {}  # masks besides those that are tried
        self._errors: dict[tuple[int, ...], float] = {}  # by the masks of all layers
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
                noise = noise._replace(sizes=ways[-1 if layer["featmask"] & Feature.NO_WINOGRAD else 0].noise)
            if any(noise.sizes) or noise.relative:
                found[layer] = noise
        return found

    def run(self) -> Walk:
        """Return a run in fp16 with the masks that the layers have."""
        walk = self.estimator.run("fp16", self.noise())
        self._errors[tuple(layer["featmask"] for layer in self.graph)] = error_of(walk, self.reference)
        return walk

    def error(self, masks: Masks = MappingProxyType({})) -> float:
        """Return the largest error of an output with masks added, see `error_of`."""
        with restored_masks(self.graph):
            for layer, features in (*masks.items(), *self.fixed.items()):
                layer.params["featmask"] = layer["featmask"] | int(features)
            key = tuple(layer["featmask"] for layer in self.graph)
            if key not in self._errors:
                self.run()
            return self._errors[key]

    def layers(self) -> list[Layer]:
        """Return the layers whose arithmetic in fp16 makes errors."""
        return list(self.noise())

    def power(self, layers: Collection[Layer]) -> float:
        """Return the square of the error of an output if only these layers compute in fp16."""
        noise = self.noise()
        alone = {layer: noise[layer] for layer in layers if layer in noise}
        return error_of(self.estimator.run(noise=alone), self.reference) ** 2

    def cost(self, layer: Layer) -> float:
        """Return the cost of computing a layer in fp32, as multiplications."""
        return self.multiplications[layer] + _ELEMENT_COST * self.elements[layer]

    def price(self, masks: Masks = MappingProxyType({})) -> float:
        """Return the share of the multiplications that masks keep from fp16 arithmetic, with masks added."""
        exact = Feature.NO_FP16_ARITHMETIC | Feature.NO_FP16_STORAGE
        counts = self.multiplications.items()
        masked = sum(count for layer, count in counts if (layer["featmask"] | masks.get(layer, 0)) & exact)
        return masked / (sum(self.multiplications.values()) or 1.0)

    def rounding(self) -> float:
        """Return the error of rounding every blob to fp16, see `error_of`."""
        return error_of(self.estimator.run("fp16"), self.reference)

    def integers_differ(self, walk: Walk, integers: Collection[Blob]) -> bool:
        """Return True if an output of integers has others in a run, both as the bits of floats and as values."""
        known = self.reference.outputs
        both = [(walk.outputs[blob], known[blob]) for blob in integers if blob in known]
        return any(((a != b) & (a.view(np.int32) != b.view(np.int32))).any() for a, b in both)


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
        others = draws[number]._replace(seed=seed + 1), Draw(seed, inputs.LARGE)
        again, large = (estimator.on(feeds_of(draw)) for draw in others)
        return find_masks([scales[number], again], large, **options)


def find_masks(
    estimators: Sequence[Estimator],
    large: Estimator | None = None,
    *,
    integers: Collection[Blob] = (),
    budget: float | None = None,
    masks: MasksFor = True,
    effort: Effort = "normal",
) -> tuple[dict[Layer, Mask], Precision]:
    """Find the masks that a net needs in addition to its own for a budget, and its precision with them.

    The estimators are of one net; the error is the largest of all. The first decides which layers need masks. On
    `large` inputs the net is only looked at: it may overflow there. `integers` are outputs. The layers keep the
    masks that they had: `put_masks` puts these on them. `masks` are for the wanted devices, or none. Raises RunError if
    ncnn cannot run the net.
    """
    found, closer = _Found(masks), ""
    with restored_masks(estimators[0].graph):
        judge = MaskJudge(estimators[0])
        judges = [judge]
        if masks:
            _mask_large(judge, found)
        walk = judge.run()
        for _ in range(_MOST_ROUNDS if masks else 0):
            if not math.isnan(judge.error()) or not _mask_first_special(judge, walk, found):
                break
            walk = judge.run()
        error, allowed = judge.error(), budget or BUDGET
        elements = sum(judge.elements.values())
        if elements < _SMALL_NET or (error > allowed * _AIM / 2 and elements < _LARGE_NET):
            judges += map(MaskJudge, estimators[1:])
            error = max(error, *(other.error() for other in judges))
        if error > (budget or BUDGET * _AIM) and not math.isnan(rounding := judge.rounding()):
            allowed = max(allowed, _ROUNDINGS_ALLOWED * rounding)
            if masks:
                closer = _mask_errors(judges, found, budget, rounding, EFFORTS[effort][1])
                walk = judge.run() if integers else walk
                error = max(each.error() for each in judges)
        differ = bool(integers) and judge.integers_differ(walk, integers)
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
    judge, least = judges[0], _ROUNDINGS * rounding
    target, groups, closer = max(budget or BUDGET, least), NoiseGroups(judge), ""
    aim = max(target * _AIM, least) if budget is None else target
    most_runs = effort * max(min(_RUNS, _RUNS * _COST / sum(map(judge.cost, judge.graph))), _LEAST_RUNS)
    while True:
        powers = groups.powers()
        masks = _masks_within(judge, powers, aim**2)
        is_cheap = judge.price(masks) <= _FEW and all(each.error(masks) <= target for each in judges)
        if (is_cheap and budget is None) or groups.runs >= most_runs:
            break
        halved = [groups.halve(_NEGLIGIBLE * aim**2) for _ in range(_HALVINGS)]
        if not halved[0]:
            break
    if not is_cheap:
        masks, room = cheapest_masks(judges, powers, target)
        better = _masks_within(judge, powers, room * (aim / target) ** 2)
        if budget is None and masks and judge.price(masks) > _MANY:
            closer = f"--budget {target:.0e} would take {judge.price(masks):.0%} of the multiplications"
            masks = _masks_in_reason(judges, powers, room, max(_WIDE * BUDGET, _ROUNDINGS_WIDE * rounding))
        elif judge.price(better) <= _FEW:
            masks = better
        elif aim < target:
            closer = f"--budget {aim:.0e} would take {judge.price(better):.0%} of the multiplications"
    for layer, features in masks.items():
        how = judge.inner[layer][0].how if layer in judge.inner else "its steps"
        reason = f"{how} in fp16 make errors of {powers[layer] ** 0.5:.1e} of an output"
        found.add(layer, features, reason, judge.reference.largest_of(layer.outputs))
    return closer


def _masks_in_reason(
    judges: Sequence[MaskJudge], powers: Mapping[Layer, float], room: float, wide: float
) -> dict[Layer, Feature]:
    """Return masks that leave more noise than `room`, so that they do not cost too much, if they are of any use.

    An error of more than `wide` justifies any cost.
    """
    while (masks := _masks_within(judges[0], powers, room)) and judges[0].price(masks) > _MANY and room < 1:
        room *= _GROWTH
    error = max(each.error(masks) for each in judges)
    if error > wide:
        return cheapest_masks(judges, powers, wide)[0]
    return masks if error <= _WORTH * max(each.error() for each in judges) else {}


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
) -> tuple[dict[Layer, Feature], float]:
    """Return masks of small cost that keep the error of a net within `target`, and the sum of powers that they leave.

    That sum may be `target` squared; it becomes smaller until the error fits, because powers add up only roughly. After
    so many attempts the masks are those that come nearest to it.
    """
    room = target**2
    for _ in range(attempts):
        masks = _masks_within(judges[0], powers, room)
        error = next((error for each in judges if not (error := each.error(masks)) <= target), 0.0)
        if not error:
            break
        room *= _SHRINK * min((target / error) ** 2, 1.0)
    return masks, room


_Step: TypeAlias = tuple[float, Layer, Feature, float]


def _steps(judge: MaskJudge, powers: Mapping[Layer, float]) -> list[_Step]:
    """Return the ways to mask layers, for `cheapest`."""
    steps: list[_Step] = []
    for layer, power in powers.items():
        cost = judge.cost(layer)
        if winograd_tile(layer):
            ways = [max(way.noise, default=0.0) for way in judge.inner.get(layer, ())]
            plain = power * (ways[-1] / ways[0]) ** 2 if ways and ways[0] else power
            ratio = (power - plain) / (_NO_WINOGRAD_COST * cost)
            steps.append((ratio, layer, Feature.NO_WINOGRAD, plain))
            steps.append((min(plain / cost, ratio), layer, FULL, 0.0))
        else:
            steps.append((power / cost, layer, Feature.NO_FP16_ARITHMETIC, 0.0))
    return steps


def _masks_within(judge: MaskJudge, powers: Mapping[Layer, float], room: float) -> dict[Layer, Feature]:
    """Return the masks of the first steps that leave noise of `room` at most, without those that it has room for."""
    return cheapest(powers, _steps(judge, powers), judge.cost, room)
