"""Random pictures and sounds with the statistics of natural ones."""

from __future__ import annotations  # NumPy imports its random numbers at the first use

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from onnx2ncnn_opt.runtime.base import Array

# Of a picture; four channels are mostly the latent numbers of a diffusion model.
_COLOURS, _SHORTEST_SIDE = (1, 3), 16
# Things in a picture, the background among them: their radii relative to the longer side, the standard deviations of
# slimness and tilt, the range of their greys, the deviation of channels, and the largest contrast of their texture.
_THINGS, _RADII, _SHAPES = 30, (0.06, 0.5), (0.4, 0.7)
_GREYS, _COLOUR, _TEXTURE = (0.15, 0.85), 0.1, 0.15
_STEREO, _SHORTEST_SOUND = 2, 400
_SILENCE = 0.01  # the amplitude of pauses, relative to loud parts


def draw_data(
    shape: tuple[int, ...], pixels: tuple[float, float], amplitude: float, seeds: tuple[int, ...]
) -> Array | None:
    """Draw pictures with pixels of this range, or a sound with pauses; return None for other shapes."""
    if (picture := _picture(shape, seeds)) is not None:
        low, high = pixels
        return np.asarray(low + (high - low) * picture)
    if shape and shape[-1] >= _SHORTEST_SOUND and math.prod(shape[:-1]) <= _STEREO:
        rng = np.random.default_rng(seeds)
        loudness = np.maximum(_smooth(shape, (-1,), rng), _SILENCE)
        return np.asarray(amplitude * loudness * rng.standard_normal(shape))
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
