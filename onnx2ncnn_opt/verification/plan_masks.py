"""The cheapest masks that keep the error of fp16 within a budget: one plan for the whole net.

Masks of arithmetic come first: the noise at the outputs is divided among the layers, and their powers add up, so they
are chosen from one number for each layer and output. Where that is not enough, blocks of neighbouring layers compute in
32 bits, those whose rounding makes the largest errors: nothing in them is rounded. A few runs show what is enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from onnx2ncnn_opt.ir.features import FP32, Feature
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.half import winograd_tile
from onnx2ncnn_opt.rewrite.prove_masks import SOURCES, Mask
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.verification.knapsack import cheapest
from onnx2ncnn_opt.verification.mask_judge import MaskJudge, Masks, compare, fixed, joint_error
from onnx2ncnn_opt.verification.noise_shares import Shares

# The error of an output that fp16 may make, in units of its largest value.
BUDGET = 2e-2
DOUBT = 1.5  # times the estimate is found on devices, which get other inputs and have other kernels
# The shares of the multiplications that masks may take: of many nets, and of few to keep the budget.
MANY, _MORE, MOST = 0.2, 0.4, 0.6

Wish: TypeAlias = tuple[float, float]  # an error, and the highest price that masks may have for it
# Without a given budget, these are wanted, the first one most; and blocks may compute in 32 bits, up to such shares of
# the multiplications. Only if that is not enough, the second row counts.
_ROWS: tuple[tuple[tuple[Wish, ...], tuple[float, ...]], ...] = (
    (
        ((0.5 * BUDGET, MANY / 2), *((share * BUDGET, MANY) for share in (1 / DOUBT, 0.75, 0.85))),
        (0.0, 0.05, 0.1, 0.2),
    ),
    (
        ((BUDGET / DOUBT, _MORE), *((share * BUDGET, MOST) for share in (0.75, 0.85, 1))),
        (0.0, 0.2, 0.3, 0.4, 0.5),
    ),
)
LEAST = _ROWS[0][0][0][0]  # an error that needs no masks
_BLOCKS_OF_BUDGET = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
_BLOCKS = 12  # that a net is divided into, of about as many multiplications each
_POSSIBLE = 1.25  # times the error of rounding masks of arithmetic may reach
_LITTLE, _HALVINGS = 0.03, 6
# Runs to find masks aim at so much less each time; and the share of an aim that layers may have at least.
_CAUTION, _LEAST_ROOM = 0.95, 0.3
_HOPEFUL = 1.1  # times the budget is an error on the first input from which on others do not run
# The time that a convolution takes longer without winograd, in units of that for fp16 arithmetic.
_NO_WINOGRAD_COST = 0.25

FULL = Feature.NO_FP16_ARITHMETIC | Feature.NO_WINOGRAD


class Plan(NamedTuple):
    """Masks of arithmetic and of `blocks` in 32 bits, with their error and price, and the wishes that it may fulfil."""

    masks: dict[Layer, Feature]
    blocks: Masks
    error: float
    price: float
    wishes: Sequence[Wish]
    shares: Shares  # the noise without the masks, but with the blocks
    rounding: float  # the error of rounding outside of the blocks
    is_confirmed: bool = False  # the error is not only that of what the masks were chosen by

    @property
    def number(self) -> int:
        """The number of the first wish that is fulfilled; of all of them if none is."""
        kept = (at for at, (aim, most) in enumerate(self.wishes) if self.error <= aim and self.price <= most)
        return next(kept, len(self.wishes))

    @property
    def is_enough(self) -> bool:
        """True if a wish is fulfilled."""
        return self.number < len(self.wishes)

    @property
    def rank(self) -> tuple[int, float]:
        """The smaller, the better: a plan that is enough is cheap, another one has a small error at no high price."""
        if not self.is_enough:
            return (self.number + 1, self.price) if self.price > MANY else (self.number, self.error)
        return self.number, self.price

    def masks_of(self, judge: MaskJudge) -> Iterator[tuple[Layer, Mask]]:
        """Yield the masks of layers, with reasons."""
        for layer, features in {**self.masks, **self.blocks}.items():
            if layer in self.blocks:
                reason = "rounding what it reads and writes to fp16 makes too large errors of an output"
            else:
                how = judge.inner[layer][0].how if layer in judge.inner else "its steps"
                reason = f"{how} in fp16 make errors of {self.alone(layer):.1e} of an output"
            yield layer, Mask(layer.name, layer.type, features, reason, judge.reference.largest_of(layer.outputs))

    def alone(self, layer: Layer) -> float:
        """Return the largest error of an output that the arithmetic of one layer makes; NaN if it is not known."""
        return math.sqrt(self.shares.layers[layer].max()) if layer in self.shares.layers else math.nan


def plan_masks(
    judges: Sequence[MaskJudge], budget: float | None, attempts: int, other: MaskJudge | None = None
) -> Plan:
    """Return the best masks that so many `attempts` of each way find; a given budget counts at any price.

    The judges have the same net on several inputs. The first one decides which masks to try. The `other` has an input,
    or noise, that no masks were chosen by: the best of many tries looks better than it is.
    """
    compare(judges)
    all_judges = [*judges, other] if other else []
    shares, plans, divided = judges[0].shares(), list[Plan](), list[list[Layer]]()
    rows = _ROWS if budget is None else ((((budget, 1.0),), _BLOCKS_OF_BUDGET),)
    wishes = [wish for aims, _ in rows for wish in aims]
    for aims, parts in rows:
        seen = set[int]()
        for part in parts:
            if part and not divided:
                divided = _loudest_blocks(judges[0])
            blocks = _blocks_within(judges[0], divided, part)
            if len(blocks) in seen:
                continue
            seen.add(len(blocks))
            if (plan := _plan(judges, aims, wishes, blocks, shares, attempts)) is not None:
                plans.append(plan)
            if not _best(plans, all_judges).number:
                break
        if _best(plans, all_judges).is_enough:
            break
    return _best(plans, all_judges)


def _best(plans: list[Plan], judges: Sequence[MaskJudge]) -> Plan:
    """Return the best plan, and measure by all judges, if there are any, those that seem to be enough."""
    while (best := min(plans, key=lambda plan: plan.rank)).is_enough and judges and not best.is_confirmed:
        error = joint_error(judges, {**best.masks, **best.blocks})
        plans[plans.index(best)] = best._replace(error=error, is_confirmed=True)
    return best


def _plan(
    judges: Sequence[MaskJudge],
    aims: Sequence[Wish],
    wishes: Sequence[Wish],
    blocks: Masks,
    shares: Shares,
    attempts: int,
) -> Plan | None:
    """Return the best plan with some blocks in 32 bits; None if rounding outside of them is too much for dear masks."""
    judge, budget = judges[0], wishes[-1][0]
    with fixed(judges, blocks):
        errors = judge.expected_of(judge.rounding())
        rounding = float(errors.max(initial=0.0))
        is_possible = _POSSIBLE * rounding <= budget
        if not is_possible and aims[0] != wishes[0]:
            return None
        left = {layer: power for layer, power in shares.layers.items() if layer not in blocks}
        known = Shares(left, errors**2) if blocks else shares
        reachable = [(math.hypot(aim, rounding), most) for aim, most in aims]
        if is_possible:
            reachable = [(min(aim, budget), most) for aim, most in reachable]
        masks, error = cheapest_masks(judges, known, reachable, attempts if is_possible or not blocks else 1)
        price = judge.price(masks)
    return Plan(masks, blocks, error, price, wishes, known, rounding)


def _loudest_blocks(judge: MaskJudge) -> list[list[Layer]]:
    """Return blocks of neighbouring layers; those come first whose rounding makes the largest errors for their cost."""
    size, number = sum(judge.multiplications.values()) / _BLOCKS, math.inf
    blocks, loudness = list[list[Layer]](), list[float]()
    for layer in judge.graph:
        if layer.type in SOURCES:
            continue
        if number + judge.multiplications[layer] > size:
            blocks.append([])
            number = 0
        blocks[-1].append(layer)
        number += judge.multiplications[layer]
    for block in blocks:
        with fixed([judge], {layer: FP32 for each in blocks for layer in each if each is not block}):
            error = judge.expected_of(judge.rounding()).max(initial=0.0)
        loudness.append(error**2 / (sum(map(judge.cost, block)) or 1.0))
    return [blocks[at] for at in np.argsort(loudness)[::-1]]


def _blocks_within(judge: MaskJudge, blocks: Sequence[Sequence[Layer]], part: float) -> dict[Layer, Feature]:
    """Return masks of the first of some blocks that take a part of the multiplications at most."""
    left, masks = part * sum(judge.multiplications.values()), dict[Layer, Feature]()
    for block in blocks:
        number = sum(judge.multiplications[layer] for layer in block)
        if number <= left:
            left -= number
            masks |= dict.fromkeys(block, FP32)
    return masks


_Tried: TypeAlias = tuple[float, dict[Layer, Feature]]


def cheapest_masks(
    judges: Sequence[MaskJudge], shares: Shares, aims: Sequence[Wish], attempts: int
) -> tuple[dict[Layer, Feature], float]:
    """Return the masks that reach the first aim that can be had at its highest price, and their error.

    If they reach none, they are those of the smallest error within the last price. The shares say which masks should be
    enough. A run shows whether they are, and then `shares` become more exact, see `Shares.learn`.
    """
    judge, tried, factor, highest = judges[0], list[_Tried](), 1.0, aims[-1][1]
    for _ in range(attempts):
        fits = ((aim, masks_within(judge, shares, aim * factor), most) for aim, most in aims)
        aim, masks = next(((aim, masks) for aim, masks, most in fits if judge.price(masks) <= most), (math.nan, {}))
        if math.isnan(aim):
            masks = _masks_in_reason(judge, shares, aims[-1][0], highest)
        factor *= _CAUTION
        if known := [error for error, known in tried if known == masks]:
            if known[0] <= aim:
                break
            continue
        error = judge.expected(masks)
        if error <= _HOPEFUL * aims[-1][0]:
            error = compare(judges, masks)
        tried.append((error, masks))
        if error <= aims[0][0] and judge.price(masks) <= _LITTLE:
            break
        shares.learn(judge.shares(masks), masks)
    for aim, most in aims:
        kept = [(judge.price(masks), error, masks) for error, masks in tried if error <= aim]
        price, error, masks = min(kept, key=lambda each: each[0], default=(math.inf, math.inf, {}))
        if price <= most:
            return masks, error
    tried = [each for each in tried if judge.price(each[1]) <= highest]
    if not tried:
        masks = _masks_in_reason(judge, shares, aims[-1][0], highest)
        tried = [(compare(judges, masks), masks)]
    error, masks = min(tried, key=lambda each: each[0])
    return masks, error


def _masks_in_reason(judge: MaskJudge, shares: Shares, aim: float, highest: float) -> dict[Layer, Feature]:
    """Return masks that leave an error above the aim, so that they do not cost too much."""
    best, high = dict[Layer, Feature](), math.sqrt(shares.total.max())
    for _ in range(_HALVINGS):
        middle = math.sqrt(aim * high)
        masks = masks_within(judge, shares, middle)
        if judge.price(masks) <= highest:
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


def masks_within(judge: MaskJudge, shares: Shares, aim: float) -> dict[Layer, Feature]:
    """Return the masks of small cost that leave an error of `aim` at most."""

    def cost(layer: Layer, features: Feature) -> float:
        return judge.cost(layer) * (_NO_WINOGRAD_COST if features == Feature.NO_WINOGRAD else 1.0)

    room = np.maximum(aim**2 - shares.rest, (_LEAST_ROOM * aim) ** 2)
    excess = sum(shares.layers.values(), np.zeros_like(room)) > room
    return cheapest(shares.layers, _steps(judge, shares.layers, excess), cost, room)
