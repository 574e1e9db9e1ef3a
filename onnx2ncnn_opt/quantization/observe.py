"""Statistics of a float net's blobs over calibration data: a histogram, the range, the means, and thresholds."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.graph import Graph, Layer
from onnx2ncnn_opt.ir.int8 import LEVELS
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.param.splits import list_layers
from onnx2ncnn_opt.progress import counted
from onnx2ncnn_opt.runtime.base import Feed
from onnx2ncnn_opt.runtime.ncnn import BlobStats, NcnnRunner, WalkStep

_BINS = 2048
_EXCESS, _MAX_EXCESS = 2, 0.5  # numbers of other data may be 1 + min(2 / n, 0.5) times as large as those of n samples

_CANDIDATES = 100
_PERCENT = 99.99
_SATURATION_WEIGHT = 8  # saturation errors have one sign, so sums of products keep them; rounding errors cancel


@dataclass
class Observed:
    """Statistics of a blob. `counts` is a histogram of absolute values up to `top`, a power of two."""

    counts: Array = field(default_factory=lambda: np.zeros(_BINS, np.int64))
    top: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    sums: Array | None = None  # by channel: the last axis of 1-D and 2-D blobs, else the first
    numbers: int = 0  # in each channel
    samples: int = 0
    reached: int = 0  # samples that contain the largest number

    @property
    def largest(self) -> float:
        """The largest absolute value."""
        return max(abs(self.low), abs(self.high))

    @property
    def means(self) -> Array | None:
        """The mean of each channel, rounded to float32, so that the order of samples changes nothing."""
        return None if self.sums is None or not self.numbers else (self.sums / self.numbers).astype(np.float32)

    @property
    def margin(self) -> float:
        """The factor by which numbers of other data may exceed the largest number here.

        A maximum that several samples reach is a limit, for example of ReLU6. No other data exceeds it.
        """
        return 1 + min(_EXCESS / self.samples, _MAX_EXCESS) if self.reached == 1 else 1.0

    def add(self, array: Array) -> None:
        """Add a sample, without a batch axis."""
        before, sizes = self.largest, np.abs(array).ravel()
        self.low, self.high = min(self.low, float(array.min())), max(self.high, float(array.max()))
        self.samples += 1
        self.reached = 1 if self.largest > before or self.samples == 1 else self.reached + int(sizes.max() == before)
        if self.largest > 0:  # zeros fall into the first bin of any histogram
            top = 2.0 ** math.ceil(math.log2(self.largest))
            while 0 < self.top < top:  # bins of powers of two join without a remainder
                self.counts = np.concatenate([self.counts.reshape(-1, 2).sum(axis=1), np.zeros(_BINS // 2, np.int64)])
                self.top *= 2
            self.top = self.top or top
        bins = np.minimum((sizes * (_BINS / (self.top or 1.0))).astype(np.int64), _BINS - 1)
        self.counts += np.bincount(bins, minlength=_BINS)
        channel = array.ndim - 1 if array.ndim < 3 else 0
        sums = array.sum(axis=tuple(axis for axis in range(array.ndim) if axis != channel), dtype=np.float64)
        if self.numbers and (self.sums is None or self.sums.shape != sums.shape):
            self.sums = None  # a dynamic size has no mean for each channel
        else:
            self.sums = sums if self.sums is None else self.sums + sums
        self.numbers += array.size // max(sums.size, 1)

    def percentile(self) -> float:
        """Return the 99.99th percentile."""
        if not self.largest:
            return 1.0
        shares = np.cumsum(self.counts) / self.counts.sum()
        return min(float(np.searchsorted(shares, _PERCENT / 100) + 1) * self.top / _BINS, self.largest)

    def least_error(self) -> float:
        """Return the threshold, the largest number that does not saturate, with the least noise."""
        if not self.largest:
            return 1.0
        centres = (np.arange(_BINS) + 0.5) * self.top / _BINS
        counts = np.concatenate([[0], self.counts[1:]])  # nearly all numbers of the first bin are zeros, which stay
        noises = []
        for threshold in self.largest * np.linspace(1 / _CANDIDATES, 1, _CANDIDATES):
            saturation = np.maximum(centres - threshold, 0) ** 2
            step = threshold / LEVELS
            rounding = np.where(centres < step / 2, centres**2, np.where(centres <= threshold, step**2 / 12, 0))
            noises.append((float((counts * (_SATURATION_WEIGHT * saturation + rounding)).sum()), float(threshold)))
        return min(noises)[1]

    def share_above(self, threshold: float) -> float:
        """Return the share of numbers that saturate at a threshold."""
        first = int(threshold / (self.top or 1.0) * _BINS) + 1
        return float(self.counts[first:].sum() / max(self.counts.sum(), 1))


def observe(
    graph: Graph, runner: NcnnRunner, layers: Iterable[Layer], samples: Collection[Mapping[str, Feed]]
) -> dict[str, Observed]:
    """Return the statistics of each layer's first input, by layer name. Raises UsageError for non-finite numbers."""
    inputs = {layer.name: layer.inputs[0] for layer in layers}
    names = list_layers(graph).tops
    observed = {blob: Observed() for blob in inputs.values()}
    blobs = {names[blob]: blob for layer in graph for blob in layer.outputs if blob in observed}

    def visit(step: WalkStep, stats: BlobStats) -> None:
        assert stats.array is not None
        if not np.isfinite(stats.array).all():
            raise UsageError(f"the blob '{step.blob}' of the float net is NaN or infinite for some of the data")
        for item in stats.array if stats.is_batch else [stats.array]:
            observed[blobs[step.blob]].add(item)

    for feeds in counted(samples, "the float net runs over the data", "samples"):
        runner.walk(feeds, [WalkStep(name, send=True) for name in blobs], visit)
    return {name: observed[blob] for name, blob in inputs.items()}


THRESHOLDS: tuple[Callable[[Observed], float], ...] = (Observed.least_error, Observed.percentile)
