"""The agreement of a net with a reference over many samples: signal-to-noise ratio and equal argmax."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnx2ncnn_opt.manifest import Manifest
from onnx2ncnn_opt.runtime.base import Array, Failure
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner
from onnx2ncnn_opt.verdict.ordered_model import BEST, FOUND
from onnx2ncnn_opt.verification.order import NetOrder
from onnx2ncnn_opt.verification.outputs import in_shape_of, input_slots, read_outputs

_CONFIDENCE = 20  # one of 20 bounds may be wrong
_QUANTILE = 1.645  # standard errors; 95 % of normal errors are below


@dataclass
class Agreement:
    """The powers of noise and reference by output and sample; the rows of classes, and those with the same argmax."""

    powers: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    samples: int = 0
    rows: int = 0
    same: int = 0

    def add(self, expected: Mapping[str, Array], outputs: Mapping[str, Any]) -> None:
        """Add a sample. A missing output, or one not finite where the reference is finite, has infinite noise."""
        for name, array in expected.items():
            a, finite = array.astype(np.float64), np.isfinite(array)
            difference = np.where(finite, a - outputs.get(name, math.nan), 0.0)
            noise = float((difference**2).sum()) if np.isfinite(difference).all() else math.inf
            self.powers.setdefault(name, []).append((noise, float((a[finite] ** 2).sum())))
        self.samples += 1
        name = max(expected, key=lambda name: expected[name].shape[-1] if expected[name].ndim else 0)
        if expected[name].ndim and expected[name].shape[-1] > 1:
            largest, actual = expected[name].argmax(-1), outputs.get(name)
            self.rows += largest.size
            self.same += 0 if actual is None else int((largest == actual.argmax(-1)).sum())

    @property
    def noise(self) -> float:
        """The noise power of the worst output, relative to its power."""
        sums = [np.sum(pairs, axis=0).tolist() for pairs in self.powers.values()]
        return max(noise / power if power else math.inf if noise else 0.0 for noise, power in sums)

    @property
    def most_noise(self) -> float:
        """An upper bound (95 %) of `noise` on other samples, from the variance over these samples."""
        if not math.isfinite(self.noise):
            return math.inf
        bounds, count = [0.0], self.samples
        errors = _QUANTILE * (1 + 1 / (count - 1.5)) * math.sqrt(count / (count - 1)) if count > 1 else 0.0  # t-test
        for noises, powers in (np.transpose(pairs) for pairs in self.powers.values()):
            if total := powers.sum():
                share = noises.sum() / total
                bounds.append(float(share + errors * np.linalg.norm(noises - share * powers) / total))
        return max(bounds)

    @property
    def decibels(self) -> float:
        """The signal-to-noise ratio of the worst output."""
        return decibels(self.noise)

    @property
    def top1(self) -> float | None:
        """The share of rows with the same argmax; None if no output has rows of classes."""
        return self.same / self.rows if self.rows else None

    @property
    def least_top1(self) -> float | None:
        """A lower bound (95 %) of `top1` on other samples, by Hoeffding."""
        if not self.top1:
            return self.top1
        share, rest = self.top1, max(1 - self.top1, 1e-300)
        least = share * np.linspace(0, 1, 10000)[1:-1]
        surprise = share * np.log(share / least) + rest * np.log(rest / (1 - least))
        return float(np.interp(math.log(_CONFIDENCE) / self.samples, surprise[::-1], least[::-1]))


def decibels(noise: float) -> float:
    """Return the signal-to-noise ratio for a noise power relative to the signal's."""
    return -10 * math.log10(noise) if noise > 0 else math.inf


def agreement(
    runner: NcnnRunner,
    runs: Iterable[tuple[Mapping[str, Array], Mapping[str, Array]]],
    manifest: Manifest | None,
    order: NetOrder | None = None,
) -> Agreement:
    """Return the agreement of a net with its model; `runs` are inputs and outputs of the model.

    Without a manifest, all likely ways to feed the net are tried, and the best one counts. A net that sorts is compared
    in its own `order`, with the noise of scores in this order.
    """
    runs = list(runs)
    blobs, agreements, is_exact = runner.output_names(), [], manifest is not None
    for way in input_slots(manifest, runs[0][0], runner.input_names()):
        agreements.append(Agreement())
        for feeds, reference in runs:
            found = read_outputs(runner, way, feeds, reference, manifest, blobs)
            scores: dict[str, Array] = {}
            arrays = {name: array for name, array in found.sorts.items() if not isinstance(array, Failure)}
            if order is not None and len(arrays) == len(found.sorts):
                whole = order.run(feeds, arrays)[1]
                scores = {BEST + sort: whole[FOUND + sort] for sort in arrays}
                reference = {name: whole[name] for name in (*reference, *scores)}
            outputs = {x.name: in_shape_of(reference[x.name], x, y, is_exact=is_exact) for x, y in found.outputs}
            outputs |= scores
            agreements[-1].add(reference, {name: array for name, array in outputs.items() if array is not None})
    return max(agreements, key=lambda agreement: agreement.decibels)
