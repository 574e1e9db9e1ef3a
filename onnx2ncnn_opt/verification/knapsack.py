"""The cheapest steps that bring a net's noise down: layers of int8 that become float, or of fp16 that get masks."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

import numpy as np

Item = TypeVar("Item", bound=Hashable)
Way = TypeVar("Way")
Power: TypeAlias = Any  # a number, or an array of one for each output


def cheapest(
    powers: Mapping[Item, Power],
    steps: Iterable[tuple[float, Item, Way, Power]],
    cost: Callable[[Item, Way], float],
    room: Power,
) -> dict[Item, Way]:
    """Return steps of small cost that leave noise of `room` at most; all of them if that is not possible.

    `powers` of noise add up. A step is the power that it removes for its cost, the item, the way, and the power left.
    The best for their cost come first. Then the dearest item is left out as long as others do the same for less.
    """
    left = sorted(steps, key=lambda step: step[0], reverse=True)
    best, price = dict[Item, Way](), float("inf")
    while True:
        ways, noise = _best_first(powers, left, cost, room)
        if (total := sum(cost(*each) for each in ways.items())) >= price or (np.any(noise > room) and best):
            return best
        best, price = ways, total
        dearest = max(ways, key=lambda item: cost(item, ways[item]), default=None)
        left = [step for step in left if step[1] != dearest]


def _best_first(
    powers: Mapping[Item, Power],
    steps: Iterable[tuple[float, Item, Way, Power]],
    cost: Callable[[Item, Way], float],
    room: Power,
) -> tuple[dict[Item, Way], Power]:
    """Return the first steps that are enough, without those that are not needed, and the noise that they leave."""
    ways, left = dict[Item, Way](), dict(powers)
    total = sum(left.values())
    for _, item, way, rest in steps:
        if np.all(total <= room):
            break
        total = total + rest - left[item]
        ways[item], left[item] = way, rest
    for item in sorted(ways, key=lambda item: cost(item, ways[item]), reverse=True):
        if np.all(total - left[item] + powers[item] <= room):
            total = total + powers[item] - left[item]
            left[item] = powers[item]
            del ways[item]
    return ways, total
