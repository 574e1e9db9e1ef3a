"""Poolings over windows and over everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx2ncnn_opt.onnx.importer import ImportContext
from onnx2ncnn_opt.onnx.ops.window import pad_params, same_pads, spatial
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Ints, Tensor

_SUFFIX = {1: "1D", 2: "", 3: "3D"}
_FLOOR = 1  # pad_mode


@onnx_op("MaxPool", batch=0)
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
    """Pooling[1D|3D] max."""
    if any(d != 1 for d in dilations):
        raise im.refuse(f"dilations {dilations}: ncnn's windows have no gaps")
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
    """Pooling[1D|3D] avg."""
    if any(d != 1 for d in dilations):
        raise im.refuse(f"dilations {dilations}: ncnn's windows have no gaps")
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
    if n not in _SUFFIX or x.rank != n + 2:
        raise im.refuse(f"a window of {n} dimensions over a tensor of rank {x.rank}")
    stride = strides or (1,) * n
    explicit = same_pads(im, x.shape[2:], auto_pad, pads, kernel, (1,) * n, stride)
    tail = _ceil_tail(im, x, kernel, explicit, stride) if ceil_mode and auto_pad in ("NOTSET", "") else (0,) * n
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
    return im.wrap(blob, (x.shape[0], *blob.shape), [[axis] for axis in range(1, x.rank)], [0])


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
