"""PREFIX.ncnn.json: how the ONNX model's arrays go into the ncnn net next to it, and come out of it."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from onnx2ncnn_opt.errors import UsageError

FORMAT = 1
ELEMENTS = ("float32", "int32")
ROLES = ("key", "value")


@dataclass(frozen=True)
class Image:
    """The net's arithmetic on pixels of 0..255 before the model: ``(pixel - mean) / std``.

    `mean` and `std` have one number, or one for each channel in the model's order. With `bgr`, the pixels have the
    opposite order. Arrays are [N, C, H, W] or [C, H, W]. `letterbox` is the value of the pixels around a picture that
    keeps its aspect; None if pictures are stretched. Raises ValueError for other numbers.
    """

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    bgr: bool = False
    letterbox: float | None = None

    def __post_init__(self) -> None:
        if not self.mean or not self.std or not np.isfinite((*self.mean, *self.std)).all():
            raise ValueError("mean and std have to be finite numbers")
        if not all(np.asarray(self.std, np.float32)):
            raise ValueError("std is divided by, and must not be 0")
        if self.letterbox is not None and not 0 <= self.letterbox <= 255:
            raise ValueError("letterbox has to be a pixel of 0..255")

    def pixels(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the pixels for this input of the model."""
        mean, std = self._columns()
        pixels = array.astype(np.float64) * std + mean
        return np.ascontiguousarray(np.flip(pixels, -3) if self.bgr else pixels).astype(np.float32)

    def normalized(self, pixels: NDArray[Any]) -> NDArray[Any]:
        """Return the model's input for these pixels."""
        mean, std = self._columns()
        return np.asarray(((np.flip(pixels, -3) if self.bgr else pixels).astype(np.float64) - mean) / std)

    def _columns(self) -> list[NDArray[Any]]:
        return [np.asarray(numbers, np.float64).reshape(-1, 1, 1) for numbers in (self.mean, self.std)]


@dataclass(frozen=True)
class Cache:
    """Keys or values that attention keeps from run to run: an input, unset in the first run, and its output.

    `of` is the attention layer, `role` is "key" or "value", `in_` and `out` are the names of the input and of the
    output. The numbers are opaque: the program extracts the output (`extract(blob, 1)`) and feeds it to the next run.
    Raises ValueError for another role.
    """

    of: str
    role: str
    in_: str
    out: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role is '{self.role}', but has to be one of {', '.join(ROLES)}")


@dataclass(frozen=True)
class Entry:
    """An input or output of the model and the blob that carries it.

    `shape` and `dtype` (numpy's name) are ONNX's; a dynamic dimension is a string, or None if it has no name.
    `batch_axis` is the ONNX axis that becomes the Mat's batch count n; None if all axes are dims of the Mat.
    `element` is the type of the Mat's elements, "float32" or "int32". Integer and bool inputs are int32, and outputs
    that are such an input unchanged. All numbers that the net computes are float32, integers included.
    `image` says that the net takes pixels instead of the model's input, `cache` that the blob is a cache of attention.
    `table` is the size of the table that an integer input indexes: for an index beyond its end, ncnn silently reads
    another entry than the model. `length` marks an input that only the net has, a row of any numbers, as long as past
    and new tokens together. It names the inputs that have them, ids and a cache. `boxes` is the blob of the boxes that
    the net selects: if it is empty, the output has no rows. Raises ValueError for a wrong size or axis.
    """

    name: str
    blob: str
    shape: tuple[int | str | None, ...]
    dtype: str
    batch_axis: int | None
    element: str = "float32"
    image: Image | None = None
    cache: Cache | None = None
    table: int | None = None
    length: tuple[str, str] | None = None
    boxes: str | None = None

    def __post_init__(self) -> None:
        if wrong := [size for size in self.shape if isinstance(size, int) and not 0 <= size < 2**31]:
            raise ValueError(f"a size is {wrong[0]}, but has to be 0 to {2**31 - 1}")
        if self.batch_axis is not None and not 0 <= self.batch_axis < len(self.shape):
            raise ValueError(f"batch_axis is {self.batch_axis}, but the shape has {len(self.shape)} axes")
        if self.element not in ELEMENTS:
            raise ValueError(f"element is '{self.element}', but has to be one of {', '.join(ELEMENTS)}")

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join('?' if size is None else str(size) for size in self.shape)}]"


@dataclass(frozen=True)
class TailFile:
    """The part of the model after the net: an ONNX model, NET.tail.onnx next to NET.param, with this SHA-256.

    Its inputs are outputs of the net (`inputs`), inputs of the model (`arrays`), and the values of the expressions
    `sizes`, each under the name `size_input(expression)`. `outputs` are all outputs of the model in their order; the
    net has those that the tail lacks. Entries have no blob.
    """

    sha256: str
    inputs: tuple[str, ...]
    arrays: tuple[Entry, ...]
    sizes: tuple[str, ...]
    outputs: tuple[Entry, ...]
    operators: tuple[str, ...]
    reasons: tuple[str, ...]


def fits(shape: Sequence[int], dims: Sequence[int | str | None], sizes: dict[str, int]) -> bool:
    """Return True if an array can have this shape; `sizes` are known dynamic dimensions, and get those of `dims`."""
    return len(shape) == len(dims) and all(
        dim is None or size == (sizes.setdefault(dim, size) if isinstance(dim, str) else dim)
        for size, dim in zip(shape, dims, strict=True)
    )


def limit_of(text: str, least: int) -> tuple[str, str]:
    """Return a size and its limit in words: ("64 + -1*n", 0) gives "n" and "64 or less"."""
    first, *others = re.split(r" \+ (?![^(]*\))", text)  # not within brackets
    if first.isdigit() and others and all(other.startswith("-1*") for other in others):
        return " + ".join(other.removeprefix("-1*") for other in others), f"{int(first) - least} or less"
    return text, f"{least} or more"


def multiple_of(text: str) -> int:
    """Return the number that a size is a multiple of: 2 for "2*h"; 1 for other sizes."""
    match = re.fullmatch(r"([0-9]+)\*\w+", text)
    return int(match[1]) if match else 1


def tail_path(param: Path) -> Path:
    """Return the path of a net's tail."""
    return param.with_suffix(".tail.onnx")


def size_input(text: str) -> str:
    """Return the name of a tail's input for an expression of dynamic dimensions."""
    return f"size {text}"


@dataclass(frozen=True)
class Bound:
    """An input of the model that the conversion bound to the constant `value`; the net does not have it.

    `dtype` is numpy's name; `value` is a number, a bool, or nested tuples of them in the input's shape. Raises
    ValueError for other values.
    """

    name: str
    dtype: str
    value: Any

    def __post_init__(self) -> None:
        if np.asarray(self.value).dtype.kind not in "biuf":
            raise ValueError(f"value has to be numbers, not {json.dumps(self.value)[:80]}")
        object.__setattr__(self, "value", _frozen(self.value))

    @classmethod
    def of(cls, name: str, array: NDArray[Any]) -> "Bound":
        """Return the entry for an array."""
        plain = array if array.dtype.kind in "biuf" else array.astype(np.float64)  # bfloat16
        return cls(name, array.dtype.name, plain.tolist())

    def array(self) -> NDArray[Any]:
        """Return the value as an array; its type is the input's, which only the model has."""
        return np.asarray(self.value)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class Source:
    """The model that was converted: the hash of its file (None for a model in memory) and its ONNX opset.

    `append` is the value of the option --append, None without it.
    """

    sha256: str | None
    opset: int
    append: str | None = None


@dataclass(frozen=True)
class LayerCount:
    """Layers of the net before and after the passes."""

    before: int
    after: int


@dataclass(frozen=True)
class Masked:
    """A layer of the net to which this tool gave a feature mask (parameter 31), and the reason.

    `largest` is the largest number of the layer's blobs in verification, None without. `device` is the only kind of
    device that needs the mask, "arm" or "vulkan"; None if all do.
    """

    layer: str
    mask: int
    reason: str
    largest: float | None = None
    device: str | None = None


@dataclass(frozen=True)
class Int8Layer:
    """A layer that could be int8: its form and bits, or the `reason` why it stays float.

    `largest` is its largest input, `cut` the share of inputs that saturate, `noise` the noise that this layer in int8
    causes at the outputs, relative to their power, `seconds` its times in float and in int8. None is unknown.
    """

    layer: str
    type: str
    form: str = ""
    bits: int = 0
    largest: float | None = None
    cut: float | None = None
    noise: float | None = None
    seconds: tuple[float, float] | None = None
    reason: str = ""

    @property
    def is_int8(self) -> bool:
        """True if the layer is int8."""
        return not self.reason


@dataclass(frozen=True)
class Int8:
    """Measurements of `quantize`: decibels relative to the float net, and the share of equal classes.

    `times` says where the times come from. None is unknown, or infinite.
    """

    layers: tuple[Int8Layer, ...]
    decibels: float | None
    top1: float | None
    samples: int
    seconds: tuple[float, float] | None
    times: str


@dataclass(frozen=True)
class Sort:
    """A TopK of the model, by its output of indices, and the blob of its rows, (1, number, index, ...), in the net."""

    indices: str
    blob: str


@dataclass(frozen=True)
class Manifest:
    """Everything in the file; `inputs` and `outputs` are the net's.

    `tool` wrote it, `ncnn` is the target release, `least_ncnn` the oldest one that runs the net. `values` are inputs
    that became constants. `minimum` has dynamic dimensions (named as in the shapes) and the least sizes for which the
    net is right; verification runs with `cases`, expressions of dynamic dimensions, above 0, and not. `macs` are the
    multiply-adds of a run, a number or an expression of dynamic dimensions, "" if unknown. `masks` are the layers that
    need more than fp16, `int8` has the measurements of `quantize`. `sorts` put rows in order, perhaps in another one
    where numbers are equal within rounding. `candidates` are inner values, boxes and scores, from which the net selects
    boxes (`Entry.boxes`). `sha256` has the hashes of the .param and the .bin; a manifest in memory has none.
    """

    inputs: tuple[Entry, ...]
    outputs: tuple[Entry, ...]
    source: Source
    tool: str
    ncnn: str
    layers: LayerCount
    passes: tuple[str, ...]
    values: tuple[Bound, ...] = ()
    minimum: Mapping[str, int] = field(default_factory=dict)
    cases: tuple[str, ...] = ()
    least_ncnn: str = ""
    macs: str = ""
    masks: tuple[Masked, ...] = ()
    tail: TailFile | None = None
    int8: Int8 | None = None
    sorts: tuple[Sort, ...] = ()
    candidates: tuple[Entry, ...] = ()
    sha256: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        pasts = {entry.cache.in_ for entry in self.outputs if entry.cache}
        if alone := [entry.name for entry in self.inputs if entry.cache and entry.name not in pasts]:
            raise ValueError(f"the cache '{alone[0]}' has no output")

    def __repr__(self) -> str:
        ports = (", ".join(map(str, entries)) for entries in (self.model_inputs, self.model_outputs))
        return f"Manifest({' -> '.join(ports)}; {self.layers.after} layers)"

    @property
    def cut(self) -> tuple[str, ...]:
        """The model's values between net and tail; none without a tail."""
        return tuple(entry.name for entry in self.outputs) if self.tail else ()

    @property
    def compared(self) -> tuple[str, ...]:
        """The cut and the model's outputs; none without a tail."""
        return tuple(dict.fromkeys([*self.cut, *(entry.name for entry in self.model_outputs)])) if self.tail else ()

    @property
    def caches(self) -> list[tuple[str, str]]:
        """The blobs of each cache before and after a step."""
        after = {entry.cache.in_: entry.blob for entry in self.outputs if entry.cache}
        return [(entry.blob, after[entry.name]) for entry in self.inputs if entry.cache]

    @property
    def fed(self) -> tuple[Entry, ...]:
        """The net's inputs that take arrays: all but caches."""
        return tuple(entry for entry in self.inputs if entry.cache is None)

    @property
    def read(self) -> tuple[Entry, ...]:
        """The net's outputs that give arrays: all but caches."""
        return tuple(entry for entry in self.outputs if entry.cache is None)

    @property
    def model_inputs(self) -> tuple[Entry, ...]:
        """The model's inputs: the net's, except a row of `length`, and those that only the tail reads."""
        names = {entry.name for entry in self.inputs}
        shared = (entry for entry in self.inputs if not entry.length)
        return (*shared, *(entry for entry in (self.tail.arrays if self.tail else ()) if entry.name not in names))

    @property
    def model_outputs(self) -> tuple[Entry, ...]:
        """The model's outputs."""
        return self.tail.outputs if self.tail else self.outputs

    @property
    def before_boxes(self) -> "Manifest":
        """The manifest as verification sees it: the net ends at `candidates`, and the boxes come from a tail."""
        if not self.candidates or self.tail:
            return self
        names = tuple(entry.name for entry in self.candidates)
        tail = TailFile("", names, (), (), self.outputs, (), ())
        return replace(self, outputs=(*self.candidates, *(x for x in self.outputs if not x.boxes)), tail=tail)

    def to_json(self) -> str:
        """Return the text of the file."""
        data = asdict(self, dict_factory=lambda pairs: {_json_name(x): v for x, v in pairs if v or x not in _OPTIONAL})
        return json.dumps({"format": FORMAT, **data}, indent=1) + "\n"


# The fields that the file has only if they are set.
_OPTIONAL = ("append", "image", "cache", "table", "length", "tail", "int8", "sorts", "boxes", "candidates", "sha256")


def _json_name(name: str) -> str:
    """Return a field's name in the file: "in" for `in_`, because `in` is a keyword of Python."""
    return name.rstrip("_")


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest; raises UsageError that names the file and the entry."""
    try:
        data = json.loads(path.read_bytes())
        version = data.get("format") if isinstance(data, dict) else None
        if type(version) is int and version != FORMAT:
            raise UsageError(f"{path}: manifest format {version}, but this version reads format {FORMAT}")
        if type(version) is not int:
            raise UsageError(f"{path}: not a manifest: it has no format of type int")
        inputs = data.get("inputs")
        for entry in inputs if isinstance(inputs, list) else ():  # files of older versions lack `element`
            if isinstance(entry, dict) and str(entry.get("dtype")).startswith(("int", "uint", "bool")):
                entry.setdefault("element", "int32")
        return cast(Manifest, _converted(data, Manifest, "$"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        # Text that is not JSON or not UTF-8, values of other types, and nesting that is too deep.
        raise UsageError(f"{path}: not a manifest: {error}") from error


def _converted(value: Any, kind: Any, where: str) -> Any:
    """Convert a value of JSON to the type of a field; ValueError with its place if it has another type.

    Unknown fields of an object are ignored: a newer version may write them.
    """
    kinds = get_args(kind) if get_origin(kind) is UnionType else (kind,)
    for option in kinds:
        origin, (item, *others) = get_origin(option) or option, get_args(option) or (Any,)
        if option is Any or type(value) is option or (option is float and type(value) is int):
            return float(value) if option is float else value
        if origin is tuple and isinstance(value, list):
            return tuple(_converted(part, item, f"{where}[{i}]") for i, part in enumerate(value))
        if origin is Mapping and isinstance(value, dict):
            return {name: _converted(part, others[0], f"{where}.{name}") for name, part in value.items()}
        if is_dataclass(option) and isinstance(value, dict):
            return _object(value, option, where)
    names = " | ".join(_JSON_NAMES.get(get_origin(option) or option, "object") for option in kinds)
    raise ValueError(f"Expected `{names}`, got `{_JSON_NAMES.get(type(value), 'object')}` - at `{where}`")


def _object(value: Mapping[str, Any], kind: Any, where: str) -> Any:
    hints = _hints_of(kind)
    for item in fields(kind):
        if _json_name(item.name) not in value and item.default is item.default_factory is MISSING:
            raise ValueError(f"missing required field `{_json_name(item.name)}` - at `{where}`")
    present = {name: hint for name, hint in hints.items() if _json_name(name) in value}
    arguments = {
        name: _converted(value[_json_name(name)], hint, f"{where}.{_json_name(name)}") for name, hint in present.items()
    }
    try:
        return kind(**arguments)
    except ValueError as error:
        raise ValueError(f"{error} - at `{where}`") from error


_hints_of = cache(get_type_hints)
_JSON_NAMES = {int: "int", float: "float", str: "str", bool: "bool", tuple: "array", list: "array", NoneType: "null"}


def mixture(manifest: Manifest | None, param: Path, bin: Path) -> str:
    """Return an error text if a file of a net is not the one that the manifest was written with, else ""."""
    tail = {"tail": manifest.tail.sha256} if manifest and manifest.tail else {}
    digests = {**manifest.sha256, **tail} if manifest else {}
    for kind, path in (("param", param), ("bin", bin), ("tail", tail_path(param))):
        if kind in digests and path.is_file() and file_hash(path) != digests[kind]:
            problem = f"{path} and its manifest are of two nets, or the file was changed since"
            return f"{problem}; convert the model again, or remove sha256 from the manifest"
    return ""


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        for part in iter(lambda: file.read(1 << 20), b""):
            total.update(part)
    return total.hexdigest()
