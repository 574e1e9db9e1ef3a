"""The difference of an array from its reference, and the tolerance for it."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

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
SLICE = 64
_DECIDED = 0.1  # if rounding moves an element by this share of the largest, the element shows nothing about a net
_PART = 2**18  # numbers that are compared at once
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
    sums = _ErrorSums(reference.shape, reference.dtype, tolerance)
    for part in parts(reference.shape):
        sums.add(part, numbers[part], reference[part], None if spread is None else spread[part])
    return sums.difference()


def parts(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Yield the indexes of an array's parts, which have at most `_PART` numbers to save memory."""
    if not shape:
        yield ()
        return
    axis = next(i for i in range(len(shape)) if math.prod(shape[i + 1 :]) <= _PART)
    step = max(1, _PART // max(1, math.prod(shape[axis + 1 :])))
    for outer in np.ndindex(*shape[:axis]):
        for start in range(0, shape[axis], step):
            inner = (slice(None),) * (len(shape) - axis - 1)
            yield (*(slice(i, i + 1) for i in outer), slice(start, start + step), *inner)


class _ErrorSums:
    """The errors of an array, accumulated part by part."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], tolerance: Tolerance) -> None:
        self.tolerance, self.total = tolerance, math.prod(shape)
        self.is_integer = dtype.kind in "iub"  # integers must be equal, whatever their size
        self.relative = max(tolerance.relative, tolerance.steps * LAST_BIT.get(dtype.name, 0.0))
        self.any_finite = False
        self.error = self.counted = self.size = 0.0
        self.squares, self.product, self.noise = [0.0, 0.0], 0.0, 0.0
        self.specials = {name: np.zeros(3, int) for name in _SPECIAL}  # in the array, in its reference, in one only
        # The largest error and the largest value of each slice along an axis.
        is_sliced = tolerance.slices and not self.is_integer
        axes = [axis for axis, count in enumerate(shape) if is_sliced and self.total >= SLICE * count]
        self.slices = {axis: (np.zeros(shape[axis]), np.zeros(shape[axis])) for axis in axes}

    def add(self, part: tuple[slice, ...], actual: Array, reference: Array, spread: Array | None) -> None:
        a, b = actual.astype(np.float64), reference.astype(np.float64)
        steady = np.ones(b.shape, bool) if spread is None else np.isfinite(spread)
        for name, is_special in _SPECIAL.items():
            in_actual, in_reference = is_special(a) & steady, is_special(b) & steady
            self.specials[name] += [x.sum() for x in (in_actual, in_reference, in_actual != in_reference)]
        finite = (np.abs(a) < INFINITE) & (np.abs(b) < INFINITE)
        if not finite.any():
            return
        self.any_finite = True
        a, b = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
        error, size = np.abs(a - b), np.abs(b)
        counted = error if spread is None else np.maximum(error - np.where(finite, spread, 0.0), 0.0)
        is_meaningful = spread is None or spread < _DECIDED * size.max()
        self.error = max(self.error, float(error.max(initial=0.0, where=is_meaningful)))
        self.counted, self.size = max(self.counted, float(counted.max())), max(self.size, float(size.max()))
        # No BLAS: its threads wait for each other on a busy machine, a hundred times as long as the sums take.
        self.squares[0] += float(np.square(a).sum())
        self.squares[1] += float(np.square(b).sum())
        self.product += float((a * b).sum())
        self.noise += float(np.square(error).sum())
        for axis, (errors, sizes) in self.slices.items():
            others = tuple(i for i in range(a.ndim) if i != axis)
            slices = part[axis]
            errors[slices] = np.maximum(errors[slices], counted.max(axis=others))
            sizes[slices] = np.maximum(sizes[slices], size.max(axis=others))

    def difference(self) -> Difference:
        special = ""
        if name := next((name for name, counts in self.specials.items() if counts[2]), None):
            in_actual, in_reference, _ = self.specials[name]
            special = f"{name} in {in_actual} of {self.total} elements, in the reference in {in_reference}"
        if not self.any_finite:
            return Difference(None, None, None, special)
        max_rel = self.error / self.size if self.size else self.error
        return Difference(self.error, max_rel, self.cosine, special, self.excess, self.noise, self.size)

    @property
    def excess(self) -> str:
        """Text with the place where errors exceed the tolerance; empty if there is none."""
        relative, absolute = self.relative, self.tolerance.absolute
        allowed = relative if self.is_integer else max(relative * self.size, absolute)
        if self.counted > allowed:
            beyond = " beyond the effect of rounding" if self.counted < self.error else ""
            return f"off by up to {self.counted:.3g}{beyond}, {allowed:.3g} is allowed"
        for axis, (errors, sizes) in self.slices.items():
            limits = np.maximum(relative * sizes, max(allowed / 10, absolute))
            index = int(np.argmax(errors - limits))
            if errors[index] > limits[index]:
                return (
                    f"off by up to {errors[index]:.3g} at index {index} of axis {axis}, {limits[index]:.3g} is allowed "
                    f"where the model's largest value is {sizes[index]:.3g}"
                )
        return ""

    @property
    def cosine(self) -> float:
        """The cosine between the arrays; 1 for two zero arrays, 0 for a zero array and another."""
        norms = math.sqrt(self.squares[0]) * math.sqrt(self.squares[1])
        return float(np.clip(self.product / norms, -1.0, 1.0)) if norms else float(self.squares == [0.0, 0.0])


def _numbers(actual: Array, reference: Array) -> Array:
    """Return ncnn's array for an integer reference, as int32 if its bits are integers."""
    if actual.dtype == np.float32:
        bits = actual.view(np.int32)
        # As floats, int32s below 2**23 are subnormal, and negative int32s are NaN. Zeros prove nothing; -0.0 has a bit.
        no_floats = ~(np.abs(actual) >= np.finfo(np.float32).tiny)
        if np.array_equal(bits, reference) or (no_floats.all() and actual.any()):
            return bits
    return actual
