"""Comparison of ncnn's arrays with a reference: the package's own, with a tolerance for each element."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.verdict.errors import INFINITE, LAST_BIT, Tolerance, compare

# What is allowed to one element: this share of itself, this share of the largest one (sums cancel), and this much (all
# of them may have cancelled; operands are near 1). ncnn's vectorised exp, log and tanh are off by up to 1e-6.
RELATIVE, OF_LARGEST, ABSOLUTE = 2e-5, 2e-6, 5e-7
# All that is allowed is said for each element.
_NONE = Tolerance(relative=0.0, absolute=0.0, steps=0, slices=False)


def first_difference(actual: Sequence[Array | None], reference: Sequence[Any], relative: float = RELATIVE) -> str:
    """Return the first difference of the outputs, in words; empty if there is none. Outputs of None are left out."""
    for i, (a, b) in enumerate(zip(actual, reference, strict=True)):
        found = "" if a is None else difference(a, np.asarray(b), relative)
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
    """Return the difference of ncnn's output from its reference, in words; empty if there is none."""
    if actual.shape != (reference.shape or (1,)):
        return f"shape {list(actual.shape)} for {list(reference.shape)}"
    size = np.abs(reference.astype(np.float64))
    size = np.where(size < INFINITE, size, 0.0)
    bit = 4 * LAST_BIT.get(reference.dtype.name, 0.0)  # references of 16 bits are rounded in each of their steps
    allowed = (relative + bit) * size + (of_largest + bit / 4) * size.max(initial=0.0) + absolute
    spread = None if reference.dtype.kind in "iub" else allowed
    found = compare(actual.reshape(reference.shape), reference, _NONE, spread)
    return found.special or (found.excess and f"{found.excess} beyond rounding")
