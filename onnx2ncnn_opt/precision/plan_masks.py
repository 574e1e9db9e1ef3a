"""The cheapest masks that keep the error of fp16 within a budget, for a whole net.

Masks of arithmetic come first. `noise_shares` divides the noise at the outputs among the layers, and powers of noise
add up. So one number for each layer and output decides which layers get masks. If that is not enough, blocks of
neighbouring layers compute in 32 bits, because nothing in them is rounded. A few runs measure the effect of the masks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.features import FP32, Feature
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.half import winograd_tile
from onnx2ncnn_opt.precision.knapsack import cheapest
from onnx2ncnn_opt.precision.mask_judge import MaskJudge, Masks, compare, joint_error
from onnx2ncnn_opt.precision.noise_shares import NoiseShares
from onnx2ncnn_opt.rewrite.prove_masks import SOURCES, Mask
from onnx2ncnn_opt.runtime.base import Array

# The error that fp16 may make, in units of an output's largest value.
BUDGET = 2e-2
# Prices are shares of the net's multiplications: of most nets, of few nets, and the highest one.
USUAL_PRICE, _HIGH_PRICE, MOST_PRICE = 0.2, 0.4, 0.6


class Target(NamedTuple):
    """A wanted error, and the highest price of masks for it."""

    error: float
    price: float


# Without a given budget the planner tries these in order. The second row is for nets that meet no target of the first,
# the third for those that are of no use otherwise.
TARGETS = (
    Target(0.5 * BUDGET, USUAL_PRICE / 2),
    *(Target(share * BUDGET, USUAL_PRICE) for share in (0.6, 2 / 3, 0.75, 0.85, 0.95)),
)
SURE = 3  # with the first so many, errors on devices are seldom above BUDGET
COSTLY_TARGETS = (
    Target(2 / 3 * BUDGET, _HIGH_PRICE),
    *(Target(share * BUDGET, MOST_PRICE) for share in (2 / 3, 0.75, 0.85, 1)),
)
ANY_PRICE = Target(2 / 3 * BUDGET, 1.0), Target(BUDGET, 1.0)
SMALL_ERROR = TARGETS[0].error  # needs no masks
_BLOCKS = 10  # of about equally many multiplications
_HALVINGS = 6  # of the range of errors, to find the error that a price buys
_LOW_PRICE = 0.03  # the search for a lower price stops here
# Each attempt aims at an error smaller by this factor. Layers may always make this share of the error.
_CAUTION, _LEAST_ROOM = 0.95, 0.3
# Times the largest target: with such an error on the first input, other inputs do not run, or other plans.
_TOO_LARGE, _HOPELESS = 1.5, 2.0
# The extra time of a convolution without winograd, in units of the extra time without fp16 arithmetic.
_NO_WINOGRAD_COST = 0.25

FULL = Feature.NO_FP16_ARITHMETIC | Feature.NO_WINOGRAD


class Plan(NamedTuple):
    """Masks of arithmetic and of `blocks` in 32 bits, with their error and price."""

    masks: Masks
    blocks: Masks
    shares: NoiseShares  # without the masks, but with the blocks
    error: float
    price: float
    is_confirmed: bool = False  # the error includes inputs that did not choose the masks

    @property
    def features(self) -> Masks:
        """The masks of both kinds."""
        return {**self.masks, **self.blocks}

    @property
    def rounding(self) -> float:
        """The error of rounding outside of the blocks."""
        return _largest(self.shares.rounding)

    def first_met(self, targets: Sequence[Target]) -> int:
        """Return the index of the first target that the plan meets; the number of targets if it meets none."""
        met = (at for at, each in enumerate(targets) if self.error <= each.error and self.price <= each.price)
        return next(met, len(targets))

    def meets(self, targets: Sequence[Target]) -> bool:
        """Return True if the plan meets a target."""
        return self.first_met(targets) < len(targets)

    def sort_key(self, targets: Sequence[Target]) -> tuple[int, float]:
        """Return a key that sorts the best plan first: by price if errors on devices are within BUDGET, or by error."""
        index = self.first_met(targets)
        if index < len(targets):
            return min(index, SURE), self.price if index < SURE else self.error
        return index + (self.price > targets[-1].price), self.error

    def masks_of(self, judge: MaskJudge) -> Iterator[tuple[Layer, Mask]]:
        """Yield each masked layer with its mask and the reason."""
        for layer, features in self.features.items():
            if layer in self.blocks:
                reason = "rounding what it reads and writes to fp16 makes too large errors of an output"
            else:
                how = judge.inner[layer][0].how if layer in judge.inner else "its steps"
                reason = f"{how} in fp16 make errors of {self.alone(layer):.1e} of an output"
            yield layer, Mask(layer.name, layer.type, features, reason, judge.reference.largest_of(layer.outputs))

    def alone(self, layer: Layer) -> float:
        """Return the largest error of an output from the arithmetic of one layer; NaN if it is not known."""
        powers = self.shares.arithmetic.get(layer)
        return math.nan if powers is None else math.sqrt(powers.max())


class _BlockChoice(NamedTuple):
    """Blocks that compute in 32 bits, their price, and the powers of the rounding noise of all other layers."""

    blocks: Masks
    price: float
    rounding: Array


class Planner:
    """A search for the best masks of a net, which predicts a plan, measures it, and corrects its predictions.

    All judges run the same net, each on its own input. The first judge chooses the masks, and the rest of `judges`
    measure them too. The `others` confirm the best plan on further inputs or noise, because the best of many attempts
    looks better than it is.
    """

    def __init__(self, judges: Sequence[MaskJudge], others: Sequence[MaskJudge] = ()) -> None:
        compare(judges)
        self.judge, self._judges, self._others = judges[0], judges, others
        self._ways = {layer: _ways(self.judge, layer) for layer in self.judge.graph}
        rounding, shares = self.judge.expected_of(self.judge.rounding()) ** 2, self.judge.shares()
        self._shares = shares.with_rounding(rounding)
        self._blocks = _divided(self.judge)
        none = np.zeros_like(rounding)
        powers = [sum((shares.rounding_by_layer.get(layer, none) for layer in block), none) for block in self._blocks]
        self._choices = [_BlockChoice({}, 0.0, rounding), *self._with_blocks(rounding, powers)]
        self._tried: list[Plan] = []
        # Ratios of errors: of the last plan to its prediction, and on further inputs to these inputs (the largest).
        self._to_predicted = self._to_other_inputs = 1.0

    def best(self, targets: Sequence[Target], attempts: int) -> Plan:
        """Return the best plan for the first target that can be met, after so many `attempts`."""
        for attempt in range(attempts):
            plan = self._predicted(targets, _CAUTION**attempt)
            if self._tried:
                best = self._best(targets)
                is_cheap = best.price <= _LOW_PRICE or best.sort_key(targets) <= plan.sort_key(targets)
                if best.meets(targets) and is_cheap:
                    break
            if all(plan.features != tried.features for tried in self._tried):
                self._try(plan, targets[-1].error)
                if not plan.meets(targets) and self._tried[-1].error > _HOPELESS * targets[-1].error:
                    break
        return self._best(targets)

    def price_within(self, plan: Plan, error: float) -> float:
        """Return the price of masks that leave an error of `error` at most, with the blocks of a plan."""
        ways = masks_within(self._ways, plan.shares, error)
        return self.judge.price({**_features(ways), **plan.blocks})

    def _best(self, targets: Sequence[Target]) -> Plan:
        """Return the best plan that was tried; all judges confirm a plan that meets a target."""
        while (best := min(self._tried, key=lambda plan: plan.sort_key(targets))).meets(targets):
            if best.is_confirmed or not self._others:
                break
            confirmed = self.confirmed(best)
            self._to_other_inputs = max(self._to_other_inputs, confirmed.error / (best.error or 1.0))
            self._tried[self._tried.index(best)] = confirmed
        return best

    def confirmed(self, plan: Plan) -> Plan:
        """Return a plan with its error on all inputs."""
        if plan.is_confirmed:
            return plan
        return plan._replace(error=joint_error([*self._judges, *self._others], plan.features), is_confirmed=True)

    def _predicted(self, targets: Sequence[Target], caution: float) -> Plan:
        """Return the cheapest plan for the first target that a plan should meet; else one of a small error."""
        factor = caution / (self._to_other_inputs * math.sqrt(self._to_predicted))
        for target in targets:
            error, price = target.error * factor, target.price
            choices = [each for each in self._choices if each.price <= price and _largest(each.rounding) < error]
            fits = [plan for plan in (self._planned(each, error) for each in choices) if plan.meets([target])]
            if fits:
                return min(fits, key=lambda plan: (bool(plan.blocks), plan.price))
        last = targets[-1]
        plans_in_price = (self._within_price(each, last) for each in self._choices if each.price <= last.price)
        return min(plans_in_price, key=lambda plan: plan.error)

    def _planned(self, choice: _BlockChoice, error: float) -> Plan:
        """Return the plan with masks that leave an error of `error` at most, if that is possible."""
        arithmetic = {layer: power for layer, power in self._shares.arithmetic.items() if layer not in choice.blocks}
        shares = NoiseShares(arithmetic, choice.rounding, self._shares.rounding_by_layer)
        ways = masks_within(self._ways, shares, error)
        left = sum(power * ways[layer].left if layer in ways else power for layer, power in arithmetic.items())
        masks, predicted = _features(ways), _largest(shares.rounding + left)
        return Plan(masks, choice.blocks, shares, predicted, self.judge.price({**masks, **choice.blocks}))

    def _within_price(self, choice: _BlockChoice, target: Target) -> Plan:
        """Return the plan of the smallest error that has the target's price, if there is one."""
        low, high = target.error, _largest(self._shares.total)
        best = self._planned(choice, high)
        for _ in range(_HALVINGS):
            middle = math.sqrt(low * high)
            plan = self._planned(choice, middle)
            if plan.price <= target.price:
                best, high = plan, middle
            else:
                low = middle
        return best

    def _try(self, plan: Plan, budget: float) -> None:
        """Measure the error of a plan, and correct the shares of layers with it."""
        error = self.judge.expected(plan.features)
        if error <= _TOO_LARGE * budget:
            error = compare(self._judges, plan.features)
        self._tried.append(plan._replace(error=error))
        self._to_predicted = max(1.0, error / (plan.error or 1.0))
        corrected = replace(plan.shares)
        corrected.correct(self.judge.shares(plan.features).with_rounding(corrected.rounding), plan.masks)
        self._shares.arithmetic |= corrected.arithmetic

    def measure_blocks(self) -> None:
        """Measure the noise of each block by a run of its own; one run for all divides it less exactly."""
        rounding, arithmetic, by_layer = list[Array](), self._shares.arithmetic, self._shares.rounding_by_layer
        for block in self._blocks:
            power = self.judge.expected_of(self.judge.alone(block)) ** 2
            known = sum((shares[layer] for shares in (arithmetic, by_layer) for layer in block if layer in shares), 0.0)
            factor = np.divide(power, known, out=np.zeros_like(power), where=known > 0)
            scaled = {layer: arithmetic[layer] * factor for layer in block if layer in arithmetic}
            arithmetic |= scaled
            rounding.append(power - sum(scaled.values()))
        self._choices[1:] = self._with_blocks(self._choices[0].rounding, rounding)

    def _with_blocks(self, rounding: Array, by_block: Sequence[Array]) -> Iterator[_BlockChoice]:
        """Yield choices of blocks, each with one block more; blocks with the most noise for their cost come first."""
        judge, powers = self.judge, np.array(by_block)
        costs = np.array([sum(map(judge.cost, block)) or 1.0 for block in self._blocks])
        masks, whole = dict[Layer, Feature](), powers.sum(0)
        for at in np.argsort(powers.max(1, initial=0.0) / costs)[::-1]:
            masks, powers[at] = masks | _in_32_bits(self._blocks[at]), 0.0
            share = np.divide(powers.sum(0), whole, out=np.ones_like(whole), where=whole > 0)
            yield _BlockChoice(masks, judge.price(masks), rounding * share)


def _largest(powers: Array) -> float:
    """Return the largest error of an output, of powers of noise."""
    return math.sqrt(powers.max(initial=0.0))


def _divided(judge: MaskJudge) -> list[list[Layer]]:
    """Divide the net into blocks of neighbouring layers, of about equally many multiplications."""
    size, number, blocks = sum(judge.multiplications.values()) / _BLOCKS, math.inf, list[list[Layer]]()
    for layer in judge.graph:
        if number + judge.multiplications[layer] > size:
            blocks.append([])
            number = 0
        blocks[-1].append(layer)
        number += judge.multiplications[layer]
    return blocks


def _in_32_bits(layers: Iterable[Layer]) -> dict[Layer, Feature]:
    """Return the masks that keep layers, and the blobs between them, in 32 bits."""
    return {layer: FP32 for layer in layers if layer.type not in SOURCES}


class _Way(NamedTuple):
    """A mask of a layer, the share of the power of its noise that the mask leaves, and the extra time."""

    features: Feature
    left: float
    cost: float  # in multiplications


def _ways(judge: MaskJudge, layer: Layer) -> list[_Way]:
    """Return the masks of a layer's arithmetic, the cheapest first."""
    cost, inner = judge.cost(layer), judge.inner.get(layer, ())
    if not winograd_tile(layer):
        return [_Way(inner[0].remedy if inner else Feature.NO_FP16_ARITHMETIC, 0.0, cost)]
    left = (inner[-1].error / inner[0].error) ** 2 if inner and inner[0].error else 0.0
    return [_Way(Feature.NO_WINOGRAD, left, _NO_WINOGRAD_COST * cost), _Way(FULL, 0.0, cost)]


def masks_within(ways: Mapping[Layer, Sequence[_Way]], shares: NoiseShares, error: float) -> dict[Layer, _Way]:
    """Return masks of small cost that leave an error of `error` at most."""
    powers = shares.arithmetic
    room = np.maximum(error**2 - shares.rounding, (_LEAST_ROOM * error) ** 2)
    excess = sum(powers.values(), np.zeros_like(room)) > room  # only noise at these outputs counts
    matrix = np.array([*powers.values()]).reshape(-1, room.size)
    loudest = np.where(excess, matrix, 0.0).max(1, initial=0.0).tolist()
    steps: list[tuple[float, Layer, _Way, Array]] = []
    for (layer, power), loud in zip(powers.items(), loudest, strict=True):
        ratio, before = math.inf, 1.0
        for way in ways[layer]:
            ratio, before = min(ratio, loud * (before - way.left) / way.cost), way.left
            steps.append((ratio, layer, way, power * way.left))
    return cheapest(powers, steps, lambda _, way: way.cost, room)


def _features(ways: Mapping[Layer, _Way]) -> dict[Layer, Feature]:
    return {layer: way.features for layer, way in ways.items()}
