"""ONNX's sampling of an axis, after the specification of Resize (opset 19), in NumPy."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.dim import Dim, known
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.lower.memory_budget import require_room

SIMPLE = "simple"  # ONNX Runtime's rounding before opset 11, which introduced nearest_mode
_CROPS = "tf_crop_and_resize"  # the coordinates of a region
_f32 = np.float32
# Functions of index, size before, size after and scale, in float32 and with ONNX Runtime's order of operations (it adds
# to the offset of half_pixel_symmetric in float64): at ties the last bit decides which element is nearest.
_COORDINATES: dict[str, Callable[[Array, Any, Any, Any], Array]] = {
    "half_pixel": lambda i, size, out, scale: (i + _f32(0.5)) / scale - _f32(0.5),
    "half_pixel_symmetric": lambda i, size, out, scale: (
        np.float64((size / _f32(2)) * (_f32(1) - out / (scale * size))) + (i + 0.5).astype(np.float64) / scale - 0.5
    ).astype(np.float32),
    "pytorch_half_pixel": lambda i, size, out, scale: (i + _f32(0.5)) / scale - _f32(0.5) if out > 1 else i * _f32(0),
    "tf_half_pixel_for_nn": lambda i, size, out, scale: (i + _f32(0.5)) / scale,
    "align_corners": lambda i, size, out, scale: i * (size - _f32(1)) / (out - _f32(1)) if out > 1 else i * _f32(0),
    "asymmetric": lambda i, size, out, scale: i / scale,
}
# Largest distance from the middle between two elements that ONNX Runtime treats as a tie.
_TIE = 1e-6
# Functions of the position, and whether the axis shrinks.
_ROUNDING: dict[str, Callable[[Array, bool], Array]] = {
    "round_prefer_floor": lambda x, shrinks: np.ceil(x - (0.5 + _TIE)),
    "round_prefer_ceil": lambda x, shrinks: np.floor(x + (0.5 + _TIE)),
    "floor": lambda x, shrinks: np.floor(x),
    "ceil": lambda x, shrinks: np.ceil(x),
    SIMPLE: lambda x, shrinks: np.ceil(x) if shrinks else np.floor(x),
}


class Axis(NamedTuple):
    """An axis, its size before and after, and the scale of the coordinates; None: the ratio of dynamic sizes."""

    axis: int
    size: Dim
    out: Dim
    scale: float | None
    region: tuple[float, float] = (0.0, 1.0)
    """For tf_crop_and_resize: its begin and end, relative to the axis."""


class Sampling(NamedTuple):
    """The attributes of Resize for the sampling of an axis; names and values are ONNX's.

    The methods are for axes of fixed sizes.
    """

    mode: str = "nearest"
    coordinate_transformation_mode: str = "half_pixel"
    nearest_mode: str = "round_prefer_floor"
    cubic_coeff_a: float = -0.75
    exclude_outside: int = 0
    antialias: int = 0
    extrapolation_value: float = 0.0
    """For tf_crop_and_resize: the value beyond the ends of an axis."""

    @property
    def coordinates(self) -> str:
        """Short for `coordinate_transformation_mode`."""
        return self.coordinate_transformation_mode

    @property
    def crops(self) -> bool:
        """True if Resize samples only a region."""
        return self.coordinates == _CROPS

    @property
    def is_known(self) -> bool:
        """True if ONNX has these coordinates and this rounding."""
        return self.coordinates in (*_COORDINATES, _CROPS) and self.nearest_mode in _ROUNDING

    def _positions(self, axis: Axis) -> Array:
        """Return the position of each element of the result on the operand's axis, in float32."""
        assert axis.scale is not None
        size, out = map(_f32, known((axis.size, axis.out)))
        index = np.arange(out, dtype=np.float32)
        if not self.crops:
            return _COORDINATES[self.coordinates](index, size, out, _f32(axis.scale))
        begin, end = map(_f32, axis.region)
        if out == 1:
            return np.array([_f32(0.5) * (begin + end) * (size - _f32(1))], np.float32)
        return np.asarray(begin * (size - _f32(1)) + index * (end - begin) * (size - _f32(1)) / (out - _f32(1)))

    def inside(self, axis: Axis) -> Array:
        """Return for each element of the result whether it is between the operand's first and last element."""
        [size] = known([axis.size])
        positions = self._positions(axis)
        return (positions >= 0) & (positions <= size - 1)

    def nearest(self, axis: Axis) -> Array:
        """Return the index of the element that each element of the result reads."""
        [size] = known([axis.size])
        assert axis.scale is not None
        # In float64, where half a step is exact.
        rounded = _ROUNDING[self.nearest_mode](self._positions(axis).astype(np.float64), axis.scale < 1)
        return np.clip(rounded, 0, size - 1).astype(np.int64)

    def matrix(self, axis: Axis) -> Array:
        """Return the matrix [out, in] of weights from the operand's elements to the result's elements."""
        assert axis.scale is not None
        size, out = known((axis.size, axis.out))
        require_room(size * out, "a matrix")
        matrix = np.zeros((out, size))
        shrink = min(axis.scale, 1.0) if self.antialias else 1.0
        reach = (1 if self.mode == "linear" else 2) / shrink
        for i, centre in enumerate(self._positions(axis).astype(np.float64)):
            taps = np.arange(int(np.floor(centre - reach)) + 1, int(np.ceil(centre + reach)))
            weights = self._kernel((taps - centre) * shrink)
            if self.exclude_outside:
                inside = (taps >= 0) & (taps < size)
                taps, weights = taps[inside], weights[inside]
            np.add.at(matrix[i], np.clip(taps, 0, size - 1), weights / weights.sum())
        if self.crops:
            matrix[~self.inside(axis)] = 0
        return matrix.astype(np.float32)

    def _kernel(self, x: Array) -> Array:
        x = np.abs(x)
        if self.mode == "linear":
            return np.asarray(np.maximum(0, 1 - x))
        a = self.cubic_coeff_a
        near = (a + 2) * x**3 - (a + 3) * x**2 + 1
        far = a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
        return np.where(x <= 1, near, np.where(x < 2, far, 0))
