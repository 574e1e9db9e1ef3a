"""The cheapest masks with which fp16 is enough for a net, found by running it.

One run tells whether a search is needed. Layers that overflow come first, then those that make too large errors.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from types import MappingProxyType
from typing import Any

from onnx2ncnn_opt.inputs.draws import DATA, Draw
from onnx2ncnn_opt.ir.features import FP32, Device, Feature, MasksFor
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.half import INFINITE, INPUT_MARGIN, LARGEST
from onnx2ncnn_opt.precision.fp16_run import Estimator, most_ordinary
from onnx2ncnn_opt.precision.mask_forms import MaskForms
from onnx2ncnn_opt.precision.mask_judge import MaskJudge, largest_error, restored_masks
from onnx2ncnn_opt.precision.search import EFFORTS, Effort, Limit
from onnx2ncnn_opt.rewrite.prove_masks import SOURCES, Mask, is_wanted
from onnx2ncnn_opt.runtime.base import Feed

# The error that fp16 may make, in units of an output's largest value.
BUDGET = 2e-2
# Without a given budget: the error to reach, and the share of the net's time that may compute in 32 bits for it.
LIMITS = Limit(0.5 * BUDGET, 0.2), Limit(0.6 * BUDGET, 0.2), Limit(0.85 * BUDGET, 0.5)
_USELESS = 0.15  # with a larger error fp16 is of no use, and masks may cost anything
# The error of one input, times the first limit, with which no other has to run: an error may be small by chance.
_SURE = 0.25
# The number of inputs of most nets, and of those whose outputs have few numbers, whose errors vary more.
_INPUTS, _FEW_NUMBERS = (2, 4), 2**8
_DOUBT = 2.2  # errors on devices are seldom more than so many times the estimate: inputs and kernels differ
_MOST_ROUNDS = 8  # to mask layers that overflow


@dataclass(frozen=True)
class Precision:
    """The effect of fp16 on a net with its masks, estimated."""

    error: float  # the largest, in units of an output's largest value; NaN if one is finite in fp32 only
    allowed: float = BUDGET
    integers_differ: bool = False  # an output of integers has others
    is_undecided: bool = False  # an index may be another one, where two numbers are nearly equal
    price: float = 0.0  # the share of the multiplications that masks keep from fp16 arithmetic

    @property
    def ok(self) -> bool:
        """True if fp16 is enough for the net."""
        return self.error <= self.allowed and not self.integers_differ

    def __str__(self) -> str:
        return "; ".join((self.summary, *self.details))

    @property
    def details(self) -> list[str]:
        """The facts for -v."""
        if not self.ok:
            return ["`mixed` looks for more masks"]
        if self.is_undecided:
            return ["an index may be another one where two numbers are nearly equal"]
        advice = f"with other inputs perhaps {BUDGET:g}; --budget {LIMITS[0].error / 2:g} looks for more masks"
        return [advice] if self.may_exceed else []

    @property
    def summary(self) -> str:
        """The error, and the advice if it is large."""
        text = f"off by up to {self.error:.1e} of an output's largest value"
        if math.isnan(self.error):
            text = "NaN or infinity in an output"
        elif self.integers_differ:
            text = "an output has other integers"
        is_sure = not self.ok or self.is_undecided
        advice = "; compute it in fp32" if is_sure else "; perhaps compute it in fp32"
        return text + advice * self.may_exceed

    @property
    def may_exceed(self) -> bool:
        """True if devices may be off by more than BUDGET, because the estimate is that inexact."""
        return not self.ok or self.is_undecided or self.error * _DOUBT > BUDGET


@contextmanager
def open_like_data(
    graph: Graph, feeds_of: Callable[[Draw], Mapping[Blob, Feed]], seed: int, **net: Any
) -> Iterator[tuple[Draw, Estimator]]:
    """Yield the inputs like data that suit a net, which `feeds_of` draws, and the net on them."""
    draws = [Draw(seed, plain=True, data=data) for data in DATA]
    with Estimator(graph, feeds_of(draws[0]), **net) as estimator:
        scales = [estimator, *(estimator.on(feeds_of(draw)) for draw in draws[1:])]
        number = most_ordinary(scales)
        yield draws[number], scales[number]


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
        more = (estimator.on(feeds_of(chosen._replace(seed=seed + at))) for at in range(1, _INPUTS[1]))
        return find_masks(chain([estimator], more), **options)


def find_masks(
    estimators: Iterable[Estimator],
    *,
    integers: Collection[Blob] = (),
    budget: float | None = None,
    masks: MasksFor = True,
    effort: Effort = "normal",
) -> tuple[dict[Layer, Mask], Precision]:
    """Find the masks that a net needs in addition to its own, and its precision with all of them.

    The estimators have the same net on several inputs, and small nets run on more of them. Overflow and errors on these
    inputs decide about masks. `integers` are outputs. `masks` says for which devices; with False the net keeps its own.
    The layers do not get the masks here, but by `put_masks`. Raises RunError if ncnn cannot run the net.
    """
    found, given = _Found(masks), iter(estimators)
    first = MaskJudge(next(given), integers)
    with restored_masks(first.graph):
        _mask_overflow([first], found)
        judges = [first]
        has_few = sum(array.size for array in first.reference.outputs.values()) <= _FEW_NUMBERS
        if first.error() > _SURE * LIMITS[0].error:
            others = islice(given, _INPUTS[has_few] - 1)
            judges += [MaskJudge(each, integers, seed) for seed, each in enumerate(others, 1)]
            _mask_overflow(judges[1:], found)
        limits, error = LIMITS if budget is None else [Limit(budget)], _joint_error(judges)
        if error > _USELESS and budget is None:
            limits = [*limits[:-1], Limit(limits[-1].error)]
        if masks and error > limits[0].error and (budget is not None or first.price() <= LIMITS[-1].price):
            forms = MaskForms(judges)
            plan = forms.choose(limits, EFFORTS[effort][1])
            if plan.limit is not None or budget is not None:
                for layer, mask in forms.masks_of(plan):
                    found.add(layer, mask.features, mask.reason, mask.largest)
                error = _joint_error(judges)
        differ = any(each.integers_differ(integers) for each in judges)
        is_undecided = any(each.is_undecided(error) for each in judges)
        return found, Precision(error, budget or BUDGET, differ, is_undecided, first.price())


def _joint_error(judges: Sequence[MaskJudge]) -> float:
    return largest_error(*(judge.errors() for judge in judges))


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


def _mask_overflow(judges: Sequence[MaskJudge], found: _Found) -> None:
    """Mask layers whose numbers are too large for fp16 on the inputs of judges."""
    for judge in judges:
        _mask_large(judge, found)
        for _ in range(_MOST_ROUNDS):
            if not math.isnan(judge.error()) or not _mask_first_special(judge, found):
                break


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
    for layer, ways in judge.reference.inner.items():
        if ways and ways[0].overflows:
            now = judge.reference.largest_of((*layer.inputs, *layer.outputs))
            reason = f"{ways[0].how} in fp16 become larger than {LARGEST:g}"
            is_winograd = len(ways) > 1 and not ways[-1].overflows
            found.add(layer, Feature.NO_WINOGRAD if is_winograd else ways[0].remedy, reason, now, ways[0].device)


def _mask_first_special(judge: MaskJudge, found: _Found) -> bool:
    """Mask the first layer that makes a NaN or an infinity, and its producers; return True if a mask was added."""
    for layer in judge.graph:
        if all(judge.walk().special.get(blob, 0) <= judge.reference.special.get(blob, 0) for blob in layer.outputs):
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
