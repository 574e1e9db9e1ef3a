"""How far an array is from its reference, and whether that is near enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx2ncnn_opt.errors import UsageError

Array = NDArray[Any]

# ncnn has no infinity in its weights and masks, the largest float32 stands for it; and its vectorised exp stops at
# exp(88.376), which is 2.406e38. From here on a number counts as infinite, on either side.
INFINITE = 2.4e38

LAST_BIT = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Tolerance:
    """What passes: ``max|a-b| <= relative * max|b|`` over an output, with the reference b.

    The rule is about the whole output, because the rounding errors of a sum are as large as its largest terms, whatever
    is left of them. But outputs are often put together from unlike things, such as boxes in pixels and scores up to 1:
    so it holds for every slice of `SLICE` elements or more along any axis as well, where a tenth of what is allowed to
    the whole is allowed in any case.

    Of eighty real networks (classification, segmentation, detection, audio, transformers) that other converters got
    right, none was off by more than 2.4e-5, winograd included; those that they got wrong were off by 1e-1 and more: a
    lost axis, another rounding rule, a swapped weight are no small errors. `relative` is between, with room for other
    processors. `absolute` passes in any case, for outputs whose terms have cancelled and left nothing but rounding. A
    reference in 16 bits has rounding errors of its own, in each of its layers: it is met to `steps` of its last bit.
    Without `slices` only the rule about the whole output holds.
    """

    relative: float = 1e-3
    absolute: float = 1e-5
    steps: int = 8
    slices: bool = True


DEFAULT = Tolerance()
# What ncnn's plain kernels may be off by in float32 where nobody knows what rounding does to the model. Most right nets
# leave some 2e-5.
UNKNOWN_ROUNDING = 1e-4
SLICE = 64


def with_rounding(rounding: float, layers: int, tolerance: Tolerance = DEFAULT) -> Tolerance:
    """What rounding every weight by up to `rounding` of itself may change in a net of so many layers with weights.

    The roundings of a layer are independent of each other and of those of other layers, so that errors add like random
    steps: with the square root of the number of layers. Eight times that is for the largest of many elements (four
    standard deviations), and for what a layer's terms cancel (two).
    """
    return replace(tolerance, relative=max(tolerance.relative, 8 * rounding * math.sqrt(max(layers, 1))))


def with_quantisation(bits: Sequence[int]) -> Tolerance:
    """What a net may differ by whose numbers are quantised to so many bits each, one entry for each time.

    A number next to the middle of two steps is rounded the one way or the other by the last bit of a sum that
    is added up in another order: ONNX Runtime's plain and optimised forms of one quantised U-Net differ from each other
    by 3.6e-2, by as much as ncnn's does from either.
    """
    return with_rounding(max(0.5 / (2**count - 1) for count in bits), len(bits)) if bits else DEFAULT


# What 16 bits may cost beyond `Tolerance`: relative to the largest value, and whatever that is. In fp16 a rounding
# moves a number by up to 2^-11 of itself: 2e-2 is forty of these in the same direction. Below 2^-14 fp16 has fewer bits
# still, and on some devices none. bf16 has eight times as coarse steps as fp16, and the range of float32. Slices are
# not held against their own largest values: what they are sums of may be rounded as coarsely as the largest of all.
_IN_MODE = {"fp32": (0.0, 0.0), "fp16": (2e-2, 2.0**-14), "bf16": (1.6e-1, 0.0)}


def in_mode(mode: str, tolerance: Tolerance = DEFAULT) -> Tolerance:
    """What passes where a net is computed in a mode of `runtime.targets.MODES`."""
    relative, absolute = _IN_MODE[mode]
    return replace(
        tolerance,
        relative=max(tolerance.relative, relative),
        absolute=max(tolerance.absolute, absolute),
        slices=tolerance.slices and mode == "fp32",
    )


def chosen(tolerance: Tolerance, rtol: float | None, atol: float | None) -> Tolerance:
    """The tolerance with the `relative` and `absolute` that a user has chosen; None keeps its own.

    Raises UsageError for what is not a number of 0 or more.
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and (not isinstance(value, (int, float)) or not 0 <= value < math.inf):
            raise UsageError(f"{name} has to be a number of 0 or more, not {value!r:.80}")
    relative = tolerance.relative if rtol is None else float(rtol)
    return replace(tolerance, relative=relative, absolute=tolerance.absolute if atol is None else float(atol))


@dataclass(frozen=True)
class Difference:
    """One output against its reference.

    `max_abs` and `cosine` are over the elements that are finite on both sides, None where there are none; `max_rel` is
    `max_abs` in units of the reference's largest one. `special` says where NaN or infinity is on one side only,
    `excess` where the tolerance is exceeded and by how much; both are empty where nothing is wrong.
    """

    max_abs: float | None
    max_rel: float | None
    cosine: float | None
    special: str = ""
    excess: str = ""

    @property
    def ok(self) -> bool:
        """Whether the output agrees with its reference."""
        return not self.special and not self.excess


def compare(actual: Array, reference: Array, tolerance: Tolerance = DEFAULT, spread: Array | None = None) -> Difference:
    """Compare arrays of one shape; `actual` is ncnn's float32.

    ncnn has no integers that its tools agree on: an integer or bool reference is met by the float32 of the same value,
    or by the int32 of the same value in the bits of the float32. Either way it must be that value, not one nearby.

    `spread` says how far each element of the reference itself moves with the rounding errors of the model's numbers
    (see `verify.rounding`), infinite where it may be anything. So much is allowed besides the tolerance.
    """
    a = _numbers(actual, reference) if reference.dtype.kind in "iub" else actual.astype(np.float64)
    b = reference.astype(np.float64)
    steady = np.ones(b.shape, bool) if spread is None else np.isfinite(spread)
    special = _special(np.where(steady, a, 0.0), np.where(steady, b, 0.0))
    finite = (np.abs(a) < INFINITE) & (np.abs(b) < INFINITE)
    excess = ""
    if finite.any():
        a, b = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
        error, size = np.abs(a - b), np.abs(b)
        counted = error if spread is None else np.maximum(error - np.where(finite, spread, 0.0), 0.0)
        excess = _excess(counted, size, reference.dtype, tolerance)
    else:
        return Difference(None, None, None, special)
    max_abs, largest = float(error.max(initial=0.0)), float(size.max(initial=0.0))
    return Difference(
        max_abs=max_abs,
        max_rel=max_abs / largest if largest else max_abs,
        cosine=_cosine(a, b),
        special=special,
        excess=excess,
    )


def _excess(error: Array, size: Array, dtype: np.dtype[Any], tolerance: Tolerance) -> str:
    """Where the errors are larger than the tolerance allows for values of this size, in words; empty if nowhere."""
    largest = float(size.max(initial=0.0))
    relative = max(tolerance.relative, tolerance.steps * LAST_BIT.get(dtype.name, 0.0))
    integer = dtype.kind in "iub"  # right or wrong, however large
    allowed = relative if integer else max(relative * largest, tolerance.absolute)
    worst = float(error.max(initial=0.0))
    if worst > allowed:
        return f"off by up to {worst:.3g}, {allowed:.3g} is allowed"
    for axis, count in enumerate(error.shape):
        if integer or not tolerance.slices or error.size < SLICE * count:
            continue
        others = tuple(i for i in range(error.ndim) if i != axis)
        errors, sizes = error.max(axis=others), size.max(axis=others)
        each = np.maximum(relative * sizes, max(allowed / 10, tolerance.absolute))
        at = int(np.argmax(errors - each))
        if errors[at] > each[at]:
            return (
                f"off by up to {errors[at]:.3g} at index {at} of axis {axis}, {each[at]:.3g} is allowed "
                f"where the model's largest value is {sizes[at]:.3g}"
            )
    return ""


def _numbers(actual: Array, reference: Array) -> Array:
    """ncnn's array for an integer reference, read as the type that it turns out to hold."""
    if actual.dtype == np.float32:
        bits = actual.view(np.int32)
        # As floats, int32s below 2**23 are subnormal, and negative ones are NaN. Zeros are none, though -0.0 has a bit.
        unlikely = ~(np.abs(actual) >= np.finfo(np.float32).tiny)
        if np.array_equal(bits, reference) or (unlikely.all() and actual.any()):
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
    # Not by BLAS, whose threads wait for each other on a busy machine: a hundred times as long as the sums.
    norms = math.sqrt(float(np.square(a).sum())) * math.sqrt(float(np.square(b).sum()))
    if norms:
        return float(np.clip((a * b).sum() / norms, -1.0, 1.0))
    return 1.0 if not a.any() and not b.any() else 0.0
