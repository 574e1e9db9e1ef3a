"""Whether ncnn's arrays are those of a reference: for tests and scripts, apart from the comparison that is tested."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.verification.compare import INFINITE

# What is allowed to one element: this share of itself, this share of the largest one (sums cancel), and this much (all
# of them may have cancelled; operands are near 1). ncnn's vectorised exp, log and tanh are off by up to 1e-6.
RELATIVE, OF_LARGEST, ABSOLUTE = 2e-5, 2e-6, 5e-7
# References of 16 bits are rounded in each of their steps.
_LAST_BIT = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


def first_difference(actual: Sequence[Array], reference: Sequence[Any], relative: float = RELATIVE) -> str:
    """Where the outputs differ, in words; empty if nowhere."""
    for i, (a, b) in enumerate(zip(actual, reference, strict=True)):
        found = difference(a, np.asarray(b), relative)
        if found:
            return f"output {i}: {found}"
    return ""


def difference(
    actual: Array,
    reference: Array,
    relative: float = RELATIVE,
    *,
    of_largest: float = OF_LARGEST,
    absolute: float = ABSOLUTE,
) -> str:
    """How an output of ncnn differs from its reference; empty if it does not."""
    if actual.shape != (reference.shape or (1,)):
        return f"shape {list(actual.shape)} for {list(reference.shape)}"
    actual = actual.reshape(reference.shape)
    if reference.dtype.kind in "iub":
        same = (actual == reference) | (actual.view(np.int32) == reference)
        return "" if same.all() else f"integers differ: {actual[~same][0]} for {reference[~same][0]}"
    # The largest number stands for infinity where ncnn has none: in the padding of MaxPool, in bounds.
    a, b = (np.clip(array.astype(np.float64), -INFINITE, INFINITE) for array in (actual, reference))
    largest = np.abs(b[np.abs(b) < INFINITE]).max(initial=0)
    bit = 4 * _LAST_BIT.get(reference.dtype.name, 0.0)
    allowed = (relative + bit) * np.abs(b) + (of_largest + bit / 4) * largest + absolute
    same = np.where(np.abs(b) < INFINITE, np.abs(a - b) <= allowed, a == b) | (np.isnan(a) & np.isnan(b))
    return "" if same.all() else f"{(~same).sum()} of {a.size} differ, {a[~same][0]:.9g} for {b[~same][0]:.9g}"
