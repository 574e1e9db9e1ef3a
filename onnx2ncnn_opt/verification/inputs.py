"""Random inputs for verification, in ranges that suit the model's operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import onnx_ir

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.dim import Sym
from onnx2ncnn_opt.ir.reached import reached
from onnx2ncnn_opt.onnx.ops import traits_of
from onnx2ncnn_opt.onnx.read.binding import InputInfo
from onnx2ncnn_opt.onnx.read.given import parsed_size
from onnx2ncnn_opt.onnx.read.load import LoadedModel
from onnx2ncnn_opt.onnx.registry import Traits
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.verification.given_inputs import dtype_of

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
    # For models that refuse all of these: a table of eight positions, an STFT of 1024, a network that halves ten times.
    Lengths(2, 2, 5, 7, 4),
    Lengths(3, 1, 3, 2, 2),
    Lengths(1, 1, 2048, 512, 64),
    Lengths(1, 1, 4096, 640, 77),
    Lengths(1, 1, 16000, 1024, 128),
    Lengths(1, 1, 48000, 1024, 256),
)
_MAX_HEIGHT = 1024  # of an image or a volume
_MAX_TOTALS = 30  # sums, such as n = a + b, to try if the model rejects independent sizes

LARGEST_INPUT = 2**28  # elements; drawing them takes several times their memory

LARGE = 8.0  # the scale at which rare branches act, such as a clip at 6 or a Softplus beyond 20
_HUGE = 32.0  # the scale at which outliers reach the limit of exp
_OUTLIER = 8.0  # the largest factor of outliers among large numbers
_OUTLIERS_IN, _ZEROS_IN = 8, 16  # one number of 8 is an outlier, one of 16 is a zero
_MAX_NUMBER = 80.0  # the exp of larger numbers is infinite, or counts as infinite in ncnn
_CLOSE_SECOND = 0.95  # of the largest number in a row, so that a slightly wrong layer may choose it
_MAX_SWEEPS = 60  # further runs whose indexes sweep a table
_SHORT = 4  # shorter rows keep their last number
_ZERO_LEVELS_IN = 4  # one level of 4 in flat inputs is 0
_HIDING = -1e4  # added to a score: its exp is 0
_CONTRAST = 0.01  # of flat inputs, relative to the scale

# Factor and summand with which a node makes its result of the input at an index, and of a number as the other input.
_AFFINE: Mapping[tuple[str, int], Callable[[float], tuple[float, float]]] = {
    **dict.fromkeys([("Add", 0), ("Add", 1)], lambda number: (1.0, number)),
    **dict.fromkeys([("Mul", 0), ("Mul", 1)], lambda number: (number, 0.0)),
    ("Sub", 0): lambda number: (1.0, -number),
    ("Sub", 1): lambda number: (-1.0, number),
    ("Div", 0): lambda number: (1.0 / number, 0.0),
}
_COMPARISONS = frozenset(("Less", "LessOrEqual", "Greater", "GreaterOrEqual"))
_MOVES = frozenset(("Cast", "Expand", "Identity", "Reshape", "Squeeze", "Unsqueeze"))
_ARITHMETIC = _MOVES | {"Add", "Ceil", "Div", "Floor", "Max", "Min", "Mul", "Sub"}

_COLOURS, _SHORTEST_SIDE = (1, 3, 4), 16  # of a picture
# Things in a picture, the background among them: their radii relative to the longer side, the standard deviations of
# slimness and tilt, the range of their greys, the deviation of channels, and the largest contrast of their texture.
_THINGS, _RADII, _SHAPES = 30, (0.06, 0.5), (0.4, 0.7)
_GREYS, _COLOUR, _TEXTURE = (0.15, 0.85), 0.1, 0.15
_STEREO, _SHORTEST_SOUND = 2, 400
_SILENCE = 0.01  # the amplitude of pauses, relative to loud parts

# Nets up to these numbers of weights, input elements and layers run on many inputs faster than the runtimes load.
_TINY_WEIGHTS, _TINY_INPUTS, _TINY_LAYERS = 2**17, 2**14, 2**10
_MORE_SEEDS = 4


class Data(NamedTuple):
    """The ranges of natural data: the range of pixels, the amplitude of sounds, and the scale of other numbers."""

    pixels: tuple[float, float]
    sound: float
    scale: float


# Exported models take pixels divided by 255, normalised numbers, or bytes.
DATA = (Data((0, 1), 0.3, 1.0), Data((-2.1, 2.6), 0.03, 0.1), Data((0, 255), 3e3, 10.0))


class Draw(NamedTuple):
    """One set of inputs, drawn from a seed at a scale."""

    seed: int
    scale: float = 1.0
    # Inputs have no zeros, and stay in the domains of functions such as Sqrt. In other draws, inputs that the model
    # also compares or selects leave the domains, because guards have to act.
    plain: bool = False
    below: bool = False  # rows of a large draw that is not plain end with large negative numbers
    between: tuple[float, float] | None = None  # floats are uniform between two values
    # Inputs differ along this axis (modulo the rank), and hardly along others: images with little contrast and one
    # negative channel, or sequences whose mean is as large as their numbers.
    flat: int | None = None
    data: Data | None = None  # pictures and sounds where shapes allow it
    spiked: bool = False  # one number of each row is far above the others: softmax gives 0 elsewhere

    def __str__(self) -> str:
        if self.between is not None:
            return f"seed {self.seed}, inputs from {self.between[0]:g} to {self.between[1]:g}"
        scaled = f", inputs times {self.scale:g}" if self.scale != 1 else ""
        scaled += ", one far above the others in each row" if self.spiked else ""
        return f"seed {self.seed}{scaled}" + ("" if self.flat is None else f", flat but for axis {self.flat}")


def draws(seed: int, *, is_small: bool, is_tiny: bool = False) -> list[Draw]:
    """Return the draws of a verification: plain and large; for a small net also flat, for a tiny one many more."""
    result = [Draw(seed, plain=True), Draw(seed, LARGE)]
    if is_small:
        result += [Draw(seed + 1), Draw(seed + 1, LARGE, below=True)]
        result += [Draw(seed + 2), Draw(seed + 2, flat=1), Draw(seed + 2, LARGE, flat=1)]
    if is_small and is_tiny:
        result.append(Draw(seed + 2, _HUGE))  # errors would be too large in large networks
        result.append(Draw(seed + 2, LARGE, spiked=True))
        for axis in range(_MORE_SEEDS):
            more = seed + 3 + axis
            result += [Draw(more), Draw(more, LARGE), Draw(more, flat=axis), Draw(more, LARGE, flat=axis)]
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
    3. Other floats are N(0,1), or large. If `draw` is not plain, some are 0.0 and -0.0. Then rows end with zeros,
       negative numbers, numbers slightly below the row's largest, or the largest.
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
    uses = {value.name: Uses.of(value, model) for value in model.graph.inputs}
    shapes = {info.name: _shape(info, sizes, most) for info in model.inputs}
    steps = [
        (isinstance(dim, Sym), size)
        for info in model.inputs
        for dim, size in zip(info.shape[1:], shapes[info.name][1:], strict=True)
    ]
    _, longest = max(steps, default=(False, 1))  # a dynamic dimension if there is one
    return {
        info.name: draw_array(
            dtype_of(info), uses[info.name], shapes[info.name], draw, position, swept.get(info.name, 0), longest
        )
        for position, info in enumerate(model.inputs)
    }


def tables(model: LoadedModel) -> dict[str, int]:
    """Return the number of table entries for each input that indexes a table."""
    uses = {value.name: Uses.of(value, model) for value in model.graph.inputs}
    return {info.name: limit for info in model.inputs if (limit := uses[info.name].table) is not None}


def dynamic_sizes(
    model: LoadedModel, lengths: Lengths = LENGTHS[0], batches: Collection[str] = (), total: Total | None = None
) -> dict[str, int]:
    """Return a value for every dynamic size of the model.

    The value is a field of `lengths`: `batch` for names in `batches`, `outer` on first axes, `tokens` in integer
    inputs, `width` on the last of four axes, else `length`. A name that is an expression of others (``past + n``) gets
    the expression's value; `total` is a sum that the names do not show.
    """
    sizes: dict[str, int] = {}
    for info in sorted(model.inputs, key=lambda info: info.dtype.is_floating_point()):
        is_float = info.dtype.is_floating_point()
        for axis, dim in enumerate(info.shape):
            length = lengths.tokens if not is_float else lengths.width if axis == 3 else lengths.length
            if len(info.shape) > 3:
                length = min(length, _MAX_HEIGHT)
            for name in sorted(dim.names()) if isinstance(dim, Sym) else ():
                sizes.setdefault(name, lengths.batch if name in batches else length if axis else lengths.outer)
    for name in sizes:
        size = parsed_size(name, {other: sizes[other] for other in sizes if other != name})
        if isinstance(size, int) and size > 0:
            sizes[name] = size
    if total is not None:
        sizes[total.name] = sum(sizes[part] for part in total.parts)
    return sizes


def totals(sizes: Collection[str]) -> Iterator[Total | None]:
    """Yield None, then possible sums of two sizes: a mask's length is the sum of new and previous tokens."""
    pairs = ((name, parts) for name in reversed(list(sizes)) for parts in combinations(sizes, 2) if name not in parts)
    yield None
    yield from (Total(*pair) for pair in islice(pairs, _MAX_TOTALS))


def _shape(info: InputInfo, sizes: Mapping[str, int], most: int) -> tuple[int, ...]:
    shape = tuple(dim.subs(sizes) if isinstance(dim, Sym) else dim for dim in info.shape)
    fixed = tuple(dim for dim in shape if isinstance(dim, int))
    if len(fixed) < len(shape) or not 0 < math.prod(fixed) <= most:
        raise UsageError(f"no inputs can be made up for {info}; give other sizes with --shape, or --inputs")
    return fixed


@dataclass(frozen=True)
class Uses:
    """The uses of an input's values in the model, also after nodes that only move them."""

    table: int | None  # the size of the smallest table that they index
    domain: tuple[float, float] | None  # the common domain of the functions that take them
    divides: bool  # they are divisors, or a divisor is 0 if they are
    is_guarded: bool  # they are compared or selected
    is_mask: bool = False  # they become bools; or they, or 1 minus them, multiply a number that hides scores
    is_counted: bool = False  # they are a mask whose sum must be its length
    are_lengths: bool = False  # numbers computed from them are compared with positions, or index a dynamic axis

    @classmethod
    def of(cls, value: onnx_ir.Value, model: LoadedModel) -> Uses:
        """Return the uses of an input."""
        uses = [(node, index, _traits(node, model)) for node, index in _uses(value, model)]
        divisions = [node for node, index in _uses(value, model, zeros=True) if _traits(node, model).divisor == index]
        quotients = [node for by in divisions for node, _ in _uses(by.outputs[0], model)]
        inverses = [node.outputs[0] for node, index, _ in uses if node.op_type == "Sub" and index == 1]
        return cls(
            table=min((_size_of_axis(node) for node, index, traits in uses if traits.indexes == index), default=None),
            domain=_common(_domains(value, model)),
            divides=bool(divisions),
            is_guarded=any(_traits(node, model).selects for node in (*quotients, *(node for node, _, _ in uses))),
            is_mask=any(_becomes_bool(node) for node, _, _ in uses)
            or any(_hides(node) for mask in (value, *inverses) for node, _ in _uses(mask, model)),
            is_counted=any(_traits(user, model).counts == index for user, index in _uses_of_sums(uses, model)),
            are_lengths=len(value.shape or ()) < 2 and _are_lengths(value, model),
        )


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
        natural = _draw_data(shape, draw.data, seeds) if draw.data and not uses.domain else None
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
    if draw.spiked:
        return _spiked(_floats(uses, shape, draw._replace(plain=True, spiked=False), rng), uses, rng)
    is_bounded = draw.plain or not uses.is_guarded
    if uses.domain and is_bounded:
        array: Array = np.asarray(rng.uniform(*uses.domain, shape))
        if uses.domain[0] <= 0 <= uses.domain[1] and not draw.plain and not uses.divides:
            array[rng.random(shape) < 1 / _ZEROS_IN] = 0.0
        return array
    array = np.asarray(rng.standard_normal(shape) * (draw.data.scale if draw.data else draw.scale))
    if uses.divides and is_bounded:
        return array + np.copysign(draw.scale / 4, array)
    if draw.plain:
        return array
    if draw.scale > 1:
        array *= np.where(rng.random(shape) < 1 / _OUTLIERS_IN, rng.uniform(1, _OUTLIER, shape), 1.0)
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
        kinds = [_OUTLIER * draw.scale * rng.uniform(0.5, 1, ends.size) * (-1) ** (numbers + draw.below)]
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


def _spiked(array: Array, uses: Uses, rng: np.random.Generator) -> Array:
    """Put a number far above the others into each row, unless a function bounds them."""
    if uses.domain is None and array.ndim and array.shape[-1] > _SHORT:
        rows = array.reshape(-1, array.shape[-1])
        rows[np.arange(len(rows)), rng.integers(rows.shape[1], size=len(rows))] = _MAX_NUMBER
    return np.clip(array, -_MAX_NUMBER, _MAX_NUMBER)


def _draw_data(shape: tuple[int, ...], data: Data, seeds: tuple[int, ...]) -> Array | None:
    """Draw pictures, or a sound with pauses; return None for other shapes."""
    if (picture := _picture(shape, seeds)) is not None:
        low, high = data.pixels
        return np.asarray(low + (high - low) * picture)
    if shape and shape[-1] >= _SHORTEST_SOUND and math.prod(shape[:-1]) <= _STEREO:
        rng = np.random.default_rng(seeds)
        loudness = np.maximum(_smooth(shape, (-1,), rng), _SILENCE)
        return np.asarray(data.sound * loudness * rng.standard_normal(shape))
    return None


@lru_cache(maxsize=2)  # draws with other ranges of pixels reuse the picture
def _picture(shape: tuple[int, ...], seeds: tuple[int, ...]) -> Array | None:
    """Draw a picture of textured things with edges, as in photographs, in 0..1; return None for shapes of no picture.

    Pictures of a batch show the same things in other colours.
    """
    axes = picture_axes(shape)
    if axes is None:
        return None
    rng = np.random.default_rng(seeds)
    channels, height, width = (shape[axis] for axis in axes)
    things, texture = _things(height, width, rng), _smooth((height, width, 1), (0, 1), rng)
    pictures = math.prod(shape) // (channels * height * width)
    greys = rng.uniform(*_GREYS, (pictures, _THINGS, 1))
    colours = greys + _COLOUR * rng.standard_normal((pictures, _THINGS, channels))
    picture: Array = colours[:, things] + rng.uniform(0, _TEXTURE, (_THINGS, 1))[things] * texture
    picture = (picture - picture.min()) / np.ptp(picture)
    return (np.moveaxis(picture, -1, -3) if axes[0] == -3 else picture).reshape(shape)


def _things(height: int, width: int, rng: np.random.Generator) -> Array:
    """Draw ellipses and rhombs, small ones in front ("dead leaves"); return the number of the thing at each pixel."""
    smallest, largest = (share * max(height, width) for share in _RADII)
    # Radii of things at random distances have a density of r^-3, so that of r^-2 is uniform.
    radii = rng.uniform(largest**-2, smallest**-2, _THINGS - 1) ** -0.5
    things = np.zeros((height, width), np.intp)  # 0 is the background
    for number, radius in enumerate(sorted(radii, reverse=True), 1):
        y, x, slimness, tilt = rng.uniform(0, height), rng.uniform(0, width), *rng.normal(0, _SHAPES)
        down, right = radius * math.exp(slimness), radius * math.exp(-slimness)
        reach = right + abs(tilt) * down
        rows, columns = (slice(max(int(at - size), 0), int(at + size) + 1) for at, size in ((y, down), (x, reach)))
        dy = ((np.arange(height) - y) / down)[rows, None]
        dx = ((np.arange(width) - x) / right)[columns] - tilt * down / right * dy
        things[rows, columns][dy * dy + dx * dx < 1 if number % 2 else abs(dy) + abs(dx) < 1] = number
    return things


def picture_axes(shape: Sequence[int]) -> tuple[int, int, int] | None:
    """Return the axes of a picture's channels, height and width; None for shapes of no picture."""
    for channels, height, width in ((-3, -2, -1), (-1, -3, -2)):
        if len(shape) > 2 and shape[channels] in _COLOURS and min(shape[height], shape[width]) >= _SHORTEST_SIDE:
            return channels, height, width
    return None


def _smooth(shape: Sequence[int], axes: Sequence[int], rng: np.random.Generator) -> Array:
    """Draw numbers of variance 1 with the 1/f spectrum of photographs along axes."""
    spectrum = np.fft.rfftn(rng.standard_normal(shape), axes=axes)
    squares: Any = 0
    for axis in axes:
        along = [1] * len(shape)
        along[axis] = -1
        frequencies = np.fft.rfftfreq if axis == axes[-1] else np.fft.fftfreq
        squares = squares + np.square(frequencies(shape[axis]) * shape[axis]).reshape(along)
    smooth = np.fft.irfftn(spectrum / np.maximum(squares, 1) ** 0.75, [shape[axis] for axis in axes], axes)
    return np.asarray(smooth / (smooth.std() or 1))


def _levels(shape: tuple[int, ...], draw: Draw) -> tuple[int, ...]:
    """Return the shape of the numbers to draw; a flat draw repeats them along the other axes."""
    if draw.flat is None or not shape:
        return shape
    return tuple(size if axis == draw.flat % len(shape) else 1 for axis, size in enumerate(shape))


def _traits(node: onnx_ir.Node, model: LoadedModel) -> Traits:
    return traits_of(node.domain, node.op_type, model.opsets.get(node.domain, 1))


def _uses(value: onnx_ir.Value, model: LoadedModel, *, zeros: bool = False) -> Iterator[tuple[onnx_ir.Node, int]]:
    """Yield every node that takes the elements of `value`, moved, resized or not, and the index of that input.

    With `zeros` yield also nodes that take values which are 0 if these are, such as multiples, and sums of floats.
    """
    has_sums = zeros and value.dtype is not None and value.dtype.is_floating_point()
    means = ("Resize", "ReduceSum", "ReduceMean") if has_sums else ("Resize",)

    def copies(value: onnx_ir.Value) -> Iterator[onnx_ir.Value]:
        for node, index in value.uses():
            traits = _traits(node, model)
            if traits.moves_input(index) or (zeros and traits.keeps_zeros) or (not index and node.op_type in means):
                yield from node.outputs

    yield from (use for copy in reached([value], copies) for use in copy.uses())


def _domains(value: onnx_ir.Value, model: LoadedModel) -> Iterator[tuple[float, float]]:
    """Yield the domains of functions that take `value`, or a multiple of it plus a number: log(250 * x + 0.05)."""

    def results(known: tuple[onnx_ir.Value, float, float]) -> Iterator[tuple[onnx_ir.Value, float, float]]:
        for node, index in _uses(known[0], model):
            if (affine := _AFFINE.get((node.op_type, index))) is None or (other := node.inputs[1 - index]) is None:
                continue
            if (
                (constant := other.const_value) is not None
                and constant.size == 1
                and (number := constant.numpy().item())
            ):
                factor, summand = affine(number)
                yield node.outputs[0], known[1] * factor, known[2] * factor + summand

    for result, factor, summand in reached([(value, 1.0, 0.0)], results):
        for node, index in _uses(result, model):
            if (ends := (_traits(node, model).domains or {}).get(index)) and factor:
                low, high = sorted((end - summand) / factor for end in ends)
                yield low, high


def _common(domains: Iterable[tuple[float, float]]) -> tuple[float, float] | None:
    """Return the numbers of all domains, without those that would leave none; None without domains."""
    low, high = -math.inf, math.inf
    for other in sorted(domains, reverse=True):
        if max(low, other[0]) < min(high, other[1]):
            low, high = max(low, other[0]), min(high, other[1])
    return (low, high) if low < high < math.inf else None


def _uses_of_sums(
    uses: Iterable[tuple[onnx_ir.Node, int, Traits]], model: LoadedModel
) -> Iterator[tuple[onnx_ir.Node, int]]:
    """Yield the uses of sums, and of sums minus a constant."""
    for total in (node.outputs[0] for node, _, _ in uses if node.op_type == "ReduceSum"):
        for node, index in _uses(total, model):
            yield node, index
            if node.op_type == "Sub":
                yield from _uses(node.outputs[0], model)


def _are_lengths(value: onnx_ir.Value, model: LoadedModel) -> bool:
    """Return True if numbers computed from a value are compared with 0, 1, 2, ..., or index a dynamic axis."""
    results = reached(
        [value], lambda item: (out for node, _ in item.uses() if node.op_type in _ARITHMETIC for out in node.outputs)
    )
    for result in results:
        for node, index in result.uses():
            if node.op_type in _COMPARISONS and any(map(_are_positions, filter(None, node.inputs))):
                return True
            if result is not value and _traits(node, model).indexes == index and _size_of_axis(node) == 1:
                return True
    return False


def _are_positions(value: onnx_ir.Value) -> bool:
    node = value.producer()
    while node is not None and node.op_type in _MOVES and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    if node is not None:
        return node.op_type == "Range"
    tensor = value.const_value
    return tensor is not None and tensor.size > 1 and bool((tensor.numpy().ravel() == np.arange(tensor.size)).all())


def _hides(node: onnx_ir.Node) -> bool:
    """Return True if a node multiplies a mask by a number such as -1e4, which hides scores."""
    tensors = [value.const_value for value in node.inputs if value is not None] if node.op_type == "Mul" else []
    return any(t is not None and t.size == 1 and t.numpy().item() <= _HIDING for t in tensors)


def _becomes_bool(node: onnx_ir.Node) -> bool:
    return node.op_type == "Cast" and node.attributes.get_int("to", 0) == onnx_ir.DataType.BOOL


def _size_of_axis(node: onnx_ir.Node) -> int:
    """Return the number of entries of a Gather's table; 1 if unknown."""
    table, axis = node.inputs[0], node.attributes.get_int("axis", 0)
    # Exporters leave out the shapes between a quantised table and its Gather.
    while table is not None and table.shape is None and (producer := table.producer()) is not None:
        if producer.op_type not in ("Cast", "DequantizeLinear", "Identity"):
            break
        table = producer.inputs[0]
    shape = (table.shape if table is not None else None) or ()
    size = shape[axis] if -len(shape) <= axis < len(shape) else 1
    return size if isinstance(size, int) and size > 0 else 1
