"""How far an array is from its reference, and whether that is near enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# ncnn has no infinity in its weights and masks, the largest float32 stands for it.
INFINITE = 3.4e38

_LAST_BIT = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Tolerance:
    """What passes: ``max|a-b| <= max(relative * max|b|, absolute)`` over a whole output, with the reference b.

    The rule is about the whole output, because the rounding errors of a sum are as large as its largest terms,
    whatever is left of them. Right conversions stay below 1e-4: float32 sums in another order cost some 1e-6,
    winograd up to 3e-4 of a single layer's largest value, less of the network's. Wrong ones (a lost axis, another
    rounding rule, a swapped weight) are off by 1e-2 and more. `relative` lies between. `absolute` is for outputs
    whose terms have cancelled: there rounding is all that is left to compare. A reference in 16 bits has rounding
    errors of its own, in each of its layers: it is met to `steps` of its last bit.
    """

    relative: float = 1e-3
    absolute: float = 1e-5
    steps: int = 8

    def allowed(self, reference: Array) -> float:
        """The largest difference that passes; integers have to be right."""
        if reference.dtype.kind in "iub":
            return self.relative
        relative = max(self.relative, self.steps * _LAST_BIT.get(reference.dtype.name, 0.0))
        finite = np.abs(reference.astype(np.float64))
        return max(relative * float(np.max(finite, initial=0.0, where=finite < INFINITE)), self.absolute)


DEFAULT = Tolerance()


@dataclass(frozen=True)
class Difference:
    """One output against its reference.

    `max_abs` and `cosine` are over the elements that are finite on both sides; `max_rel` is `max_abs` in units of the
    reference's largest one. `allowed` is what `max_abs` may be. `special` says where NaN or infinity is on one side
    only.
    """

    max_abs: float
    max_rel: float
    cosine: float
    allowed: float
    special: str = ""

    @property
    def ok(self) -> bool:
        """Whether the output agrees with its reference."""
        return not self.special and self.max_abs <= self.allowed


def compare(actual: Array, reference: Array, tolerance: Tolerance = DEFAULT) -> Difference:
    """Compare arrays of one shape; `actual` is ncnn's float32.

    ncnn has no integers that its tools agree on: an integer or bool reference is met by the float32 of the same value,
    or by the int32 of the same value in the bits of the float32. Either way it must be that value, not one nearby.
    """
    a = _numbers(actual, reference) if reference.dtype.kind in "iub" else actual.astype(np.float64)
    b = reference.astype(np.float64)
    special = _special(a, b)
    finite = (np.abs(a) < INFINITE) & (np.abs(b) < INFINITE)
    a, b = a[finite], b[finite]
    largest = float(np.max(np.abs(b), initial=0.0))
    max_abs = float(np.max(np.abs(a - b), initial=0.0))
    return Difference(
        max_abs=max_abs,
        max_rel=max_abs / largest if largest else max_abs,
        cosine=_cosine(a, b),
        allowed=tolerance.allowed(reference),
        special=special,
    )


def _numbers(actual: Array, reference: Array) -> Array:
    """ncnn's array for an integer reference, read as the type that it turns out to hold."""
    if actual.dtype == np.float32:
        bits = actual.view(np.int32)
        # As floats, int32s below 2**23 are subnormal, and negative ones are NaN.
        unlikely = ~(np.abs(actual) >= np.finfo(np.float32).tiny)
        if np.array_equal(bits, reference) or (unlikely.all() and bits.any()):
            return bits.astype(np.float64)
    return actual.astype(np.float64)


def _special(a: Array, b: Array) -> str:
    """Where one side is NaN or infinite and the other is not, in words; empty if nowhere."""
    for name, here, there in (
        ("NaN", np.isnan(a), np.isnan(b)),
        ("+inf", a >= INFINITE, b >= INFINITE),
        ("-inf", a <= -INFINITE, b <= -INFINITE),
    ):
        if not np.array_equal(here, there):
            return f"{name} in {int(here.sum())} of {here.size} elements, in the reference in {int(there.sum())}"
    return ""


def _cosine(a: Array, b: Array) -> float:
    """The cosine of the angle between two vectors; two zero vectors have the same direction, 0 has none of its own."""
    norms = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    if norms:
        return float(np.clip(np.vdot(a, b) / norms, -1.0, 1.0))
    return 1.0 if not a.any() and not b.any() else 0.0
