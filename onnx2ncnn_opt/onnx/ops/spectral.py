"""Fourier transforms of a known length as products with a constant matrix, and window functions."""

import math

import numpy as np
import onnx_ir

from onnx2ncnn_opt.ir.dim import product
from onnx2ncnn_opt.ir.permute import inverted
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.matmul import linear
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Ints, Tensor, Value

_MOST_NUMBERS = 2**24  # of a constant matrix
_FLOAT = 1


@onnx_op("DFT", since=17)
def dft17(
    im: ImportContext, x: Tensor, length: Ints | None = None, *, axis: int = 1, inverse: int = 0, onesided: int = 0
) -> Value:
    """InnerProduct or Gemm with sines and cosines."""
    return dft20(im, x, length, (axis,), inverse=inverse, onesided=onesided)


@onnx_op("DFT", since=20)
def dft20(
    im: ImportContext,
    x: Tensor,
    length: Ints | None = None,
    axis: Ints | None = None,
    *,
    inverse: int = 0,
    onesided: int = 0,
) -> Value:
    """InnerProduct or Gemm with sines and cosines."""
    along = im.axis(axis[0] if axis else -2, x.rank)
    size, parts = x.shape[along], x.shape[-1]
    if along == x.rank - 1 or not isinstance(size, int) or not isinstance(parts, int) or parts not in (1, 2):
        reason = f"axis {along} of shape {list(x.shape)}, whose last axis must be the one of complex numbers"
        raise im.refuse(reason, "bind its sizes with --shape, and keep the complex numbers on the last axis")
    to_real = bool(inverse and onesided)
    count = length[0] if length else 2 * (size - 1) if to_real else size
    if count < 1:
        raise im.invalid(f"a length of {count}")
    # [results, re and im, operands, re and im]; operands beyond the length have weight 0.
    if to_real:
        if parts != 2 or size != count // 2 + 1:
            reason = f"{count} real numbers from a spectrum of shape {list(x.shape)}, which is not padded or cut"
            raise im.refuse(reason, f"give it {count // 2 + 1} complex numbers")
        matrix = _from_half(im, count)
    else:
        matrix = _fourier(im, count, min(size, count), onesided, -1 if inverse else 1) / (count if inverse else 1)
    weight = np.zeros((*matrix.shape[:2], size, parts))
    weight[:, :, : matrix.shape[2]] = matrix[..., :parts]
    outer = [a for a in range(x.rank - 1) if a != along]
    order = (*outer, along, x.rank - 1)
    shape = tuple(x.shape[a] for a in outer)
    rows = im.reshape(x.transpose(order), (product(shape), size * parts))
    spectrum = linear(im, im.tensor(rows), weight.reshape(-1, size * parts).astype(np.float32))
    split = im.tensor(im.reshape(spectrum, (*shape, *weight.shape[:2])))
    return split.transpose(inverted(order))


def _fourier(im: ImportContext, count: int, samples: int, onesided: int, sign: int) -> Array:
    """Return the factors of real and imaginary samples for each frequency: [frequencies, 2, samples, 2]."""
    frequencies = count // 2 + 1 if onesided else count
    if frequencies * samples * 4 > _MOST_NUMBERS:
        reason = f"a transform of length {count} would be a matrix of {frequencies * samples * 4} numbers"
        raise im.refuse(reason, "transform shorter signals")
    # Reduce whole turns in integers, because large angles lose precision.
    turns = np.outer(np.arange(frequencies), np.arange(samples)) % count
    angle = 2 * np.pi * turns / count
    cos, sin = np.cos(angle), sign * np.sin(angle)
    return np.stack([np.stack([cos, sin], axis=-1), np.stack([-sin, cos], axis=-1)], axis=1)


def _from_half(im: ImportContext, count: int) -> Array:
    """Return the factors of the first half of a spectrum for real samples: [samples, 1, frequencies, 2]."""
    half = count // 2 + 1
    # The other half mirrors the first one, without frequency 0 and the middle one.
    times = np.array([1 if 2 * k in (0, count) else 2 for k in range(half)])
    return np.asarray(_fourier(im, count, half, 0, -1)[:, :1] * times[:, None] / count)


@onnx_op("STFT", since=17)
def stft(
    im: ImportContext,
    signal: Tensor,
    frame_step: Ints,
    window: Array | None = None,
    frame_length: Ints | None = None,
    *,
    onesided: int = 1,
) -> Value:
    """Convolution1D with sines and cosines times the window."""
    if window is None and frame_length is None:
        raise im.refuse("neither a window nor a frame_length", "give it a frame_length")
    count = frame_length[0] if frame_length else len(window) if window is not None else 0
    parts = signal.shape[2] if signal.rank == 3 else 1
    fits = window is None or len(window) == count
    if not isinstance(parts, int) or parts not in (1, 2) or signal.rank not in (2, 3) or not fits:
        raise im.invalid(f"a signal of shape {list(signal.shape)} in frames of {count}")
    weight = _fourier(im, count, count, onesided, 1)[..., :parts]
    if window is not None:
        weight = weight * window.reshape(-1, 1)
    kernels = weight.swapaxes(2, 3).reshape(-1, parts, count).astype(np.float32)
    wave = im.mat(signal, [[2] if signal.rank == 3 else [], [1]], [0])
    params = {"kernel_w": count, "stride_w": frame_step[0], "weight_data_size": kernels.size}
    blob = im.layer("Convolution1D", wave, weights={"weight_data": kernels}, num_output=len(kernels), **params)
    shape = (signal.shape[0], len(weight), 2, blob.known_shape[1])
    return im.wrap(blob, shape, [[1, 2], [3]], [0], signal.dtype).transpose((0, 3, 1, 2))


# The coefficients of each window, a sum of cosines of whole multiples of the angle.
_WINDOWS = {"HannWindow": (0.5, -0.5), "HammingWindow": (25 / 46, -21 / 46), "BlackmanWindow": (0.42, -0.5, 0.08)}


def _register(name: str, terms: tuple[float, ...]) -> None:
    def window(im: ImportContext, size: Ints, *, output_datatype: int = _FLOAT, periodic: int = 1) -> Constant:
        count = size[0]
        if not 1 <= count <= _MOST_NUMBERS:
            raise im.refuse(f"a size of {count}", "use a window of 1 to 2**24 elements")
        angle = 2 * math.pi * np.arange(count) / (count if periodic else max(count - 1, 1))
        numbers = np.sum([term * np.cos(i * angle) for i, term in enumerate(terms)], axis=0)
        return Constant(numbers.astype(onnx_ir.DataType(output_datatype).numpy()))

    window.__doc__ = "A constant."
    onnx_op(name, since=17)(window)


for _name, _terms in _WINDOWS.items():
    _register(_name, _terms)
