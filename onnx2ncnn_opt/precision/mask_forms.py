"""The masks that the layers of a net may get, with their prices and the noise that they leave, for `search.choose`.

Layers are taken together in blocks of neighbours. A block computes in fp16, or some of its layers without fp16
arithmetic, or all of it in 32 bits: then none of the blobs inside is rounded.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from onnx2ncnn_opt.ir.features import FP32, Feature
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.half import computes_in_half, winograd_tile
from onnx2ncnn_opt.precision.mask_judge import MaskJudge, Masks, is_exact, relative_errors
from onnx2ncnn_opt.precision.search import Form, Limit, Plan, choose
from onnx2ncnn_opt.rewrite.prove_masks import SOURCES, Mask
from onnx2ncnn_opt.runtime.base import Array

_BLOCKS = 10  # of about equal costs
# The extra time of a convolution without winograd, in units of the extra time without fp16 arithmetic.
_NO_WINOGRAD_COST = 0.25
_FP32_COST = 1.25  # of a layer in 32 bits, in the same units: next to a GPU it runs on the CPU
FULL = Feature.NO_FP16_ARITHMETIC | Feature.NO_WINOGRAD


class MaskForms:
    """The forms of the blocks of a net, and what one run tells about their noise.

    All judges run the same net, each on its own input; the shares of layers are those of the first.
    """

    def __init__(self, judges: Sequence[MaskJudge]) -> None:
        self._judges, self.judge = judges, judges[0]
        self._costs = {layer: 0.0 if is_exact(layer) else self.judge.cost(layer) for layer in self.judge.graph}
        self._whole = sum(map(self.judge.cost, self._costs)) or 1.0
        powers = self._errors({}) ** 2
        rounding = powers * self.judge.rounding_share()
        own, rounded = self.judge.shares(powers)
        self._own, self._rounded = _scaled(own, powers - rounding), dict[Layer, Array]()
        # A blob keeps 32 bits only if its producer and all that read it have them.
        for layer, power in _scaled(rounded, rounding).items():
            users = [user for blob in layer.outputs for user in blob.users]
            deciding = users if layer.type in SOURCES else [layer, *users]
            for each in deciding:
                self._rounded[each] = self._rounded.get(each, 0.0) + power / len(deciding)

    def choose(self, limits: Sequence[Limit], attempts: int) -> Plan[int]:
        """Return the cheapest masks that keep the first possible limit; prices are shares of the time of the net."""
        kept = sum(self.judge.cost(layer) for layer in self.judge.graph if is_exact(layer)) / self._whole
        limits = [limit._replace(price=limit.price - kept) for limit in limits]
        forms = {at: [*self._forms(block)] for at, block in enumerate(self._blocks())}
        return choose(forms, lambda choice: self._errors(_masks(choice)), limits, attempts)

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

    def _errors(self, masks: Masks) -> Array:
        return np.array([*relative_errors([judge.errors(masks) for judge in self._judges]).values()])

    def _blocks(self) -> Iterator[list[Layer]]:
        block, cost = list[Layer](), 0.0
        for layer in self._costs:
            if block and cost + self.judge.cost(layer) > self._whole / _BLOCKS:
                yield block
                block, cost = [], 0.0
            block.append(layer)
            cost += self.judge.cost(layer)
        yield block

    def _forms(self, block: Sequence[Layer]) -> Iterator[Form]:
        """Yield a block's forms: with masks of arithmetic, those that remove most noise for their price first."""
        noise = sum((each[layer] for each in (self._own, self._rounded) for layer in block if layer in each), 0.0)
        masks, price = dict[Layer, Feature](), 0.0
        yield Form((), 0.0, noise)
        half = (layer for layer in block if layer in self._own and computes_in_half(layer))
        steps = (step for layer in half for step in self._steps(layer))
        for _, layer, features, cost, removed in sorted(steps, key=lambda step: -step[0]):
            masks[layer], price, noise = features, price + cost / self._whole, noise - removed
            yield Form(tuple(masks.items()), price, noise)
        whole = tuple((layer, FP32) for layer in block if layer.type not in SOURCES)
        price = _FP32_COST * sum(self._costs[layer] for layer in block) / self._whole
        yield Form(whole, price, 0.0 * noise)

    def _steps(self, layer: Layer) -> Iterator[tuple[float, Layer, Feature, float, Array]]:
        """Yield the masks of a layer's arithmetic: noise by price, the mask, its extra price, and the noise removed."""
        inner, cost, noise = self.judge.reference.inner.get(layer, ()), self._costs[layer] or 1e-9, self._own[layer]
        if not winograd_tile(layer):
            features = inner[0].remedy if inner else Feature.NO_FP16_ARITHMETIC
            yield noise.max() / cost, layer, features, cost, noise
            return
        left = noise * ((inner[-1].error / inner[0].error) ** 2 if inner and inner[0].error else 0.0)
        mild = _NO_WINOGRAD_COST * cost
        first = (noise - left).max() / mild
        yield first, layer, Feature.NO_WINOGRAD, mild, noise - left
        yield min(first, left.max() / (cost - mild)), layer, FULL, cost - mild, left


def _masks(choice: Mapping[int, Form]) -> Masks:
    return {layer: features for form in choice.values() for layer, features in form.value}


def _scaled(shares: dict[Layer, Array], powers: Array) -> dict[Layer, Array]:
    """Return shares of noise that add up to some powers."""
    total = sum(shares.values(), np.zeros_like(powers))
    factor = np.divide(powers, total, out=np.ones_like(total), where=total > 0)
    return {layer: share * factor for layer, share in shares.items()}
