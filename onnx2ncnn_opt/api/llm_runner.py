"""The inputs that ncnn_llm's runner makes for a decoder: rotary tables from the settings in model.json, and the mask.

Two kinds of its tables serve. RoPE's frequencies are powers of `rope_theta`. LongRoPE divides each by a factor of its
own, so that it makes any frequencies. It also multiplies its tables by the root of log(n) / log(32768), where n is
`original_max_position_embeddings`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from onnx2ncnn_opt.ir.weight import Array

_UNSCALED = 32768  # n
_EXACT = 1e-5  # the largest relative error of frequencies that are powers
_HIDDEN = np.float32(-1e38)  # in the runner's mask


def rope_settings(cos: Array, sin: Array) -> dict[str, Any]:
    """Return the settings of tables that have these rows at position 1, or multiples of them."""
    half, frequencies = cos.size, np.arctan2(sin, cos).astype(np.float64)
    least = abs(frequencies[-1])  # the most exact one
    theta = float(f"{least ** (half / (1 - half)):.6g}") if half > 1 and least > 0 else 1.0
    if np.allclose(frequencies, theta ** (-np.arange(half) / half), rtol=_EXACT, atol=0):
        return {"type": "RoPE", "rope_head_dim": 2 * half, "rope_theta": theta}
    factors = [float(f"{1 / (frequency or 1e-30):.9g}") for frequency in frequencies]
    lists = {"short_factor": factors, "long_factor": factors, "original_max_position_embeddings": _UNSCALED}
    return {"type": "LongRoPE", "rope_head_dim": 2 * half, "rope_theta": 1.0, **lists}


def rope_tables(settings: Mapping[str, Any], past: int, count: int) -> tuple[Array, Array]:
    """Return the runner's cosines and sines for `count` tokens after `past` ones."""
    half = settings["rope_head_dim"] // 2
    frequencies = settings["rope_theta"] ** (-np.arange(half) / half) / np.array(settings.get("short_factor", 1.0))
    angles = (past + np.arange(count))[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def runner_mask(past: int, count: int, window: int = 0) -> Array:
    """Return the runner's mask, which hides later keys; with a window also the keys before it."""
    gaps = past + np.arange(count)[:, None] - np.arange(past + count)
    return np.where((gaps < 0) | (gaps >= (window or past + count)), _HIDDEN, np.float32(0))


def window_of(mask: Array) -> int:
    """Return the number of keys that the last row of a mask sees; 0 if it sees all."""
    seen = int(np.count_nonzero(hides(mask)[..., -1, :] == 0))
    return seen if seen < mask.shape[-1] else 0


def hides(mask: Array) -> Array:
    """Return a mask with the runner's number for hidden keys."""
    return np.where(mask < -1e3, _HIDDEN, mask)
