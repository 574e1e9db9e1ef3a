"""The agreement of a net with a reference over many samples: noise in decibels, and equal largest entries."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnx2ncnn_opt.manifest import Manifest
from onnx2ncnn_opt.outputs import OutputReport
from onnx2ncnn_opt.runtime.base import Array, Failure
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner
from onnx2ncnn_opt.runtime.slots import Slot
from onnx2ncnn_opt.verification.net_outputs import OutputComparison, input_slots
from onnx2ncnn_opt.verification.rounding import Rounding
from onnx2ncnn_opt.verification.tolerance import DEFAULT

_RARE = 20  # one of so many bounds may be wrong
_SURE = 1.645  # standard errors that 95 % of normal errors are not above


@dataclass
class Agreement:
    """The power of the noise and of the reference by output; the rows of classes, and those of the same class."""

    noises: dict[str, float] = field(default_factory=dict)
    powers: dict[str, float] = field(default_factory=dict)
    products: dict[str, Array] = field(default_factory=dict)  # of both, summed over samples
    samples: int = 0
    rows: int = 0
    same: int = 0

    def add(self, expected: Mapping[str, Array], found: Mapping[str, Any]) -> None:
        """Take a sample in. An output that is not there, or not finite where the reference is, is all noise."""
        for name, array in expected.items():
            a, actual = array.astype(np.float64), found.get(name)
            difference = np.where(np.isfinite(a), a - (math.nan if actual is None else actual), 0.0)
            noise = float((difference**2).sum()) if np.isfinite(difference).all() else math.inf
            self.noises[name] = self.noises.get(name, 0.0) + noise
            power = float((np.where(np.isfinite(a), a, 0.0) ** 2).sum())
            self.powers[name] = self.powers.get(name, 0.0) + power
            both = np.array([noise, power])
            self.products[name] = self.products.get(name, 0.0) + both[:, None] * both
        self.samples += 1
        name = max(expected, key=lambda name: expected[name].shape[-1] if expected[name].ndim else 0)
        if expected[name].ndim and expected[name].shape[-1] > 1:
            largest, actual = expected[name].argmax(-1), found.get(name)
            self.rows += largest.size
            self.same += 0 if actual is None else int((largest == actual.argmax(-1)).sum())

    @property
    def noise(self) -> float:
        """The noise of the worst output, as a share of its power."""
        return max(
            noise / self.powers[name] if self.powers[name] else math.inf if noise else 0.0
            for name, noise in self.noises.items()
        )

    @property
    def most_noise(self) -> float:
        """The noise of the worst output on other samples: at most this with 95 %, by how far these differ."""
        if not math.isfinite(self.noise):
            return math.inf
        found, count = [0.0], self.samples
        errors = _SURE * (1 + 1 / (count - 1.5)) * math.sqrt(count / (count - 1)) if count > 1 else 0.0  # Student's t
        for name in (name for name, power in self.powers.items() if power):
            share = self.noises[name] / self.powers[name]
            weights = np.array([1.0, -share])
            deviation = math.sqrt(max(weights @ self.products[name] @ weights, 0.0))
            found.append(share + errors * deviation / self.powers[name])
        return max(found)

    @property
    def decibels(self) -> float:
        """The ratio of signal to noise of the worst output."""
        return decibels(self.noise)

    @property
    def top1(self) -> float | None:
        """The share of rows with the same largest entry; None if no output has rows of classes."""
        return self.same / self.rows if self.rows else None

    @property
    def least_top1(self) -> float | None:
        """The same of other samples: at least this with 95 %, by Hoeffding's bound of shares of 0 to 1."""
        if not self.top1:
            return self.top1
        share, rest = self.top1, max(1 - self.top1, 1e-300)
        least = share * np.linspace(0, 1, 10000)[1:-1]
        surprise = share * np.log(share / least) + rest * np.log(rest / (1 - least))
        return float(np.interp(math.log(_RARE) / self.samples, surprise[::-1], least[::-1]))


def decibels(noise: float) -> float:
    """Return a share of noise as the ratio of signal to noise."""
    return -10 * math.log10(noise) if noise > 0 else math.inf


@dataclass(frozen=True)
class _Outputs(OutputComparison):
    """The outputs of a net in the shapes of the model; nothing is judged."""

    seen: dict[str, Array] = field(default_factory=dict)

    def judge(self, slot: Slot, result: Array | Failure) -> OutputReport:
        reference = self.reference[slot.name]
        if not isinstance(result, Failure):
            restored = slot.restored(result, reference.shape) if self.manifest else None
            fits = restored is None and result.size == reference.size
            found = result.reshape(reference.shape) if fits else restored
            if found is not None:
                self.seen[slot.name] = found
        return OutputReport(slot.name, slot.blob, "ok")


def agreement(
    runner: NcnnRunner,
    runs: Iterable[tuple[Mapping[str, Array], Mapping[str, Array]]],
    manifest: Manifest | None,
    rounding: Rounding,
) -> Agreement:
    """Return how far a net agrees with its model; `runs` are inputs and outputs of the model.

    Without a manifest, the likely ways to feed the net are tried on all runs, and the best one counts.
    """
    runs = list(runs)
    blobs, found = runner.output_names(), []
    for way in input_slots(manifest, runs[0][0], runner.input_names()):
        found.append(Agreement())
        for feeds, reference in runs:
            outputs = _Outputs(runner, feeds, reference, manifest, DEFAULT, rounding)
            outputs.attempt(way, blobs)
            found[-1].add(reference, outputs.seen)
    return max(found, key=lambda each: each.decibels)
