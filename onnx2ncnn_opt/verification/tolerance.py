"""The distance of an array from its reference, and the tolerance for it."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onnx2ncnn_opt.outputs import OutputReport, Status
from onnx2ncnn_opt.runtime.base import Array

# ncnn has no infinity in its weights and masks, the largest float32 stands for it; and its vectorised exp stops at
# exp(88.376), which is 2.406e38. From here on a number counts as infinite, on either side.
INFINITE = 2.4e38

LAST_BIT = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Tolerance:
    """The rule for an output: ``max|a-b| <= relative * max|b|``, with the reference b.

    The rule is about the whole output, because the rounding errors of a sum are as large as its largest terms, even if
    little is left of them. But outputs often join unlike things, such as boxes in pixels and scores up to 1. So with
    `slices` the rule also holds for every slice of `SLICE` elements or more along any axis; a slice may always have a
    tenth of the error that the whole may have.

    Of eighty real networks (classification, segmentation, detection, audio, transformers) that other converters got
    right, none was off by more than 2.4e-5, winograd included. Those that they got wrong were off by 1e-1 and more.
    `relative` is between, with room for other processors. `absolute` passes in any case, for outputs whose terms have
    cancelled and left nothing but rounding. A reference in 16 bits has rounding errors of its own, in each of its
    layers: the output may be `steps` of its last bit away.
    """

    relative: float = 1e-3
    absolute: float = 1e-5
    steps: int = 8
    slices: bool = True


DEFAULT = Tolerance()
# The float32 error allowed to ncnn's plain kernels if the effect of rounding on the model is unknown; 2e-5 is usual.
UNKNOWN_ROUNDING = 1e-4
# If rounding alone explains more, the whole output proves nothing: each element gets a limit of its own (`spread`).
MOST_BUDGET = 5e-2
SLICE = 64
# An element that rounding alone moves by this part of the largest one shows nothing about a net.
_DECIDED = 0.1
_PART = 2**18  # numbers that are compared at once
_SPECIAL: Mapping[str, Callable[[Array], Array]] = {
    "NaN": np.isnan,
    "+inf": lambda numbers: numbers >= INFINITE,
    "-inf": lambda numbers: numbers <= -INFINITE,
}


def with_rounding(rounding: float, layers: int, tolerance: Tolerance = DEFAULT) -> Tolerance:
    """Return the tolerance for a net with so many layers whose weights are rounded by up to `rounding` of themselves.

    The roundings of a layer are independent of each other and of those of other layers. So errors add like random
    steps: with the square root of the number of layers. The factor eight is four standard deviations, for the largest
    of many elements, times two, for terms of a layer that cancel.
    """
    return replace(tolerance, relative=max(tolerance.relative, 8 * rounding * math.sqrt(max(layers, 1))))


# The errors of 16 bits in addition to `Tolerance`: relative to the largest value, and absolute. In fp16 a rounding
# moves a number by up to 2^-11 of itself: 2e-2 is forty of these in the same direction. Below 2^-14 fp16 has fewer
# bits, and on some devices none. The steps of bf16 are eight times as coarse, and its range is that of float32. Slices
# are not compared with their own largest values: their terms may be rounded as coarsely as the largest value of all.
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
    """One output against its reference: numbers over the elements that are finite on both sides, None without any.

    `max_abs` and `max_rel` leave out elements that rounding errors decide.
    """

    max_abs: float | None
    max_rel: float | None  # `max_abs` in units of the reference's largest element
    cosine: float | None
    special: str = ""  # where NaN or infinity is on one side only
    excess: str = ""  # where the tolerance is exceeded, and by how much

    @property
    def ok(self) -> bool:
        """True if the output agrees with its reference."""
        return not self.special and not self.excess

    def report(self, name: str, blob: str | None) -> OutputReport:
        """Return the report of an output with this difference, which is a blob of the net."""
        status: Status = "nan" if self.special else "mismatch" if self.excess else "ok"
        numbers = (self.max_abs, self.max_rel, self.cosine)
        return OutputReport(name, blob, status, self.special or self.excess, *numbers)


def compare(actual: Array, reference: Array, tolerance: Tolerance = DEFAULT, spread: Array | None = None) -> Difference:
    """Compare arrays of one shape; `actual` is ncnn's float32.

    ncnn has no integers that its tools agree on. An integer or bool reference agrees with the float32 of exactly that
    value, or with the int32 of it in the bits of the float32.

    `spread` is the distance that the rounding errors of the model's numbers move each element of the reference itself
    (see `verify.rounding`), infinite if the element may be anything. The tolerance grows by this distance.
    """
    given = _numbers(actual, reference) if reference.dtype.kind in "iub" else actual
    if spread is not None and reference.dtype.kind in "iub":  # no rounding makes a number that the type does not have
        low, high = (
            (0, 1) if reference.dtype.kind == "b" else (np.iinfo(reference.dtype).min, np.iinfo(reference.dtype).max)
        )
        spread = np.where((given >= low) & (given <= high), spread, 0.0)
    sums = _ErrorSums(reference.shape, reference.dtype, tolerance)
    for part in parts(reference.shape):
        sums.add(part, given[part], reference[part], None if spread is None else spread[part])
    return sums.difference()


def parts(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Yield the indexes of an array's parts. Each part has so few numbers that a copy of it is small."""
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
    """The errors of an array, taken in part by part."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], tolerance: Tolerance) -> None:
        self.tolerance, self.total = tolerance, math.prod(shape)
        self.is_integer = dtype.kind in "iub"  # right or wrong, however large
        self.relative = max(tolerance.relative, tolerance.steps * LAST_BIT.get(dtype.name, 0.0))
        self.any_finite, self.is_zero = False, True
        self.error = self.counted = self.size = 0.0
        self.squares, self.product = [0.0, 0.0], 0.0
        self.specials = {name: [0, 0] for name in _SPECIAL}
        self.unlike: set[str] = set()
        # The largest of each slice along an axis, where slices are held against their own.
        is_sliced = tolerance.slices and not self.is_integer
        axes = [axis for axis, count in enumerate(shape) if is_sliced and self.total >= SLICE * count]
        self.slices = {axis: (np.zeros(shape[axis]), np.zeros(shape[axis])) for axis in axes}

    def add(self, part: tuple[slice, ...], actual: Array, reference: Array, spread: Array | None) -> None:
        a, b = actual.astype(np.float64), reference.astype(np.float64)
        steady = np.ones(b.shape, bool) if spread is None else np.isfinite(spread)
        for name, is_special in _SPECIAL.items():
            here, there = is_special(a) & steady, is_special(b) & steady
            self.specials[name][0] += int(here.sum())
            self.specials[name][1] += int(there.sum())
            if not np.array_equal(here, there):
                self.unlike.add(name)
        finite = (np.abs(a) < INFINITE) & (np.abs(b) < INFINITE)
        if not finite.any():
            return
        self.any_finite = True
        a, b = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
        error, size = np.abs(a - b), np.abs(b)
        counted = error if spread is None else np.maximum(error - np.where(finite, spread, 0.0), 0.0)
        told = spread is None or spread < _DECIDED * size.max()
        self.error = max(self.error, float(error.max(initial=0.0, where=told)))
        self.counted, self.size = max(self.counted, float(counted.max())), max(self.size, float(size.max()))
        # Not by BLAS, whose threads wait for each other on a busy machine: a hundred times as long as the sums.
        self.squares[0] += float(np.square(a).sum())
        self.squares[1] += float(np.square(b).sum())
        self.product += float((a * b).sum())
        self.is_zero = self.is_zero and not a.any() and not b.any()
        for axis, (errors, sizes) in self.slices.items():
            others = tuple(i for i in range(a.ndim) if i != axis)
            at = part[axis]
            errors[at] = np.maximum(errors[at], counted.max(axis=others))
            sizes[at] = np.maximum(sizes[at], size.max(axis=others))

    def difference(self) -> Difference:
        special = ""
        if unlike := next((name for name in _SPECIAL if name in self.unlike), None):
            here, there = self.specials[unlike]
            special = f"{unlike} in {here} of {self.total} elements, in the reference in {there}"
        if not self.any_finite:
            return Difference(None, None, None, special)
        max_rel = self.error / self.size if self.size else self.error
        return Difference(self.error, max_rel, self.cosine, special, self.excess)

    @property
    def excess(self) -> str:
        """Places where the errors exceed the tolerance for values of this size, in words; empty if there are none."""
        relative, absolute = self.relative, self.tolerance.absolute
        allowed = relative if self.is_integer else max(relative * self.size, absolute)
        if self.counted > allowed:
            return f"off by up to {self.counted:.3g}, {allowed:.3g} is allowed"
        for axis, (errors, sizes) in self.slices.items():
            each = np.maximum(relative * sizes, max(allowed / 10, absolute))
            at = int(np.argmax(errors - each))
            if errors[at] > each[at]:
                return (
                    f"off by up to {errors[at]:.3g} at index {at} of axis {axis}, {each[at]:.3g} is allowed "
                    f"where the model's largest value is {sizes[at]:.3g}"
                )
        return ""

    @property
    def cosine(self) -> float:
        """The cosine of the angle between two vectors; two zero vectors have the same direction, 0 has none."""
        norms = math.sqrt(self.squares[0]) * math.sqrt(self.squares[1])
        return float(np.clip(self.product / norms, -1.0, 1.0)) if norms else float(self.is_zero)


def _numbers(actual: Array, reference: Array) -> Array:
    """Return ncnn's array for an integer reference, as int32 if its bits are those of integers."""
    if actual.dtype == np.float32:
        bits = actual.view(np.int32)
        # As floats, int32s below 2**23 are subnormal, and negative ones are NaN. Zeros are none, though -0.0 has a bit.
        unlikely = ~(np.abs(actual) >= np.finfo(np.float32).tiny)
        if np.array_equal(bits, reference) or (unlikely.all() and actual.any()):
            return bits
    return actual
