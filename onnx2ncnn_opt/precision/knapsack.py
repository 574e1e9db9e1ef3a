"""The cheapest steps that reduce a net's noise: int8 layers become float, or fp16 layers get masks."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

Item = TypeVar("Item", bound=Hashable)
Way = TypeVar("Way")
Power: TypeAlias = Any  # a number, or an array with a number for each output


def cheapest(
    powers: Mapping[Item, Power],
    steps: Iterable[tuple[float, Item, Way, Power]],
    cost: Callable[[Item, Way], float],
    limit: Power,
) -> dict[Item, Way]:
    """Return cheap steps that reduce the noise to `limit`; all steps if that is not possible.

    The noise `powers` of the items add up. A step is: the power that it removes per cost, the item, the way, and the
    item's remaining power. Steps that remove most per cost come first. Then the most expensive item is excluded while
    that lowers the total cost.
    """
    candidates = sorted(steps, key=lambda step: step[0], reverse=True)
    best, best_cost = dict[Item, Way](), float("inf")
    while True:
        ways, noise = _best_first(powers, candidates, cost, limit)
        if (total := sum(cost(*step) for step in ways.items())) >= best_cost or (np.any(noise > limit) and best):
            return best
        best, best_cost = ways, total
        dearest = max(ways, key=lambda item: cost(item, ways[item]), default=None)
        candidates = [step for step in candidates if step[1] != dearest]


def _best_first(
    powers: Mapping[Item, Power],
    steps: Sequence[tuple[float, Item, Way, Power]],
    cost: Callable[[Item, Way], float],
    limit: Power,
) -> tuple[dict[Item, Way], Power]:
    """Take steps in order until the noise is within the limit, undo needless ones; return steps and remaining noise."""
    left, changes = dict(powers), [sum(powers.values())]
    for _, item, _, power in steps:
        changes.append(power - left[item])
        left[item] = power
    totals = np.cumsum(changes, axis=0)
    needed = int(np.argmax([*_within(totals, limit), True]))
    ways, total = {item: way for _, item, way, _ in steps[:needed]}, totals[min(needed, len(steps))]
    left = {**powers, **{item: power for _, item, _, power in steps[:needed]}}
    dearest_first = sorted(ways, key=lambda item: cost(item, ways[item]), reverse=True)
    added = np.array([powers[item] - left[item] for item in dearest_first]).reshape(-1, *np.shape(limit))
    for at in np.flatnonzero(_within(total + added, limit)):  # the others cannot be undone later either
        if np.all(total + added[at] <= limit):
            total = total + added[at]
            del ways[dearest_first[at]]
    return ways, total


def _within(noises: Any, limit: Power) -> Any:
    """Return for each noise whether no output has more than the limit."""
    return (noises <= limit).all(axis=tuple(range(1, noises.ndim)))
