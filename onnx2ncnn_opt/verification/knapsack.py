"""The cheapest steps that bring a net's noise down: layers of int8 that become float, or of fp16 that get masks."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TypeVar

Item = TypeVar("Item", bound=Hashable)
Way = TypeVar("Way")


def cheapest(
    powers: Mapping[Item, float],
    steps: Iterable[tuple[float, Item, Way, float]],
    cost: Callable[[Item], float],
    room: float,
) -> dict[Item, Way]:
    """Return the steps that leave noise of `room` at most: the best for their cost, without those that are not needed.

    `powers` of noise add up. A step is the power that it removes for its cost, the item, the way, and the power left.
    """
    ways, left = dict[Item, Way](), dict(powers)
    total = sum(left.values())
    for _, item, way, rest in sorted(steps, key=lambda step: step[0], reverse=True):
        if total <= room:
            break
        total += rest - left[item]
        ways[item], left[item] = way, rest
    for item in sorted(ways, key=cost, reverse=True):
        if total - left[item] + powers[item] <= room:
            total += powers[item] - left[item]
            left[item] = powers[item]
            del ways[item]
    return ways
