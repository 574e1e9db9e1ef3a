"""The search for the layers that need a quieter form: for masks of fp16 (`convert`, `mixed`) and for int8.

While the error is above the limit, the layer whose noise per price is largest takes a quieter form. Powers of noise add
up, so their sum predicts the error of a choice; each measured choice corrects the next prediction.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np

Item = TypeVar("Item", bound=Hashable)
Power: TypeAlias = Any  # a number, or an array with a number for each output
Effort: TypeAlias = Literal["quick", "normal", "thorough"]
# The seconds after which less useful inputs are left out, and the number of attempts to find masks.
EFFORTS: dict[Effort, tuple[float, int]] = {"quick": (0.0, 2), "normal": (10.0, 8), "thorough": (math.inf, 20)}

_CAUTION, _LEAST_AIM = 0.8, 0.01  # factor of the noise to aim at, to begin with, and for each known choice
_MOST_VAIN = 2  # attempts that are no better than an earlier one end the search
_TINY = 1e-300
_CHEAPER = 0.9  # a choice that costs at most so much of the best one is worth a run


class Form(NamedTuple):
    """A way to compute a layer: any hashable `value`, the price, and the power of its noise at each output."""

    value: Any
    price: float
    noise: Power


class Limit(NamedTuple):
    """An error that is small enough, and the highest price to pay for it."""

    error: float
    price: float = math.inf


@dataclass(frozen=True)
class Plan(Generic[Item]):
    """A measured choice of a form for each item; `limit` is the index of the first limit that it keeps, if any."""

    choice: Mapping[Item, Form]
    error: float
    price: float
    limit: int | None

    def rank(self) -> tuple[bool, float, float, float]:
        """Return a key that sorts the best plan first."""
        if self.limit is None:
            return True, 0, math.inf if math.isnan(self.error) else self.error, self.price
        return False, self.limit, self.price, self.error


def choose(
    forms: Mapping[Item, Sequence[Form]],
    measure: Callable[[Mapping[Item, Form]], Power],
    limits: Sequence[Limit],
    attempts: int,
    caution: float = _CAUTION,
) -> Plan[Item]:
    """Return the cheapest measured choice within the first of the limits that can be kept; else that of least error.

    `forms` has for each item (a layer, or several) its forms, the noisiest and cheapest first. The first choice that is
    measured has these. `measure` returns the errors of the outputs: roots of powers of noise, or NaN. The search ends
    after so many `attempts`, two in vain, or if no better choice is predicted. If no choice keeps a limit, the last one
    is that of the dearest forms, if that is not too dear. The search aims at `caution` times the noise of a limit: 1
    for limits that have to hold for the measured inputs only.
    """
    plans: dict[frozenset[tuple[Item, Any]], Plan[Item]] = {}

    def add(choice: Mapping[Item, Form]) -> Power:
        errors = np.asarray(measure(choice), np.float64).reshape(-1)
        error, price = float(errors.max(initial=0.0)), _price(choice)
        kept = (at for at, limit in enumerate(limits) if error <= limit.error and price <= limit.price)
        plans[_key(choice)] = Plan(choice, error, price, next(kept, None))
        return errors

    new: Mapping[Item, Form] | None = {item: each[0] for item, each in forms.items()}
    factor, aim, vain = np.ones(1), caution, 0
    while new is not None and len(plans) < attempts and vain < _MOST_VAIN:
        errors, noise = add(new), _noise(new)
        if np.isfinite(errors).all():
            factor = np.maximum(np.divide(errors**2, noise, out=np.ones_like(noise), where=noise > 0), _TINY)
        best = min(plans.values(), key=Plan.rank)
        vain += plans[_key(new)] is not best
        new = None
        while new is None and aim > _LEAST_AIM:
            better = _better(forms, limits, factor / aim, best)
            new = next((choice for choice in better if _key(choice) not in plans), None)
            aim *= _CAUTION if new is None else 1.0
    dearest = {item: each[-1] for item, each in forms.items()}
    best = min(plans.values(), key=Plan.rank)
    if best.limit is None and _key(dearest) not in plans and _price(dearest) <= limits[-1].price:
        add(dearest)
    return min(plans.values(), key=Plan.rank)


def _better(
    forms: Mapping[Item, Sequence[Form]], limits: Sequence[Limit], factor: Power, best: Plan[Item]
) -> Iterator[dict[Item, Form]]:
    """Yield the choices that are predicted to be better than the best one; `factor` is of measured to predicted noise.

    If none keeps a limit, the prediction may be too high: then the last one is worth a run.
    """
    for at, limit in enumerate(limits if best.limit is None else limits[: best.limit + 1]):
        choice, noise = _quieter(forms, limit.error**2 / factor, limit.price)
        is_better = at != best.limit or _price(choice) < _CHEAPER * best.price
        is_last = best.limit is None and at == len(limits) - 1
        if is_last or (is_better and np.all(noise <= limit.error**2 / factor)):
            yield choice


def _quieter(forms: Mapping[Item, Sequence[Form]], room: Power, most: float) -> tuple[dict[Item, Form], Power]:
    """Take the steps that remove the most noise for their price until it fits into a room, and undo needless ones.

    Steps that are too dear are left out. The second result is the noise.
    """
    choice = {item: each[0] for item, each in forms.items()}
    noise, price = _noise(choice), _price(choice)
    scale = np.divide(1.0, room, out=np.zeros_like(noise), where=noise > room)  # only noise at these outputs counts
    taken = list[_Step[Item]]()
    for step in sorted((step for each in forms.items() for step in _steps(*each, scale)), key=lambda step: -step.ratio):
        if np.all(noise <= room):
            break
        if choice[step.item] is step.before and price + step.price <= most:
            choice[step.item], noise, price = step.form, noise + step.change, price + step.price
            taken.append(step)
    for step in sorted(taken, key=lambda step: -step.price):
        if choice[step.item] is step.form and np.all(noise - step.change <= room):
            choice[step.item], noise = step.before, noise - step.change
    return choice, noise


def _key(choice: Mapping[Item, Form]) -> frozenset[tuple[Item, Any]]:
    return frozenset((item, form.value) for item, form in choice.items())


def _price(choice: Mapping[Item, Form]) -> float:
    return float(sum(form.price for form in choice.values()))


def _noise(choice: Mapping[Item, Form]) -> Power:
    return np.asarray(sum(form.noise for form in choice.values()), np.float64).reshape(-1)


@dataclass(frozen=True)
class _Step(Generic[Item]):
    item: Item
    before: Form
    form: Form
    ratio: float  # of the noise that it removes to its price

    @property
    def price(self) -> float:
        return self.form.price - self.before.price

    @property
    def change(self) -> Power:
        return self.form.noise - self.before.noise


def _steps(item: Item, forms: Sequence[Form], scale: Power) -> Iterator[_Step[Item]]:
    """Yield the steps from the first form of an item, each to the form that removes most noise for its price."""
    loud = np.array([np.max(form.noise * scale, initial=0.0) for form in forms])
    prices = np.array([form.price for form in forms], np.float64)
    at = 0
    while at + 1 < len(forms):
        added = prices[at + 1 :] - prices[at]
        ratios = np.divide(loud[at] - loud[at + 1 :], added, out=np.full_like(added, math.inf), where=added > 0)
        best = at + 1 + int(ratios.argmax())
        yield _Step(item, forms[at], forms[best], float(ratios.max()))
        at = best
