"""The difference of an array from its reference, and the tolerance for it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from onnx2ncnn_opt.runtime.base import Array

# Larger numbers count as infinite, in the net and in the reference: ncnn's weights and masks have the largest float32
# instead of infinity, and its vectorised exp stops at exp(88.376), which is 2.406e38. Not a Python number: NumPy would
# cast that to the fp16 of an output, with a warning.
INFINITE = np.float32(2.4e38)

LAST_BIT = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Tolerance:
    """The rule for an output: ``max|a-b| <= relative * max|b|``, with the reference b.

    The rule uses the largest value of the whole output. Rounding errors of a sum are relative to its largest terms,
    even if they cancel. But outputs often join different things, such as boxes in pixels and scores up to 1. So with
    `slices` the rule also holds for every slice of `SLICE` elements or more along any axis. A slice may always have a
    tenth of the error allowed for the whole output.

    Other converters' right nets of eighty real networks (classification, segmentation, detection, audio, transformers)
    had errors up to 2.4e-5, winograd included. Wrong nets had errors of 1e-1 and more. `relative` is between, with a
    margin for other processors. `absolute` always passes, for outputs whose terms have cancelled. A reference in 16
    bits has rounding errors in each of its layers: the output may differ by `steps` units of its last place.
    """

    relative: float = 1e-3
    absolute: float = 1e-5
    steps: int = 8
    slices: bool = True


DEFAULT = Tolerance()
# Always passes. Smaller outputs may come from subnormal partial products, which have few digits.
ALL_SMALL = 2.0**-100
SLICE = 64
_DECIDED = 0.1  # if rounding moves an element by this share of the largest, the element shows nothing about a net
_SPECIAL: Mapping[str, Callable[[Array], Array]] = {
    "NaN": np.isnan,
    "+inf": lambda numbers: numbers >= INFINITE,
    "-inf": lambda numbers: numbers <= -INFINITE,
}


def with_rounding(rounding: float, layers: int, tolerance: Tolerance = DEFAULT) -> Tolerance:
    """Return the tolerance for a net with a number of `layers` whose weights have relative errors up to `rounding`.

    The errors are independent, so their sum grows with the square root of the number of layers. The factor eight is
    four standard deviations, for the largest of many elements, times two, for cancellation in a layer.
    """
    return replace(tolerance, relative=max(tolerance.relative, 8 * rounding * math.sqrt(max(layers, 1))))


# The minimum tolerance of 16 bits: relative to the largest value, and absolute. In fp16 a relative rounding error is up
# to 2^-11: 2e-2 is forty of these in the same direction. Below 2^-14 fp16 has fewer bits, and on some devices none.
# bf16 has steps eight times as coarse, and float32's range. Slices are not compared with their own largest values,
# because their terms may have the rounding errors of the output's largest value.
_IN_MODE = {"fp32": (0.0, 0.0), "fp16": (2e-2, 2.0**-14), "bf16": (1.6e-1, 0.0)}


def in_mode(mode: str, tolerance: Tolerance = DEFAULT) -> Tolerance:
    """Return the tolerance for a net that runs in a mode of `runtime.targets.MODES`."""
    relative, absolute = _IN_MODE[mode]
    return replace(
        tolerance,
        relative=max(tolerance.relative, relative),
        absolute=max(tolerance.absolute, absolute),
        slices=tolerance.slices and mode == "fp32",
    )


@dataclass(frozen=True)
class Difference:
    """The difference of an output from its reference, over elements that are finite in both; None if there are none.

    `max_abs` and `max_rel` leave out elements that rounding errors decide.
    """

    max_abs: float | None
    max_rel: float | None  # `max_abs` relative to the reference's largest element
    cosine: float | None
    special: str = ""  # describes NaN or infinity in only one of the two
    excess: str = ""  # describes the place and size of an error above the tolerance
    noise: float = 0.0  # the sum of the squares of the errors
    size: float = 0.0  # the reference's largest element

    @property
    def problem(self) -> str:
        """Text with the fault of an output; empty if it agrees with its reference."""
        return self.special or self.excess

    @property
    def ok(self) -> bool:
        """True if the output agrees with its reference."""
        return not self.problem


def compare(actual: Array, reference: Array, tolerance: Tolerance = DEFAULT, spread: Array | None = None) -> Difference:
    """Compare arrays of one shape; `actual` is ncnn's float32.

    ncnn's tools disagree about integers. So `actual` has the numbers of an integer or bool reference either as float32
    values, or as the bits of int32.

    `spread` is the effect of rounding errors on each element of the reference (see `Rounding.spread`), infinite if any
    value is right. The tolerance grows by the spread.
    """
    is_integer = reference.dtype.kind in "iub"
    numbers = _numbers(actual, reference) if is_integer else actual
    if spread is not None and is_integer:  # rounding cannot leave the type's range
        is_bool = reference.dtype.kind == "b"
        low, high = (0, 1) if is_bool else (np.iinfo(reference.dtype).min, np.iinfo(reference.dtype).max)
        spread = np.where((numbers >= low) & (numbers <= high), spread, 0.0)
    a, b, special = numbers, reference, ""
    if not (_is_usual(a) and _is_usual(b)):
        a, b = a.astype(np.float64), b.astype(np.float64)
        is_finite = (np.abs(a) < INFINITE) & (np.abs(b) < INFINITE)
        special = _special(a, b, np.bool_(True) if spread is None else np.isfinite(spread))
        if not is_finite.any():
            return Difference(None, None, None, special)
        a, b = np.where(is_finite, a, 0.0), np.where(is_finite, b, 0.0)
    error, sizes = np.abs(a - b), np.abs(b)
    max_abs, size, counted = float(error.max()), float(sizes.max()), error
    if spread is not None:
        max_abs = float(error.max(initial=0.0, where=spread < _DECIDED * size))
        counted = np.maximum(error - spread, 0.0)
    steps = tolerance.steps * LAST_BIT.get(reference.dtype.name, 0.0)
    tolerance = replace(tolerance, relative=max(tolerance.relative, steps))
    excess = _excess(counted, sizes, max_abs, tolerance, is_integer=is_integer)
    return Difference(max_abs, max_abs / (size or 1.0), _cosine(a, b), special, excess, _product(error, error), size)


def _is_usual(array: Array) -> bool:
    """Return True for floats that need no copy in float64: their differences are finite in float32."""
    is_float = array.dtype in (np.float32, np.float64) and array.size > 0
    return is_float and bool(array.min() > -INFINITE / 2 and array.max() < INFINITE / 2)


def _special(a: Array, b: Array, is_steady: Array | np.bool_) -> str:
    """Return text about NaN or infinity in only one of two arrays; empty if there is none."""
    for name, is_special in _SPECIAL.items():
        in_a, in_b = is_special(a) & is_steady, is_special(b) & is_steady
        if (in_a != in_b).any():
            return f"{name} in {in_a.sum()} of {a.size} elements, in the reference in {in_b.sum()}"
    return ""


def _excess(errors: Array, sizes: Array, max_abs: float, tolerance: Tolerance, *, is_integer: bool) -> str:
    """Return text with the place where errors exceed the tolerance; empty if there is none."""
    relative, absolute, largest = tolerance.relative, tolerance.absolute, float(errors.max())
    # Integers must be equal, whatever their size.
    allowed = relative if is_integer else max(relative * float(sizes.max()), absolute)
    if largest > allowed:
        beyond = " beyond the effect of rounding" if largest < max_abs else ""
        return f"off by up to {largest:.3g}{beyond}, {allowed:.3g} is allowed"
    for axis, count in enumerate(errors.shape if tolerance.slices and not is_integer else ()):
        if errors.size < SLICE * count:
            continue
        others = tuple(i for i in range(errors.ndim) if i != axis)
        error, size = errors.max(axis=others), sizes.max(axis=others)
        limits = np.maximum(relative * size, max(allowed / 10, absolute))
        index = int(np.argmax(error - limits))
        if error[index] > limits[index]:
            return (
                f"off by up to {error[index]:.3g} at index {index} of axis {axis}, {limits[index]:.3g} is allowed "
                f"where the model's largest value is {size[index]:.3g}"
            )
    return ""


def _cosine(a: Array, b: Array) -> float:
    """Return the cosine between arrays; 1 for two zero arrays, 0 for a zero array and another."""
    powers = _product(a, a), _product(b, b)
    norms = math.sqrt(powers[0]) * math.sqrt(powers[1])
    return float(np.clip(_product(a, b) / norms, -1.0, 1.0)) if norms else float(powers == (0.0, 0.0))


def _product(a: Array, b: Array) -> float:
    """Return a scalar product, without BLAS: its threads wait for each other on a busy machine."""
    return float(np.einsum("i,i->", a.reshape(-1), b.reshape(-1), dtype=np.float64))


def _numbers(actual: Array, reference: Array) -> Array:
    """Return ncnn's array for an integer reference, as int32 if its bits are integers."""
    if actual.dtype == np.float32:
        bits = actual.view(np.int32)
        # As floats, int32s below 2**23 are subnormal, and negative int32s are NaN. Zeros prove nothing; -0.0 has a bit.
        no_floats = ~(np.abs(actual) >= np.finfo(np.float32).tiny)
        if np.array_equal(bits, reference) or (no_floats.all() and actual.any()):
            return bits
    return actual
