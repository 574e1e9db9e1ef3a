"""The masks that the layers of a net may get, with their prices and the noise that they leave, for `search.choose`.

Layers are taken together in blocks of neighbours. A block computes in fp16, or some of its layers without fp16
arithmetic, or all of it in 32 bits: then none of the blobs inside is rounded.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from onnx2ncnn_opt.ir.features import FP32, Feature
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.half import winograd_tile
from onnx2ncnn_opt.precision.mask_judge import MaskJudge, Masks, is_exact, relative_errors
from onnx2ncnn_opt.precision.search import Form, Limit, Measured, Plan, choose
from onnx2ncnn_opt.rewrite.prove_masks import SOURCES, Mask
from onnx2ncnn_opt.runtime.base import Array

_BLOCKS = 10  # of about equal costs
# The extra time of a convolution without winograd, in units of the extra time without fp16 arithmetic.
_NO_WINOGRAD_COST = 0.25
_FP32_COST = 1.25  # of a layer in 32 bits, in the same units: next to a GPU it runs on the CPU
FULL = Feature.NO_FP16_ARITHMETIC | Feature.NO_WINOGRAD


class MaskForms:
    """The forms of the blocks of a net, and what runs tell about their noise.

    All judges run the same net, each on its own input; the shares of layers are those of the first.
    """

    def __init__(self, judges: Sequence[MaskJudge]) -> None:
        self._judges, self.judge = judges, judges[0]
        self._costs = {layer: 0.0 if is_exact(layer) else self.judge.cost(layer) for layer in self.judge.graph}
        self._blocks, self._whole = list[list[Layer]](), sum(map(self.judge.cost, self._costs)) or 1.0
        self._own, self._own_of_sums, self._rounded = dict[Layer, Array](), dict[Layer, Array](), dict[Layer, Array]()
        self._scales: tuple[Array, Array] | None = None
        size, cost = self._whole / _BLOCKS, math.inf
        for layer in self.judge.graph:
            if cost + self.judge.cost(layer) > size:
                self._blocks.append([])
                cost = 0.0
            self._blocks[-1].append(layer)
            cost += self.judge.cost(layer)

    def choose(self, limits: Sequence[Limit], attempts: int) -> Plan[int]:
        """Return the cheapest masks that keep the first possible limit; prices are shares of the time of the net."""
        kept = sum(self.judge.cost(layer) for layer in self.judge.graph if is_exact(layer)) / self._whole
        limits = [limit._replace(price=limit.price - kept) for limit in limits]
        return choose({at: [Form((), 0.0, 0.0)] for at in range(len(self._blocks))}, self._measure, limits, attempts)

    def masks_of(self, plan: Plan[int]) -> Iterator[tuple[Layer, Mask]]:
        """Yield each masked layer with its mask and the reason."""
        whole = {layer for form in plan.choice.values() if not np.any(form.noise) for layer, _ in form.value}
        for layer, features in _masks(plan.choice).items():
            if layer in whole:
                reason = "rounding blobs to fp16 in this part of the net makes too large an error of an output"
            else:
                reason = f"{self.judge.noise()[layer].how} in fp16 make errors of {self.alone(layer):.1e} of an output"
            yield layer, Mask(layer.name, layer.type, features, reason, self.judge.reference.largest_of(layer.outputs))

    def alone(self, layer: Layer) -> float:
        """Return the largest error of an output from the arithmetic of one layer; NaN if it is not known."""
        return math.sqrt(self._own[layer].max()) if layer in self._own else math.nan

    def _measure(self, choice: Mapping[int, Form]) -> Measured[int]:
        masks = _masks(choice)
        errors = np.array([*relative_errors([judge.errors(masks) for judge in self._judges]).values()])
        self._learn(masks, errors**2)
        return Measured(errors, {at: list(self._forms(block)) for at, block in enumerate(self._blocks)})

    def _learn(self, masks: Masks, powers: Array) -> None:
        """Divide the noise of a run with masks among the layers that have none."""
        own, rounded = self.judge.shares(masks, powers)
        found = [sum(shares.values(), np.zeros_like(powers)) for shares in (own, rounded)]
        if self._scales is None:
            rounding = powers * self.judge.rounding_share()
            wanted = powers - rounding, rounding
            self._scales = _ratio(wanted[0], found[0]), _ratio(wanted[1], found[1])
            self._power = powers
        scale = _ratio(powers, found[0] * self._scales[0] + found[1] * self._scales[1])
        before = {layer: self._rounded[layer] for layer in masks if masks[layer] == FP32 and layer in self._rounded}
        self._rounded = defaultdict(lambda: np.zeros_like(powers))
        for layer in own:
            power, rounding = own[layer] * self._scales[0] * scale, rounded[layer] * self._scales[1] * scale
            if layer not in masks:
                self._own[layer] = power
            elif masks[layer] == Feature.NO_WINOGRAD:
                self._own_of_sums[layer] = power
            # A blob that is made in 32 bits is rounded for those who read it in 16.
            users = [user for blob in layer.outputs for user in blob.users if masks.get(user) != FP32]
            is_whole = layer.type in SOURCES or masks.get(layer) == FP32
            for user in users if is_whole else [layer]:
                self._rounded[user] += rounding / (len(users) if is_whole else 1)
        # The masks have removed together what is missing now.
        removed = {layer: self._own[layer] - self._left(layer, masks[layer]) for layer in masks if layer in self._own}
        together = sum([*removed.values(), *before.values()], np.zeros_like(powers))
        factor = _ratio(np.maximum(self._power - powers, 0.0), together)
        self._rounded |= {layer: power * factor for layer, power in before.items()}
        self._own |= {layer: self._own[layer] + power * (factor - 1.0) for layer, power in removed.items()}

    def _forms(self, block: Sequence[Layer]) -> Iterator[Form]:
        """Yield a block's forms: with masks of arithmetic, those that remove most noise for their price first."""
        own = {layer: self._own[layer] for layer in block if layer in self._own}
        noise = sum((self._rounded[layer] for layer in block if layer in self._rounded), 0.0) + sum(own.values())
        steps = sorted((step for layer in own for step in self._steps(layer)), key=lambda step: -step[0])
        masks, price = dict[Layer, Feature](), 0.0
        yield Form((), 0.0, noise)
        for _, layer, features, cost, left in steps:
            noise = noise + left - (own[layer] if layer not in masks else self._left(layer, masks[layer]))
            masks[layer], price = features, price + cost / self._whole
            yield Form(tuple(masks.items()), price, noise)
        whole = tuple((layer, FP32) for layer in block if layer.type not in SOURCES)
        price = _FP32_COST * sum(self._costs[layer] for layer in block) / self._whole
        yield Form(whole, price, 0.0 * noise)

    def _steps(self, layer: Layer) -> Iterator[tuple[float, Layer, Feature, float, Array]]:
        """Yield the masks of a layer's arithmetic: noise by price, the mask, its extra price, and the noise left."""
        inner, cost, noise = self.judge.reference.inner.get(layer, ()), self._costs[layer] or 1e-9, self._own[layer]
        if not winograd_tile(layer):
            features = inner[0].remedy if inner else Feature.NO_FP16_ARITHMETIC
            yield noise.max() / cost, layer, features, cost, 0.0 * noise
            return
        left, mild = self._left(layer, Feature.NO_WINOGRAD), _NO_WINOGRAD_COST * cost
        first = (noise - left).max() / mild
        yield first, layer, Feature.NO_WINOGRAD, mild, left
        yield min(first, left.max() / (cost - mild)), layer, FULL, cost - mild, 0.0 * noise

    def _left(self, layer: Layer, features: Feature) -> Array:
        """Return the noise that a layer's arithmetic makes with a mask."""
        inner, noise = self.judge.reference.inner.get(layer, ()), self._own[layer]
        if features != Feature.NO_WINOGRAD:
            return 0.0 * noise
        share = (inner[-1].error / inner[0].error) ** 2 if inner and inner[0].error else 0.0
        return np.minimum(self._own_of_sums.get(layer, noise * share), noise)


def _masks(choice: Mapping[int, Form]) -> Masks:
    return {layer: features for form in choice.values() for layer, features in form.value}


def _ratio(a: Array, b: Array) -> Array:
    return np.divide(a, b, out=np.ones_like(a), where=b > 0)
