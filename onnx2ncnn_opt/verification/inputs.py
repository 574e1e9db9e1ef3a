"""Inputs to verify with, drawn from a seed so that they mean something to the model."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
    """A dynamic size that is the sum of others."""

    name: str
    parts: tuple[str, str]


class Lengths(NamedTuple):
    """Sizes for the model's dynamic axes, by the kind of input; never square, so that a mix-up shows."""

    outer: int
    batch: int
    length: int
    width: int
    tokens: int


# First such that suit most models: one image or sentence, long enough for a network that halves five times, short
# enough for the tables of small language models. Then odd ones, and others for models that do not take these.
LENGTHS = (
    Lengths(1, 2, 64, 96, 16),
    Lengths(3, 3, 45, 77, 11),
    Lengths(2, 1, 96, 64, 8),
    Lengths(4, 3, 128, 160, 32),
    Lengths(2, 2, 224, 256, 24),
    # For models that take none of these: a table of eight positions, an STFT of 1024, a network that halves ten times.
    Lengths(2, 2, 5, 7, 4),
    Lengths(3, 1, 3, 2, 2),
    Lengths(1, 1, 2048, 512, 64),
    Lengths(1, 1, 4096, 640, 77),
    Lengths(1, 1, 16000, 1024, 128),
    Lengths(1, 1, 48000, 1024, 256),
)
_TALLEST = 1024  # an image or a volume
_MOST_TOTALS = 30  # sums, such as n = a + b, to try if the model rejects independent sizes

LARGEST_INPUT = 2**30

# The scale at which branches act that seldom do, such as a clip at 6 or a Softplus beyond 20.
LARGE = 8.0
_FAR = 32.0  # and at which the largest ones are about as large as an exp can take
_FARTHEST = 8.0  # times more are the largest numbers among large ones
_FAR_IN, _ZEROS_IN = 8, 16  # one number of so many is far out, one is a zero
_HIGHEST = 80.0  # the exp of larger ones is infinite, or what ncnn takes for it
_NEARLY = 0.95  # of the largest number in a row: what is a little wrong takes it for that
_MOST_SWEEPS = 60  # further runs that take indexes through a table
_SHORT = 4  # rows of so few numbers keep their last one
_ZERO_LEVELS_IN = 4  # one level of flat inputs is 0
_HIDING = -1e4  # beside a score: exp gives 0
_CONTRAST = 0.01  # of flat inputs, in units of the scale

_COLOURS, _SHORTEST_SIDE = (1, 3, 4), 16  # of a picture
_COLOUR = 0.3  # the difference of channels, in units of their contrast
_STEREO, _SHORTEST_SOUND = 2, 400
_SILENCE = 0.01  # is never complete, in units of what is loud

# A net of so few weights, numbers and layers takes no longer for many sets of inputs than to load the runtimes.
_TINY_WEIGHTS, _TINY_INPUTS, _TINY_LAYERS = 2**17, 2**14, 2**10
_MORE_SEEDS = 4


class Data(NamedTuple):
    """The sizes of numbers in data: the range of pixels, the amplitude of sounds, and the scale of everything else."""

    pixels: tuple[float, float]
    sound: float
    scale: float


# What exporters' models take: bytes, numbers divided by 255, or normalised ones.
DATA = (Data((0, 1), 0.3, 1.0), Data((-2.1, 2.6), 0.03, 0.1), Data((0, 255), 3e3, 10.0))


class Draw(NamedTuple):
    """One set of inputs, drawn from a seed at a scale.

    Plain inputs have no zeros, and all keep within the domains of the functions at their end. In other draws, inputs
    that the model compares or selects as well have no bounds, because a guard is there to act. Their rows end with the
    largest numbers, which are `below` zero or above it, or with zeros if the scale is 1. Rows that are `spiked` have
    one number far above the others: a normalised row reaches its limit there, and a softmax is 0 elsewhere. Floats are
    uniform `between` two values, if given. Inputs like `data` are smooth pictures and sounds where shapes allow it.
    Flat inputs differ along axis `flat` modulo the rank, and hardly along others: images without contrast that have a
    whole channel below zero, or sequences whose mean is as large as they are.
    """

    seed: int
    scale: float = 1.0
    plain: bool = False
    below: bool = False
    between: tuple[float, float] | None = None
    flat: int | None = None
    data: Data | None = None
    spiked: bool = False

    def __str__(self) -> str:
        if self.between is not None:
            return f"seed {self.seed}, inputs from {self.between[0]:g} to {self.between[1]:g}"
        scaled = f", inputs times {self.scale:g}" if self.scale != 1 else ""
        scaled += ", one far above the others in each row" if self.spiked else ""
        return f"seed {self.seed}{scaled}" + ("" if self.flat is None else f", flat but for axis {self.flat}")


def draws(seed: int, *, is_small: bool, is_tiny: bool = False) -> list[Draw]:
    """Return the inputs to verify with: plain and large ones; for a small net also flat ones, for a tiny one more."""
    found = [Draw(seed, plain=True), Draw(seed, LARGE)]
    if is_small:
        found += [Draw(seed + 1), Draw(seed + 1, LARGE, below=True)]
        found += [Draw(seed + 2), Draw(seed + 2, flat=1), Draw(seed + 2, LARGE, flat=1)]
    if is_small and is_tiny:
        found.append(Draw(seed + 2, _FAR))  # whose errors would be too large in large networks
        found.append(Draw(seed + 2, LARGE, spiked=True))
        for axis in range(_MORE_SEEDS):
            turn = seed + 3 + axis
            found += [Draw(turn), Draw(turn, LARGE), Draw(turn, flat=axis), Draw(turn, LARGE, flat=axis)]
    return found


def is_tiny(weights: int, inputs: int, layers: int) -> bool:
    """Return True if a net with so many weights, for so many numbers, may run on many inputs."""
    return weights <= _TINY_WEIGHTS and inputs <= _TINY_INPUTS and layers <= _TINY_LAYERS


@dataclass(frozen=True)
class Wanted:
    """Draws that replace the usual ones: so many `seeds`, floats uniform in each of `ranges`, at `sizes` by name."""

    seeds: int = 1
    ranges: tuple[tuple[float, float], ...] = ()
    sizes: tuple[Mapping[str, int], ...] = ()

    def draws(self, seed: int) -> list[Draw]:
        """Return the inputs of so many seeds, from `seed` on; without ranges ordinary and large ones of each."""
        seeds = range(seed, seed + self.seeds)
        if self.ranges:
            return [Draw(number, plain=True, between=ends) for number in seeds for ends in self.ranges]
        return [draw for number in seeds for draw in (Draw(number, plain=True), Draw(number, LARGE))]


def sweeps(seed: int, entries: Mapping[T, int], swept: Mapping[T, int]) -> Iterator[Draw]:
    """Yield further inputs, until so many indexes were `swept` that each table of so many entries has been read."""
    for number in range(_MOST_SWEEPS):
        if all(swept[name] >= size for name, size in entries.items()):
            break
        yield Draw(seed + 3 + number)


def draw_inputs(
    model: LoadedModel,
    sizes: Mapping[str, int] | None = None,
    *,
    draw: Draw = Draw(0, plain=True),  # noqa: B008 - it is immutable
    swept: Mapping[str, int] | None = None,
) -> dict[str, Array]:
    """Return an array for every input of the model, the same for the same `draw`.

    1. Indexes into a table are within the table; 0 if the table's size is unknown. Indexes sweep it: they are a part
       of a shuffled list of all, from number `swept` of the input on.
    2. Arguments of a function with a bounded domain (Sqrt, Log, ...) are inside it, and divisors are not near 0, unless
       the model compares or selects them as well and `draw` is not plain.
    3. Other floats are N(0,1), or large ones. If `draw` is not plain some are 0.0 and -0.0, and rows end with these,
       with numbers below zero or nearly as large as others, or with the largest of all.
    4. 8 bit integers, which are mostly images, fill their range. If `draw` is not plain some are 0.
    5. Other integers and bools, and floats that say where scores are hidden, are taken for masks: 0 or 1. Each row
       starts with 1, 0: a row without a 1 has no softmax, and one without a 0 cannot show that the net ignores the
       mask. One whose sum has to be its length is all 1.

    `sizes` gives values to the model's symbolic sizes; the others are `dynamic_sizes`. Raises UsageError for an input
    of a type that cannot be drawn, or an absurdly large one.
    """
    known, swept = dynamic_sizes(model) | dict(sizes or {}), swept or {}
    uses = {value.name: Uses.of(value, model) for value in model.graph.inputs}
    return {
        info.name: draw_array(
            dtype_of(info), uses[info.name], _shape(info, known), draw, position, swept.get(info.name, 0)
        )
        for position, info in enumerate(model.inputs)
    }


def tables(model: LoadedModel) -> dict[str, int]:
    """Return the number of entries of the tables that inputs are indexes into, by the inputs' names."""
    uses = {value.name: Uses.of(value, model) for value in model.graph.inputs}
    return {info.name: limit for info in model.inputs if (limit := uses[info.name].table) is not None}


def dynamic_sizes(
    model: LoadedModel, lengths: Lengths = LENGTHS[0], batches: Collection[str] = (), total: Total | None = None
) -> dict[str, int]:
    """Return a value for every dynamic size of the model.

    It is the batch of `lengths` for names of `batches`, its outer on an outermost axis, else its tokens if an integer
    input has them, its width on the last of four axes, and its length elsewhere. A size that its name computes from
    others (``past + n``) gets that value; `total` is a sum that only the model knows.
    """
    sizes: dict[str, int] = {}
    for info in sorted(model.inputs, key=lambda info: info.dtype.is_floating_point()):
        is_float = info.dtype.is_floating_point()
        for axis, dim in enumerate(info.shape):
            length = lengths.tokens if not is_float else lengths.width if axis == 3 else lengths.length
            if len(info.shape) > 3:
                length = min(length, _TALLEST)
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
    """Yield None, then sizes that may be the sum of two others: a mask's length is that of new and previous tokens."""
    pairs = ((name, parts) for name in reversed(list(sizes)) for parts in combinations(sizes, 2) if name not in parts)
    yield None
    yield from (Total(*pair) for pair in islice(pairs, _MOST_TOTALS))


def _shape(info: InputInfo, sizes: Mapping[str, int]) -> tuple[int, ...]:
    shape = tuple(dim.subs(sizes) if isinstance(dim, Sym) else dim for dim in info.shape)
    fixed = tuple(dim for dim in shape if isinstance(dim, int))
    if len(fixed) < len(shape) or not 0 < math.prod(fixed) <= LARGEST_INPUT:
        raise UsageError(f"no inputs can be made up for {info}; give other sizes with --shape, or --inputs")
    return fixed


@dataclass(frozen=True)
class Uses:
    """The uses of an input's values in the model, whether or not layers move them."""

    table: int | None  # the size of the smallest table that they are indexes into
    domain: tuple[float, float] | None  # the range in which the functions at their end are real numbers
    divides: bool  # they are divisors, or a divisor is 0 if they are
    is_guarded: bool  # they are compared or selected
    is_mask: bool = False  # they, or 1 minus them, multiply a number that hides
    is_counted: bool = False  # they are a mask whose sum has to be its length

    @classmethod
    def of(cls, value: onnx_ir.Value, model: LoadedModel) -> Uses:
        """Return the uses of an input."""
        uses = [(node, index, _traits(node, model)) for node, index in _uses(value, model)]
        divisions = [node for node, index in _uses(value, model, zeros=True) if _traits(node, model).divisor == index]
        quotients = [node for by in divisions for node, _ in _uses(by.outputs[0], model)]
        rests = [node.outputs[0] for node, index, _ in uses if node.op_type == "Sub" and index == 1]
        domains = [traits.domains[index] for _, index, traits in uses if traits.domains and index in traits.domains]
        return cls(
            table=min((_size_of_axis(node) for node, index, traits in uses if traits.indexes == index), default=None),
            domain=(max(low for low, _ in domains), min(high for _, high in domains)) if domains else None,
            divides=bool(divisions),
            is_guarded=any(_traits(node, model).selects for node in (*quotients, *(node for node, _, _ in uses))),
            is_mask=any(_fills(node) for each in (value, *rests) for node, _ in _uses(each, model)),
            is_counted=any(_traits(user, model).counts == index for user, index in _uses_of_sums(uses, model)),
        )


def draw_array(
    dtype: np.dtype[Any], uses: Uses, shape: tuple[int, ...], draw: Draw, position: int, swept: int
) -> Array:
    """Draw the array of the input at a position, see `draw_inputs`."""
    # The scale takes part, so that the numbers are others and not larger ones only.
    seeds = draw.seed, position, int(draw.scale)
    rng = np.random.default_rng(seeds)
    if uses.table is not None:
        order = np.random.default_rng(position).permutation(uses.table)  # the same for each draw
        array: Any = order[(swept + np.arange(math.prod(shape))) % uses.table].reshape(shape)
    elif dtype.kind in "fV" and not uses.is_mask:
        found = _draw_data(shape, draw.data, seeds) if draw.data and not uses.domain else None
        array = _floats(uses, shape, draw, rng) if found is None else found
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
    if draw.between is not None:
        return np.asarray(rng.uniform(*draw.between, shape))
    if draw.flat is not None:
        return _flat(uses, shape, draw, rng)
    if draw.spiked:
        return _spiked(_floats(uses, shape, draw._replace(plain=True, spiked=False), rng), uses, rng)
    bounded = draw.plain or not uses.is_guarded
    array: Array
    if uses.domain and bounded:
        array = np.asarray(rng.uniform(*uses.domain, shape))
        if uses.domain[0] <= 0 <= uses.domain[1] and not draw.plain and not uses.divides:
            array[rng.random(shape) < 1 / _ZEROS_IN] = 0.0
        return array
    array = np.asarray(rng.standard_normal(shape) * (draw.data.scale if draw.data else draw.scale))
    if uses.divides and bounded:
        return array + np.copysign(draw.scale / 4, array)
    if draw.plain:
        return array
    if draw.scale > 1:
        array *= np.where(rng.random(shape) < 1 / _FAR_IN, rng.uniform(1, _FARTHEST, shape), 1.0)
    array[rng.random(shape) < 1 / _ZEROS_IN] = 0.0
    array[rng.random(shape) < 1 / _ZEROS_IN] *= -0.0
    if array.size > _SHORT:
        ends = array[..., -1:] if shape[-1] > _SHORT else array.reshape(-1)[-1:]
        turn = np.arange(ends.size)[::-1]  # the last of all is the first in turn
        if draw.scale > 1:
            kinds = [_FARTHEST * draw.scale * rng.uniform(0.5, 1, ends.size) * (-1) ** (turn + draw.below)]
        else:
            nearly = _NEARLY * (array.max(axis=-1) if shape[-1] > _SHORT else array.max()).reshape(-1)
            below = -np.abs(rng.standard_normal(ends.size))
            kinds = [np.full(ends.size, -0.0), nearly, np.zeros(ends.size), below]
        ends[...] = np.choose((turn + draw.seed) % len(kinds), kinds).reshape(ends.shape)
    return np.clip(array, -_HIGHEST, _HIGHEST)


def _flat(uses: Uses, shape: tuple[int, ...], draw: Draw, rng: np.random.Generator) -> Array:
    """Draw numbers that differ along one axis, and hardly along others."""
    levels = _floats(uses, _levels(shape, draw), draw._replace(plain=True, flat=None), rng)
    low, high = uses.domain or (-_HIGHEST, _HIGHEST)
    if uses.divides and low == 0:
        low = _CONTRAST
    elif low <= 0 <= high and not uses.divides:
        levels[rng.random(levels.shape) < 1 / _ZERO_LEVELS_IN] = 0.0
    return np.clip(levels + _CONTRAST * draw.scale * rng.standard_normal(shape), low, high)


def _spiked(array: Array, uses: Uses, rng: np.random.Generator) -> Array:
    """Put a number far above the others into each row, unless a function bounds them."""
    if uses.domain is None and array.ndim and array.shape[-1] > _SHORT:
        rows = array.reshape(-1, array.shape[-1])
        rows[np.arange(len(rows)), rng.integers(rows.shape[1], size=len(rows))] = _HIGHEST
    return np.clip(array, -_HIGHEST, _HIGHEST)


def _draw_data(shape: tuple[int, ...], data: Data, seeds: tuple[int, ...]) -> Array | None:
    """Draw smooth pictures, or a sound with pauses; None for a shape of neither."""
    if (picture := _picture(shape, seeds)) is not None:
        low, high = data.pixels
        return np.asarray(low + (high - low) * picture)
    if shape and shape[-1] >= _SHORTEST_SOUND and math.prod(shape[:-1]) <= _STEREO:
        rng = np.random.default_rng(seeds)
        loud = np.maximum(_smooth(shape, (-1,), rng), _SILENCE)
        return np.asarray(data.sound * loud * rng.standard_normal(shape))
    return None


@lru_cache(maxsize=2)  # the same picture is wanted with several ranges of pixels
def _picture(shape: tuple[int, ...], seeds: tuple[int, ...]) -> Array | None:
    """Draw a smooth picture of pixels in 0..1; None for a shape of none."""
    rng = np.random.default_rng(seeds)
    for channels, sides in ((-3, (-2, -1)), (-1, (-3, -2))):
        if len(shape) > 2 and shape[channels] in _COLOURS and min(shape[side] for side in sides) >= _SHORTEST_SIDE:
            grey_shape = list(shape)
            grey_shape[channels] = 1
            picture = _smooth(grey_shape, sides, rng) + _COLOUR * _smooth(shape, sides, rng)
            return np.asarray((picture - picture.min()) / np.ptp(picture))
    return None


def _smooth(shape: Sequence[int], axes: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Draw numbers of variance 1 whose spectrum along axes falls as that of photographs: the amplitude with 1/f."""
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
    """Return the shape of the drawn numbers, which are repeated along the other axes if the draw is flat."""
    if draw.flat is None or not shape:
        return shape
    return tuple(size if axis == draw.flat % len(shape) else 1 for axis, size in enumerate(shape))


def _traits(node: onnx_ir.Node, model: LoadedModel) -> Traits:
    return traits_of(node.domain, node.op_type, model.opsets.get(node.domain, 1))


def _uses(value: onnx_ir.Value, model: LoadedModel, *, zeros: bool = False) -> Iterator[tuple[onnx_ir.Node, int]]:
    """Yield every node that takes the values of `value`, perhaps moved about, and the index of that input.

    With `zeros` also nodes that take other values, which are 0 if these are.
    """

    def copies(value: onnx_ir.Value) -> Iterator[onnx_ir.Value]:
        for node, index in value.uses():
            traits = _traits(node, model)
            if traits.moves_input(index) or (zeros and traits.keeps_zeros):
                yield from node.outputs

    yield from (use for each in reached([value], copies) for use in each.uses())


def _uses_of_sums(
    uses: Iterable[tuple[onnx_ir.Node, int, Traits]], model: LoadedModel
) -> Iterator[tuple[onnx_ir.Node, int]]:
    """Yield the uses of sums, and of numbers that are less by a constant."""
    for total in (node.outputs[0] for node, _, _ in uses if node.op_type == "ReduceSum"):
        for node, index in _uses(total, model):
            yield node, index
            if node.op_type == "Sub":
                yield from _uses(node.outputs[0], model)


def _fills(node: onnx_ir.Node) -> bool:
    """Return True if a node multiplies by the number that hides scores behind a mask."""
    tensors = [each.const_value for each in node.inputs if each is not None] if node.op_type == "Mul" else []
    return any(each is not None and each.size == 1 and each.numpy().item() <= _HIDING for each in tensors)


def _size_of_axis(node: onnx_ir.Node) -> int:
    """Return the number of entries that a Gather chooses from; 1 if unknown."""
    table, axis = node.inputs[0], node.attributes.get_int("axis", 0)
    # Exporters leave out the shapes between a table and its Gather where the table is quantised.
    while table is not None and table.shape is None and (made_by := table.producer()) is not None:
        if made_by.op_type not in ("Cast", "DequantizeLinear", "Identity"):
            break
        table = made_by.inputs[0]
    shape = (table.shape if table is not None else None) or ()
    size = shape[axis] if -len(shape) <= axis < len(shape) else 1
    return size if isinstance(size, int) and size > 0 else 1
