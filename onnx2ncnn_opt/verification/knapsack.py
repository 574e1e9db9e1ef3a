"""The cheapest steps that reduce a net's noise: int8 layers become float, or fp16 layers get masks."""

from collections.abc import Callable, Hashable, Iterable, Mapping
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
    steps: Iterable[tuple[float, Item, Way, Power]],
    cost: Callable[[Item, Way], float],
    limit: Power,
) -> tuple[dict[Item, Way], Power]:
    """Take steps in order until the noise is within the limit, undo needless ones; return steps and remaining noise."""
    ways, current = dict[Item, Way](), dict(powers)
    total = sum(current.values())
    for _, item, way, power in steps:
        if np.all(total <= limit):
            break
        total = total + power - current[item]
        ways[item], current[item] = way, power
    for item in sorted(ways, key=lambda item: cost(item, ways[item]), reverse=True):
        if np.all(total - current[item] + powers[item] <= limit):
            total = total + powers[item] - current[item]
            current[item] = powers[item]
            del ways[item]
    return ways, total
