"""The smallest set of masks with which fp16 is enough for a net, found by running it."""

import math
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from onnx2ncnn_opt.ir.features import FP32, Feature
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.half import INFINITE, INPUT_MARGIN, LARGEST, SMALLEST, Inner, winograd_tile
from onnx2ncnn_opt.progress import announce
from onnx2ncnn_opt.rewrite.prove_masks import SOURCES, Mask
from onnx2ncnn_opt.verification.estimate import Estimator, Walk
from onnx2ncnn_opt.verification.tolerance import parts

# What an output may be off by, in units of its largest value. Devices may be off by twice that: other inputs, and
# other kernels than those that the estimate knows.
BUDGET = 1e-2
ACCEPTED = 2e-2
# ... or this many times what rounding every blob to fp16 gives, which no mask undoes.
_ROUNDINGS = 2.0
_ROUNDINGS_ACCEPTED = 4.0
_MOST_ROUNDS = 8
_FAILURES = 6  # after so many runs without success no other mask is expected to be needless
FULL = Feature.NO_FP16_ARITHMETIC | Feature.NO_WINOGRAD

Masks = Mapping[Layer, Feature]


@dataclass(frozen=True)
class Precision:
    """The effect of fp16 on a net with its masks, estimated."""

    error: float  # the largest, in units of an output's largest value; NaN if one is finite in fp32 only
    allowed: float = ACCEPTED  # the error up to which fp16 does what it can
    integers_differ: bool = False  # an output of integers has others

    @property
    def ok(self) -> bool:
        """True if fp16 is enough for the net."""
        return self.error <= self.allowed and not self.integers_differ

    def __str__(self) -> str:
        text = f"off by up to {self.error:.1e} of an output's largest value"
        if math.isnan(self.error):
            text = "NaN or infinity in an output"
        elif self.integers_differ:
            text = "an output has other integers"
        if not self.ok:
            return f"{text}; compute it in fp32 on devices, or see `mixed`"
        if self.error > ACCEPTED:
            return f"{text}, as rounding its blobs makes it; compute it in fp32 on devices if that is too much"
        return text


def error_of(walk: Walk, reference: Walk) -> float:
    """Return the largest error of a run's outputs, in units of an output's largest value; NaN if one is not finite."""
    worst = 0.0
    for blob, expected in reference.outputs.items():
        if expected.dtype != np.float32 or not expected.size:
            continue
        actual, size, error = walk.outputs[blob], 0.0, 0.0
        for part in parts(expected.shape):
            here, known = actual[part], np.isfinite(expected[part])
            if not np.isfinite(here[known]).all():
                return math.nan
            there = expected[part][known]
            size = max(size, float(np.abs(there).max(initial=0.0)))
            error = max(error, float(np.abs(here[known] - there).max(initial=0.0)))
        worst = max(worst, error / (size or 1.0))
    return worst


class MaskJudge:
    """The error of a net in fp16 with masks, as the estimate says; on a device in `mixed`."""

    checked = "estimated for fp16"  # the place where the net runs, for people

    def __init__(self, estimator: Estimator) -> None:
        self.estimator, self.graph = estimator, estimator.graph
        self.reference = estimator.run()  # in fp32
        self.inner = self.reference.inner

    def run(self) -> Walk:
        """Return a run in fp16 with the masks that the layers have."""
        return self.estimator.run("fp16", noise_of(self.inner))

    def error(self, masks: Masks = MappingProxyType({})) -> float:
        """Return the largest error of an output with masks added, see `error_of`."""
        with restored_masks(self.graph):
            for layer, features in masks.items():
                layer.params["featmask"] = layer["featmask"] | int(features)
            return error_of(self.run(), self.reference)

    def seconds(self, masks: Masks) -> float | None:
        """Return the seconds of a run with masks added; None if they cannot be measured."""
        return None

    def rounding(self) -> float:
        """Return the error of rounding every blob to fp16, see `error_of`."""
        return error_of(self.estimator.run("fp16"), self.reference)

    def integers_differ(self, walk: Walk, integers: Collection[Blob]) -> bool:
        """Return True if an output of integers has others in a run, both as the bits of floats and as values."""
        known = self.reference.outputs
        both = [(walk.outputs[blob], known[blob]) for blob in integers if blob in known]
        return any(((a != b) & (a.view(np.int32) != b.view(np.int32))).any() for a, b in both)


def measure(*estimators: Estimator, integers: Collection[Blob] = ()) -> Precision:
    """Measure fp16 on a net as it is, on the inputs of each estimator; `integers` are outputs. Raises RunError."""
    found = []
    for judge in map(MaskJudge, estimators):
        walk = judge.run()
        error = error_of(walk, judge.reference)
        accepted = ACCEPTED if error <= ACCEPTED else _accepted(judge.rounding())
        found.append(Precision(error, accepted, judge.integers_differ(walk, integers)))
    return max(found, key=_excess)


def _excess(precision: Precision) -> float:
    """Return the error in units of the allowed error."""
    is_wrong = math.isnan(precision.error) or precision.integers_differ
    return math.inf if is_wrong else precision.error / precision.allowed


def _accepted(rounding: float) -> float:
    return ACCEPTED if math.isnan(rounding) else max(ACCEPTED, _ROUNDINGS_ACCEPTED * rounding)


def find_masks(
    *estimators: Estimator, integers: Collection[Blob] = (), budget: float = BUDGET
) -> tuple[dict[Layer, Mask], Precision]:
    """Find the masks that a net needs in addition to its own, and its precision with them.

    The estimators are of one net on ordinary inputs first, and then on larger ones; `integers` are outputs. The layers
    keep the masks that they had: `put_masks` puts these on them. Raises RunError if ncnn cannot run the net.
    """
    found, precisions = _Found(), list[Precision]()
    with restored_masks(estimators[0].graph):
        # All of them first: a layer whose arithmetic has a mask does not show that winograd overflows.
        for judge in [MaskJudge(estimator) for estimator in estimators]:
            _mask_large(judge, found, 1.0 if precisions else INPUT_MARGIN)
            error, accepted = _mask_errors(judge, found, budget)
            differ = bool(integers) and judge.integers_differ(judge.run(), integers)
            precisions.append(Precision(error, accepted, differ))
    return found, max(precisions, key=_excess)


@contextmanager
def restored_masks(graph: Graph) -> Iterator[None]:
    """Restore the masks of all layers at the end of the block."""
    before = {layer: layer.params.get("featmask") for layer in graph}
    try:
        yield
    finally:
        for layer, mask in before.items():
            layer.params.pop("featmask", None)
            if mask is not None:
                layer.params["featmask"] = mask


class _Found(dict[Layer, Mask]):
    """The masks up to now, each put on its layer at once."""

    def add(self, layer: Layer, features: Feature, reason: str, largest: float | None) -> None:
        missing = features & ~Feature(layer["featmask"])
        if not missing:
            return
        mask = Mask(layer.name, layer.type, missing, reason, largest)
        if known := self.get(layer):
            mask = known._replace(features=known.features | features, reason=f"{known.reason}; {reason}")
        self[layer] = mask
        layer.params["featmask"] = layer["featmask"] | int(features)


def _mask_large(judge: MaskJudge, found: _Found, room: float) -> None:
    """Mask layers whose numbers are too large for fp16, in blobs or inside of layers; `room` is for other inputs."""

    for layer in judge.graph:
        if layer.type in SOURCES:
            continue
        for what, blobs in (("output", layer.outputs), ("input", layer.inputs)):
            sizes = [judge.reference.largest.get(blob, 0.0) for blob in blobs]
            size = max((size for size in sizes if LARGEST / room < size < INFINITE), default=0.0)
            if size:
                is_over = "is" if size > LARGEST else "may become"  # with other inputs
                reason = f"its {what} {is_over} too large for fp16, which ends at {LARGEST:g}"
                found.add(layer, FP32, reason, size)
                break
    for layer, ways in judge.inner.items():
        if ways and ways[0].overflows:
            now = judge.reference.largest_of((*layer.inputs, *layer.outputs))
            found.add(layer, ways[0].remedy, f"{ways[0].how} in fp16 become larger than {LARGEST:g}", now)


def noise_of(inner: Mapping[Layer, tuple[Inner, ...]]) -> dict[Layer, tuple[float, ...]]:
    """Return the errors that the arithmetic of each layer makes with its present masks."""
    exact = Feature.NO_FP16_ARITHMETIC | Feature.NO_FP16_STORAGE
    return {
        layer: ways[-1 if layer["featmask"] & Feature.NO_WINOGRAD else 0].noise
        for layer, ways in inner.items()
        if ways and not layer["featmask"] & exact
    }


def _mask_errors(judge: MaskJudge, found: _Found, budget: float) -> tuple[float, float]:
    """Mask layers that overflow first, then the least precise; return the error that is left, and the accepted one."""
    for _ in range(_MOST_ROUNDS):
        walk = judge.run()
        error = error_of(walk, judge.reference)
        if not math.isnan(error) or not _mask_first_special(judge, walk, found):
            break
    if error <= budget:
        return error, ACCEPTED
    rounding = judge.rounding()
    accepted, target = _accepted(rounding), max(budget, _ROUNDINGS * rounding)
    if math.isnan(rounding) or error <= target:
        return error, accepted
    largest = {layer: judge.reference.largest_of(layer.outputs) for layer in judge.inner}
    noise = {layer: max(noise) for layer, noise in noise_of(judge.inner).items() if any(noise)}
    relative = {layer: size / max(largest[layer], SMALLEST) for layer, size in noise.items()}
    order = sorted(relative, key=relative.__getitem__, reverse=True)
    full = Feature.NO_FP16_ARITHMETIC
    for layer, features in fewest_masks(judge, order, target=target, full=full, failures=_FAILURES).items():
        reason = f"{judge.inner[layer][0].how} in fp16: errors of {relative[layer]:.1e} of the largest value"
        found.add(layer, features, reason, largest[layer])
    return judge.error(), accepted


def fewest_masks(
    judge: MaskJudge,
    order: Sequence[Layer],
    *,
    target: float,
    full: Feature,
    fixed: Masks = MappingProxyType({}),
    failures: float = math.inf,
) -> dict[Layer, Feature]:
    """Return masks that keep a net's error within `target`: on as few layers as possible, and as mild as possible.

    Masks the first layers of `order`, as few as are enough. Then finds those of them, the last first, that need a
    milder mask than `full`, or none, until so many `failures`. All are masked if that is not enough. `fixed` masks
    stay as they are.
    """

    def is_enough(masks: Masks) -> bool:
        return judge.error({**masks, **fixed}) <= target

    def enough(count: int) -> bool:
        announce(f"masks on the {count} layers that cost most")
        return is_enough(dict.fromkeys(order[:count], full))

    count = bisect_left(range(len(order)), True, key=enough)
    masks = dict.fromkeys(order[:count], full)
    for layer in reversed(order[:count]):
        announce(f"a milder mask on {layer.type} '{layer.name}'")
        for features in _milder(layer, full):
            if is_enough({**masks, layer: features}):
                masks[layer] = features
                break
            failures -= 1
            if failures <= 0:
                return masks
        if not masks[layer]:
            del masks[layer]
    return masks


def _milder(layer: Layer, full: Feature) -> tuple[Feature, ...]:
    """Return the masks of a layer that are milder than `full`, from none on."""
    mild = (Feature.NO_WINOGRAD,) if winograd_tile(layer) else ()
    masks = (Feature(0), *mild, Feature.NO_FP16_ARITHMETIC, FULL)
    return masks[: masks.index(full)]


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
