"""Poolings over windows, and global poolings."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, PadMode
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import binary
from onnx2ncnn_opt.onnx.lower.functional.cast import FLT_MAX, as_numbers
from onnx2ncnn_opt.onnx.lower.functional.crop import TO_END, crop
from onnx2ncnn_opt.onnx.lower.functional.infinity import are_infinities_tested, at_quarter_scale
from onnx2ncnn_opt.onnx.lower.functional.pad import pad
from onnx2ncnn_opt.onnx.lower.functional.window import SUFFIX, PoolAttributes, pad_params, same_pads, window_params
from onnx2ncnn_opt.onnx.value import Constant, Ints, Tensor

_MOST_TAPS = 32


def max_pool(
    im: ImportContext, x: Tensor, *, attrs: PoolAttributes, dilations: Ints = (), storage_order: int = 0
) -> Tensor:
    """Pooling[1D|3D] max; for each dilated axis, BinaryOp max of Crops before it."""
    x = as_numbers(im, x)
    window = _window(im, x, attrs, dilations)

    def largest(x: Tensor) -> Tensor:
        return _dilated_max(im, x, window) if window.has_gaps else _pool(im, x, 0, window, count_include_pad=True)

    return at_quarter_scale(im, x, largest) if im.range_of(x).may_be_inf and are_infinities_tested(im) else largest(x)


def average_pool(
    im: ImportContext, x: Tensor, *, attrs: PoolAttributes, count_include_pad: int = 0, dilations: Ints = ()
) -> Tensor:
    """Pooling[1D|3D] avg; with dilation, ConvolutionDepthWise, and BinaryOp mul if the windows' counts differ."""
    # The average over SAME pads counts their zeros in ncnn.
    window = _window(im, x, attrs, dilations, explicit=not count_include_pad)
    if window.has_gaps:
        return _dilated_average(im, x, window, bool(count_include_pad))
    return _pool(im, x, 1, window, count_include_pad=bool(count_include_pad))


class _PoolWindow(NamedTuple):
    """The size and the movement of a window."""

    kernel: Ints
    dilations: Ints
    strides: Ints
    pads: Ints
    tail: Ints  # the extra padding of `ceil_mode` at the ends of the axes
    mode: PadMode = PadMode.VALID  # with others ncnn adds tail or pads itself, as the sizes are dynamic

    @property
    def has_gaps(self) -> bool:
        return any(d != 1 for d in self.dilations)

    @property
    def around(self) -> Ints:
        """The pads with the tail."""
        n = len(self.kernel)
        return (*self.pads[:n], *(end + more for end, more in zip(self.pads[n:], self.tail, strict=True)))


def _window(
    im: ImportContext, x: Tensor, attrs: PoolAttributes, dilations: Ints, *, explicit: bool = False
) -> _PoolWindow:
    kernel, auto_pad = attrs.kernel_shape, attrs.auto_pad
    n = len(kernel)
    dilations, strides = dilations or (1,) * n, attrs.strides or (1,) * n
    if n not in SUFFIX or x.rank != n + 2:
        raise im.invalid(f"a window of {n} dimensions over a tensor of rank {x.rank}: ncnn pools 1 to 3 dimensions")
    for values in (kernel, dilations, strides):
        if len(values) != n or min(values) < 1:
            raise im.invalid(f"its attributes do not give one positive number for each of {n} dimensions")
    if auto_pad.startswith("SAME") and any(d != 1 for d in dilations):
        # ONNX Runtime ignores the dilations when it computes the pads.
        raise im.refuse(f"auto_pad {auto_pad} with dilations {dilations}", "export it with explicit pads")
    pads = same_pads(im, x, attrs, kernel, dilations, strides, explicit=explicit)
    window = _PoolWindow(kernel, dilations, strides, pads, (0,) * n)
    if min(pads) < 0:
        return window._replace(pads=(0,) * 2 * n, mode=PadMode[auto_pad])
    if not attrs.ceil_mode or auto_pad not in ("NOTSET", ""):
        return window
    sizes = [size for size in x.shape[2:] if isinstance(size, int)]
    return _rounded_up(im, x, window) if len(sizes) < n else window._replace(tail=_ceil_tail(sizes, window))


def _pool(im: ImportContext, x: Tensor, kind: int, window: _PoolWindow, *, count_include_pad: bool) -> Tensor:
    blob, around = im.channels(x), window.around
    if kind == 1 and count_include_pad and (any(window.tail) or window.mode == PadMode.FULL):
        # Pad with zeros before the layer, because ncnn would count the tail with its own pads.
        if any(window.pads):
            zeros: dict[str, Any] = {name.removeprefix("pad_"): size for name, size in pad_params(window.pads).items()}
            blob = im.layer("Padding", blob, **zeros)
        around, count_include_pad = (0,) * len(window.tail) + window.tail, False
    params = window_params(window.kernel, window.strides, around)
    params |= {"avgpool_count_include_pad": int(kind == 1 and count_include_pad and any(around))}
    layer = f"Pooling{SUFFIX[len(window.kernel)]}"
    return im.from_channels(x, im.layer(layer, blob, pooling_type=kind, pad_mode=window.mode, **params), x.dtype)


def _dilated_max(im: ImportContext, x: Tensor, window: _PoolWindow) -> Tensor:
    """Take the maximum of shifted Crops along each dilated axis, then pool the other axes."""
    n = len(window.kernel)
    kernel, around = list(window.kernel), list(window.around)
    for i, dilation in enumerate(window.dilations):
        if dilation != 1 and kernel[i] != 1:
            x = _largest(im, x, i + 2, kernel[i], dilation, (around[i], around[n + i]))
            kernel[i], around[i], around[n + i] = 1, 0, 0
    rest = _PoolWindow(tuple(kernel), (1,) * n, window.strides, tuple(around), (0,) * n)
    return _pool(im, x, 0, rest, count_include_pad=True)


def _largest(im: ImportContext, x: Tensor, axis: int, taps: int, dilation: int, pads: tuple[int, int]) -> Tensor:
    if taps > _MOST_TAPS:
        reason = f"a dilated window of {taps} elements: more than {_MOST_TAPS} Crops"
        raise im.refuse(reason, "use a smaller window or no dilation")
    padded = pad(im, x, pads=pads, value=-FLT_MAX, axes=(axis,))
    reach = (taps - 1) * dilation
    if isinstance(size := padded.shape[axis], int) and size <= reach:
        reason = f"a window of {reach + 1} elements over an axis of {size}"
        raise im.refuse(reason, "use a smaller window, or a larger --shape")
    largest = crop(im, padded, axis, 0, -reach)
    for start in range(dilation, reach + 1, dilation):
        largest = binary(im, BinaryOp.MAX, largest, crop(im, padded, axis, start, start - reach or TO_END))
    return largest


def _dilated_average(im: ImportContext, x: Tensor, window: _PoolWindow, include: bool) -> Tensor:
    """Sum over windows, and divide by the number of counted elements in each."""
    kernel, pads, n = window.kernel, window.pads, len(window.kernel)
    [channels] = im.fixed(x.shape[1:2], "dilations over a dynamic number of channels")
    even = not any(window.tail) and (include or not any(pads))
    weight = np.full((channels, 1, *kernel), 1 / math.prod(kernel) if even else 1, np.float32)
    params = window_params(kernel, window.strides, window.around, window.dilations)
    params |= {"num_output": channels, "group": channels, "weight_data_size": weight.size}
    blob = im.layer(f"ConvolutionDepthWise{SUFFIX[n]}", im.channels(x), weights={"weight_data": weight}, **params)
    sums = im.from_channels(x, blob)
    if even:
        return sums
    share = np.ones((), np.float64)
    for i, sizes in enumerate(zip(x.shape[2:], sums.shape[2:], strict=True)):
        size, out = im.fixed(sizes, "dilations and pads over a dynamic dimension")
        first, last = (-pads[i], size + pads[n + i]) if include else (0, size)
        taps = np.arange(out)[:, None] * window.strides[i] - pads[i] + np.arange(kernel[i]) * window.dilations[i]
        share = share[..., None] / ((taps >= first) & (taps < last)).sum(1)
    return binary(im, BinaryOp.MUL, sums, Constant(share))


def _rounded_up(im: ImportContext, x: Tensor, window: _PoolWindow) -> _PoolWindow:
    """Let ncnn round up the number of windows; raise Refusal if it keeps windows that `ceil_mode` drops."""
    n = len(window.kernel)
    if window.has_gaps:
        raise im.refuse("ceil_mode and dilations over a dynamic dimension", "bind it with --shape")
    for i, (kernel, stride) in enumerate(zip(window.kernel, window.strides, strict=True)):
        if stride > kernel - window.pads[n + i]:  # a window may start in the end padding: 2 by 2 with pads of 1
            reason = f"ceil_mode over a dynamic dimension, for windows of {kernel} with strides of {stride}"
            raise im.refuse(reason, "bind it with --shape")
        im.demand(x.shape[i + 2], kernel - window.pads[i] - window.pads[n + i])
    return window._replace(mode=PadMode.FULL)


def _ceil_tail(sizes: Sequence[int], window: _PoolWindow) -> Ints:
    """Return the extra end pads for which rounding down gives the result of ceil_mode."""
    tail = []
    for i, (size, stride, begin) in enumerate(zip(sizes, window.strides, window.pads, strict=False)):
        span = size + begin + window.pads[len(sizes) + i] - (window.kernel[i] - 1) * window.dilations[i] - 1
        last = -(-span // stride) * stride
        if last >= size + begin:  # in the end padding: ONNX since opset 19, and PyTorch, drop it
            last -= stride
        tail.append(max(0, last - span))
    return tuple(tail)


def global_average_pool(im: ImportContext, x: Tensor) -> Tensor:
    """Pooling avg over each channel: a 1-D Mat, one number per channel."""
    return global_pool(im, x, 1)


def global_pool(im: ImportContext, x: Tensor, kind: int) -> Tensor:
    """Pooling over each channel; `kind` is ncnn's pooling_type."""
    n = x.rank - 2
    if n not in SUFFIX:
        hint = "reshape it in the model: ncnn takes images and, for some layers, rows and volumes"
        raise im.refuse(f"the operand has rank {x.rank}", hint)
    blob = im.layer(f"Pooling{SUFFIX[n]}", im.channels(x), pooling_type=kind, global_pooling=1)
    return im.wrap(blob, (x.shape[0], x.shape[1], *(1,) * n), [[1]], [0])
