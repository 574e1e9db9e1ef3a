"""The cheapest masks that keep the error of fp16 within a budget: one plan for the whole net.

Masks of arithmetic come first: the noise at the outputs is divided among the layers, and their powers add up, so they
are chosen from one number for each layer and output. Where that is not enough, blocks of neighbouring layers compute in
32 bits, those whose rounding makes the largest errors: nothing in them is rounded. A few runs show what is enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np

from onnx2ncnn_opt.ir.features import FP32, Feature
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.half import winograd_tile
from onnx2ncnn_opt.rewrite.prove_masks import SOURCES, Mask
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.verification.knapsack import cheapest
from onnx2ncnn_opt.verification.mask_judge import MaskJudge, Masks, compare, joint_error
from onnx2ncnn_opt.verification.noise_shares import Shares

# The error of an output that fp16 may make, in units of its largest value.
BUDGET = 2e-2
DOUBT = 1.5  # times the estimate is found on devices, which get other inputs and have other kernels
# The shares of the multiplications that masks may take: of many nets, and of few to keep the budget.
MANY, _MORE, MOST = 0.2, 0.4, 0.6

Wish: TypeAlias = tuple[float, float]  # an error, and the highest price that masks may have for it
# Without a given budget, these are wanted, the first one most; the second row only if none of the first can be had.
CHEAP: tuple[Wish, ...] = (
    (0.5 * BUDGET, MANY / 2),
    *((share * BUDGET, MANY) for share in (0.6, 1 / DOUBT, 0.75, 0.85)),
)
DEAR: tuple[Wish, ...] = ((BUDGET / DOUBT, _MORE), *((share * BUDGET, MOST) for share in (1 / DOUBT, 0.75, 0.85, 1)))
LEAST = CHEAP[0][0]  # an error that needs no masks
_BLOCKS = 12  # that a net is divided into, of about as many multiplications each
_HALVINGS = 6  # of the range of errors, to find what a price can buy
_LITTLE = 0.03  # a price that needs no search for a lower one
# Runs to find masks aim at so much less each time; and the share of an aim that layers may have at least.
_CAUTION, _LEAST_ROOM = 0.95, 0.3
_HOPEFUL = 1.5  # times the budget is an error on the first input from which on others do not run
# The time that a convolution takes longer without winograd, in units of that for fp16 arithmetic.
_NO_WINOGRAD_COST = 0.25

FULL = Feature.NO_FP16_ARITHMETIC | Feature.NO_WINOGRAD


class Plan(NamedTuple):
    """Masks of arithmetic and of `blocks` in 32 bits, with their error and price."""

    masks: Masks
    blocks: Masks
    shares: Shares  # the noise without the masks, but with the blocks
    error: float
    price: float
    is_confirmed: bool = False  # the error is not only that of what the masks were chosen by

    @property
    def features(self) -> Masks:
        """The masks of both kinds."""
        return {**self.masks, **self.blocks}

    @property
    def rounding(self) -> float:
        """The error of rounding outside of the blocks."""
        return math.sqrt(self.shares.rest.max(initial=0.0))

    def number(self, wishes: Sequence[Wish]) -> int:
        """Return the number of the first wish that is fulfilled; of all of them if none is."""
        kept = (at for at, (aim, most) in enumerate(wishes) if self.error <= aim and self.price <= most)
        return next(kept, len(wishes))

    def is_enough(self, wishes: Sequence[Wish]) -> bool:
        """Return True if a wish is fulfilled."""
        return self.number(wishes) < len(wishes)

    def rank(self, wishes: Sequence[Wish]) -> tuple[int, float]:
        """Return a key to sort by, the best plan first: those that are enough by price, others by error."""
        number = self.number(wishes)
        if number < len(wishes):
            return number, self.price
        return number + (self.price > wishes[-1][1]), self.error

    def masks_of(self, judge: MaskJudge) -> Iterator[tuple[Layer, Mask]]:
        """Yield the masks of layers, with reasons."""
        for layer, features in self.features.items():
            if layer in self.blocks:
                reason = "rounding what it reads and writes to fp16 makes too large errors of an output"
            else:
                how = judge.inner[layer][0].how if layer in judge.inner else "its steps"
                reason = f"{how} in fp16 make errors of {self.alone(layer):.1e} of an output"
            yield layer, Mask(layer.name, layer.type, features, reason, judge.reference.largest_of(layer.outputs))

    def alone(self, layer: Layer) -> float:
        """Return the largest error of an output that the arithmetic of one layer makes; NaN if it is not known."""
        return math.sqrt(self.shares.layers[layer].max()) if layer in self.shares.layers else math.nan


@dataclass
class _Start:
    """Blocks of layers in 32 bits, their price, and the powers of the noise that rounding makes outside of them."""

    blocks: Masks
    price: float
    rest: Array
    is_measured: bool = False

    @property
    def rounding(self) -> float:
        """The error that rounding makes."""
        return math.sqrt(self.rest.max(initial=0.0))


class Planner:
    """Looks for the best masks of a net: it tries the one that should be best, and learns of it.

    The judges have the same net on several inputs. The first one decides which masks to try. The `others` have inputs,
    or noise, that no masks were chosen by: the best of many tries looks better than it is.
    """

    def __init__(self, judges: Sequence[MaskJudge], others: Sequence[MaskJudge] = ()) -> None:
        compare(judges)
        self.judge, self._judges, self._others = judges[0], judges, others
        rest, known = self._rounding({}), self.judge.shares()
        self._shares = known.with_rest(rest)
        self._blocks = _blocks(self.judge)
        powers = [sum((known.rounding.get(layer, rest * 0) for layer in block), rest * 0) for block in self._blocks]
        self._starts = [_Start({}, 0.0, rest, is_measured=True), *self._with_blocks(rest, powers)]
        self._tried: list[Plan] = []
        # The last error in units of the expected one, and the largest on other inputs in units of that on these.
        self._surprise = self._excess = 1.0

    def best(self, wishes: Sequence[Wish], attempts: int) -> Plan:
        """Return the best plan, for the first wish that can be fulfilled, after so many `attempts`."""
        for attempt in range(attempts):
            plan = self._expected(wishes, _CAUTION**attempt)
            if self._tried:
                best = self._best(wishes)
                is_cheap = best.price <= _LITTLE or best.rank(wishes) <= plan.rank(wishes)
                if best.is_enough(wishes) and is_cheap:
                    break
            if all(plan.features != tried.features for tried in self._tried):
                self._try(plan, wishes[-1][0])
        return self._best(wishes)

    def price_within(self, plan: Plan, aim: float) -> float:
        """Return the price of masks with the blocks of a plan that leave an error of `aim` at most."""
        return self.judge.price({**masks_within(self.judge, plan.shares, aim), **plan.blocks})

    def _best(self, wishes: Sequence[Wish]) -> Plan:
        """Return the best plan that was tried; one that is enough is measured on all inputs."""
        while (best := min(self._tried, key=lambda plan: plan.rank(wishes))).is_enough(wishes):
            if best.is_confirmed or not self._others:
                break
            error = joint_error([*self._judges, *self._others], best.features)
            self._excess = max(self._excess, error / (best.error or 1.0))
            self._tried[self._tried.index(best)] = best._replace(error=error, is_confirmed=True)
        return best

    def _expected(self, wishes: Sequence[Wish], caution: float) -> Plan:
        """Return the cheapest plan that should fulfil the first wish that one can; or else have a small error."""
        factor = caution / (self._excess * math.sqrt(self._surprise))
        for aim, most in wishes:
            while starts := [start for start in self._starts if start.price <= most and start.rounding < aim * factor]:
                plans = ((self._planned(start, aim * factor), start) for start in starts)
                fits = [(plan, start) for plan, start in plans if plan.price <= most and plan.error <= aim]
                if not fits:
                    break
                plan, start = min(fits, key=lambda fit: (bool(fit[1].blocks), fit[0].price))
                if start.is_measured:
                    return plan
                self._measure(start)
        aim, most = wishes[-1]
        reachable = (self._in_reason(start, aim, most) for start in self._starts if start.price <= most)
        return min(reachable, key=lambda plan: plan.error)

    def _planned(self, start: _Start, aim: float) -> Plan:
        """Return the plan with masks that leave an error of `aim` at most if that is possible."""
        layers = {layer: power for layer, power in self._shares.layers.items() if layer not in start.blocks}
        shares = Shares(layers, start.rest, self._shares.rounding)
        masks = masks_within(self.judge, shares, aim)
        left = shares.rest + sum(_left(self.judge, layer, power, masks.get(layer)) for layer, power in layers.items())
        error = math.sqrt(np.max(left, initial=0.0))
        return Plan(masks, start.blocks, shares, error, self.judge.price({**masks, **start.blocks}))

    def _in_reason(self, start: _Start, aim: float, most: float) -> Plan:
        """Return a plan of a small error, perhaps above the aim, that has a price of `most` if there is one."""
        high = math.sqrt(self._shares.total.max(initial=0.0))
        best = self._planned(start, high)
        for _ in range(_HALVINGS):
            middle = math.sqrt(aim * high)
            plan = self._planned(start, middle)
            if plan.price <= most:
                best, high = plan, middle
            else:
                aim = middle
        return best

    def _try(self, plan: Plan, budget: float) -> None:
        """Measure the error of a plan, and learn of it."""
        error = self.judge.expected(plan.features)
        if error <= _HOPEFUL * budget:
            error = compare(self._judges, plan.features)
        self._tried.append(plan._replace(error=error))
        self._surprise = max(1.0, error / (plan.error or 1.0))
        learned = replace(plan.shares)
        learned.learn(self.judge.shares(plan.features).with_rest(learned.rest), plan.masks)
        self._shares.layers |= learned.layers

    def _rounding(self, masks: Masks) -> Array:
        """Return the powers of the noise of rounding at the outputs, with masks added."""
        return self.judge.expected_of(self.judge.rounding(masks)) ** 2

    def _measure(self, start: _Start) -> None:
        """Measure what rounding makes outside of blocks; outside of others it makes as many times more."""
        rest = self._rounding(start.blocks)
        factor = np.divide(rest, start.rest, out=np.ones_like(rest), where=start.rest > 0)
        start.is_measured = True
        for each in self._starts:
            if each is start or not each.is_measured:
                each.rest = each.rest * factor

    def look_closer(self) -> None:
        """Measure what rounding makes in each block, by a run for each, in place of what one run says of all."""
        blocks, start = self._blocks, self._starts[0]
        others = (_in_32_bits(layer for each in blocks for layer in each if each is not block) for block in blocks)
        self._starts[1:] = self._with_blocks(start.rest, [self._rounding(masks) for masks in others])

    def _with_blocks(self, rest: Array, rounding: Sequence[Array]) -> Iterator[_Start]:
        """Yield starts with blocks of layers in 32 bits, each with one more than the one before.

        Those come first whose `rounding` makes the largest share of the `rest` for their cost.
        """
        judge, powers = self.judge, np.array(rounding)
        costs = np.array([sum(map(judge.cost, block)) or 1.0 for block in self._blocks])
        taken, whole = dict[Layer, Feature](), powers.sum(0)
        for at in np.argsort(powers.max(1, initial=0.0) / costs)[::-1]:
            taken, powers[at] = taken | _in_32_bits(self._blocks[at]), 0.0
            share = np.divide(powers.sum(0), whole, out=np.ones_like(whole), where=whole > 0)
            yield _Start(taken, judge.price(taken), rest * share)


def _blocks(judge: MaskJudge) -> list[list[Layer]]:
    """Return blocks of neighbouring layers, of about as many multiplications each."""
    size, number, blocks = sum(judge.multiplications.values()) / _BLOCKS, math.inf, list[list[Layer]]()
    for layer in judge.graph:
        if number + judge.multiplications[layer] > size:
            blocks.append([])
            number = 0
        blocks[-1].append(layer)
        number += judge.multiplications[layer]
    return blocks


def _in_32_bits(layers: Iterable[Layer]) -> dict[Layer, Feature]:
    """Return the masks of layers, after which nothing that they read and write alone is rounded."""
    return {layer: FP32 for layer in layers if layer.type not in SOURCES}


def _left(judge: MaskJudge, layer: Layer, power: Array, mask: Feature | None) -> Array:
    """Return the power of the noise that a layer makes with a mask."""
    if mask is None:
        return power
    ways = judge.inner.get(layer, ()) if mask == Feature.NO_WINOGRAD else ()
    return power * ((ways[-1].error / ways[0].error) ** 2 if ways and ways[0].error else 0.0)


_Step: TypeAlias = tuple[float, Layer, Feature, Array]


def _steps(judge: MaskJudge, powers: Mapping[Layer, Array], excess: Array) -> list[_Step]:
    """Return the ways to mask layers, for `cheapest`; only the noise at some outputs counts."""
    steps: list[_Step] = []
    for layer, power in powers.items():
        cost, loud = judge.cost(layer), float(power.max(where=excess, initial=0.0))
        ways = judge.inner.get(layer, ())
        if winograd_tile(layer):
            left = _left(judge, layer, power, Feature.NO_WINOGRAD)
            quiet = float(left.max(where=excess, initial=0.0))
            ratio = (loud - quiet) / (_NO_WINOGRAD_COST * cost)
            steps.append((ratio, layer, Feature.NO_WINOGRAD, left))
            steps.append((min(quiet / cost, ratio), layer, FULL, power * 0))
        else:
            features = ways[0].remedy if ways else Feature.NO_FP16_ARITHMETIC
            steps.append((loud / cost, layer, features, power * 0))
    return steps


def masks_within(judge: MaskJudge, shares: Shares, aim: float) -> dict[Layer, Feature]:
    """Return the masks of small cost that leave an error of `aim` at most."""

    def cost(layer: Layer, features: Feature) -> float:
        return judge.cost(layer) * (_NO_WINOGRAD_COST if features == Feature.NO_WINOGRAD else 1.0)

    room = np.maximum(aim**2 - shares.rest, (_LEAST_ROOM * aim) ** 2)
    excess = sum(shares.layers.values(), np.zeros_like(room)) > room
    return cheapest(shares.layers, _steps(judge, shares.layers, excess), cost, room)
