"""Samples for a net from an .npz, a folder of arrays or pictures, or a function."""

import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnx2ncnn_opt.errors import UsageError, plugged
from onnx2ncnn_opt.inputs.given import IMAGES, read_arrays, read_pixels
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.manifest import Entry, fits
from onnx2ncnn_opt.runtime.slots import check_arrays

Arrays = Mapping[str, Any]

_MOST_KEPT = 2**29  # bytes of samples in memory; further files are read again for each run


class Samples(Sequence[dict[str, Array]]):
    """Inputs of a net, loaded and checked sample by sample; a UsageError names the sample."""

    def __init__(self, source: Any, entries: Sequence[Entry]) -> None:
        self.entries, self._where, self._room = entries, "the data", _MOST_KEPT
        if isinstance(source, (str, Path)):
            self._where = str(source)
            source = self._read(Path(source))
        self._items = self._split(source) if isinstance(source, Mapping) else [*map(self._by_name, source)]
        if not self._items:
            raise UsageError(f"{self._where} has no samples")

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        item, where = self._items[index], f"{self._where}, sample {index}"
        if isinstance(item, Path):
            where = str(item)
            item = self._picture(item) if item.suffix.lower() in IMAGES else self._arrays(item)
        try:
            arrays = check_arrays(_with_batch_axes(item, self.entries), self.entries)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from error
        for name, array in arrays.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                place = np.argwhere(~np.isfinite(array))[0].tolist()
                raise UsageError(f"{where}: '{name}' is {array[tuple(place)]} at {place}")
        if isinstance(self._items[index], Path):
            self._room -= sum(array.nbytes for array in arrays.values())
            self._items[index] = arrays if self._room >= 0 else self._items[index]
        return arrays

    def _read(self, path: Path) -> Any:
        """Return the files of a folder, the arrays of a file, or the samples of a function."""
        if path.is_dir():
            files = sorted(p for p in path.iterdir() if p.suffix.lower() in (".npz", ".npy", *IMAGES))
            if not files:
                raise UsageError(f"{path} has no .npz, .npy or picture")
            return files
        if path.exists():
            return self._arrays(path)
        module, colon, name = str(path).rpartition(":")
        if not colon:
            raise UsageError(f"the data {path} is neither a file nor a folder; give a function as module:function")
        with plugged(f"the data {path}", UsageError):
            try:
                function = getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError) as error:
                raise UsageError(f"the data {path}: {error}") from error
            samples = function() if callable(function) else None
            items = [*samples] if isinstance(samples, Iterable) else None
        if items is None:
            raise UsageError(f"the data {path} is not a function that yields or returns samples")
        return items

    def _by_name(self, item: Any) -> Any:
        """Return a file as it is, or the arrays of a sample by name."""
        if isinstance(item, (Mapping, Path)):
            return item
        arrays = item if isinstance(item, (tuple, list)) else [item]
        if len(arrays) != len(self.entries):
            raise UsageError(f"{self._where}: a sample has {len(arrays)} arrays for {len(self.entries)} inputs")
        return {entry.name: array for entry, array in zip(self.entries, arrays, strict=True)}

    def _arrays(self, path: Path) -> Arrays:
        arrays = read_arrays(path, [entry.name for entry in self.entries])
        return {self.entries[0].name: arrays.popitem()[1]} if len(arrays) == len(self.entries) == 1 else arrays

    def _picture(self, path: Path) -> Arrays:
        """Return a picture resized for the model's only input, which must be an image."""
        entry, *others = self.entries
        if others or entry.image is None:
            raise UsageError(f"{path}: say what the model does to pixels with --image NAME:mean=...:std=...")
        channels, height, width = entry.shape[-3:]
        image = entry.image
        pixels = read_pixels(path, height, width, grey=channels == 1, bgr=image.bgr, letterbox=image.letterbox)
        pixels = pixels.astype(np.float32).transpose(2, 0, 1)
        return {entry.name: pixels.reshape((1,) * (len(entry.shape) - 3) + pixels.shape)}

    def _split(self, arrays: Arrays) -> list[Arrays]:
        """Split arrays of several samples along an additional first axis, or along the batch axis."""
        names = [entry.name for entry in self.entries]
        if odd := [*sorted(set(arrays) - set(names)), *sorted(set(names) - set(arrays))]:
            what = "is not an input" if odd[0] in arrays else "is missing"
            raise UsageError(f"{self._where}: '{odd[0]}' {what}; the inputs are {', '.join(names)}")
        parts: dict[str, list[Any]] = {}
        for entry in self.entries:
            array = np.asarray(arrays[entry.name])
            if array.ndim == len(entry.shape) + 1:
                parts[entry.name] = list(array)
            elif array.ndim == len(entry.shape) and array.ndim:
                size = entry.shape[0] if isinstance(entry.shape[0], int) else 1
                if not len(array) or len(array) % size:
                    raise UsageError(f"{self._where}: '{entry.name}' has {len(array)} items, for batches of {size}")
                parts[entry.name] = [array[i : i + size] for i in range(0, len(array), size)]
            else:
                raise UsageError(f"{self._where}: the model takes {entry}, not arrays of shape {list(array.shape)}")
        if len({len(items) for items in parts.values()}) > 1:
            counts = ", ".join(f"{len(items)} of {name}" for name, items in parts.items())
            raise UsageError(f"{self._where}: the inputs have different numbers of samples: {counts}")
        return [dict(zip(parts, items, strict=True)) for items in zip(*parts.values(), strict=True)]


def _with_batch_axes(arrays: Arrays, entries: Sequence[Entry]) -> Arrays:
    """Return a sample whose arrays have batch axes of size 1 where they lacked one."""
    batched = dict(arrays)
    for entry in entries:
        array: Any = arrays.get(entry.name)
        axis = entry.batch_axis or 0
        if getattr(array, "ndim", -1) + 1 == len(entry.shape) and (entry.shape[axis] == 1 or entry.batch_axis == axis):
            longer = np.expand_dims(array, axis)
            batched[entry.name] = longer if fits(longer.shape, entry.shape, {}) else array
    return batched
