"""Poolings over windows and over everything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from onnx2ncnn_opt.onnx.context import ImportContext
from onnx2ncnn_opt.onnx.ops.activation import FLT_MAX
from onnx2ncnn_opt.onnx.ops.cast import as_numbers
from onnx2ncnn_opt.onnx.ops.elementwise import MAX, MUL, binary
from onnx2ncnn_opt.onnx.ops.pad_slice import crop, pad2
from onnx2ncnn_opt.onnx.ops.window import pad_params, same_pads, spatial
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Ints, Tensor, Value

_SUFFIX = {1: "1D", 2: "", 3: "3D"}
_FLOOR = 1  # pad_mode
_MOST_TAPS = 32


@onnx_op("MaxPool", batch=0, integers=True)
def max_pool(
    im: ImportContext,
    x: Tensor,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Ints = (),
    kernel_shape: Ints,
    pads: Ints = (),
    storage_order: int = 0,
    strides: Ints = (),
) -> Tensor:
    """Pooling[1D|3D] max; along an axis with dilation BinaryOp max of Crops before it."""
    x = as_numbers(im, x)
    if any(d != 1 for d in dilations):
        return _dilated_max(im, x, auto_pad, ceil_mode, dilations, kernel_shape, pads, strides)
    return _pool(im, x, 0, auto_pad, ceil_mode, kernel_shape, pads, strides, count_include_pad=True)


@onnx_op("AveragePool", since=7, batch=0)
def average_pool(
    im: ImportContext,
    x: Tensor,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Ints = (),
    kernel_shape: Ints,
    pads: Ints = (),
    strides: Ints = (),
) -> Tensor:
    """Pooling[1D|3D] avg; with dilation ConvolutionDepthWise, and BinaryOp mul by how many are in a window."""
    if any(d != 1 for d in dilations):
        include = bool(count_include_pad)
        return _dilated_average(im, x, auto_pad, ceil_mode, dilations, kernel_shape, pads, strides, include)
    return _pool(im, x, 1, auto_pad, ceil_mode, kernel_shape, pads, strides, count_include_pad=bool(count_include_pad))


def _pool(
    im: ImportContext,
    x: Tensor,
    kind: int,
    auto_pad: str,
    ceil_mode: int,
    kernel: Ints,
    pads: Ints,
    strides: Ints,
    *,
    count_include_pad: bool,
) -> Tensor:
    n = len(kernel)
    stride = strides or (1,) * n
    explicit, tail = _pads(im, x, auto_pad, ceil_mode, kernel, pads, (1,) * n, stride)
    blob = im.channels(x)
    if kind == 1 and count_include_pad and any(tail):
        # ncnn would count the tail with the pads. Zeros that are there before are counted, the tail is not.
        if any(explicit):
            zeros: dict[str, Any] = {name.removeprefix("pad_"): size for name, size in pad_params(explicit).items()}
            blob = im.layer("Padding", blob, **zeros)
        explicit, count_include_pad = (0,) * 2 * n, False
    pads = (*explicit[:n], *(end + more for end, more in zip(explicit[n:], tail, strict=True)))
    params: dict[str, Any] = spatial("kernel", kernel) | spatial("stride", stride) | pad_params(pads)
    include = int(kind == 1 and count_include_pad and any(pads))
    blob = im.layer(
        f"Pooling{_SUFFIX[n]}",
        blob,
        pooling_type=kind,
        pad_mode=_FLOOR,
        avgpool_count_include_pad=include,
        **params,
    )
    assert blob.shape is not None
    return im.wrap(blob, (x.shape[0], *blob.shape), [[axis] for axis in range(1, x.rank)], [0], x.dtype)


def _dilated_max(
    im: ImportContext,
    x: Tensor,
    auto_pad: str,
    ceil_mode: int,
    dilations: Ints,
    kernel: Ints,
    pads: Ints,
    strides: Ints,
) -> Tensor:
    """The largest of windows without gaps, of the largest of shifted Crops along each axis with gaps."""
    n = len(kernel)
    stride = strides or (1,) * n
    explicit, tail = _pads(im, x, auto_pad, ceil_mode, kernel, pads, dilations, stride)
    window, around = list(kernel), [*explicit[:n], *(e + t for e, t in zip(explicit[n:], tail, strict=True))]
    for i in range(n):
        if dilations[i] != 1 and kernel[i] != 1:
            x = _largest(im, x, i + 2, kernel[i], dilations[i], (around[i], around[n + i]))
            window[i], around[i], around[n + i] = 1, 0, 0
    return _pool(im, x, 0, "NOTSET", 0, tuple(window), tuple(around), stride, count_include_pad=True)


def _largest(im: ImportContext, x: Tensor, axis: int, taps: int, dilation: int, pads: tuple[int, int]) -> Tensor:
    if taps > _MOST_TAPS:
        raise im.refuse(f"a window of {taps} elements with gaps: more than {_MOST_TAPS} Crops")
    around = [0] * 2 * x.rank
    around[axis], around[x.rank + axis] = pads
    padded = pad2(im, x, pads=tuple(around), value=-FLT_MAX)
    assert isinstance(padded, Tensor)
    reach = (taps - 1) * dilation
    if isinstance(size := padded.shape[axis], int) and size <= reach:
        raise im.refuse(f"a window of {reach + 1} elements over an axis of {size}")
    largest: Value = crop(im, padded, axis, 0, -reach)
    for tap in range(1, taps):
        # -233: to the end.
        part = crop(im, padded, axis, tap * dilation, tap * dilation - reach or -233)
        largest = binary(im, MAX, largest, part)
    return im.tensor(largest)


def _dilated_average(
    im: ImportContext,
    x: Tensor,
    auto_pad: str,
    ceil_mode: int,
    dilations: Ints,
    kernel: Ints,
    pads: Ints,
    strides: Ints,
    include: bool,
) -> Tensor:
    """Sums over windows, divided by the number of elements in each that count."""
    n, channels = len(kernel), x.shape[1]
    stride = strides or (1,) * n
    explicit, tail = _pads(im, x, auto_pad, ceil_mode, kernel, pads, dilations, stride)
    if not isinstance(channels, int):
        raise im.refuse("dilations over channels whose number is not fixed", "bind it with --shape")
    around = (*explicit[:n], *(e + t for e, t in zip(explicit[n:], tail, strict=True)))
    even = not any(tail) and (include or not any(explicit))
    weight = np.full((channels, 1, *kernel), 1 / math.prod(kernel) if even else 1, np.float32)
    params: dict[str, Any] = spatial("kernel", kernel) | spatial("dilation", dilations) | spatial("stride", stride)
    params |= pad_params(around) | {"num_output": channels, "group": channels, "weight_data_size": weight.size}
    kind = f"ConvolutionDepthWise{_SUFFIX[n]}"
    blob = im.layer(kind, im.channels(x), weights={"weight_data": weight}, **params)
    assert blob.shape is not None
    sums = im.wrap(blob, (x.shape[0], *blob.shape), [[axis] for axis in range(1, x.rank)], [0])
    if even:
        return sums
    share = np.ones((), np.float64)
    for i in range(n):
        size, out = x.shape[i + 2], sums.shape[i + 2]
        if not isinstance(size, int) or not isinstance(out, int):
            raise im.refuse("dilations and pads over a size that is not fixed", "bind it with --shape")
        first, last = (-explicit[i], size + explicit[n + i]) if include else (0, size)
        places = np.arange(out)[:, None] * stride[i] - explicit[i] + np.arange(kernel[i]) * dilations[i]
        counts = ((places >= first) & (places < last)).sum(1)
        share = share[..., None] / counts
    return im.tensor(binary(im, MUL, sums, Constant(share)))


def _pads(
    im: ImportContext,
    x: Tensor,
    auto_pad: str,
    ceil_mode: int,
    kernel: Ints,
    pads: Ints,
    dilations: Ints,
    strides: Ints,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The explicit pads, and what `ceil_mode` adds at the ends of the axes."""
    n = len(kernel)
    if n not in _SUFFIX or x.rank != n + 2:
        raise im.refuse(f"a window of {n} dimensions over a tensor of rank {x.rank}")
    if auto_pad.startswith("SAME") and any(d != 1 for d in dilations):
        # ONNX Runtime pads as if there were no dilations.
        raise im.refuse(f"auto_pad {auto_pad} with dilations {dilations}", "export it with explicit pads")
    explicit = same_pads(im, x.shape[2:], auto_pad, pads, kernel, dilations, strides)
    if not ceil_mode or auto_pad not in ("NOTSET", ""):
        return explicit, (0,) * n
    extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    return explicit, _ceil_tail(im, x, extents, explicit, strides)


def _ceil_tail(
    im: ImportContext, x: Tensor, kernel: Sequence[int], pads: Sequence[int], strides: Sequence[int]
) -> tuple[int, ...]:
    """What to add to the end pads so that rounding down gives what ceil_mode gives.

    A window that would start in the end padding is dropped (ONNX since opset 19, and PyTorch always).
    """
    n = len(kernel)
    tail = []
    for i, size in enumerate(x.shape[2:]):
        if not isinstance(size, int):
            raise im.refuse("ceil_mode over a size that is not fixed", "bind it with --shape")
        span = size + pads[i] + pads[n + i] - kernel[i]
        count = -(-span // strides[i]) + 1
        if (count - 1) * strides[i] >= size + pads[i]:
            count -= 1
        tail.append(max(0, (count - 1) * strides[i] - span))
    return tuple(tail)


@onnx_op("GlobalAveragePool", batch=0)
def global_average_pool(im: ImportContext, x: Tensor) -> Tensor:
    """Pooling avg over everything: a 1-D Mat, one number per channel."""
    return _global(im, x, 1)


@onnx_op("GlobalMaxPool", batch=0)
def global_max_pool(im: ImportContext, x: Tensor) -> Tensor:
    """Pooling max over everything."""
    return _global(im, x, 0)


def _global(im: ImportContext, x: Tensor, kind: int) -> Tensor:
    n = x.rank - 2
    if n not in _SUFFIX:
        raise im.refuse(f"the operand has rank {x.rank}")
    blob = im.layer(f"Pooling{_SUFFIX[n]}", im.channels(x), pooling_type=kind, global_pooling=1)
    return im.wrap(blob, (x.shape[0], x.shape[1], *(1,) * n), [[1]], [0])
