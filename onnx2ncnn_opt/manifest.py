"""PREFIX.ncnn.json: the way of the ONNX model's arrays into and out of the ncnn net next to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx2ncnn_opt.errors import UsageError

FORMAT = 1
ELEMENTS = ("float32", "int32")


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
    return _Reader(path).manifest(data)


class _Reader:
    """A reader of parsed JSON; its errors name the file and the place of a value that is not as required."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def manifest(self, data: Any) -> Manifest:
        version = self.get(data, "format", int)
        if version != FORMAT:
            raise UsageError(f"{self.path}: manifest format {version}, but this version reads format {FORMAT}")
        source, layers = self.get(data, "source", dict), self.get(data, "layers", dict)
        return Manifest(
            inputs=self.tensors(data, "inputs"),
            outputs=self.tensors(data, "outputs"),
            source=Source(self.get(source, "source.sha256", str, type(None)), self.get(source, "source.opset", int)),
            tool=self.get(data, "tool", str),
            ncnn=self.get(data, "ncnn", str),
            layers=LayerCount(self.get(layers, "layers.before", int), self.get(layers, "layers.after", int)),
            passes=self.items(data, "passes", str),
            values=tuple(self.value(e, f"values[{i}]") for i, e in enumerate(self.optional(data, "values", dict))),
            minimum=self.minimum(data),
            least_ncnn=self.get(data, "least_ncnn", str) if "least_ncnn" in data else "",
            masks=self.masks(data),
        )

    def tensors(self, data: Any, where: str) -> tuple[Entry, ...]:
        return tuple(self.tensor(entry, f"{where}[{i}]") for i, entry in enumerate(self.items(data, where, dict)))

    def tensor(self, entry: Any, where: str) -> Entry:
        shape = self.items(entry, f"{where}.shape", int, str, type(None))
        axis = self.get(entry, f"{where}.batch_axis", int, type(None))
        if axis is not None and not 0 <= axis < len(shape):
            raise UsageError(f"{self.path}: {where}.batch_axis is {axis}, but the shape has {len(shape)} axes")
        return Entry(
            name=self.get(entry, f"{where}.name", str),
            blob=self.get(entry, f"{where}.blob", str),
            shape=shape,
            dtype=self.get(entry, f"{where}.dtype", str),
            batch_axis=axis,
            element=self.element(entry, where),
            image=self.image(entry, f"{where}.image") if entry.get("image") is not None else None,
        )

    def image(self, entry: Any, where: str) -> Image:
        data = self.get(entry, where, dict)
        mean, std = (tuple(map(float, self.items(data, f"{where}.{key}", float, int))) for key in ("mean", "std"))
        if not mean or not std or not all(std) or not np.isfinite((*mean, *std)).all():
            raise UsageError(f"{self.path}: {where} has to have finite numbers, and none of 0 in std")
        return Image(mean, std, self.get(data, f"{where}.bgr", bool))

    def element(self, entry: Any, where: str) -> str:
        if "element" not in entry:  # a file of an older version
            is_fed = where.startswith("inputs") and entry["dtype"].startswith(("int", "uint", "bool"))
            return "int32" if is_fed else "float32"
        element: str = self.get(entry, f"{where}.element", str)
        if element not in ELEMENTS:
            raise UsageError(f"{self.path}: {where}.element is '{element}', but has to be one of {', '.join(ELEMENTS)}")
        return element

    def value(self, entry: Any, where: str) -> Bound:
        value = self.get(entry, f"{where}.value", bool, int, float, list)
        try:
            numeric = np.asarray(value).dtype.kind in "biuf"
        except ValueError:  # lists of different lengths
            numeric = False
        if not numeric:
            raise UsageError(f"{self.path}: {where}.value has to be numbers, not {json.dumps(value)[:80]}")
        return Bound(self.get(entry, f"{where}.name", str), self.get(entry, f"{where}.dtype", str), _frozen(value))

    def masks(self, data: Any) -> tuple[Masked, ...]:
        entries = self.items(data, "masks", dict) if "masks" in data else ()
        return tuple(
            Masked(
                self.get(entry, f"masks[{i}].layer", str),
                self.get(entry, f"masks[{i}].mask", int),
                self.get(entry, f"masks[{i}].reason", str),
                self.get(entry, f"masks[{i}].largest", float, int, type(None)),
            )
            for i, entry in enumerate(entries)
        )

    def minimum(self, data: Any) -> dict[str, int]:
        sizes = self.get(data, "minimum", dict) if "minimum" in data else {}
        return {size: self.check(least, f"minimum.{size}", int) for size, least in sizes.items()}

    def optional(self, data: Any, where: str, *kinds: type) -> tuple[Any, ...]:
        """Return items as `items` does; none if a file of an older version has no such list."""
        return self.items(data, where, *kinds) if where in data else ()

    def items(self, data: Any, where: str, *kinds: type) -> tuple[Any, ...]:
        values = self.get(data, where, list)
        for i, value in enumerate(values):
            self.check(value, f"{where}[{i}]", *kinds)
        return tuple(values)

    def get(self, data: Any, where: str, *kinds: type) -> Any:
        key = where.rpartition(".")[2]
        if not isinstance(data, dict) or key not in data:
            raise UsageError(f"{self.path}: not a manifest: {where} is missing")
        return self.check(data[key], where, *kinds)

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
