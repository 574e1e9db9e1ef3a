"""PREFIX.ncnn.json: the way of the ONNX model's arrays into and out of the ncnn net next to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from onnx2ncnn_opt.errors import UsageError

FORMAT = 1
ELEMENTS = ("float32", "int32")
_OPTIONAL = frozenset({"values", "minimum", "least_ncnn", "masks", "element", "image"})


@dataclass(frozen=True)
class Image:
    """The net's arithmetic on pixels of 0..255 before the model: ``(pixel - mean) / std``, each number per channel.

    `mean` and `std` are in the model's order of channels, one number for all of them or one for each; with `bgr` the
    pixels have the other order. Arrays are [N, C, H, W] or [C, H, W].
    """

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    bgr: bool = False

    def pixels(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the pixels from which the net computes the model's array."""
        mean, std = self._columns()
        found = array.astype(np.float64) * std + mean
        return np.ascontiguousarray(np.flip(found, -3) if self.bgr else found).astype(np.float32)

    def normalized(self, pixels: NDArray[Any]) -> NDArray[Any]:
        """Return the model's input for these pixels."""
        mean, std = self._columns()
        return np.asarray(((np.flip(pixels, -3) if self.bgr else pixels).astype(np.float64) - mean) / std)

    def _columns(self) -> list[NDArray[Any]]:
        return [np.asarray(numbers, np.float64).reshape(-1, 1, 1) for numbers in (self.mean, self.std)]


@dataclass(frozen=True)
class Entry:
    """An input or output of the model and the blob that carries it.

    `shape` and `dtype` (numpy's name) are ONNX's; a size that is known only at run time is a string, or None if it has
    no name. `batch_axis` is the ONNX axis that is not in the Mat's dims but its batch count n; None if the array goes
    in as it is. `element` is the type of the Mat's elements, "float32" or "int32". Integer and bool inputs are int32,
    and so are outputs that the net passes on unchanged. Numbers that the net computes are float32, integers too.
    `image` says that the net takes pixels instead of the model's input.
    """

    name: str
    blob: str
    shape: tuple[int | str | None, ...]
    dtype: str
    batch_axis: int | None
    element: str = "float32"
    image: Image | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join('?' if size is None else str(size) for size in self.shape)}]"


@dataclass(frozen=True)
class Bound:
    """An input of the model that the net does not have, because the conversion bound it to `value`.

    `dtype` is numpy's name; `value` is a number, a bool, or nested tuples of them in the input's shape.
    """

    name: str
    dtype: str
    value: Any

    @classmethod
    def of(cls, name: str, array: NDArray[Any]) -> Bound:
        """Return the entry for an array."""
        plain = array if array.dtype.kind in "biuf" else array.astype(np.float64)  # bfloat16
        return cls(name, array.dtype.name, _frozen(plain.tolist()))

    def array(self) -> NDArray[Any]:
        """Return the value as an array; its type is the input's, which only the model has."""
        return np.asarray(self.value)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class Source:
    """The model that was converted: the hash of its file (None for a model that has none) and its ONNX opset."""

    sha256: str | None
    opset: int


@dataclass(frozen=True)
class LayerCount:
    """Layers of the net before and after the passes."""

    before: int
    after: int


@dataclass(frozen=True)
class Masked:
    """A layer of the net to which this tool gave a feature mask (parameter 31), and the reason.

    `largest` is the largest number seen there, None if nothing was run.
    """

    layer: str
    mask: int
    reason: str
    largest: float | None = None


@dataclass(frozen=True)
class Manifest:
    """Everything in the file.

    `tool` wrote it, `ncnn` is the release that was asked for, `least_ncnn` the oldest one that runs the net. `values`
    are inputs that became constants. `minimum` are dynamic dimensions (in the names of the shapes) and the least sizes
    for which the net is right. `masks` are the layers that fp16 is not enough for.
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
    least_ncnn: str = ""
    masks: tuple[Masked, ...] = ()

    def __repr__(self) -> str:
        ports = (", ".join(map(str, entries)) for entries in (self.inputs, self.outputs))
        return f"Manifest({' -> '.join(ports)}; {self.layers.after} layers)"

    def to_json(self) -> str:
        """Return the text of the file."""
        data = {"format": FORMAT, **asdict(self)}
        for entry in (*data["inputs"], *data["outputs"]):
            if entry["image"] is None:
                del entry["image"]
        return json.dumps(data, indent=1) + "\n"


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest; raises UsageError that names the file and the entry."""
    try:
        # Both limits of json: recursion on absurd nesting, ValueError on text that is not JSON or not UTF-8.
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not a manifest: {error}") from error
    return _ManifestReader(path).manifest(data)


@dataclass(frozen=True)
class _ManifestReader:
    """A reader of parsed JSON; its errors name the file and the place of a value that is not as required."""

    path: Path

    def manifest(self, data: Any) -> Manifest:
        if not isinstance(data, dict) or "format" not in data:
            raise self.missing("format")
        if self.check(data["format"], "format", int) != FORMAT:
            raise UsageError(f"{self.path}: manifest format {data['format']}, but this version reads format {FORMAT}")
        return cast(Manifest, self.entry(Manifest, data, ""))

    def entry(self, kind: Any, data: Any, where: str) -> Any:
        """Return the entry of this dataclass; files of older versions lack some fields."""
        self.check(data, where, dict)
        found: dict[str, Any] = {}
        for name, hint in get_type_hints(kind).items():
            place = f"{where}.{name}" if where else name
            if name in data:
                found[name] = self.read(hint, data[name], place)
            elif name not in _OPTIONAL:
                raise self.missing(place)
        if kind is Entry:
            self.check_entry(found, where)
        elif kind is Bound:
            found["value"] = self.numbers(found["value"], f"{where}.value")
        elif kind is Image:
            mean, std = found["mean"], found["std"]
            if not mean or not std or not all(std) or not np.isfinite((*mean, *std)).all():
                raise UsageError(f"{self.path}: {where} has to have finite numbers, and none of 0 in std")
        return kind(**found)

    def read(self, kind: Any, value: Any, where: str) -> Any:
        """Return a value of a field's type."""
        origin, kinds = get_origin(kind), get_args(kind) or (kind,)
        if origin is tuple:
            self.check(value, where, list)
            return tuple(self.read(kinds[0], each, f"{where}[{i}]") for i, each in enumerate(value))
        if origin is Mapping:
            self.check(value, where, dict)
            return {key: self.read(kinds[1], each, f"{where}.{key}") for key, each in value.items()}
        if is_dataclass(kinds[0]) and not (value is None and type(None) in kinds):
            return self.entry(kinds[0], value, where)
        if kind is float:
            return float(self.check(value, where, float, int))
        if float in kinds:
            kinds = (float, int, type(None))
        return value if kind is Any else self.check(value, where, *kinds)

    def check_entry(self, found: dict[str, Any], where: str) -> None:
        axis, rank = found["batch_axis"], len(found["shape"])
        if axis is not None and not 0 <= axis < rank:
            raise UsageError(f"{self.path}: {where}.batch_axis is {axis}, but the shape has {rank} axes")
        is_fed = where.startswith("inputs") and found["dtype"].startswith(("int", "uint", "bool"))
        element = found.setdefault("element", "int32" if is_fed else "float32")
        if element not in ELEMENTS:
            raise UsageError(f"{self.path}: {where}.element is '{element}', but has to be one of {', '.join(ELEMENTS)}")

    def numbers(self, value: Any, where: str) -> Any:
        self.check(value, where, bool, int, float, list)
        try:
            numeric = np.asarray(value).dtype.kind in "biuf"
        except ValueError:  # lists of different lengths
            numeric = False
        if not numeric:
            raise UsageError(f"{self.path}: {where} has to be numbers, not {json.dumps(value)[:80]}")
        return _frozen(value)

    def missing(self, where: str) -> UsageError:
        return UsageError(f"{self.path}: not a manifest: {where} is missing")

    def check(self, value: Any, where: str, *kinds: type) -> Any:
        # JSON's true would pass for an int.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise UsageError(f"{self.path}: {where} has to be of type {names}, not {json.dumps(value)[:80]}")
        return value


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        for part in iter(lambda: file.read(1 << 20), b""):
            total.update(part)
    return total.hexdigest()
