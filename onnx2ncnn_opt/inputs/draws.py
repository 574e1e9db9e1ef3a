"""Random inputs for verification, in ranges that suit the model's operators."""

from __future__ import annotations  # NumPy imports its random numbers at the first use

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any, NamedTuple, TypeVar

import numpy as np

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.inputs.given import dtype_of
from onnx2ncnn_opt.inputs.input_uses import Uses
from onnx2ncnn_opt.inputs.pictures import draw_data
from onnx2ncnn_opt.ir.dim import Shape, Sym, named
from onnx2ncnn_opt.onnx.read.binding import InputInfo
from onnx2ncnn_opt.onnx.read.given import parsed_size
from onnx2ncnn_opt.onnx.read.load import LoadedModel
from onnx2ncnn_opt.runtime.base import Array

T = TypeVar("T")


class Total(NamedTuple):
    """A dynamic size that is the sum of two others."""

    name: str
    parts: tuple[str, str]


class Lengths(NamedTuple):
    """Sizes for the model's dynamic axes, by the kind of axis; never square, so that swapped axes show."""

    outer: int
    batch: int
    length: int
    width: int
    tokens: int


# The first suit most models: one image or sentence, long enough for a network that halves five times, short enough for
# the tables of small language models. Then come odd sizes, and others for models that refuse these.
LENGTHS = (
    Lengths(1, 2, 64, 96, 16),
    Lengths(3, 3, 45, 77, 11),
    Lengths(2, 1, 96, 64, 8),
    Lengths(4, 3, 128, 160, 32),
    Lengths(2, 2, 224, 256, 24),
    Lengths(1, 2, 24, 32, 8),  # these two for models that take long, such as attention over an image
    Lengths(3, 3, 15, 21, 5),
    # For models that refuse all of these: a table of eight positions, an STFT of 1024, a network that halves ten times.
    Lengths(2, 2, 5, 7, 4),
    Lengths(3, 1, 3, 2, 2),
    Lengths(1, 1, 2048, 512, 64),
    Lengths(1, 1, 4096, 640, 77),
    Lengths(1, 1, 16000, 1024, 128),
    Lengths(1, 1, 48000, 1024, 256),
)
USUAL = 7  # of these suit most models
_MAX_HEIGHT = 1024  # of an image or a volume
_MAX_TOTALS = 30  # sums, such as n = a + b, to try if the model rejects independent sizes

LARGEST_INPUT = 2**28  # elements; drawing them takes several times their memory

LARGE = 8.0  # the scale at which rare branches act, such as a clip at 6 or a Softplus beyond 20
_OUTLIER = 8.0  # the largest factor of outliers among large numbers
_OUTLIERS_IN, _ZEROS_IN = (8, 2), 16  # one number of 8 is an outlier, of 2 for seeds 2, 3, 6, 7 ...; one of 16 is 0
_CLOSE, _CLOSE_IN = 0.02, 4  # one number of 4 differs by so much, relatively, from one of the first input
_MAX_NUMBER = 80.0  # the exp of larger numbers is infinite, or counts as infinite in ncnn
_CLOSE_SECOND = 0.95  # of the largest number in a row, so that a slightly wrong layer may choose it
_MAX_SWEEPS = 60  # further runs whose indexes sweep a table
_SHORT = 4  # shorter rows keep their last number
_ZERO_LEVELS_IN = 4  # one level of 4 in flat inputs is 0
_CONTRAST = 0.01  # of flat inputs, relative to the scale

# Nets up to these numbers of weights, input elements and layers run on many inputs faster than the runtimes load.
_TINY_WEIGHTS, _TINY_INPUTS, _TINY_LAYERS = 2**17, 2**14, 2**10
_FLAT_AXES = 1, 0, 1, 2, 3  # one for each seed


# The kinds of inputs; docs/verdict.md has the faults that each finds and no other. A user's ranges are none of them.
KINDS = {
    "usual": "N(0, 1) in the domains of functions; after the first also 0, -0, ends of rows, and nearly equal inputs",
    "large": "eight times as large, with outliers: clips, saturation and other branches that seldom act",
    "flat": "different along one axis, and hardly along the others: means, norms, the order of axes",
    "data": "pictures and sounds as in use, else N(0, 1): the error in 16 bits",
}


class Data(NamedTuple):
    """The ranges of natural data: the range of pixels, and the amplitude of sounds; other numbers are N(0, 1)."""

    pixels: tuple[float, float]
    sound: float


# Exported models take pixels divided by 255, around 0 as MediaPipe's, normalised as torchvision's, or bytes.
DATA = (
    Data((0, 1), 0.3),
    Data((-1, 1), 0.3),
    Data((-2.1, 2.6), 0.03),
    Data((0, 255), 3e3),
)


class Draw(NamedTuple):
    """One set of inputs, drawn from a seed at a scale."""

    seed: int
    scale: float = 1.0
    # Inputs have no zeros, and stay in the domains of functions such as Sqrt. In other draws, inputs that the model
    # also compares or selects leave the domains, because guards have to act.
    plain: bool = False
    between: tuple[float, float] | None = None  # floats are uniform between two values
    # Inputs differ along this axis (modulo the rank), and hardly along others: images with little contrast and one
    # negative channel, or sequences whose mean is as large as their numbers.
    flat: int | None = None
    data: Data | None = None  # pictures and sounds where shapes allow it

    @property
    def kind(self) -> str:
        """The name of a kind of `KINDS`, or "" for ranges of the user."""
        if self.between is not None:
            return ""
        names = {"data": self.data is not None, "flat": self.flat is not None, "large": self.scale > 1}
        return next((name for name, is_it in names.items() if is_it), "usual")

    @property
    def is_unusual(self) -> bool:
        """True for stress tests: 32 bits have to be right on them, 16 bits may be too few."""
        return self.kind in ("large", "flat")

    def __str__(self) -> str:
        if self.between is not None:
            return f"seed {self.seed}, inputs from {self.between[0]:g} to {self.between[1]:g}"
        large = "large " if self.flat is not None and self.scale > 1 else ""
        return f"seed {self.seed}, {large}{self.kind}" + ("" if self.flat is None else f" (axis {self.flat})")


def draws(seed: int, *, is_small: bool, is_tiny: bool = False) -> list[Draw]:
    """Return the draws of a verification: usual, large, and for small nets flat; for tiny ones on all axes."""
    result = [Draw(seed, plain=True), Draw(seed, LARGE)]
    axes = _FLAT_AXES if is_tiny else _FLAT_AXES[:1]
    for number, axis in enumerate(axes if is_small else (), seed + 1):
        result += [Draw(number), Draw(number, LARGE), Draw(number, flat=axis), Draw(number, LARGE, flat=axis)]
    return result


def is_tiny(weights: int, inputs: int, layers: int) -> bool:
    """Return True if a net with these numbers of weights, input elements and layers may run on many inputs."""
    return weights <= _TINY_WEIGHTS and inputs <= _TINY_INPUTS and layers <= _TINY_LAYERS


@dataclass(frozen=True)
class Wanted:
    """Draws that replace the usual ones: the number of `seeds`, `ranges` of uniform floats, and dynamic `sizes`."""

    seeds: int = 1
    ranges: tuple[tuple[float, float], ...] = ()
    sizes: tuple[Mapping[str, int], ...] = ()

    def draws(self, seed: int) -> list[Draw]:
        """Return draws for all seeds, from `seed` on; without ranges an ordinary and a large draw for each."""
        seeds = range(seed, seed + self.seeds)
        if self.ranges:
            return [Draw(number, plain=True, between=ends) for number in seeds for ends in self.ranges]
        return [draw for number in seeds for draw in (Draw(number, plain=True), Draw(number, LARGE))]


def sweeps(seed: int, entries: Mapping[T, int], swept: Mapping[T, int]) -> Iterator[Draw]:
    """Yield further draws until the `swept` indexes have read all `entries` of each table."""
    for number in range(_MAX_SWEEPS):
        if all(swept[name] >= size for name, size in entries.items()):
            break
        yield Draw(seed + 3 + number)


def draw_inputs(
    model: LoadedModel,
    sizes: Mapping[str, int] | None = None,
    *,
    draw: Draw = Draw(0, plain=True),  # noqa: B008 - it is immutable
    swept: Mapping[str, int] | None = None,
    most: int = LARGEST_INPUT,
) -> dict[str, Array]:
    """Return an array for every input of the model, the same for the same `draw`.

    1. Indexes are inside their table; 0 if the table's size is unknown. Over several draws they sweep the table: they
       are a part of a shuffled list of all entries, from number `swept` on.
    2. Arguments of functions with a bounded domain (Sqrt, Log, ...) are inside it, and divisors are not near 0. This
       does not hold for guarded inputs (compared or selected as well) of draws that are not plain.
    3. Other floats are N(0,1), or large. If `draw` is not plain, some are 0.0 and -0.0, and some nearly equal those of
       another input. Then rows end with zeros, negative numbers, numbers slightly below the row's largest, or the
       largest.
    4. 8-bit integers are mostly images, and fill their range. If `draw` is not plain, some are 0.
    5. Other integers and bools, and floats that become bools or hide scores, are masks of 0 and 1. Each row starts with
       1, 0: a row without a 1 has no softmax, and a row without a 0 cannot show that the net ignores the mask. Masks
       whose sum must be their length are all 1.
    6. Integers that the model compares with positions, or computes the last position of, are lengths of sequences: half
       of the longest dynamic dimension or more, but not all of it, so that a mask hides something.

    `sizes` gives values to the model's symbolic sizes; the others are `dynamic_sizes`. Raises UsageError for an input
    with an unsupported type or with more than `most` elements.
    """
    sizes, swept = dynamic_sizes(model) | dict(sizes or {}), swept or {}
    uses, fed_back = {value.name: Uses.of(value, model) for value in model.graph.inputs}, states(model)
    shapes = {info.name: _shape(info, sizes, most) for info in model.inputs}
    steps = [
        (isinstance(dim, Sym), size)
        for info in model.inputs
        for dim, size in zip(info.shape[1:], shapes[info.name][1:], strict=True)
    ]
    _, longest = max(steps, default=(False, 1))  # a dynamic dimension if there is one
    drawn: dict[str, Array] = {}
    floats: dict[Uses, Array] = {}  # the first of each use
    for position, info in enumerate(model.inputs):
        # A state is no picture or sound.
        of_input, first = draw._replace(data=None) if info.name in fed_back else draw, swept.get(info.name, 0)
        of_uses, shape = uses[info.name], shapes[info.name]
        array = draw_array(dtype_of(info), of_uses, shape, of_input, position, first, longest)
        if array.dtype.kind == "f" and not (draw.plain or of_uses.is_mask or draw.flat is not None):
            array = _close(array, floats.setdefault(of_uses, array), draw.seed)
        drawn[info.name] = array
    return drawn


def _close(array: Array, first: Array, seed: int) -> Array:
    """Make some numbers of an input nearly equal to those of the first one, because comparisons decide there."""
    if array is first:
        return array
    rng = np.random.default_rng(seed)
    numbers = np.resize(first, array.shape) * (1 + _CLOSE * rng.standard_normal(array.shape))
    return np.where(rng.random(array.shape) < 1 / _CLOSE_IN, numbers, array).astype(array.dtype)


def states(model: LoadedModel) -> set[str]:
    """Return the inputs that may get an output of the run before: one of their shape, and both are not the first."""
    outputs = [(info.dtype, info.shape) for info in model.outputs[1:] if info.shape is not None]
    return {
        info.name
        for info in model.inputs[1:]
        if any(info.dtype == dtype and _may_equal(info.shape, shape) for dtype, shape in outputs)
    }


def _may_equal(shape: Shape, other: Shape) -> bool:
    pairs = zip(shape, other, strict=False)
    return len(shape) == len(other) and all(isinstance(a, Sym) or isinstance(b, Sym) or a == b for a, b in pairs)


def tables(model: LoadedModel) -> dict[str, int]:
    """Return the number of table entries for each input that indexes a table."""
    uses = {value.name: Uses.of(value, model) for value in model.graph.inputs}
    return {info.name: limit for info in model.inputs if (limit := uses[info.name].table) is not None}


def dynamic_sizes(
    model: LoadedModel, lengths: Lengths = LENGTHS[0], batches: Collection[str] = (), total: Total | None = None
) -> dict[str, int]:
    """Return a value for every dynamic size of the model.

    The size of an axis is a field of `lengths`: `batch` for names in `batches`, `outer` on first axes, `tokens` in
    integer inputs, `width` on the last of four axes, else `length`; h of ``8*h`` is an eighth of it. A name that is an
    expression of others (``past + n``) gets the expression's value; `total` is a sum that the names do not show.
    """
    sizes: dict[str, int] = {}
    for info in sorted(model.inputs, key=lambda info: info.dtype.is_floating_point()):
        is_float = info.dtype.is_floating_point()
        for axis, dim in enumerate(info.shape):
            length = lengths.tokens if not is_float else lengths.width if axis == 3 else lengths.length
            if len(info.shape) > 3:
                length = min(length, _MAX_HEIGHT)
            if isinstance(dim, Sym):
                for name in sorted(dim.names()):
                    size = lengths.batch if name in batches else length if axis else lengths.outer
                    sizes.setdefault(name, max(1, size // max(1, dim.terms.get((name,), 1))))
    for name in sizes:
        value = parsed_size(name, {other: sizes[other] for other in sizes if other != name})
        if isinstance(value, int) and value > 0:
            sizes[name] = value
    if total is not None:
        sizes[total.name] = sum(sizes[part] for part in total.parts)
    return sizes


def totals(sizes: Collection[str]) -> Iterator[Total | None]:
    """Yield None, then possible sums of two sizes: a mask's length is the sum of new and previous tokens."""
    pairs = ((name, parts) for name in reversed(list(sizes)) for parts in combinations(sizes, 2) if name not in parts)
    yield None
    yield from (Total(*pair) for pair in islice(pairs, _MAX_TOTALS))


def _shape(info: InputInfo, sizes: Mapping[str, int], most: int) -> tuple[int, ...]:
    shape = named(info.shape, sizes)
    fixed = tuple(dim for dim in shape if isinstance(dim, int))
    if len(fixed) < len(shape) or not 0 < math.prod(fixed) <= most:
        raise UsageError(f"no inputs can be made up for {info}; give other sizes with --shape, or --inputs")
    return fixed


def draw_array(
    dtype: np.dtype[Any],
    uses: Uses,
    shape: tuple[int, ...],
    draw: Draw,
    position: int,
    swept: int,
    longest: int = 1,
) -> Array:
    """Draw the array of the input at a position, see `draw_inputs`."""
    seeds = draw.seed, position, int(draw.scale)  # so that another scale gives other numbers, not only larger ones
    rng = np.random.default_rng(seeds)
    if uses.table is not None:
        order = np.random.default_rng(position).permutation(uses.table)  # the same for each draw
        array: Any = order[(swept + np.arange(math.prod(shape))) % uses.table].reshape(shape)
    elif dtype.kind in "fV" and not uses.is_mask:
        natural, data = None, draw.data
        if data and (uses.is_guarded or not uses.domain):
            natural = draw_data(shape, data.pixels, data.sound, seeds)
        array = _floats(uses, shape, draw, rng) if natural is None else natural
    elif dtype.kind in "iu" and uses.are_lengths:
        array = rng.integers(longest // 2, max(longest - 1, 1), shape, endpoint=True)
    elif dtype.kind in "iu" and uses.divides:
        array = rng.integers(1, 8, shape)
    elif dtype.kind in "iu" and dtype.itemsize == 1:
        levels = rng.integers(np.iinfo(dtype).min, int(np.iinfo(dtype).max) + 1, _levels(shape, draw))
        if not draw.plain:
            levels[rng.random(levels.shape) < 1 / (_ZEROS_IN if draw.flat is None else _ZERO_LEVELS_IN)] = 0
        array = np.broadcast_to(levels, shape)
    elif uses.is_counted:
        array = np.ones(shape)
    else:
        array = rng.integers(0, 2, shape)
        if shape:
            array.reshape(-1)[-1] = draw.plain or (draw.seed + (draw.scale > 1)) % 2
            array[..., 0] = 1
            array[..., 1:2] = 0
    return np.asarray(array).astype(dtype)


def _floats(uses: Uses, shape: tuple[int, ...], draw: Draw, rng: np.random.Generator) -> Array:
    """Draw floats for a draw without data."""
    if draw.between is not None:
        return np.asarray(rng.uniform(*draw.between, shape))
    if draw.flat is not None:
        return _flat(uses, shape, draw, rng)
    is_bounded = (draw.plain and not draw.data) or not uses.is_guarded
    if uses.domain and is_bounded:
        array: Array = np.asarray(rng.uniform(*uses.domain, shape))
        if uses.domain[0] <= 0 <= uses.domain[1] and not draw.plain and not uses.divides:
            array[rng.random(shape) < 1 / _ZEROS_IN] = 0.0
        return array
    array = np.asarray(rng.standard_normal(shape) * draw.scale)
    if uses.divides and is_bounded:
        return array + np.copysign(draw.scale / 4, array)
    if draw.plain:
        return array
    if draw.scale > 1:
        is_outlier = rng.random(shape) < 1 / _OUTLIERS_IN[draw.seed % 4 // 2]
        array *= np.where(is_outlier, rng.uniform(1, _OUTLIER, shape), 1.0)
    array[rng.random(shape) < 1 / _ZEROS_IN] = 0.0
    array[rng.random(shape) < 1 / _ZEROS_IN] *= -0.0
    if array.size > _SHORT:
        _set_ends(array, draw, rng)
    return np.clip(array, -_MAX_NUMBER, _MAX_NUMBER)


def _set_ends(array: Array, draw: Draw, rng: np.random.Generator) -> None:
    """Replace the last number of each row: by the largest numbers, or zeros, a close second, and negative numbers."""
    rows = array if array.shape[-1] > _SHORT else array.reshape(1, -1)
    ends = rows[..., -1:]
    numbers = np.arange(ends.size)[::-1]  # from the last row on, to alternate the kinds of ends
    if draw.scale > 1:
        kinds = [_OUTLIER * draw.scale * rng.uniform(0.5, 1, ends.size) * (-1) ** (numbers + draw.seed)]
    else:
        second = _CLOSE_SECOND * rows.max(axis=-1).reshape(-1)
        below = -np.abs(rng.standard_normal(ends.size))
        kinds = [np.full(ends.size, -0.0), second, np.zeros(ends.size), below]
    ends[...] = np.choose((numbers + draw.seed) % len(kinds), kinds).reshape(ends.shape)


def _flat(uses: Uses, shape: tuple[int, ...], draw: Draw, rng: np.random.Generator) -> Array:
    """Draw numbers that differ along one axis, and hardly along others."""
    levels = _floats(uses, _levels(shape, draw), draw._replace(plain=True, flat=None), rng)
    low, high = uses.domain or (-_MAX_NUMBER, _MAX_NUMBER)
    if uses.divides and low == 0:
        low = _CONTRAST
    elif low <= 0 <= high and not uses.divides:
        levels[rng.random(levels.shape) < 1 / _ZERO_LEVELS_IN] = 0.0
    return np.clip(levels + _CONTRAST * draw.scale * rng.standard_normal(shape), low, high)


def _levels(shape: tuple[int, ...], draw: Draw) -> tuple[int, ...]:
    """Return the shape of the numbers to draw; a flat draw repeats them along the other axes."""
    if draw.flat is None or not shape:
        return shape
    return tuple(size if axis == draw.flat % len(shape) else 1 for axis, size in enumerate(shape))
