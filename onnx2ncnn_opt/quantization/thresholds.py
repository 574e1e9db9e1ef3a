"""Saturation thresholds of blobs, from a histogram of absolute values."""

from collections.abc import Callable, Mapping

import numpy as np

from onnx2ncnn_opt.ir.weight import Array

_LEVELS = 127
_CANDIDATES = 100
_PERCENT = 99.99
_SATURATION_WEIGHT = 8  # saturation errors have one sign, so sums of products keep them; rounding errors cancel


def minmax(counts: Array, top: float, largest: float) -> float:
    """Return the largest number."""
    return largest


def percentile(counts: Array, top: float, largest: float) -> float:
    """Return the 99.99th percentile."""
    shares = np.cumsum(counts) / counts.sum()
    return min(float(np.searchsorted(shares, _PERCENT / 100) + 1) * top / counts.size, largest)


def mse(counts: Array, top: float, largest: float) -> float:
    """Return the threshold with the least noise of rounding and saturation."""
    centres = (np.arange(counts.size) + 0.5) * top / counts.size
    counts = _without_zeros(counts)
    noises = []
    for threshold in largest * np.linspace(1 / _CANDIDATES, 1, _CANDIDATES):
        saturation = np.maximum(centres - threshold, 0) ** 2
        step = threshold / _LEVELS
        rounding = np.where(centres < step / 2, centres**2, np.where(centres <= threshold, step**2 / 12, 0))
        noises.append((float((counts * (_SATURATION_WEIGHT * saturation + rounding)).sum()), float(threshold)))
    return min(noises)[1]


def kl(counts: Array, top: float, largest: float) -> float:
    """Return the threshold with the least Kullback-Leibler divergence between the distributions before and after."""
    best, levels = (np.inf, largest), _LEVELS + 1
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
    """Return counts without the first bin: nearly all its numbers are zeros, which rounding does not change."""
    return np.concatenate([[0], counts[1:]])


METHODS: Mapping[str, Callable[[Array, float, float], float]] = {
    "mse": mse,
    "minmax": minmax,
    "percentile": percentile,
    "kl": kl,
}
