"""The search for the layers that need a quieter form: for masks of fp16 (`convert`, `mixed`) and for int8.

While the error is above the limit, the layer whose noise per price is largest takes a quieter form. Powers of noise add
up, so their sum predicts the error of a choice; each measured choice corrects the next prediction.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np

Item = TypeVar("Item", bound=Hashable)
Power: TypeAlias = Any  # a number, or an array with a number for each output
Effort: TypeAlias = Literal["quick", "normal", "thorough"]
# The seconds after which less useful inputs are left out, and the number of attempts to find masks.
EFFORTS: dict[Effort, tuple[float, int]] = {"quick": (0.0, 2), "normal": (10.0, 8), "thorough": (math.inf, 20)}

_CAUTION, _LEAST_AIM = 0.8, 0.01  # factor of the noise to aim at, to begin with, and for each known choice
_MOST_VAIN = 2  # attempts that are no better than an earlier one end the search
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


class Measured(NamedTuple, Generic[Item]):
    """The errors of the outputs with a choice: roots of powers of noise; NaN if it is of no use for another reason.

    `forms` replace the known ones, if the measurement tells more about their noise.
    """

    errors: Power
    forms: Mapping[Item, Sequence[Form]] | None = None


class Plan(NamedTuple, Generic[Item]):
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
    measure: Callable[[Mapping[Item, Form]], Measured[Item]],
    limits: Sequence[Limit],
    attempts: int,
    caution: float = _CAUTION,
) -> Plan[Item]:
    """Return the cheapest measured choice within the first of the limits that can be kept; else that of least error.

    `forms` has for each item (a layer, or several) its forms, the noisiest and cheapest first. The first choice that is
    measured has these. The search ends after so many `attempts`, two in vain, or if no better choice is predicted. If
    no choice keeps a limit, the last one is that of the dearest forms, if that is not too dear. The search aims at
    `caution` times the noise of a limit: 1 for limits that have to hold for the measured inputs only.
    """
    search: _Search[Item] = _Search(forms, limits, caution)
    choice = {item: each[0] for item, each in forms.items()}
    for _ in range(attempts):
        search.add(choice, measure(choice))
        if (better := search.next()) is None:
            break
        choice = better
    dearest = {item: each[-1] for item, each in search.forms.items()}
    if search.best.limit is None and search.is_new(dearest) and _price(dearest.values()) <= limits[-1].price:
        search.add(dearest, measure(dearest))
    return search.best


class _Search(Generic[Item]):
    """What the measurements have shown up to now."""

    def __init__(self, forms: Mapping[Item, Sequence[Form]], limits: Sequence[Limit], caution: float) -> None:
        self.forms, self._limits = forms, limits
        self._tried: dict[frozenset[tuple[Item, Any]], Plan[Item]] = {}
        self._factor, self._aim, self._vain = np.ones(1), caution, 0  # the first is of measured to predicted noise

    @property
    def best(self) -> Plan[Item]:
        return min(self._tried.values(), key=Plan.rank)

    def is_new(self, choice: Mapping[Item, Form]) -> bool:
        return _key(choice) not in self._tried

    def add(self, choice: Mapping[Item, Form], measured: Measured[Item]) -> None:
        """Learn from a measured choice."""
        errors, predicted = np.asarray(measured.errors, np.float64), _noise(choice.values())
        error, price = float(errors.max(initial=0.0)), _price(choice.values())
        kept = (at for at, limit in enumerate(self._limits) if error <= limit.error and price <= limit.price)
        self._tried[_key(choice)] = plan = Plan(choice, error, price, next(kept, None))
        self._vain += plan is not self.best
        if measured.forms is not None:
            self.forms = measured.forms
        elif math.isfinite(error):
            factor = np.divide(errors**2, predicted, out=np.ones_like(predicted), where=predicted > 0)
            self._factor = np.maximum(factor, np.finfo(np.float64).tiny)

    def next(self) -> dict[Item, Form] | None:
        """Return the next choice to measure; None if no better one is predicted."""
        best = self.best
        while self._vain < _MOST_VAIN and self._aim > _LEAST_AIM:
            rooms = [(self._aim * limit.error**2 / self._factor, limit.price) for limit in self._limits]
            plans = [_predicted(self.forms, *room) for room in rooms]
            if best.limit is None:
                choices = [choice for choice, fits in plans if fits][:1] or [plans[-1][0]]
            else:  # better limits are worth a run, too, if they are nearly kept
                choices = [choice for choice, _ in plans[: best.limit]]
                cheaper, fits = plans[best.limit]
                choices += [cheaper] * (fits and _price(cheaper.values()) < _CHEAPER * best.price)
            if (new := next(filter(self.is_new, choices), None)) is not None:
                return new
            self._aim *= _CAUTION if choices else 0.0
        return None


def _key(choice: Mapping[Item, Form]) -> frozenset[tuple[Item, Any]]:
    return frozenset((item, form.value) for item, form in choice.items())


def _price(forms: Iterable[Form]) -> float:
    return float(sum(form.price for form in forms))


def _noise(forms: Iterable[Form]) -> Power:
    return np.asarray(sum(form.noise for form in forms), np.float64)


class _Step(NamedTuple, Generic[Item]):
    item: Item
    before: Form
    form: Form
    ratio: float  # of the noise that it removes to its price

    @property
    def price(self) -> float:
        return self.form.price - self.before.price


def _predicted(forms: Mapping[Item, Sequence[Form]], room: Power, most_price: float) -> tuple[dict[Item, Form], bool]:
    """Return a cheap choice whose noise fits into a room, or one of about the highest price; and whether it fits.

    The steps that remove the most noise for their price come first. Then the dearest one is left out, as long as that
    makes the others cheaper altogether.
    """
    first = {item: each[0] for item, each in forms.items()}
    noise = _noise(first.values()).reshape(-1)
    scale = np.divide(1.0, room, out=np.zeros_like(noise), where=noise > room)  # only noise at these outputs counts
    steps = sorted((step for each in forms.items() for step in _steps(*each, scale)), key=lambda step: -step.ratio)
    best, best_price, fits = list[_Step[Item]](), math.inf, False
    most = most_price - _price(first.values())
    while True:
        taken, is_enough = _best_first(steps, noise, room, most)
        price = sum(step.price for step in taken)
        if is_enough and price < best_price:
            best, best_price, fits = taken, price, True
        elif fits or not taken:
            return first | {step.item: step.form for step in best}, fits
        best = best or taken
        dearest = max(taken, key=lambda step: step.price, default=None)
        steps = [step for step in steps if dearest is None or step.item != dearest.item or step.ratio > dearest.ratio]


def _best_first(steps: Iterable[_Step[Item]], noise: Power, room: Power, most: float) -> tuple[list[_Step[Item]], bool]:
    """Take steps in order until the noise fits, but not those that are too dear, and undo needless ones.

    The second result says whether the noise fits.
    """
    paid, blocked, affordable = 0.0, set[Item](), list[_Step[Item]]()
    for step in steps:
        if step.item in blocked or paid + step.price > most:
            blocked.add(step.item)
        else:
            paid += step.price
            affordable.append(step)
    rows = [np.broadcast_to(step.form.noise - step.before.noise, noise.shape) for step in affordable]
    changes = np.array(rows).reshape(len(rows), noise.size)
    totals = noise + np.vstack([np.zeros_like(noise), np.cumsum(changes, axis=0)])
    count = int(np.argmax([*(totals <= room).all(axis=1), True]))
    taken, total = list(range(min(count, len(rows)))), totals[min(count, len(rows))]
    fits = bool(np.all(total <= room))
    for at in sorted(taken, key=lambda at: -affordable[at].price) if fits else ():
        is_last = not any(affordable[later].item == affordable[at].item for later in taken if later > at)
        if is_last and np.all(total - changes[at] <= room):
            total = total - changes[at]
            taken.remove(at)
    return [affordable[at] for at in taken], fits


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
