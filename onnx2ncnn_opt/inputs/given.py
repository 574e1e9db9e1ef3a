"""Inputs of a user: arrays by name, a file of arrays, or an image."""

import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.dim import Sym
from onnx2ncnn_opt.manifest import Entry, Image, Manifest
from onnx2ncnn_opt.onnx.read.binding import InputInfo
from onnx2ncnn_opt.onnx.read.load import LoadedModel
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.runtime.slots import check_arrays


class Picture(NamedTuple):
    """A picture for a model's only input: a path, and the arithmetic on its pixels."""

    path: Path
    image: Image = Image()


Feeds = Mapping[str, Array] | str | os.PathLike[str] | Picture
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")


def given_inputs(feeds: Feeds, model: LoadedModel, manifest: Manifest | None = None) -> dict[str, Array]:
    """Return the user's inputs: arrays by name, a file of them, or an image. Raises UsageError if they do not fit.

    An image without arithmetic of its own gets that of a net that takes pixels.
    """
    if isinstance(feeds, Picture):
        return load_image(feeds, model)
    if isinstance(feeds, (str, os.PathLike)):
        path = Path(feeds)
        is_image = path.suffix.lower() in IMAGES
        return load_image(_normalised(path, manifest), model) if is_image else load_inputs(path, model)
    return check_inputs(feeds, model)


def _normalised(path: Path, manifest: Manifest | None) -> Picture:
    """Return a picture with the arithmetic of the net's pixels; its channels have the model's order already."""
    images = [entry.image for entry in manifest.inputs if entry.image] if manifest is not None else []
    return Picture(path, replace(images[0], bgr=False)) if images else Picture(path)


def load_image(picture: Picture, model: LoadedModel) -> dict[str, Array]:
    """Return an image, resized unless the model's input is dynamic. Raises UsageError if the image does not fit."""
    (info, *others), path, image = model.inputs, picture.path, picture.image
    shape = info.shape
    channels = next((axis for axis in (1, 3) if len(shape) == 4 and shape[axis] in (1, 3)), None)
    if others or channels is None or not (shape[0] == 1 or isinstance(shape[0], Sym)):
        inputs = ", ".join(map(str, model.inputs))
        raise UsageError(f"{path}: an image is for a model of one input [1, 3, H, W] or [1, H, W, 3], not {inputs}")
    height, width = (shape[axis] for axis in ((2, 3) if channels == 1 else (1, 2)))
    pixels = read_pixels(path, height, width, grey=shape[channels] == 1, bgr=image.bgr, letterbox=image.letterbox)
    is_float = info.dtype.is_floating_point()
    for what, numbers, default in (("mean", image.mean, (0,)), ("std", image.std, (1,))):
        if len(numbers) not in (1, pixels.shape[2]) or (numbers != default and not is_float):
            raise UsageError(f"{path}: {what} is {numbers}, for {pixels.shape[2]} channels of {info}")
    if is_float:
        pixels = (pixels - np.array(image.mean)) / np.array(image.std)
    array = (pixels if channels == 3 else pixels.transpose(2, 0, 1))[None]
    return check_inputs({info.name: array.astype(dtype_of(info))}, model)


def read_pixels(path: Path, height: Any, width: Any, *, grey: bool, bgr: bool, letterbox: float | None) -> Array:
    """Return the pixels [h, w, channels] of an image; `height` and `width` resize it if they are integers.

    Raises UsageError if there is no image, or no Pillow.
    """
    try:
        from PIL import Image as pillow
        from PIL import ImageOps
    except ImportError:
        raise UsageError(f"{path}: images need the package Pillow: `pip install pillow`") from None
    try:
        with pillow.open(path) as file:
            picture: Any = file
            if file.mode.startswith("I;16") or (file.mode, file.format) == ("I", "PNG"):  # Pillow would clip 16 bits
                picture = pillow.fromarray(np.rint(np.asarray(file) / 257).astype(np.uint8))
            elif file.mode in ("F", "I"):
                raise ValueError(f"mode {file.mode} does not say which number is white; save it with 8 or 16 bits")
            picture = picture.convert("L" if grey else "RGB")
    except (OSError, ValueError, pillow.DecompressionBombError) as error:
        raise UsageError(f"{path}: no image can be read from it: {error}") from error
    size = (width if isinstance(width, int) else picture.width, height if isinstance(height, int) else picture.height)
    filter = pillow.Resampling.BILINEAR
    if letterbox is None:
        picture = picture.resize(size, filter)
    else:
        picture = ImageOps.pad(picture, size, filter, color=(int(letterbox),) * len(picture.getbands()))
    return np.asarray(picture).reshape(size[1], size[0], -1)[..., :: -1 if bgr else 1]


def load_inputs(path: Path, model: LoadedModel) -> dict[str, Array]:
    """Load inputs from an .npy, or from an .npz: by name, or in the file's order if no names match.

    Raises UsageError if the file cannot be read or does not fit the model.
    """
    names = [info.name for info in model.inputs]
    arrays = read_arrays(path, names)
    if len(arrays) == len(names) and not set(arrays) & set(names):
        arrays = dict(zip(names, arrays.values(), strict=True))
    try:
        return check_inputs(arrays, model)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def read_arrays(path: Path, names: Sequence[str]) -> dict[str, Array]:
    """Read the arrays of an .npz, or the array of an .npy for the only one of some inputs. Raises UsageError."""
    try:
        with path.open("rb") as file:
            data = np.load(file, allow_pickle=False)
            if isinstance(data, np.lib.npyio.NpzFile):
                return {name: data[name] for name in data.files}
    # MemoryError: a broken header may claim any size. ValueError: NumPy takes other files for pickled objects.
    except (OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path}: no inputs can be read from it: {error}") from error
    if len(names) != 1:
        raise UsageError(f"{path} is one array for {len(names)} inputs; use numpy.savez(path, name=array, ...)")
    return {names[0]: data}


def check_inputs(arrays: Mapping[str, Array], model: LoadedModel) -> dict[str, Array]:
    """Return arrays in the model's order and types. Raises UsageError if shapes, or values of bound inputs, differ."""
    shapes = [tuple(dim if isinstance(dim, int) else str(dim) for dim in info.shape) for info in model.inputs]
    infos = zip(model.inputs, shapes, strict=True)
    entries = [Entry(info.name, info.name, shape, dtype_of(info).name, None) for info, shape in infos]
    return check_arrays(arrays, entries, model.values)


def dtype_of(info: InputInfo) -> np.dtype[Any]:
    """Return the element type of an input. Raises UsageError for types that no blob can hold."""
    dtype = np.dtype(info.dtype.numpy())
    if dtype.kind not in "biuf" and info.dtype != onnx_ir.DataType.BFLOAT16:
        raise UsageError(f"input {info} has a type that ncnn does not support")
    return dtype
