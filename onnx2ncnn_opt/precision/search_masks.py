"""The cheapest masks with which fp16 is enough for a net, found by running it.

Layers that overflow come first, then those that make too large errors (`plan_masks`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from types import MappingProxyType
from typing import Any

from onnx2ncnn_opt.inputs import draws
from onnx2ncnn_opt.inputs.draws import DATA, Draw
from onnx2ncnn_opt.ir.features import FP32, Device, Feature, MasksFor
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.half import INFINITE, INPUT_MARGIN, LARGEST
from onnx2ncnn_opt.precision.effort import EFFORTS, Effort
from onnx2ncnn_opt.precision.fp16_run import Estimator, Walk, most_ordinary
from onnx2ncnn_opt.precision.mask_judge import (
    TINY_NET,
    MaskJudge,
    joint_error,
    largest_error,
    mean_of,
    most_telling_first,
    restored_masks,
)
from onnx2ncnn_opt.precision.plan_masks import (
    ANY_PRICE,
    BUDGET,
    COSTLY_TARGETS,
    MOST_PRICE,
    SMALL_ERROR,
    SURE,
    TARGETS,
    USUAL_PRICE,
    Plan,
    Planner,
    Target,
)
from onnx2ncnn_opt.rewrite.prove_masks import SOURCES, Mask, is_wanted
from onnx2ncnn_opt.runtime.base import Feed

_USELESS = 5.0  # an error above so many times the budget justifies any price of masks
_WORTH = 0.8  # masks that miss the budget stay only if they reduce the error to this share
_ROUNDINGS_ALLOWED = 4.0  # times the error of rounding is allowed, because less needs many masks
# Errors on devices may be so many times the estimate: their inputs and kernels differ. The second number is for inputs
# that are less clear anyway.
_DOUBT, _DOUBT_NEARBY = 1.75, 1.5
_INEXACT = 1.4  # errors may be smaller than predicted by this factor
_MOST_ROUNDS, _ATTEMPTS = 8, 3
# A second input runs in nets with fewer blob elements than this, if the error is above this share of the budget.
_SECOND_INPUT = (2**20, 0.1), (2**25, SMALL_ERROR / BUDGET / 2)
# Tiny nets run on this many inputs. Errors of few numbers depend on chance, so they run with several noises.
_INPUTS, _NOISES, _FEW_NUMBERS = 4, 2, 64
_OTHERS = 2  # further inputs, which confirm masks
_LARGE_NET = 2**26  # blob elements; a run of such a net takes long, so only cheap masks are tried


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
    nearby: float = 0.0  # the error of probabilities that are a little less clear, see `MaskJudge.nearby_error`

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
            reason = "" if self.closer else "rounding its blobs and weights makes this error"
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
        is_sure = not self.ok or self.is_undecided or self.error > BUDGET
        advice = "; compute it in fp32" if is_sure else "; perhaps compute it in fp32"
        return text + advice * self.may_exceed

    @property
    def may_exceed(self) -> bool:
        """True if devices may be off by more than BUDGET, because the estimate is that inexact."""
        largest = max(self.error * _DOUBT, self.nearby * _DOUBT_NEARBY)
        return not self.ok or self.is_undecided or largest > BUDGET


@contextmanager
def open_like_data(
    graph: Graph, feeds_of: Callable[[Draw], Mapping[Blob, Feed]], seed: int, **net: Any
) -> Iterator[tuple[Draw, Estimator]]:
    """Yield the inputs like data that suit a net, which `feeds_of` draws, and the net on them."""
    draws = [Draw(seed, plain=True, data=data) for data in DATA]
    with Estimator(graph, feeds_of(draws[0]), **net) as estimator:
        scales = [estimator, *(estimator.on(feeds_of(draw)) for draw in draws[1:])]
        number = most_ordinary(scales)
        estimator, draw, data = scales[number], draws[number], DATA[number]
        if estimator.finds_nothing():
            draw = draw._replace(data=data._replace(letters=True))
            estimator = estimator.on(feeds_of(draw))
        yield draw, estimator


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
    with open_like_data(graph, feeds_of, seed, **net) as (chosen, estimator):
        more = (estimator.on(feeds_of(chosen._replace(seed=seed + at))) for at in range(1, _INPUTS + _OTHERS))
        large = estimator.on(feeds_of(Draw(seed, draws.LARGE)))
        return find_masks(chain([estimator], more), large, **options)


def find_masks(
    estimators: Iterable[Estimator],
    large: Estimator | None = None,
    *,
    integers: Collection[Blob] = (),
    budget: float | None = None,
    masks: MasksFor = True,
    effort: Effort = "normal",
) -> tuple[dict[Layer, Mask], Precision]:
    """Find the masks that a net needs in addition to its own, and its precision with all of them.

    The estimators have the same net on several inputs, and small nets run on more of them. Overflow and errors on these
    inputs decide about masks. `large` inputs only show layers that overflow there. `integers` are outputs. `masks` says
    for which devices; with False the net keeps its own. The layers do not get the masks here, but by `put_masks`.
    Raises RunError if ncnn cannot run the net.
    """
    found, closer, given = _Found(masks), "", iter(estimators)
    judge = MaskJudge(next(given), integers)
    with restored_masks(judge.graph):
        _mask_overflow([judge], found)
        allowed = budget or BUDGET
        is_costly = budget is None and judge.price() > MOST_PRICE  # with its own masks: the search adds no others
        judges = _judges(judge, given, integers, 0.0 if is_costly else allowed)
        judge, error, rounding = judges[0], _finite_error(judges, found), 0.0
        if masks and error > (budget or SMALL_ERROR) and not is_costly:
            numbers = range(len(judges), len(judges) + _OTHERS)
            others = [MaskJudge(next(given, judge.estimator), integers, judge, at) for at in numbers]
            is_large = effort == "normal" and sum(judge.elements.values()) > _LARGE_NET
            closer, rounding = _mask_errors(judges, others, found, budget, EFFORTS["quick" if is_large else effort][1])
            judges += others
            error = _finite_error(judges, found)
        if error > allowed:
            rounding = rounding or largest_error(mean_of([each.rounding() for each in judges]))
            allowed = max(allowed, _ROUNDINGS_ALLOWED * rounding)
        differ = bool(integers) and any(each.integers_differ(each.run(), integers) for each in judges)
        overflow = _overflow(large) if large else ""
        is_undecided = any(each.is_undecided(error) for each in judges)
        nearby = max(each.nearby_error() for each in judges)
        return found, Precision(error, allowed, differ, is_undecided, judge.price(), closer, overflow, nearby)


def _judges(
    first: MaskJudge, estimators: Iterator[Estimator], integers: Collection[Blob], budget: float
) -> list[MaskJudge]:
    """Return judges of a net on as many inputs as its error needs, the most telling one first.

    With a budget of 0 the estimate need not be exact.
    """
    elements = sum(first.elements.values())
    is_tiny = elements < TINY_NET
    share = next((share for size, share in _SECOND_INPUT if elements < size), math.inf)
    has_few = sum(array.size for array in first.reference.outputs.values()) <= _FEW_NUMBERS
    is_vague = budget > 0 and (has_few or first.hides_errors() or not first.error() < share * budget)
    first.runs = _NOISES if is_tiny or (is_vague and has_few) else 1
    more = islice(estimators, _INPUTS - 1 if is_tiny else int(is_vague))
    return most_telling_first([first, *(MaskJudge(each, integers, first, at) for at, each in enumerate(more, 1))])


def _overflow(large: Estimator) -> str:
    """Return the first layer in fp16 whose numbers are infinite there on large inputs."""
    layers = [layer for layer in large.graph if not layer["featmask"] & Feature.NO_FP16_STORAGE]
    sizes = large.largest({blob for layer in layers for blob in layer.outputs})
    for layer in layers:
        if any(sizes.get(blob, 0.0) > LARGEST for blob in layer.outputs) and layer.type not in SOURCES:
            return f"{layer.type} '{layer.name}'"
    return ""


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
        self[layer] = self[layer].joined(mask) if layer in self else mask
        layer.params["featmask"] = layer["featmask"] | int(features)


def _finite_error(judges: Sequence[MaskJudge], found: _Found) -> float:
    """Return the joint error of judges, after layers have got masks that overflow on the inputs of some."""
    error = joint_error(judges)
    if math.isnan(error):
        _mask_overflow(judges, found)
        error = joint_error(judges)
    return error


def _mask_overflow(judges: Sequence[MaskJudge], found: _Found) -> None:
    """Mask layers whose numbers are too large for fp16 on the inputs of judges."""
    for judge in judges:
        _mask_large(judge, found)
        walk = judge.run()
        for _ in range(_MOST_ROUNDS):
            if not math.isnan(judge.error()) or not _mask_first_special(judge, walk, found):
                break
            walk = judge.run()


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
            is_winograd = len(ways) > 1 and not ways[-1].overflows
            found.add(layer, Feature.NO_WINOGRAD if is_winograd else ways[0].remedy, reason, now, ways[0].device)


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
    judges: Sequence[MaskJudge], others: Sequence[MaskJudge], found: _Found, budget: float | None, effort: float
) -> tuple[str, float]:
    """Mask the layers that make too large an error; return a note on other budgets, and the error of rounding."""
    planner = Planner(judges, others)
    plan, is_enough = _best_plan(planner, budget, effort)
    if is_enough or plan.error <= _WORTH * joint_error(judges):
        for layer, mask in plan.masks_of(planner.judge):
            found.add(layer, mask.features, mask.reason, mask.largest)
    closer = _price_of_less(planner, plan, effort, is_enough=is_enough) if budget is None else ""
    return closer, plan.rounding


def _best_plan(planner: Planner, budget: float | None, effort: float) -> tuple[Plan, bool]:
    """Return the best plan of a planner, and True if its error is small enough for its price."""
    attempts = 1 + int(effort * (_ATTEMPTS - 1))
    targets: Sequence[Target] = TARGETS if budget is None else [Target(budget, 1.0)]
    plan = planner.best(targets, 1)
    if effort and not plan.meets(targets[:SURE]):
        planner.measure_blocks()
        plan = planner.best(targets, attempts)
    elif effort and budget and plan.price > USUAL_PRICE:  # fewer masks may do
        planner.best([Target(_INEXACT * budget, 1.0)], 1)
        plan = planner.best(targets, 1)
    if plan.meets(targets):
        return plan, True
    if budget is not None:
        return planner.best(targets, attempts), True
    if effort and (costly := planner.best(COSTLY_TARGETS, attempts)).meets(COSTLY_TARGETS):
        return costly, True
    if planner.confirmed(plan).error > _USELESS * BUDGET:
        costly = planner.best(ANY_PRICE, attempts)
        if costly.error <= _USELESS * BUDGET:
            return costly, True
    return plan, False


def _price_of_less(planner: Planner, plan: Plan, effort: float, *, is_enough: bool) -> str:
    """Return a note on the price of the default budget, if it is high, and of smaller errors."""
    if not (is_enough and plan.error <= BUDGET):
        price = max(MOST_PRICE, plan.price)
        costly = f"--budget {BUDGET:g} takes masks for more than {price:.0%} of the multiplications"
        return costly if effort else "--effort thorough looks for more masks"
    notes = []
    if plan.price > USUAL_PRICE:
        most = MOST_PRICE if plan.price > MOST_PRICE else USUAL_PRICE
        notes.append(f"a budget of {BUDGET:g} takes masks for more than {most:.0%} of the multiplications")
    if plan.error > SMALL_ERROR:
        price = planner.price_within(plan, SMALL_ERROR)
        notes.append(f"--budget {SMALL_ERROR:g} would take masks for {price:.0%} of the multiplications")
    return "; ".join(notes)
