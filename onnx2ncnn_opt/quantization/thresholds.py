"""The largest number of a blob that int8 keeps, from a histogram of its absolute values."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_STEPS = 127
_CANDIDATES = 100
_PERCENT = 99.99
_CUT = 8  # a cut number's error counts so often: it has one sign, so that sums of products keep it


def minmax(counts: Array, top: float, largest: float) -> float:
    """Return the largest number itself."""
    return largest


def percentile(counts: Array, top: float, largest: float) -> float:
    """Return the number that 99.99 % are below."""
    shares = np.cumsum(counts) / counts.sum()
    return min(float(np.searchsorted(shares, _PERCENT / 100) + 1) * top / counts.size, largest)


def mse(counts: Array, top: float, largest: float) -> float:
    """Return the threshold whose rounding and cutting make the least noise."""
    centres = (np.arange(counts.size) + 0.5) * top / counts.size
    counts = _without_zeros(counts)
    found = []
    for threshold in largest * np.linspace(1 / _CANDIDATES, 1, _CANDIDATES):
        cut = np.maximum(centres - threshold, 0)
        step = threshold / _STEPS
        rounded = np.where(centres < step / 2, centres**2, np.where(centres <= threshold, step**2 / 12, 0))
        found.append((float((counts * (_CUT * cut**2 + rounded)).sum()), float(threshold)))
    return min(found)[1]


def kl(counts: Array, top: float, largest: float) -> float:
    """Return the threshold that changes the distribution least, by the divergence of Kullback and Leibler."""
    best, levels = (np.inf, largest), _STEPS + 1
    counts = _without_zeros(counts)
    for size in range(levels, counts.size + 1, 8):
        kept = counts[:size].astype(np.float64)
        kept[-1] += counts[size:].sum()
        level = np.arange(size) * levels // size
        filled = counts[:size] > 0
        sums = np.bincount(level, counts[:size], levels)
        places = np.maximum(np.bincount(level, filled, levels), 1)
        coarse = np.where(filled, (sums / places)[level], 0.0)
        if not coarse.sum() or not kept.sum():
            continue
        p, q = kept / kept.sum(), coarse / coarse.sum()
        both = (p > 0) & (q > 0)
        divergence = float((p[both] * np.log(p[both] / q[both])).sum() + p[(p > 0) & (q == 0)].sum() * 10)
        best = min(best, (divergence, size * top / counts.size))
    return min(best[1], largest)


def _without_zeros(counts: Array) -> Array:
    """Return counts without the first bin: nearly all of it are zeros, which rounding leaves alone."""
    return np.concatenate([[0], counts[1:]])


METHODS: Mapping[str, Callable[[Array, float, float], float]] = {
    "mse": mse,
    "minmax": minmax,
    "percentile": percentile,
    "kl": kl,
}
