"""The conversion of the model's arrays to a net's Mats and back, for `Net` and for verification."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from onnx2ncnn_opt.errors import UsageError, VerificationError
from onnx2ncnn_opt.manifest import Entry, Image, Manifest, fits, limit_of, multiple_of
from onnx2ncnn_opt.onnx.read.given import parsed_size
from onnx2ncnn_opt.runtime.base import Array, Feed, Fetch, Step


class Slot(NamedTuple):
    """A blob of the net for an input or output of the model."""

    name: str
    blob: str
    batch_axis: int | None  # the array's axis that is the Mat's batch
    integer: bool = False  # elements of an output are int32 instead of float32
    image: Image | None = None  # the net takes pixels instead of the model's input
    length: tuple[str, str] | None = None  # a row as long as the tokens of these two inputs, ids and a past
    boxes: str | None = None  # see `Fetch`

    @classmethod
    def of(cls, entry: Entry) -> "Slot":
        """Return the slot of a manifest's entry."""
        is_integer = entry.element == "int32"
        return cls(entry.name, entry.blob, entry.batch_axis, is_integer, entry.image, entry.length, entry.boxes)

    @property
    def fetch(self) -> Fetch:
        """The blob to read, with its batch axis and type."""
        return Fetch(self.blob, self.batch_axis, self.integer, self.boxes)

    def restored(self, array: Array, shape: Sequence[int | None]) -> Array | None:
        """Return a fetched array in the model's shape (None for an unknown size); None if it does not fit.

        A Mat has rank 1 to 4. For a model's output of another rank, sizes of 1 do not count.
        """
        dims = len(shape) - (self.batch_axis is not None)
        if 1 <= dims <= 4:
            fits = array.ndim == len(shape) and all(w in (None, n) for n, w in zip(array.shape, shape, strict=True))
            return array if fits else None
        sizes = [size for size in shape if size is not None]
        if len(sizes) == len(shape):
            return array.reshape(sizes) if alike(array.shape, sizes) else None
        return array.reshape(-1) if len(shape) == 1 and alike(array.shape, [array.size]) else None


def alike(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Return True if shapes are equal without sizes of 1."""
    return [size for size in shape if size != 1] == [size for size in other if size != 1]


def check_fed(fed: Collection[str], blobs: Collection[str], names: Collection[str]) -> None:
    """Raise VerificationError if an input blob of the net gets no value, because ncnn would crash."""
    if unfed := set(blobs) - set(fed):
        unknown = ", ".join(sorted(unfed))
        raise VerificationError(f"the net's input {unknown} is none of the model's, which are {', '.join(names)}")


def feeds_of(slots: Sequence[Slot], arrays: Mapping[str, Array]) -> dict[str, Feed]:
    """Return the feeds of a net by blob, from the model's arrays."""
    return {
        slot.blob: Feed(_tokens(*slot.length, arrays) if slot.length else arrays[slot.name], slot.batch_axis)
        for slot in slots
    }


def _tokens(ids: str, past: str, arrays: Mapping[str, Array]) -> Array:
    """Return a row of ones, as long as the new and the past tokens together."""
    return np.ones((1, arrays[ids].shape[-1] + arrays[past].shape[-2]), np.int32)


@dataclass(eq=False, repr=False)
class StepFeeds(Mapping[str, Array]):
    """The model's arrays of a decoder's step: its `own` arrays, and the first `past` rows of `pasts`.

    `pasts` has, by input name, the caches after the last step and their axis of tokens; all steps share it. `caches`
    are their blobs in the net, as for `Step`.
    """

    own: Mapping[str, Array]
    pasts: Mapping[str, tuple[Array, int]]
    past: int
    caches: Sequence[tuple[str, str]]
    before: "StepFeeds | None"
    _step: Step | None = None

    def __getitem__(self, name: str) -> Array:
        if name not in self.pasts:
            return self.own[name]
        array, axis = self.pasts[name]
        return array[(*[slice(None)] * axis, slice(self.past))]

    def __iter__(self) -> Iterator[str]:
        return iter((*self.own, *self.pasts))

    def __len__(self) -> int:
        return len(self.own) + len(self.pasts)

    def step(self, slots: Sequence[Slot]) -> Step:
        """Return the feeds of the net, each time the same object: a runner compares steps by identity."""
        if self._step is None:
            before = None if self.before is None else self.before.step(slots)
            own = [slot for slot in slots if slot.name in self.own or slot.length]
            self._step = Step(model_feeds(own, dict(self)), self.caches, self.past, before)
        return self._step


def model_feeds(slots: Sequence[Slot], arrays: Mapping[str, Array]) -> dict[str, Feed]:
    """Return the feeds of a net for the model's arrays; an input that takes pixels gets the pixels for its array."""
    if isinstance(arrays, StepFeeds):
        return arrays.step(slots)
    pixels = {slot.name: slot.image.pixels(arrays[slot.name]) for slot in slots if slot.image}
    return feeds_of(slots, {**arrays, **pixels})


# A float input refuses arrays of these types, because they are usually a mistake.
_REFUSED = frozenset({"bool", "float64", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))})


def check_arrays(
    arrays: Mapping[str, Any], entries: Sequence[Entry], values: Mapping[str, Array] | None = None, *, cast: bool = True
) -> dict[str, Array]:
    """Return the arrays in the order and element types of the model's inputs; UsageError if they do not fit.

    `values` are inputs that are bound to a value; the arrays may have them, with equal values. Without `cast`, a float
    input takes no arrays of integers or float64, but it takes Python's numbers.
    """
    values = values or {}
    for name, value in values.items():
        if name in arrays and not np.array_equal(arrays[name], value):
            raise UsageError(f"input {name} is bound to {value.tolist()!r:.80}, but an array of other values is given")
    arrays = {name: array for name, array in arrays.items() if name not in values}
    names = [entry.name for entry in entries]
    if set(arrays) != set(names):
        raise UsageError(f"the model has the inputs {', '.join(names)}; given are {', '.join(arrays) or 'none'}")
    sizes: dict[str, int] = {}
    checked = {}
    for entry in entries:
        try:
            array, dtype = np.asarray(arrays[entry.name]), np_dtype(entry)
        except ValueError as error:  # rows of different lengths
            raise UsageError(f"the model takes {entry}, and what is given is not an array: {error}") from error
        if not fits(array.shape, entry.shape, sizes):
            known = {size: value for size, value in sizes.items() if size in entry.shape}
            where = f" ({', '.join(f'{name} is {size}' for name, size in known.items())})" if known else ""
            raise UsageError(f"the model takes {entry}{where}, not an array of shape {list(array.shape)}")
        if not np.can_cast(array.dtype, dtype, "same_kind"):
            raise UsageError(f"the model takes {entry}, not an array of {array.dtype}")
        takes_any = cast or dtype.kind in "biu" or entry.image is not None
        is_refused = hasattr(arrays[entry.name], "dtype") and array.dtype.name in _REFUSED - {dtype.name}
        if is_refused and not takes_any:
            is_pixels = array.dtype == np.uint8
            pixels = "; pixels of 0..255 need the model's own arithmetic, see convert --image" if is_pixels else ""
            raise UsageError(f"the model takes {entry}, not an array of {array.dtype} (cast=True converts it){pixels}")
        if entry.table and array.size and not 0 <= array.min() <= array.max() < entry.table:
            where = f"a table of {entry.table} entries, which go from 0 to {entry.table - 1}"
            raise UsageError(f"{entry.name} has {array.min()} to {array.max()}, but is an index into {where}")
        checked[entry.name] = array.astype(dtype, copy=False)
    _check_sizes(sizes)
    return checked


def _check_sizes(sizes: Mapping[str, int]) -> None:
    """Raise UsageError if a size is not the multiple or the sum that it has to be: 2*h, P+S."""
    for text, size in sizes.items():
        if size % multiple_of(text):
            raise UsageError(f"{text} has to be a multiple of {multiple_of(text)}, but an array has {size}")
        total = parsed_size(text, {name: value for name, value in sizes.items() if name != text})
        if isinstance(total, int) and total != size:
            raise UsageError(f"{text} has to be {total} beside the other sizes, but an array has {size}")


def np_dtype(entry: Entry) -> np.dtype[Any]:
    """Return numpy's type of an entry; UsageError for a type other than numbers and bools."""
    if entry.dtype == "bfloat16":
        import ml_dtypes  # noqa: F401  registers the type with numpy
    try:
        dtype = np.dtype(entry.dtype)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in "biuf" and dtype.name != "bfloat16":
        raise UsageError(f"{entry.name}: {entry.dtype} is not a type of arrays that ncnn has anything for")
    return dtype


def sizes_of(entries: Sequence[Entry], arrays: Mapping[str, Array]) -> dict[str, int]:
    """Return the sizes of dynamic dimensions in these arrays."""
    return {
        dim: size
        for entry in entries
        for dim, size in zip(entry.shape, arrays[entry.name].shape if entry.name in arrays else (), strict=False)
        if isinstance(dim, str)
    }


def too_small(manifest: Manifest | None, arrays: Mapping[str, Array]) -> str:
    """Return an error text if a dynamic dimension is below the net's minimum, else ""."""
    if manifest is None or not manifest.minimum:
        return ""
    sizes = sizes_of(manifest.inputs, arrays)
    for text, least in manifest.minimum.items():
        size = parsed_size(text, sizes)
        if isinstance(size, int) and size < least:
            name, limit = limit_of(text, least)
            if name != text:
                return f"the net is for {name} of {limit}, not {parsed_size(name, sizes)}: the model's table ends there"
            return f"the net is for {text} of {limit}, not {size}; convert the model with a --shape of that size"
    return ""
